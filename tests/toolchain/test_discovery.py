"""Searches in trees made for the purpose, with programs that only print a version."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import completed

from flexops.settings import Settings
from flexops.toolchain import discover, missing, proc
from flexops.toolchain import probe as probing
from flexops.toolchain.context import SearchContext
from flexops.toolchain.discovery import assemble
from flexops.toolchain.installed_torch import read, torch_build
from flexops.toolchain.memo import SCHEMA, Memo
from flexops.toolchain.model import TorchBuild, Version
from flexops.toolchain.probe import read_compiler, read_hipcc, read_nvcc, read_plain

PACKAGE_ROOT = str(Path(__file__).parents[2])
NVCC = "Cuda compilation tools, release {0}, V{0}.88\nBuild cuda_{0}.r{0}/compiler.1_0"
GXX = "Target: x86_64-linux-gnu\ngcc version {0} (Debian {0}-14)"
HIPCC = "HIP version: {0}.21153-0\nclang version 15.0.7\nInstalledDir: /somewhere"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return path


def files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def toolkit(root: Path, version: str, include: str = "include", library: str = "lib64") -> Path:
    program(root / "bin/nvcc", NVCC.format(version))
    files(
        root,
        f"{include}/cuda_runtime_api.h",
        f"{include}/crt/host_config.h",
        f"{library}/libcudart_static.a",
    )
    return root


def torch_for(
    cuda: str | None = None, hip: str | None = None, version: str = "2.14.1"
) -> TorchBuild:
    return TorchBuild(version, cuda, hip, "", True, Path("/torch"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A machine with a g++ and a ninja, and no more."""
    program(tmp_path / "usr/bin/g++", GXX.format("12.2.0"))
    program(tmp_path / "usr/bin/ninja", "1.11.1")
    return tmp_path


Search = Callable[..., SearchContext]


@pytest.fixture
def search(tree: Path) -> Search:
    def context(**changes: object) -> SearchContext:
        plain = SearchContext(
            search_path=(f"{tree}/usr/bin",), prefix=f"{tree}/venv", root=str(tree)
        )
        return plain._replace(**changes)  # type: ignore[arg-type]

    return context


def test_the_wrong_major_first_on_path(tree, search):
    toolkit(tree / "old", "12.1")
    toolkit(tree / "usr/local/cuda-13.0", "13.0")
    found = assemble(
        search(search_path=(f"{tree}/old/bin", f"{tree}/usr/bin")), torch_for("13.0"), device="cuda"
    )
    assert found.cuda
    assert (str(found.cuda.version), dict(found.found_via)["cuda"]) == ("13.0", "/usr/local")
    assert [(one.path, "another major" in one.reason) for one in found.rejected] == [
        (tree / "old", True)
    ]


def test_a_cuda_home_of_another_major_gives_way_to_one_that_matches(tree, search):
    toolkit(tree / "wished", "12.4")
    toolkit(tree / "site/nvidia/cu13", "13.0", library="lib")
    found = assemble(
        search(cuda_home=f"{tree}/wished", site_dirs=(f"{tree}/site",)),
        torch_for("13.0"),
        device="cuda",
    )
    assert found.cuda
    assert dict(found.found_via)["cuda"] == "site-packages"
    assert found.rejected[0].path == tree / "wished"
    alone = assemble(search(cuda_home=f"{tree}/wished"), torch_for("13.0"), device="cuda")
    assert alone.cuda is None
    error = missing(alone)
    assert error
    assert "wished" in error.found


def test_index_wheels(tree, search):
    root = toolkit(tree / "site/nvidia/cu13", "13.0", library="lib")
    files(root, "include/cccl/x.h")
    found = assemble(
        search(site_dirs=(f"{tree}/none", f"{tree}/site")), torch_for("13.0"), device="cuda"
    ).cuda
    assert found
    assert found.root == root
    assert found.include_dirs == (root / "include", root / "include/cccl")
    assert found.library_dirs == (root / "lib",)
    assert found.nvcc.version == Version((13, 0, 88))
    assert found.nvcc.identity == "nvcc 13.0.88 cuda_13.0.r13.0/compiler.1_0"


def test_the_12_wheels_have_no_nvcc_and_that_is_said(tree, search):
    files(tree, "site/nvidia/cuda_nvcc/bin/ptxas")
    found = assemble(search(site_dirs=(f"{tree}/site",)), torch_for("12.1"), device="cuda")
    assert found.cuda is None
    assert "no nvcc" in found.rejected[0].reason
    error = missing(found)
    assert error
    assert "conda install" in error.fix
    assert "nvidia/cuda:12.1" in error.fix


