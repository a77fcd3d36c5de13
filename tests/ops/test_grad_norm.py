"""flexops.grad_norm, flexops.clip_grads_ and flexops.optim.clip_grad_norm_."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import ISA_LEVELS, isa_limit
from step_contract import DTYPES, LAYOUTS, ON_BOTH, OPCHECKS, SHAPES, compiles_written_lists
from torch import Tensor

import flexops
from flexops import optim
from flexops.bench.reference import OnReference

# torch has no largest element of an empty tensor
FILLED = [shape for shape in SHAPES if 0 not in shape]
NORMS = [2.0, math.inf, 1.0, 3.0, 0.5]


@pytest.fixture(autouse=True)
def _native(request: pytest.FixtureRequest, native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("grad_norm", "cuda" if request.node.get_closest_marker("gpu") else "cpu")


def make(
    device: str, dtype: torch.dtype = torch.float32, shapes: list[Any] = SHAPES, scale: float = 1.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator) * scale).to(dtype).to(device) for shape in shapes
    ]


def with_grads(grads: list[Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def exact(grads: list[Tensor], norm_type: float) -> float:
    return float(
        torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), norm_type)
    )


@ON_BOTH
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_float64s(dtype, norm_type, device):
    for shapes in (SHAPES, [(300_001,)], [(0,)], [(5,)]):
        grads = make(device, dtype, shapes)
        norm = flexops.grad_norm(grads, norm_type)
        assert norm.dtype == torch.float32
        assert norm.shape == ()
        assert norm.device == grads[0].device
        wanted = exact(grads, norm_type) if any(grad.numel() for grad in grads) else 0.0
        assert float(norm) == pytest.approx(wanted, rel=2e-6 if norm_type >= 1 else 1e-5)
        with OnReference():
            # torch adds up powers less exactly, with one thread all in one sum
            rel = 1e-4 if norm_type >= 1 else 1e-3
            assert float(flexops.grad_norm(grads, norm_type)) == pytest.approx(wanted, rel=rel)


@ON_BOTH
def test_mixed_dtypes(device):
    grads = [grad for dtype in DTYPES for grad in make(device, dtype)]
    norm = flexops.grad_norm(grads)
    assert float(norm) == pytest.approx(exact(grads, 2.0), rel=1e-6)
    expected = [grad.float() * (1.0 / (norm + 1e-6)) for grad in grads]
    flexops.clip_grads_(grads, norm, 1.0)
    for left, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(
            left,
            right.to(left.dtype),
            rtol=2e-6 if left.dtype == torch.float32 else None,
            atol=1e-7 if left.dtype == torch.float32 else None,
        )


@ON_BOTH
# which overflows in torch
@pytest.mark.parametrize(
    ("dtype", "norm_type"),
    [(d, p) for d in DTYPES for p in NORMS if (d, p) != (torch.float16, 0.5)],
)
def test_clips_as_torch_does(dtype, norm_type, device):
    exactly = dtype == torch.float32
    for max_norm in (0.0, 0.5, 1e9, math.inf):
        params, expected = (
            with_grads(make(device, dtype, FILLED)),
            with_grads(make(device, dtype, FILLED)),
        )
        params[2].grad = expected[2].grad = None
        norm = optim.clip_grad_norm_(params, max_norm, norm_type)
        theirs = torch.nn.utils.clip_grad_norm_(expected, max_norm, norm_type)
        torch.testing.assert_close(norm, theirs.float(), rtol=1e-5 if exactly else 2e-2, atol=1e-6)
        for left, right in zip(params, expected, strict=True):
            if left.grad is not None:
                torch.testing.assert_close(
                    left.grad,
                    right.grad,
                    rtol=2e-5 if exactly else 2e-2,
                    atol=1e-7 if exactly else 1e-3,
                )


@ON_BOTH
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 3.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_as_in_torch(value, norm_type, device):
    for where in (0, 5000, 16384):
        results = []
        for clip in (optim.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            params = with_grads(make(device, shapes=FILLED))
            params[-1].grad[where] = value
            results.append((clip(params, 1.0, norm_type), [param.grad for param in params]))
        (norm, grads), (wanted, others) = results
        torch.testing.assert_close(norm, wanted, equal_nan=True)
        for left, right in zip(grads, others, strict=True):
            torch.testing.assert_close(left, right, equal_nan=True)
        with pytest.raises(
            RuntimeError, match=r"total norm of order .* is non-finite, so it cannot be clipped"
        ):
            optim.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)


@ON_BOTH
def test_parameters_may_come_in_any_way(device):
    grads = make(device)
    wanted = exact(grads, 2.0)
    params = with_grads([grad.clone() for grad in grads])
    assert float(
        optim.clip_grad_norm_((param for param in params), 1e9, 2, foreach=True)
    ) == pytest.approx(wanted)
    assert float(optim.clip_grad_norm_(params[1], 1e9)) == pytest.approx(exact(grads[1:2], 2.0))
    assert float(optim.clip_grad_norm_([], 1.0)) == 0.0
    assert float(optim.clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0)) == 0.0
    with pytest.warns(UserWarning, match="empty generator"):
        optim.clip_grad_norm_((param for param in params[:0]), 1.0)


@ON_BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_strides(layout, device):
    for dtype in DTYPES:
        (grad,) = make(device, dtype, [(137, 241)])
        odd = LAYOUTS[layout](grad.clone())
        assert float(flexops.grad_norm([odd])) == pytest.approx(
            float(flexops.grad_norm([grad])), rel=1e-6
        )
        norm = flexops.grad_norm([grad])
        flexops.clip_grads_([odd], norm, 1.0)
        flexops.clip_grads_([grad], norm, 1.0)
        torch.testing.assert_close(odd, grad, rtol=0, atol=0)
    shared = torch.ones(1, 50, device=device).expand(40, 50)
    assert float(flexops.grad_norm([shared])) == pytest.approx(math.sqrt(2000))


@ON_BOTH
def test_the_same_bits_twice(device):
    grads = make(device, shapes=[(1_000_003,), (5,)])
    norms = {float(flexops.grad_norm(grads, p)) for p in (2.0,) for _ in range(3)}
    if device == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        norms.add(float(flexops.grad_norm(grads)))
        torch.set_num_threads(threads)
    assert len(norms) == 1


def test_what_flexops_does_not_take_is_left_to_torch():
    for grads in (
        make("cpu", torch.float64),
        [torch.randn(9, dtype=torch.complex64)],
        [*make("cpu"), torch.randn(3, dtype=torch.float64)],
    ):
        params, expected = (
            with_grads([grad.clone() for grad in grads]),
            with_grads([grad.clone() for grad in grads]),
        )
        torch.testing.assert_close(
            optim.clip_grad_norm_(params, 0.5), torch.nn.utils.clip_grad_norm_(expected, 0.5)
        )
        for left, right in zip(params, expected, strict=True):
            torch.testing.assert_close(left.grad, right.grad)
    params, expected = with_grads(make("cpu")), with_grads(make("cpu"))
    torch.testing.assert_close(
        optim.clip_grad_norm_(params, 0.5, 0.0), torch.nn.utils.clip_grad_norm_(expected, 0.5, 0.0)
    )


def test_it_may_be_put_in_place_of_torchs(monkeypatch):
    params, expected = (
        with_grads([*make("cpu"), torch.ones(3, dtype=torch.float64)]) for _ in range(2)
    )
    wanted = torch.nn.utils.clip_grad_norm_(expected, 0.5)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(params, 0.5), wanted)


def test_wrong_arguments_are_named():
    grads: list[Any] = make("cpu")
    with pytest.raises(
        ValueError, match=r"flexops.grad_norm: norm_type must be more than 0 .*got -1"
    ):
        flexops.grad_norm(grads, -1)
    with pytest.raises(
        TypeError,
        match=r"flexops.grad_norm: grads\[1\] must be float32, float16 or bfloat16, got float64",
    ):
        flexops.grad_norm([grads[0], grads[1].double()])
    with pytest.raises(
        TypeError, match=r"flexops.clip_grads_: grads\[1\] must be a tensor, got NoneType"
    ):
        flexops.clip_grads_([grads[0], None], torch.ones(()), 1.0)
    with pytest.raises(
        TypeError, match=r"flexops.clip_grads_: total_norm must be a float32 tensor of one element"
    ):
        flexops.clip_grads_(grads, torch.ones(2), 1.0)


@pytest.mark.parametrize(("call", "message"), [
    (lambda _, __: flexops.clip_grads_(None, torch.ones(()), 1.0),
     "clip_grads_: grads must be a list"),
    (lambda grads, _: flexops.clip_grads_(grads, None, 1.0),
     "clip_grads_: total_norm must be a float32"),
    (lambda grads, _: flexops.clip_grads_(grads, 1.0, 1.0),
     "clip_grads_: total_norm must be a float32"),
    (lambda grads, _: flexops.clip_grads_(grads, torch.ones(()), None),
     "max_norm must be a number, got None"),
    (lambda grads, _: flexops.grad_norm(grads, "2"), "norm_type must be a number, got '2'"),
    (lambda _, __: optim.clip_grad_norm_(None, 1.0),
     "parameters must be tensors, got NoneType. fix: "),
    (lambda _, params: optim.clip_grad_norm_([*params, None], 1.0),
     r"parameters\[\d+\] must be a tensor"),
    (lambda _, params: optim.clip_grad_norm_(params, None),
     "clip_grad_norm_: max_norm must be a number"),
    (lambda _, params: optim.clip_grad_norm_(params, 1.0, None),
     "clip_grad_norm_: norm_type must be a number"),
])  # fmt: skip
def test_what_is_no_tensor_or_number_is_named(call, message):
    params = with_grads(make("cpu"))
    with pytest.raises(TypeError, match=f"flexops.*{message}"):
        call(make("cpu"), params)


@ON_BOTH
def test_opcheck(device):
    grads = make(device, shapes=SHAPES[:4])
    torch.library.opcheck(torch.ops.flexops.grad_norm.default, (grads, 2.0))
    torch.library.opcheck(torch.ops.flexops.grad_norm.default, (grads, math.inf))
    torch.library.opcheck(
        torch.ops.flexops.clip_grads_.default,
        (grads, torch.ones((), device=device), 0.5),
        test_utils=OPCHECKS,
    )


@ON_BOTH
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic, device):
    def clip(grads: list[Tensor]) -> Tensor:
        norm = flexops.grad_norm(grads)
        flexops.clip_grads_(grads, norm, 0.5)
        return norm * 2

    grads, expected = make(device, shapes=SHAPES[:2]), make(device, shapes=SHAPES[:2])
    torch._dynamo.reset()
    compiled = torch.compile(
        clip,
        fullgraph=compiles_written_lists,
        dynamic=dynamic,
        backend="inductor" if device == "cuda" else "aot_eager",
    )
    torch.testing.assert_close(compiled(grads), clip(expected))
    for left, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(left, right)
    torch._dynamo.reset()


@pytest.mark.extra
@pytest.mark.parametrize("isa", ISA_LEVELS[:2])  # the best one is what every other test runs
def test_lower_instruction_sets(isa):
    with isa_limit(isa):
        for dtype in DTYPES:
            for norm_type in NORMS:
                test_norm_is_float64s(dtype, norm_type, "cpu")
                if (dtype, norm_type) != (torch.float16, 0.5):
                    test_clips_as_torch_does(dtype, norm_type, "cpu")


@pytest.mark.gpu
def test_cuda_never_waits_for_the_device():
    params = with_grads(make("cuda"))
    optim.clip_grad_norm_(params, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optim.clip_grad_norm_(params, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_graph():
    params = with_grads(make("cuda"))
    start = [param.grad.clone() for param in params]
    optim.clip_grad_norm_(params, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = optim.clip_grad_norm_(params, 1.0)
    for factor in (2.0, 3.0):
        for param, grad in zip(params, start, strict=True):
            param.grad.copy_(grad * factor)
        graph.replay()
        assert float(norm) == pytest.approx(factor * exact(start, 2.0), rel=1e-6)
        assert exact([param.grad for param in params], 2.0) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.gpu
def test_cuda_more_tensors_than_one_launch_holds():
    grads = make("cuda", shapes=[(17 + i % 40,) for i in range(5000)])
    expected = torch.cat(grads)
    norm = flexops.grad_norm(grads)
    assert float(norm) == pytest.approx(float(expected.double().norm()), rel=1e-6)
    flexops.clip_grads_(grads, norm, 1.0)
    torch.testing.assert_close(torch.cat(grads), expected / (norm + 1e-6))


@pytest.mark.gpu
def test_cuda_gradients_on_cpu_and_gpu():
    grads = [*make("cuda", shapes=[(100,)]), *make("cpu", shapes=[(50,)])]
    params = with_grads([grad.clone() for grad in grads])
    wanted = math.hypot(exact(grads[:1], 2.0), exact(grads[1:], 2.0))
    assert float(optim.clip_grad_norm_(params, 1.0)) == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(params[1].grad, grads[1] / wanted)


@pytest.mark.gpu
def test_cuda_more_than_2_to_31_elements(require_gpu_memory):
    count = 2**31 + 12_345
    require_gpu_memory(3 * count)
    grad = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    grad[0], grad[2**31 + 1], grad[-1] = 3.0, 4.0, 12.0
    norm = flexops.grad_norm([grad])
    assert float(norm) == 13.0
    flexops.clip_grads_([grad], norm, 6.5)
    assert (grad[0].item(), grad[2**31 + 1].item(), grad[-1].item()) == (1.5, 2.0, 6.0)
