"""What the tests of flexops.load share: sources that need no torch header (those take seconds
each), and processes to load them in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import completed

ROOT = Path(__file__).resolve().parents[2]

# A Python module through Python.h alone: value() returns VALUE.
MODULE = """
#include <Python.h>
#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
static PyObject* value(PyObject*, PyObject*) { return PyLong_FromLong(VALUE); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""

# Prints what the code did to the system from the first line on: "subprocess", or "write <path>".
AUDIT = """
import os, sys
def hook(event, args):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.system"):
        print("subprocess", args[0], file=sys.stderr)
    elif event == "open" and args[2] is not None and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        print("write", args[0], file=sys.stderr)
    elif event in ("os.rename", "os.mkdir", "os.remove", "shutil.rmtree", "tempfile.mkdtemp", "tempfile.mkstemp", "fcntl.flock"):
        print("write", event, args, file=sys.stderr)
"""


def write_module(folder: Path, value: str, name: str = "module.cpp") -> Path:
    """A module source in ``folder`` whose value() is ``value``."""
    path = folder / name
    path.write_text(f"#define VALUE {value}\n{MODULE}")
    return path


def environment(cache: Path, **extra: str) -> dict[str, str]:
    """The environment of a process that loads extensions through the cache at ``cache``."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLEXOPS_CACHE_DIR": str(cache),
        "FLEXOPS_PCH": "0",
        "FLEXOPS_LOG": "quiet",
        **extra,
    }


def start(code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python; fails the test with what it said if it fails."""
    return completed([sys.executable, "-c", code], env=env)
