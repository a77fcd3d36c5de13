"""Writes flexops as a repository of kernels for the Hugging Face Hub, which its library ``kernels``
loads.

    python -m flexops_tools.hub OUT [--backend cuda] [--libraries FOLDER --cuda 130]

``OUT/build/torch-<backend>`` is the universal variant: flexops with the sources of its kernels,
which are compiled at their first use. ``--libraries`` is a folder that ``flexops build --out
FOLDER`` wrote, with torch 2.11 or newer: it adds a variant of torch's stable ABI,
``OUT/build/torch-stable-abi211-<backend>-<machine>-linux``, in which they are compiled already.
Each variant is complete; where flexops is installed, that is used. ``hf upload OWNER/NAME
OUT --repo-type kernel`` publishes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import flexops
from flexops.build.describe.layout import csrc_root
from flexops.build.store.manifest import FILE_NAME
from flexops.errors import FlexopsError

STABLE = "torch-stable-abi211"
BACKENDS = ("cpu", "cuda")
_INIT = '''"""flexops' layers for models of transformers: see ``layers``."""

import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
if "flexops" not in sys.modules and importlib.util.find_spec("flexops") is None:
    if (_HERE / "libraries").is_dir():
        os.environ.setdefault("FLEXOPS_AOT_DIR", str(_HERE / "libraries"))
    sys.path.append(str(_HERE))

import flexops
from flexops.patching import hub as layers

__all__ = ["flexops", "layers"]
'''
_CARD = """---
library_name: kernels
license: apache-2.0
---

# flexops {version}

Fused operators for training and inference, as layers for models of transformers: {layers}.

```python
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping

norm = LayerRepository("OWNER/NAME", layer_name="RMSNorm", version=1)
with use_kernel_mapping({{"RMSNorm": {{"cuda": norm}}}}):
    model = kernelize(model, mode=Mode.TRAINING, device="cuda")
```
"""


class HubError(FlexopsError):
    """Why there is no repository, and the fix."""


def write(
    out: Path, backends: tuple[str, ...] = BACKENDS, libraries: Path | None = None, cuda: str = ""
) -> list[Path]:
    """The repository; returns the folders of its variants.

    Args:
        out: a folder; it must not have a folder ``build``.
        backends: ``cpu``, ``cuda`` or both.
        libraries: what ``flexops build --out`` wrote.
        cuda: the version of CUDA of their kernels, such as ``130``.

    Raises:
        HubError: a folder is there already, or has no libraries; or ``cuda`` is missing.
    """
    if (out / "build").exists():
        raise HubError(
            "the repository is written into an empty folder",
            found=f"{out / 'build'} exists",
            fix=f"rm -r {out / 'build'}",
        )
    variants = {f"torch-{backend}": backend for backend in backends}
    for backend in backends if libraries is not None else ():
        if backend == "cuda" and not cuda.isdigit():
            raise HubError(
                "libraries with CUDA kernels are for one version of CUDA",
                found=f"--cuda {cuda!r}",
                required="its major and minor version without a dot",
                fix="--cuda 130",
            )
        name = f"cu{cuda}" if backend == "cuda" else backend
        variants[f"{STABLE}-{name}-{platform.machine()}-linux"] = backend
    made = []
    for variant, backend in variants.items():
        folder = out / "build" / variant
        stable = variant.startswith(STABLE)
        _write_variant(folder, backend, libraries if stable else None)
        made.append(folder)
    from flexops.patching.hub import LAYERS

    names = ", ".join(f"`{layer.__name__}`" for layer in LAYERS.values())
    (out / "README.md").write_text(_CARD.format(version=flexops.__version__, layers=names))
    return made


def _write_variant(folder: Path, backend: str, libraries: Path | None) -> None:
    package = Path(flexops.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_csrc")
    shutil.copytree(package, folder / "flexops", ignore=ignored)
    shutil.copytree(csrc_root(), folder / "flexops" / "_csrc", ignore=ignored)
    (folder / "__init__.py").write_text(_INIT)
    described: dict[str, object] = {"type": backend}
    if libraries is not None:
        found = list(_libraries(libraries, backend))
        if not found:
            raise HubError(
                f"there are no libraries for {backend}",
                found=f"no folder of {libraries} ends with -{backend} and has a {FILE_NAME}",
                fix=f"flexops build --out {libraries} --device {backend}",
            )
        for one in found:
            shutil.copytree(one, folder / "libraries" / one.name)
    digest = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    metadata = {
        "id": f"_flexops_{backend}_{digest.hexdigest()[:12]}",  # the module's name in a process
        "name": "flexops",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": described,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _libraries(folder: Path, backend: str) -> Iterator[Path]:
    for one in sorted(folder.iterdir()):
        if one.name.endswith(f"-{backend}") and (one / FILE_NAME).is_file():
            yield one


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m flexops_tools.hub",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--cuda", default="")
    given = parser.parse_args(arguments)
    try:
        made = write(given.out, tuple(given.backend or BACKENDS), given.libraries, given.cuda)
    except HubError as error:
        print(error, file=sys.stderr)
        return 2
    for folder in made:
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
