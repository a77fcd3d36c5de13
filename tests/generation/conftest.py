"""Everything here is about transformers' models."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _needs(transformers_models: None) -> None:
    pass
