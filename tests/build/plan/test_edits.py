"""A file that is replaced while the compiler runs: its old code is never stored as that of the
new."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builds import answer, tiny_plan

from flexops.build.compile import building, device_code
from flexops.build.plan import cache_key, edits
from flexops.build.plan.plan import BuildPlan
from flexops.build.store.cache import BuildCache
from flexops.errors import CompileError

OLD, NEW = (f"inline int answer_of_header() {{ return {number}; }}\n" for number in (1, 2))
SWAPS = {
    "cp -p": "cp -p new/tiny.h headers/tiny.h",
    "cp -p of another size": (
        "echo >> new/tiny.h; touch -r headers/tiny.h new/tiny.h; cp -p new/tiny.h headers/tiny.h"
    ),
    "mv": "mv new/tiny.h headers/tiny.h",
    "mv of the folder": "mv headers old; mv new headers",
    "a link to another folder": "ln -sfn new link",
    "a date in the future": "cp new/tiny.h headers/tiny.h; touch -d '1 hour' headers/tiny.h",
    "a clock that is behind": "cp new/tiny.h headers/tiny.h; touch -d '-1 hour' headers/tiny.h",
}


def swapping_compiler(folder: Path, real: str, swap: str) -> Path:
    """A compiler that runs ``swap`` in ``folder`` once, behind its first compile."""
    script = folder / "swapping-c++"
    script.write_text(f"""#!/bin/sh
"{real}" "$@" || exit 1
case " $* " in *" -c "*) cd "{folder}" && [ ! -e swapped ] && : > swapped && {{ {swap}; }};; esac
exit 0
""")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def swapped_plan(tmp_path: Path, real: str, swap: str, include: str = '"tiny.h"') -> BuildPlan:
    """A plan whose header in ``headers`` answers 1, and which ``swap`` makes answer 2."""
    for name, text in (("headers", OLD), ("new", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tiny.h").write_text(text)
        os.utime(tmp_path / name / "tiny.h", (1e9, 1e9))
    (tmp_path / "link").symlink_to("headers")
    place = tmp_path / ("link" if "link" in swap else "headers")
    source = f'#include {include}\nextern "C" int answer() {{ return answer_of_header(); }}\n'
    plan = tiny_plan(tmp_path / "src", source=source, header=OLD)
    (tmp_path / "src" / "tiny.h").unlink()
    compiler = str(swapping_compiler(tmp_path, real, swap))
    compile_, link = plan.steps
    compile_ = compile_._replace(command=(compiler, f"-I{place}", *compile_.command[1:]))
    return plan._replace(steps=(compile_, link._replace(command=(real, *link.command[1:]))))


def built(plan: BuildPlan, cache: BuildCache) -> int:
    """The answer; a build that an edit has overtaken says so, and is run once more."""
    result = building.obtain([plan], cache)[0]
    if result.error:
        assert "changed while" in str(result.error)
        result = building.obtain([plan], cache)[0]
    return answer(result.require().library)


@pytest.mark.parametrize("keeps_objects", [False, True])
@pytest.mark.parametrize("name", SWAPS)
def test_a_header_that_is_replaced_meanwhile(tmp_path, host_compiler, name, keeps_objects):
    assert host_compiler
    plan = swapped_plan(tmp_path, "g++", SWAPS[name])._replace(keep_objects=keeps_objects)
    assert built(plan, BuildCache(tmp_path / "cache")) == 2
    assert built(plan, BuildCache(tmp_path / "cache")) == 2, "and with what was kept"


@pytest.mark.parametrize("name", ["cp -p", "mv", "a date in the future"])
def test_a_header_that_only_the_compiler_can_find(tmp_path, host_compiler, name):
    """A macro's value: before the compile no reader of text knows which file that is."""
    assert host_compiler
    include = "NAME(tiny)"
    plan = swapped_plan(tmp_path, "g++", SWAPS[name], include)
    source = plan.sources[0]
    text = "#define TEXT(x) #x\n#define NAME(x) TEXT(x.h)\n"
    source.write_text(text + source.read_text())
    assert built(plan, BuildCache(tmp_path / "cache")) == 2


def test_a_source_that_is_another_for_a_moment(tmp_path, host_compiler):
    """Before and after the compile it is the same; what was compiled is not."""
    assert host_compiler
    plan = swapped_plan(tmp_path, "g++", "mv src/kept.cpp src/tiny.cpp")
    source = plan.sources[0]
    (tmp_path / "src" / "kept.cpp").write_text(source.read_text())
    other = source.read_text().replace("answer_of_header()", "7")
    script = tmp_path / "swapping-c++"
    lines = script.read_text().splitlines()
    (tmp_path / "other.cpp").write_text(other)
    first = f'cd "{tmp_path}" && [ ! -e swapped ] && cp other.cpp src/tiny.cpp; cd "$OLDPWD"'
    script.write_text("\n".join([lines[0], first, *lines[1:], ""]))
    assert built(plan, BuildCache(tmp_path / "cache")) == 1


def test_a_header_that_is_gone_meanwhile(tmp_path, host_compiler):
    assert host_compiler
    plan = swapped_plan(tmp_path, "g++", "rm headers/tiny.h")
    with pytest.raises(CompileError, match="changed while"):
        building.obtain([plan], BuildCache(tmp_path / "cache"))[0].require()


def test_dates_alone_fail_no_build(tmp_path, host_compiler):
    """A server's clock that is ahead: the files are compiled twice, and then it is known."""
    assert host_compiler
    plan = swapped_plan(tmp_path, "g++", "true", "NAME(tiny)")
    source = plan.sources[0]
    text = "#define TEXT(x) #x\n#define NAME(x) TEXT(x.h)\n"
    source.write_text(text + source.read_text())
    os.utime(tmp_path / "headers" / "tiny.h", (2**32, 2**32))
    result = building.obtain([plan], BuildCache(tmp_path / "cache"))[0]
    assert answer(result.require().library) == 1


class Swapping:
    """A device compiler that reads another header than those of the plan, ``times`` times."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times, self.read = folder, times, ""

    def compile(self, *_: object) -> tuple[str, dict[str, int]]:
        self.times -= 1
        header = self.folder / "a.cuh"
        if self.times >= 0:
            header.rename(self.folder / "kept")
            header.write_text("other")
        self.read = header.read_text()
        if self.times >= 0:
            (self.folder / "kept").rename(header)
        return "symbol", {}


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_header_of_device_code_that_is_another_for_a_moment(tmp_path, times):
    (tmp_path / "a.cuh").write_text("first")
    files = {"<own>/a.cuh": cache_key.file_digest(tmp_path / "a.cuh")}
    plan: Any = SimpleNamespace(files=files, roots=(("<own>", tmp_path),), expression="f")
    worker: Any = Swapping(tmp_path, times)
    if times < 2:
        device_code._compiled(plan, tmp_path / "code", worker, 0)
        assert worker.read == "first"
    else:
        with pytest.raises(CompileError, match="changed while"):
            device_code._compiled(plan, tmp_path / "code", worker, 0)


def test_what_a_text_includes_is_known_before(tmp_path):
    plan = tiny_plan(tmp_path)
    seen = edits.Before([plan])
    header = str(tmp_path / "tiny.h")
    assert seen.verdict([header]) == "same"
    os.utime(header, (1, 1))
    assert seen.verdict([header]) == "unclear"
    (tmp_path / "tiny.h").write_text(NEW)
    assert seen.verdict([header]) == "changed"
    (tmp_path / "tiny.h").unlink()
    assert seen.verdict([header]) == "changed"
