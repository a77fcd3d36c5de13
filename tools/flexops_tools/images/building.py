"""Building one image on the engine, from the checkout, with the row's pins."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flexops import __version__
from flexops.doctor.image.facts import ImageFacts
from flexops.errors import ImageError
from flexops.targets import Target

from ..targets.image_files import BASES, build_args, dockerfile_path
from . import buildkit, context, dockerfile, naming
from .engine import engine_root
from .failure import Step, explain
from .labels import contents_labels
from .naming import Stage, split
from .running import FACTS_COMMAND, run_quietly

if TYPE_CHECKING:
    from docker import DockerClient

Report = Callable[[Step, str], None]
"""Called with the step that runs and the last line it said."""

_STEP = re.compile(r"^Step (\d+)/(\d+) : (.*)", re.DOTALL)
_STEP_DONE = re.compile(r"^ ---> ([0-9a-f]{12,})\s*$")
_COMPILES = "-m flexops.build"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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
        return without_credentials(self.index_url)[1]

    def args(self, origin: Mapping[str, str], seed: str = "") -> dict[str, str]:
        """Every build argument: the row's, overruled by the wishes. ``seed``: an image with
        libraries of an earlier build."""
        wishes = {
            "BUILD_BASE": self.build_base,
            "RUNTIME_BASE": self.runtime_base,
            "INDEX_URL": without_credentials(self.index_url)[0],
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


@dataclass
class _Progress:
    """What is known of a running build from the events so far."""

    step: Step | None = None
    cached: int = 0
    image: str = ""
    error: str = ""
    output: list[str] = field(default_factory=list)
    step_cached: bool = False
    compiled: str = ""  # the image that the step left which compiles, unless it was there already

    def failed_step(self, args: Mapping[str, str]) -> Step | None:
        """The step that ran last, with what it said, and its base image by name."""
        if self.step is None:
            return None
        instruction = self.step.instruction
        if instruction.startswith("FROM"):
            instruction = re.sub(
                r"\$\{(\w+)\}", lambda match: args.get(match[1], match[0]), instruction
            )
        return replace(self.step, instruction=instruction, output="".join(self.output))


def build(client: DockerClient, wish: Wish, root: Path, report: Report | None = None) -> Built:
    """Build and tag one image. Steps that were built before are reused; an interrupted build leaves
    nothing but its finished steps.

    Raises:
        ImageError: what failed, why, and what mends it.
        KeyboardInterrupt: as it came, after the engine was told to stop.
    """
    started = time.monotonic()
    log = log_path(root, wish)
    log.parent.mkdir(parents=True, exist_ok=True)
    text = dockerfile.only(
        (root / dockerfile_path(wish.target.accelerator)).read_text(encoding="utf-8"), wish.stage
    )
    args = wish.args(origin(root), _seed(client, wish))
    if wish.credentials:
        return _with_secret(client, wish, root, text, args, log, report)
    progress, text = _Progress(), dockerfile.without_secrets(text)
    with tempfile.TemporaryFile() as packed, log.open("w", encoding="utf-8") as kept:
        context.pack(root, text, wish.ca_bundle, packed)
        packed.seek(0)
        for event in _events(client, wish, packed, args):
            _take(event, progress, kept, report)
    if progress.compiled:
        _keep_kernels(client, wish, progress.compiled)
    if progress.error or not progress.image:
        message = progress.error or "the engine ended the build without an image"
        raise explain(
            wish.target.id,
            progress.failed_step(args),
            message,
            free_bytes=_free_bytes(client),
            log=log,
        )
    steps = progress.step.total if progress.step else 0
    return _tagged(client, wish, progress.image, args, log, started, (steps, progress.cached))


def _with_secret(
    client: DockerClient,
    wish: Wish,
    root: Path,
    text: str,
    args: dict[str, str],
    log: Path,
    report: Report | None,
) -> Built:
    """``build`` by BuildKit, whose secrets reach one step and are kept nowhere."""
    started, kernels = time.monotonic(), naming.kernels(wish.target.id)
    job = buildkit.Job(
        args, wish.credentials, network=wish.network, no_cache=wish.no_cache, target=wish.stage
    )
    with tempfile.TemporaryFile() as packed:
        context.pack(root, text + buildkit.KEPT, wish.ca_bundle, packed)
        with log.open("w", encoding="utf-8") as kept:
            done = buildkit.build(job, packed, kept, report)
            if done.failed:
                free = _free_bytes(client)
                raise explain(wish.target.id, done.step, done.error, free_bytes=free, log=log)
            if done.ran(_COMPILES):
                again = replace(job, target=buildkit.KEPT_STAGE, tag=kernels, no_cache=False)
                buildkit.build(again, packed, kept, None)
    counts = (done.steps, done.cached)
    return _tagged(client, wish, done.image, args, log, started, counts)


def _tagged(
    client: DockerClient,
    wish: Wish,
    image_id: str,
    args: Mapping[str, str],
    log: Path,
    started: float,
    counts: tuple[int, int],
) -> Built:
    """Label and tag a finished image. ``counts``: its steps, and those that were cached."""
    image = client.images.get(_labelled(client, wish, image_id, args))
    image.tag(*split(wish.reference))
    seconds, size = round(time.monotonic() - started, 1), image.attrs["Size"]
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


def _keep_kernels(client: DockerClient, wish: Wish, image: str) -> None:
    """Keep what was compiled as a small image of its own, for the next build. If that cannot be
    done, the next build only takes longer."""
    from docker.errors import DockerException

    text = f"FROM scratch\nCOPY --from={image} /opt/kernels /opt/kernels\n"
    with contextlib.suppress(DockerException):
        for event in client.api.build(
            fileobj=io.BytesIO(text.encode()),
            tag=naming.kernels(wish.target.id),
            rm=True,
            forcerm=True,
            decode=True,
        ):
            if "error" in event:
                break


def _labelled(client: DockerClient, wish: Wish, image: str, args: Mapping[str, str]) -> str:
    """The id of that image with labels that say what is in it, which the build can only find out by
    looking into it; the same id for the same contents."""
    code, out, err, _ = run_quietly(
        client, wish.target, image, FACTS_COMMAND, {"network_mode": "none"}
    )
    if code:
        raise ImageError(
            f"{wish.target.id}: the image cannot say what is in it",
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
    progress = _Progress()
    for event in client.api.build(
        fileobj=io.BytesIO(text.encode()), rm=True, forcerm=True, decode=True
    ):
        progress.error = event.get("error", progress.error)
        progress.image = event.get("aux", {}).get("ID", progress.image)
    if progress.error or not progress.image:
        raise ImageError(
            f"{wish.target.id}: the image cannot be labelled",
            found=progress.error or "the engine gave no image",
            fix="docker info",
        )
    return progress.image


def _registry_digest(client: DockerClient, name: str) -> str:
    """What the registry that an image came from calls it; empty for one that was made on this
    engine."""
    from docker.errors import DockerException

    with contextlib.suppress(DockerException):
        digests = client.images.get(name).attrs.get("RepoDigests")
        return str(digests[0]).rpartition("@")[2] if digests else ""
    return ""


def _events(
    client: DockerClient, wish: Wish, packed: IO[bytes], args: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The engine's events. When the consumer stops, by an interrupt above all, the connection is
    closed, at which the engine stops building."""
    from docker.errors import APIError
    from requests.exceptions import RequestException

    options: dict[str, Any] = {"network_mode": wish.network} if wish.network else {}
    try:
        yield from client.api.build(
            fileobj=packed,
            custom_context=True,
            dockerfile=context.DOCKERFILE,
            buildargs=args,
            nocache=wish.no_cache,
            rm=True,
            forcerm=True,
            decode=True,
            **options,
        )
    except (APIError, RequestException, OSError) as error:
        yield {"error": str(error)}
    except (KeyboardInterrupt, GeneratorExit):
        client.close()
        raise


