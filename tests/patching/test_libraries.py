"""A patched model among what people use models with: compilers, adapters, sharding, trainers."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
import transformers
from test_apply import distance, logits_too, results
from torch import Tensor, nn
from typer.testing import CliRunner

import flexops
from flexops.cli._app import app
from flexops.patching import from_config

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- torch.compile -------------------------------------------------------------------------------


def compiled(model: Any, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


def check_compiled(name: str, backend: str, **options: Any) -> None:
    model, inputs = tiny.model(name), tiny.batch(name)
    expected = results(model, inputs)
    flexops.patch(model, **options)
    call = compiled(model, backend)
    model.zero_grad()
    output = call(**inputs, **logits_too(name))
    output.loss.backward()
    actual = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    actual |= {"loss": output.loss.detach(), "logits": output.logits.detach()}
    differences = distance(actual, expected)
    assert max(differences.values()) < 2e-5, differences


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_it_compiles_to_one_graph(name):
    """As the plain one does; so no break is allowed. The plain one's own code is what is traced,
    but for attention and loss."""
    check_compiled(name, "eager")


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_it_compiles_to_one_graph_with_the_operators_in_it(name):
    check_compiled(name, "eager", in_graphs=True)


@pytest.mark.slow
@pytest.mark.parametrize("in_graphs", [False, True])
def test_inductor_compiles_it(in_graphs):
    check_compiled("llama", "inductor", in_graphs=in_graphs)


def test_a_compiled_step_makes_no_mask():
    """transformers would make one of length**2, since it may not look into the padding there; so
    attention could not be told that it is causal."""
    sizes: list[tuple[int, ...]] = []

    def look(graph: Any, _: Any) -> Any:
        sizes.extend(
            tuple(node.meta["example_value"].shape)
            for node in graph.graph.nodes
            if isinstance(node.meta.get("example_value"), Tensor)
        )
        return graph

    for patched in (False, True):
        sizes.clear()
        model, inputs = tiny.model("llama"), tiny.batch("llama")
        model.set_attn_implementation("sdpa")
        if patched:
            flexops.patch(model)
        torch._dynamo.reset()
        torch.compile(model, backend=look, fullgraph=True)(**inputs)
        masks = [shape for shape in sizes if shape[-2:] == (tiny.LENGTH, tiny.LENGTH)]
        assert (masks == []) == patched, masks


# ---- PEFT ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize(
    "modules", [["q_proj", "down_proj", "gate_proj"], ["v_proj", "lm_head"]], ids=str
)
def test_lora(patch_first, modules):
    import peft

    def make() -> Any:
        model = tiny.model("llama", tie_word_embeddings=False)
        return model, peft.LoraConfig(
            target_modules=modules, lora_dropout=0.0, init_lora_weights=False
        )

    model, config = make()
    torch.manual_seed(2)
    inputs = tiny.batch("llama")
    expected = results(peft.get_peft_model(model, config), inputs)
    model, config = make()
    torch.manual_seed(2)
    if patch_first:
        flexops.patch(model)
        adapted = peft.get_peft_model(model, config)
    else:
        adapted = peft.get_peft_model(model, config)
        flexops.patch(adapted)
    actual = results(adapted, inputs)
    assert ("logits" in actual) == ("lm_head" in modules), (
        "an adapted head is no linear layer, so that its logits are needed"
    )
    expected = {key: value for key, value in expected.items() if key in actual}
    differences = distance(actual, expected)
    assert max(differences.values()) < 2e-5, differences


# ---- accelerate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("patch_first", [True, False])
def test_weights_that_are_offloaded(patch_first):
    """accelerate's hooks replace each module's forward, and fetch its weights from the CPU."""
    import accelerate

    model, inputs = tiny.model("llama").eval(), tiny.batch("llama")
    with torch.no_grad():
        expected = model(**inputs).logits
        if patch_first:
            flexops.patch(model)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.lm_head.weight.is_meta
        if not patch_first:
            assert flexops.patch(model).swapped
        torch.testing.assert_close(model(**inputs).logits, expected)
        assert flexops.unpatch(model) > 0
        assert model(**inputs).logits.equal(expected)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert model(**inputs).logits.equal(expected)


# ---- FSDP2 ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Of one process, which is enough for parameters to be DTensors."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("head_alone", [True, False])
def test_fully_shard(mesh, patch_first, head_alone):
    from torch.distributed.fsdp import fully_shard

    model, inputs = tiny.model("llama", tie_word_embeddings=False), tiny.batch("llama")
    expected = results(model, inputs)
    del expected["logits"]
    if patch_first:
        flexops.patch(model)
    for module in (*model.model.layers, *([model.lm_head] if head_alone else []), model):
        fully_shard(module, mesh=mesh)
    if not patch_first:
        report = flexops.patch(model)
        assert "LlamaDecoderLayer" in {row.module.removeprefix("FSDP") for row in report.swapped}, (
            report
        )
    actual = results(model, inputs)
    actual = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in actual.items()
    }
    differences = distance(actual, expected)
    assert max(differences.values()) < 2e-5, differences


# ---- trainers ------------------------------------------------------------------------------------


def test_trainer_reports_the_same_losses(tmp_path):
    """With accumulation, for which it hands the number of tokens of several batches to the loss;
    and an evaluation, which wants logits."""
    rows = [{key: value[i % 3] for key, value in tiny.batch("llama").items()} for i in range(12)]
    for i, row in enumerate(rows):
        # of different lengths
        row["labels"] = torch.where(torch.arange(tiny.LENGTH) < i, -100, row["labels"])
    losses = []
    for patched in (False, True):
        model = tiny.model("llama")
        if patched:
            flexops.patch(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            logging_steps=1,
            learning_rate=1e-3,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            eval_strategy="epoch",
            seed=3,
            logging_nan_inf_filter=False,
        )
        seen: list[tuple[int, ...]] = []
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows[:3],
            compute_metrics=lambda p, seen=seen: seen.append(p.predictions.shape) or {},
        )
        trainer.train()
        assert [shape[1:] for shape in seen] == [(tiny.LENGTH, tiny.WORDS["vocab_size"])] * 2
        losses.append(
            [
                float(entry.get("loss", entry.get("eval_loss", 0)))
                for entry in trainer.state.log_history
            ]
        )
    assert len(losses[0]) > 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][0] > losses[1][-2]


# ---- before there is a model ---------------------------------------------------------------------


@pytest.mark.parametrize("target", ["llama", transformers.LlamaForCausalLM])
def test_models_are_patched_as_they_are_made(target, tmp_path):
    inputs = tiny.batch("llama")
    plain = tiny.model("llama")
    plain.save_pretrained(tmp_path)
    expected = results(plain, inputs)
    report = flexops.patch(target)
    try:
        assert "LlamaForCausalLM" in {row.module for row in report.swapped}
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
        made = tiny.model("llama")
    finally:
        assert flexops.unpatch(target) >= 1
    for other in (model, made):
        assert other(**inputs).logits is None
        differences = distance(results(other, inputs, skip_logits=False), expected)
        assert max(differences.values()) < 2e-5, differences
    assert tiny.model("llama")(**inputs).logits is not None
    assert flexops.unpatch(target) == 0


def test_a_checkpoint_of_a_patched_model_is_a_plain_one(tmp_path):
    model = tiny.model("llama")
    flexops.patch(model)
    model.save_pretrained(tmp_path)
    assert "flexops" not in (tmp_path / "config.json").read_text()
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(value.equal(model.state_dict()[key]) for key, value in other.state_dict().items())
    assert other.config._attn_implementation == "sdpa"


# ---- the command line ----------------------------------------------------------------------------


def test_the_command_tells_of_a_config(tmp_path):
    config = tiny.config("qwen3")
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    for argument in (tmp_path, tmp_path / "config.json"):
        told = json.loads(CliRunner().invoke(app, ["patch", str(argument), "--json"]).stdout)
        assert told["model"] == "Qwen3ForCausalLM"
        assert all(row["swapped"] for row in told["rows"])
    shown = CliRunner().invoke(app, ["patch", str(tmp_path)]).stdout
    assert "rms_norm" in shown
    assert "swiglu_linear\n" in shown
    assert "geglu" not in shown
    assert shown.splitlines()[0].endswith(", 0 skipped")
    assert "bias_gelu" in CliRunner().invoke(app, ["patch", "phi"]).stdout
    # the model with a loss that its words were masked for
    assert "linear_cross_entropy" in CliRunner().invoke(app, ["patch", "bert"]).stdout
    for nowhere in (str(tmp_path / "nowhere"), "./nowhere"):  # which is no name on the Hub
        with pytest.raises(flexops.errors.PatchError, match="no such config"):
            CliRunner().invoke(app, ["patch", nowhere], catch_exceptions=False)


@pytest.mark.parametrize(
    ("content", "what", "found"),
    [
        (None, "no such config", "a folder without a config.json"),
        ("{bad", "makes no model", "not a valid JSON"),
        ('{"a": 1}', "makes no model", "model_type"),
        ("[]", "makes no model", "list"),
        ('{"model_type": "tomorrow"}', "makes no model", "tomorrow"),
    ],
)
def test_a_config_of_which_no_model_can_be_made_is_reported_with_a_fix(
    content, what, found, tmp_path
):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(flexops.errors.PatchError, match=what) as caught:
        from_config.report(str(tmp_path))
    assert found in caught.value.found
    assert "\n" not in caught.value.found
    assert caught.value.required
    assert caught.value.fix


def test_a_name_on_the_hub_without_a_network(monkeypatch):
    """And with its config in the Hub's cache it needs none."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        flexops.errors.PatchError, match="the config of nobody/no-such-model could not be had"
    ) as caught:
        from_config.report("nobody/no-such-model")
    assert "flexops patch FOLDER" in caught.value.fix
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *_, **__: tiny.config("llama")
    )
    assert from_config.report("nobody/no-such-model").model.startswith("Llama")


