"""What the tests here take of ``flexops.testing``, in one place."""

from flexops.testing import Case, Contract, Make, Refusal
from flexops.testing.case import Args, Shape, tensors_of
from flexops.testing.comparing import ROUNDING, assert_near
from flexops.testing.isa import ISA_LEVELS, at_each_isa, isa_limit
from flexops.testing.refusals import other_devices
from flexops.testing.running import Recorder, opchecks, run

__all__ = (
    "ISA_LEVELS",
    "ROUNDING",
    "Args",
    "Case",
    "Contract",
    "Make",
    "Recorder",
    "Refusal",
    "Shape",
    "assert_near",
    "at_each_isa",
    "isa_limit",
    "opchecks",
    "other_devices",
    "run",
    "tensors_of",
)
