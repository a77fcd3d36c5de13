"""A project's operators: declared once, registered with torch, and known to the builder."""

from __future__ import annotations

import functools
import inspect
import keyword
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._torch import schema_of
from ..build.describe import catalog, schema
from ..build.describe.declaration import Output, Rows
from ..build.describe.schema import Signature
from ..build.describe.spec import OpSpec, Project
from ..errors import FlexopsError
from ..ops import _declared, _register
from ..ops._declared import check_arguments, results_of, saving

_LONGEST_NAME = 80
"""Of a library and of a family: both are in the name of a file, which has at most 255 bytes."""
F = TypeVar("F", bound=Callable[..., Any])

self_checks: dict[str, list[Callable[[str], float]]] = {}
"""What ``flexops doctor`` runs, by family; each gives the largest difference from the reference on
a device."""


class Library:
    """Operators of one project, in a namespace of their own: ``torch.ops.<name>``.

    Args:
        name: the namespace, in torch and in C++.
        root: the ``__file__`` of the package's ``__init__``, or its directory; sources are in
            ``csrc/<family>/`` there.

    Raises:
        FlexopsError: the name is none, or taken.
    """

    def __init__(self, name: str, *, root: str | os.PathLike[str]) -> None:
        if (
            not isinstance(name, str)
            or not name.isidentifier()
            or not name.isascii()
            or keyword.iskeyword(name)
            or name in (*schema.TAKEN_NAMESPACES, *schema.RESERVED, *dir(type(torch.ops)))
        ):
            taken = ", ".join(schema.TAKEN_NAMESPACES)
            required = (
                f"an identifier, none of {taken}, no word of Python or C++, and nothing that"
                " torch.ops has itself"
            )
            raise FlexopsError(
                f"no library can be called {name!r}", required=required, fix="give it another name"
            )
        if len(name) > _LONGEST_NAME:
            required = f"at most {_LONGEST_NAME} characters: folders and files of the cache get it"
            raise FlexopsError(
                f"no library can be called {name[:20]!r}...: it has {len(name)} characters",
                required=required,
                fix="give it a shorter name",
            )
        if not isinstance(root, (str, os.PathLike)):
            raise FlexopsError(
                f"the root of library {name} cannot be {root!r}",
                required="the package's directory, or a module in it",
                fix="root=__file__",
            )
        place = Path(os.path.abspath(root))
        self.name = name
        self.project = Project(
            name, place.parent if place.suffix == ".py" or place.suffix == ".pyc" else place
        )
        self.ops: dict[str, Op] = {}
        catalog.register(self.project)

    def op(
        self,
        text: str,
        *,
        family: str,
        dtypes: Mapping[str, object] | None = None,
        shapes: Mapping[str, str] | None = None,
        strided: Sequence[str] | Mapping[str, str] = (),
        outputs: Output | Sequence[Output] = (),
        split: str = "elements",
        rows: Rows | None = None,
        numbers: Sequence[str] = (),
        own_binding: bool = False,
    ) -> Callable[[Callable[..., Any]], Op]:
        """Declare an operator; decorates its reference: plain PyTorch with the schema's arguments,
        which is fallback and oracle.

        Args:
            text: its schema, ``scale(Tensor x, float factor) -> Tensor``, without defaults and
                keyword-only arguments: those are the reference's.
            family: the folder of ``csrc`` whose launchers implement it.
            dtypes: by tensor argument, the dtypes that it may have (one or several), or another
                argument, whose it must have. By default the first tensor may be float32, float16 or
                bfloat16, and the others must have its dtype.
            shapes: by tensor argument, the shape that it must have, in the words of ``Output``:
                ``{"weight": "x[-1]"}``.
            strided: tensor arguments that the launcher takes with any strides; the others it gets
                contiguous. Or, by argument, how it takes them, and else gets a copy: ``"rows"``
                (rows of neighbours at even distances: ``x.row_stride()``), ``"columns"`` (elements
                of the last dimension are neighbours), ``"aligned"``
                (contiguous, on a GPU at a multiple of 16 bytes), ``"aligned rows"``, ``"as x"``
                (broadcast to x's shape, with stride 0), ``"any"``.
            outputs: how results are allocated, one ``Output`` for each; by default as the first
                tensor. The fake kernel says the same.
            split: what the CPU's launcher is called for on several threads: parts of the first
                result's ``elements`` or ``rows``, or the ``whole`` at once. With ``host``,
                ``<name>_host`` in ``<family>_host.h`` is called in the launchers' place, and calls
                what it likes.
            rows: lists of tensors that belong together, which the launcher gets as rows.
            numbers: tensor arguments of one float32 element, whose address the launcher gets: what
                is known on the device only.
            own_binding: the family has a hand-written ``<family>_binding.cpp``, and the schema what
                the builder writes no binding for; then nothing is checked by what the declaration
                says, and the operator needs a ``fake`` of its own.

        Raises:
            FlexopsError: the schema or a constraint cannot be understood, or the name is taken.
        """
        _check_words(text, family, own_binding=own_binding)
        signature = None
        if not own_binding:
            every = (outputs,) if isinstance(outputs, (Output, str)) else tuple(outputs)
            signature = schema.declare(
                text,
                dtypes=dtypes,
                shapes=shapes,
                strided=strided,
                outputs=every,
                split=split,
                rows=rows,
                numbers=numbers,
            )
        name = signature.schema.name if signature else text.partition("(")[0].strip()

        def declared(reference: Callable[..., Any]) -> Op:
            if name in self.ops:
                places = [
                    f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                    for function in (self.ops[name].reference, reference)
                ]
                raise FlexopsError(
                    f"{self.name}.{name} is declared twice",
                    found=" and ".join(places),
                    fix="give one of them another name",
                )
            self.ops[name] = Op(self, text, signature, family, reference)
            known = self.project.label(family)
            before = next(
                (spec for spec in catalog.specs() if spec.name == known),
                OpSpec(family, self.project),
            )
            more = (signature,) if signature else ()
            catalog.add(OpSpec(family, self.project, signatures=(*before.signatures, *more)))
            return self.ops[name]

        return declared


