"""User-defined kernels, as device code in a string: ``flexops.kernel`` (docs/kernels.md).

signature.py    a source's kernels: names, template parameters, parameters
binding.py      the argument or result that each parameter receives, and the Python that packs them
launch.py       the packed launch: one buffer per thread, one call of the driver
definition.py   the operator: registration with torch, compiling, errors
"""
