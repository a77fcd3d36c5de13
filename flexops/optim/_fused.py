"""What flexops' optimizers share: one call of an operator for all parameters of a group on one
device, states in float32 or codes whatever the parameters are, state dicts that keep them, and
DTensors, of which each rank steps its own part."""

from __future__ import annotations

import abc
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from .._torch import below_autograd, builtin, not_compiled
from ..ops._multi_tensor import PARAM_DTYPES, resolving_negatives, split_lr
from ..ops._register import is_distributed
from ._loading import check_floats, check_names, float_state

_NONE = type(None)
PLAIN_TYPES = {torch.nn.Parameter, Tensor}
_is_sparse, _dtype = operator.attrgetter("is_sparse"), operator.attrgetter("dtype")
_TAKEN = {*PARAM_DTYPES, torch.complex64}


class Bucket:
    """The tensors of one call: parameters of one group, on one device and of one kind."""

    __slots__ = ("grads", "kind", "options", "owners", "params", "states", "steps")

    def __init__(self, kind: Hashable = None) -> None:
        self.kind = kind
        self.owners: list[Tensor] = []  # as the user knows them
        self.params: list[Tensor] = []  # plain tensors, as are the others
        self.grads: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {}
        # the states named step, or one tensor of which they are the elements
        self.steps: list[Tensor] = []
        self.options: dict[str, Any] = {}  # of the step, by the operator's names


class _Stored:
    """The states there are, in the order in which they were made: mostly that of the groups'
    parameters, and to see that costs less than to look each of them up, because torch hashes a
    tensor in Python."""

    def __init__(self, state: dict[Any, dict[str, Any]]) -> None:
        self._params, self._states = list(state), list(state.values())
        self._next = 0

    def of(self, params: list[Tensor]) -> list[dict[str, Any]]:
        """The states of these parameters if they are the next ones; else nothing."""
        here = slice(self._next, self._next + len(params))
        states = self._states[here]
        if len(states) != len(params) or not all(map(operator.is_, self._params[here], params)):
            return []
        self._next = here.stop
        return states if all(states) else []


