"""Wrong arguments are rejected by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from .case import Case, Make, argument_name, is_float, only, tensors_of
from .layouts import not_dense
from .running import recorded


class Refusals:
    @only(lambda case: case.names)
    def test_refuses_other_dtypes_by_name(self, case: Case, device: str) -> None:
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        for position, arg in enumerate(args):
            if not is_float(arg):
                continue
            name = argument_name(case, position)
            for wrong in (*(arg.to(dtype) for dtype in case.refused), "a string"):
                with pytest.raises(TypeError, match=rf"^\w+\.[\w.]+: {re.escape(name)}\b.* must"):
                    case.call(*args[:position], wrong, *args[position + 1 :])

    def test_refuses_tensors_elsewhere_by_name(self, case: Case, device: str) -> None:
        """Each alone: a kernel would take the address of a missing tensor, and a fake kernel
        would compute nothing."""
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        positions = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
        for position in positions if len(positions) > 1 else ():
            for elsewhere in other_devices(device):
                wrong = [arg.to(elsewhere) if i == position else arg for i, arg in enumerate(args)]
                with pytest.raises(ValueError, match=r"must be on .*device.*, got ") as caught:
                    case.call(*wrong)
                assert re.search(
                    rf"\b{argument_name(case, position)}\b" if case.names else r"\w+\[0\]",
                    str(caught.value),
                ), (elsewhere, str(caught.value))
        for op, args, kwargs in recorded(case, device):  # backward ones, too
            tensors = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
            # on a GPU, where the first one is chooses the kernel
            for position in tensors[device == "cuda" :]:
                for elsewhere in other_devices(device) if len(tensors_of(args)) > 1 else ():
                    wrong = [
                        arg.detach().to(elsewhere) if i == position else arg
                        for i, arg in enumerate(args)
                    ]
                    with (
                        pytest.raises((ValueError, RuntimeError), match=" must be "),
                        torch.no_grad(),
                    ):
                        op(*wrong, **kwargs)

    @pytest.mark.filterwarnings("ignore")  # that such layouts are experimental
    def test_refuses_what_is_not_dense_by_name(self, case: Case, device: str) -> None:
        args = case.inputs(Make(case.dtypes[0], device), case.shapes[0])
        for position, arg in enumerate(args):
            for wrong in not_dense(arg) if isinstance(arg, Tensor) and arg.dim() else ():
                with pytest.raises(TypeError, match=" must be ") as caught:
                    case.call(*args[:position], wrong, *args[position + 1 :])
                text = str(caught.value)
                assert re.match(
                    (
                        rf"\w+\.\w+: {argument_name(case, position)}(\[\d\])? must be "
                        if case.names
                        else r"\w+(::|\.)\w+: \w+\[0\] must be "
                    ),
                    text,
                ), text

    @only(lambda case: case.refusals)
    def test_refuses_wrong_calls_by_name(self, case: Case) -> None:
        for call, error, message in case.refusals:
            with pytest.raises(error, match=message):
                call()


def other_devices(device: str) -> list[str]:
    others = (
        ["meta"]
        if device == "cpu"
        else ["meta", "cpu", *(["cuda:1"] if torch.cuda.device_count() > 1 else [])]
    )
    return others + (["cuda"] if device == "cpu" and torch.cuda.is_available() else [])
