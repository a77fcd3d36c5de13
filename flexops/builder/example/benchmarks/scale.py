"""flexops bench run benchmarks/scale.py"""

import mylib

from flexops.bench import case


def cases(setup):
    x = setup.randn(setup.rows(16384), 8192)
    yield case(
        f"scale {list(x.shape)}",
        {"mylib": lambda: mylib.scale(x, 0.3), "torch": lambda: x * 0.3},
        bytes=2 * x.nbytes,
    )
