"""Nothing stale from flexops.load: what changes the meaning of an unchanged source gives a new
module, in the same process and with compiler caches."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from extension_tools import MODULE, environment, run
from marks import first_of

import flexops
from flexops.toolchain.model import HostCompiler

PYBIND = "#include <pybind11/pybind11.h>\nint f() {{ return {}; }}\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {
        "FLEXOPS_CACHE_DIR": str(tmp_path / "cache"),
        "FLEXOPS_PCH": "0",
        "FLEXOPS_LOG": "quiet",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache"


@pytest.fixture
def value(tmp_path: Path) -> Callable[..., int]:
    """Loads a module whose VALUE is what ``text`` says, and calls it."""

    def load(text: str, **options: object) -> int:
        source = tmp_path / "project" / "module.cpp"
        source.parent.mkdir(exist_ok=True)
        if not source.exists():
            source.write_text(f"{text}\n{MODULE}")
            time.sleep(0.01)  # a source is rejected if it is newer than the start of the build
        return int(flexops.load("stale", [source], **options).value())  # type: ignore[union-attr]

    return load


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    time.sleep(0.01)
    return path


@pytest.mark.extra
def test_pybind11_modules_of_one_name_are_distinguished(tmp_path):
    """pybind11 from 3.0 keeps the modules of a process by name: the second of a name would silently
    be the first."""

    def inline(number: int) -> object:
        return flexops.load_inline(
            "x",
            PYBIND.format(number),
            functions="f",
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
        )

    first, second = inline(123), inline(456)
    assert (first.f(), second.f()) == (123, 456)  # type: ignore[attr-defined]
    assert inline(123) is first
    other = write(
        tmp_path / "other" / "x.cpp",
        PYBIND.format(789)
        + 'struct A {};\nPYBIND11_MODULE(x, m) { m.def("f", f); pybind11::class_<A>(m, "A"); }\n',
    )
    third = flexops.load("x", other)
    assert (third.f(), first.f(), second.f()) == (789, 123, 456)  # type: ignore[attr-defined, union-attr]
    assert (third.__name__, third.A.__module__) == ("x", "x")  # type: ignore[union-attr]


@pytest.mark.parametrize("there", first_of(True, False))
def test_a_header_that_is_newly_earlier_on_the_include_path(tmp_path, value, there):
    late, early = tmp_path / "late", tmp_path / "early"
    write(late / "lib" / "number.h", "#define VALUE 1\n")
    if there:
        early.mkdir()
    text = "#include <lib/number.h>"
    assert value(text, extra_include_paths=[early, late]) == 1
    write(early / "unrelated.h", "#define VALUE 3\n")
    assert value(text, extra_include_paths=[early, late]) == 1
    write(early / "lib" / "number.h", "#define VALUE 2\n")
    assert value(text, extra_include_paths=[early, late]) == 2
    (early / "lib" / "number.h").unlink()
    assert value(text, extra_include_paths=[early, late]) == 1


def test_a_header_that_is_newly_beside_the_source(tmp_path, value):
    write(tmp_path / "include" / "number.h", "#define VALUE 1\n")
    assert value('#include "number.h"', extra_cflags=[f"-I{tmp_path / 'include'}"]) == 1
    write(tmp_path / "project" / "number.h", "#define VALUE 2\n")
    assert value('#include "number.h"', extra_cflags=[f"-I{tmp_path / 'include'}"]) == 2


def test_a_header_that_newly_hides_one_of_the_compilers(tmp_path, value):
    (tmp_path / "include").mkdir()
    text = "#include <cstdlib>\n#ifndef VALUE\n#define VALUE 1\n#endif"
    assert value(text, extra_include_paths=[tmp_path / "include"]) == 1
    # <cstdlib> includes it
    write(tmp_path / "include" / "stdlib.h", "#include_next <stdlib.h>\n#define VALUE 2\n")
    assert value(text, extra_include_paths=[tmp_path / "include"]) == 2


@pytest.mark.parametrize(
    "text",
    first_of(
        "#if __has_include(<optional/part.h>)",
        "#define PART <optional/part.h>\n#if __has_include(PART)",
    ),
)
def test_has_include_of_a_file_that_comes_to_be(tmp_path, value, text):
    text += "\n#define VALUE 2\n#else\n#define VALUE 1\n#endif"
    assert value(text, extra_include_paths=[tmp_path]) == 1
    write(tmp_path / "optional" / "part.h", "")
    assert value(text, extra_include_paths=[tmp_path]) == 2
    (tmp_path / "optional" / "part.h").unlink()
    assert value(text, extra_include_paths=[tmp_path]) == 1


@pytest.mark.parametrize("variable", first_of("CPATH", "CPLUS_INCLUDE_PATH"))
def test_include_paths_of_the_environment(tmp_path, value, monkeypatch, variable):
    for number in (1, 2):
        write(tmp_path / str(number) / "number.h", f"#define VALUE {number}\n")
        monkeypatch.setenv(variable, str(tmp_path / str(number)))
        assert value("#include <number.h>") == number
    monkeypatch.setenv(variable, f"{tmp_path / 'early'}:{tmp_path / '2'}")
    assert value("#include <number.h>") == 2
    write(tmp_path / "early" / "number.h", "#define VALUE 3\n")
    assert value("#include <number.h>") == 3


def library(compiler: HostCompiler, folder: Path, number: int, *, shared: bool) -> None:
    source = write(folder / "number.cpp", f"int number() {{ return {number}; }}\n")
    if shared:
        subprocess.run(
            [compiler.path, "-shared", "-fPIC", source, "-o", folder / "libnumber.so"], check=True
        )
        return
    subprocess.run([compiler.path, "-fPIC", "-c", source, "-o", folder / "number.o"], check=True)
    (folder / "libnumber.a").unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", folder / "libnumber.a", folder / "number.o"], check=True)


@pytest.mark.parametrize("how", ["flags", "environment", "path"])
def test_a_changed_static_library(tmp_path, value, monkeypatch, host_compiler, how):
    folder, early = tmp_path / "libraries", tmp_path / "early"
    early.mkdir()
    flags = {
        "flags": [f"-L{early}", f"-L{folder} -lnumber"],
        "environment": ["-lnumber"],
        "path": [f"{folder}/libnumber.a"],
    }[how]
    if how == "environment":
        monkeypatch.setenv("LIBRARY_PATH", f"{early}:{folder}")
    for number in (1, 2):
        library(host_compiler, folder, number, shared=False)
        assert value("int number();\n#define VALUE number()", extra_ldflags=flags) == number
    if how != "path":
        library(host_compiler, early, 3, shared=False)
        assert value("int number();\n#define VALUE number()", extra_ldflags=flags) == 3


def test_a_changed_shared_library(tmp_path, value, cache, host_compiler):
    flags = [f"-L{tmp_path / 'lib'}", "-lnumber", f"-Wl,-rpath,{tmp_path / 'lib'}"]
    library(host_compiler, tmp_path / "lib", 1, shared=True)
    assert value("int number();\n#define VALUE number()", extra_ldflags=flags) == 1
    library(host_compiler, tmp_path / "lib", 2, shared=True)
    # this process has the first one open
    value("int number();\n#define VALUE number()", extra_ldflags=flags)
    assert len(list((cache / "stale").glob("*/manifest.json"))) == 2


@pytest.mark.extra
def test_with_ccache_too(tmp_path, cache, ccache):
    """Its quick look-up knows a source by the headers that were read the last time."""
    source = write(tmp_path / "module.cpp", f"#include <number.h>\n{MODULE}")
    write(tmp_path / "late" / "number.h", "#define VALUE 1\n")
    paths = [str(tmp_path / "early"), str(tmp_path / "late")]
    code = (
        f"import torch, flexops\nprint(flexops.load('cached', {str(source)!r},"
        f" extra_include_paths={paths}).value())"
    )
    env = environment(
        cache, CCACHE_DIR=str(tmp_path / "ccache"), FLEXOPS_COMPILER_LAUNCHER=str(ccache)
    )
    (tmp_path / "early").mkdir()
    time.sleep(2)  # ccache does not remember headers that are newer than its start
    assert run(code, env).stdout.strip() == "1"
    write(tmp_path / "early" / "number.h", "#define VALUE 2\n")
    assert run(code, env).stdout.strip() == "2"
