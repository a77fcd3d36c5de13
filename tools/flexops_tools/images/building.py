"""Building one image on the engine, from the checkout, with the row's pins."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexops import __version__
from flexops.errors import ImageError
from flexops.redaction import redacted, split_credentials
from flexops.targets import Target

from ..targets.image_files import BASES, build_args, dockerfile_path
from . import buildkit, context, naming
from .contents import ImageFacts
from .engine import engine_root
from .failure import Step, explain
from .labels import contents_labels
from .naming import Stage, split
from .running import facts_command, run_quietly

if TYPE_CHECKING:
    from docker import DockerClient

Report = Callable[[Step, str], None]
"""Called with the step that runs and the last line it said."""

_COMPILES = "-m flexops.build"


@dataclass(frozen=True)
class Wish:
    """What to build and how; empty fields leave it to the row and the engine."""

    target: Target
    stage: Stage
    reference: str
    build_base: str = ""
    runtime_base: str = ""
    index_url: str = ""
    ca_bundle: Path | None = None
    network: str = ""
    no_cache: bool = False
    jobs: int | None = None
    accept_torch: bool = False

    @property
    def credentials(self) -> str:
        """``user:password`` of the index, which are no build argument; empty for none."""
        return split_credentials(self.index_url)[1]

    def args(self, origin: Mapping[str, str], seed: str = "") -> dict[str, str]:
        """Every build argument: the row's, overruled by the wishes. ``seed``: an image with
        libraries of an earlier build."""
        wishes = {
            "BUILD_BASE": self.build_base,
            "RUNTIME_BASE": self.runtime_base,
            "INDEX_URL": split_credentials(self.index_url)[0],
            "ACCEPT_TORCH": "1" if self.accept_torch else "",
            "JOBS": str(self.jobs or ""),
            "SEED": seed,
        }
        return {
            **build_args(self.target),
            **{name: value for name, value in wishes.items() if value},
            **origin,
        }


@dataclass(frozen=True)
class Built:
    """A finished image. ``cached``: how many of the ``steps`` were there already."""

    target: str
    reference: str
    image: str
    seconds: float
    size: int
    steps: int
    cached: int
    log: Path


def build(client: DockerClient, wish: Wish, root: Path, report: Report | None = None) -> Built:
    """Build and tag one image by BuildKit. Steps that were built before are reused; an interrupted
    build leaves nothing but its finished steps.

    Raises:
        ImageError: what failed, why, and the fix.
        KeyboardInterrupt: as it came, after the engine has stopped.
    """
    started, log = time.monotonic(), log_path(root, wish)
    log.parent.mkdir(parents=True, exist_ok=True)
    text = (root / dockerfile_path(wish.target.accelerator)).read_text(encoding="utf-8")
    job = buildkit.Job(
        wish.args(origin(root), _seed(client, wish)),
        wish.credentials,
        network=wish.network,
        no_cache=wish.no_cache,
        target=wish.stage,
    )
    with tempfile.TemporaryDirectory() as folder, log.open("w", encoding="utf-8") as kept:
        context.write(root, text + buildkit.KEPT, wish.ca_bundle, Path(folder))
        done = buildkit.build(job, folder, kept, report)
        if done.failed:
            free = _free_bytes(client)
            raise explain(wish.target.id, done.step, done.error, free_bytes=free, log=log)
        if done.ran(_COMPILES):  # what was compiled, for the next build
            kernels = naming.kernels(wish.target.id)
            again = replace(job, target=buildkit.KEPT_STAGE, tag=kernels, no_cache=False)
            buildkit.build(again, folder, kept, None)
    image = client.images.get(_labelled(client, wish, done.image, job.args))
    image.tag(*split(wish.reference))
    seconds, size = round(time.monotonic() - started, 1), image.attrs["Size"]
    counts = (done.steps, done.cached)
    return Built(wish.target.id, wish.reference, str(image.id), seconds, size, *counts, log)


def _seed(client: DockerClient, wish: Wish) -> str:
    """The image with the libraries of this row's last build; empty if there is none, or all is to
    be built anew."""
    from docker.errors import DockerException

    name = naming.kernels(wish.target.id)
    try:
        client.images.get(name)
    except DockerException:
        return ""
    return "" if wish.no_cache else name


def _labelled(client: DockerClient, wish: Wish, image: str, args: Mapping[str, str]) -> str:
    """The id of that image with labels that say what is in it, which the build can only find out by
    looking into it; the same id for the same contents."""
    code, out, err, _ = run_quietly(
        client, wish.target, image, facts_command(), {"network_mode": "none"}
    )
    if code:
        raise ImageError(
            f"{wish.target.id}: the image's contents cannot be read",
            found=err.strip(),
            fix=f"flexops image build --no-cache {wish.target.id}",
        )
    labels = contents_labels(ImageFacts.from_dict(json.loads(out)))
    if digest := _registry_digest(client, args[BASES[wish.stage]]):
        labels["org.opencontainers.image.base.digest"] = digest
    text = (
        f"FROM {image}\nLABEL "
        + " ".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        + "\n"
    )
    error = labelled = ""
    for event in client.api.build(
        fileobj=io.BytesIO(text.encode()), rm=True, forcerm=True, decode=True
    ):
        error = event.get("error", error)
        labelled = event.get("aux", {}).get("ID", labelled)
    if error or not labelled:
        raise ImageError(
            f"{wish.target.id}: the image cannot be labelled",
            found=error or "the engine gave no image",
            fix="docker info",
        )
    return labelled


def _registry_digest(client: DockerClient, name: str) -> str:
    """What the registry that an image came from calls it; empty for one that was made on this
    engine."""
    from docker.errors import DockerException

    with contextlib.suppress(DockerException):
        digests = client.images.get(name).attrs.get("RepoDigests")
        return str(digests[0]).rpartition("@")[2] if digests else ""
    return ""


def log_path(root: Path, wish: Wish) -> Path:
    """Where the log of a build is kept, the last one of its kind."""
    return root / ".flexops" / "images" / f"{wish.target.id}-{wish.stage}.log"


def origin(root: Path) -> dict[str, str]:
    """Where an image of this checkout comes from, as build arguments.

    ``CREATED`` is the commit's date, not the build's: an image that differs from the last one in
    nothing else is the same image.
    """
    changed = "+changed" if _git(root, "status", "--porcelain") else ""
    source = _git(root, "remote", "get-url", "origin")
    return {
        "VERSION": __version__,
        "REVISION": (_git(root, "rev-parse", "HEAD") or "unknown") + changed,
        "SOURCE": redacted(source) if "://" in source else source,
        "CREATED": _git(root, "log", "-1", "--format=%cI"),
    }


def _git(root: Path, *arguments: str) -> str:
    """What git says; "" where it fails."""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _free_bytes(client: DockerClient) -> int | None:
    """Free space on the engine's disk, where that is one of this machine."""
    try:
        return shutil.disk_usage(engine_root(client)).free
    except Exception:  # it is only said if it is known: the engine may be gone, or elsewhere
        return None
