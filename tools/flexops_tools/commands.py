"""The commands that this distribution adds to ``flexops``; see ``flexops.cli.commands``."""

from __future__ import annotations

from flexops.cli.commands import Command

EXAMPLES: dict[str, tuple[str, ...]] = {
    "target render": ("flexops target render", "flexops target render --check"),
    "target lock": ("flexops target lock cu130",),
    "target prove": ("flexops target prove cu130-sm90", "flexops target prove --op rope --update"),
    "channel build": ("flexops channel build --variant cpu",),
    "channel index": ("flexops channel index --channel channel",),
    "channel check": ("flexops channel check --channel channel",),
    "image build": ("flexops image build cu130-sm90", "flexops image build 'cu130-*' --stage dev"),
    "image check": ("flexops image check cu130-sm90",),
    "bench build": ("flexops bench build",),
    "bench ops": ("flexops bench ops --op rms_norm", "flexops bench ops --device cpu --json"),
    "bench model": ("flexops bench model",),
    "bench generate": ("flexops bench generate --size 1b",),
}


def _command(target: str, summary: str) -> Command:
    return Command(f"flexops_tools.cli.{target}", summary, examples=EXAMPLES)


COMMANDS: dict[str, Command] = {
    "target render": _command("target:render", "Write everything that follows from the matrix."),
    "target lock": _command("target:lock", "Lock the pip requirements by hash."),
    "target prove": _command("target:prove", "Compile the kernels as rows of the matrix do."),
    "channel": _command(
        "channel:app",
        "The conda packages: build them into a channel, index it, check that it works.",
    ),
    "image": _command(
        "image:app", "Images of the targets. Requires a container engine and docker with BuildKit."
    ),
    "bench build": _command("bench:build", "The build-time ladder on one op."),
    "bench ops": _command("bench:ops", "Every op against torch's own ways to do the same."),
    "bench model": _command("bench:model", "A training step of a whole model."),
    "bench generate": _command("bench:generate", "Tokens of a model, beside the memory limit."),
}
