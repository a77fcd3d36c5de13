"""``flexops.load_inline``: extensions whose sources are strings. They are part of the build's plan
and key; no file is written for them to be found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

from ..plan.extension_plan import Request, arguments, listed
from .extension import absolute, check_request, explained, load_request

CPP_NAME, CUDA_NAME = "main.cpp", "cuda.cu"
_CPP_HEADERS = ("#include <torch/extension.h>",)
_CUDA_HEADERS = ("#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>")


@explained
def load_inline(
    name: str,
    cpp_sources: str | Sequence[str],
    cuda_sources: str | Sequence[str] | None = None,
    sycl_sources: str | Sequence[str] | None = None,
    functions: str | Sequence[str] | Mapping[str, str] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str | Path] | None = None,
    build_directory: str | Path | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,
    use_pch: bool = False,
    no_implicit_headers: bool = False,
    device_compiler: Literal["auto", "nvcc", "nvrtc"] | None = None,
) -> ModuleType | str:
    """Compile C++ and CUDA source text and load the result. A drop-in for torch's function of this
    name; see ``flexops.load`` for the rest.

    Args:
        cpp_sources: one or more texts, joined into one C++ source after ``#include
            <torch/extension.h>``.
        cuda_sources: one or more texts, joined into one CUDA source after torch/types.h, cuda.h and
            cuda_runtime.h.
        sycl_sources: taken for compatibility; SYCL is not supported.
        functions: names of C++ functions to bind, or a mapping from their names to docstrings.
        with_pytorch_error_handling: let torch turn C++ exceptions into Python's, not pybind11
            alone.
        use_pch: have torch's headers precompiled before this one is compiled. Without it, they are
            precompiled in the background, for the next.
        no_implicit_headers: leave the includes to the sources.
        device_compiler: as in ``flexops.load``.
    """
    check_request(
        name, is_python_module, False, bool(with_sycl or sycl_sources or extra_sycl_cflags)
    )
    texts = [
        (
            CPP_NAME,
            cpp_text(
                cpp_sources,
                functions,
                implicit_headers=not no_implicit_headers,
                error_handling=with_pytorch_error_handling,
            ),
        )
    ]
    if cuda_sources:
        texts.append(
            (
                CUDA_NAME,
                "\n".join(
                    [*(() if no_implicit_headers else _CUDA_HEADERS), *_listed(cuda_sources)]
                ),
            )
        )
    request = Request(
        name=name,
        texts=tuple(texts),
        cflags=arguments("extra_cflags", extra_cflags),
        cuda_cflags=arguments("extra_cuda_cflags", extra_cuda_cflags),
        ldflags=arguments("extra_ldflags", extra_ldflags),
        # A text has no directory of its own; in torch it is in the build directory, and finds
        # headers there.
        include_dirs=(
            *absolute(
                [path.strip() for path in listed("extra_include_paths", extra_include_paths)]
            ),
            *absolute([build_directory] if build_directory else ()),
        ),
        with_cuda=bool(cuda_sources) if with_cuda is None else with_cuda,
        is_python_module=is_python_module,
        keep_objects=keep_intermediates,
        device_compiler=device_compiler or "",
    )
    return load_request(
        request, build_directory=build_directory, verbose=verbose, precompile=use_pch
    )


def cpp_text(
    sources: str | Sequence[str],
    functions: str | Sequence[str] | Mapping[str, str] | None,
    *,
    implicit_headers: bool = True,
    error_handling: bool = True,
) -> str:
    """The C++ source: includes, the user's text, and a module that binds ``functions``."""
    return "\n".join(
        [
            *(_CPP_HEADERS if implicit_headers else ()),
            *_listed(sources),
            *_bindings(functions, error_handling),
        ]
    )


def _bindings(
    functions: str | Sequence[str] | Mapping[str, str] | None, error_handling: bool
) -> list[str]:
    if functions is None:
        return []
    if isinstance(functions, str):
        functions = [functions]
    if not isinstance(functions, (Mapping, list, tuple)):
        raise ValueError(f"functions must be a list or a dict, not {type(functions).__name__}")
    documented = (
        functions
        if isinstance(functions, Mapping)
        else {function: function for function in functions}
    )
    if odd := [one for one in (*documented, *documented.values()) if not isinstance(one, str)]:
        raise TypeError(f"functions must be names, or names with their help texts, got {odd[0]!r}")
    wrapped = "torch::wrap_pybind_function({})" if error_handling else "{}"
    lines = [
        f"m.def({_literal(name)}, {wrapped.format(name)}, {_literal(text)});"
        for name, text in documented.items()
    ]
    return ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *lines, "}"]


def _literal(text: str) -> str:
    """A C++ string literal."""
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    )
    return f'"{escaped}"'


def _listed(sources: str | Sequence[str]) -> list[str]:
    given = [sources] if isinstance(sources, str) else sources
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise TypeError(f"sources must be text, or a list of texts, got {type(sources).__name__}")
    return list(given)
