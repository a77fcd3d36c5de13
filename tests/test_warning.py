"""``flexops/_warning.py``: each warning names a line of the user's code."""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from pathlib import Path

from processes import completed

from flexops import _warning

TRAIN = """
import torch
from torch import nn
import flexops
from flexops.build.load import loader

loader._resolve = lambda op, device: loader.OpStatus(op.name, device, "reference", "of this test")
x = torch.ones(2, 8)
flexops.add_rms_norm(x, x, torch.ones(8))  # norm

class Block(nn.Module):
    def forward(self, x):
        return flexops.swiglu(x, x)  # activation

nn.Sequential(Block())(x)
q = torch.ones(1, 2, 4, 8)
scale = flexops.kernel("__global__ void scale(const float* x, float* out, int64_t n) {}",
                       "scale(Tensor x) -> Tensor", reference=lambda x: x)
scale._code._fall_back(flexops.errors.FlexopsError("none"), (x,))  # scale
flexops.rotary_embedding(q.requires_grad_(), q, *torch.ones(2, 4, 4))  # rope
"""


def test_a_fallback_names_the_line_of_the_call(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    own = os.environ | {"FLEXOPS_FALLBACK": "warn", "FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}
    done = completed([sys.executable, "-W", "always", script], env=own)
    said = re.findall(r"(\S+):(\d+): FallbackWarning: flexops: (?:\w+::)?(\w+)", done.stderr)
    expected = {}
    for number, line in enumerate(TRAIN.splitlines(), 1):
        if mark := re.search(r"# (\w+)$", line):
            expected[mark[1]] = number
    assert {Path(path) for path, _, _ in said} == {script}
    assert {name: int(number) for _, number, name in said} == expected


def test_each_line_warns_once_and_a_filter_by_module_applies():
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for _ in range(3):
            _warning.warn("said once")
        warnings.filterwarnings("ignore", module=re.escape(__name__))
        _warning.warn("never said")
    assert [str(one.message) for one in caught] == ["said once"]


def test_a_thread_without_a_line_of_the_user_names_its_outermost_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = {"__name__": "flexops.part", "warn": _warning.warn}
        exec(compile("def run(): warn('of a thread')", "part.py", "exec"), names)
        thread = threading.Thread(target=names["run"])
        thread.start()
        thread.join()
    assert caught[0].filename == threading.__file__
