"""What all tests share: a build cache of their own, a clean environment, and one way to say that
this machine lacks something.

A test never skips on its own. It asks ``require(...)`` or a fixture below for what it needs.
Missing, that is a skip which names the way to get it, and a failure where
``FLEXOPS_TEST_REQUIRE=1`` (CI sets it): there the suite's essential parts must run.
"""

from __future__ import annotations

import functools
import gc
import getpass
import importlib.util
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401  first of all: it fails to load once a test has loaded the standard library's distutils, and torch's compiler needs it

Require = Callable[..., None]

_CLEARED = (
    "TORCH_CUDA_ARCH_LIST",
    "PYTORCH_ROCM_ARCH",
    "MAX_JOBS",
    "NVCC_THREADS",
    "TORCH_EXTENSIONS_DIR",
    "COLUMNS",
    "LINES",
)
"""The last two are what readline, which pytest imports, sets for child processes: pytest-xdist's
workers are such."""
_KEPT_PREFIX = "FLEXOPS_TEST_"
_OF_OTHERS = re.compile(
    r"torchelastic_|torchinductor_|pymp-|uv-|cc\w{6}\.|tmpxft_|stand-in-|flexops-(?:builds|loaded)-"
)
"""What stays in TMPDIR: files of torch, multiprocessing, uv and killed compilers, and where flexops
builds if others can change its cache, and the copies of libraries that this process has loaded."""
_missing: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Before anything reads the settings: only what the tests set counts, and nothing of the user's
    cache is used or changed."""
    gc.disable()  # until pytest_collection_finish
    for name in list(os.environ):
        if name in _CLEARED or (name.startswith("FLEXOPS_") and not name.startswith(_KEPT_PREFIX)):
            del os.environ[name]
    # a shell's background job starts like that, and its children inherit it
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # OpenMP's threads spin while they wait, which costs the other test process its processor: three
    # times the time with two of each on two cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # inductor precompiles torch's headers for the few kernels that a run has it compile
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    # for working on one test: what it compiles is found again in the next run
    kept = os.environ.get("FLEXOPS_TEST_CACHE")
    cache = kept or tempfile.mkdtemp(prefix="flexops-tests-")
    # the latter for pytest-xdist's workers, which have the cache in common
    os.environ["FLEXOPS_CACHE_DIR"] = os.environ["FLEXOPS_TEST_CACHE"] = cache
    if _is_checkout():  # what setup compiled into its flexops/_aot is not searched
        os.environ["FLEXOPS_AOT_DIR"] = os.path.join(cache, "no-aot")
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    _use_own_tmpdir(config)
    _let_examples_take_their_time()


def _let_examples_take_their_time() -> None:
    """Hypothesis fails a test whose example takes 0.2 s, as on a busy machine any may."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # only some tests need it
        return
    slow = [HealthCheck.too_slow]
    settings.register_profile("patient", settings(), deadline=None, suppress_health_check=slow)
    settings.load_profile("patient")


