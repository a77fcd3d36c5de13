"""What supplies the kernels of a library for CUDA."""

from __future__ import annotations

import sys

from processes import completed


def test_kernels_that_are_compiled_are_loaded_without_what_plans_and_compiles():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import flexops.build.load.loader, flexops.build.load.provider\nprint(*sys.modules)"
    )
    imported = set(completed([sys.executable, "-c", code]).stdout.split())
    planning = ("compile", "plan", "describe.schema", "describe.cpp_text", "load.record")
    wrong = [
        one for one in imported if one.startswith(tuple(f"flexops.build.{p}" for p in planning))
    ]
    assert sorted(wrong) == [
        "flexops.build.plan",
        "flexops.build.plan.cache_key",
        "flexops.build.plan.kernel_names",
    ]
    assert "flexops.toolchain.discovery" not in imported
