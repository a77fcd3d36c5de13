"""``flexops bench model``: a whole training step of a Llama-style model, of one with experts or of
one with pictures, by those who make it faster: time, memory, and the losses of a training.

Each contender has a model of its own, from the same seed, and takes its turns at the same batches.
A step is forward and backward pass, clipping to norm 1, and AdamW with states in the parameters'
dtype.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import math
import re
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexops.bench import timing
from flexops.bench.text import columns, duration, ratio
from flexops.errors import FlexopsError, SettingsError


@dataclass(frozen=True)
class Shape:
    """A model, and what it is trained on in one step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int
    kind: str = "llama"  # transformers' type

    def __str__(self) -> str:
        sizes = (
            f"hidden {self.hidden}, {self.layers} layers, {self.heads} query and {self.kv_heads}"
            f" key/value heads, MLP {self.inner}"
        )
        return (
            f"{KINDS[self.kind]} ({sizes}, vocabulary {self.vocabulary}), batch {self.batch} x"
            f" {self.length} tokens"
        )


KINDS = {
    "llama": "Llama-style model",
    "qwen3_moe": "Qwen3-MoE-style model, 128 experts of 768, 8 a token",
    "qwen2_5_vl": "Qwen2.5-VL-style model, a picture of 64 x 64 patches a sequence",
    "qwen3_5_text": "Qwen3.5-style model, of whose layers every fourth attends",
}
SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 8192, 128256, 4, 2048),
    "small": Shape(1024, 4, 16, 8, 2816, 8192, 4, 512),
    "8b-4": Shape(4096, 4, 32, 8, 14336, 128256, 4, 2048),
    "tiny": Shape(64, 2, 4, 2, 128, 512, 2, 32),
}
TRAINED = SHAPES | {
    "moe": Shape(2048, 4, 32, 4, 6144, 151936, 4, 4096, "qwen3_moe"),
    "vlm": Shape(2048, 8, 16, 4, 8192, 151936, 4, 2048, "qwen2_5_vl"),
    "hybrid": Shape(2560, 8, 16, 4, 9216, 151936, 1, 4096, "qwen3_5_text"),
}
VISION = {"depth": 12, "hidden_size": 1280, "intermediate_size": 3456, "num_heads": 16}
PATCHES = 64
"""Of a picture, a side; four of its patches become a token."""
WARM_UP = 20
"""Steps over which the learning rate of a curve rises."""
RATE = 3e-4


@dataclass(frozen=True)
class Result:
    """What one contender reached; ``gibibytes`` and ``joules`` are 0 where there is no GPU,
    ``preparation`` the seconds until the model was patched."""

    name: str
    milliseconds: float
    gibibytes: float
    flexops: bool
    preparation: float = 0.0
    joules: float = 0.0


@dataclass(frozen=True)
class Run:
    """Results in the order of the contenders, means of so many steps' losses by contender, and who
    could not take part, and why."""

    date: str
    machine: str
    what: str
    results: tuple[Result, ...] = ()
    losses: dict[str, list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    steps: int = 1
    benchmark: str = "training step"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        results = tuple(Result(**{"flexops": False, **one}) for one in data["results"])
        return cls(
            data["date"],
            data["machine"],
            data["what"],
            results,
            data.get("losses", {}),
            data.get("absent", {}),
            data.get("steps", 1),
        )


# ---- contenders ----


class Contender:
    """A model and what makes its steps."""

    def __init__(
        self,
        shape: Shape,
        device: str,
        *,
        seed: int = 0,
        kind: str = "",
        compiled: bool = False,
        fp8: str | None = None,
    ) -> None:
        self.model = make_model(shape, device, seed)
        self.shape = shape
        self.swap: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        started = time.perf_counter()
        if kind == "Liger":
            self.swap = _liger(self.model, shape.kind)
        if kind == "flexops":
            import flexops

            flexops.patch(self.model, fp8=fp8)
            self.optimizer: Any = flexops.optim.AdamW(
                self.model.parameters(), lr=RATE, state_dtype="param", max_norm=1.0
            )
            self.clip: Callable[[], object] = lambda: None
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
            self.clip = functools.partial(
                torch.nn.utils.clip_grad_norm_, list(self.model.parameters()), 1.0
            )
        self.preparation = time.perf_counter() - started
        self.forward = torch.compile(self.model) if compiled else self.model

    def step(self, batch: Tensor) -> Tensor:
        with self.swap:
            loss: Tensor = self.forward(**inputs(self.shape, batch), use_cache=False).loss
            loss.backward()
            self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


CONTENDERS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, torch.compile": {"compiled": True},
    "Liger": {"kind": "Liger"},
    "flexops.patch": {"kind": "flexops"},
    "flexops.patch, torch.compile": {"kind": "flexops", "compiled": True},
    "flexops.patch, fp8": {"kind": "flexops", "fp8": "rowwise"},
    "flexops.patch, fp8, gw_hp": {"kind": "flexops", "fp8": "rowwise_with_gw_hp"},
}
OTHER_SEED = ", another seed"