# ---- optimizers ----------------------------------------------------------------------------------


def test_an_optimizer_is_taken_over_with_its_groups_and_states():
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    parameters = list(model.parameters())
    plain = torch.optim.AdamW(
        [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "weight_decay": 0.0}],
        betas=(0.8, 0.9),
    )
    model(**inputs).loss.backward()
    plain.step()
    other, oracle = copy.deepcopy((model, plain))
    ours = flexops.patch(model, optimizer=plain).optimizer
    assert type(ours) is flexops.optim.AdamW
    assert [
        (group["lr"], group["weight_decay"], group["betas"]) for group in ours.param_groups
    ] == [(1e-2, 1e-2, (0.8, 0.9)), (1e-3, 0.0, (0.8, 0.9))]
    ours.step()
    for mine, its in zip(parameters, other.parameters(), strict=True):
        its.grad = mine.grad.clone()
    oracle.step()
    for mine, its in zip(parameters, other.parameters(), strict=True):
        torch.testing.assert_close(mine, its)
    refused = flexops.patch(model, optimizer=torch.optim.SGD(parameters))
    assert isinstance(refused.optimizer, torch.optim.SGD)
    assert "SGD is none of" in str(refused)
    assert type(flexops.patch(model, optimizer=True).optimizer) is flexops.optim.AdamW


