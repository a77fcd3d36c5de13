"""Causal convolutions and recurrences inside of transformers' linear-attention and state-space
layers: the class's own ``forward``, with other functions under the names that it calls."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..generation.state import behind_the_prompt
from ..nn.linears import DTYPES
from ..ops import state_scan
from ..ops.causal_conv1d import MOST_TAPS, causal_conv1d
from ..ops.causal_conv1d import causal_conv1d_update as update
from ..ops.state_chunks import has_gradients, is_chunked
from . import delta_net
from .forwards import rebind
from .probe import Swap, difference, own_class

Function = Callable[..., Any]


def _needs_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(one, Tensor) and one.requires_grad for one in tensors
    )


def _reference_of(function: Any) -> Any:
    """transformers' own of a function for which another package's, or one of the Hub, may run."""
    if isinstance(function, nn.Module):  # so kernels wraps functions
        cells = getattr(type(function).forward, "__closure__", None) or ()
        function = next((one.cell_contents for one in cells), function)
    return inspect.unwrap(function)


@functools.cache
def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: one for name, one in arguments.items() if one is not None}


# ---- what stands in the place of transformers' functions; what it does not support goes to the
# ---- original one


def _is_supported(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    return (
        x.dtype in DTYPES
        and weight.dtype in DTYPES
        and weight.shape[-1] <= MOST_TAPS
        and activation in (None, "silu", "swish")
    )


def _packed(kwargs: dict[str, Any], x: Tensor, length: int) -> Tensor | None:
    """``[batch, length]``: which sequence each step belongs to, where several are packed one behind
    the other, as transformers' collators say it in either way. transformers' own functions do not
    look at it, or raise."""
    packed: Tensor | None = kwargs.get("seq_idx")
    begins = kwargs.get("cu_seq_lens_q", kwargs.get("cu_seqlens"))
    if packed is None and begins is not None and x.shape[0] == 1:
        steps = torch.arange(length, dtype=torch.int32, device=x.device)
        ends = begins[1:].to(x.device, torch.int32)
        packed = torch.bucketize(steps, ends, right=True, out_int32=True).unsqueeze(0)
    return packed


def convolution(original: Function) -> Function:
    """``causal_conv1d_fn``."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        supported = _is_supported(hidden_states, weight, activation)
        packed = _packed(kwargs, hidden_states, hidden_states.shape[2])
        behind = packed is not None and packed.shape[1] != hidden_states.shape[2]  # a state
        if behind or kwargs.get("initial_states") is not None or not supported:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        return causal_conv1d(hidden_states, weight, bias, activation=activation, seq_idx=packed)

    return causal_conv1d_fn


def convolution_step(original: Function) -> Function:
    """``causal_conv1d_update``."""

    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        supported = _is_supported(hidden_states, weight, activation)
        gradient = _needs_gradient(hidden_states)
        if not supported or conv_state.dtype != hidden_states.dtype or gradient:
            return original(hidden_states, conv_state, weight, bias, activation)
        return update(hidden_states, conv_state, weight, bias, activation)

    return causal_conv1d_update


def _computes(
    rows: Tensor, values: Tensor, delta: bool, gradient: bool, packed: Tensor | None
) -> bool:
    """Whether operators do, by kernels: original functions take fewer steps than plain PyTorch. Of
    packed sequences in any case: original functions may not look at where one begins."""
    if rows.dtype != values.dtype or values.dtype not in DTYPES:
        return False
    if packed is not None:
        return True
    if gradient and not has_gradients(rows.shape[-1], values, delta):
        return False
    return state_scan.has_kernels(rows.shape[-1], values.shape[-1], values.is_cuda)


def _leaves_to(package: str, rows: Tensor, values: Tensor, delta: bool) -> bool:
    chunked = is_chunked(rows.shape[-1], values, delta)
    return values.shape[1] > delta_net.LONG and not chunked and _is_there(package)