def _take(event: dict[str, Any], progress: _Progress, log: IO[str], report: Report | None) -> None:
    """Put one event into what is known, the log and the report."""
    if "error" in event:
        progress.error = _COLOUR.sub("", event["error"])
        log.write(progress.error + "\n")
    elif "aux" in event:
        progress.image = event["aux"].get("ID", progress.image)
    elif "stream" in event:
        text = _COLOUR.sub("", event["stream"])
        log.write(text)
        log.flush()
        _stream(text, progress, report)
    elif "status" in event and progress.step and report:
        report(
            progress.step,
            " ".join(str(event[name]) for name in ("status", "id", "progress") if event.get(name)),
        )


def _stream(text: str, progress: _Progress, report: Report | None) -> None:
    if match := _STEP.match(text):
        progress.step = Step(int(match[1]), int(match[2]), " ".join(match[3].split()))
        progress.step_cached = False
        progress.output.clear()
    elif text.strip() == "---> Using cache":
        progress.cached += 1
        progress.step_cached = True
    elif (
        (done := _STEP_DONE.match(text))
        and progress.step
        and _COMPILES in progress.step.instruction
        and not progress.step_cached
    ):
        progress.compiled = done[1]
    elif not text.startswith((" --->", "Removing intermediate container")):
        progress.output.append(text)
    if progress.step and report:
        report(progress.step, text.strip().splitlines()[-1] if text.strip() and not match else "")


def log_path(root: Path, wish: Wish) -> Path:
    """Where the log of a build is kept, the last one of its kind."""
    return root / ".flexops" / "images" / f"{wish.target.id}-{wish.stage}.log"


def origin(root: Path) -> dict[str, str]:
    """Where an image of this checkout comes from, as build arguments.

    ``CREATED`` is the commit's date, not the build's: an image that differs from the last one in
    nothing else is the same image.
    """
    changed = "+changed" if _git(root, "status", "--porcelain") else ""
    return {
        "VERSION": __version__,
        "REVISION": (_git(root, "rev-parse", "HEAD") or "unknown") + changed,
        "SOURCE": without_credentials(_git(root, "remote", "get-url", "origin"))[0],
        "CREATED": _git(root, "log", "-1", "--format=%cI"),
    }


def _git(root: Path, *arguments: str) -> str:
    """What git says; nothing where it cannot tell."""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def without_credentials(url: str) -> tuple[str, str]:
    """A URL without its ``user:password``, and these; both empty if they are."""
    scheme, separator, rest = url.partition("://")
    credentials, at, _ = rest.partition("/")[0].rpartition("@")
    return (
        (f"{scheme}://{rest[len(credentials) + 1 :]}", credentials)
        if separator and at
        else (url, "")
    )


def _free_bytes(client: DockerClient) -> int | None:
    """Free space on the engine's disk, where that is one of this machine."""
    try:
        return shutil.disk_usage(engine_root(client)).free
    except Exception:  # it is only said if it is known: the engine may be gone, or elsewhere
        return None


def push(client: DockerClient, name: str, say: Callable[[str], None] | None = None) -> None:
    """Push an image to the registry in its name; raises ``ImageError`` with the registry's own
    words."""
    repository, tag = split(name)
    for event in client.api.push(repository, tag=tag, stream=True, decode=True):
        if "error" in event:
            raise ImageError(
                f"{name} could not be pushed",
                found=event["error"],
                fix=f"docker login, and --tag REGISTRY/{repository}",
            )
        if say and event.get("status"):
            say(" ".join(str(event[key]) for key in ("status", "id", "progress") if event.get(key)))
