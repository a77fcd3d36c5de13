"""What must hold of a patched model of any type: ``python tests/patching/must_hold.py [TYPE ...]``
prints each check that fails, or that does not apply because the plain model fails.

A check takes a model and a function that patches it (or, for the plain model, does nothing), and
returns what both must agree in."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers
import zoo
from test_apply import distance
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexops


@contextlib.contextmanager
def reference(model: Any) -> Iterator[None]:
    """torch's attention omits soft caps; transformers' eager one has them."""
    capped = [
        one
        for one in zoo.configs(model.config)
        if getattr(one, "attn_logit_softcapping", None) and one._attn_implementation == "sdpa"
    ]
    for one in capped:
        one._attn_implementation_internal = "eager"
    yield
    for one in capped:
        one._attn_implementation_internal = "sdpa"


def trained(model: Any, padded: bool = False, **options: Any) -> dict[str, Any]:
    """Loss, logits or hidden states where there is no padding, and all gradients."""
    return results(model, zoo.batch(model, padded), **options)


def results(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    model.zero_grad()
    torch.manual_seed(0)  # routers of some experts sample
    output = model(**inputs, **options)
    seen = inputs.get("attention_mask", torch.ones(3, 12)).bool()
    logits = output.get("logits") if "labels" in inputs else output.last_hidden_state
    if logits is not None and logits.shape[:2] == seen.shape:
        logits = logits[seen]
    loss = output.loss if "labels" in inputs else logits.float().square().mean()
    loss.backward()
    named = model.named_parameters()
    found = {name: one.grad.float() for name, one in named if one.grad is not None}
    found["loss"] = loss.detach()
    return found if logits is None else {**found, "logits": logits.detach().float()}


def is_fused(report: Any) -> bool:
    return bool(report) and any(row.operator == "linear_cross_entropy" for row in report.swapped)


def with_logits(padded):
    def check(model, patch):
        options = {"skip_logits": False} if is_fused(patch(model)) else {}
        return trained(model, padded, **options)

    return check


def without_logits(model, patch):
    fused, found = is_fused(patch(model)), trained(model)
    return {**found, "kept": "logits" in found or fused}


def generated(padded=False, **options):
    def check(model, patch):
        patch(model.eval())
        torch.manual_seed(0)
        inputs = zoo.batch(model, padded)
        inputs.pop("labels", None)
        made = model.generate(
            **inputs,
            **{"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **options},
            output_scores=True,
            return_dict_in_generate=True,
        )
        return {"tokens": made.sequences, "scores": torch.stack(made.scores)}

    return check


def inference(**options):
    def check(model, patch):
        ours = patch(model.eval())
        inputs = zoo.batch(model, True)
        seen = inputs.get("attention_mask", torch.ones(3, 12)).bool()

        def call(**options):
            with torch.inference_mode():
                found = model(**inputs, **options)
            parts = {
                f"{key} {at}": one.transpose(1, 2) if "attentions" in key else one
                for key, value in found.items()
                for at, one in enumerate(value if isinstance(value, tuple) else (value,))
                if isinstance(one, Tensor)
            }
            return {k: x[seen] if x.shape[:2] == seen.shape else x for k, x in parts.items()}

        if ours or "output_attentions" not in options:
            return call(**options)
        usual = call()
        model.set_attn_implementation("eager")  # others of transformers do not return weights
        found = call(**options)
        if any(not found[k].allclose(x, atol=1e-4, equal_nan=True) for k, x in usual.items()):
            raise DoesNotApply("eager attention gives other results")
        return found

    return check


def in_two_parts(model, patch):
    patch(model.eval())
    tokens = zoo.batch(model, False)["input_ids"]
    with torch.no_grad():
        first = model(input_ids=tokens[:, :8], use_cache=True)
        second = model(input_ids=tokens[:, 8:], past_key_values=first.past_key_values)
    return {"first": first.logits, "second": second.logits}


def names(model, patch):
    before = [*model.state_dict()]
    patch(model)
    return {"keys": [*model.state_dict()] == before, "class": type(model)}


def unpatched(model, patch):
    configs = [one.config for one in model.modules() if hasattr(one, "config")]
    before, functions = trained(model), [one._attn_implementation for one in configs]
    patch(model)
    trained(model)
    flexops.unpatch(model)
    after = trained(model)
    parts = [one for one in model.modules() if hasattr(one, "config")]
    return {
        "bits": all(after[key].equal(one) for key, one in before.items()),
        "configs": all(one.config is config for one, config in zip(parts, configs, strict=True)),
        "functions": functions == [one._attn_implementation for one in configs],
    }


def saved(model, patch):
    patch(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = type(model).from_pretrained(folder).train()
    patch(model)
    return trained(model)


def copied(copy_of):
    def check(model, patch):
        patch(model)
        other = copy_of(model)
        for one in model.parameters():
            one.data.zero_()
        found = trained(other)
        return {**found, "patched": bool(flexops.unpatch(other)) == bool(flexops.unpatch(model))}

    return check


def checkpointed(model, patch):
    patch(model)
    model.gradient_checkpointing_enable()
    return trained(model)


def with_lora(first):
    def check(model, patch):
        import peft

        if first:
            patch(model)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        inputs = zoo.batch(model, False)
        model = peft.get_peft_model(model, config)
        if not first:
            patch(model)
        return results(model, inputs)

    return check


def resized(model, patch):
    fused = is_fused(patch(model))
    torch.manual_seed(0)
    model.resize_token_embeddings(103, mean_resizing=False)
    found = trained(model)
    return {**found, "kept": "logits" not in found or not fused}


def rows(report):
    return report and report.rows


def twice(model, patch):
    return {"report": rows(patch(model)) == rows(patch(model)), **trained(model)}


def on_meta(model, patch):
    with torch.device("meta"):
        other = type(model)(copy.deepcopy(model.config))
    trained(model)  # one that has run has the report of a new one
    return {"report": rows(patch(other)) == rows(patch(model))}


def by_name(of):
    def check(model, patch):
        try:
            same = rows(patch(of(model))) == rows(patch(of(model)))
            made = type(model)(copy.deepcopy(model.config))
        finally:
            flexops.unpatch(of(model))
        given = type(model)(copy.deepcopy(model.config))
        patch(given)
        replaced = [
            {name for name, one in each.named_modules() if "forward" in vars(one)}
            for each in (given, made)
        ]
        zoo.shaken(made).load_state_dict(model.state_dict())
        return {**trained(made), "report": same, "replaced": replaced[0] == replaced[1]}

    return check


LOGGERS = {getattr(logging.Logger, name) for name in ("warning", "warning_once", "info")}


def compiled(**options):
    def check(model, patch):
        patch(model, **options)
        torch._dynamo.reset()
        inputs = zoo.batch(model, False)
        with torch._dynamo.config.patch(ignore_logger_methods=LOGGERS):
            found = results(torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
        return {name.removeprefix("_orig_mod."): one for name, one in found.items()}

    return check


Patch = Callable[..., Any]
Check = Callable[[Any, Patch], dict[str, Any]]
CHECKS: dict[str, Check] = {
    "training": without_logits,
    "logits": with_logits(False),
    "padding": with_logits(True),
    "inference": inference(),
    "hidden states": inference(output_hidden_states=True),
    "attentions": inference(output_attentions=True),
    "in two parts": in_two_parts,
    "greedy": generated(),
    "greedy, padded": generated(True),
    "greedy, no cache": generated(True, use_cache=False),
    "static cache": generated(True, cache_implementation="static"),
    "beams": generated(True, num_beams=2),
    "sampling": generated(True, do_sample=True, top_k=20),
    "names": names,
    "unpatch": unpatched,
    "save and load": saved,
    "deepcopy": copied(copy.deepcopy),
    "pickle": copied(lambda model: pickle.loads(pickle.dumps(model))),
    "checkpointing": checkpointed,
    "LoRA before": with_lora(False),
    "LoRA after": with_lora(True),
    "new embeddings": resized,
    "twice": twice,
    "meta": on_meta,
    "by name": by_name(lambda model: model.config.model_type),
    "by class": by_name(type),
}
GRAPHS: dict[str, Check] = {"graph": compiled(), "operators in a graph": compiled(in_graphs=True)}
ROUNDED = {"bfloat16": False, "autocast": True}


def far(actual: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """How far results are from what is expected, and which of them most."""
    actual, expected = (
        {key: x for key, x in one.items() if key in other or not re.search("logits|attentio", key)}
        for one, other in ((actual, expected), (expected, actual))
    )
    alone = actual.keys() ^ expected.keys()
    none = {key for key in alone if not torch.as_tensor({**actual, **expected}[key]).any()}
    if alone - none:  # where nothing flows back, a gradient may be zeros or missing
        return float("inf"), f"other results: {sorted(alone - none)[:3]}"
    actual, expected = (
        {k: x for k, x in one.items() if k not in none} for one in (actual, expected)
    )
    floats, worst = {}, (0.0, "")
    for key, one in expected.items():
        if not isinstance(one, Tensor):
            same = actual[key] == one
        elif one.is_floating_point() and actual[key].shape == one.shape:
            same = one.isfinite().equal(actual[key].isfinite())
            floats[key] = one.nan_to_num(0, 0, 0)
        else:
            same = actual[key].equal(one)
        if not same:
            return float("inf"), key
    if floats:
        found = distance({key: actual[key].nan_to_num(0, 0, 0) for key in floats}, floats)
        worst = max((one, key) for key, one in found.items())
    return worst


def nudged(plain: Any) -> Any:
    """With weights moved by a rounding: the gradients of small softmaxes are differences of almost
    equal numbers."""
    model = copy.deepcopy(plain)
    for one in model.parameters():
        one.data.mul_(1 + 1e-7)
    return model


class DoesNotApply(Exception):
    """The plain model fails."""


@contextlib.contextmanager
def plainly(model: Any) -> Iterator[None]:
    try:
        with reference(model):
            yield
    except Exception as error:
        raise DoesNotApply(f"{type(error).__name__}: {error}"[:100]) from error


def compare(check: Check, plain: Any, usual: dict[str, Any]) -> str:
    """What differs; empty if nothing does. ``usual`` is what most checks return of the plain
    model."""

    def of_plain(model: Any) -> dict[str, Any]:
        model = copy.deepcopy(model)
        with plainly(model):
            return check(model, lambda *_, **__: None)

    try:
        actual = check(copy.deepcopy(plain), flexops.patch)
    except Exception as error:
        of_plain(plain)
        return f"{type(error).__name__}: {error}"[:300]
    tensors = {key: one for key, one in actual.items() if isinstance(one, Tensor)}
    rest = [one for one in actual.values() if not isinstance(one, Tensor)]
    if tensors and all(one is True for one in rest) and far(tensors, usual)[0] < 1e-4:
        return ""
    expected = of_plain(plain)
    found, key = far(actual, expected)
    if found < 1e-4 or found < 3 * far(of_plain(nudged(plain)), expected)[0] < float("inf"):
        return ""
    return f"{key} differs by {found:.2g}"


class Choices(TorchDispatchMode):
    """The experts that routers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.topk.default, torch.ops.flexops.route_tokens.default):
            self.found.append(result[1].sort(-1).values)
        return result


