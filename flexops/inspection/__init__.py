"""What kernels take of a GPU, and what an edit changed: ``flexops inspect`` and ``flexops target
prove`` (docs/inspecting.md).

    measuring.py    a family's kernels compiled, with what ptxas reports of each
    cubin.py        reads what a cubin says of its kernel's launch bounds
    occupancy.py    how many warps of a kernel a multiprocessor holds
    mix.py          instructions by kind, of PTX and of a disassembler's listing
    baseline.py     resources as they are committed, and what is worse than that
"""
