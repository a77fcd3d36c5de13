"""A kernel's schema: the arguments and results of its operator."""

from __future__ import annotations

import functools
import keyword
from typing import Any, NamedTuple

from .. import _torch
from ..build.describe.schema import RESERVED, TAKEN_NAMESPACES
from ..errors import FlexopsError

NAMESPACE = "flexops_kernels"
_LONGEST_NAME = 150  # a file has at most 255 bytes in its name, of which the cache needs some


class KernelArgument(NamedTuple):
    """An argument of the operator; ``type`` as torch writes it. ``local``: of one of several
    kernels alone, for what a call makes, which the kernel may read or write."""

    name: str
    type: str
    mutable: bool = False
    keyword_only: bool = False
    has_default: bool = False
    default: Any = None
    local: bool = False

    @property
    def tensor(self) -> bool:
        return self.type in ("Tensor", "Optional[Tensor]")

    @property
    def optional(self) -> bool:
        return self.type.startswith("Optional")


class KernelSchema(NamedTuple):
    """An operator's schema; ``results`` are the names of the tensors that it returns: ``out`` where
    the schema has none."""

    text: str
    qualname: str
    arguments: tuple[KernelArgument, ...]
    results: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.qualname.partition("::")[2]

    @property
    def functional(self) -> bool:
        """Whether it returns what it makes, and writes none of its arguments."""
        return bool(self.results) and not any(argument.mutable for argument in self.arguments)

    @property
    def tensors(self) -> tuple[KernelArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.tensor)

    @property
    def first(self) -> str:
        """The tensor that determines the device; "" for a factory, which ``device`` does it for."""
        return next((tensor.name for tensor in self.tensors if not tensor.optional), "")

    @property
    def inner(self) -> bool:
        """Whether it is one of several kernels', whose arguments are those of a checked call."""
        return any(one.local for one in self.arguments)

    @property
    def device(self) -> str:
        """The argument that says where a factory's results are."""
        return next(
            (one.name for one in self.arguments if one.type.endswith(("Device", "Device]"))), ""
        )


@functools.lru_cache(maxsize=256)
def parse_schema(text: str) -> KernelSchema:
    if not isinstance(text, str):
        raise TypeError(f"flexops.kernel: schema must be text, got {type(text).__name__}")
    try:
        if odd := next((character for character in text if not character.isascii()), ""):
            raise RuntimeError(f"{odd!a} in {text!a}: names are of ASCII letters, digits and _")
        parsed = _torch.parse_schema(text)
    except (RuntimeError, IndexError) as error:
        said = str(error).strip()
        if isinstance(error, IndexError):  # of a number, that of C++: "stod"
            kind = "double" if said == "stod" else "int64_t"
            said = f"in {text}: a number that no {kind} holds"
        raise FlexopsError(
            "flexops.kernel: the schema cannot be read",
            found=said,
            required="such as: scale(Tensor x, float factor) -> Tensor",
            fix="see docs/kernels.md",
        ) from None
    arguments = tuple(
        KernelArgument(
            one.name,
            str(one.type),
            bool(one.alias_info and one.alias_info.is_write),
            one.kwarg_only,
            (
                one.has_default_value()
                if hasattr(one, "has_default_value")
                else one.default_value is not None
            ),
            one.default_value,
        )
        for one in parsed.arguments
    )
    results = tuple(
        one.name or (f"out{number}" if len(parsed.returns) > 1 else "out")
        for number, one in enumerate(parsed.returns)
    )
    qualname = parsed.name if "::" in parsed.name else f"{NAMESPACE}::{parsed.name}"
    schema = KernelSchema(text, qualname, arguments, results)
    if wrong := _unfit(schema, parsed):
        raise FlexopsError(
            f"flexops.kernel: {text} is no operator that a kernel can be",
            found=wrong[0],
            required=wrong[1],
            fix="see docs/kernels.md",
        )
    return schema


def _unfit(schema: KernelSchema, parsed: Any) -> tuple[str, str] | None:
    if parsed.overload_name:
        return (
            f"an overload: {schema.qualname}.{parsed.overload_name}",
            "a name of its own: without a dot",
        )
    if len(schema.qualname) > _LONGEST_NAME:
        return (
            f"a name of {len(schema.qualname)} characters",
            f"at most {_LONGEST_NAME}: files get it",
        )
    namespace = schema.qualname.partition("::")[0]
    if namespace in TAKEN_NAMESPACES:
        return (
            f"the namespace {namespace}, which is torch's or flexops' own",
            "a namespace of your own: mylib::name(...)",
        )
    for one in schema.arguments:
        if one.name in RESERVED:
            return (
                f"an argument called {one.name}",
                "no word of C++: the kernel's parameter has the argument's name",
            )
        if keyword.iskeyword(one.name) or one.name.startswith("_"):
            return (
                f"an argument called {one.name}",
                "no word of Python, and no name that begins with _",
            )
    if not schema.first and not (schema.device and schema.results and not schema.tensors):
        return (
            "no argument that is a Tensor",
            "one, which determines the device; or, without any, Device device",
        )
    if any(one.alias_info for one in parsed.returns):
        return "a result that is an argument", "-> () : the caller has that tensor already"
    if odd := [str(one.type) for one in parsed.returns if str(one.type) != "Tensor"]:
        return f"a result {odd[0]}", "Tensor"
    if twice := {one.name for one in schema.arguments} & set(schema.results):
        return f"{', '.join(twice)} is an argument and a result", "different names"
    return None