def test_conda_keeps_headers_below_targets(tree, search):
    toolkit(tree / "conda", "12.6", "targets/x86_64-linux/include", "targets/x86_64-linux/lib")
    program(tree / "conda/bin/x86_64-conda-linux-gnu-c++", GXX.format("13.3.0"))
    found = assemble(
        search(conda_prefix=f"{tree}/conda"), torch_for("12.6", version="2.7.1"), device="cuda"
    )
    assert found.cuda
    assert found.host
    assert found.cuda.include_dirs == (tree / "conda/targets/x86_64-linux/include",)
    assert (dict(found.found_via)["cuda"], dict(found.found_via)["host"]) == ("conda", "conda")
    assert found.host.version == Version((13, 3, 0))


def test_an_incomplete_toolkit_says_what_it_lacks(tree, search):
    program(tree / "usr/local/cuda-13.0/bin/nvcc", NVCC.format("13.0"))
    found = assemble(search(), torch_for("13.0"), device="cuda")
    assert found.cuda is None
    assert "the CUDA headers and libcudart_static.a" in found.rejected[0].reason


def test_an_nvcc_that_does_not_run_is_refused(tree, search):
    root = toolkit(tree / "usr/local/cuda-13.0", "13.0")
    (root / "bin/nvcc").write_text("#!/bin/sh\necho broken driver >&2; exit 3\n")
    found = assemble(search(), torch_for("13.0"), device="cuda")
    assert "exits 3" in found.rejected[0].reason
    assert "broken driver" in found.rejected[0].reason


def test_a_wrapper_on_path_leads_to_its_toolkit(tree, search):
    real = toolkit(tree / "elsewhere", "13.0")
    program(tree / "usr/bin/nvcc", f"#$ _SPACE_=\n#$ TOP={real}/bin/..")
    found = assemble(search(memo=Memo()), torch_for("13.0"), device="cuda").cuda
    assert found
    assert found.root == real


def test_one_toolkit_under_two_names_counts_once(tree, search):
    toolkit(tree / "usr/local/cuda-12.4", "12.4")
    (tree / "usr/local/cuda").symlink_to("cuda-12.4")
    found = assemble(search(), torch_for("13.0"), device="cuda")
    assert len(found.rejected) == 1


def test_nothing_found_lists_everything_tried(search):
    error = missing(assemble(search(), torch_for("13.0"), device="cuda"))
    assert error
    for place in ("CUDA_HOME", "nvidia/cu*", "conda", "PATH", "/usr/local/cuda*"):
        assert place in error.found


def test_gcc_too_new_takes_the_older_one(tree, search):
    toolkit(tree / "usr/local/cuda-12.1", "12.1")
    program(tree / "usr/bin/g++", GXX.format("14.2.0"))
    program(tree / "usr/bin/g++-12", GXX.format("12.3.0"))
    program(tree / "usr/bin/g++-9", GXX.format("9.5.0"))
    found = assemble(search(), torch_for("12.1", version="2.4.1"), device="cuda")
    assert found.host
    assert found.host.path == tree / "usr/bin/g++-12"
    assert [one.path.name for one in found.rejected] == ["g++"]
    assert assemble(search(), torch_for("12.1", version="2.4.1"), device="cpu").host != found.host


def test_cxx(tree, search):
    mine = program(tree / "own/my-g++", GXX.format("11.4.0"))
    for wish, path in ((str(mine), mine), ("my-g++", mine), ("ccache my-g++ -m64", mine)):
        found = assemble(
            search(cxx=wish, search_path=(f"{tree}/usr/bin", f"{tree}/own")),
            torch_for(),
            device="cpu",
        )
        assert found.host
        assert found.host.path == path


def test_a_cxx_that_is_no_compiler_is_refused_and_not_replaced(tree, search):
    (tree / "text").write_text("no program")
    for wish, reason in (("absent-g++", "is missing"), (str(tree / "text"), "not executable")):
        found = assemble(search(cxx=wish), torch_for(), device="cpu")
        assert found.host is None
        error = missing(found, "cpu")
        assert error
        assert "CXX" in error.what
        assert f"CXX={wish}" in error.found
        assert reason in error.found
        assert error.fix.startswith("unset CXX")


