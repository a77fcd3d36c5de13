"""Other projects' kernels through ``flexops.builder``: the example, a library that uses all that
schemas have, wheels, and what goes wrong.

Each test runs its library in a process of its own, because a namespace is registered for the life
of a process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from builds import REPOSITORY
from marks import first_of
from processes import completed, printed

from flexops import settings, toolchain
from flexops.builder import new
from flexops.errors import FlexopsError
from flexops.toolchain import zig
from flexops.toolchain.model import HostCompiler

EXAMPLE = REPOSITORY / "examples" / "scale_lib"
CALL = (
    "import torch, mylib, flexops; x = torch.linspace(-1, 1, 7); assert torch.equal(mylib.scale(x,"
    " 3.0), x * 3.0)\n"
)
WHERE = (
    "print(*[(one.backend, one.reason, one.fix) for one in flexops.status() if (one.op, one.device)"
    " == ('mylib.scale', 'cpu')])"
)


def run(code: str, *places: Path, cwd: Path | None = None, **environment: str) -> str:
    """What a Python program prints, warnings included; the program sees flexops and what is in
    ``places``."""
    path = os.pathsep.join(map(str, (*places, REPOSITORY)))
    return "".join(printed(code, {**os.environ, "PYTHONPATH": path, **environment}, cwd))


def tool(words: str) -> str:
    """The program that ``flexops WORDS`` is."""
    return f"import sys; sys.argv = 'flexops {words}'.split(); from flexops.cli import main; main()"


def pip(words: str, *more: object) -> list[str]:
    return [sys.executable, "-m", "pip", *words.split(), *map(str, more)]


@pytest.fixture
def package(tmp_path: Path, host_compiler: HostCompiler) -> Path:
    """A copy of the example, to be changed."""
    assert host_compiler
    return Path(
        shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("__pycache__"))
    )


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


BUILD = """
from flexops import settings
from flexops.build.deliver import aot
import mylib
for result in aot.build(("mylib",), settings.current(), devices={devices}, arch_list="9.0"):
    print(result.plan.name, result.error, [kernel.plan.expression for kernel in result.kernels])
"""


def test_the_examples_device_code_compiles_for_a_gpu_that_is_not_here():
    said = run(BUILD.format(devices=("cuda",)), EXAMPLE)
    for dtype in ("float", "flexops::f16", "flexops::bf16"):
        assert f"mylib::scale_kernel<{dtype}>" in said


WIDE = """
import torch
from flexops import builder
lib = builder.Library("wide", root=__file__)

@lib.op("mix(Tensor x, Tensor? bias, Tensor[] more, float scale, int count, float? shift, bool twice, ScalarType dtype) -> (Tensor y, Tensor sums)",
        family="wide", dtypes={"x": "float32", "bias": "x", "more": "float32"}, shapes={"bias": "x[-1]", "more": "x"}, split="whole",
        outputs=(builder.Output("x[:-1], count", "x"), builder.Output("x[0]", "dtype")))
def mix(x, bias, more, scale, count, shift=None, *, twice=False, dtype=torch.int64):
    whole = (x if bias is None else x + bias) * scale + sum(more) + (0.0 if shift is None else shift)
    whole = whole * 2 if twice else whole
    return whole.sum(-1, keepdim=True).expand(*x.shape[:-1], count).clone(), torch.full((x.shape[0],), count, dtype=dtype)

@lib.op("lies(Tensor x, Tensor? other, int more, Tensor far) -> (Tensor seen, Tensor some)", family="wide", dtypes={"other": "bool"}, split="whole",
        strided={"x": "aligned rows", "other": "as x", "far": "any"},
        outputs=(builder.Output("8", "int64"), builder.Output("x[0] * 2 + 1, x[-1] // 3", "other", when="other and more", otherwise="x[:1], 1")))
def lies(x, other, more, far):
    raise AssertionError("what the launcher sees, no reference can know")

@lib.op("add_(Tensor(a!) x, Tensor y) -> ()", family="wide", shapes={"y": "x"}, strided=("y",), split="rows")
def add_(x, y):
    x.add_(y)
"""
WIDE_CPU = """
#include "common/cpu_elements.h"
namespace wide::FLEXOPS_ISA {
using namespace flexops;
using namespace flexops::FLEXOPS_ISA;
void mix_cpu(const TensorView& x, const TensorView& bias, const TensorViews& more, double scale, int64_t count, const double* shift, bool twice, Dtype dtype,
             const TensorView& y, const TensorView& sums) {
  const int64_t columns = x.columns();
  for (int64_t row = 0; row < x.rows(); ++row) {
    double total = 0;
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t i = row * columns + column;
      double value = (x.as<float>()[i] + (bias ? bias.as<float>()[column] : 0)) * scale + (shift ? *shift : 0);
      for (int64_t k = 0; k < more.count; ++k) value += more[k].as<float>()[i];
      total += twice ? 2 * value : value;
    }
    for (int64_t k = 0; k < count; ++k) y.as<float>()[row * count + k] = static_cast<float>(total);
  }
  for (int64_t i = 0; i < sums.numel; ++i) {
    if (dtype == Dtype::i64) sums.as<int64_t>()[i] = count;
    else sums.as<float>()[i] = static_cast<float>(count);
  }
}
void lies_cpu(const TensorView& x, const TensorView& other, int64_t, const TensorView& far, const TensorView& seen, const TensorView& some) {
  const int64_t first = other ? other.stride(0) : -1, last = other ? other.stride(-1) : -1;
  const int64_t values[] = {x.row_stride(), x.rows(), other.dim, first, last, far.stride(-1), x.row_start(3), some.numel};
  for (int i = 0; i < 8; ++i) seen.as<int64_t>()[i] = values[i];
}
void add__cpu(const TensorView& x, const TensorView& y, int64_t begin, int64_t end) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t column = 0; column < x.size(1); ++column) {
        const int64_t at = row * x.size(1) + column;
        store(x.as<T>(), at, load(x.as<T>(), at) + load(y.as<T>(), row * y.stride(0) + column * y.stride(1)));
      }
    }
  });
}
}  // namespace wide::FLEXOPS_ISA
"""
USE_WIDE = """
import copy, itertools, pickle, torch, wide, flexops
x, bias = torch.randn(5, 4).t().contiguous().t(), torch.randn(4)
for b, more, shift, twice, dtype in itertools.product((None, bias), ([], [x + 1, x.clone()]), (None, 0.5), (False, True), (torch.int64, torch.float32)):
    args = (x, b, more, 0.25, 3, shift, twice, dtype)
    for actual, expected in zip(wide.mix(*args), wide.mix.reference(*args[:6], twice=twice, dtype=dtype), strict=True):
        torch.testing.assert_close(actual, expected)
torch.testing.assert_close(wide.mix(x, count=2, bias=None, more=[], scale=1.0)[0][:, 0], x.sum(-1))  # by name, with the reference's defaults
fake = wide.mix(x.to("meta"), None, [], 0.25, 3, None, False, torch.float32)
assert [(one.shape, one.dtype) for one in fake] == [((5, 3), torch.float32), ((5,), torch.float32)]
for dtype, layout in itertools.product((torch.float32, torch.bfloat16, torch.float16), range(3)):
    whole = (torch.zeros(6, 8, dtype=dtype), torch.zeros(8, 6, dtype=dtype).t(), torch.zeros(12, 8, dtype=dtype)[::2])[layout]
    y = torch.randn(8, 6).t().to(dtype)
    wide.add_(whole, y)
    assert torch.equal(whole, y), (dtype, whole.stride())
