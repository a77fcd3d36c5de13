"""Waits for one command with torch imported already, and becomes it. Run as a script, by ``flexops
watch``; so nothing here may be imported relatively.

    python watching_child.py 5        reads one line from standard input: ["pytest", "-k", "scale"]

Each run has a process of its own, started while the last one's result is being read: nothing is
left of a run in the next but the names of the installed modules that it imported, in the file with
that descriptor. The next one imports them before it has the command.
"""

import atexit
import contextlib
import json
import os
import runpy
import site
import sys
import sysconfig


def main() -> None:
    sys.path[0] = ""  # as for `python -m`, and not this folder, whose modules have names of others
    known = os.pread(modules, os.fstat(modules).st_size, 0).decode().split()
    for name in (*known, "torch", "flexops", "pytest"):  # what takes long
        with contextlib.suppress(Exception):  # the command itself will say so, if it needs it
            __import__(name)
    with contextlib.suppress(Exception):
        torch = sys.modules["torch"]
        if torch.cuda.is_available():
            # makes the GPU's context, which takes half a second, during the edit
            torch.empty(1, device="cuda")
    line = sys.stdin.readline()
    if not line:
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    command: list[str] = json.loads(line)
    sys.argv = command
    sys.path[0] = os.getcwd()
    program, rest = os.path.basename(command[0]), command[1:]
    if rest[:2] == ["-m", "pytest"]:
        program, rest = "pytest", rest[2:]
    if program in ("pytest", "py.test"):
        import pytest

        # its plugins are there already, with plain asserts
        sys.exit(pytest.main([*rest, "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
    if rest[:1] == ["-m"]:
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif rest:
        sys.argv, sys.path[0] = rest, os.path.dirname(os.path.abspath(rest[0]))
        runpy.run_path(rest[0], run_name="__main__")


def installed() -> "list[str]":
    """The modules that are not edited, in the order of their imports."""
    flexops = os.path.dirname(os.path.abspath(__file__))  # an edit of which ends this process
    folders = (
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("stdlib"),
        flexops,
    )
    places = tuple(f"{folder}{os.sep}" for folder in folders)
    found = [
        (name, getattr(module, "__spec__", None)) for name, module in list(sys.modules.items())
    ]
    return [
        name
        for name, spec in found
        if spec and name == spec.name and str(spec.origin).startswith(places)
    ]


def leave(parent: int) -> None:
    """The last thing at the end: Python would take torch's modules apart, for which a result would
    wait half a second."""
    if os.getpid() != parent:  # a fork of the program's
        return
    with contextlib.suppress(Exception):
        names = "\n".join(installed()).encode()
        os.ftruncate(modules, 0)
        os.pwrite(modules, names, 0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the program, or it has no reader any more
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    status, modules = 0, int(sys.argv[1])
    os.set_inheritable(modules, False)
    atexit.register(leave, os.getpid())  # before all others, so after them
    try:
        main()
    except SystemExit as done:
        # a text is printed, and a failure
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
        raise
    except BaseException:
        atexit.unregister(leave)
        raise