class FusedOptimizer(torch.optim.Optimizer, abc.ABC):
    """A ``torch.optim.Optimizer`` whose step is one operator's.

    A subclass declares the names of its states, makes them, and makes the step of a
    :class:`Bucket`.
    """

    # GradScaler then leaves unscaling, and skipping after an overflow, to step(): it sets
    # grad_scale and found_inf before the call.
    _step_supports_amp_scaling = True

    def _leave_unscaling(self) -> None:
        """With ``fused=False`` to the scaler, as torch's own optimizers: those who clip between
        unscaling and step may ask for that (Lightning does)."""
        if self.defaults.get("fused") is False:
            self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a state dict of an older version, or of another's optimizer, may know fewer options
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._leave_unscaling()

    _states: tuple[str, ...] = ()
    """The states that a parameter may have."""

    _optional_states: tuple[str, ...] = ("max_exp_avg_sq",)
    """States that a saved state may have or lack."""

    @abc.abstractmethod
    def _make_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter's states before its first step."""

    @abc.abstractmethod
    def _step_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        """Make the step of all tensors of a bucket."""

    _joined: Mapping[Tensor, tuple[list[Tensor], Tensor]] = {}
    """By the first of the parameters: step counts that lie in memory as the elements of one tensor,
    and that tensor."""

    # once parameters were found to be on several devices, complex or the like
    _may_be_mixed = False

    def _kinds(self, params: list[Tensor], _states: list[dict[str, Any]]) -> list[Hashable]:
        """For each parameter, what must be equal for parameters to be stepped by one call."""
        return [None] * len(params)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; parameters without a gradient are left alone. Under ``torch.compile`` it
        runs as it is, outside of the graph (which ``fullgraph=True`` rejects).

        Args:
            closure: reevaluates the model and returns the loss, which is returned.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter expanded (several of its elements are
                one in memory).
            TypeError: a parameter or gradient is not float32, bfloat16 or float16 (or complex64,
                taken as pairs of float32).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_groups()
        return loss

    # compiling, it would lose the states that a first step makes; and one operator has nothing to
    # be fused with
    @not_compiled
    def _step_groups(self) -> None:
        stored = _Stored(self.state)
        steps = [
            (group, bucket)
            for group in self.param_groups
            for bucket in self._buckets(group, stored)
        ]
        # an operator judges what it is given before it touches anything: the first one need not be
        # looked at
        for group, bucket in steps[1:]:
            if (
                _is_tensor_of_many(group["lr"])
                or not set(map(_dtype, bucket.grads)) <= _TAKEN
                or any(map(_is_sparse, bucket.grads))
            ):
                self._judge(group, bucket)
        self._measure([owner for _, bucket in steps for owner in bucket.owners])
        for group, bucket in steps:
            self._step(group, bucket)

    def _measure(self, params: list[Tensor]) -> None:
        """Look at all gradients before the first parameter's step."""

    def _step(self, group: dict[str, Any], bucket: Bucket) -> None:
        try:
            self._step_plain(group, bucket)
        except (RuntimeError, TypeError):
            # To look at every parameter before every step would cost as much as the step. The
            # operators look, before they touch anything.
            if self._may_be_mixed or _is_uniform(bucket):
                self._judge(group, bucket)
                raise
            self._may_be_mixed = True
            parts = list(self._split(bucket))
            for part in parts:
                self._judge(group, part)
            for part in parts:
                self._step_plain(group, part)

    def _step_plain(self, group: dict[str, Any], bucket: Bucket) -> None:
        device = bucket.params[0].device
        bucket.steps = self._joined_steps(bucket)
        number, tensor = split_lr(group["lr"], device.type == "cpu")
        bucket.options = {
            "lr": number,
            "lr_tensor": _moved(tensor, device),
            "weight_decay": group["weight_decay"],
            "maximize": bool(group["maximize"]),
            "grad_scale": _moved(getattr(self, "grad_scale", None), device),
            "found_inf": _moved(getattr(self, "found_inf", None), device),
        }
        if "betas" in group:
            bucket.options["beta1"], bucket.options["beta2"] = group["betas"]
        self._step_bucket(group, bucket)

    def _judge(self, group: dict[str, Any], bucket: Bucket) -> None:
        """Raise if the operator would reject these tensors; complex ones may still be undivided."""
        kind = type(self).__name__
        if _is_tensor_of_many(group["lr"]):
            raise ValueError("Tensor lr must be 1-element")
        for owner, param, grad in zip(bucket.owners, bucket.params, bucket.grads, strict=True):
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"flexops.optim.{kind} does not support sparse gradients;"
                    f" torch.optim.{'SparseAdam' if 'Adam' in kind else 'Adagrad'} does"
                )
            for tensor, of in ((param, ""), (grad, ".grad")):
                if tensor.dtype not in _TAKEN:
                    where = self._place_of(owner, group)
                    found = str(tensor.dtype).removeprefix("torch.")
                    raise TypeError(
                        f"flexops.optim.{kind}: {where}{of} must be float32, bfloat16 or float16,"
                        f" got {found}"
                    )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.optim``'s; states keep their precision, and
        steps move to their parameters' devices.

        Adam, AdamW and LAMB also load the states of :class:`AdamW8bit`, and it loads theirs.

        Raises:
            TypeError: a state is of a dtype that it cannot have.
            ValueError: the states are of another kind of optimizer, or in another library's format.
                Nothing was loaded then.
        """
        seen: list[dict[str, Any]] = []

        def convert(_: Any, final: dict[str, Any]) -> dict[str, Any]:
            # The last hook sees what is loaded.
            seen.append(_converted(self, final))
            return seen[-1]

        handle = self.register_load_state_dict_pre_hook(convert)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._restore_precision(seen[-1])

    def _loaded_state(
        self,
        param: Tensor,  # noqa: ARG002  AdamW8bit's depends on it
        group: dict[str, Any],  # noqa: ARG002
        state: dict[str, Any],
        where: str,
    ) -> dict[str, Any]:
        """A parameter's saved state as this class has it.

        Args:
            param: the parameter that the state is for.
            group: the parameter's group of options, as saved.
            state: the saved state, not empty; it is not written.
            where: what an error begins with.
        """
        if "exp_avg_sq" in self._states:
            state = float_state(state, where)
        required = [name for name in self._states if name not in self._optional_states]
        check_names(state, {*self._states, *self._optional_states}, required, where)
        check_floats(state, where)
        return state

    def _state_dtype_of(self, _param: Tensor) -> torch.dtype:
        """What states that are no codes are kept in."""
        return torch.float32

    def _restore_precision(self, state_dict: dict[str, Any]) -> None:
        """torch has cast the states to their parameters' dtypes, which throws digits (or the
        meaning of codes) away: take the saved ones."""
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for saved, param in zip(saved_group["params"], group["params"], strict=True):
                for name, value in (self.state.get(param) or {}).items():
                    if name == "step":
                        self.state[param][name] = torch.as_tensor(value).to(
                            device=param.device, dtype=torch.float32
                        )
                    elif isinstance(value, Tensor):
                        original = state_dict["state"][saved][name]
                        wanted = (
                            self._state_dtype_of(param)
                            if original.is_floating_point()
                            else original.dtype
                        )
                        if value.dtype != wanted and not param.is_complex():
                            self.state[param][name] = original.to(
                                device=param.device, dtype=wanted, copy=True
                            )
        self._joined = {}
        for group in self.param_groups:
            params = [param for param in group["params"] if self.state.get(param)]
            self._join_steps(params, [self.state[param] for param in params])

    def _join_steps(self, params: list[Tensor], states: list[dict[str, Any]]) -> None:
        """Make the counts of parameters that are stepped by one call neighbours in memory, which
        one tensor can stand for: handed over one by one, they cost as much as the gradients. Only
        new states may be replaced: to others' memory a captured CUDA graph may point."""
        alike: dict[Hashable, list[int]] = {}
        for i, (kind, state) in enumerate(zip(self._kinds(params, states), states, strict=True)):
            if (
                "step" in state
                and state["step"].dim() == 0
                and state["step"].device.type in ("cpu", "cuda")
                and type(state["step"]) is Tensor
            ):
                alike.setdefault((kind, state["step"].device), []).append(i)
        for places in alike.values():
            joined = torch.stack([states[i]["step"] for i in places])
            elements = _elements(joined)
            for i, element in zip(places, elements, strict=True):
                states[i]["step"] = element
            self._joined = {**self._joined, params[places[0]]: (elements, joined)}

    def _joined_steps(self, bucket: Bucket) -> list[Tensor]:
        """The step counts as they are handed over: as one tensor, if they are all of its
        elements."""
        steps = bucket.states.get("step", [])
        elements, joined = self._joined.get(bucket.owners[0], (steps, None))
        if (
            joined is None
            or len(elements) != len(steps)
            or not all(map(operator.is_, elements, steps))
        ):
            return steps
        # Code that moves states through their ``data`` moves all of them: checking two is enough.
        at = joined.data_ptr()
        return (
            [joined]
            if steps[0].data_ptr() == at and steps[-1].data_ptr() == at + 4 * (len(steps) - 1)
            else steps
        )

    def _buckets(self, group: dict[str, Any], stored: _Stored) -> Iterable[Bucket]:
        """The group's parameters that have gradients, with everything that belongs to them."""
        # With a thousand parameters this costs as much as their step on a GPU, so what every
        # parameter goes through is a few comprehensions, which make no objects that the garbage
        # collector would count.
        params: list[Tensor] = group["params"]
        grads: list[Any] = [param.grad for param in params]
        types = set(map(type, grads))
        if _NONE in types:
            there = [grad is not None for grad in grads]
            params = list(itertools.compress(params, there))
            grads = list(itertools.compress(grads, there))
        if not params:
            return ()
        states = stored.of(params) or self._look_up(params, group)
        buckets = self._sorted(self._kinds(params, states), params, grads, states)
        if self._may_be_mixed or not types.union(map(type, params)) - {_NONE} <= PLAIN_TYPES:
            return itertools.chain.from_iterable(map(self._split, buckets))
        return buckets

    def _sorted(self, kinds: list[Hashable], *lists: list[Any]) -> list[Bucket]:
        """A bucket for each kind, from the lists of parameters, gradients and states."""
        if kinds.count(kinds[0]) == len(kinds):
            return [self._bucket(kinds[0], *lists)]
        return [
            self._bucket(
                one,
                *(
                    list(itertools.compress(each, [kind == one for kind in kinds]))
                    for each in lists
                ),
            )
            for one in dict.fromkeys(kinds)
        ]

    def _bucket(
        self,
        kind: Hashable,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Any]],
    ) -> Bucket:
        bucket = Bucket(kind)
        bucket.owners = bucket.params = params
        bucket.grads = grads
        bucket.states = {
            name: [state[name] for state in states] for name in self._states if name in states[0]
        }
        return bucket

    def _look_up(self, params: list[Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        """The parameters' states, made if they are missing."""
        states = [cast(dict[str, Any], self.state[param]) for param in params]
        new = not any(states)
        for param, state in zip(params, states, strict=True):
            if not state:
                state.update(self._new_state(param, group))
        if new:
            self._join_steps(params, states)
        return states

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if param.numel() and any(
            size > 1 and stride == 0
            for size, stride in zip(param.shape, param.stride(), strict=True)
        ):
            what = (
                "is expanded: several of its elements are one in memory, so that no step can be"
                " made"
            )
            fix = "make it torch.nn.Parameter(param.detach().clone())"
            raise RuntimeError(
                f"flexops.optim.{type(self).__name__}: {self._place_of(param, group)} {what}; {fix}"
            )
        return self._make_state(param, group)

    def _place_of(self, param: Tensor, group: dict[str, Any]) -> str:
        return (
            f"param_groups[{_index(self.param_groups, group)}]:"
            f" params[{_index(group['params'], param)}]"
        )

    def _split(self, mixed: Bucket) -> Iterable[Bucket]:
        """Several devices, DTensors, complex numbers: one bucket for each device, of plain
        tensors."""
        buckets: dict[torch.device, Bucket] = {}
        for i, (param, grad) in enumerate(zip(mixed.params, mixed.grads, strict=True)):
            bucket = buckets.setdefault(param.device, Bucket(mixed.kind))
            bucket.owners.append(param)
            bucket.params.append(plain(param))
            bucket.grads.append(plain(placed_like(grad, param)))
            for name, states in mixed.states.items():
                bucket.states.setdefault(name, []).append(plain(states[i]))
        return buckets.values()


def _converted(optimizer: FusedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the states as the optimizer has them; ``saved`` is not written."""
    states = dict(saved["state"])
    for saved_group, group in zip(
        saved["param_groups"], optimizer.param_groups, strict=False
    ):  # torch judges how many there are
        for index, (key, param) in enumerate(
            zip(saved_group["params"], group["params"], strict=False)
        ):
            if states.get(key):
                place = f"param_groups[{_index(optimizer.param_groups, group)}]: params[{index}]"
                kind = f"flexops.optim.{type(optimizer).__name__}"
                where = f"{kind}.load_state_dict: the state of {place}"
                options = {**optimizer.defaults, **saved_group}
                states[key] = optimizer._loaded_state(param, options, states[key], where)
    return {**saved, "state": states}


def _elements(joined: Tensor) -> list[Tensor]:
    """Each as a tensor with a storage of its own, though their memory is the whole's: a caller that
    saves, moves or resizes one does not find the others in it."""
    storage, size = joined.untyped_storage(), joined.element_size()
    return [
        joined.new_empty(0).set_(storage[at : at + size], 0, (), ())
        for at in range(0, len(joined) * size, size)
    ]


def _index(things: list[Any], one: Any) -> int:
    return next(i for i, thing in enumerate(things) if thing is one)


def run(op: Any, *args: Any, **numbers: Any) -> Any:
    """``op(*args, **numbers)``, less autograd's look at every tensor: ``step`` records nothing."""
    with below_autograd():
        return resolving_negatives(builtin(op), *args, **numbers)


def full_state(param: Tensor, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A state of the parameter's shape, layout and placement; of a complex parameter, complex."""
    dtype = param.dtype if param.is_complex() else dtype
    return torch.full_like(
        param,
        complex(value, value) if param.is_complex() else value,
        dtype=dtype,
        memory_format=torch.preserve_format,
    )


STATE_DTYPES = (None, "param", torch.float32, torch.bfloat16, torch.float16)


class NarrowStates(FusedOptimizer):
    """An optimizer whose states are in float32, or in a dtype that is asked for."""

    _state_dtype: torch.dtype | str | None = None
    _stochastic = True

    def _set_states(self, state_dtype: torch.dtype | str | None, stochastic_rounding: bool) -> None:
        if state_dtype not in STATE_DTYPES:
            accepted = "None, 'param', torch.float32, torch.bfloat16 or torch.float16"
            raise ValueError(
                f"flexops.optim.{type(self).__name__}: state_dtype must be {accepted}, got"
                f" {state_dtype!r}"
            )
        self._state_dtype, self._stochastic = state_dtype, bool(stochastic_rounding)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_state_dtype": self._state_dtype,
            "_stochastic": self._stochastic,
        }

    def _state_dtype_of(self, param: Tensor) -> torch.dtype:
        if self._state_dtype == "param":
            return param.dtype
        return self._state_dtype if isinstance(self._state_dtype, torch.dtype) else torch.float32


def step_state(param: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=param.device)


def check_types(kind: str, betas: Any = (0.0, 0.0), **numbers: Any) -> None:
    """Raise ``TypeError`` if what should be a number is none, or ``betas`` not two: torch would
    raise without their names, or take three betas for two."""
    if not (isinstance(betas, Iterable) and list(map(_is_number, betas)) == [True, True]):
        raise TypeError(f"flexops.optim.{kind}: betas must be two numbers, got {betas!r}")
    for name, value in numbers.items():
        if not _is_number(value):
            raise TypeError(
                f"flexops.optim.{kind}: {name} must be a"
                f" number{' or None' if name == 'max_norm' else ''}, got {value!r}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (Real, Tensor))


def check_options(
    kind: str, lr: float | Tensor, betas: tuple[Any, ...] = (0.0, 0.0), **not_negative: float
) -> None:
    """Raise ``TypeError`` or ``ValueError`` if an option is no number, or out of range, in torch's
    words."""
    check_types(kind, betas, lr=lr, **not_negative)
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    elif not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor):
            raise ValueError(f"flexops.optim.{kind}: betas must be floats, not tensors")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    for name, value in not_negative.items():
        if not value >= 0.0:
            raise ValueError(f"Invalid {name} value: {value}")


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, of a DTensor this rank's part, and of complex numbers pairs of real
    ones."""
    local = cast(Tensor, cast(Any, tensor).to_local()) if is_distributed(tensor) else tensor
    return torch.view_as_real(local) if local.is_complex() else local


def placed_like(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient as the parameter is placed: a sum that is still spread over ranks, for one, is
    added up."""
    if not is_distributed(grad) or not is_distributed(param):
        return grad
    distributed: Any = grad
    wanted: Any = param
    return (
        grad
        if distributed.placements == wanted.placements
        else distributed.redistribute(wanted.device_mesh, wanted.placements)
    )


def sharded_dimensions(tensor: Tensor) -> tuple[Any, ...]:
    """``(mesh, dimension of the mesh, ...)`` over which the tensor is sharded; ``()`` if this rank
    has all of it."""
    if not is_distributed(tensor):
        return ()
    distributed: Any = tensor
    dimensions = [
        i
        for i, placement in enumerate(distributed.placements)
        if not placement.is_replicate() and not placement.is_partial()
    ]
    return (distributed.device_mesh, *dimensions) if dimensions else ()


def add_over_ranks(values: Tensor, sharded: tuple[Any, ...]) -> None:
    """Add up ``values`` in place over the ranks that share a tensor, as :func:`sharded_dimensions`
    tells; waits for no device."""
    for dimension in sharded[1:]:
        torch.distributed.all_reduce(values, group=sharded[0].get_group(dimension))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; waits only if that is the CPU, which would read it before it is there."""
    return tensor.to(device=device, non_blocking=device.type != "cpu")


def _is_uniform(bucket: Bucket) -> bool:
    """Whether an operator takes the tensors in one call: real numbers on one device, gradients that
    are dense."""
    alike = len({param.device for param in bucket.params}) == 1 and not any(
        map(Tensor.is_complex, bucket.params)
    )
    return alike and not any(map(_is_sparse, bucket.grads))


def _is_tensor_of_many(rate: float | Tensor) -> bool:
    return isinstance(rate, Tensor) and rate.numel() != 1


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else moved(tensor, device)
