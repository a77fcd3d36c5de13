"""For the tests of operators that are built with flexops: ``Contract`` has them, a test file only names cases. Needs pytest."""

import pytest

pytest.register_assert_rewrite("flexops.testing.contract")

from .contract import Case as Case  # noqa: E402
from .contract import Contract as Contract  # noqa: E402
from .contract import Make as Make  # noqa: E402
from .contract import Refusal as Refusal  # noqa: E402
