"""The setup of a development environment, on a plain Python:
`scripts/setup_cuda_dev_environment.sh`
and `scripts/run_tests.sh` find one and run it.

`plan` looks at the machine and decides, `environment` installs by uv (or pip), `indexes` gives uv
pip's settings, `activation` writes .flexops/env.sh, `state` remembers what was made, `terminal`
prints. `__main__` has the options and the order of the steps.
"""
