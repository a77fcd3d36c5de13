"""A project's operators as they are declared: what is rejected, and gradients. Compiles nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

from flexops.build.describe.declaration import Output
from flexops.builder import Library
from flexops.errors import FlexopsError

_numbers = itertools.count()


@pytest.fixture
def library(tmp_path):
    return Library(f"unit_library_{next(_numbers)}", root=tmp_path)


@pytest.mark.parametrize("name", [None, "lambda", "é", "aten", "1a", ""])
def test_a_name_that_no_library_can_have(name, tmp_path):
    with pytest.raises(FlexopsError, match="no library can be called"):
        Library(name, root=tmp_path)


@pytest.mark.parametrize("family", [None, 3, "é", "../x", "a b", ""])
def test_a_family_that_no_folder_can_be(library, family):
    with pytest.raises(FlexopsError, match="no family can be called"):
        library.op("f(Tensor x) -> Tensor", family=family)


def test_what_is_no_reference_or_gradient(library):
    with pytest.raises(FlexopsError, match="is 3"):
        library.op("f(Tensor x) -> Tensor", family="f")(3)
    twice = library.op("twice(Tensor x) -> Tensor", family="f")(lambda x: 2 * x)
    with pytest.raises(FlexopsError, match="cannot be 3"):
        twice.backward(3)
    with pytest.raises(FlexopsError, match="saves='x'"):
        twice.backward(lambda _, grad: grad, saves="x")
    with pytest.raises(FlexopsError, match=r"(?s)takes other arguments.*required: \(ctx, grad\)"):
        twice.backward(lambda ctx: ctx)
    for hook in ("check", "fake", "self_check"):
        with pytest.raises(FlexopsError, match=r"of unit_library_\d+.twice cannot be 3"):
            getattr(twice, hook)(3)
    with pytest.raises(TypeError, match=r"^unit_library_\d+.twice: got an unexpected .* 'factor'"):
        twice(torch.ones(2), factor=2.0)


def test_a_root_that_is_no_path():
    with pytest.raises(FlexopsError, match="fix: root=__file__"):
        Library("unit_library_root", root=3)


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
def test_a_gradient_may_be_a_list_and_errors_name_the_operator(library):
    twice = library.op("twice(Tensor x, float f) -> Tensor", family="f")(lambda x, f: x * f)
    x = torch.ones(3, requires_grad=True)
    twice.backward(lambda ctx, grad: [grad * ctx.f])
    assert torch.autograd.grad(twice(x, 2.0).sum(), x)[0].tolist() == [2.0] * 3
    many = library.op("many(Tensor x) -> Tensor", family="f")(lambda x: x * 1)
    many.backward(lambda _, grad: (grad, grad, grad))
    with pytest.raises(RuntimeError, match="manyBackward returned an incorrect number"):
        many(x).sum().backward()


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
def test_a_dtype_of_torchs_and_what_a_writing_reference_returns(library):
    declare = library.op("wide(Tensor x) -> Tensor", family="f", outputs=Output("x", torch.float32))
    assert declare(lambda x: x.float())(torch.ones(2).half()).dtype == torch.float32
    double = library.op("double_(Tensor(a!) x) -> ()", family="f")(lambda x: x.mul_(2))
    x = torch.ones(2)
    assert double(x) is None
    assert x.tolist() == [2.0, 2.0]