def test_a_ccache_masquerade_is_no_compiler(tree, search):
    program(tree / "usr/bin/ccache", "ccache version 4.7.5")
    (tree / "masks").mkdir()
    (tree / "masks/g++").symlink_to("../usr/bin/ccache")
    found = assemble(
        search(search_path=(f"{tree}/masks", f"{tree}/usr/bin")), torch_for(), device="cpu"
    )
    assert found.host
    assert found.host.path == tree / "usr/bin/g++"
    assert found.launcher
    assert found.launcher.identity == "ccache 4.7.5"


def test_cpu_looks_for_no_toolkit(tree, search):
    toolkit(tree / "usr/local/cuda-13.0", "13.0")
    assert assemble(search(), torch_for("13.0"), device="cpu").cuda is None


def test_ninja_in_the_environment_when_path_lacks_it(tree, search):
    (tree / "usr/bin/ninja").unlink()
    assert assemble(search(), None, device="cpu").ninja is None
    own = program(tree / "venv/bin/ninja", "1.13.2")
    found = assemble(search(), None, device="cpu")
    assert found.ninja
    assert (found.ninja.path, dict(found.found_via)["ninja"]) == (own, "environment")
    packaged = program(tree / "site/ninja/data/bin/ninja", "1.11.1")
    found = assemble(search(site_dirs=(f"{tree}/site",)), None, device="cpu")
    assert found.ninja
    assert found.ninja.path == packaged


@pytest.mark.parametrize(
    ("wish", "present", "taken"),
    [
        (None, ("ccache", "sccache"), "ccache"),
        (None, ("sccache",), "sccache"),
        (None, (), None),
        ("none", ("ccache",), None),
        ("sccache", ("ccache", "sccache"), "sccache"),
        ("distcc", ("ccache",), None),
    ],
)
def test_launchers(tree, search, wish, present, taken):
    for name in present:
        program(tree / "usr/bin" / name, f"{name} 1.2.3")
    found = assemble(search(launcher=wish), None, device="cpu")
    assert (found.launcher and found.launcher.path.name) == taken
    assert wish != "distcc" or found.rejected[0].what == "distcc"


def test_rocm_in_opt_and_from_the_distribution(tree, search):
    program(tree / "usr/bin/hipcc", HIPCC.format("5.2"))
    files(tree, "usr/include/hip/hip_runtime.h", "usr/lib/x86_64-linux-gnu/libamdhip64.so")
    found = assemble(search(), torch_for(hip="5.2"), device="cuda").rocm
    assert found
    assert found.root == tree / "usr"
    assert "/" not in found.hipcc.identity
    program(tree / "opt/rocm-7.2.1/bin/hipcc", HIPCC.format("7.2"))
    files(tree, "opt/rocm-7.2.1/include/hip/hip_runtime.h", "opt/rocm-7.2.1/lib/libamdhip64.so")
    both = assemble(search(), torch_for(hip="7.2"), device="cuda")
    assert both.rocm
    assert both.rocm.root == tree / "opt/rocm-7.2.1"
    assert [one.path for one in both.rejected] == [tree / "usr"]
    assert both.cuda is None


def test_identities_hold_versions_and_no_paths():
    assert read_compiler(
        "COLLECT_GCC=/a/g++\nTarget: x86_64-linux-gnu\ngcc version 12.2.0 (Debian 12.2.0-14) \n"
    ) == (
        Version((12, 2, 0)),
        "gcc 12.2.0 (Debian 12.2.0-14) x86_64-linux-gnu",
    )
    assert read_compiler(
        "Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu\nInstalledDir: /usr/bin"
    ) == (
        Version((14, 0, 6)),
        "clang 14.0.6 Debian x86_64-pc-linux-gnu",
    )
    assert read_nvcc(NVCC.format("12.1"))[1] == "nvcc 12.1.88 cuda_12.1.r12.1/compiler.1_0"
    assert read_hipcc(HIPCC.format("7.2"))[1] == "hipcc 7.2.21153-0 clang version 15.0.7"
    assert read_plain("sccache 0.8.1", "sccache") == (Version((0, 8, 1)), "sccache 0.8.1")
    for reader in (read_compiler, read_nvcc, read_hipcc):
        with pytest.raises(ValueError, match=r"no|neither"):
            reader("something else")


