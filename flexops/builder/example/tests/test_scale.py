import mylib

from flexops.testing import Case, Contract


def inputs(make, shape):
    return make(*shape), 0.3


class TestScale(Contract):
    cases = (
        Case(
            "scale",
            "mylib.scale",
            mylib.scale,
            inputs,
            oracle=lambda x, factor: x * factor,
            names=("x",),
            differentiable=(0,),
        ),
    )