for args, error, said in (
    ((x, torch.randn(5), [], 1.0, 3, None, False, torch.int64), ValueError, "wide.mix: bias must have shape [4], got [5]"),
    ((x, None, [x[:1]], 1.0, 3, None, False, torch.int64), ValueError, "wide.mix: more[0] must have x's shape [5, 4], got [1, 4]"),
    ((x.double(), None, [], 1.0, 3, None, False, torch.int64), TypeError, "wide.mix: x must be float32, got float64"),
):
    try:
        wide.mix(*args)
    except error as found:
        assert said in str(found), found
    else:
        raise AssertionError(said)
    try:
        torch.ops.wide.mix(*args)  # the binding itself, in its own words
    except RuntimeError as found:
        assert said.replace("wide.mix", "wide::mix").replace("more[0]", "more") in str(found), found
    else:
        raise AssertionError(said)
taken, yes = torch.randn(4, 5, 12), torch.ones(5, 1, dtype=torch.bool)
for one_x, other, more, seen in (
    (taken, None, True, [12, 20, -1, -1, -1, 1, 36, 4]),
    (taken[..., 3:9], yes, False, [12, 20, 3, 0, 0, 1, 36, 4]),  # rows of longer ones, as they lie
    (taken[:, 1], yes[0], True, [60, 4, 2, 0, 0, 1, 180, 36]),
    (taken[::2, :, :6], torch.ones(5, 12, dtype=torch.bool)[:, ::2], True, [6, 10, 3, 0, 1, 1, 18, 10]),  # no one distance, and columns apart: copies
    (taken.transpose(1, 2), torch.ones(4, 1, 5, dtype=torch.bool), True, [5, 48, 3, 5, 1, 1, 15, 9]),
    (taken[:1].expand(4, 5, 12), None, False, [12, 20, -1, -1, -1, 1, 36, 4]),
):
    far = one_x.t() if one_x.dim() == 2 else one_x
    found, some = torch.ops.wide.lies(one_x, other, more, far)
    assert found.tolist() == [*seen[:5], far.stride(-1), *seen[6:]], (found, seen)
    there = other is not None and more
    assert some.shape == ((2 * one_x.shape[0] + 1, one_x.shape[-1] // 3) if there else (one_x.shape[0], 1))
    assert some.dtype == (torch.float32 if other is None else torch.bool)
    same = wide.lies(one_x.to("meta"), other if other is None else other.to("meta"), more, far.to("meta"))
    assert [(one.shape, one.dtype) for one in same] == [(one.shape, one.dtype) for one in (found, some)]
def refused(call, said):
    try:
        call()
    except (RuntimeError, ValueError) as found:
        assert said in str(found), found
    else:
        raise AssertionError(said)
for lies in (wide.lies, torch.ops.wide.lies):
    refused(lambda: lies(taken, torch.ones(4, 1, dtype=torch.bool), True, taken), "lies: other must be broadcastable to x, got shape [4, 1] for [4, 5, 12]")
    refused(lambda: lies(taken[0, 0], torch.ones(1, 1, dtype=torch.bool), True, taken), "lies: other must be broadcastable to x, got shape [1, 1] for [12]")
    refused(lambda: lies(taken[0, 0, 0], torch.ones((), dtype=torch.bool), True, taken), "lies: x must have at least one dimension")
leaf = torch.ones(6, 8, requires_grad=True)
for add_ in (wide.add_, torch.ops.wide.add_):
    hidden = leaf * 2
    loss = hidden.square().sum()
    add_(hidden.detach(), torch.ones(6, 8))  # which autograd has saved: native kernels count what they write, too
    refused(loss.backward, "modified by an inplace operation")
    refused(lambda: add_(hidden, torch.ones(6, 8)), "wide.add_ has no gradient")
    with torch.no_grad():
        add_(leaf, torch.ones(6, 8))
    with torch.inference_mode():
        add_(torch.ones(6, 8), torch.ones(6, 8))
for mix in (wide.mix, torch.ops.wide.mix):
    refused(lambda: (mix(leaf, None, [], 1.0, 3, None, False, torch.float32)[0].sum() + leaf.sum()).backward(), "wide.mix has no gradient")
    assert not mix(leaf, None, [], 1.0, 3, None, False, torch.int64)[1].requires_grad
    for held in ([leaf], *([(leaf,)] if mix is wide.mix else [])):  # torch does not look for what requires a gradient in there
        refused(lambda: mix(torch.ones(6, 8), None, held, 1.0, 3, None, False, torch.float32), "wide.mix has no gradient for the tensors in more, a list")
refused(lambda: torch.func.grad(lambda one: wide.mix(torch.ones(6, 8), None, [one], 1.0, 3, None, False, torch.float32)[0].sum())(torch.ones(6, 8)), "a list")
assert pickle.loads(pickle.dumps(wide.mix)) is copy.deepcopy(wide.mix) is wide.mix
torch.library.opcheck(torch.ops.wide.mix.default, (x, bias, [x], 0.25, 3, 0.5, True, torch.int64))
torch.library.opcheck(torch.ops.wide.add_.default, (torch.zeros(6, 8), torch.randn(6, 8)))
print(*[one.backend for one in flexops.status() if one.op == "wide.wide"])
"""


LISTS = """
import torch
from flexops import builder
lib = builder.Library("lists", root=__file__)
ROWS = builder.Rows(("params", "grads", "means", "scales"), "steps", optional=("means",), written_if=(("grads", "unscale"),), blocks=(("scales", 4),))

@lib.op("step_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] means, Tensor[] scales, Tensor[] steps, float lr, Tensor? unscale) -> ()",
        family="lists", rows=ROWS, dtypes={"means": "float32", "scales": "float32"}, numbers=("unscale",))
def step_(params, grads, means, scales, steps, lr, unscale=None):
    for i, (param, grad, scale) in enumerate(zip(params, grads, scales)):
        if unscale is not None:
            grad.copy_(grad.float() / unscale)
        change = grad.float() * (steps[0][i] if len(steps) != len(params) else steps[i]) * scale.repeat_interleave(4)[:param.numel()].view(param.shape)
        if means:
            change = means[i].copy_(means[i] * 0.5 + change)
        param.copy_(param.float() - lr * change)

@lib.op("norms(Tensor[] xs, Tensor factor) -> (Tensor each, Tensor whole)", family="lists", rows=builder.Rows(("xs",)), numbers=("factor",),
        outputs=(builder.Output("len(xs)", "float32"), builder.Output("[]", "float32")), split="host")
def norms(xs, factor):
    each = torch.stack([x.float().square().sum() * factor for x in xs])
    return each, each.sum()
"""
LISTS_HOST = """
#include "common/host.h"
namespace lists {
FLEXOPS_ISA_DECLARE(double squares_cpu(const flexops::TensorRow& row))
using namespace flexops;
inline void norms_host(Host& host, TensorRow* rows, int64_t count, const float* factor, const TensorView& each, const TensorView& whole) {
  FLEXOPS_CHECK(*factor > 0, host.op, ": factor must be positive");
#if FLEXOPS_DEVICE_CPU
  double* sums = host.workspace<double>(count);
  parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = FLEXOPS_ISA_CALL(squares_cpu)(rows[i]);
  });
  double total = 0;
  for (int64_t i = 0; i < count; ++i) each.as<float>()[i] = static_cast<float>(sums[i] * *factor), total += sums[i] * *factor;
  *whole.as<float>() = static_cast<float>(total);
#endif
}
}  // namespace lists
"""
LISTS_CPU = """
#include "common/cpu_elements.h"
#include "common/multi_tensor.h"
namespace lists::FLEXOPS_ISA {
using namespace flexops;
using namespace flexops::FLEXOPS_ISA;
void step__cpu(const TensorRow& row, double lr, const float* unscale, int64_t begin, int64_t end) {
  with_floats(static_cast<Dtype>(row.type[0]), [&](auto type) {
    with_floats(static_cast<Dtype>(row.type[1]), [&](auto other) {
      auto* param = static_cast<decltype(type)*>(row.array[0]);
      auto* grad = static_cast<decltype(other)*>(row.array[1]);
      auto* mean = static_cast<float*>(row.array[2]);
      for (int64_t i = begin; i < end; ++i) {
        if (unscale) store(grad, i, load(grad, i) / *unscale);
        float change = load(grad, i) * *row.step * static_cast<const float*>(row.array[3])[i / 4];
        if (mean) change = mean[i] = mean[i] * 0.5f + change;
        store(param, i, load(param, i) - static_cast<float>(lr) * change);
      }
    });
  });
}
double squares_cpu(const TensorRow& row) {
  double sum = 0;
  with_floats(static_cast<Dtype>(row.type[0]), [&](auto type) {
    const auto* x = static_cast<const decltype(type)*>(row.array[0]);
    for (int64_t i = 0; i < row.numel; ++i) sum += static_cast<double>(load(x, i)) * load(x, i);
  });
  return sum;
}
}  // namespace lists::FLEXOPS_ISA
"""
USE_LISTS = """
import itertools, torch, lists, flexops
for dtype, kept, unscale, joined, layout in itertools.product((torch.float32, torch.bfloat16), (True, False), (None, 2.0), (True, False), range(3)):
    def made(seed):
        torch.manual_seed(seed)
        params = [torch.randn(6, 8).to(dtype), torch.randn(8, 6).to(dtype).t(), torch.randn(12, 8)[::2]]
        grads = [torch.randn(6, 8), torch.randn(6, 8).to(dtype), torch.randn(1, 1).expand(6, 8) if unscale is None else torch.randn(6, 8)]
        steps = [torch.tensor([1.0, 2.0, 3.0])] if joined else [torch.tensor(1.0), torch.tensor([2.0]), torch.tensor(3.0)]
        number = None if unscale is None else torch.tensor(unscale)
        return params, grads, [torch.randn(8, 6).t() for _ in params] if kept else [], [torch.rand(12) for _ in params], steps, 0.1, number
    ours, plain = made(layout), made(layout)
    # the reference goes by logical order; blocks of elements are the memory's, so scales of one number are what both can be asked
    for scales in (ours[3], plain[3]):
        for scale in scales: scale.fill_(0.5)
    lists.step_(*ours)
    lists.step_.reference(*plain)
    for left, right in zip(ours[:3], plain[:3], strict=True):
        for one, other in zip(left, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
xs, one = [torch.randn(40000), torch.randn(3, 5).t(), torch.zeros(0)], torch.ones(())
for actual, expected in zip(lists.norms(xs, one), lists.norms.reference(xs, one), strict=True):
    torch.testing.assert_close(actual, expected)
assert [part.shape for part in lists.norms([x.to("meta") for x in xs], one.to("meta"))] == [(3,), ()]
x = torch.ones(6)
good = ([x.clone()], [x], [], [torch.ones(2)], [one], 0.1, None)
lists.step_(*good)
for place, value, error, said in (
    (1, [x, x], ValueError, "grads must hold 1 tensors, as params does, got 2"),
    (1, [x[:3]], ValueError, "grads[0] must have the shape of "),
    (1, [x.double()], TypeError, ("grads[0] must be float32, float16 or bfloat16, got float64", "grads[0] must be float32, bfloat16 or float16, got float64")),
    (2, [x.half()], TypeError, "means[0] must be float32, got float16"),
    (3, [one], ValueError, "scales[0] must be a contiguous float32 tensor of at least 2 elements"),
    (4, [], ValueError, "steps must hold 1 tensors, as params does, got 0"),
    (6, x, TypeError, "unscale must be a float32 tensor of one element"),
):
    args = (*good[:place], value, *good[place + 1:])
    words = (said, said) if isinstance(said, str) else said
    for call, kind, word in ((lists.step_, error, words[0]), (torch.ops.lists.step_, RuntimeError, words[1])):
        try:
            call(*args)
        except kind as found:
            assert word in str(found), found
        else:
            raise AssertionError(said)
try:
    lists.norms([x], -one)
except RuntimeError as found:
    assert "lists::norms: factor must be positive" in str(found)
else:
    raise AssertionError
torch.library.opcheck(torch.ops.lists.norms.default, ([x, x[:2]], one))
parts = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
compiles_written_lists = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)  # docs/operators.md
torch.library.opcheck(torch.ops.lists.step_.default, good, test_utils=parts if compiles_written_lists else parts[:-1])
print(*[one.backend for one in flexops.status() if one.op == "lists.lists"])
"""


def test_lists_as_rows_and_a_function_of_the_familys_own(tmp_path, host_compiler):
    assert host_compiler
    folder = tmp_path / "lists" / "csrc" / "lists"
    folder.mkdir(parents=True)
    for name, text in (("lists_cpu.cpp", LISTS_CPU), ("lists_host.h", LISTS_HOST)):
        (folder / name).write_text(text)
    (tmp_path / "lists" / "__init__.py").write_text(LISTS)
    assert "jit" in run(USE_LISTS, tmp_path, FLEXOPS_FALLBACK="forbid")
    # declared and called by the binding otherwise
    edit(folder / "lists_host.h", "const float* factor", "double factor")
    edit(folder / "lists_host.h", "*factor", "factor")
    said = run("import torch, lists; lists.norms([torch.ones(2)], torch.ones(()))", tmp_path)
    assert "norms_host" in said
    assert "float" in said


def test_all_that_a_schema_can_have(tmp_path, host_compiler):
    assert host_compiler
    folder = tmp_path / "wide" / "csrc" / "wide"
    folder.mkdir(parents=True)
    (tmp_path / "wide" / "__init__.py").write_text(WIDE)
    (folder / "wide_cpu.cpp").write_text(WIDE_CPU)
    assert "jit" in run(USE_WIDE, tmp_path, FLEXOPS_FALLBACK="forbid")
    plain = run(
        "import torch, wide; print(wide.mix(torch.ones(2, 3), None, [], 1.0, 2, twice=True)[0])",
        tmp_path,
        FLEXOPS_JIT="0",
    )
    assert "[6., 6.]" in plain  # the reference, whose last arguments must be named


def documented(language: str, having: str) -> str:
    """The block of code of docs/builder.md that has these words."""
    (block,) = [
        one
        for one in re.findall(
            rf"```{language}\n(.*?)```", (REPOSITORY / "docs/builder.md").read_text(), re.DOTALL
        )
        if having in one
    ]
    return str(block)


USE_GATED = """
import itertools, torch, mylib, flexops
whole = torch.randn(6, 4, 24)
for x, bias, keep in itertools.product(
    (whole, whole[..., 5:13], whole.transpose(0, 1), whole[:, 1], whole[0, 0], whole[:0], whole[..., :0]),
    (None, lambda x: torch.randn(x.shape[-1]), lambda x: torch.randn(1), lambda x: torch.randn(*x.shape[:-1], 1), lambda x: x + 1),
    (False, True),
):
    for dtype in (torch.float32, torch.bfloat16):
        args = x.to(dtype), None if bias is None else bias(x).to(dtype), keep
        for actual, expected in zip(torch.ops.mylib.gated(*args), mylib.gated.reference(*args), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
            assert actual.is_contiguous()
for keep in (False, True):
    torch.library.opcheck(torch.ops.mylib.gated.default, (whole, whole[0, 0], keep))
print(*[one.backend for one in flexops.status() if one.op == "mylib.gated"])

@mylib.gated.fake
def _fake(x, bias, keep):
    return x[..., ::2].contiguous(), x[..., ::2].contiguous()
try:
    torch.library.opcheck(torch.ops.mylib.gated.default, (whole, None, False))
except Exception as error:
    print(error)
"""


@pytest.mark.extra
def test_the_pages_example_of_how_tensors_lie(tmp_path, host_compiler):
    """As it is written there; and the launcher, the word and the fake kernel that are wrong, with
    what the page says is said."""
    assert host_compiler
    folder = tmp_path / "mylib" / "csrc" / "gated"
    folder.mkdir(parents=True)
    start = (
        "import torch\nfrom flexops import builder\nlib = builder.Library('mylib', root=__file__)\n"
    )
    (tmp_path / "mylib" / "__init__.py").write_text(start + documented("python", "def gated("))
    (folder / "gated_cpu.cpp").write_text(documented("cpp", "gated_cpu("))
    said = run(USE_GATED, tmp_path, FLEXOPS_FALLBACK="forbid")
    assert "jit" in said
    # the shape that a call gives in the place of the fake kernel's
    assert "(0,)" in said or "[0]" in said, said
    edit(folder / "gated_cpu.cpp", "const TensorView& gate, int64_t begin", "int64_t begin")
    edit(folder / "gated_cpu.cpp", "if (gate)", "if (false)")
    edit(folder / "gated_cpu.cpp", "store(gate.", "store(y.")
    page = (REPOSITORY / "docs/builder.md").read_text()
    said += run(BUILD.format(devices=("cpu",)), tmp_path)
    edit(tmp_path / "mylib" / "__init__.py", '"x": "rows"', '"x": "even rows"')
    said += run(
        "from flexops.errors import FlexopsError\ntry:\n    import mylib\nexcept FlexopsError as"
        " error:\n    print(error)",
        tmp_path,
    )
    words = ("gated_cpu", "gated: strided", "'even rows'", "or as and")
    quoted = [
        line.strip()
        for line in page.splitlines()
        if line.startswith("    ") and any(word in line for word in words)
    ]
    assert len(quoted) == 6
    for line in quoted:
        assert line in said, (line, said)


LIBRARIES = {
    "CUB": ("#include <cub/block/block_reduce.cuh>\n#include <cuda/std/limits>", """
      using Reduce = cub::BlockReduce<float, 256>;
      __shared__ typename Reduce::TempStorage storage;
      float own = cuda::std::numeric_limits<float>::lowest();
      for (i64 i = threadIdx.x; i < n; i += 256) own = x[i] > own ? x[i] : own;
      own = Reduce(storage).Reduce(own, [](float a, float b) { return a > b ? a : b; });
      if (threadIdx.x == 0) *out = own;"""),
    "CuTe": ("#include <cute/tensor.hpp>", """
      auto from = cute::make_tensor(cute::make_gmem_ptr(x), cute::make_layout(int(n)));
      if (threadIdx.x == 0) for (int i = *out = from(0); i < size(from); ++i)
        if (from(i) > *out) *out = from(i);"""),
}  # fmt: skip


@pytest.mark.extra
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_familys_kernels_include_cudas_libraries(name, tmp_path, host_compiler):
    """CCCL's headers are found as for flexops.kernel; CUTLASS' are in csrc."""
    assert host_compiler
    headers, body = LIBRARIES[name]
    family = tmp_path / "largest" / "csrc" / "most"
    family.mkdir(parents=True)
    if name == "CuTe":
        cutlass = importlib.util.find_spec("cutlass_library")
        assert cutlass, "pip install -r tests/requirements.txt"
        assert cutlass.origin
        for one in ("cute", "cutlass"):
            (family.parent / one).symlink_to(Path(cutlass.origin).parent / "source/include" / one)
    (tmp_path / "largest/__init__.py").write_text(
        "from flexops import builder\n"
        "lib = builder.Library('largest', root=__file__)\n"
        "@lib.op('most(Tensor x) -> Tensor', family='most', dtypes={'x': 'float32'},"
        " outputs=builder.Output('[]'))\n"
        "def most(x): return x.max()\n"
    )
    kernel = "__global__ void __launch_bounds__(256) most_kernel(const float* x, i64 n, float* out)"
    (family / "most.cuh").write_text(
        '#pragma once\n#include "common/device.cuh"\n'
        f"#ifdef __CUDACC__\n{headers}\n#endif\n"
        f"namespace largest {{\nusing namespace flexops;\n{kernel};\n"
        f"#ifdef __CUDACC__\n{kernel} {{ {body} }}\n#endif\n}}\n"
    )
    (family / "most_cuda.cpp").write_text(
        '#include "common/launch.h"\n#include "most/most.cuh"\nnamespace largest {\n'
        "const char* most_cuda(const TensorView& x, const TensorView& out, void* stream) {\n"
        "  const LaunchConfig config{blocks(1), {256}, stream};\n"
        "  launch(kernel<most_kernel>, config, x.as<float>(), x.numel, out.as<float>());\n"
        "  return last_error();\n}\n}\n"
    )
    done = run(
        tool("build largest --arch 9.0"),
        tmp_path,
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
        FLEXOPS_AOT_DEVICES="cuda",
    )
    assert "largest.most-cuda compiled" in done


@pytest.mark.parametrize("device", first_of("cuda", "cpu"))
def test_another_launcher_than_the_schema_says(package, device):
    """Found when it is built; the text has what there is, and what there should be."""
    edit(package / f"mylib/csrc/scale/scale_{device}.cpp", "double factor", "float factor")
    said = run(BUILD.format(devices=(device,)), package)
    assert f"the launcher scale_{device} is not as the schema says" in said
    scope = "mylib::FLEXOPS_ISA" if device == "cpu" else "mylib"
    assert (
        f"found: {scope}::scale_{device}(const flexops::TensorView&, float, const"
        " flexops::TensorView&"
        in said
        or f"; {scope}::scale_{device}(" in said
    )
    assert (
        f"required: {'void' if device == 'cpu' else 'const char*'} {scope}::scale_{device}(const"
        " flexops::TensorView& x, double factor, const" in said
    )


def test_a_launcher_with_another_result(package):
    edit(package / "mylib/csrc/scale/scale_cpu.cpp", "void scale_cpu", "int scale_cpu")
    said = run(BUILD.format(devices=("cpu",)), package)
    assert "the launcher scale_cpu is not as the schema says" in said
    assert "int mylib::" in said


PLANNED = """
from flexops import settings
from flexops.build.describe import catalog
from flexops.build.load import loader
from flexops.build.plan import cache_key
import mylib
plan = loader.local_plan(catalog.find("mylib.scale"), "cpu", settings.current())
print(cache_key.base_key(plan, cache_key.source_digests(plan)))
"""


def test_a_changed_declaration_is_another_build(package):
    """By the key of the cache; among the extra tests it is built."""
    before = run(PLANNED, package)
    assert re.fullmatch(r"\w+\n", before)
    edit(
        package / "mylib/__init__.py",
        'family="scale")',
        'family="scale", dtypes={"x": ("float32", "float16")})',
    )
    after = run(PLANNED, package)
    assert re.fullmatch(r"\w+\n", after)
    assert after != before


@pytest.mark.extra
def test_a_changed_declaration_is_built_anew(package, tmp_path):
    cache = {"FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}
    assert "compiled in" in run(CALL + WHERE, package, **cache)
    assert "found in the cache" in run(CALL + WHERE, package, **cache)
    edit(
        package / "mylib/__init__.py",
        'family="scale")',
        'family="scale", dtypes={"x": ("float32", "float16")})',
    )
    assert "compiled in" in run(CALL + WHERE, package, **cache)


WRONG_DECLARATIONS = r"""
mylib is registered twice
    builder.Library('mylib', root='/elsewhere')
no library can be called
    builder.Library('flexops', root='/elsewhere')
no library can be called
    builder.Library('my-lib', root='/elsewhere')
mylib.scale is declared twice
    op('scale(Tensor x) -> Tensor', family='scale')(lambda x: x)
cannot be read
    op('scale2(Tensor x) > Tensor', family='scale')(lambda x: x)
torch does not take the schema
    op('scale2(Tensor x, Strange s) -> Tensor', family='scale', own_binding=True)(lambda x, s: x)
has keyword-only arguments
    op('two(Tensor x, *, float s) -> Tensor', family='scale', own_binding=True)(lambda x, *, s: x)
cannot save nothing
    mylib.scale.backward(lambda ctx, grad: grad, saves=('nothing',))
in their order: x, y
    op('scale2(Tensor x, Tensor y) -> Tensor', family='scale')(lambda y, x: x)
writes its arguments
    op('scale_(Tensor(a!) x) -> ()', family='scale')(lambda x: None).backward(lambda ctx: None)
no library can be called
    builder.Library('load_library', root='/elsewhere')
no family can be called '../scale'
    op('scale2(Tensor x) -> Tensor', family='../scale')(lambda x: x)
it has 250 characters
    builder.Library('a' * 250, root='/elsewhere')
at most 80 letters
    op('scale2(Tensor x) -> Tensor', family='a' * 250)(lambda x: x)
names of ASCII letters
    op('scale2(Tensor x, float gr\xf6\xdfe) -> Tensor', family='scale')(lambda x: x)
outputs=builder.Output('x[0]')
    op('scale2(Tensor x) -> Tensor', family='scale', outputs='x[0]')(lambda x: x)
""".strip().splitlines()
"""What is said, and of which code."""


def test_declarations_that_cannot_be():
    """All in one process: none leaves a part of what it declared to the next."""
    said = WRONG_DECLARATIONS[::2]
    codes = [code.strip() for code in WRONG_DECLARATIONS[1::2]]
    imports = "import mylib\nfrom flexops import builder\nfrom flexops.errors import FlexopsError\n"
    attempts = "\n".join(
        f"try:\n    {code}\n    print()\nexcept FlexopsError as error:\n"
        "    print(ascii(str(error)))"
        for code in codes
    )
    lines = run(f"{imports}op = mylib.lib.op\n{attempts}", EXAMPLE).splitlines()
    for code, wanted, line in zip(codes, said, lines, strict=True):
        assert wanted in line, code


FORWARD = """
import mylib, torch
from flexops.errors import FlexopsError
x = torch.randn(4)
try:
    torch.func.jvp(lambda x: mylib.scale(x, 3.0), (x,), (x,))
except NotImplementedError as error:
    print(error)

@mylib.scale.jvp
def _(ctx, dx, factor):
    assert factor is None
    return mylib.scale(dx, ctx.factor)

y, dy = torch.func.jvp(lambda x: mylib.scale(x, 3.0), (x,), (x,))
assert torch.equal(dy, 3 * x) and torch.equal(y, 3 * x)
assert torch.equal(torch.func.jacfwd(lambda x: mylib.scale(x, 3.0))(x), 3 * torch.eye(4))
@mylib.lib.op("plain(Tensor x) -> Tensor", family="scale")
def plain(x): return x.clone()
try:
    plain.jvp(print)
except FlexopsError as error:
    print(error)
"""


@pytest.mark.extra
def test_a_derivative_in_forward_mode(package):
    said = run(FORWARD, package, FLEXOPS_FALLBACK="allow")
    assert "mylib.scale has no derivative in forward mode" in said
    assert "mylib.plain has a derivative in forward mode and no backward" in said


def test_two_libraries_with_one_operator_name_each_have_their_own(package):
    other = "other = builder.Library('other', root=mylib.__file__)\n"
    other += (
        "other.op('scale(Tensor x, float factor) -> Tensor', family='scale')(lambda x, factor: x *"
        " factor)"
    )
    asked = (
        "print([(one.op, one.backend) for one in flexops.status() if one.device == 'cpu' and"
        " one.op.endswith('.scale')])"
    )
    said = run(
        f"{CALL}from flexops import builder\n{other}\nassert torch.equal(torch.ops.other.scale(x,"
        f" 2.0), x * 2)\n{asked}",
        package,
        FLEXOPS_LOG="quiet",
    )
    assert "('mylib.scale', 'jit')" in said
    assert "('other.scale', 'reference')" in said  # its launchers are in mylib's namespace


@pytest.mark.extra
def test_a_package_that_is_gone_leaves_the_cache_as_it_was(package, tmp_path):
    """Uninstalled while it runs, and for the next one: what is loaded goes on, and the cache does
    not mind entries that are not requested."""
    cache = {"FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}
    gone = f"import shutil; shutil.rmtree({str(package / 'mylib')!r})\n"
    run(
        f"{CALL}{gone}assert torch.equal(mylib.scale(x, 2.0), x * 2.0)\nflexops.status()",
        package,
        FLEXOPS_FALLBACK="forbid",
        **cache,
    )
    assert "mylib.scale-cpu" in run(tool("cache list"), **cache)
    done = completed(
        [sys.executable, "-c", tool("build mylib")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **cache},
        code=None,
    )
    assert done.returncode != 0
    assert "mylib" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_in_a_zip_archive_runs_as_plain_pytorch(tmp_path):
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in (EXAMPLE / "mylib").rglob("*"):
            packed.write(path, path.relative_to(EXAMPLE))
    said = run(CALL + WHERE, archive)
    assert "zip archive" in said
    assert "runs as plain PyTorch" in said


def test_a_family_without_a_folder_says_where_it_was_looked_for(package):
    shutil.rmtree(package / "mylib/csrc/scale")
    said = run(CALL + WHERE, package)
    assert "csrc/scale/scale_cpu.cpp" in said
    assert "correct family='scale'" in said


def test_what_a_fallback_says_begins_with_what_the_fix_is_for(package):
    edit(
        package / "mylib/csrc/scale/scale_cpu.cpp",
        "load(x.as<T>(), i)",
        "std::sqrt(load(x.as<T>(), i))",
    )
    said = run(CALL + WHERE, package)
    assert "runs as plain PyTorch: mylib.scale-cpu could not be built" in said
    assert "__builtin_sqrtf" in said


CHECKED = """
import torch, mylib, flexops

@mylib.scale.check
def positive(x, factor):
    if factor < 0 or x.shape[:1] == (13,):
        raise ValueError("mylib.scale: factor must not be negative")

def said(call, *args):
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    return "passed"

x = torch.ones(4)
ways = [
    *[("call", mylib.scale, x)] * 2,
    ("with a gradient", mylib.scale, x.clone().requires_grad_()),
    ("by name", lambda x, factor: mylib.scale(factor=factor, x=x), x),
    ("meta", mylib.scale, x.to("meta")),
    ("torch.ops", torch.ops.mylib.scale, x),
    ("vmap", torch.func.vmap(mylib.scale, in_dims=(0, None)), x),
    ("compiled", torch.compile(lambda x, factor: mylib.scale(x, factor), fullgraph=True, backend="eager"), x),
]
for how, call, given in ways:
    assert said(call, given, 2.0) == "passed", how
    assert "factor must not be negative" in said(call, given, -1.0), (how, said(call, given, -1.0))
    assert said(call, given, 3.0) == "passed", how
with torch.no_grad():
    assert said(mylib.scale, x, -1.0) == "ValueError: mylib.scale: factor must not be negative"
with torch.inference_mode():
    assert said(mylib.scale, x, -1.0) == "ValueError: mylib.scale: factor must not be negative"
assert said(mylib.scale, None, -1.0).startswith("TypeError: mylib.scale: x must be a tensor")
print(*[one.backend for one in flexops.status() if one.op == "mylib.scale"])
"""


@pytest.mark.parametrize(("jit", "backend"), first_of(("1", "jit"), ("0", "reference")))
def test_a_check_is_called_in_each_call(package, tmp_path, jit, backend):
    """The native library does not have it: without it, what the first call refused passed after
    it."""
    cache = str(tmp_path / "cache") if jit == "0" else os.environ["FLEXOPS_CACHE_DIR"]
    code = "import warnings; warnings.simplefilter('ignore')\n" + CHECKED
    assert backend in run(code, package, FLEXOPS_JIT=jit, FLEXOPS_CACHE_DIR=cache)


UNLIKE = """
import torch, mylib, flexops
x = torch.ones(4)
ways = [
    ("call", mylib.scale, x),
    ("with a gradient", mylib.scale, x.clone().requires_grad_()),
    ("meta", mylib.scale, x.to("meta")),
    ("torch.ops", torch.ops.mylib.scale, x),
    ("compiled", torch.compile(lambda x, factor: mylib.scale(x, factor), backend="eager"), x),
]
for how, call, given in ways:
    try:
        call(given, 2.0)
    except Exception as error:
        said = str(error)
    assert "the reference of mylib.scale returns something else" in said, (how, said)
    said = ""
"""


@pytest.mark.parametrize("jit", first_of("1", "0"))
def test_a_reference_of_another_shape_is_an_error_in_each_call(package, jit):
    edit(package / "mylib/__init__.py", "return x * factor", "return (x * factor).sum()")
    code = "import warnings; warnings.simplefilter('ignore')\n" + UNLIKE
    run(code, package, FLEXOPS_JIT=jit)


SMALL = """
import sys, mylib, torch
from flexops.errors import FlexopsError
from flexops.ops._declared import check_reference
x = torch.ones(4)
mylib.scale(x, 2.0)
def verdict(reference):
    try:
        return check_reference("unlike", "", reference, torch.empty_like, (x,))
    except FlexopsError:
        return "unlike"
print(verdict(lambda x: x * 2), "torch._dynamo" in sys.modules, verdict(lambda x: (x * 2).sum()))
del sys.modules["torch._dynamo"]
state = torch.get_rng_state()
by_value = lambda x: x[: int(x.sum())], lambda x: x[x > 0]
for reference in (*by_value, torch.rand_like, lambda x: mylib.scale(x, 2.0)):
    print(verdict(reference), torch.get_rng_state().equal(state))
"""


def test_a_small_call_is_verified_without_torchs_compiler(package):
    """On zeros, unless a reference asks for values or draws random numbers; what differs there is
    verified by the compiler, too."""
    said = run(SMALL, package, FLEXOPS_LOG="quiet").splitlines()
    assert said == ["True False unlike", *["True True"] * 4]


@pytest.mark.extra
def test_the_contract_finds_a_fake_kernel_that_says_something_else(package):
    text = (package / "mylib/__init__.py").read_text()
    (package / "mylib/__init__.py").write_text(
        f"{text}\n\n@scale.fake\ndef _fake(x, factor):\n    return x.new_empty(7)\n"
    )
    done = contract(package, "-k", "without_memory or opcheck")
    assert done.returncode == 1, done.stdout
    assert "required: float32 [7]" in done.stdout, done.stdout
    (package / "mylib/__init__.py").write_text(
        text.replace('family="scale"', 'family="scale", outputs=builder.Output("x[:-1]")')
    )
    done = contract(package, "-k", "without_memory")
    assert "found: float32 [3, 8]" in done.stdout, done.stdout


RELU2_CPU = """
#include "common/cpu_elements.h"

namespace mylib::FLEXOPS_ISA {
using namespace flexops;
using namespace flexops::FLEXOPS_ISA;

void relu2_cpu(const TensorView& x, const TensorView& weight, const TensorView& out, int64_t begin, int64_t end) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; ++i) {
      const float product = load(x.as<T>(), i) * load(weight.as<T>(), i % weight.numel);
      store(out.as<T>(), i, product > 0 ? product * product : 0.0f);
    }
  });
}