def make_model(shape: Shape, device: str, seed: int) -> Any:
    """Random weights in bfloat16 (on the CPU in float32), the same for a seed."""
    try:
        import transformers
    except ImportError as error:
        raise FlexopsError(
            "the model is one of transformers'", found=str(error), fix="pip install transformers"
        ) from error
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.length,
        "tie_word_embeddings": shape.kind == "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    auto: Any = transformers.AutoModelForCausalLM
    if shape.kind == "qwen3_moe":
        sizes |= {"head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768}
    if shape.kind == "qwen3_5_text":
        sizes |= {"head_dim": 256}
    if shape.kind == "qwen2_5_vl":
        auto = transformers.AutoModelForImageTextToText
        wide = shape.hidden // shape.heads // 8
        rope = {"rope_type": "default", "rope_theta": 1e6}
        rope |= {"mrope_section": [wide, (4 * wide - wide) // 2, (4 * wide - wide + 1) // 2]}
        vision = VISION | {"out_hidden_size": shape.hidden, "fullatt_block_indexes": [5, 11]}
        names = ("image_token_id", "vision_start_token_id", "video_token_id", "vision_end_token_id")
        numbers = {name: shape.vocabulary - 1 - i for i, name in enumerate(names)}
        sizes = {
            "text_config": sizes | {"rope_parameters": rope},
            "vision_config": vision,
            **numbers,
        }
    config = transformers.CONFIG_MAPPING[shape.kind](**sizes)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = auto.from_config(config, dtype=dtype)
    return model.train()


def inputs(shape: Shape, batch: Tensor) -> dict[str, Any]:
    """A model's arguments: tokens, with a picture at the beginning of each sequence if the model
    sees."""
    if shape.kind != "qwen2_5_vl":
        return {"input_ids": batch, "labels": batch}
    image, start = shape.vocabulary - 1, shape.vocabulary - 2
    tokens = batch.clamp(max=shape.vocabulary - 5)
    tokens[:, 1], tokens[:, 2 : 2 + PATCHES**2 // 4] = start, image
    generator = torch.Generator(batch.device).manual_seed(0)
    size = (len(batch) * PATCHES**2, 3 * 2 * 14 * 14)
    pixels = torch.randn(size, generator=generator, device=batch.device)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens >= start, -100),
        "pixel_values": pixels.to(torch.bfloat16 if batch.is_cuda else torch.float32),
        "image_grid_thw": torch.tensor([[1, PATCHES, PATCHES]] * len(batch), device=batch.device),
        "mm_token_type_ids": (tokens == image).int(),
    }


def _liger(model: Any, kind: str) -> contextlib.AbstractContextManager[Any]:
    """Patch a model by Liger, which also changes transformers' module, where the others would meet
    it: the result puts that there for a while."""
    kind = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    before = dict(vars(module))
    liger = importlib.import_module("liger_kernel.transformers")
    getattr(liger, f"apply_liger_kernel_to_{kind}")(model=model)
    changed = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    original = {name: before[name] for name in changed if name in before}
    vars(module).update(original)
    return _Swapped(vars(module), changed, original)


class _Swapped:
    """Names of a module, changed inside of ``with``."""

    def __init__(
        self, names: dict[str, Any], changed: dict[str, Any], original: dict[str, Any]
    ) -> None:
        self._names, self._changed, self._original = names, changed, original

    def __enter__(self) -> None:
        self._names.update(self._changed)

    def __exit__(self, *_: object) -> None:
        self._names.update(self._original)


# ---- what is read ----


def text_tokens(count: int, vocabulary: int) -> Tensor:
    """So many tokens, at least, of the source of Python's standard library, which every Python
    brings: words, blanks and signs, numbered by how often each occurs; those that are too rare for
    the vocabulary share a number."""
    words: list[str] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words += re.findall(r"\w+|\s+|[^\w\s]", file.read_text(encoding="utf-8", errors="replace"))
        if len(words) >= 2 * count + 100_000:
            break
    numbers = {
        word: min(rank, vocabulary - 1)
        for rank, (word, _) in enumerate(Counter(words).most_common())
    }
    return torch.tensor([numbers[word] for word in words])


def batches(tokens: Tensor, shape: Shape, count: int, device: str) -> list[Tensor]:
    """The same for every contender: pieces of the text, from anywhere."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(
        0, len(tokens) - shape.length, (count, shape.batch, 1), generator=generator
    )
    return list(tokens[starts + torch.arange(shape.length)].to(device))


# ---- measuring ----


def run(
    shape: Shape,
    device: str,
    names: Sequence[str] = (),
    *,
    budget: float = 20.0,
    curve: int = 0,
    curve_batch: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> Run:
    """Measure contenders (none named: all that are installed).

    Args:
        budget: seconds of measuring, all together; 0 for none.
        curve: steps of a training of each, beside that of the first from another seed; fp8 for all
            layers, also those that are too small to gain by it. Of more than 300 the means of 40.
        curve_batch: sequences a step in these; 0 for the shape's.

    Raises:
        FlexopsError: transformers is not installed, or a name is no contender's.
    """
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SettingsError(
            "there is no such contender", found=", ".join(unknown), required=", ".join(CONTENDERS)
        )
    chosen = {name: CONTENDERS[name] for name in names or CONTENDERS}
    absent: dict[str, str] = {}
    if "Liger" in chosen and (missing := _no_liger(device)):
        absent["Liger"] = missing
        del chosen["Liger"]
    tokens = text_tokens(max(8, curve) * shape.batch * shape.length, shape.vocabulary)
    results = _times(shape, device, chosen, tokens, budget, report) if budget > 0 else ()
    losses = {}
    steps = 1 if curve <= 300 else 40
    curve_shape = Shape(**{**asdict(shape), "batch": curve_batch or shape.batch})
    first = next(iter(chosen))
    trained = {**chosen, first + OTHER_SEED: {**chosen[first], "seed": 1}}
    for name, options in trained.items() if curve else ():
        report(f"{name}, {curve} steps")
        data = batches(tokens, curve_shape, curve, device)
        with _all_in_fp8():
            each = _losses(Contender(curve_shape, device, **options), data)
        losses[name] = [round(math.fsum(part) / len(part), 4) for part in _parts(each, steps)]
        _release(device)
    precision = "bfloat16" if device == "cuda" else "float32"
    what = (
        f"{shape}, {precision}, AdamW with states of that, clipping; torch {torch.__version__},"
        f" transformers {_version('transformers')}"
    )
    what += f", Liger {_version('liger_kernel')}" if "Liger" in chosen else ""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return Run(
        datetime.now(timezone.utc).strftime("%Y-%m-%d"), name, what, tuple(results), losses, absent,
        steps,
    )  # fmt: skip


@contextlib.contextmanager
def _all_in_fp8() -> Iterator[None]:
    """Patches put layers of every size in fp8."""
    from flexops.patching import fp8

    before, fp8.LEAST_SIZE = fp8.LEAST_SIZE, 0
    try:
        yield
    finally:
        fp8.LEAST_SIZE = before


def _parts(values: list[float], size: int) -> list[list[float]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


def _times(
    shape: Shape,
    device: str,
    chosen: dict[str, dict[str, Any]],
    tokens: Tensor,
    budget: float,
    report: Callable[[str], None],
) -> Iterator[Result]:
    """Contenders take turns, so that a drift of the machine's speed treats them alike; of a mixture
    of experts each is measured alone and freed, because one GPU has no room for all."""
    if shape.kind == "qwen3_moe" and len(chosen) > 1:
        for name, options in chosen.items():
            yield from _times(shape, device, {name: options}, tokens, budget / len(chosen), report)
            _release(device)
        return
    data = batches(tokens, shape, 8, device)
    calls: dict[str, Callable[[], object]] = {}
    memory: dict[str, float] = {}
    preparation: dict[str, float] = {}
    for name, options in chosen.items():
        report(f"{name}: {shape.layers} layers")
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        contender = Contender(shape, device, **options)
        contender.step(data[0])  # compiles what there is to compile
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for batch in data[:2]:
            contender.step(batch)
        memory[name] = (
            (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else 0.0
        )
        preparation[name] = contender.preparation
        calls[name] = _turn(contender, data)
    report("in turns")
    medians = timing.medians(calls, device, ahead=False, budget=budget)
    for name, seconds in medians.items():
        is_ours = chosen[name].get("kind") == "flexops"
        yield Result(
            name,
            round(1000 * seconds, 2),
            round(memory[name], 2),
            is_ours,
            round(preparation[name], 3),
            round(_joules(calls[name], seconds), 1) if device == "cuda" else 0.0,
        )


def _joules(step: Callable[[], object], seconds: float) -> float:
    """What a step uses: the power between the first and the last tick of NVML's counter, about ten
    a second, while steps run for more than a second."""
    read = _energy_counter()
    if read is None:
        return 0.0
    ticks: list[tuple[float, float]] = []
    done = threading.Event()

    def watch() -> None:
        last = read()
        while not done.wait(0.001):
            if (now := read()) != last:
                ticks.append((time.perf_counter(), now))
                last = now

    count = max(8, round(1.25 / seconds))
    for _ in range(count // 4):
        step()
    torch.cuda.synchronize()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    finally:
        done.set()
        watcher.join()
    if len(ticks) < 2:
        return 0.0
    (begin, before), (end, after) = ticks[0], ticks[-1]
    return (after - before) / (end - begin) * seconds


def _energy_counter() -> Callable[[], float] | None:
    """Reads the joules that the current GPU used since its driver was loaded; None without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
    gpu, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(gpu))

    def read() -> float:
        nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(millijoules))
        return millijoules.value / 1000

    return read


