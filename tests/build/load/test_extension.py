"""flexops.load with real compilers, on sources that need no torch header or a light one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from extension_tools import AUDIT, MODULE, environment, run, write_module
from processes import completed

import flexops
from flexops import settings
from flexops.build.load import extension
from flexops.build.store.cache import BuildCache
from flexops.errors import CompileError, FlexopsError, ToolchainError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {
        "FLEXOPS_CACHE_DIR": str(tmp_path / "cache"),
        "FLEXOPS_PCH": "0",
        "FLEXOPS_LOG": "quiet",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache"


def entries(cache: Path, name: str) -> list[Path]:
    return [path.parent for path in (cache / name).glob("*/manifest.json")]


def test_an_edit_gives_the_new_code_in_the_same_process(tmp_path, cache):
    source = write_module(tmp_path, "41")
    first = flexops.load("edited", [str(source)])
    assert first.value() == 41
    assert flexops.load("edited", [str(source)]) is first
    assert len(entries(cache, "edited")) == 1
    write_module(tmp_path, "42")
    second = flexops.load("edited", str(source))
    assert (second.value(), first.value()) == (42, 41)
    write_module(tmp_path, "41")
    assert flexops.load("edited", [source]).value() == 41
    assert len(entries(cache, "edited")) == 2


def test_edits_of_headers_and_flags_are_noticed(tmp_path):
    beside, included = tmp_path / "beside.h", tmp_path / "include" / "deep" / "included.h"
    included.parent.mkdir(parents=True)
    beside.write_text('#include "deep/included.h"\n')
    source = tmp_path / "module.cpp"
    source.write_text(f'#include "beside.h"\n#define VALUE (A + B + C)\n{MODULE}')

    def value(c: int = 0) -> int:
        time.sleep(0.01)  # a header is rejected if it is newer than the start of the build
        return int(
            flexops.load(
                "headers",
                [source],
                extra_cflags=["-O1 -DZ=1", f"-DC={c}"],
                extra_include_paths=[tmp_path / "include"],
            ).value()
        )

    included.write_text("#define A 1\n#define B 10\n")
    assert value() == 11
    included.write_text("#define A 1\n#define B 20\n")
    assert value() == 21
    beside.write_text('#include "deep/included.h"\n#undef A\n#define A 2\n')
    assert value() == 22
    assert value(c=100) == 122


def test_a_warm_load_starts_nothing_writes_nothing_and_works_read_only(tmp_path, cache):
    source = write_module(tmp_path, "7")
    env = environment(cache)
    code = f"import torch, flexops\nassert flexops.load('warm', [{str(source)!r}]).value() == 7"
    run(code, env)
    for path in sorted(cache.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    cache.chmod(0o555)
    try:
        watched = code.replace("assert", f"\nexec({AUDIT!r})\nsys.addaudithook(hook)\nassert")
        assert run(watched, env).stderr == ""
    finally:
        for path in (cache, *(path for path in cache.rglob("*") if path.is_dir())):
            path.chmod(0o755)


def test_only_the_edited_source_is_compiled_again(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("FLEXOPS_COMPILER_LAUNCHER", "none")
    one, two = write_module(tmp_path, "other()", "one.cpp"), tmp_path / "two.cpp"
    one.write_text('#include "other.h"\n' + one.read_text())
    (tmp_path / "other.h").write_text("int other();\n")
    two.write_text("int other() { return 1; }\n")
    assert flexops.load("partly", [one, two]).value() == 1
    time.sleep(0.01)
    two.write_text("int other() { return 2; }\n")
    assert flexops.load("partly", [one, two]).value() == 2
    logs = [
        (entry / "build.log").read_text()
        for entry in sorted(entries(cache, "partly"), key=lambda path: path.stat().st_mtime)
    ]
    assert ["one.o" in log for log in logs] == [True, False]
    time.sleep(0.01)
    (tmp_path / "other.h").write_text("int other();\nint another();\n")
    assert flexops.load("partly", [one, two]).value() == 2
    assert len(entries(cache, "partly")) == 3
    two.write_text("int other() { return 2 }\n")
    with pytest.raises(CompileError, match=r"two\.cpp:1"):
        flexops.load("partly", [one, two])


def test_an_error_names_the_line_and_the_log(tmp_path):
    source = write_module(tmp_path, "1")
    source.write_text(source.read_text() + "\nint broken( { return 0; }\n")
    line = len(source.read_text().splitlines())
    with pytest.raises(CompileError, match=rf"{source}:{line}:.*error") as caught:
        flexops.load("broken", [source])
    assert isinstance(caught.value, RuntimeError)  # as torch raises
    assert caught.value.fix
    assert caught.value.log is not None
    assert f"{source}:{line}" in caught.value.log.read_text()
    write_module(tmp_path, "1")
    assert flexops.load("broken", [source]).value() == 1


def test_what_cannot_be_asked_for(tmp_path, cache, monkeypatch):
    source = write_module(tmp_path, "1")
    with pytest.raises(FileNotFoundError, match=r"absent\.cpp") as caught:
        flexops.load("absent", [tmp_path / "absent.cpp"])
    assert isinstance(caught.value, FlexopsError)
    with pytest.raises(ValueError, match="exclude"):
        flexops.load("both", [source], is_standalone=True)
    with pytest.raises(ValueError, match="name"):
        flexops.load("../escape", [source], is_python_module=False)
    with pytest.raises(ValueError, match="source"):
        flexops.load("nothing", [])
    with pytest.raises(ToolchainError, match="SYCL"):
        flexops.load("sycl", [source], with_sycl=True)
    monkeypatch.setenv("FLEXOPS_JIT", "0")
    with pytest.raises(FlexopsError, match="FLEXOPS_JIT"):
        flexops.load("never_built", [source])
    assert not cache.exists() or not list(cache.glob("*/*/manifest.json"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA")
def test_cuda_sources_need_a_torch_with_cuda(tmp_path):
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel() {}\n")
    with pytest.raises(ToolchainError, match="built without CUDA"):
        flexops.load("kernel", [source])


def test_a_library_of_operators(tmp_path):
    source, factor = tmp_path / "ops.cpp", tmp_path / "factor.cpp"
    source.write_text("""#include <torch/library.h>
        double factor();
        at::Tensor scaled(const at::Tensor& x) { return x.mul(factor()); }
        TORCH_LIBRARY(flexops_test_extension, m) { m.def("scaled(Tensor x) -> Tensor", &scaled); }
        """)

    def load(number: int) -> str:
        factor.write_text(f"double factor() {{ return {number}; }}\n")  # compiles at once
        return str(
            flexops.load("ops", [source, factor], extra_cflags=["-O0"], is_python_module=False)
        )

    path = load(-1)
    assert Path(path).is_file()
    assert torch.ops.flexops_test_extension.scaled(torch.ones(2)).tolist() == [-1.0, -1.0]
    assert load(-1) == path
    with pytest.raises(OSError, match="TORCH_LIBRARY of flexops_test_extension, which a process"):
        load(-2)  # torch would end the process
    assert torch.ops.flexops_test_extension.scaled(torch.ones(2)).tolist() == [-1.0, -1.0]
    source.write_text(source.read_text().replace("flexops_test_extension", "flexops_test_edited"))
    load(-2)
    assert torch.ops.flexops_test_edited.scaled(torch.ones(2)).tolist() == [-2.0, -2.0]


@pytest.mark.extra
def test_a_class_of_an_edited_module_is_local_to_it_or_an_error(tmp_path):
    source, number_of = tmp_path / "classes.cpp", tmp_path / "number.cpp"
    text = """#include <pybind11/pybind11.h>
        int number();
        struct Counter { int value = number(); };
        PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
          pybind11::class_<Counter>(m, "Counter"LOCAL).def(pybind11::init<>())
              .def_readwrite("value", &Counter::value);
        }"""

    def value(number: int, local: str = "") -> int:
        source.write_text(text.replace("LOCAL", local))
        number_of.write_text(f"int number() {{ return {number}; }}\n")  # compiles at once
        module = flexops.load("classes", [source, number_of], extra_cflags=["-O0"])
        return int(module.Counter().value)

    assert value(1) == 1
    with pytest.raises(ImportError, match=r"registered a class(.|\n)*fix: py::class_.*local\(\)"):
        value(2)
    assert value(3, ", pybind11::module_local()") == 3


def test_a_standalone_executable(tmp_path):
    source = tmp_path / "main.cpp"
    source.write_text(
        "#include <cstdio>\n#ifdef TORCH_EXTENSION_NAME\n#error\n#endif\nint main() {"
        ' std::puts("alone"); }\n'
    )
    path = flexops.load(
        "alone",
        [source],
        is_python_module=False,
        is_standalone=True,
        build_directory=tmp_path / "build",
    )
    assert path == str(tmp_path / "build" / "alone")
    assert completed([path]).stdout == "alone\n"


def test_build_directory_gets_the_result(tmp_path):
    source, build = write_module(tmp_path, "1"), tmp_path / "build"
    first = flexops.load("placed", [source], build_directory=build)
    library = build / "placed.so"
    assert first.__file__ == str(library)
    assert (build / "build.ninja").exists()
    seen = library.stat()
    assert flexops.load("placed", [source], build_directory=build) is first
    assert library.stat() == seen
    write_module(tmp_path, "2")
    assert flexops.load("placed", [source], build_directory=build).value() == 2
    assert library.stat().st_ino != seen.st_ino
    code = (
        f"import torch, flexops\nprint(flexops.load('placed', [{str(source)!r}],"
        f" build_directory={str(build)!r}).__file__)"
    )
    assert run(code, environment(tmp_path / "cache")).stdout.strip() == str(library)


def test_verbose_shows_the_commands(tmp_path, capfd):
    flexops.load("shown", [write_module(tmp_path, "1")], verbose=True)
    said = capfd.readouterr()
    assert "-DTORCH_EXTENSION_NAME=shown" in said.err
    assert said.out == ""


def test_text_sources(tmp_path, cache):
    def value(number: int) -> int:
        return int(
            flexops.load_inline(
                "inline", [f"#define VALUE {number}", MODULE], no_implicit_headers=True
            ).value()
        )

    assert (value(1), value(2), value(1)) == (1, 2, 1)
    assert sorted(
        (entry / "main.cpp").read_text()[14:15] for entry in entries(cache, "inline")
    ) == ["1", "2"]
    (tmp_path / "number.h").write_text("#define VALUE 3\n")
    placed = flexops.load_inline(
        "inline",
        ['#include "number.h"', MODULE],
        no_implicit_headers=True,
        build_directory=tmp_path,
    )
    assert placed.value() == 3
    assert (tmp_path / "main.cpp").exists()
    with pytest.raises(CompileError, match=r"main\.cpp:1"):
        flexops.load_inline("inline", "not C++", no_implicit_headers=True)


def test_awkward_names_work_or_are_rejected_in_words(tmp_path):
    folder = tmp_path / "it's $HOME #1: 100%"
    folder.mkdir()
    for number, name in enumerate(
        ["a$b.cpp", "-x.cpp", "a#b.cpp", "a b.cpp", "a'q\".cpp", "\u3000\u00e9.cpp"]
    ):
        source = write_module(folder, str(number), name)
        time.sleep(0.01)
        assert flexops.load("awkward", [source]).value() == number
    for name in ("a\nb.cpp", "a\tb.cpp", os.fsdecode(b"\xff.cpp")):
        source = write_module(folder, "1", name)
        with pytest.raises(FlexopsError, match="cannot be used in a build"):
            flexops.load("awkward", [source])
        with pytest.raises(FlexopsError, match="cannot be used in a build"):
            flexops.load("awkward", [folder / "a b.cpp"], extra_include_paths=[folder / name])
    with pytest.raises(ValueError, match="newline"):
        flexops.load("awkward", [folder / "a b.cpp"], extra_cflags=["'-DTEXT=a\nb'"])
    with pytest.raises(ValueError, match="cannot name"):
        flexops.load("-Wl", [folder / "a b.cpp"], is_python_module=False)


def test_names_and_arguments_that_no_file_can_have(tmp_path):
    source = write_module(tmp_path, "1")
    with pytest.raises(TypeError, match="must be text, got None"):
        flexops.load(None, [source])
    for module in (True, False):
        with pytest.raises(ValueError, match="it has 250 characters"):
            flexops.load("a" * 250, [source], is_python_module=module)
    with pytest.raises(ValueError, match="not UTF-8"):
        flexops.load("odd", [source], extra_cflags=["-DX=\udcff"])
    with pytest.raises(ValueError, match="not UTF-8"):
        flexops.load("odd", [source], extra_ldflags=["-L/\ud800"])
    with pytest.raises(ValueError, match=r"main.cpp has '\\udcff', which is not UTF-8"):
        flexops.load_inline("odd", "int x; // \udcff")


def test_a_source_that_is_deleted_meanwhile(tmp_path, monkeypatch):
    source = write_module(tmp_path, "1")
    known = extension.open_cache

    def deleting(chosen: settings.Settings) -> BuildCache:
        source.unlink()
        return known(chosen)

    monkeypatch.setattr(extension, "open_cache", deleting)
    with pytest.raises(extension.SourceNotFoundError, match="was deleted while it was loaded"):
        flexops.load("deleted", [source])


@pytest.mark.parametrize(
    ("limit", "before"),
    [
        (3, False),
        pytest.param(3, True, marks=pytest.mark.extra),
        pytest.param(6, False, id="no compiler starts"),
        pytest.param(8, False, id="no ninja starts", marks=pytest.mark.extra),
    ],
)
def test_a_process_that_may_open_few_files(tmp_path, limit, before):
    source = write_module(tmp_path, "1")
    code = f"""
