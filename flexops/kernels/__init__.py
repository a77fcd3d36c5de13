"""Kernels of anybody's own, as device code in a string: ``flexops.kernel`` (docs/kernels.md).

signature.py    what a source text says of its kernels: names, template parameters, parameters
binding.py      which of an operator's arguments and results each parameter gets, and the Python that packs them
launch.py       the packed launch: one buffer a thread, one call of the driver
definition.py   the operator: registration with torch, compiling, errors
"""
