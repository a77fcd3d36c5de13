"""User-defined kernels, as device code in a string: ``flexops.kernel`` (docs/kernels.md).

definition.py   ``flexops.kernel`` itself: from source, schema and options to an operator
schema.py       the operator's arguments and results
options.py      the options of one kernel, of steps and of candidates
signature.py    a source's kernels: names, template parameters, parameters
binding.py      the argument or result that each parameter receives
call_text.py    the Python of a call: it checks, makes the results, packs the parameters, launches
code.py         what calls need: compiling, checks, errors
launch.py       the packed launch: one buffer per thread, one call of the driver
tuning.py       which candidate serves a call
registration.py the operator of torch: dispatcher, fake tensors, autograd
"""
