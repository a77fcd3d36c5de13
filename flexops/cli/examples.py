"""An example or two for each command, which ``--help`` and the documentation end with."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "build": (
        "flexops build",
        "flexops build rms_norm attention --arch '8.0;9.0'",
        "flexops build mylib.scale --device cpu",
    ),
    "warm": (
        "flexops warm --record run.jsonl --arch 9.0 --remote",
        "flexops warm --model config.json --arch 9.0 --archive llama.tar.gz",
    ),
    "new": ("flexops new mylib", "flexops new mylib --family rotate"),
    "cmake-dir": ("cmake -B build -Dflexops_DIR=$(flexops cmake-dir)",),
    "doctor": (
        "flexops doctor",
        "flexops doctor --target cu130-sm90 --strict",
        "flexops doctor --json",
    ),
    "patch": ("flexops patch llama", "flexops patch path/to/config.json --json"),
    "inspect": (
        "flexops inspect rms_norm --arch 9.0",
        "flexops inspect rope --kernel 'rotate<float>' --sass",
        "flexops inspect adam --diff HEAD",
    ),
    "profile": (
        "flexops profile rms_norm",
        "flexops profile benchmarks/scale.py --by torch --device cpu",
    ),
    "sanitize": ("flexops sanitize softmax", "flexops sanitize softmax --tool racecheck"),
    "watch": ("flexops watch mylib/csrc/scale -- pytest -k scale",),
    "cache info": ("flexops cache info", "flexops cache info --json"),
    "cache stats": ("flexops cache stats", "flexops cache stats --prometheus"),
    "cache list": ("flexops cache list",),
    "cache prune": ("flexops cache prune --max-size 500M",),
    "cache clear": ("flexops cache clear", "flexops cache clear norm-cpu"),
    "cache export": ("flexops cache export kernels.tar.gz",),
    "cache import": ("flexops cache import kernels.tar.gz",),
    "cache remote check": ("FLEXOPS_CACHE_REMOTE_WRITE=1 flexops cache remote check",),
    "cache remote list": ("flexops cache remote list",),
    "cache remote prune": ("flexops cache remote prune --older-than 30d --max-size 10G",),
    "cache remote verify": ("flexops cache remote verify", "flexops cache remote verify --remove"),
    "target list": ("flexops target list",),
    "target show": ("flexops target show cu130-sm90", "flexops target show cu130-sm90 --json"),
    "target detect": ("flexops target detect",),
    "bench run": ("flexops bench run benchmarks/scale.py",),
}
