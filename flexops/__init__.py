"""flexops: fused PyTorch operators, and everything it takes to have them compiled, matched and checked.

Importing flexops registers its operators with torch. It touches no GPU, starts no process, writes nothing and compiles nothing: that happens when
an operator is first called on a device. Where torch itself cannot be imported, flexops still imports, so that ``flexops doctor`` can say why; its
operators then raise ``TorchUnavailableError``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import optim as optim
    from .op_builder.extension import load as load
    from .op_builder.extension_inline import load_inline as load_inline
    from .op_builder.loader import FallbackWarning as FallbackWarning
    from .op_builder.loader import OpStatus as OpStatus
    from .op_builder.loader import status as status
    from .ops.adam import adam_ as adam_
    from .ops.adam import adam_copy_ as adam_copy_
    from .ops.quant import dequantize as dequantize
    from .ops.quant import quantize as quantize

__version__ = "0.1.0"

_PUBLIC = {
    "optim": "optim",
    "load": "op_builder.extension",
    "load_inline": "op_builder.extension_inline",
    "status": "op_builder.loader",
    "OpStatus": "op_builder.loader",
    "FallbackWarning": "op_builder.loader",
    "adam_": "ops.adam",
    "adam_copy_": "ops.adam",
    "quantize": "ops.quant",
    "dequantize": "ops.quant",
}
_NEED_TORCH = ("optim", "ops")

__all__ = ["FallbackWarning", "OpStatus", "__version__", "adam_", "adam_copy_", "dequantize", "load", "load_inline", "optim", "quantize", "status"]

_torch_error: Exception | None = None


def __getattr__(name: str) -> Any:
    """Resolve a public name at its first use (PEP 562), so that importing flexops stays cheap."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flexops' has no attribute {name!r}")
    module = _PUBLIC[name]
    if _torch_error is not None and module.split(".")[0] in _NEED_TORCH:
        from .errors import TorchUnavailableError

        raise TorchUnavailableError(f"flexops.{name} needs torch, which cannot be imported", found=str(_torch_error), fix="flexops doctor") from _torch_error
    found = import_module(f".{module}", __name__)
    value = found if module == name else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def _is_command_line() -> bool:
    """True in ``flexops ...`` and ``python -m flexops...``, which must start, and report, where torch is slow, broken or absent."""
    arguments = sys.orig_argv[1:]
    for position, argument in enumerate(arguments):
        if argument == "-m":
            return arguments[position + 1 : position + 2] != [] and arguments[position + 1].split(".")[0] == "flexops"
        if not argument.startswith("-"):
            return argument.rpartition("/")[2] == "flexops"
    return False


if not _is_command_line():
    try:
        import_module("torch")
    except Exception as error:  # an absent torch raises ImportError, a library that does not match OSError, half an upgrade anything
        _torch_error = error
    else:
        import_module(".ops", __name__)