def _check_words(text: str, family: str, *, own_binding: bool) -> None:
    """Raise for a schema or a family's name that no file could hold."""
    if odd := next((character for character in text if not character.isascii()), ""):
        raise FlexopsError(
            f"the schema {text!a} cannot be read",
            found=f"{odd!a}",
            required="names of ASCII letters, digits and _",
            fix="rename it",
        )
    if not isinstance(family, str) or not re.fullmatch(
        rf"[A-Za-z_]\w{{,{_LONGEST_NAME - 1}}}", family, re.ASCII
    ):
        raise FlexopsError(
            f"no family can be called {family!r}",
            required=f"at most {_LONGEST_NAME} letters, digits and _: it is a folder of csrc",
            fix="rename it, and the folder",
        )
    if own_binding and "*" in map(str.strip, text.partition("(")[2].split(",")):
        raise FlexopsError(
            f"the schema {text!r} has keyword-only arguments",
            required="that is the Python function's, not the schema's",
            fix="leave *, out of the schema, and name the arguments after * in the reference",
        )


class Op:
    """One operator, and the public function that calls it. What decorates further functions adds to
    it.

    Attributes:
        op: torch's: ``torch.ops.<library>.<name>.default``.
        reference: plain PyTorch.
        family: what it is built with.
    """

    def __init__(
        self,
        library: Library,
        text: str,
        signature: Signature | None,
        family: str,
        reference: Callable[..., Any],
    ) -> None:
        self.library, self.signature, self.family, self.reference = (
            library,
            signature,
            family,
            reference,
        )
        name = text.partition("(")[0].strip()
        self.label = f"{library.name}.{name}"
        if not callable(reference):
            raise FlexopsError(
                f"the reference of {self.label} is {reference!r}",
                required="a function in plain PyTorch",
                fix="@lib.op(...) above its def",
            )
        parameters = inspect.signature(reference).parameters
        any_number = any(
            parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()
        )
        self._names = (
            [argument.name for argument in signature.schema.arguments]
            if signature
            else list(parameters)
        )
        # by name, arguments would be handed over in the reference's order
        if not any_number and self._names != list(parameters):
            found, required = (
                ", ".join(parameters),
                f"the schema's arguments, in their order: {', '.join(self._names)}",
            )
            raise FlexopsError(
                f"the reference of {self.label} does not take what the schema says",
                found=found,
                required=required,
                fix="rename them",
            )
        self._fake: Callable[..., Any] | None = (
            functools.partial(results_of, signature) if signature else None
        )
        self._check: Callable[..., None] | None = None
        self._compared = False
        functools.update_wrapper(self, reference)
        try:
            _register.define(
                family,
                text,
                self._comparing(_by_position(reference)),
                self._fake_of,
                check=self._refuse,
                always=self._ask,
                project=library.project,
            )
        except (RuntimeError, ValueError) as error:
            said = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise FlexopsError(
                f"torch does not take the schema {text!r}",
                found=said,
                fix="correct the schema, or give the op another name",
            ) from error
        self.op = getattr(getattr(torch.ops, library.name), name).default
        self._has_lists = any(
            str(argument.type) == "List[Tensor]" for argument in schema_of(self.op).arguments
        )
        _register.guard_gradient(self.op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < len(self._names):
            args = self._bound(args, kwargs)
        # who looks for tensors that require a gradient does not look into tuples
        if self._has_lists:
            args = tuple(list(arg) if isinstance(arg, tuple) else arg for arg in args)
        # a trace asks the fake kernel
        if not _register.is_tracing() and (self._check is not None or not self._compared):
            self._ask(*args)
        return _register.caller(self.op)(*args)

    def __repr__(self) -> str:
        return f"<operator {self.label}>"

    def __reduce__(self) -> str:
        # as functions are pickled and copied: by name
        return str(getattr(self, "__qualname__", self.label))

    def fake(self, function: F) -> F:
        """Gives results' shapes, dtypes and devices from the arguments, if ``outputs`` cannot say
        them; then the binding is hand-written, as a rule."""
        self._fake = self._function("fake kernel", function)
        return function

    def check(self, function: F) -> F:
        """Raises if arguments are wrong in a way that the declaration cannot say; called with the
        schema's arguments, in each call: on any device, with the native library loaded or not. A
        compiled call has it called while it is traced."""
        self._check = self._function("check", function)
        return function

    def self_check(self, function: Callable[[str], float]) -> Callable[[str], float]:
        """Runs the operator on a device and gives its largest difference from the reference: for
        ``flexops doctor``."""
        self._function("self-check", function)
        self_checks.setdefault(self.library.project.label(self.family), []).append(function)
        return function

    def _function(self, what: str, given: F) -> F:
        if not callable(given):
            raise FlexopsError(
                f"the {what} of {self.label} cannot be {given!r}",
                required="a function",
                fix="correct it",
            )
        return given

    def backward(self, function: F | None = None, *, saves: Sequence[str] | None = None) -> Any:
        """The gradient: ``(ctx, *gradients of the results) -> gradients of the arguments, in their
        order`` (those left off at the end have none).

        ``ctx.saved_tensors`` has the tensors named in ``saves``, of arguments and results; by
        default every tensor argument. Arguments that are no tensors are attributes of ``ctx``. A
        gradient that is not requested is None. Tensors in lists have none: where one requires it,
        the call raises.
        """
        if function is None:
            return functools.partial(self.backward, saves=saves)
        if not callable(function) or isinstance(saves, str):
            raise FlexopsError(
                f"the gradient of {self.label} cannot be {function!r} with saves={saves!r}",
                required="a function, and a tuple of names",
                fix="correct them",
            )
        declared = schema_of(self.op)
        try:
            inspect.signature(function).bind(None, *declared.returns)
        except TypeError as error:
            raise FlexopsError(
                f"the gradient of {self.label} takes other arguments",
                found=str(error),
                required=f"(ctx, {', '.join(['grad'] * len(declared.returns))})",
                fix="a gradient for each result, after ctx",
            ) from None
        if declared.is_mutable:
            raise FlexopsError(
                f"{self.label} writes its arguments, which has no gradient here",
                fix="an operator that returns what it makes",
            )
        tensors = [
            argument.name
            for argument in declared.arguments
            if "Tensor" in str(argument.type) and "List" not in str(argument.type)
        ]
        kept, names, results = (
            list(tensors if saves is None else saves),
            self._names,
            [result.name for result in declared.returns],
        )
        results = list(self.signature.schema.results) if self.signature else results
        if unknown := [name for name in kept if name not in tensors and name not in results]:
            required = f"tensors among {', '.join([*tensors, *results])}"
            raise FlexopsError(
                f"{self.label} cannot save {', '.join(unknown)} for its gradient",
                required=required,
                fix="correct saves=",
            )
        numbers = [name for name in names if name not in tensors]
        keep, gradient = saving(names, numbers, results, kept, function)
        _register.add_gradient(self.op, keep, gradient)
        return function

    def jvp(self, function: F) -> F:
        """The derivative in forward mode (``torch.func.jvp``, ``jacfwd``), beside ``backward``:
        ``(ctx, *tangents of the arguments) -> tangents of the results``. ``ctx`` has what
        ``backward`` saves; the tangent of an argument that is no tensor is None."""
        if not _register.has_gradient(self.op):
            raise FlexopsError(
                f"{self.label} has a derivative in forward mode and no backward",
                required="both: saves= of backward is what ctx has",
                fix=f"@{self.label.partition('.')[2]}.backward before it",
            )
        _register.tangents[self.op] = self._function("derivative", function)
        return function

    def _fake_of(self, *args: Any) -> Any:
        if self._fake is None:
            raise NotImplementedError(
                f"{self.label} needs a fake kernel: @{self.label.partition('.')[2]}.fake"
            )
        results = self._fake(*args)
        self._compare(args)
        return results

    def _comparing(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """The reference, whose results have to be as declared: a library's are."""

        @functools.wraps(reference)
        def compared(*args: Any, **kwargs: Any) -> Any:
            results = reference(*args, **kwargs)
            if self.signature is not None and not self.signature.schema.results:
                return None  # what x.mul_(factor) returns, say
            if self._fake is not None:
                _declared.check_results(*self._unlike, results, self._fake(*args, **kwargs), args)
            return results

        return compared

    @property
    def _unlike(self) -> tuple[str, str]:
        what = f"the reference of {self.label} returns something else than is declared"
        return what, "correct outputs= of the declaration, or its fake kernel, or the reference"

    def _compare(self, args: tuple[Any, ...]) -> None:
        """In the first call that is right, by native kernels or for fake tensors: verify what the
        reference would return."""
        if self._compared or self._fake is None or not schema_of(self.op).returns:
            return
        try:
            self._refuse(*args)
        except Exception:  # the call itself raises it
            return
        reference = _by_position(self.reference)
        self._compared = _declared.check_reference(*self._unlike, reference, self._fake, args)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            bound = inspect.signature(self.reference).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.label}: {error}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def _ask(self, *args: Any) -> None:
        self._compare(args)
        if self._check is None:
            return
        try:
            self._check(*args)
        except Exception:
            self._refuse(*args)  # what the declaration says comes first, as in the reference
            raise

    def _refuse(self, *args: Any) -> None:
        if self.signature:
            given = dict(zip(self._names, args, strict=False))
            check_arguments(self.label, self.signature, given)
        if self._check:
            self._check(*args)


def _by_position(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference as the dispatcher calls it, which knows of no argument that must be named."""
    parameters = inspect.signature(reference).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if not named:
        return reference

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = len(parameters) - len(named)
        return reference(*args[:first], **dict(zip(named, args[first:], strict=False)), **kwargs)

    return call
