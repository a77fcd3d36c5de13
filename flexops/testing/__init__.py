"""For the tests of operators that are built with flexops: ``Contract`` has them, a test file only
names cases. Needs pytest."""

import pytest

for _module in (
    "comparing",
    "contract",
    "cuda",
    "gradients",
    "isa",
    "kernel_check",
    "machinery",
    "refusals",
    "results",
):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from .case import Case as Case  # noqa: E402
from .case import Make as Make  # noqa: E402
from .case import Refusal as Refusal  # noqa: E402
from .contract import Contract as Contract  # noqa: E402
from .emulator import EmulationError as EmulationError  # noqa: E402
from .emulator import emulate as emulate  # noqa: E402
from .kernel_check import check_kernel as check_kernel  # noqa: E402
