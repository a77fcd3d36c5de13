"""`.flexops/env.sh`: for any POSIX shell, zsh included; sourcing it twice is sourcing it once, and
flexops_env_undo restores everything.

What it does is in env.posix.sh beside it, so that a shell that cannot read that (fish) can read
env.sh, which then prints what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from .environment import program
from .plan import Plan
from .state import STATE, replace
from .terminal import Failure, note

NAMES = (
    "PATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV CUDA_HOME ROCM_HOME CXX CC"
    " TORCH_CUDA_ARCH_LIST PYTORCH_ROCM_ARCH MAX_JOBS PYTORCH_NVCC FLEXOPS_CACHE_DIR"
    " TORCH_EXTENSIONS_DIR CCACHE_DIR SCCACHE_DIR FLEXOPS_COMPILER_LAUNCHER"
    " CMAKE_C_COMPILER_LAUNCHER CMAKE_CXX_COMPILER_LAUNCHER CMAKE_CUDA_COMPILER_LAUNCHER"
    " FLEXOPS_ENV_FILE"
)
FILE = STATE / "env.sh"
POSIX_FILE = STATE / "env.posix.sh"
_MADE = "# Made by scripts/setup_cuda_dev_environment.sh for the target {target}"
# In fish alone, '\\' is one character; it reads the file as a whole before it does any of it.
_STUB = (
    _MADE
    + r""". Source it; flexops_env_undo takes everything back.
test '\\' = "\\" && echo {message}
test '\\' = "\\" || . {file}
"""
)
_HEAD = (
    _MADE
    + r"""; env.sh sources it.
# shellcheck shell=sh disable=SC2034,SC2154
if command -v flexops_env_undo >/dev/null 2>&1; then flexops_env_undo; fi

