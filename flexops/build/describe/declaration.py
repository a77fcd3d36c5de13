"""What an operator's declaration says beside its schema: its results, and lists of tensors as
rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Output(NamedTuple):
    """How a result is allocated.

    Attributes:
        shape: dimensions, separated by commas: ``x`` (all of x's), ``x[-1]``, ``x[:-1]``, a number,
            the name of an int argument, ``len(xs)`` for how many tensors a list holds; one of them
            times or divided by a number, ``x[-1] * 2`` and ``x[-1] // 2`` (rounded down), one
            added, ``x[-1] + 1``; ``[]`` for none, of a tensor of one number. "" for the first
            tensor's.
        dtype: of which tensor it has the dtype, or which one: ``x``, ``float32``, the name of a
            ScalarType argument. Of an optional tensor that is not given, and of "", the first
            tensor's.
        when: the result is there only if a bool argument is true, an int is not 0, or an optional
            one is given, or several, with ``and``. Else the operator returns a tensor of no
            elements, and the launcher gets a view that is false.
        otherwise: the shape that it has else, in the place of that.
        order: a tensor argument of the result's shape: the result is dense, and its dimensions lie
            in memory in the order of that tensor's, the last one innermost. "" for row-major.
        by_host: the host function allocates it, and gets a ``Tensor&`` instead of a view: for
            shapes that the words above do not express. The operator then has a fake kernel of its
            own, and ``split`` is ``host``.
    """

    shape: str = ""
    dtype: str = ""
    when: str = ""
    otherwise: str = ""
    order: str = ""
    by_host: bool = False

    @property
    def conditions(self) -> tuple[str, ...]:
        """The arguments that ``when`` names."""
        return tuple(self.when.split(" and ")) if self.when else ()


class Rows(NamedTuple):
    """Lists of one length, whose tensors at one place belong together: parameters, their gradients,
    their states.

    The launcher gets a ``TensorRow`` (``csrc/common/multi_tensor.h``) for each place in their
    stead, whose arrays hold their elements in one order: where tensors lie in memory otherwise,
    copies stand in for them, and what is written is copied back.

    Attributes:
        lists: in the order of a row's arrays. Tensors have the shape of the first list's, and are
            float32, float16 or bfloat16, each on its own, or as ``dtypes`` says.
        steps: a further list, of tensors of one float32 element, or of one tensor that has an
            element for each place: a row's ``step``.
        optional: those that may be empty: then rows have no such array, or no ``step``.
        written_if: lists that are written only if another argument, an optional one, is given.
        blocks: lists with a number for each so many elements of a row, such as scales; they are
            contiguous, of whatever shape.
        row_major: whether the order must be row-major, as for states that are no tensors of that
            shape.
    """

    lists: tuple[str, ...]
    steps: str = ""
    optional: tuple[str, ...] = ()
    written_if: tuple[tuple[str, str], ...] = ()
    blocks: tuple[tuple[str, int], ...] = ()
    row_major: bool = False

    @property
    def every(self) -> tuple[str, ...]:
        return (*self.lists, self.steps) if self.steps else self.lists


class Declared(NamedTuple):
    """An operator of flexops' own.

    Attributes:
        schema: as torch gets it.
        said: further arguments of ``schema.declare``.
        gradient: whether it has one.
        hidden: whether it is invisible to autograd.
    """

    schema: str
    said: Mapping[str, Any]
    gradient: bool = False
    hidden: bool = False

    def __hash__(self) -> int:
        return hash(self.schema)

    @property
    def name(self) -> str:
        """With the overload, without the namespace."""
        return self.schema.partition("(")[0]

    @property
    def plain(self) -> bool:
        """Whether it is registered as ``<name>_plain``, too (``ops/_register.py``)."""
        return bool(self.said.get("plain"))


def in_words(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
