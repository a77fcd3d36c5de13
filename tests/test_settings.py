"""Every variable is read once, in one place, and a wrong value names the variable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import flexops
from flexops.build.describe import layout
from flexops.errors import SettingsError
from flexops.settings import Settings, current, parse_size


def read(**environ: str) -> Settings:
    return Settings.from_environ(environ)


def test_defaults():
    settings = read(HOME="/home/me")
    assert (settings.fallback, settings.jit, settings.log, settings.aot) == (
        "warn",
        True,
        "info",
        (),
    )
    assert settings.cache_max_bytes == 5 * 2**30
    assert settings.arch_list is settings.max_jobs is settings.launcher is None
    assert not settings.cache_shared


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"FLEXOPS_CACHE_DIR": "/a", "TORCH_EXTENSIONS_DIR": "/b", "XDG_CACHE_HOME": "/c"}, "/a"),
        ({"TORCH_EXTENSIONS_DIR": "/b", "XDG_CACHE_HOME": "/c"}, "/b/flexops"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/flexops"),
        ({}, str(Path.home() / ".cache/flexops")),
        ({"FLEXOPS_CACHE_DIR": "here"}, str(Path.cwd() / "here")),
    ],
)
def test_cache_dir(environ, expected):
    assert str(Settings.from_environ(environ).cache_dir) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5G", 5 * 2**30),
        ("500M", 500 * 2**20),
        ("1.5k", 1536),
        ("4096", 4096),
        ("2 TiB", 2 * 2**40),
        ("7GB", 7 * 2**30),
        ("0", 0),
    ],
)
def test_sizes(text, size):
    assert parse_size("X", text) == size
    assert read(FLEXOPS_CACHE_MAX_SIZE=text).cache_max_bytes == size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEXOPS_FALLBACK", "never"),
        ("FLEXOPS_JIT", "maybe"),
        ("FLEXOPS_LOG", "loud"),
        ("FLEXOPS_CACHE_SHARED", "yes"),
        ("FLEXOPS_CACHE_MAX_SIZE", "much"),
        ("FLEXOPS_CACHE_MAX_SIZE", "-1"),
        ("MAX_JOBS", "0"),
        ("MAX_JOBS", "all"),
        ("NVCC_THREADS", "-2"),
        ("MAX_JOBS", "\u00b2"),
        ("MAX_JOBS", "\u0663"),
        ("MAX_JOBS", "9" * 400),
        ("NVCC_THREADS", "9" * 5000),
        ("FLEXOPS_COMPILE_TIMEOUT", "1e3"),
        ("FLEXOPS_CACHE_MAX_SIZE", "9" * 400),
        ("FLEXOPS_CACHE_MAX_SIZE", "\u0663G"),
        ("FLEXOPS_CACHE_DIR", "~nobody-of-that-name/cache"),
        ("TORCH_EXTENSIONS_DIR", "~nobody-of-that-name"),
        ("XDG_CACHE_HOME", "~nobody-of-that-name"),
        ("CUDA_HOME", "~nobody-of-that-name"),
        ("VIRTUAL_ENV", "~nobody-of-that-name"),
    ],
)
def test_a_wrong_value_names_its_variable(name, value):
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({name: value})
    assert name in str(caught.value)
    assert value[:60] in caught.value.found
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("0", ()),
        ("none", ()),
        ("all", ("all",)),
        ("adam,quant", ("adam", "quant")),
        ("adam; quant", ("adam", "quant")),
    ],
)
def test_aot_names(text, names):
    assert read(FLEXOPS_AOT=text).aot == names


def test_a_folder_of_libraries_compiled_ahead_of_time(monkeypatch):
    assert read().aot_dir is None
    monkeypatch.delenv("FLEXOPS_AOT_DIR")
    current.cache_clear()
    assert layout.aot_root() == Path(flexops.__file__).parent / "_aot"
    monkeypatch.setenv("FLEXOPS_AOT_DIR", "/libraries")
    current.cache_clear()
    assert layout.aot_root() == Path("/libraries")
    monkeypatch.undo()
    current.cache_clear()


def test_familiar_variables_keep_their_meaning():
    settings = read(
        TORCH_CUDA_ARCH_LIST=" 8.9;9.0 ",
        MAX_JOBS="3",
        NVCC_THREADS="2",
        CUDA_PATH="/cuda",
        CXX="g++-12",
        PATH="/a::/b",
    )
    assert (settings.arch_list, settings.max_jobs, settings.nvcc_threads) == ("8.9;9.0", 3, 2)
    assert (settings.cuda_home, settings.cxx, settings.search_path) == (
        Path("/cuda"),
        "g++-12",
        ("/a", "/b"),
    )
    assert read(CUDA_HOME="/one", CUDA_PATH="/two").cuda_home == Path("/one")
    assert read(TORCH_CUDA_ARCH_LIST="  ").arch_list is None


def test_what_compilers_read_by_themselves_is_kept():
    environ = {
        "CPATH": "/a",
        "NVCC_APPEND_FLAGS": "-lineinfo",
        "LIBRARY_PATH": "",
        "CXXFLAGS": "-O3",
    }
    assert dict(Settings.from_environ(environ).compiler_environment) == {
        "CPATH": "/a",
        "NVCC_APPEND_FLAGS": "-lineinfo",
    }
    assert Settings.from_environ({}).compiler_environment == ()


def test_a_time_limit_for_compilers():
    assert Settings.from_environ({}).compile_timeout > 600
    assert Settings.from_environ({"FLEXOPS_COMPILE_TIMEOUT": "0"}).compile_timeout == 0


def test_without_a_home(monkeypatch):
    """A container's user id without a name: the cache is the user's own all the same."""

    def unknown(_: int) -> object:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert read(TMPDIR="/scratch").cache_dir == Path(f"/scratch/flexops-{os.getuid()}")


def test_a_relative_path_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert read(FLEXOPS_CACHE_DIR="/a").cache_dir == Path("/a")
    with pytest.raises(SettingsError, match="FLEXOPS_CACHE_DIR") as caught:
        read(FLEXOPS_CACHE_DIR="here")
    assert caught.value.fix


@pytest.mark.parametrize("text", ["~nouser\0", "/cache\0", "~\ud800", "/cache/\ud800"])
def test_a_path_that_no_file_system_could_spell_is_said(text):
    with pytest.raises(SettingsError, match="FLEXOPS_CACHE_DIR is no path"):
        Settings.from_environ({"FLEXOPS_CACHE_DIR": text})


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/p",
        "gs://b",
        "az://a/c",
        "https://user:pw@host/x?sig=1",
        "oci://ghcr.io/team/x",
        "file:///a",
        "http://localhost:80/x",
        "http://[::1]/x",
    ],
)
def test_remote_caches(url):
    assert read(FLEXOPS_CACHE_REMOTE=url).cache_remote.reveal() == url


@pytest.mark.parametrize(
    "url",
    [
        "hunter2",
        "http://me:hunter2@host/x?hunter2",
        "ftp://hunter2@host",
        "s3://",
        "s3://a b?hunter2",
        "http://localhost.evil.example/hunter2",
    ],
)
def test_what_is_no_remote_cache_is_rejected_and_its_secrets_are_not_shown(url):
    with pytest.raises(SettingsError, match="FLEXOPS_CACHE_REMOTE") as caught:
        read(FLEXOPS_CACHE_REMOTE=url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("", 10.0), ("0.5", 0.5), ("20", 20.0)])
def test_seconds(text, seconds):
    assert read(FLEXOPS_CACHE_REMOTE_TIMEOUT=text).cache_remote_timeout == seconds


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "nan", "soon", "1."])
def test_no_seconds(text):
    with pytest.raises(SettingsError, match="FLEXOPS_CACHE_REMOTE_TIMEOUT"):
        read(FLEXOPS_CACHE_REMOTE_TIMEOUT=text)


@pytest.mark.parametrize("url", ["file://host/tmp/store", "file://tmp/store"])
def test_a_directory_has_three_slashes(url):
    with pytest.raises(SettingsError, match=r"(?s)another machine.*file:///(tmp/)?store"):
        read(FLEXOPS_CACHE_REMOTE=url)


def test_http_to_another_machine_is_allowed_by_a_setting_of_its_own():
    url = "http://store.example:9000/x"
    with pytest.raises(SettingsError, match="FLEXOPS_CACHE_REMOTE") as caught:
        read(FLEXOPS_CACHE_REMOTE=url)
    assert "FLEXOPS_CACHE_REMOTE_HTTP=1" in str(caught.value)
    chosen = read(FLEXOPS_CACHE_REMOTE=url, FLEXOPS_CACHE_REMOTE_HTTP="1")
    assert (chosen.cache_remote.reveal(), chosen.cache_remote_http) == (url, True)