import resource, flexops
flexops.load
if {before}: flexops.load("full", [{str(source)!r}])
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, most))
try:
    flexops.load("full", [{str(source)!r}])
except Exception as error:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    print(type(error).__name__, error)
"""
    said = run(code, environment(tmp_path / "cache")).stdout
    assert "FlexopsError no file can be opened: Too many open files" in said
    assert "fix: ulimit -n" in said


@pytest.mark.parametrize("module", [True, False])
def test_an_undefined_symbol_is_named_as_it_was_written(tmp_path, module):
    source = write_module(tmp_path, "nowhere::defined({1, 2})")
    source.write_text(
        "#include <vector>\nnamespace nowhere { int defined(const std::vector<int>&); }\n"
        + source.read_text()
    )
    with pytest.raises(
        ImportError if module else OSError,
        match=r"nowhere::defined\(std::vector<int, std::allocator<int> > const&\)",
    ) as caught:
        flexops.load("undefined", [source], is_python_module=module)
    assert isinstance(caught.value, FlexopsError)
    assert "extra_ldflags" in caught.value.fix


def test_a_working_directory_that_is_gone(tmp_path, cache):
    source = write_module(tmp_path, "6")
    code = f"""
import os, torch, flexops
os.mkdir({str(tmp_path / "gone")!r}); os.chdir({str(tmp_path / "gone")!r}); os.rmdir({str(tmp_path / "gone")!r})
print(flexops.load("gone", {str(source)!r}).value())
try:
    flexops.load("gone", "module.cpp")
