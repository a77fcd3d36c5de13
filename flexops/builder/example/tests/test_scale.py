import mylib

from flexops.testing import Case, Contract


class TestScale(Contract):
    cases = (
        Case(
            "scale",
            "mylib.scale",
            mylib.scale,
            inputs=lambda make, shape: (make(*shape), 0.3),
            oracle=lambda x, factor: x * factor,
            names=("x",),
            differentiable=(0,),
        ),
    )
