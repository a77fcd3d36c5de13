"""A kernel's first launch where it is hardest: in CUDA graph capture, on several threads at once,
in a forked child, on a second device, and where nothing may be compiled. Each in a process of its
own that has the family's host library, and none of its kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import completed

pytestmark = pytest.mark.gpu

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
START = """
import threading, os, torch, flexops
torch.manual_seed(0)

def make(device="cuda"):
    angles = torch.rand(33, 32, device=device) * 6.28
    return torch.randn(2, 3, 33, 64, device=device), angles.cos(), angles.sin()

def call(query, cos, sin):
    return flexops.rotary_embedding(query, None, cos, sin)[0]

def expected(query, cos, sin):
    a, b = query.double().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).float()

def native():
    return {one.device: one.backend for one in flexops.status() if one.op == "rope"}["cuda"] in ("aot", "jit")
"""


def _child(program: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {
        **os.environ,
        "FLEXOPS_CACHE_DIR": str(cache),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        **environment,
    }
    return completed([sys.executable, "-c", START + textwrap.dedent(program)], env=known, code=None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has rope's and Adam's libraries for CUDA and their kernels for the GPU here, but
    the rare ones."""
    cache = tmp_path_factory.mktemp("built") / "cache"
    completed(
        [sys.executable, "-m", "flexops", "build", "rope", "adam"],
        env={**os.environ, "FLEXOPS_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
    )
    return cache


@pytest.fixture
def run(built: Path, tmp_path: Path) -> Run:
    """``run(program)``: the program, with the library and no kernel; ``kernels=True`` leaves them
    there."""

    def start(
        program: str, *, kernels: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        cache = Path(tempfile.mkdtemp(dir=tmp_path)) / "cache"
        shutil.copytree(
            built,
            cache,
            ignore=(
                None
                if kernels
                else lambda _, names: [name for name in names if name.startswith("rope-sm_")]
            ),
        )
        return _child(program, cache, **environment)

    return start


def _fine(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def test_in_graph_capture(run):
    _fine(run("""
        arguments = make()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(*arguments)
        assert native()
        arguments[0].normal_()
        graph.replay()
        torch.testing.assert_close(result, expected(*arguments))
    """))  # fmt: skip


def test_another_kernel_of_a_library_that_is_loaded_in_graph_capture(run):
    _fine(run("""
        arguments = make()
        call(*arguments)
        half = [one.half() for one in arguments]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(*half)
        half[0].normal_()
        graph.replay()
        torch.testing.assert_close(result.float(), expected(half[0], *(one.double() for one in half[1:])), rtol=2e-3, atol=2e-3)
    """))  # fmt: skip


def test_on_several_threads_at_once(run):
    _fine(run("""
        arguments = make()
        wanted, found, start = expected(*arguments), [], threading.Barrier(8)
        def one():
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                result = call(*arguments)
                torch.cuda.current_stream().synchronize()
            torch.testing.assert_close(result, wanted)
            found.append(1)
        torch.cuda.synchronize()
        threads = [threading.Thread(target=one) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 8 and native()
    """))  # fmt: skip


def test_in_the_backward_pass(run):
    """On a thread of autograd's."""
    _fine(run("""
        query, cos, sin = make()
        query.requires_grad_()
        out = call(query, cos, sin)
        out.backward(torch.ones_like(out))
        ones = torch.ones_like(query)
        torch.testing.assert_close(query.grad, expected(ones, cos, -sin))
        assert native()
    """))  # fmt: skip


def test_in_a_forked_child(run):
    _fine(run("""
        flexops.rotary_embedding(*[torch.rand(s) for s in ((1, 1, 4, 8),)], None, torch.rand(4, 4), torch.rand(4, 4))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                arguments = make()
                torch.testing.assert_close(call(*arguments), expected(*arguments))
                code = 0 if native() else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """))  # fmt: skip


def test_without_compiling_there_is_the_reference_and_its_reason(run):
    done = run(
        """
        arguments = make()
        torch.testing.assert_close(call(*arguments), expected(*arguments))
        print(next(one for one in flexops.status() if (one.op, one.device) == ("rope", "cuda")))
        """,
        FLEXOPS_JIT="0",
    )
    _fine(done)
    assert "reference" in done.stdout
    assert "not compiled for a GPU of capability" in done.stdout
    assert "flexops build rope" in done.stdout


def test_without_compiling_and_without_the_reference_it_is_an_error(run):
    done = run("call(*make())", FLEXOPS_JIT="0", FLEXOPS_FALLBACK="forbid")
    assert "NativeUnavailableError" in done.stderr
    assert "not compiled for a GPU of capability" in done.stderr


def test_kernels_that_are_there_need_no_compiling(run):
    _fine(
        run(
            """
        arguments = make()
        torch.testing.assert_close(call(*arguments), expected(*arguments))
        assert native()
    """,
            kernels=True,
            FLEXOPS_JIT="0",
            FLEXOPS_FALLBACK="forbid",
            PATH="/nonexistent",
        )
    )


def test_without_compiling_the_reference_stands_in_for_a_rare_kernel(run):
    done = run("""
        query, cos, sin = make()
        apart = (query[..., :63:2], cos[:, :16], sin[:, :16])  # strides that no vector fits
        torch.testing.assert_close(call(*apart), expected(*apart))
        torch.testing.assert_close(torch.compile(call)(*apart), expected(*apart))
        torch.testing.assert_close(call(query, cos, sin), expected(query, cos, sin))
        assert any(one.backend in ("aot", "jit") for one in flexops.status() if (one.op, one.device) == ("rope", "cuda"))
    """, kernels=True, FLEXOPS_JIT="0")  # fmt: skip
    _fine(done)
    assert "rotate_elements" in done.stderr
    assert "--rare" in done.stderr
    refused = run(
        "query, cos, sin = make(); call(query[..., :63:2], cos[:, :16], sin[:, :16])",
        kernels=True,
        FLEXOPS_JIT="0",
        FLEXOPS_FALLBACK="forbid",
    )
    assert "NativeUnavailableError" in refused.stderr


def test_a_step_whose_rare_kernel_is_missing_is_made_once(run):
    """Parameters whose kernel is there are not stepped before the reference steps all of them."""
    _fine(run("""
        import copy
        of = [torch.float32, torch.bfloat16, torch.float16]
        params = [torch.randn(100, device="cuda", dtype=dtype) for dtype in of]
        grads, averages, squares = ([torch.rand_like(param) for param in params] for _ in range(3))
        steps = [torch.ones((), device="cuda") for _ in params]
        lists = (params, grads, averages, squares, [], steps)
        wanted = copy.deepcopy(lists)
        flexops.adam_(*lists, lr=0.1, weight_decay=0.1)
        from flexops.ops import adam
        numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        adam._reference(*wanted, **numbers, amsgrad=False, maximize=False, decoupled=False)
        for ours, theirs in zip(sum(map(list, lists), []), sum(map(list, wanted), [])):
            torch.testing.assert_close(ours, theirs)
    """, kernels=True, FLEXOPS_JIT="0", FLEXOPS_FALLBACK="allow"))  # fmt: skip


@pytest.mark.usefixtures("two_gpus")
def test_on_a_second_device(run):
    _fine(run("""
        for device in ("cuda:1", "cuda:0"):
            arguments = make(device)
            torch.testing.assert_close(call(*arguments), expected(*arguments))
        assert native()
    """))  # fmt: skip