_flexops_remember() {
  eval "_flexops_had_$1=\${$1+yes} _flexops_was_$1=\${$1-}"
}
_flexops_set() {
  _flexops_remember "$1"
  export "$1=$2"
}
_flexops_unset() {
  _flexops_remember "$1"
  unset "$1"
}
_flexops_default() {
  if eval "[ -z \"\${$1-}\" ]"; then _flexops_set "$1" "$2"; fi
}
flexops_env_undo() {
DEACTIVATE  for _flexops_name in NAMES; do
    eval "_flexops_had=\${_flexops_had_$_flexops_name-untouched}"
    case $_flexops_had in
      untouched) ;;
      yes) eval "export $_flexops_name=\"\$_flexops_was_$_flexops_name\"" ;;
      *) unset "$_flexops_name" ;;
    esac
    unset "_flexops_had_$_flexops_name" "_flexops_was_$_flexops_name"
  done
  unset _flexops_name _flexops_had
  unset -f flexops_env_undo _flexops_remember _flexops_set _flexops_unset _flexops_default
  hash -r 2>/dev/null || true
}
"""
)
# conda's packages (compilers above all) set variables of their own.
_CONDA = """for _flexops_script in {root}/etc/conda/{what}.d/*.sh; do
  if [ -r "$_flexops_script" ]; then . "$_flexops_script"; fi
done
unset _flexops_script
"""


def write(plan: Plan) -> None:
    """Both files, and the links that they need."""
    if plan.toolkit == "index":
        _link_toolkit(plan)
    link = STATE / "bin/c++"
    if _needs_compiler_link(plan):
        text = f'#!/bin/sh\nexec {quote(plan.launcher)} {quote(plan.host)} "$@"\n'
        replace(link, text, executable=True)
    else:
        link.unlink(missing_ok=True)
    replace(POSIX_FILE, text_for(plan))
    message = (
        "flexops: fish cannot read what POSIX shells read; a fish with this environment:"
        f" {within('fish')}"
    )
    made = {"target": plan.target.id, "message": quote(message), "file": quote(str(POSIX_FILE))}
    replace(FILE, _STUB.format(**made))
    note(f"source {FILE}")


def within(shell: str) -> str:
    """The command that runs a shell which cannot source env.sh, with what env.sh sets."""
    return f'bash -c "source {quote(str(FILE))}; exec {shell}"'


def text_for(plan: Plan) -> str:
    """What POSIX shells read. A value of "_flexops_default" gives way to what the user has set."""
    root = quote(str(plan.environment.root))
    conda = plan.options.conda
    undo = _CONDA.format(root=root, what="deactivate") if conda else ""
    undo = "".join(f"  {line}\n" for line in undo.splitlines())
    head = _HEAD.replace("{target}", plan.target.id).replace("NAMES", NAMES)
    path = [str(STATE / "bin")] * _needs_compiler_link(plan) + [str(plan.environment.root / "bin")]
    path += [f"{plan.toolkit_root}/bin"] * bool(plan.toolkit_root)
    lines = [
        head.replace("DEACTIVATE", undo),
        "_flexops_set PATH " + "".join(f"{quote(one)}:" for one in path) + '"$PATH"',
        "_flexops_unset PYTHONHOME",
        *(f"_flexops_{how} {name} {quote(value)}" for how, name, value in _values(plan)),
        f"_flexops_set FLEXOPS_ENV_FILE {quote(str(POSIX_FILE))}",
        *([_CONDA.format(root=root, what="activate")] if conda else []),
        "hash -r 2>/dev/null || true",
    ]
    return "\n".join(lines) + "\n"


def _values(plan: Plan) -> Iterator[tuple[str, str, str]]:
    root, toolkit, target = str(plan.environment.root), plan.toolkit_root, plan.target
    if plan.options.conda:
        yield "set", "CONDA_PREFIX", root
        yield "set", "CONDA_DEFAULT_ENV", root
    else:
        yield "set", "VIRTUAL_ENV", root
    if plan.toolkit == "conda":
        toolkit = root
    if target.accelerator != "cpu":
        cuda = target.accelerator == "cuda"
        if toolkit:
            yield "set", "CUDA_HOME" if cuda else "ROCM_HOME", toolkit
        yield "set", "TORCH_CUDA_ARCH_LIST" if cuda else "PYTORCH_ROCM_ARCH", target.arch_list
    yield from _compilers(plan)
    yield "default", "MAX_JOBS", str(plan.jobs)
    yield "default", "FLEXOPS_CACHE_DIR", str(STATE / "cache/flexops")
    yield "default", "TORCH_EXTENSIONS_DIR", str(STATE / "cache/torch_extensions")
    launcher = plan.launcher
    if not launcher:
        return
    name = Path(launcher).name
    if name in ("ccache", "sccache"):
        yield "default", f"{name.upper()}_DIR", str(STATE / "cache" / name)
    yield "set", "FLEXOPS_COMPILER_LAUNCHER", launcher
    for language in ("C", "CXX", "CUDA"):
        yield "default", f"CMAKE_{language}_COMPILER_LAUNCHER", launcher
    if target.accelerator == "cuda" and toolkit and not plan.torch_wraps_compilers:
        yield "default", "PYTORCH_NVCC", f"{launcher} {toolkit}/bin/nvcc"


def _compilers(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Only where the compiler called c++ is one that the target's nvcc or torch rejects; conda's
    own scripts set theirs."""
    usual = program("c++")
    if plan.options.conda or not plan.host:
        return
    if usual and os.path.realpath(usual) == os.path.realpath(plan.host):
        return
    yield "set", "CXX", plan.host
    before, plus, after = plan.host.rpartition("g++")
    if plus and os.access(f"{before}gcc{after}", os.X_OK):
        yield "set", "CC", f"{before}gcc{after}"


def _needs_compiler_link(plan: Plan) -> bool:
    """torch before 2.13 calls the compiler c++: one on PATH puts the launcher before it."""
    return bool(plan.launcher) and not plan.options.conda and not plan.torch_wraps_compilers


def _link_toolkit(plan: Plan) -> None:
    """The index's toolkit has lib/ and libcudart.so.13 where torch's cpp_extension looks for
    lib64/libcudart.so: links give it that shape."""
    wheel = plan.environment.toolkit(plan.target.toolkit_minor.partition(".")[0])
    if not wheel:
        root = plan.environment.prefix
        fix = f"rm -rf {root}, then run the same command again"
        raise Failure(f"the package index's toolkit is not in {root}", fix)
    place = STATE / "cuda"
    for name in ("bin", "include", "nvvm"):
        _link(place / name, wheel / name)
    for library in (wheel / "lib").iterdir():
        _link(place / "lib64" / library.name, library)
        if ".so." in library.name and library.name.startswith("lib"):
            _link(place / "lib64" / f"{library.name.partition('.so.')[0]}.so", library)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