# ---- flexops.nn ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("LayerNorm", {}),
        ("LayerNorm", {"eps": 1e-3, "bias": False}),
        ("LayerNorm", {"elementwise_affine": False}),
        ("RMSNorm", {}),
        ("RMSNorm", {"eps": 1e-3}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_are_torchs(name, arguments, dtype):
    plain, ours = (
        getattr(nn, name)(24, **arguments).to(dtype),
        getattr(flexops.nn, name)(24, **arguments).to(dtype),
    )
    for value in plain.parameters():
        nn.init.normal_(value)
    ours.load_state_dict(plain.state_dict())
    assert isinstance(ours, getattr(nn, name))
    assert repr(ours) == repr(plain)
    x = torch.randn(7, 24).to(dtype)
    torch.testing.assert_close(ours(x), plain(x))
    with pytest.raises(ValueError, match="normalized_shape must be one number"):
        getattr(flexops.nn, name)((2, 3))
    for odd in (None, 2.0, -1, "24"):
        with pytest.raises(ValueError, match=f"normalized_shape must be one number.*got {odd!r}"):
            getattr(flexops.nn, name)(odd)


def test_modules_around_functions():
    x, up = torch.randn(5, 16), torch.randn(5, 16)
    torch.testing.assert_close(flexops.nn.SwiGLU()(x, up), nn.functional.silu(x) * up)
    torch.testing.assert_close(
        flexops.nn.GEGLU("tanh")(torch.cat([x, up], 1)),
        nn.functional.gelu(x, approximate="tanh") * up,
    )
    gelu, silu = flexops.nn.BiasGELU(16), flexops.nn.BiasSiLU(16)
    assert list(gelu.state_dict()) == ["bias"]
    nn.init.normal_(gelu.bias)
    torch.testing.assert_close(gelu(x), nn.functional.gelu(x + gelu.bias))
    torch.testing.assert_close(silu(x), nn.functional.silu(x))
    head, target = nn.Linear(16, 9), torch.tensor([1, 8, -100, 0, 3])
    loss = flexops.nn.LinearCrossEntropyLoss(label_smoothing=0.1)(x, head.weight, target, head.bias)
    torch.testing.assert_close(loss, nn.CrossEntropyLoss(label_smoothing=0.1)(head(x), target))


@pytest.mark.parametrize("odd", [(7,), (0,), (8, 0), (8, 32, 0.0)])
def test_rotary_tables_that_cannot_be(odd):
    with pytest.raises(ValueError, match=r"RotaryEmbedding: dim must be a positive even number"):
        flexops.nn.RotaryEmbedding(*odd)
    with pytest.raises(TypeError, match=r"RotaryEmbedding: dim must be a whole number, got 'a'"):
        flexops.nn.RotaryEmbedding("a")  # type: ignore[arg-type]


def test_rotary_tables_stay_float32_and_out_of_checkpoints():
    rotary = flexops.nn.RotaryEmbedding(8, 32)
    query, key = torch.randn(2, 4, 32, 16), torch.randn(2, 2, 32, 16)
    expected = rotary(query, key)
    assert rotary.state_dict() == {}
    rotary = rotary.to(torch.bfloat16)
    assert rotary.cos.dtype == torch.float32
    for a, b in zip(rotary(query, key), expected, strict=True):
        assert a.equal(b)
    angle = torch.arange(32.0)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    tables = (table.repeat(1, 2)[None] for table in (angle.cos(), angle.sin()))
    q, k = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(
        query[..., :8], key[..., :8], *tables
    )
    torch.testing.assert_close(expected[0][..., :8], q)
    torch.testing.assert_close(expected[1][..., :8], k)
    torch.testing.assert_close(
        rotary(query, key, torch.arange(32).flip(0))[0][..., 8:], query[..., 8:]
    )
    stored = io.BytesIO()
    torch.save(rotary, stored)