def _use_own_tmpdir(config: pytest.Config) -> None:
    """A TMPDIR for this process and its children, so that what they leave there is noticed. Files
    that are meant to last stay where they were."""
    usual = tempfile.gettempdir()
    inductor = os.path.join(usual, f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", inductor)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="flexops-tmp-", dir=usual)
    os.chmod(tempfile.tempdir, 0o1777)  # as any TMPDIR; some tests become other users
    config.add_cleanup(functools.partial(shutil.rmtree, tempfile.tempdir, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_in_tmpdir() -> Iterator[None]:
    """A module fails if it leaves files in TMPDIR: its tests have ``tmp_path``, and flexops removes
    its own."""
    place = os.environ["TMPDIR"]
    before = set(os.listdir(place))
    yield
    left = [name for name in os.listdir(place) if name not in before and not _OF_OTHERS.match(name)]
    assert not left, f"left in {place}: {left}"


def _is_checkout() -> bool:
    """Whether flexops is imported from a checkout: an installed package holds its sources
    itself."""
    found = importlib.util.find_spec("flexops")
    return bool(found and found.origin) and not (Path(found.origin).parent / "_csrc").is_dir()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With ``-n``, a file's tests stay in one process, and so do those of a folder that builds
    something large for all of its files."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next(
                (
                    folder
                    for folder in ("tests/conda", "tests/image")
                    if path.startswith(f"{folder}/")
                ),
                path,
            )

    # in the alphabet's order, whose last files are short ones, both processes end at about the same
    # time
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["missing"] = _missing


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _missing.update(getattr(node, "workeroutput", {}).get("missing", {}))


@pytest.hookimpl(trylast=True)  # what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run wherever there is one; they are never essential, because most
    machines have none. Thousands of skipped ones take a while, so they are left out, unless there
    are no others."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _gpu():
        return
    _missing["a GPU"] = "bash scripts/run_tests.sh -m gpu, on a machine with one"
    if len(marked) < len(items):
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=marked)
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """What is imported by now lives to the end. To look for garbage in it, as often as Python does,
    took a tenth of a run."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skips are easily overlooked: say once more what was not tested, and how to get there."""
    for what, how in _missing.items():
        terminalreporter.write_line(f"NOT TESTED for want of {what}: {how}", yellow=True)


def _require(there: object, what: str, how: str, excuse: str = "") -> None:
    if there:
        return
    if os.environ.get("FLEXOPS_TEST_REQUIRE") == "1" and not excuse:
        pytest.fail(f"this machine must have {what}: {how}", pytrace=False)
    _missing[what] = how
    pytest.skip(f"needs {what}: {how}")


def _gpu() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def require() -> Require:
    """``require(thing, "what it is", "how to get it")``: skips the test if there is no such thing,
    or fails it where CI demands it.

    A fourth argument says why this very machine cannot have it, whatever is installed on it: then
    CI skips the test too.
    """
    return _require


@pytest.fixture
def obedient(require: Require) -> tuple[str, ...]:
    """What to put before a command so that a read-only directory is one even for root."""
    if os.geteuid() != 0:
        return ()
    prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")
    works = (
        bool(shutil.which("setpriv"))
        and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    )
    require(works, "setpriv", "apt-get install util-linux")
    return prefix


@pytest.fixture(scope="session")
def nvcc_toolkit() -> object:
    """The CUDA toolkit that discovery picks (a ``CudaToolkit``); no GPU is needed to compile."""
    from flexops import settings, toolchain

    found = toolchain.discover(settings.current(), device="cuda").cuda
    _require(
        found,
        "an nvcc",
        'pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.3", or run scripts/run_tests.sh, which'
        " does",
    )
    return found


@pytest.fixture(scope="session")
def compilers() -> dict[tuple[int, int], Any]:
    """The NVRTCs here, by CUDA's version."""
    from flexops.toolchain import nvrtc
    from flexops.toolchain.context import SearchContext
    from flexops.toolchain.installed_torch import package_dirs

    found = nvrtc.find(SearchContext(site_dirs=package_dirs(()))).usable
    return {(one.value.version.major, one.value.version.minor): one.value for one in found}


@pytest.fixture(scope="session")
def nvrtc_of(compilers: dict[tuple[int, int], Any]) -> Callable[..., Any]:
    """``nvrtc_of((12, 1))``: the NVRTC of that CUDA, or without one any; the test environment has
    those of 12.1 and 13.0."""

    def find(*version: tuple[int, int]) -> Any:
        found = [compilers[one] for one in version or compilers if one in compilers]
        what = " ".join(["NVRTC", *(".".join(map(str, one)) for one in version)])
        _require(found, what, "run scripts/run_tests.sh, which installs it")
        return found[0]

    return find


@pytest.fixture(scope="session")
def program() -> Callable[..., str]:
    """``program("zsh")``: its path. ``package``: Debian's, if it has another name."""

    def find(name: str, package: str = "") -> str:
        how = f"apt-get install {package or name}, or sudo bash scripts/run_tests.sh, which does"
        _require(found := shutil.which(name), name, how)
        return str(found)

    return find


@pytest.fixture(scope="session")
def host_compiler() -> object:
    """The C++ compiler that discovery picks (a ``HostCompiler``)."""
    from flexops import settings, toolchain

    found = toolchain.discover(settings.current(), device="cpu").host
    _require(found, "a C++ compiler", "apt-get install g++")
    return found


@pytest.fixture(scope="session")
def native_kernels(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``native_kernels(family, device)``: compiled kernels are what calls reach; if not, the test
    fails with the reason, or lacks a compiler."""
    import flexops
    from flexops.build.load import loader

    def ensure(family: str, device: str) -> None:
        if not loader.ensure(family, device):
            request.getfixturevalue("nvcc_toolkit" if device == "cuda" else "host_compiler")
            pytest.fail(
                next(
                    one.reason
                    for one in flexops.status()
                    if (one.op, one.device) == (family, device)
                ),
                pytrace=False,
            )

    return ensure


@pytest.fixture(scope="session")
def transformers_models() -> None:
    """transformers' own models."""
    import torch
    from transformers.utils import is_torch_available

    excuse = (
        "transformers 5 takes torch from 2.5 on"
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5)
        else ""
    )
    _require(
        is_torch_available(),
        excuse or "a transformers that takes this torch",
        "bash scripts/run_tests.sh, which installs both",
        excuse,
    )


@pytest.fixture(scope="session")
def two_gpus() -> None:
    """A second GPU."""
    import torch

    _require(
        torch.cuda.device_count() > 1,
        "a second GPU",
        "bash scripts/run_tests.sh -m gpu, on a machine with two",
        excuse="most machines have one",
    )


@pytest.fixture(scope="session")
def require_gpu_memory() -> Callable[[int], None]:
    """``require_gpu_memory(bytes)``: the GPU has that many free."""
    import torch

    def ensure(needed: int) -> None:
        what = f"{needed / 2**30:.0f} GiB of free GPU memory"
        _require(
            torch.cuda.mem_get_info()[0] >= needed,
            what,
            "run the tests on a larger GPU, or one that no other process uses",
            excuse="most have less",
        )

    return ensure


@pytest.fixture(scope="session")
def ccache() -> Path:
    """The path of ccache."""
    found = shutil.which("ccache")
    _require(found, "ccache", "apt-get install ccache")
    return Path(str(found))


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged in this test; it may set the root logger's level. In place of ``caplog``,
    which belongs to a plugin of pytest's that is off (see pyproject.toml)."""
    text = io.StringIO()
    handler, root = logging.StreamHandler(text), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty build cache for this test alone, also for the processes that it starts;
    ``settings.current()`` sees it."""
    from flexops import settings

    directory = tmp_path / "flexops-cache"
    monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(directory))
    settings.current.cache_clear()
    yield directory
    monkeypatch.undo()
    settings.current.cache_clear()
