"""What the matrix makes of `docker/`: the Dockerfiles, `docker-bake.hcl`, and the build arguments
and labels of a target, as text and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from flexops import distribution
from flexops.targets.model import Accelerator, Matrix, Target

LABEL_PREFIX = "dev.flexops."
BAKE = "docker/docker-bake.hcl"

BASES = {"runtime": "RUNTIME_BASE", "dev": "BUILD_BASE"}
"""The build argument that names the base of each stage that is kept."""

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_NAMES: dict[Accelerator, str] = {"cpu": "machines without a GPU", "cuda": "CUDA", "rocm": "ROCm"}
_ARCH_VARIABLES: dict[Accelerator, str] = {
    "cpu": "TORCH_CUDA_ARCH_LIST",
    "cuda": "TORCH_CUDA_ARCH_LIST",
    "rocm": "PYTORCH_ROCM_ARCH",
}
_DEFAULTS = {"cuda": "cu130-sm90", "rocm": "rocm72-gfx942"}
"""The rows whose pins are the Dockerfiles' defaults; where the matrix has none of that name, the
first of the kind."""


def _label_lines(values: Mapping[str, str]) -> str:
    return " \\\n      ".join(f'{name}="{value}"' for name, value in values.items())


_ORIGIN_ARGS = {"VERSION": "unknown", "REVISION": "unknown", "SOURCE": "", "CREATED": ""}
"""Where an image comes from: what differs from commit to commit, and so comes last in each stage
that is kept."""


class _DockerTemplate(Template):
    """With ``@{name}``, because a Dockerfile is full of ``${NAME}``."""

    delimiter = "@"


def dockerfile_path(accelerator: Accelerator) -> str:
    return f"docker/Dockerfile.{accelerator}"


def build_args(target: Target) -> dict[str, str]:
    """Every build argument that the matrix decides, in the order of the Dockerfile."""
    return {
        **_base_args(target),
        "COMPILER": _compiler(target),
        **_wheelhouse_args(target),
        "ARCH_LIST": target.arch_list,
        **_pin_args(target),
    }


def labels(target: Target) -> dict[str, str]:
    """The labels that the matrix decides. Those that say what is in an image (its Python, torch,
    architectures) are read from it when it is built."""
    pins = {_label(name): value for name, value in _pin_args(target).items()}
    return {**pins, LABEL_PREFIX + "accelerator": target.accelerator}


def _label(argument: str) -> str:
    return LABEL_PREFIX + argument.lower().replace("_", "-")


def files(matrix: Matrix, header: str) -> dict[str, str]:
    """Path (relative to the root) and text of what follows from the matrix."""
    rendered = {
        dockerfile_path(target.accelerator): dockerfile(target, header)
        for target in defaults(matrix)
    }
    rendered[BAKE] = bake(matrix, header)
    return rendered


def defaults(matrix: Matrix) -> tuple[Target, ...]:
    """For each accelerator that the matrix has, the row whose pins are its Dockerfile's
    defaults."""
    chosen: dict[Accelerator, Target] = {}
    for target in matrix.targets:
        if target.accelerator not in chosen or target.id == _DEFAULTS.get(target.accelerator):
            chosen[target.accelerator] = target
    return tuple(chosen.values())


def dockerfile(target: Target, header: str) -> str:
    """The Dockerfile for a target's accelerator, with its pins as defaults."""
    values = {
        "header": header,
        "id": target.id,
        "what": _NAMES[target.accelerator],
        "file": Path(dockerfile_path(target.accelerator)).name,
        "accelerator": target.accelerator,
        "arch_list": _quoted(target.arch_list),
        "arch_list_variable": _ARCH_VARIABLES[target.accelerator],
        "base_args": _arg_lines(_base_args(target)),
        "compiler": _compiler(target),
        "distribution": distribution.NAME,
        "wheelhouse_args": _arg_lines(_wheelhouse_args(target)),
    }
    return (
        _fill(
            "Dockerfile.in",
            **values,
            dev=_tail(target, "dev"),
            runtime=_tail(target, "runtime"),
            origin=_origin(),
        ).rstrip("\n")
        + "\n"
    )


