"""``flexops bench generate``: time to the first token and per token of a Llama-style model, by
those who make generation faster, beside what reading weights and cache takes.

Each contender has the same model, of random weights; prompts are random tokens. A time per token
is the difference of two calls one after another, of few and of many new tokens: the median of
several such pairs, because a host's part of the prompt varies. The first token's is that of the
fastest call for one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexops.bench.text import columns
from flexops.errors import SettingsError

from .model import SHAPES as TRAINED
from .model import Shape, make_model
from .model_plot import OTHERS, OURS, save

SHAPES = TRAINED | {"8b": Shape(4096, 32, 32, 8, 14336, 128256, 1, 2048)}
BATCHES, PROMPTS = (1, 16), (512, 4096)
FEW = 8
ENOUGH = 2.0
"""Seconds after which calls are not repeated."""
LEAST_PAIRS = 3


@dataclass(frozen=True)
class Result:
    """Of one contender, batch and length of the prompts: milliseconds to the first token and for
    each further one, GiB at the peak."""

    name: str
    batch: int
    prompt: int
    first: float
    token: float
    gibibytes: float
    flexops: bool


@dataclass(frozen=True)
class Run:
    """Results, the least milliseconds a token of each ``batch x prompt``, and who took no part."""

    date: str
    machine: str
    what: str
    results: tuple[Result, ...]
    limits: dict[str, float]
    absent: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        results = tuple(Result(**one) for one in data["results"])
        return cls(**{**data, "results": results})


def merged(runs: Sequence[Run]) -> Run:
    """Runs of one machine and model as one: contenders, batches and prompts in the order of a whole
    run. Of one that was measured twice, the later result counts.

    Raises:
        SettingsError: they are of several machines or models.
    """
    what = {f"{one.machine}: {one.what}" for one in runs}
    if len(what) > 1:
        raise SettingsError(
            "these runs do not belong together", found=", ".join(sorted(what)),
            required="runs of one machine and model",
        )  # fmt: skip
    results = {(one.batch, one.prompt, one.name): one for run in runs for one in run.results}
    order = {name: number for number, name in enumerate(CONTENDERS)}
    found = sorted(results.values(), key=lambda one: (one.batch, one.prompt, order[one.name]))
    limits = {key: limit for run in runs for key, limit in run.limits.items()}
    keys = dict.fromkeys(f"{one.batch} x {one.prompt}" for one in found)
    absent = {name: why for run in runs for name, why in run.absent.items()}
    latest = max(runs, key=lambda run: run.date)
    return replace(
        latest, results=tuple(found), limits={key: limits[key] for key in keys}, absent=absent
    )


Call = Callable[[int], object]
"""Generates so many tokens."""


def _transformers(model: Any, prompt: Tensor, _: int, **options: Any) -> Call:
    def call(tokens: int) -> object:
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
            max_new_tokens=tokens, min_new_tokens=tokens, **options,
        )  # fmt: skip

    return call


def _static(model: Any, prompt: Tensor, most: int) -> Call:
    vars(model).pop("_previous_max_cache_length", None)  # a cache is as long as that for any prompt
    return _transformers(model, prompt, most, cache_implementation="static")


def _flexops(model: Any, prompt: Tensor, _: int, cache: Any = None) -> Call:
    import flexops

    def call(tokens: int) -> object:
        if cache is not None:
            cache.crop_to(0)
        return flexops.generate(model, prompt, max_new_tokens=tokens, eos_token_id=(), cache=cache)

    return call


def _compressed(model: Any, prompt: Tensor, most: int) -> Call:
    import flexops

    cache = flexops.KVCache(model.config, prompt.shape[1] + most, bits=4)
    return _flexops(model, prompt, most, cache)


class Contender(NamedTuple):
    """Who generates.

    Attributes:
        make: its call for a model, prompts and the most tokens.
        patch: the options of ``flexops.patch`` before; None: not patched.
    """

    make: Callable[[Any, Tensor, int], Call]
    patch: dict[str, Any] | None = None


CONTENDERS: dict[str, Contender] = {
    "transformers": Contender(_transformers),
    "transformers, static cache, torch.compile": Contender(_static),
    "flexops.patch": Contender(_transformers, {}),
    "flexops.generate": Contender(_flexops, {}),
    "flexops.generate, int4": Contender(_flexops, {"weights": "int4"}),
    "flexops.generate, int4, 4-bit cache": Contender(_compressed, {"weights": "int4"}),
}
"""In this order: 4-bit weights stay 4-bit."""
QUICK = tuple(name for name in CONTENDERS if "compile" not in name)
QUICK_TOKENS = 50


def run(
    shape: Shape,
    device: str,
    names: Sequence[str] = (),
    *,
    batches: Sequence[int] = BATCHES,
    prompts: Sequence[int] = PROMPTS,
    tokens: int = 200,
    repeats: int = 10,
    report: Callable[[str], None] = lambda _: None,
) -> Run:
    """Measure contenders (none named: all).

    Args:
        tokens: new tokens of the longer call, more than eight.
        repeats: of so many calls, and pairs of calls, or of as many as take two seconds.
        report: receives a line before and behind each measurement.

    Raises:
        FlexopsError: transformers is not installed, or a name is no contender's.
    """
    import flexops

    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SettingsError(
            "there is no such contender", found=", ".join(unknown), required=", ".join(CONTENDERS)
        )
    if tokens <= FEW:
        raise SettingsError("too few tokens", found=str(tokens), required=f"more than {FEW}")
    chosen = [one for one in CONTENDERS if not names or one in names]
    machine = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    size = str(shape).partition(", batch")[0]  # a prompt has another one
    report(f"{size}; {machine}: {len(chosen)} contenders, up to {tokens} new tokens a call")
    model = make_model(replace(shape, length=max(prompts) + tokens), device, 0).eval()
    limits = {
        f"{batch} x {prompt}": _limit(shape, model, device, batch, prompt + tokens // 2)
        for batch in batches
        for prompt in prompts
    }
    results: list[Result] = []
    absent: dict[str, str] = {}
    for name in chosen:
        contender = CONTENDERS[name]
        if contender.patch is not None:
            flexops.patch(model, **contender.patch)
        for batch in batches:
            for prompt in prompts:
                key = f"{batch} x {prompt}"
                report(f"{key}  {name} ...")
                call = contender.make(model, _prompt(shape, batch, prompt, device), tokens)
                try:
                    found = _measure(call, tokens, device, repeats)
                except torch.OutOfMemoryError as error:
                    absent[f"{name}, {key}"] = str(error).splitlines()[0]
                else:
                    ours = contender.patch is not None
                    results.append(Result(name, batch, prompt, *found, ours))
                    report(f"{key}  {name}: {found[1]:.3f} ms a token, {found[0]:.2f} to the first")
                del call
                _release()
        if contender.patch is not None:
            flexops.unpatch(model)
    what = f"{size}, {str(model.dtype)[6:]}, torch {torch.__version__}"
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return Run(date, machine, what, tuple(results), limits, absent)


def _prompt(shape: Shape, batch: int, length: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, shape.vocabulary, (batch, length), generator=generator).to(device)


def _measure(call: Call, tokens: int, device: str, repeats: int) -> tuple[float, float, float]:
    """Milliseconds to the first token, and for each further one; GiB."""
    for count in (tokens, FEW):  # compiles and captures what there is, for the longest cache
        call(count)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first = min(_repeated(lambda: _seconds(call, 1, device), 1, repeats))

    def difference() -> float:
        few, many = (_seconds(call, count, device) for count in (FEW, tokens))
        return many - few

    token = max(median(_repeated(difference, LEAST_PAIRS, repeats)), 0.0) / (tokens - FEW)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return round(1e3 * first, 2), round(1e3 * token, 3), round(peak, 2)


def _repeated(measure: Callable[[], float], least: int, most: int) -> list[float]:
    """What it gives, until that has taken long."""
    found: list[float] = []
    started = time.perf_counter()
    while len(found) < least or (len(found) < most and time.perf_counter() - started < ENOUGH):
        found.append(measure())
    return found


def _seconds(call: Call, tokens: int, device: str) -> float:
    _wait(device)
    started = time.perf_counter()
    call(tokens)
    _wait(device)
    return time.perf_counter() - started


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _limit(shape: Shape, model: Any, device: str, batch: int, length: int) -> float:
    """Milliseconds to read weights and cache once, at the speed at which a copy reads and writes;
    an embedding that is not the head is not read."""
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    weights = sum(one.nbytes for one in model.parameters())
    weights -= 0 if head is embedding else embedding.nbytes
    width = shape.hidden // shape.heads * shape.kv_heads
    cache = 2 * shape.layers * batch * length * width * head.element_size()
    size: int = weights + cache
    return round(1e3 * size / _bandwidth(device), 3)


def _bandwidth(device: str) -> float:
    """Bytes a second."""
    source = torch.empty(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return float(2 * source.nbytes / best)


def _release() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- reporting ----


def _rows(run: Run) -> Iterator[tuple[str, ...]]:
    for key, limit in run.limits.items():
        for one in run.results:
            if f"{one.batch} x {one.prompt}" == key:
                numbers = f"{one.first:.2f}", f"{one.token:.3f}", f"{one.gibibytes:.2f}"
                yield key, one.name, *numbers, f"{one.token / limit:.2f}"
        yield key, "limit", "", f"{limit:.3f}", "", ""


_HEAD = ("batch x prompt", "", "ms to the first", "ms a token", "GiB", "times the limit")


def lines(run: Run) -> Iterator[str]:
    """For a terminal."""
    yield from columns([_HEAD, *_rows(run)], left=2)
    yield from (f"{name} takes no part: {reason}" for name, reason in run.absent.items())
    yield f"{run.what}; {run.machine}"


def markdown(run: Run) -> Iterator[str]:
    """A table, as in docs/benchmarks."""
    yield f"{run.date}, {run.machine}. {run.what}."
    yield ""
    yield f"| {' | '.join(_HEAD)} |"
    yield "| --- | --- |" + " ---: |" * (len(_HEAD) - 2)
    yield from (f"| {' | '.join(row)} |" for row in _rows(run))


def draw(data: dict[str, Any], file: Path) -> None:
    """A panel for each batch and prompt, a bar for each contender, the limit a line."""
    from matplotlib.figure import Figure

    keys = list(data["limits"])
    names = list(dict.fromkeys(one["name"] for one in data["results"]))
    figure = Figure(figsize=(10, (0.32 * len(names) + 0.6) * len(keys)), layout="constrained")
    for axes, key in zip(figure.subplots(len(keys), 1, squeeze=False)[:, 0], keys, strict=True):
        found = {
            one["name"]: one
            for one in data["results"]
            if f"{one['batch']} x {one['prompt']}" == key
        }
        values = [found[name]["token"] if name in found else 0.0 for name in names]
        colors = [OURS if name in found and found[name]["flexops"] else OTHERS for name in names]
        bars = axes.barh(range(len(names)), values, color=colors)
        axes.bar_label(bars, labels=[f"{value:.2f}" for value in values], padding=4)
        axes.axvline(data["limits"][key], color="#24292f", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, max(*values, data["limits"][key]) * 1.15)
        axes.set_xticks([])
        axes.tick_params(length=0)
        title = f"{key}: ms a token; dashed: memory limit of 16 bits"
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    save(figure, data, file)