def _of_the_prompt(gate: Tensor, none: float) -> Tensor:
    """``[batch, length, heads]``: such that tokens behind a prompt that is filled up change no
    state."""
    behind = behind_the_prompt(gate.shape[1])
    return gate if behind is None else gate.masked_fill(behind[..., None], none)


def _rates_of_the_prompt(
    dt: Tensor, bias: Tensor | None, named: dict[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """The same of Mamba 2's rates: what stands in the place of ``dt``, ``dt_bias`` and the other
    arguments."""
    softplus, (low, high) = named.get("dt_softplus"), named.get("dt_limit", (0.0, math.inf))
    if low <= 0:
        return _of_the_prompt(dt, -math.inf if softplus else 0.0), bias, named
    rates = dt.float() if bias is None else dt.float() + bias
    rates = torch.nn.functional.softplus(rates) if softplus else rates
    named = named | {"dt_softplus": False, "dt_limit": (0.0, math.inf)}
    return _of_the_prompt(rates.clamp(low, high), 0.0), None, named


def delta_rule(original: Function, *, in_place: bool = False) -> Function:
    """``torch_chunk_gated_delta_rule``, and ``torch_recurrent_gated_delta_rule``, which may write
    the state of a cache in place: that is where its result is kept."""

    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        g, beta = (_of_the_prompt(one, 0.0) for one in (g, beta))
        arguments = query, key, value, g, beta
        normalize: Any = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        packed = _packed(kwargs, value, value.shape[1])
        gradient = _needs_gradient(*arguments, initial_state)
        if (
            kwargs.get("scale") is not None
            or (packed is not None and initial_state is not None)
            or (packed is None and _leaves_to("fla", query, value, delta=True))
            or not _computes(query, value, True, gradient, packed)
        ):
            named = {"initial_state": initial_state, "output_final_state": output_final_state}
            return original(query, key, value, g=g, beta=beta, **named, **normalize, **kwargs)
        if packed is not None:
            arguments = query, key, value, state_scan.forget(g, packed), beta
        state = initial_state
        writes = in_place and output_final_state and not gradient
        if writes and state is not None and _is_kept(state):
            return state_scan.gated_delta_rule_update(state, *arguments, **normalize), state
        return state_scan.gated_delta_rule(
            *arguments,
            initial_state=state,
            output_final_state=output_final_state,
            **normalize,
        )

    return gated_delta_rule


def _is_kept(state: Tensor) -> bool:
    return state.dtype == torch.float32 and state.is_contiguous()


def mamba2(original: Function) -> Function:
    """``mamba2_chunk_scan``."""

    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if behind_the_prompt(dt.shape[1]) is not None:
            dt, dt_bias, kwargs = _rates_of_the_prompt(dt, dt_bias, kwargs)
        tensors = _given(D=D, dt_bias=dt_bias, initial_states=initial_states)
        packed = _packed(kwargs, hidden_states, dt.shape[1])
        gradient = _needs_gradient(hidden_states, dt, A, B, C, *tensors.values())
        if (
            kwargs.get("z") is not None
            or (packed is not None and initial_states is not None)
            or (packed is None and _leaves_to("mamba_ssm", C, hidden_states, delta=False))
            or not _computes(C, hidden_states, False, gradient, packed)
        ):
            return original(hidden_states, dt, A, B, C, chunk_size, **tensors, **kwargs)
        options = ("dt_softplus", "dt_limit", "return_final_states")
        said = {name: kwargs[name] for name in options if name in kwargs} | {"seq_idx": packed}
        return state_scan.mamba2_scan(hidden_states, dt, A, B, C, **tensors, **said)

    return mamba2_chunk_scan


def mamba2_layer(original: Function) -> Function:
    """``mamba2_split_conv1d_scan_combined``, a whole layer in training by mamba_ssm, or None. Of
    packed sequences the functions above compute it; without mamba_ssm the original one may raise.
    """

    def mamba2_split_conv1d_scan_combined(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = _packed(kwargs, x, x.shape[1]) is not None
        return None if packed else original(x, *args, **kwargs)

    return mamba2_split_conv1d_scan_combined


def mamba2_step(original: Function) -> Function:
    """``mamba2_selective_state_update``, where what is there once a head is expanded."""

    def mamba2_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        tensors = _given(D=D, dt_bias=dt_bias)
        expanded = all(set(one.stride()[1:]) == {0} for one in (A, *tensors.values()))
        x, c = hidden_states.unsqueeze(1), C.unsqueeze(1)
        if (
            kwargs
            or not (expanded and dt.stride(-1) == 0 and _is_kept(state))
            or _needs_gradient(c, x, B, dt, A, state, z, *tensors.values())
            or not _computes(c, x, False, False, None)
        ):
            named = {"dt_softplus": dt_softplus, "z": z, **kwargs}
            return original(state, hidden_states, dt, A, B, C, **tensors, **named)
        of_heads = {name: one[:, 0] for name, one in tensors.items()}
        out = state_scan.mamba2_scan_update(
            state,
            x,
            dt[:, None, :, 0],
            A[:, 0, 0],
            B.unsqueeze(1),
            c,
            dt_softplus=dt_softplus,
            **of_heads,
        ).squeeze(1)
        return out if z is None else out * torch.nn.functional.silu(z)

    return mamba2_selective_state_update


# ---- which they are, and whether they compute what is replaced -----------------------------------


@dataclass(frozen=True)
class _Group:
    """Functions of one kind.

    Attributes:
        operator: what the report names.
        functions: what is made of each original one, by its name.
        inputs: small ones.
        results: of functions, for these inputs.
        others: what is made of functions that only some classes call.
    """

    operator: str
    functions: dict[str, Callable[[Function], Function]]
    inputs: Callable[[], tuple[Tensor, ...]]
    results: Callable[..., list[Tensor]]
    others: dict[str, Callable[[Function], Function]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.operator)

    def made(self, original: dict[str, Any]) -> dict[str, Function]:
        others = {name: make for name, make in self.others.items() if name in original}
        return {name: make(original[name]) for name, make in (self.functions | others).items()}

    def differs(self, seen: dict[str, Any]) -> str:
        """What functions compute that ours do not."""
        return _differs(self, tuple(_reference_of(seen[name]) for name in self.functions))


@functools.cache
def _differs(group: _Group, functions: tuple[Any, ...]) -> str:
    theirs = dict(zip(group.functions, functions, strict=True))
    run = functools.partial(functools.partial, _joined, group.results)
    return difference(run(theirs), run(group.made(theirs)), group.inputs)


def _joined(
    results: Callable[..., list[Tensor]], functions: dict[str, Any], *inputs: Tensor
) -> Tensor:
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    was_disabled, logger.disabled = logger.disabled, True  # it would report a missing package
    try:
        found = results(*functions.values(), *inputs)
    finally:
        logger.disabled = was_disabled
    # gradients are compared, too, also where there are none
    return torch.cat([one.flatten() for one in (*found, 0 * inputs[0])])


def _of_convolutions(
    whole: Function, step: Function, x: Tensor, weight: Tensor, bias: Tensor, state: Tensor
) -> list[Tensor]:
    results = []
    for activation in (None, "silu"):
        results.append(whole(x, weight, bias, activation=activation))
        with torch.no_grad():
            written = state.clone()
            results += [step(x[..., :1], written, weight, bias, activation), written]
    return results


@torch.no_grad()
def _of_delta_rules(
    whole: Function,
    step: Function,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
) -> list[Tensor]:
    results: list[Tensor] = []
    one = [tensor[:, :1] for tensor in (q, k, v, -g.abs(), beta)]
    for normalize in (False, True):
        said = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalize}
        results += whole(q, k, v, g=-g.abs(), beta=beta, **said)
        for function in (whole, step):
            named = dict(zip(("g", "beta"), one[3:], strict=True)) | said
            results += function(*one[:3], initial_state=state.clone(), **named)
    return results


@torch.no_grad()
def _of_mamba2(
    whole: Function,
    step: Function,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor,
    state: Tensor,
) -> list[Tensor]:
    results: list[Tensor] = []
    a = -a.exp()
    named: dict[str, Any] = {"D": bias, "dt_bias": bias, "dt_softplus": True}
    for limit in ((0.0, float("inf")), (0.1, 1.0)):
        said = {"dt_limit": limit, "return_final_states": True} | named
        results += whole(x, dt, a, b, c, chunk_size=4, initial_states=state, **said)
    heads, width, written = x.shape[2], x.shape[3], state.clone()
    of_heads = bias[:, None].expand(-1, width)
    named |= {"D": of_heads, "dt_bias": of_heads}
    steps = dt[:, 0, :, None].expand(-1, -1, width)
    a = a[:, None, None].expand(heads, width, b.shape[3])
    for z in (None, x[:, 1]):
        out = step(written, x[:, 0], steps, a, b[:, 0], c[:, 0], z=z, **named)
        results += [out, written.clone()]
    return results


def _normal(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(map(torch.randn, shapes))


_OF_HEADS = (2, 7, 4)
_GROUPS = (
    _Group(
        "causal_conv1d",
        {"causal_conv1d_fn": convolution, "causal_conv1d_update": convolution_step},
        _normal((2, 6, 7), (6, 4), (6,), (2, 6, 4)),
        _of_convolutions,
    ),
    _Group(
        "gated_delta_rule",
        {
            "torch_chunk_gated_delta_rule": delta_rule,
            "torch_recurrent_gated_delta_rule": functools.partial(delta_rule, in_place=True),
        },
        _normal(
            (*_OF_HEADS, 8), (*_OF_HEADS, 8), (*_OF_HEADS, 16), _OF_HEADS, _OF_HEADS, (2, 4, 8, 16)
        ),
        _of_delta_rules,
    ),
    _Group(
        "mamba2_scan",
        {"mamba2_chunk_scan": mamba2, "mamba2_selective_state_update": mamba2_step},
        _normal(
            (*_OF_HEADS, 8), _OF_HEADS, (4,), (2, 7, 2, 16), (2, 7, 2, 16), (4,), (2, 4, 8, 16)
        ),
        _of_mamba2,
        {"mamba2_split_conv1d_scan_combined": mamba2_layer},
    ),
)


def _code_of(cls: Any) -> Any:
    """The class's own code: HF's kernels wraps it."""
    return inspect.unwrap(cls.forward)


def _called(forward: Any) -> Iterator[_Group]:
    """The groups whose functions a class's code calls."""
    if isinstance(forward, types.FunctionType):
        for group in _GROUPS:
            if all(
                name in forward.__code__.co_names and callable(forward.__globals__.get(name))
                for name in group.functions
            ):
                yield group


def _replaced(code: Any) -> dict[str, Any]:
    seen, compiling = code.__globals__, torch.compiler.is_compiling()
    made: dict[str, Any] = {}
    for group in _called(code):
        if compiling or not group.differs(seen):
            made |= group.made(seen)
    return made


def concerns(module: nn.Module) -> bool:
    return any(_called(_code_of(own_class(module))))


def refuse(module: Any) -> str:
    """Why a layer's functions stay the class's own; "" if not all of them need to."""
    code = _code_of(own_class(module))
    reasons = [group.differs(code.__globals__) for group in _called(code)]
    return reasons[0] if all(reasons) else ""


def _references(code: Any) -> dict[str, Any]:
    seen = code.__globals__
    return {name: _reference_of(seen[name]) for one in _called(code) for name in one.functions}


def _swap(module: Any) -> Swap:
    ((_, forward),) = rebind(module, "recurrence", _replaced)
    if delta_net.fits(module, _references):
        forward = functools.partial(delta_net.layer, module, **forward.keywords)
    return [(module, forward)]


def candidates(module: Any) -> Iterator[tuple[str, Callable[[Any], Swap]]]:
    code = _code_of(own_class(module))
    named = [group.operator for group in _called(code) if not group.differs(code.__globals__)]
    yield ", ".join(named), _swap