def bake(matrix: Matrix, header: str) -> str:
    """``docker-bake.hcl``: a target for each row, a group for each accelerator, and a group of
    all."""
    accelerators = dict.fromkeys(target.accelerator for target in matrix.targets)
    groups: dict[str, Sequence[str]] = {"default": matrix.ids}
    groups |= {
        kind: [one.id for one in matrix.targets if one.accelerator == kind]
        for kind in accelerators
        if kind not in matrix.ids
    }
    parts = [_fill("docker-bake.hcl.in", header=header)]
    parts += [f'group "{name}" {{\n  targets = {_list(ids)}\n}}\n' for name, ids in groups.items()]
    parts += [_bake_target(target) for target in matrix.targets]
    return "\n".join(parts)


def _base_args(target: Target) -> dict[str, str]:
    """Base images, by tag, and by digest where the row has one."""
    return {
        "BUILD_BASE": _reference(target.build_base, target.build_digest),
        "RUNTIME_BASE": _reference(target.runtime_base, target.runtime_digest),
    }


def _compiler(target: Target) -> str:
    """The device compiler that the base must have; empty where none is needed, or it comes from the
    package index."""
    return "hipcc" if target.accelerator == "rocm" else ""


def _reference(image: str, digest: str) -> str:
    return f"{image}@{digest}" if digest else image


def _wheelhouse_args(target: Target) -> dict[str, str]:
    """The same for every row of a toolkit, so that these rows share the stages with the downloads
    and torch."""
    return {
        "TOOLKIT_NAME": target.toolkit_name,
        "EXTRA_INDEX": target.index,
        "EXTRA_INDEX_REQUIRED": "1" if target.index_required else "",
        "TORCH_FOR": f"{target.accelerator}{target.toolkit_minor}",
    }


def _pin_args(target: Target) -> dict[str, str]:
    return {"TARGET": target.id, "LEAST_DRIVER": target.least_driver}


def _origin() -> str:
    described = {
        "org.opencontainers.image." + name.lower(): f"${{{name}}}" for name in _ORIGIN_ARGS
    }
    return f"{_arg_lines(_ORIGIN_ARGS)}\nLABEL {_label_lines(described)}"


def _tail(target: Target, stage: str) -> str:
    """What the stages that are kept end with: pins, labels, user, entrypoint."""
    pins = {name: f"${{{name}}}" for name in _pin_args(target)}
    described = {
        "org.opencontainers.image.title": "flexops",
        "org.opencontainers.image.description": (
            "Fused PyTorch operators, compiled, matched and checked"
        ),
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.vendor": distribution.AUTHOR,
        "org.opencontainers.image.base.name": f"${{{BASES[stage]}}}",
        LABEL_PREFIX + "build-base": "${BUILD_BASE}",
        **{_label(name): value for name, value in pins.items()},
        LABEL_PREFIX + "accelerator": target.accelerator,
        LABEL_PREFIX + "stage": stage,
    }
    cuda = target.accelerator == "cuda"
    return _fill(
        "Dockerfile-tail.in",
        pin_args=_arg_lines(_pin_args(target)),
        labels=_label_lines(described),
        driver=(
            " FLEXOPS_IMAGE_DRIVER=${LEAST_DRIVER} NVIDIA_VISIBLE_DEVICES=all"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            if cuda
            else ""
        ),
    ).rstrip("\n")


def _bake_target(target: Target) -> str:
    values = build_args(target)
    width = max(map(len, values))
    args = "".join(f'    {name:<{width}} = "{value}"\n' for name, value in values.items())
    return (
        f'target "{target.id}" {{\n  inherits   = ["_common"]\n  dockerfile ='
        f' "{dockerfile_path(target.accelerator)}"\n  tags       ='
        f' ["${{REPOSITORY}}:{target.id}${{STAGE == "dev" ? "-dev" : ""}}"]\n  args = {{\n{args} '
        " }\n}\n"
    )


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


def _arg_lines(values: dict[str, str]) -> str:
    return "\n".join(f"ARG {name}={_quoted(value)}" for name, value in values.items())


def _quoted(value: str) -> str:
    return f'"{value}"' if any(character in value for character in " ;") else value


def _fill(template: str, **values: str) -> str:
    return _DockerTemplate((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
