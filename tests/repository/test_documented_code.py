"""The Python in the documentation runs as it stands, page by page, on small tensors of the names
that it uses; what does not says where its like is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import COMMAND
from torch import nn

import flexops
from flexops.bench.reference import OnReference

ROOT = Path(__file__).parents[2]

SUGGESTING = (".sh", ".py", ".in", ".hcl", ".yaml")

ELSEWHERE = {
    ("README.md", "flexops.patch(model)"): "tests/patching/test_apply.py",
    ("README.md", "flexops.kernel("): "tests/repository/test_front_page.py",
    ("docs/builder.md", "builder.Library("): "examples/scale_lib, by tests/test_builder.py",
    ("docs/builder.md", "builder.Rows("): "tests/test_builder.py",
    ("docs/builder.md", "builder.Output("): "tests/test_builder.py",
    ("docs/builder.md", "relu2_backward("): "tests/test_builder.py",
    (
        "docs/builder.md",
        "builder.extensions(",
    ): "examples/scale_lib, by tests/test_builder.py",
    (
        "docs/builder.md",
        "TestScale(Contract)",
    ): "examples/scale_lib, by tests/test_builder.py",
    (
        "docs/clusters.md",
        "ray.init(",
    ): "nowhere: it needs Ray; the settings are those of tests/build/store/test_remote.py",
    (
        "docs/kernels.md",
        "mask_rows",
    ): (
        "an ellipsis; templates: tests/kernels/test_definition.py and tests/gpu/test_kernel_gpu.py"
    ),
    ("docs/inference.md", "quantization_config=config"): "tests/int4/test_checkpoints.py",
    ("docs/inference.md", "register_int4()"): "tests/int4/test_checkpoints.py",
    ("docs/inference.md", 'weights="int4")'): "tests/int4/test_checkpoints.py",
    ("docs/inference.md", "model.save_pretrained("): "tests/int4/test_checkpoints.py",
    ("docs/inference.md", "get_peft_model(model"): "tests/int4/test_checkpoints.py",
    ("docs/training.md", "flexops.fp8_linear("): "tests/ops/test_fp8_linear.py",
    ("docs/models.md", "register_attention()"): "tests/patching/test_attention.py",
    ("docs/models.md", "register_experts()"): "tests/patching/test_experts.py",
    ("docs/models.md", "from_pretrained(...)"): "tests/patching/test_apply.py",
    ("docs/models.md", "kernels.kernelize("): "tests/patching/test_libraries.py",
    ("docs/operators.md", "flexops.load("): "tests/build/load/test_extension.py",
    ("docs/splitting.md", "flexops.load("): "tests/build/load/test_extension.py",
    (
        "docs/training.md",
        "def configure_optimizers",
    ): "examples/with_lightning.py, by tests/scenarios/test_examples.py",
    (
        "docs/training.md",
        "def configure_gradient_clipping",
    ): "examples/with_lightning.py, by tests/scenarios/test_examples.py",
    ("docs/training.md", "fully_shard(module)"): "tests/ops/test_sharded.py",
    ("docs/training.md", "swiglu_linear("): "tests/ops/test_activation.py",
    ("docs/training.md", 'fp8="rowwise")'): "tests/patching/test_fp8.py",
}
"""By page and by what only this block has."""


def blocks() -> dict[tuple[str, int], str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {
        str(page.relative_to(ROOT)): re.findall(
            r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        )
        for page in pages
    }
    return {
        (page, index): code for page, codes in found.items() for index, code in enumerate(codes)
    }


BLOCKS = blocks()
RUN = sorted(
    key
    for key, code in BLOCKS.items()
    if not any(page == key[0] and part in code for page, part in ELSEWHERE)
)


def test_what_the_pages_call_is_there_after_import_flexops():
    """Whatever has been imported before: a module that is no public name is an attribute only once
    somebody has imported it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    inline = [
        code for page in pages for code in re.findall(r"`(flexops\.[^`\n]*\()", page.read_text())
    ]
    called = re.findall(r"\bflexops\.(\w+)[\w.]*\(", "\n".join([*inline, *BLOCKS.values()]))
    assert "patching" in called
    assert set(called) <= set(flexops.__all__)