void relu2_backward_cpu(const TensorView& grad, const TensorView& x, const TensorView& weight, const TensorView& dx, const TensorView& dw, int64_t begin,
                        int64_t end) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; ++i) {
      const float w = load(weight.as<T>(), i % weight.numel), v = load(x.as<T>(), i), product = v * w;
      const float twice = product > 0 ? 2 * product * load(grad.as<T>(), i) : 0.0f;
      store(dx.as<T>(), i, twice * w);
      store(dw.as<T>(), i, twice * v);
    }
  });
}

}  // namespace mylib::FLEXOPS_ISA
"""

RELU2 = """
import mylib
import torch
from flexops.testing import Case, Contract

class TestRelu2(Contract):
    cases = (Case("relu2", "mylib.relu2", mylib.relu2, lambda make, shape: (make(*shape), make(shape[-1])), oracle=lambda x, w: torch.relu(x * w).square(),
                  names=("x", "weight"), differentiable=(0, 1)),)
"""


@pytest.mark.extra
def test_a_gradient_may_be_an_operator_of_its_own(package):
    """As the guide has it: one that has no gradient itself, and which the contract asks for none. A
    reference that rounds is reported as one."""
    guide = (REPOSITORY / "docs" / "builder.md").read_text()
    (block,) = (
        code
        for code in re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
        if "relu2_backward(" in code
    )
    text = (package / "mylib/__init__.py").read_text()
    (package / "mylib/__init__.py").write_text(f"{text}\n\n{block}")
    (package / "mylib/csrc/relu2").mkdir()
    (package / "mylib/csrc/relu2/relu2_cpu.cpp").write_text(RELU2_CPU)
    (package / "tests/test_relu2.py").write_text(RELU2)
    done = contract(
        package, "-k", "relu2 and (gradcheck or (cpu and (opcheck or (are_float64s and float32))))"
    )
    assert "3 passed" in done.stdout, done.stdout
    edit(
        package / "mylib/__init__.py",
        "    return torch.relu(x * weight)",
        "    return torch.relu(x.float() * weight.float())",
    )
    done = contract(package, "-k", "relu2 and gradcheck")
    assert "mylib.relu2.default: its reference rounds float64 to float32" in done.stdout, (
        done.stdout
    )


def contract(package: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A package's own tests, as its author runs them: without the settings of this suite."""
    command = [
        sys.executable,
        *["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir"],
        package,
    ]
    command += [package / "tests", *options]
    path = os.pathsep.join([str(package), str(REPOSITORY)])
    return completed(
        command, env={**os.environ, "PYTHONPATH": path, **environment}, cwd=package, code=None
    )