def test_the_memo_saves_asking_and_notices_changes(tree, search):
    asked: list[str] = []

    def probe(kind: str, path: str) -> tuple[Version, str]:
        asked.append(os.path.basename(path))
        return Version((12, 2)), f"gcc {kind}"

    memo_file = str(tree / "cache/tools.json")
    for _ in range(2):
        memo = Memo(memo_file)
        assemble(search(memo=memo, probe=probe), None, device="cpu")
        memo.save()
    assert sorted(asked) == ["g++", "ninja"]
    program(tree / "usr/bin/g++", "longer than it was")
    assemble(search(memo=Memo(memo_file), probe=probe), None, device="cpu")
    assert sorted(asked) == ["g++", "g++", "ninja"]
    assert [path.name for path in (tree / "cache").iterdir()] == ["tools.json"]


def test_a_directory_is_listed_again_when_it_changes(tree, search):
    memo = Memo()
    os.utime(tree / "usr/bin", (1, 1))
    assert list(search(memo=memo).on_path("g++", numbered=True)) == [f"{tree}/usr/bin/g++"]
    program(tree / "usr/bin/g++-11", "x")
    assert list(search(memo=memo).on_path("g++", numbered=True)) == [
        f"{tree}/usr/bin/g++",
        f"{tree}/usr/bin/g++-11",
    ]
    assert not list(search(memo=memo).on_path("g++-1"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"schema": 0}', b'{"schema": 1, "tables": {"toml": {"a": 3}}}', b"\xff"],
)
def test_a_damaged_memo_is_no_memo(tmp_path, content):
    path = tmp_path / "tools.json"
    path.write_bytes(content)
    memo = Memo(str(path))
    assert memo.recall("table", str(path), lambda _: 5) == 5
    memo.save()
    assert json.loads(path.read_text())["schema"] == SCHEMA


def test_any_flipped_bit_of_a_memo_is_noticed(tmp_path):
    """An answer of another shape raised at every start; one of another compiler would be
    believed."""
    path = tmp_path / "tools.json"
    memo = Memo(str(path))
    memo.recall("version", __file__, lambda _: {"path": "/usr/bin/g++", "numbers": [12, 2]})
    memo.save()
    good = path.read_bytes()
    believed = 0
    for position in range(len(good)):
        for bit in range(0, 8, 3):
            flipped = bytearray(good)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            answer = Memo(str(path)).recall("version", __file__, lambda _: "asked again")
            believed += answer != "asked again"
            assert answer in ("asked again", {"path": "/usr/bin/g++", "numbers": [12, 2]})
    assert believed == 0


def test_a_memo_that_others_can_write_is_not_believed(tmp_path):
    path = tmp_path / "tools.json"
    memo = Memo(str(path))
    memo.recall("table", __file__, lambda _: 1)
    memo.save()
    assert Memo(str(path)).recall("table", __file__, lambda _: 2) == 1
    path.chmod(path.stat().st_mode | stat.S_IWGRP)
    assert Memo(str(path)).recall("table", __file__, lambda _: 2) == 2


def test_a_memo_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    memo = Memo(str(tmp_path / "file/tools.json"))
    memo.recall("table", __file__, lambda _: 1)
    memo.save()


def fake_torch(site: Path, version: str, cuda: str = "None", content: bytes | None = None) -> Path:
    files(site, "torch/version.py")
    (site / "torch/version.py").write_text(
        "from typing import Optional\n__all__ = ['__version__', 'cuda']\n__version__ ="
        f" '{version}'\ndebug = False\ncuda: Optional[str] = {cuda}\ngit_version = 'abc'\nhip:"
        " Optional[str] = None\nrocm: Optional[str] = None\n"
    )
    if content is not None:
        files(site, "torch/lib/libc10.so")
        (site / "torch/lib/libc10.so").write_bytes(content)
    return site


def test_torch_from_its_files(tmp_path):
    first = fake_torch(
        tmp_path / "a",
        "2.14.1+cu130",
        "'13.0'",
        b"..._ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string...__cxx11",
    )
    second = fake_torch(
        tmp_path / "b", "2.4.1+cu121", "'12.1'", b"__cxx11 _ZN3c105ErrorC1ENS_14SourceLocationESs"
    )
    build = torch_build([str(tmp_path / "none"), str(first), str(second)])
    assert build == TorchBuild("2.14.1+cu130", "13.0", None, "abc", True, first / "torch")
    old = read(str(second / "torch"))
    assert old
    assert (old.cxx11_abi, old.cuda, old.abi_id) == (False, "12.1", "torch-2.4-cxx11abi0-cu12.1")
    for version, abi in (("2.6.0", False), ("2.7.0", True), ("2.13.0a0+git123", True)):
        bare = torch_build([str(fake_torch(tmp_path / version, version))])
        assert bare
        assert (bare.cxx11_abi, bare.cuda) == (abi, None)
    assert torch_build([str(tmp_path / "none")]) is None
    (first / "torch/version.py").write_text("garbage")
    assert torch_build([str(first)]) is None


