"""The contract of ``flexops.testing``, by the name that the tests here have for it."""

import sys

import flexops.testing.contract

sys.modules[__name__] = flexops.testing.contract