except flexops.errors.FlexopsError as error:
    print(error)
"""
    said = run(code, environment(cache)).stdout
    assert said.startswith("6\n")
    assert "an absolute path" in said


def test_every_source_that_does_not_compile_is_named(tmp_path):
    sources = [tmp_path / name for name in ("one.cpp", "two.cpp")]
    for source in sources:
        source.write_text("int broken( { return 0; }\nint more( {\n")
    with pytest.raises(CompileError) as caught:
        flexops.load("both", sources)
    assert all(f"{source}:1" in caught.value.found for source in sources)
    assert ":2" not in caught.value.found


def test_a_cxx_that_is_too_old_is_replaced_with_a_word(tmp_path, monkeypatch):
    old = tmp_path / "old-compiler"
    old.write_text("#!/bin/sh\necho 'gcc version 4.9.2'\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setenv("FLEXOPS_LOG", "info")
    with pytest.warns(UserWarning, match=f"CXX={old} is not used .gcc 4.9.2 is too old"):
        assert flexops.load("replaced", [write_module(tmp_path, "1")]).value() == 1
    monkeypatch.setenv("CXX", str(tmp_path / "absent-g++"))
    with pytest.raises(ToolchainError, match="CXX names a C\\+\\+ compiler that cannot be used"):
        flexops.load("refused", [write_module(tmp_path, "1")])


def test_sources_that_are_no_list_are_named():
    for odd in (3, [3], b"a.cpp"):
        with pytest.raises(TypeError, match=r"extension odd: sources must be a path, .* got "):
            flexops.load("odd", odd)
    with pytest.raises(TypeError, match="sources must be text, or a list of texts, got int"):
        flexops.load_inline("odd", 3)


def test_sources_that_no_compiler_takes_are_named(tmp_path):
    source = tmp_path / "module.txt"
    source.write_text("")
    with pytest.raises(ValueError, match=r"module.txt has no name .*such as module.cpp"):
        flexops.load("odd", source)
    with pytest.raises(FlexopsError, match="there is no source"):  # the option says what it is
        flexops.load("odd", tmp_path / "other.txt", ["-x", "c++"])
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    with pytest.raises(ImportError, match=r"no Python module of its name\n.*PyInit_odd") as caught:
        flexops.load("odd", empty)
    assert "PYBIND11_MODULE" in str(caught.value)
    one = write_module(tmp_path, "1")
    with pytest.raises(ValueError, match="is listed twice"):
        flexops.load("odd", [one, one])


@pytest.mark.parametrize(
    "name", ["extra_cflags", "extra_cuda_cflags", "extra_ldflags", "extra_include_paths"]
)
def test_text_in_the_place_of_a_list_is_not_taken_letter_by_letter(tmp_path, name):
    source = [write_module(tmp_path, "1")]
    with pytest.raises(TypeError, match=rf"{name} must be a list .*such as \['-O2'\], got '-O2'"):
        flexops.load("odd", source, **{name: "-O2"})
    with pytest.raises(TypeError, match=rf"{name} must be a list of text"):
        flexops.load_inline("odd", "", **{name: [3]})


def test_what_cannot_be_a_directory_or_a_function():
    with pytest.raises(TypeError, match="build_directory must be a path, got 3"):
        flexops.load_inline("odd", "", build_directory=3)
    for functions in ([3], {"f": 3}):
        with pytest.raises(TypeError, match=r"functions must be names, .*got 3"):
            flexops.load_inline("odd", "", functions=functions)