def in_bfloat16(
    name: str, seed: int = 0, device: str = "cpu", autocast: bool = False
) -> tuple[float, float, bool]:
    """How far a model in bfloat16 is from the truth, patched and plain, and whether both choose the
    experts of the truth."""
    model = zoo.tiny(name, seed).to(device)
    inputs = {key: one.to(device) for key, one in zoo.batch(model, False).items()}
    with reference(model), Choices() as expected:
        truth = results(model, inputs)
    if not autocast:
        inputs = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
        model = zoo.tiny(name, seed).to(device).bfloat16()
    with torch.autocast(device, torch.bfloat16, autocast):
        with plainly(model), Choices() as of_plain:
            plain = distance(results(model, inputs), truth, 0.1)
        options = {"skip_logits": False} if is_fused(flexops.patch(model)) else {}
        with Choices() as chosen:
            patched = distance(results(model, inputs, **options), truth, 0.1)
    same = all(
        a.equal(b)
        for one in (of_plain, chosen)
        for a, b in zip(one.found, expected.found, strict=True)
    )
    return sum(patched.values()), sum(plain.values()), same


def rounded(name: str, device: str, autocast: bool = False) -> str:
    """Models in which no rounding changes the choice of an expert, patched or plain: three, or up
    to nine where one of them has an outlier."""
    errors = (in_bfloat16(name, seed, device, autocast) for seed in range(12))
    of_ours = of_plain = ratio = 0.0
    for count, (ours, plain, _) in enumerate((one for one in errors if one[2]), 1):
        of_ours, of_plain = of_ours + ours, of_plain + plain
        ratio = of_ours / of_plain
        if (count >= 3 and ratio < 1.3) or count == 9:
            break
    if not ratio:
        return "experts are others in all models"
    return "" if ratio < 1.3 else f"{ratio:.2f} of the plain error"


def outcomes(
    name: str, checks: dict[str, Check], of_bfloat16: Iterable[str] = ()
) -> Iterator[tuple[str, str]]:
    """For each check: empty if it passes, else why not."""
    plain = zoo.tiny(name)
    model = copy.deepcopy(plain)
    with reference(model):
        usual = trained(model)
    calls = {key: functools.partial(compare, check, plain, usual) for key, check in checks.items()}
    for key in of_bfloat16:
        calls[key] = functools.partial(rounded, name, "cpu", ROUNDED[key])
    for key, call in calls.items():
        try:
            found = call()
        except DoesNotApply as error:
            found = f"does not apply: {error}"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:300]
        yield key, found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)
    for kind in sys.argv[1:] or sorted(set(zoo.TYPES) - set(zoo.UNTESTED)):
        for one, text in outcomes(kind, CHECKS | GRAPHS, ROUNDED):
            print(kind, one, text.replace("\n", " ") or "passed", sep="\t", flush=True)