@pytest.mark.extra
def test_the_examples_own_tests_pass(package):
    done = contract(package, FLEXOPS_FALLBACK="forbid")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.extra
def test_the_contract_notices_a_kernel_that_is_wrong_at_one_level(package):
    """At a level that this machine does not choose: every test of numbers reports that level."""
    import torch

    level, macro = ("baseline", "1")
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        level, macro = "avx2", "defined(__AVX2__) && !defined(__AVX512F__)"
    elif platform.machine() == "x86_64":
        macro = "!defined(__AVX2__)"
    source = package / "mylib" / "csrc" / "scale" / "scale_cpu.cpp"
    edit(source, "static_cast<float>(factor)", "static_cast<float>(factor) * kWrong")
    edit(
        source,
        "void scale_cpu",
        f"#if {macro}\nconstexpr float kWrong = 1.25f;\n#else\nconstexpr float kWrong ="
        " 1.0f;\n#endif\n\nvoid scale_cpu",
    )
    numbers = "native_is or are_float64s or accuracy or test_strides or autocast"
    done = contract(
        package, "-k", f"cpu and ({numbers}) and not bfloat16 and not float16", "--tb=line"
    )
    assert "5 failed" in done.stdout, done.stdout
    assert "passed" not in done.stdout, done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("E   AssertionError: ")]
    assert all(
        re.search(rf"with kernels of level {level}: |result {level}: ", line) for line in told
    ), done.stdout