def world() -> dict[str, Any]:
    """Small tensors of the names that the pages use; heads come before positions, as in torch."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64)
    model(torch.randn(4, 128)).sum().backward()
    rotary = torch.randn(16, 32)
    return {
        "torch": torch,
        "flexops": flexops,
        "model": model,
        "head": nn.Linear(128, 97),
        "x": torch.randn(2, 16, 128),
        "residual": torch.randn(2, 16, 128),
        "weight": torch.randn(128),
        "bias": torch.randn(128),
        "eps": 1e-6,
        "q": torch.randn(2, 4, 16, 64),
        "k": torch.randn(2, 4, 16, 64),
        "v": torch.randn(2, 4, 16, 64),
        "cos": rotary.cos(),
        "sin": rotary.sin(),
        "gate": torch.randn(2, 16, 128),
        "up": torch.randn(2, 16, 128),
        "both": torch.randn(2, 16, 256),
        "hidden": torch.randn(32, 128),
        "target": torch.randint(97, (32,)),
        "logits": torch.randn(32, 97),
        "mask": torch.zeros(16, 128, dtype=torch.bool),
        "scale": 0.5,
    }


def attention() -> dict[str, Any]:
    """Positions come before heads."""
    q, k, v = (torch.randn(2, 16, heads, 64) for heads in (4, 2, 2))
    turned = {
        name: tensor.transpose(1, 2)
        for name, tensor in (
            ("query", q),
            ("key", k.repeat_interleave(2, 2)),
            ("value", v.repeat_interleave(2, 2)),
        )
    }
    rows = {f"rows_{name}": tensor.flatten(0, 1) for name, tensor in (("q", q), ("k", k), ("v", v))}
    ends = torch.tensor([0, 10, 32], dtype=torch.int32)
    return (
        {
            "q": q,
            "k": k,
            "v": v,
            "ends": ends,
            "n": 22,
            "document": torch.arange(16) // 5,
            "bias": torch.randn(4, 1025),
            "longest": 16,
        }
        | turned
        | rows
    )


def inference() -> dict[str, Any]:
    from transformers import BatchEncoding, GenerationConfig, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0))
    tokens = torch.randint(3, 512, (2, 8))
    inputs = BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    names = {"model": model.eval(), "inputs": inputs, "prompts": tokens.tolist()}
    names["config"] = GenerationConfig(max_new_tokens=4, eos_token_id=-1, pad_token_id=0)
    # a cache of two sequences, as rows and as pages
    names |= {"q": torch.randn(2, 1, 4, 32), "lengths": torch.tensor([7, 20], dtype=torch.int32)}
    names |= {"k": torch.randn(2, 1, 2, 32), "v": torch.randn(2, 1, 2, 32)}
    names |= {name: torch.randn(2, 64, 2, 32) for name in ("k_cache", "v_cache")}
    names |= {name: torch.randn(4, 32, 2, 32) for name in ("k_pages", "v_pages")}
    names |= {name: torch.rand(64, 16) for name in ("cos", "sin")}
    names["table"] = torch.arange(4, dtype=torch.int32).view(2, 2)
    return names


PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/attention.md": attention,
    "docs/inference.md": inference,
    "docs/quantization.md": lambda: {"weight": torch.randn(128, 64)},
}


@pytest.mark.parametrize("page", sorted({page for page, _ in RUN}))
def test_the_code_of_a_page_runs(page):
    names = world() | PAGES.get(page, dict)() | {"__name__": "a_page"}
    for block in (BLOCKS[key] for key in RUN if key[0] == page):
        code = block.replace('device="cuda"', 'device="cpu"').replace(
            '"scale(Tensor', '"documented::scale(Tensor'
        )
        with OnReference():
            exec(compile(code, page, "exec"), names)


def test_what_is_not_run_is_there():
    for (page, part), where in ELSEWHERE.items():
        assert sum(part in code for key, code in BLOCKS.items() if key[0] == page) == 1, (
            page,
            part,
        )
        assert all(
            (ROOT / path).exists() for path in re.findall(r"(?:tests|examples)/[\w/.]+\w", where)
        ), where


def migrations() -> list[tuple[str, str]]:
    """Each call in the column "flexops" of the guide's tables, with the library that it stands
    for."""
    sections = [
        section.partition("\n")
        for section in (ROOT / "docs/migrating.md").read_text().split("## From ")[1:]
    ]
    rows = [
        (library, row.split(" | ")[1])
        for library, _, text in sections
        for row in re.findall(r"^\| .* \|$", text, re.MULTILINE)
    ]
    return [
        (library, call)
        for library, cell in rows
        for call in re.findall(r"`(flexops\.[\w.]+\(.*?\))`(?=[, ;]|$)", cell)
    ]


def test_every_call_in_the_migration_guide_is_one():
    found = migrations()
    assert len(found) > 15
    for library, call in found:
        names = world() | {
            "params": [nn.Parameter(torch.ones(3))],
            "model": nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        }
        if library == "flash-attn":
            more = attention()
            names |= more | {
                "qkv": torch.randn(2, 16, 3, 4, 64),
                "k_cache": torch.randn(2, 32, 2, 64),
                "v_cache": torch.randn(2, 32, 2, 64),
                "lengths": torch.tensor([0, 5], dtype=torch.int32),
                "bias": torch.randn(128),
            }
        # "..." stands for what the operator takes anyway; the weight of the hidden states is the
        # head's
        code = (
            call.replace("(...,", "(logits, target,")
            .replace("=...", "=0.1")
            .replace("(hidden, weight", "(hidden, head.weight")
        )
        if '"llama"' in code:
            continue  # patches transformers itself: tests/patching/test_apply.py
        with OnReference():
            eval(code, names)


def test_the_life_of_a_build_names_modules_and_functions_that_exist():
    package = ROOT / "flexops" / "build"
    text = (package / "README.md").read_text()
    named = re.findall(r"`(\w+/\w+\.py)(?:: (\w+))?", text)
    assert len(named) > 15
    for path, function in named:
        assert re.search(
            rf"^ *def {function}\b" if function else "", (package / path).read_text(), re.M
        )
    for folder, module in re.findall(r"^\| `(\w+/)` \|.*\| `(\w+\.py)` \|$", text, re.M):
        assert (package / folder / module).is_file()


def groups() -> dict[str, set[str]]:
    """The groups of the command line and their commands."""
    context = COMMAND.make_context("flexops", [], resilient_parsing=True)
    tools = {name: COMMAND.get_command(context, name) for name in COMMAND.list_commands(context)}
    return {
        name: set(tool.list_commands(context))
        for name, tool in tools.items()
        if hasattr(tool, "list_commands")
    }


def suggested(groups: Iterable[str]) -> list[tuple[str, str]]:
    """``flexops GROUP COMMAND`` in texts that no compiler reads: pages, scripts, Dockerfiles."""
    places = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    places += [ROOT / "compose.yaml", ROOT / "tools/README.md", *(ROOT / "docs").glob("*.md")]
    for folder in ("docker", "recipe", "scripts"):
        places += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUGGESTING]
    places += (ROOT / "docker").glob("Dockerfile.*")
    command = re.compile(rf"\bflexops ({'|'.join(groups)}) ([a-z-]+)\b")
    return [found for path in places for found in command.findall(path.read_text())]


def test_every_command_that_a_text_names_exists():
    known = groups()
    found = suggested(known)
    assert len(found) > 40
    assert {(group, name) for group, name in found if name not in known[group]} == set()


@pytest.mark.parametrize("name", ["images", "conda", "getting-started"])
def test_a_page_has_the_wheel_and_the_tools_before_their_commands(name):
    """flexops-tools require the flexops of the clone, which is on no index."""
    text = (ROOT / f"docs/{name}.md").read_text()
    order = ["scripts/build_wheel.sh", r"dist/flexops_torch-\*.whl", r"\./tools"]
    order += ["flexops (?:image|channel) build", "docker run|conda install"]
    first = [found.start() for part in order if (found := re.search(part, text))]
    assert len(first) == len(order)
    assert first == sorted(first)
