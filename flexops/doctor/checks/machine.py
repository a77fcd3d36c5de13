"""Judging the machine: system, Python, settings, environment, GPUs, driver."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping

from ... import distribution
from ..facts import Gpu, GpuFact, PlatformFact, PythonFact, SettingsFact, TorchFact
from ..finding import Finding, fail, ok, warn

LEAST_PYTHON = (3, 10)
LEAST_TORCH = (2, 4)
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "libgomp", "libiomp", "libasan", "libstdc++")
_OTHER_TORCH = "flexops target detect   # names the torch to install"
_GPU_IN_CONTAINER = {
    "docker": "docker run --gpus all <image>   # needs the NVIDIA container toolkit on the host",
    "podman": (
        "podman run --device nvidia.com/gpu=all <image>   # needs the NVIDIA container toolkit on"
        " the host"
    ),
    "kubernetes": "resources: {limits: {nvidia.com/gpu: 1}}   # in the pod's container spec",
}


def platform(fact: PlatformFact) -> Finding:
    where = f", in a container ({fact.container})" if fact.container else ""
    found = (
        f"{fact.distribution or fact.system}, {fact.system} {fact.release}, {fact.machine},"
        f" {fact.libc or 'C library not known'}{where}"
    )
    if fact.system != "Linux":
        return fail(
            "platform", found, "Linux", "work in a Linux machine or container (WSL 2 on Windows)"
        )
    if "glibc" not in fact.libc:
        return warn(
            "platform",
            found,
            "glibc, which torch's wheels are built for",
            "use a distribution with glibc (Debian, Ubuntu, Fedora, ...)",
        )
    return ok("platform", found)


def python(fact: PythonFact, compiler: bool, installer: str) -> Finding:
    """``compiler``: there is one, so that missing headers will be missed by those who write
    extension modules."""
    version = ".".join(map(str, fact.version))
    found = f"{version}, {fact.executable} ({fact.environment})"
    if fact.version < LEAST_PYTHON:
        return fail(
            "python",
            found,
            f"{LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} or newer",
            "python3.12 -m venv .venv && . .venv/bin/activate",
        )
    if compiler and not fact.headers:
        required = (
            "Python.h, for flexops.load of pybind11 modules (flexops' own operators do without)"
        )
        return warn("python", f"{found}; no Python.h", required, _headers_fix(fact, installer))
    return ok("python", found)


def _headers_fix(fact: PythonFact, installer: str) -> str:
    minor = f"{fact.version[0]}.{fact.version[1]}"
    if fact.origin == "conda":
        return (
            f"conda install --force-reinstall python={minor}   # conda's Python has its headers, so"
            " this one is damaged"
        )
    if fact.origin == "other":
        return (
            f"uv venv --managed-python --python {minor} .venv   # this Python is not the"
            " distribution's and came without its headers"
        )
    return f"{installer or 'apt-get install -y'} python{minor}-dev"


def package(fact: PythonFact) -> Iterator[Finding]:
    """Whether another project's distribution has the same modules; nothing is said where there is
    none."""
    if fact.namesake:
        found = (
            f"{fact.namesake}, another project's distribution with the same import name, beside"
            f" {distribution.NAME}: each overwrites the other's modules"
        )
        fix = (
            f"{fact.executable} -m pip uninstall --yes flexops   # then install {distribution.NAME}"
            " again, as before"
        )
        yield fail(
            "package",
            found,
            f"one of the two in an environment; {distribution.NAME} is this one",
            fix,
        )


def settings(fact: SettingsFact) -> Iterator[Finding]:
    for what, found, required, fix in fact.problems:
        yield fail("settings", f"{what}: {found}", required, fix)
    for name, meant in fact.misspelled:
        yield warn(
            "settings",
            f"{name} is no setting of flexops, and is not read",
            f"{meant}, if that is meant",
            f'export {meant}="${name}"; unset {name}',
        )
    if not (fact.problems or fact.misspelled):
        chosen = fact.settings
        yield ok(
            "settings",
            f"fallback {chosen.fallback}, compiling at run time {'on' if chosen.jit else 'off'},"
            f" log {chosen.log}",
        )


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    preload = variables.get("LD_PRELOAD", "")
    strange = [
        name
        for name in preload.replace(":", " ").split()
        if not any(known in name for known in _ALLOCATORS)
    ]
    if strange:
        yield warn(
            "environment",
            f"LD_PRELOAD={preload}",
            "nothing preloaded into Python and the compilers",
            "unset LD_PRELOAD",
        )
    blocking = variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
    if blocking:
        yield warn(
            "environment",
            "CUDA_LAUNCH_BLOCKING is set: every kernel is waited for",
            "unset, except to debug",
            "unset CUDA_LAUNCH_BLOCKING",
        )
    if not (strange or blocking):
        yield ok("environment", f"LD_PRELOAD={preload}" if preload else "nothing preloaded")


def gpu(
    fact: GpuFact,
    torch: TorchFact,
    where: PlatformFact,
    variables: Mapping[str, str],
    target_accelerator: str,
) -> Finding:
    """GPUs that can be used. ``target_accelerator``: of the row judged against, or empty."""
    if fact.problem:
        return fail(
            "gpu",
            fact.problem,
            "a driver that answers",
            "reboot, or reload the driver's kernel modules; then nvidia-smi",
        )
    hidden = variables.get("CUDA_VISIBLE_DEVICES")
    if fact.gpus and hidden is not None and hidden.strip() in ("", "-1"):
        return warn(
            "gpu",
            f"{_names(fact)}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}",
            "a visible GPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if fact.gpus and all(one.slices == 0 for one in fact.gpus):
        fix = (
            "sudo nvidia-smi mig -cgi <profile> -C   # of those that `nvidia-smi mig -lgip` lists;"
            " or sudo nvidia-smi -mig 0"
        )
        return fail(
            "gpu",
            f"{_names(fact)}: nothing runs on it before it has a slice",
            "a MIG slice, or MIG switched off",
            fix,
        )
    if fact.gpus:
        return ok("gpu", _names(fact))
    if fact.unusable:
        return warn(
            "gpu",
            f"{', '.join(fact.unusable)}, but no driver shows it",
            "a driver",
            _driver_fix(fact, where),
        )
    wanted = target_accelerator in ("cuda", "rocm") or (
        where.container and (torch.cuda or torch.hip)
    )
    if wanted:
        return warn(
            "gpu",
            "none: operators run on the CPU here",
            "a GPU, to run what is compiled for one",
            _pass_a_gpu(where, torch, target_accelerator),
        )
    return ok(
        "gpu", "none: operators run on the CPU; libraries for a GPU elsewhere can still be compiled"
    )


def _names(fact: GpuFact) -> str:
    counts: dict[Gpu, int] = {}
    for one in fact.gpus:
        counts[one] = counts.get(one, 0) + 1
    return ", ".join(_name(one, count) for one, count in counts.items())


def _name(one: Gpu, count: int) -> str:
    memory = f", {one.memory_bytes / 2**30:.0f} GiB" if one.memory_bytes else ""
    slices = (
        ""
        if one.slices is None
        else f", MIG with {one.slices} slice{'' if one.slices == 1 else 's'}"
    )
    return f"{f'{count} x ' if count > 1 else ''}{one.name} ({one.capability}{memory}{slices})"


def _driver_fix(fact: GpuFact, where: PlatformFact) -> str:
    if where.container:
        return _GPU_IN_CONTAINER.get(where.container, _GPU_IN_CONTAINER["docker"])
    if any("AMD" in name for name in fact.unusable):
        return "sudo apt-get install -y amdgpu-dkms && sudo usermod -aG render,video $USER"
    return (
        "sudo apt-get install -y nvidia-driver   # or the distribution's own name for it; then"
        " reboot"
    )


def _pass_a_gpu(where: PlatformFact, torch: TorchFact, target_accelerator: str) -> str:
    if not where.container:
        return "run this on a machine with a GPU; to only compile for one, nothing is needed"
    if torch.hip or target_accelerator == "rocm":
        return (
            'docker run --device=/dev/kfd --device=/dev/dri --group-add "$(getent group render |'
            ' cut -d: -f3)" <image>'
        )
    return _GPU_IN_CONTAINER.get(where.container, _GPU_IN_CONTAINER["docker"])


def driver(fact: GpuFact, torch: TorchFact) -> Finding:
    """The driver's release against the CUDA that torch is built for. Its CUDA version is another
    thing, and only reported."""
    from ...toolchain import driver_supports
    from ...toolchain.model import Version

    if fact.driver is None:
        return (
            ok("driver", "no NVIDIA driver")
            if not any(one.vendor == "amd" for one in fact.gpus)
            else ok("driver", "AMD's, in the kernel")
        )
    found = f"NVIDIA {fact.driver}" + (
        f", which knows CUDA {fact.driver_cuda} and older" if fact.driver_cuda else ""
    )
    if not torch.cuda:
        return ok("driver", found)
    verdict = driver_supports(fact.driver, Version.parse(torch.cuda))
    if not verdict:
        required = f"{verdict.reason}; torch {torch.version} is built for it"
        return fail(
            "driver",
            found,
            required,
            "update the driver, or install a torch for an older CUDA: flexops target detect",
        )
    return ok("driver", f"{found}; {verdict.reason}" if verdict.reason else found)


def torch(fact: TorchFact) -> Finding:
    pip = f"{sys.executable} -m pip"
    if fact.state == "absent":
        return fail("torch", "not installed", "torch 2.4 or newer", f"{pip} install torch")
    if fact.state == "hangs":
        return fail(
            "torch",
            fact.detail,
            "`import torch` to end",
            f'timeout 60 {sys.executable} -X faulthandler -c "import torch"   # shows where',
        )
    if fact.state == "broken":
        return fail(
            "torch",
            f"cannot be imported: {fact.detail}",
            "a torch that can be imported",
            _torch_fix(fact.detail, pip),
        )
    kind = f"CUDA {fact.cuda}" if fact.cuda else f"ROCm {fact.hip}" if fact.hip else "CPU only"
    found = (
        f"{fact.version}, {kind}, C++11 ABI {int(fact.cxx11_abi)}, imported in"
        f" {fact.import_seconds:.1f} s"
    )
    if _least(fact.version) < LEAST_TORCH:
        return fail("torch", found, "torch 2.4 or newer", f"{pip} install --upgrade torch")
    return ok("torch", found)


def _least(version: str) -> tuple[int, ...]:
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def _torch_fix(detail: str, pip: str) -> str:
    reinstall = f"{pip} install --force-reinstall torch"
    if "SIGILL" in detail:
        return f"{reinstall}   # this one is built for another processor"
    if "numpy" in detail.lower():
        return f"{pip} install --upgrade numpy torch"
    if (
        "cannot open shared object" in detail
        or "undefined symbol" in detail
        or "version `" in detail
    ):
        return (
            f"env -u LD_LIBRARY_PATH {sys.executable} -c 'import torch' || {reinstall}   # if the"
            " first part works, unset LD_LIBRARY_PATH for good"
        )
    return reinstall


def torch_gpu(fact: TorchFact, gpus: GpuFact, variables: Mapping[str, str]) -> Finding:
    """Whether torch can use the GPUs that the driver shows."""
    here = [one for one in gpus.gpus if (one.vendor == "amd") == bool(fact.hip)]
    if not gpus.gpus:
        return ok("torch-gpu", "no GPU is here")
    if fact.state != "ok":
        return ok("torch-gpu", "not asked: torch cannot be imported")
    if not (fact.cuda or fact.hip):
        return warn(
            "torch-gpu",
            "torch is a CPU build: it cannot use the GPU here",
            "a torch for this GPU",
            _OTHER_TORCH,
        )
    if not here:
        maker = "ROCm" if fact.hip else "CUDA"
        return warn(
            "torch-gpu",
            f"torch is built for {maker}, the GPU is another maker's",
            "a torch for this GPU",
            _OTHER_TORCH,
        )
    if fact.gpu_count == 0:
        if variables.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            return warn(
                "torch-gpu",
                "torch sees no GPU: CUDA_VISIBLE_DEVICES hides them",
                "a visible GPU",
                "unset CUDA_VISIBLE_DEVICES",
            )
        fix = _cuda_fix(fact.gpu_error)
        if "CUDA_VISIBLE_DEVICES" in variables and re.search(
            r"No CUDA GPUs|no CUDA-capable|invalid device ordinal", fact.gpu_error
        ):
            fix = (
                "nvidia-smi -L   # it lists the GPUs and MIG slices there are;"
                f" CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']} names none of them"
            )
        return fail(
            "torch-gpu",
            f"torch cannot use the GPU: {fact.gpu_error}",
            "torch.cuda.is_available()",
            fix,
        )
    return ok("torch-gpu", f"torch can use {fact.gpu_count} GPU{'s' if fact.gpu_count > 1 else ''}")


def _cuda_fix(error: str) -> str:
    if "803" in error or "unsupported display driver" in error:
        return (
            "unset LD_LIBRARY_PATH; rm -f /etc/ld.so.conf.d/*cuda*compat*.conf && ldconfig   #"
            " forward-compat libraries stand before the driver's own"
        )
    if "too old" in error or "insufficient" in error:
        return (
            "update the NVIDIA driver, or install a torch for an older CUDA: flexops target detect"
        )
    return "nvidia-smi   # the driver must work first; then flexops doctor again"