def _turn(contender: Contender, data: list[Tensor]) -> Callable[[], object]:
    turns = itertools.cycle(data)
    return lambda: contender.step(next(turns))


def _losses(contender: Contender, data: list[Tensor]) -> list[float]:
    losses = []
    for number, batch in enumerate(data):
        contender.rate(RATE * min(1.0, (number + 1) / WARM_UP))
        losses.append(contender.step(batch))
    return torch.stack(losses).tolist()


def _no_liger(device: str) -> str:
    """Why Liger does not take part."""
    if device != "cuda":
        return "its kernels need a GPU"
    try:
        importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        return str(error)
    return ""


def _release(device: str) -> None:
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def _version(name: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return "?"


# ---- telling ----


def mean_distance(losses: dict[str, list[float]], one: str, other: str) -> float:
    """Of two trainings, how far their losses are apart, step by step, on average."""
    pairs = list(zip(losses[one], losses[other], strict=True))
    return math.fsum(abs(a - b) for a, b in pairs) / len(pairs)


def lines(run: Run) -> Iterator[str]:
    """For a terminal."""
    if run.results:
        rows = [("", "step", "GiB at the peak", "joules", "against the first")]
        first = run.results[0].milliseconds
        rows += [
            (
                one.name,
                duration(one.milliseconds / 1000),
                f"{one.gibibytes:.2f}",
                f"{one.joules:.0f}",
                ratio(one.milliseconds / first, 2),
            )
            for one in run.results
        ]
        yield from columns(rows, left=1)
    for name, losses in run.losses.items():
        plain = next(iter(run.losses))
        apart = f"{mean_distance(run.losses, name, plain):.4f} from {plain} on average"
        steps = run.steps * len(losses)
        yield f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps, {apart}"
    yield from (f"{name} takes no part: {reason}" for name, reason in run.absent.items())
    yield f"{run.what}; {run.machine}"


def markdown(run: Run) -> Iterator[str]:
    """Tables, as in docs/benchmarks."""
    yield f"{run.date}, {run.machine}. {run.what}."
    if run.results:
        yield "\n| | ms a step | GiB at the peak | joules a step |\n| --- | ---: | ---: | ---: |"
        for one in run.results:
            yield f"| {one.name} | {one.milliseconds} | {one.gibibytes} | {one.joules:.0f} |"
    if run.losses:
        plain, values = next(iter(run.losses.items()))
        steps = run.steps * len(values)
        width = max(10, run.steps)
        marks = [
            mark for mark in (10, 50, 100, 200, 300, 500, 1000, 2000) if width <= mark <= steps
        ]
        marks = marks or [steps]
        yield from (
            "",
            (
                f"| mean of {width} losses up to step | {' | '.join(map(str, marks))} | distance to"
                f" {plain} |"
            ),
        )
        yield "| --- |" + " ---: |" * (len(marks) + 1)
        for name, losses in run.losses.items():
            means = (
                f"{math.fsum(part) / len(part):.3f}"
                for mark in marks
                if (part := losses[max(0, mark - width) // run.steps : mark // run.steps])
            )
            apart = f"{mean_distance(run.losses, name, plain):.4f}"
            yield f"| {name} | {' | '.join(means)} | {apart} |"
    yield from (f"\n{name} took no part: {reason}" for name, reason in run.absent.items())