@pytest.mark.extra
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("x * factor", "x + factor", "AssertionError"),
        ("out, count", "out, count + 9", "the instruction "),
    ],
)
def test_the_contract_runs_kernels_for_cuda_on_the_emulator(package, old, new, said):
    edit(package / "mylib/csrc/scale/scale.cuh", old, new)
    done = contract(package, "-k", "emulator and float32", "--tb=short")
    assert "1 failed" in done.stdout, done.stdout
    assert said in done.stdout


# ---- wheels ----


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, host_compiler: HostCompiler) -> Path:
    """The example, built into a wheel and installed into a directory of its own."""
    assert host_compiler
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(
        EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = wheel(Path(source), folder / "dist", TORCH_CUDA_ARCH_LIST="9.0")
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (folder / "dist").iterdir()
    assert made.name.startswith("mylib-0.1.0-py3-none-linux_")
    subprocess.run(
        pip("install -q --no-deps --target", folder / "site", made),
        check=True,
    )
    return folder / "site"


def wheel(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = pip("wheel -q --no-build-isolation --no-deps -w", out, source)
    return completed(
        command, env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}, code=None
    )


def test_a_wheel_has_libraries_kernels_and_sources(installed):
    there = {path.name for path in (installed / "mylib" / "_aot").iterdir()}
    assert {"mylib.scale-cpu", "mylib.scale-cuda"} <= there
    assert len([name for name in there if name.startswith("mylib.scale-sm_90-")]) == 3
    assert {path.name for path in (installed / "mylib/csrc/scale").iterdir()} == {
        path.name for path in (EXAMPLE / "mylib/csrc/scale").iterdir()
    }


READY = """
import mylib
from flexops.build.describe import catalog
from flexops.build.compile import device_code
from flexops.build.load import provider
from flexops.toolchain import libcuda
from flexops.compute_capability import ComputeCapability
from flexops.toolchain.model import Version
spec, none = catalog.find("mylib.scale"), ()
libcuda.driver = lambda: type("Driver", (), {"cuda": lambda self: Version((13, 0))})()
library = next((spec.project.aot / "mylib.scale-cuda").glob("*.so"))
print(provider.incomplete(library, spec, (ComputeCapability.parse("9.0"),)))
print(provider.incomplete(library, spec, (ComputeCapability.parse("9.0"),), (("<csrc>/common/dtypes.cuh", "another"),)))
"""


def test_the_wheels_kernels_are_found_for_their_gpu_and_go_with_their_own_headers_only(
    installed, tmp_path
):
    here, apart = run(
        READY, installed, FLEXOPS_JIT="0", FLEXOPS_CACHE_DIR=str(tmp_path / "none")
    ).splitlines()
    assert here == "None"
    assert "3 of the 3 kernels" in apart


def test_an_installed_library_needs_no_compiler_and_writes_nothing(installed, tmp_path):
    for path in (installed, *installed.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(installed.rglob("*"))
    nothing = {
        "FLEXOPS_JIT": "0",
        "FLEXOPS_FALLBACK": "forbid",
        "FLEXOPS_CACHE_DIR": str(tmp_path / "none"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "",
    }
    assert "aot" in run(CALL + WHERE, installed, **nothing)
    assert sorted(installed.rglob("*")) == before


@pytest.mark.extra
def test_an_old_library_under_a_new_flexops(installed, tmp_path):
    """Judged by its ABI before it is opened. Headers and rules of flexops that have changed since
    are no reason to reject it."""
    newer = (
        "from flexops.build.store import manifest; from flexops.build.describe import layout; from"
        " pathlib import Path; import shutil\n"
    )
    headers = (
        f"shutil.copytree(layout.csrc_root(), {str(tmp_path / 'csrc')!r}); layout.csrc_root ="
        f" lambda: Path({str(tmp_path / 'csrc')!r})\n"
    )
    headers += "(layout.csrc_root() / 'common/tensor_view.h').write_text('#error')\n"
    off = {"FLEXOPS_JIT": "0", "FLEXOPS_CACHE_DIR": str(tmp_path / "none")}
    assert "aot" in run(newer + headers + CALL + WHERE, installed, **off)
    said = run(f"{newer}manifest.ABI += 1\n{CALL}{WHERE}", installed, **off)
    assert "reference" in said
    assert "ABI" in said


@pytest.mark.extra
def test_the_entry_point_is_what_doctor_and_build_go_by(installed):
    assert "mylib.scale-cpu" in run(tool("build mylib --device cpu"), installed)
    program = (
        "import flexops.doctor.trial as trial\nprint([one for one in trial.ops() if one.name =="
        " 'mylib.scale' and one.device == 'cpu'])"
    )
    said = run(program, installed)
    assert "backend='aot'" in said
    assert "max_error=0.0" in said


@pytest.mark.extra
def test_a_library_without_its_entry_point_is_told(installed, tmp_path):
    """By doctor where it is installed: nothing else would ever try it."""
    site = Path(shutil.copytree(installed, tmp_path / "site"))
    program = (
        "from flexops.doctor import judgement\nfrom flexops.doctor.checks import build\nfrom"
        " flexops.doctor.probes import build as probes\n"
    )
    program += (
        "import sys\nprint(*build.unregistered(probes.unregistered()), 'mylib' in sys.modules)"
    )
    assert run(program, site).strip() == "False"
    (points,) = site.glob("*.dist-info/entry_points.txt")
    points.unlink()
    said = run(program, site)
    assert 'mylib = "mylib" to its pyproject.toml' in said
    assert "False" in said


def test_an_old_setuptools_is_named(tmp_path):
    """As a new environment of Python 3.11 has it, where pip builds without isolation."""
    (tmp_path / "setuptools").mkdir()
    (tmp_path / "setuptools/__init__.py").write_text(
        "__version__ = '65.5.0'\nclass Extension: pass\n"
    )
    (tmp_path / "setuptools/command").mkdir()
    (tmp_path / "setuptools/command/__init__.py").write_text("")
    (tmp_path / "setuptools/command/build_ext.py").write_text("class build_ext: pass\n")
    said = run(
        "try:\n    from flexops.builder import commands\nexcept SystemExit as error: print(error)",
        tmp_path,
    )
    assert "setuptools 65.5.0 is too old" in said
    assert "pip install 'setuptools>=77'" in said


@pytest.mark.extra
def test_a_wheel_that_cannot_be_built_says_why(package, tmp_path):
    edit(package / "mylib/csrc/scale/scale_cpu.cpp", "double factor", "float factor")
    done = wheel(package, tmp_path / "dist")
    assert done.returncode != 0
    assert "the launcher scale_cpu is not as the schema says" in done.stdout + done.stderr
    edit(
        package / "mylib/__init__.py",
        "import torch\n",
        "import torch\nimport nothing_of_that_name\n",
    )
    done = wheel(package, tmp_path / "dist")
    assert done.returncode != 0
    assert "--no-build-isolation" in done.stdout + done.stderr


@pytest.mark.extra
def test_an_editable_install_compiles_nothing_and_sees_edits(package, tmp_path):
    command = pip(
        "install -q --no-build-isolation --no-deps --target", tmp_path / "site", "-e", package
    )
    completed(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert not (package / "mylib" / "_aot").exists()
    seen = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    cache = {"FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}
    assert "compiled in" in run(seen + CALL + WHERE, cwd=tmp_path, **cache)
    edit(package / "mylib/csrc/scale/scale_cpu.cpp", "* static_cast<float>(factor)", "* 3.0f")
    assert "compiled in" in run(seen + CALL + WHERE, cwd=tmp_path, **cache)


# ---- flexops new, and the other examples ----


def test_a_new_package_is_the_example_under_its_name_and_passes_its_tests(tmp_path, host_compiler):
    assert host_compiler
    program = tool("new other --family double_it")
    run(program, cwd=tmp_path)
    made = tmp_path / "other"
    assert (made / "other/csrc/double_it/double_it.cuh").is_file()
    assert "mylib" not in "".join(path.read_text() for path in made.rglob("*") if path.is_file())
    done = contract(
        made, "-k", "reference or opcheck or gradcheck or accuracy", FLEXOPS_FALLBACK="forbid"
    )
    assert done.returncode == 0, done.stdout
    small = (
        "import flexops.bench.setup as sizes\nsizes.Setup.rows = lambda self, count: 16\n"
        "from flexops.bench import own, timing\ntiming.COPY_BYTES = {'cpu': 2**20}\n"
    )
    measured = tool("bench run benchmarks/double_it.py --device cpu --json")
    said = run(small + measured, made, cwd=made)
    assert [one["contender"] for one in json.loads(said)] == ["other", "torch"]
    again = completed(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        code=None,
    )
    assert again.returncode != 0
    assert "there already" in again.stderr


def test_git_ignores_what_building_and_testing_a_new_package_write(tmp_path):
    files = new.write("other", "double_it", tmp_path)
    root = tmp_path / "other"
    written = (
        "build/lib.linux-x86_64/other/__init__.py",
        "dist/other-0.1.0-py3-none-any.whl",
        "other-0.1.0-py3-none-any.whl",
        "other.egg-info/PKG-INFO",
        "other/__pycache__/__init__.cpython-312.pyc",
        "other/_aot/other.double_it-cpu/other_double_it_cpu.so",
        ".venv/bin/python",
        ".pytest_cache/README.md",
        ".hypothesis/examples/0",
    )
    for path in written:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    seen = ["git", "-C", str(root), "ls-files", "--others", "--exclude-standard"]
    assert set(completed(seen).stdout.split()) == {str(path.relative_to(root)) for path in files}


def test_lines_of_a_new_package_have_at_most_100_columns(tmp_path):
    files = new.write("mylib", "scale", tmp_path)
    assert len(files) > 10
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert [line for line in lines if len(line) > 100] == []


# what the operator is, wherever it is said


@pytest.mark.parametrize("name", ["torch", "json", "class", "lambda", "my-lib", "a" * 81])
def test_a_package_has_a_name_of_its_own(name, tmp_path):
    with pytest.raises(FlexopsError, match=f"cannot be called '{name}'"):
        new.write(name, "scale", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_package_where_nothing_can_be_written(tmp_path):
    with pytest.raises(FlexopsError, match="missing/other cannot be written") as failed:
        new.write("other", "scale", tmp_path / "missing")
    assert "No such file or directory" in failed.value.found
    assert failed.value.fix


def test_a_package_that_is_there_is_whole(tmp_path, monkeypatch):
    """A command that is killed while it writes can be run again."""
    made, renamed, seen = tmp_path / "other", new._renamed, []

    def look(*given: str) -> str:
        seen.append(made.exists())
        return renamed(*given)

    monkeypatch.setattr(new, "_renamed", look)
    files = new.write("other", "scale", tmp_path)
    assert seen
    assert not any(seen)
    assert list(tmp_path.iterdir()) == [made]
    assert all(path.is_file() for path in files)


FORMULA = (
    "* factor",
    "* static_cast<float>(factor)",
    "grad, ctx.factor",
    "* 0.3",
    "for (int64_t i",
)


def test_a_newcomer_writes_little_that_is_no_formula():
    """The whole example with its tests and benchmark, but for blank lines, comments, closing braces
    and the formula itself."""
    files = [
        path
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".cpp", ".cuh", ".toml") and "_aot" not in path.parts
    ]
    lines = [
        line.strip() for path in files for line in path.read_text().splitlines() if line.strip()
    ]
    plain = [line for line in lines if line[0] not in "/})" and not line.startswith(("# ", '"""'))]
    assert len([line for line in plain if not any(part in line for part in FORMULA)]) <= 72


MOVED = """
import torch, softcap_lib, flexops
x = torch.randn(3, 100, requires_grad=True)
y = softcap_lib.softcap(x, 2.0)
torch.testing.assert_close(y, 2 * torch.tanh(x / 2))
torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 1 - torch.tanh(x / 2) ** 2)
from flexops import settings
from flexops.build.deliver import aot
(result,) = aot.build(("softcap_lib",), settings.current(), devices=("cuda",), arch_list="9.0")
print(result.error, len(result.kernels))
"""


@pytest.mark.extra
def test_an_op_that_was_moved_from_a_builder_in_deepspeeds_manner(host_compiler):
    assert host_compiler
    assert "None 6" in run(
        MOVED, REPOSITORY / "examples" / "deepspeed_style" / "after", FLEXOPS_FALLBACK="forbid"
    )


@pytest.mark.extra
def test_a_pybind11_extension_that_was_moved_from_cpp_extension(host_compiler):
    assert host_compiler
    said = run(
        f"import runpy; runpy.run_path({str(REPOSITORY / 'examples' / 'pybind_ext' / 'rows.py')!r},"
        " run_name='__main__')"
    )
    assert "tensor([3., 3.], dtype=torch.float64)" in said


HAND_WRITTEN = """
#include "common/binding.h"
namespace flexops {
static Tensor scale(Tensor x, double factor) {
  Tensor out = empty_like_contiguous(x, x.dtype());
  for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = static_cast<float>(factor) + 40;  // told from the written one by this
  return out;
}
FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "scale", scale); }
}  // namespace flexops
"""


@pytest.mark.extra
def test_a_hand_written_binding_takes_the_written_ones_place(package):
    run(CALL, package, FLEXOPS_FALLBACK="forbid")  # what is in the cache was made without it
    (package / "mylib/csrc/scale/scale_binding.cpp").write_text(HAND_WRITTEN)
    said = run(
        "import torch, mylib; print(mylib.scale(torch.ones(2), 2.0))",
        package,
        FLEXOPS_FALLBACK="forbid",
    )
    assert "tensor([42., 42.])" in said


@pytest.mark.extra
def test_a_projects_wheel_for_every_torch_and_linux(package, tmp_path, require):
    require(importlib.util.find_spec("ziglang"), "zig", f"pip install {zig.REQUIREMENT}")
    done = wheel(package, tmp_path, FLEXOPS_WHEEL="x86_64")
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = tmp_path.glob("*.whl")
    assert made.name == "mylib-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(made) as packed:
        packed.extractall(tmp_path / "site")
    said = run(
        CALL + WHERE, tmp_path / "site", FLEXOPS_JIT="0", FLEXOPS_CACHE_DIR=str(tmp_path / "none")
    )
    stable = toolchain.discover(settings.current(), device="cpu").torch
    assert (
        "aot" if stable and stable.stable_abi else "built for torch ABI stable-2.11, this is torch-"
    ) in said


@pytest.mark.slow
def test_a_wheel_built_in_isolation(package, tmp_path):
    """pip installs flexops and torch into an environment of the build's own: this flexops, from a
    wheel, and the torch that is here."""
    import torch

    flexops_wheel = pip(
        "wheel -q --no-deps --no-build-isolation -w", tmp_path / "links", REPOSITORY
    )
    subprocess.run(flexops_wheel, check=True)
    (tmp_path / "constraint.txt").write_text(f"torch=={torch.__version__}\n")
    # where the build's own environment looks, too
    links = " ".join(filter(None, (os.environ.get("PIP_FIND_LINKS"), str(tmp_path / "links"))))
    environment = {
        **os.environ,
        "PIP_CONSTRAINT": str(tmp_path / "constraint.txt"),
        "PIP_FIND_LINKS": links,
    }
    environment.pop("PYTHONPATH", None)
    command = pip("wheel -q --no-deps -w", tmp_path / "dist", package)
    completed(command, env=environment)
    (made,) = (tmp_path / "dist").iterdir()
    assert made.name.startswith("mylib-0.1.0-py3-none-linux_")