ASK = (
    "import sys; from flexops.toolchain import torch_build; build = torch_build();"
    " print(build.version, build.cxx11_abi, 'torch' in sys.modules)"
)


def python(*arguments: str, **environment: str) -> str:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CUDA_HOME", "CXX")
    }
    done = completed([sys.executable, *arguments], env={**inherited, **environment})
    return done.stdout.strip()


def without_package_init(code: str) -> str:
    """Run below ``flexops`` without its ``__init__``, which needs a torch that works."""
    return (
        f"import sys, types; p = types.ModuleType('flexops'); p.__path__ = [{PACKAGE_ROOT!r} +"
        f" '/flexops']; sys.modules['flexops'] = p\n{code}"
    )


def test_torch_that_cannot_be_imported_is_still_found(tmp_path):
    fake_torch(tmp_path, "2.14.1+cu130")
    (tmp_path / "torch/__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    assert (
        python(
            "-c",
            without_package_init(f"try:\n    import torch\nexcept ImportError: pass\n{ASK}"),
            PYTHONPATH=str(tmp_path),
        )
        == "2.14.1+cu130 True False"
    )


def test_torch_hidden_by_build_isolation_is_still_found():
    installed = torch_build()
    assert installed
    # What pip's isolation does: the same interpreter, with site-packages taken off sys.path.
    hide = (
        "import sys; sys.path[:] = [entry for entry in sys.path if not entry.endswith('-packages')]"
    )
    assert python("-c", without_package_init(f"{hide}\n{ASK}")).split()[0] == installed.version


def test_what_torch_says_of_itself_agrees_with_its_files():
    torch = pytest.importorskip("torch")
    imported = torch_build()
    assert imported
    assert imported == read(str(Path(torch.__file__).parent))
    assert imported.cxx11_abi == torch.compiled_with_cxx11_abi()


DISCOVER = """
import os, sys
ran = []
sys.addaudithook(lambda event, arguments: ran.append(arguments[0]) if event in ("subprocess.Popen", "os.posix_spawn", "os.exec") else None)
from flexops.settings import Settings
from flexops.toolchain import discover
found = discover(Settings.from_environ(os.environ))
print(len(ran), found.host.identity if found.host else None, len(found.tried))
"""


def test_a_second_process_runs_nothing(tmp_path):
    first = python("-c", without_package_init(DISCOVER), FLEXOPS_CACHE_DIR=str(tmp_path)).split(
        " ", 1
    )
    second = python("-c", without_package_init(DISCOVER), FLEXOPS_CACHE_DIR=str(tmp_path)).split(
        " ", 1
    )
    assert int(first[0]) > 0
    assert int(second[0]) == 0
    assert first[1] == second[1]


def test_this_machine(tmp_path, require):
    settings = Settings.from_environ(
        {"PATH": os.environ["PATH"], "FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}
    )
    found = discover(settings, device="cpu")
    assert found.cuda is None
    assert found.torch
    require(found.host, "a C++ compiler", "apt-get install g++")
    assert found.host
    told = completed([found.host.path, "-dumpfullversion", "-dumpversion"]).stdout.strip()
    assert str(found.host.version) == told
    assert (tmp_path / "cache/tools.json").exists()


def test_a_cache_directory_that_is_a_file_does_not_matter(tmp_path):
    (tmp_path / "file").touch()
    settings = Settings.from_environ(
        {"PATH": os.environ["PATH"], "FLEXOPS_CACHE_DIR": str(tmp_path / "file")}
    )
    assert discover(settings, device="cpu").torch


def test_a_tool_that_a_file_system_holds_up_for_a_minute_is_found(tmp_path, monkeypatch):
    """As where a network file system pauses while many jobs start."""

    def held_up(_command: list[str], *, seconds: float, **_options: object) -> proc.Ended:
        return proc.Ended(0, "ninja 1.11\n") if seconds > 60 else proc.Ended(None, "")

    monkeypatch.setattr(proc, "run", held_up)
    assert probing.probe("ninja", str(tmp_path / "ninja"))[0] == Version((1, 11))
