"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import bench, build, cache, channel, doctor, image, inspect, new, patch, profile, target, warm, watch
from .examples import EXAMPLES

app = typer.Typer(
    name="flexops", no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    help="Fused PyTorch operators: build, check, cache, targets, benchmarks.",
    epilog="Exit codes: 0, all is well; 1, a check or measurement failed; 2, a command line or setting that is not understood; 3 to 12, one for each "
    "kind of error (docs/command-line.md). `flexops COMMAND --help` has examples.",
)  # fmt: skip
app.command("build")(build.build)
app.command("warm")(warm.warm)
app.command("new")(new.new)
app.command("cmake-dir")(new.cmake_dir)
app.command("doctor")(doctor.doctor)
app.command("patch")(patch.patch)
app.command("inspect")(inspect.inspect)
app.command("profile")(profile.profile)
app.command("sanitize")(profile.sanitize)
app.command("watch", context_settings={"allow_interspersed_args": False})(watch.watch)
app.add_typer(cache.app, name="cache")
app.add_typer(target.app, name="target")
app.add_typer(channel.app, name="channel")
app.add_typer(image.app, name="image")
app.add_typer(bench.app, name="bench")


def _add_examples(group: typer.Typer, before: str = "") -> None:
    for command in group.registered_commands:
        name = f"{before}{command.name or getattr(command.callback, '__name__', '').replace('_', '-')}"
        command.epilog = "\n\n".join(["Examples:", *EXAMPLES[name]])
    for sub in group.registered_groups:
        if sub.typer_instance is not None:
            _add_examples(sub.typer_instance, f"{before}{sub.name} ")


_add_examples(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexops {__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False) -> None:
    """Fused PyTorch operators: build, check, cache, targets, benchmarks."""
