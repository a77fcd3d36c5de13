"""``flexops_tools.hub``: the repository that it writes is loaded by HF's ``kernels``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import completed

from flexops_tools import hub

LOADED = """
import importlib.util, sys
from pathlib import Path
# as where flexops is not installed: neither on the path nor by an editable install's finder
sys.path = [one for one in sys.path if not (Path(one or ".") / "flexops").is_dir()]
sys.meta_path = [one for one in sys.meta_path if "editable" not in repr(one)]
assert importlib.util.find_spec("flexops") is None
import torch
from kernels import LocalLayerRepository, get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert Path(kernel.flexops.__file__).is_relative_to(sys.argv[1]), kernel.flexops.__file__
layer = LocalLayerRepository(repo_path=Path(sys.argv[1]), layer_name="RMSNorm").load()
class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(32)), 1e-6
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
norm, x = Norm(), torch.randn(4, 32)
torch.testing.assert_close(layer.forward(norm, x), norm(x))
(status,) = [one for one in kernel.flexops.status() if one.op == "norm" and one.device == "cpu"]
print(Path(kernel.__file__).parent.name, status.path)
"""


def load(repository: Path, **environment: str) -> str:
    plain = {key: one for key, one in os.environ.items() if not key.startswith("FLEXOPS_")}
    command = [sys.executable, "-c", LOADED, str(repository)]
    variables = {**plain, "PYTHONPATH": "", **environment}
    done = completed(command, cwd=repository, env=variables)
    return done.stdout


def test_the_universal_variant_is_loaded_where_flexops_is_not_installed(tmp_path):
    (folder,) = hub.write(tmp_path, ("cpu",))
    assert folder == tmp_path / "build" / "torch-cpu"
    assert "`RMSNorm`" in (tmp_path / "README.md").read_text()
    environment = {"FLEXOPS_JIT": "0", "FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}
    assert load(tmp_path, **environment).split() == ["torch-cpu", "None"]


def test_ids_follow_the_contents(tmp_path):
    """``kernels`` registers a module by its id: another version's must differ."""
    made = [hub.write(tmp_path / name, ("cpu",))[0] for name in ("a", "b")]
    ids = [json.loads((one / "metadata.json").read_text())["id"] for one in made]
    assert ids[0] == ids[1]
    hub.write(tmp_path / "c", ("cpu", "cuda"))
    cuda = json.loads((tmp_path / "c/build/torch-cuda/metadata.json").read_text())
    assert cuda["id"] not in ids
    assert cuda["backend"] == {"type": "cuda"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--backend", "cpu"], "exists"),
        (["--libraries", "."], "--cuda ''"),
        (["--libraries", ".", "--backend", "cpu"], "ends with -cpu"),
    ],
)
def test_what_it_rejects(tmp_path, arguments, found, capsys):
    if "exists" in found:
        (tmp_path / "build").mkdir()
    arguments = [str(tmp_path) if one == "." else one for one in arguments]
    assert hub.main([str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert found in said
    assert "fix:" in said


@pytest.mark.extra
def test_the_variant_of_the_stable_abi_has_compiled_kernels(tmp_path):
    libraries = tmp_path / "libraries"
    build = [sys.executable, "-m", "flexops", "build", "norm", "--device", "cpu", "--out"]
    subprocess.run([*build, str(libraries)], check=True, capture_output=True)
    made = hub.write(tmp_path / "hub", ("cpu",), libraries)
    assert made[1].name.startswith("torch-stable-abi211-cpu-")
    environment = {"FLEXOPS_JIT": "0", "FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}
    variant, library = load(tmp_path / "hub", **environment).split()
    assert variant == made[1].name
    assert Path(library).is_relative_to(made[1])
