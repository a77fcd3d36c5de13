"""What is done with the rattler bindings, each in a process of its own: ``python -m
flexops_tools.channel.child``, a JSON request on standard input.

Output is for the log. The answer is a JSON file, so that nothing else can be taken for it, and the
process ends without the interpreter's own shutdown: the bindings' threads have been seen to crash
in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import auditing, sealing

Request = dict[str, Any]
Answer = dict[str, Any]


class _Log:
    """Hands on what a build says."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.specs: list[str] = []
        self._listing = False

    def on_log(self, event: Any) -> None:
        if event.level == "error":
            self.errors.append(event.message)
        self._note_specs(event.message.strip())
        print(event.message, flush=True)

    def _note_specs(self, line: str) -> None:
        """Keep what is being solved for: a line ``Specs:``, then ``- spec`` each."""
        if line == "Specs:":
            self.specs, self._listing = [], True
        elif self._listing and line.startswith("- "):
            self.specs.append(line[2:])
        else:
            self._listing = False

    def on_build_step(self, event: Any) -> None:
        print(f"== {event.step_name} {event.message}", flush=True)

    def on_download_start(self, event: Any) -> None:
        print(f"downloading {event.url}", flush=True)

    def on_download_progress(self, event: Any) -> None: ...

    def on_download_complete(self, event: Any) -> None: ...


def build(request: Request) -> Answer:
    """Build the one variant of a recipe that the given variant files leave."""
    from rattler_build import (
        PlatformConfig,
        RenderConfig,
        Stage0Recipe,
        ToolConfiguration,
        VariantConfig,
    )

    recipe = Stage0Recipe.from_file(request["recipe"])
    rendered = recipe.render(
        VariantConfig.from_files(request["variants"]), RenderConfig(PlatformConfig())
    )
    tools = ToolConfiguration(
        test_strategy="native" if request["test"] else "skip", channel_priority="strict"
    )
    log, packages = _Log(), []
    for variant in rendered:
        try:
            output, channels = request["output"], request["channels"]
            # The rendered recipe is left out: it is full of this machine's folders.
            result = variant.run_build(
                tools,
                output_dir=output,
                channels=channels,
                progress_callback=log,
                no_build_id=True,
                no_include_recipe=True,
            )
        except Exception as error:
            raise RuntimeError(
                "\n".join(
                    [*log.errors, str(error), _why_unsolvable(str(error), log.specs, request)]
                )
            ) from error
        packages += [str(path) for path in result.packages]
    return {"packages": packages}


def _why_unsolvable(error: str, specs: list[str], request: Request) -> str:
    """rattler-build's bindings report that a solve failed, not why: a second one gives
    the reason."""
    if "resolve dependencies" not in error or not specs:
        return ""
    try:
        asyncio.run(
            _solve(
                {
                    "channels": [
                        channel
                        for channel in request["channels"]
                        if "://" not in channel or _is_there(channel)
                    ],
                    "specs": specs,
                }
            )
        )
    except Exception as reason:
        return str(reason)
    return ""


def _is_there(channel: str) -> bool:
    return not channel.startswith("file://") or Path(channel.removeprefix("file://")).is_dir()


def seal(request: Request) -> Answer:
    """Pack a package so that it is the same bytes at every build."""
    sealing.seal(
        Path(request["package"]), Path(request["target"]), request["date"], Path(request["work"])
    )
    return {}


def index(request: Request) -> Answer:
    """Write the index of a channel that may have changed; ``force``: read again what it lists
    already."""
    from rattler.index import index_fs

    asyncio.run(index_fs(request["channel"], force=request.get("force", False)))
    return {}


def inspect(request: Request) -> Answer:
    """What is wrong inside each of the packages; those that are in order are left out."""
    found = [
        [path, "; ".join(auditing.inspect(Path(path), Path(request["work"])))]
        for path in request["packages"]
    ]
    return {"damaged": [[path, faults] for path, faults in found if faults]}


def audit(request: Request) -> Answer:
    """What the index of a channel lists under a name, and what is wrong with that. A folder is read
    as its clients will, from a server."""
    with tempfile.TemporaryDirectory(dir=request["work"]) as work, contextlib.ExitStack() as stack:
        url = request["address"] or stack.enter_context(auditing.served(Path(request["folder"])))
        listed, faults = asyncio.run(auditing.audit(url, request["name"], Path(work)))
    return {"listed": listed, "faults": faults}


def solve(request: Request) -> Answer:
    """Which packages would be installed here; the driver is what ``CONDA_OVERRIDE_CUDA`` says, if
    it is set."""
    return _listed(asyncio.run(_solve(request)))


def install(request: Request) -> Answer:
    """Make a prefix hold exactly what the specs call for; none empties it."""
    from rattler import install as rattler_install

    records = asyncio.run(_solve(request)) if request["specs"] else []
    asyncio.run(rattler_install(records, request["prefix"], show_progress=False))
    return _listed(records)


def _listed(records: list[Any]) -> Answer:
    return {
        "records": [
            [record.name.normalized, str(record.version), str(record.build), record.url]
            for record in records
        ]
    }


async def _solve(request: Request) -> list[Any]:
    from rattler import VirtualPackage, VirtualPackageOverrides
    from rattler import solve as rattler_solve

    here = VirtualPackage.detect(VirtualPackageOverrides.from_env())
    return list(await rattler_solve(request["channels"], request["specs"], virtual_packages=here))


ACTIONS: dict[str, Callable[[Request], Answer]] = {
    one.__name__: one for one in (build, seal, index, inspect, audit, solve, install)
}


def main() -> int:
    request: Request = json.load(sys.stdin)
    try:
        answer = ACTIONS[request["action"]](request)
    except Exception as error:
        traceback.print_exc()
        answer = {"error": str(error) or type(error).__name__, "kind": type(error).__name__}
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
