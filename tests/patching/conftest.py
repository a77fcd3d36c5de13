"""Everything here is about transformers' models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _needs(transformers_models: None) -> None:
    pass


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tensors that are too small to share."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
