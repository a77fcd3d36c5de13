"""Where a compile looked for headers in vain: worked out from its search path and the names in the
sources."""

from __future__ import annotations

from pathlib import Path

from builds import tiny_plan

from flexops.build.plan import search
from flexops.build.plan.plan import BuildPlan

SAID = """ignoring nonexistent directory "/nowhere"
#include "..." search starts here:
 /quoted
#include <...> search starts here:
 /home/u/include
 /usr/lib/gcc/../include
End of search list.
COMPILER_PATH=/usr/lib
"""


def test_what_a_compiler_says_of_its_search_path():
    assert search.read_search_path(SAID) == search.SearchPath(
        ("/quoted",), ("/home/u/include", "/usr/lib/include"), ("/nowhere",)
    )


def test_names_in_every_branch():
    text = (
        '#if 0\n# include <a/b.h>\n#endif\n#define NAME "c.h"\n#if __has_include(<d.h>) ||'
        ' __has_include ( "e.h" )\n#include \\\n "f.h"\n#include MACRO\n'
    )
    assert search.names(text) == {
        ("a/b.h", False),
        ("c.h", True),
        ("d.h", False),
        ("e.h", True),
        ("f.h", True),
    }


def built(folder: Path, include: Path, source: str, reached: str) -> list[str]:
    plan: BuildPlan = tiny_plan(folder / "tiny", source=source)
    step = plan.steps[0]._replace(command=("g++", f"-I{include}", *plan.steps[0].command[1:]))
    (folder / "tiny.o.d").write_text(f"tiny.o: {folder}/tiny/tiny.cpp {reached}\n")
    return search.places(plan._replace(steps=(step, plan.steps[1])), folder)


def test_the_uppermost_part_that_is_missing_stands_for_all_below(tmp_path):
    (tmp_path / "include").mkdir()
    found = built(
        tmp_path,
        tmp_path / "include",
        "#if __has_include(<deep/one.h>) || __has_include(<deep/two.h>)\n#endif\n",
        "",
    )
    own = [path for path in found if path.startswith(str(tmp_path))]
    assert own == [f"{tmp_path}/include/deep"]
    assert "/usr/include/deep" in found
    missing = built(tmp_path, tmp_path / "nowhere" / "include", "#include <vector>\n", "")
    assert f"{tmp_path}/nowhere" in missing


def test_headers_of_the_compiler_that_could_be_hidden(tmp_path, host_compiler):
    assert host_compiler
    (tmp_path / "include" / "bits").mkdir(parents=True)  # a folder of that name is there already
    place = search._ask(("g++",)).angle[0]
    found = built(
        tmp_path,
        tmp_path / "include",
        "#include <vector>\n",
        f"{place}/vector {place}/bits/move.h {place}/ext/alloc_traits.h",
    )
    own = [path.removeprefix(str(tmp_path)) for path in found if path.startswith(str(tmp_path))]
    assert own == ["/include/bits/move.h", "/include/ext", "/include/vector"]
