"""Experts of a mixture in 4-bit checkpoints: which layers of a checkpoint are the parts of a
module's weights, and what holds their tensors until all are read.

transformers merges the layers of single experts into one tensor of all by the conversions of an
architecture. The same conversions give the names here. An architecture whose 16-bit checkpoints
have such tensors (gpt-oss) has no names for single experts: flexops writes its own, ``gate_up`` and
``down``, each a layer of all experts' rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from ..nn import Int4Experts
from ..nn.expert_parts import flag
from ..nn.experts import matrices, why_not
from ..ops.int4_linear import GROUP_SIZES


class Product(NamedTuple):
    """One weight of a module of experts.

    Attributes:
        layers: names of layers, whose rows one behind the other are the weight.
        rows, columns: of each layer.
    """

    layers: list[str]
    rows: int
    columns: int


class Places(NamedTuple):
    """The layers of a module of experts in a checkpoint; ``fused``: they have names of flexops."""

    gate_up: Product
    down: Product
    fused: bool


def places(model: Any) -> dict[str, list[Places]]:
    """For each module of experts that has, or may have, weights of 4 bits, by its name: the layers
    that a checkpoint may have, first those that flexops writes."""
    converters: list[Any] | None = None
    found = {}
    for path, module in model.named_modules():
        sizes = _sizes(module)
        if sizes is None:
            continue
        if converters is None:
            converters = list(filter(_merges, get_model_conversion_mapping(model)))
        found[path] = list(_places(path, converters, *sizes))
    return found


def _sizes(module: Any) -> tuple[int, bool, tuple[int, int], tuple[int, int]] | None:
    """How many experts, whether they have gates, and the rows and columns of each; None: it is no
    such module."""
    if isinstance(module, Int4Experts):
        count = module.num_experts
        first, last = ((one.n // count, one.k) for one in (module.gate_up, module.down))
        return count, module.has_gate, first, last
    if why_not(module, min(GROUP_SIZES)):
        return None
    first, last = ((one.shape[1], one.shape[2]) for one in matrices(module))
    return len(module.down_proj), flag(module, "has_gate"), first, last


def _places(
    path: str, converters: list[Any], count: int, gated: bool, *sizes: tuple[int, int]
) -> Iterator[Places]:
    stems = [
        _stems(converters, f"{path}.{name}")
        for name in ("gate_up_proj" if gated else "up_proj", "down_proj")
    ]
    if all(each and all(one.startswith(f"{path}.") for one in each) for each in stems):
        first, last = (
            Product(
                [one.replace("*", str(expert)) for expert in range(count) for one in each],
                rows // len(each),
                columns,
            )
            for each, (rows, columns) in zip(stems, sizes, strict=True)
        )
        yield Places(first, last, fused=False)
    first, last = (
        Product([f"{path}.{name}"], count * rows, columns)
        for name, (rows, columns) in zip(("gate_up", "down"), sizes, strict=True)
    )
    yield Places(first, last, fused=True)


def _merges(conversion: Any) -> bool:
    """Whether it stacks matrices of experts, and joins gates and ups."""
    if not isinstance(conversion, WeightConverter):
        return False
    steps = [(type(one), getattr(one, "dim", None)) for one in conversion.operations]
    stack, join = (MergeModulelist, 0), (Concatenate, 1)
    return steps == [stack, join][: len(steps)] and len(conversion.target_patterns) == 1


def _stems(converters: list[Any], parameter: str) -> list[str]:
    """The layers that are merged into a parameter, with ``*`` for the number of an expert."""
    for one in converters:
        reverse = one.reverse_transform()
        name, pattern = reverse.rename_source_key(parameter)
        if pattern is None:
            continue
        targets = reverse.target_patterns
        names = [name.replace(targets[0], target) for target in targets]
        if all(name.count("*") == 1 and name.endswith(".weight") for name in names):
            return [name.removesuffix(".weight") for name in names]
    return []


def anchored(conversions: list[Any]) -> list[Any]:
    """Conversions of which those of experts match ``.weight`` only, not ``.weight_packed``."""
    made = []
    for one in conversions:
        if _merges(one):
            sources = [f"{name.removesuffix('$')}$" for name in one.source_patterns]
            other = WeightConverter(sources, list(one.target_patterns), one.operations)
            other.scope_prefix, other.base_model_prefix = one.scope_prefix, one.base_model_prefix
            one = other
        made.append(one)
    return made


def put(root: nn.Module, name: str, module: nn.Module) -> None:
    """A module below ``root``, and those on the way."""
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    root.add_module(name.rpartition(".")[2], module)
