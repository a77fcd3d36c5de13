"""``flexops.kernel`` compiled by NVRTC and launched through a driver that writes down what it is
asked for. Needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import c_library
from torch import Tensor

import flexops
from flexops import _torch, settings
from flexops.build.compile import device_code, kernel_compiler
from flexops.build.load import loader, provider
from flexops.build.load.loader import FallbackWarning
from flexops.build.plan import cache_key
from flexops.build.store import cache, cache_archive
from flexops.build.store.cache import BuildCache
from flexops.build.store.manifest import file_crc32
from flexops.errors import CompileError, FlexopsError, NativeUnavailableError, ToolchainError
from flexops.toolchain import libcuda

SCALE = """
template <typename T> __global__ void __launch_bounds__(256) scale(const T* x, T* out, float factor, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = T(float(x[i]) * factor);
}"""
SCHEMA = "build_kernels::scale(Tensor x, float factor) -> Tensor"

DRIVER = r"""
#include <string.h>
typedef struct { unsigned grid[3], block[3], shared; void* stream; void* attributes; unsigned count; } Config;
static __thread struct { Config config; unsigned cluster[3]; char parameters[256]; size_t size; void* kernel; int launches; } last;
int refuse = 0, contexts = 0, shared_allowed = 0, loads = 0, major = 9, is_text = 0;
static char symbol[256];
int cuLaunchKernelEx(const Config* config, void* kernel, void** parameters, void** extra) {
  if (refuse) { int status = refuse; refuse = 0; return status; }
  last.config = *config;
  last.kernel = kernel;
  if (config->count) memcpy(last.cluster, (char*)config->attributes + 8, 12);
  if (extra) { last.size = *(size_t*)extra[3]; memcpy(last.parameters, extra[1], last.size); }
  ++last.launches;
  return parameters ? 1 : 0;
}
void* recorded(void) { return &last; }
const char* loaded(void) { return symbol; }
int cuDeviceGetAttribute(int* value, int which, int device) { *value = which == 75 ? major : 0; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  ++loads;
  if (!memcmp((const char*)code + 4, "useless", 7)) return 200;
  is_text = memcmp(code, "\x7f" "ELF", 4) != 0;
  *library = (void*)code;
  return 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) { strcpy(symbol, name); *kernel = (void*)0x4242; return 0; }
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) { shared_allowed = value; return value > 232448; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)1; return 0; }
int cuCtxSetCurrent(void* context) { ++contexts; return 0; }
int cuGetErrorString(int status, const char** text) { *text = status == 1 ? "invalid argument" : "something else"; return 0; }
"""


class Recorded(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("cluster", ctypes.c_uint * 3),
        ("parameters", ctypes.c_char * 256),
        ("size", ctypes.c_size_t),
        ("kernel", ctypes.c_void_p),
        ("launches", ctypes.c_int),
    ]


class FakeDriver:
    """The stub, and what it was asked for last on this thread."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.recorded.restype = ctypes.POINTER(Recorded)
        self.library.loaded.restype = ctypes.c_char_p

    @property
    def last(self) -> Recorded:
        found: Recorded = self.library.recorded().contents
        return found

    def parameters(self, format_: str) -> tuple[Any, ...]:
        assert self.last.size == struct.calcsize(format_.rstrip("x"))
        return struct.unpack(
            format_,
            ctypes.string_at(
                ctypes.addressof(self.last) + Recorded.parameters.offset, self.last.size
            ),
        )

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, name)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory, host_compiler: Any) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    return c_library(host_compiler.path, folder / "libcuda.so.1", folder / "driver.c")


@pytest.fixture
def driver(stub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """The stub in the driver's place, and tensors of the CPU in those of a GPU's: what is launched
    is never run."""
    fake = FakeDriver(stub)
    real = libcuda.Driver(str(stub))
    monkeypatch.setattr(libcuda, "driver", lambda: real)
    monkeypatch.setattr(_torch, "current_gpu", lambda: -1)
    monkeypatch.setattr(_torch, "current_stream", lambda _: 77)
    monkeypatch.setattr(
        _torch,
        "empty_strided_cuda",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    )
    monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(tmp_path / "cache"))
    settings.current.cache_clear()
    for name in ("refuse", "contexts", "shared_allowed", "loads", "is_text"):
        fake.number(name).value = 0
    fake.number("major").value = 9
    yield fake
    settings.current.cache_clear()


def launched(kernel: flexops.Kernel) -> Callable[..., Any]:
    """What a call does for tensors on a GPU, whatever these are on."""
    run: Callable[..., Any] = kernel._code.native
    return run


def test_a_launch_gets_what_the_schema_says(driver):
    scale = flexops.kernel(SCALE, SCHEMA)
    x = torch.ones(1000, dtype=torch.bfloat16)
    out = launched(scale)(x, 2.5)
    assert driver.parameters("<QQf4xq") == (x.data_ptr(), out.data_ptr(), 2.5, 1000)
    assert (list(driver.last.grid), list(driver.last.block)) == ([4, 1, 1], [256, 1, 1])
    assert (driver.last.shared, driver.last.stream, driver.last.kernel, driver.last.count) == (
        0,
        77,
        0x4242,
        0,
    )
    assert b"scale" in driver.library.loaded()
    assert (out.dtype, out.shape) == (x.dtype, x.shape)


class Pretending(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_a_call_passes_the_dispatcher_by_where_nothing_needs_it(driver):
    asked: list[str] = []

    def reference(x: Tensor, factor: float) -> Tensor:
        # not what verifies it, on meta or zeros
        asked.extend(["dispatcher"] * (not x.is_meta and bool(x.any())))
        return x * factor

    scale = flexops.kernel(SCALE, SCHEMA, reference=reference)
    scale._code.names["_PLAIN"] = frozenset({Pretending})
    x = torch.ones(1000).as_subclass(Pretending)
    out = scale(x, factor=2.5)
    assert driver.parameters("<QQf4xq") == (x.data_ptr(), out.data_ptr(), 2.5, 1000)
    assert asked == []
    with torch.no_grad():
        scale(x.detach().as_subclass(Pretending).requires_grad_(), 1.0)
    assert asked == []
    before = driver.last.launches
    scale(torch.ones(3), 1.0)
    scale(x.detach().as_subclass(Pretending).requires_grad_(), 1.0)
    assert asked == ["dispatcher"] * 2

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seeing():
        scale(x, 1.0)
    assert "build_kernels.scale.default" in asked
    assert driver.last.launches == before


def test_each_dtype_is_compiled_once_and_found_again(driver, monkeypatch):
    scale = flexops.kernel(SCALE, SCHEMA)
    for dtype in (torch.float32, torch.float16, torch.float64, torch.float32):
        launched(scale)(torch.ones(8, dtype=dtype), 1.0)
    assert driver.number("loads").value == 3
    monkeypatch.setattr(
        device_code, "obtain", lambda *_, **__: pytest.fail("it was compiled before")
    )
    again = flexops.kernel(SCALE, SCHEMA)
    launched(again)(torch.ones(8), 1.0)
    assert driver.number("loads").value == 4


def test_grid_block_shared_cluster_and_sizes(driver):
    source = """
    extern __shared__ float buffer[];
    __global__ void rows(const float* x, const float* bias, float* out, int x_size1, long long x_stride0, bool last, double scale) {
      if (threadIdx.x == 0) out[blockIdx.x] = x[blockIdx.x * x_stride0] + (bias ? bias[0] : buffer[x_size1]) * scale * last;
    }"""
    rows = flexops.kernel(
        source,
        "rows(Tensor x, Tensor? bias=None, *, bool last=True) -> Tensor",
        grid=lambda x: (x.shape[0], 2),
        block=lambda x: [32, x.dim() * 2],
        shared=lambda x: 4 * x.shape[1],
        cluster=2,
        args={"scale": 0.5},
        out=lambda x: x.new_empty(x.shape[0]),
        strided=True,
    )
    x = torch.ones(6, 5, dtype=torch.float32)[:, :3]
    out = launched(rows)(x)
    assert driver.parameters("<QQQi4xq?7xd") == (x.data_ptr(), 0, out.data_ptr(), 3, 5, True, 0.5)
    assert (list(driver.last.grid), list(driver.last.block), driver.last.shared) == (
        [6, 2, 1],
        [32, 4, 1],
        12,
    )
    assert (driver.last.count, list(driver.last.cluster)) == (1, [2, 1, 1])
    bias = torch.ones(1)
    launched(rows)(torch.ones(2, 30000), bias, last=False)
    assert driver.parameters("<QQQi4xq?7xd")[1] == bias.data_ptr()
    assert driver.number("shared_allowed").value == 120000
    with pytest.raises(RuntimeError, match="400000 bytes of dynamic shared memory"):
        launched(rows)(torch.ones(2, 100000))


def test_tensors_are_made_contiguous_but_those_that_are_written(driver):
    scale = flexops.kernel(SCALE, SCHEMA)
    x = torch.ones(4, 6).t()
    out = launched(scale)(x, 1.0)
    assert driver.parameters("<QQf4xq")[0] != x.data_ptr()
    assert out.is_contiguous()
    fill = flexops.kernel(
        "__global__ void fill(float* y, float value, int n) { y[n - 1] = value; }",
        "fill(Tensor(a!) y, float value) -> ()",
    )
    assert launched(fill)(torch.ones(3), 1.0) is None
    with torch.inference_mode():
        launched(fill)(torch.ones(3), 1.0)
    saved = torch.ones(3, requires_grad=True) * 2
    loss = saved.square().sum()
    launched(fill)(saved.detach(), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="fill: y is written in place and must be contiguous"):
        launched(fill)(x, 1.0)


def test_nothing_is_launched_for_no_elements(driver):
    before = driver.last.launches
    assert launched(flexops.kernel(SCALE, SCHEMA))(torch.empty(0, 3), 1.0).shape == (0, 3)
    assert driver.last.launches == before


def test_wrong_arguments_are_named_before_a_launch(driver):
    source = (
        "__global__ void pick(const float* x, float* out, int which, uint8_t small) { out[0] ="
        " x[which + small]; }"
    )
    pick = launched(flexops.kernel(source, "pick(Tensor x, int which, int small) -> Tensor"))
    x = torch.ones(3)
    pick(x, 1, 2)
    before = driver.last.launches
    for args, error, said in (
        ((x, 2**31, 0), ValueError, "pick: int which cannot be 2147483648"),
        ((x, 0, 256), ValueError, "pick: uint8_t small cannot be 256"),
        ((x, 1.5, 0), (TypeError, ValueError), "pick: int which cannot be 1.5"),
        ((x.double(), 0, 0), TypeError, r"pick: x must be float32 \(float\*\), got float64"),
    ):
        with pytest.raises(error, match=said):  # type: ignore[call-overload]
            pick(*args)
    for grid in (lambda x: x.numel() / 2, lambda x: (1, 1, 1, x.numel()), lambda x: x):
        odd = flexops.kernel(source, "pick(Tensor x, int which, int small) -> Tensor", grid=grid)
        with pytest.raises(
            TypeError, match="pick: grid must be a whole number, or up to three of them, got"
        ):
            launched(odd)(x, 0, 0)
    askew = flexops.kernel(
        source,
        "pick(Tensor x, int which, int small) -> Tensor",
        out=lambda x: x.new_empty(2, 3).t(),
    )
    with pytest.raises(ValueError, match="pick: the result out must be contiguous"):
        launched(askew)(x, 0, 0)
    huge = flexops.kernel(
        source, "pick(Tensor x, int which, int small) -> Tensor", grid=lambda: 2**32
    )
    with pytest.raises(ValueError, match="pick: grid cannot be 4294967296"):
        launched(huge)(x, 0, 0)
    assert driver.last.launches == before


ROWS = """
template <typename T> __global__ void rows(const T* x, const T* weight, T* out, int parts, int64_t n) {}"""


@pytest.mark.parametrize("grid", [None, lambda parts: parts], ids=["cached", "computed"])
def test_shapes_and_checks_are_asked_in_every_call(driver, grid):
    def check(parts: int, x: Tensor) -> None:
        if parts < 1 or x.shape[-1] % parts:
            raise ValueError(f"rows: parts must divide {x.shape[-1]}, got {parts}")

    rows = flexops.kernel(
        ROWS,
        f"build_kernels::rows_{grid is None}(Tensor x, Tensor weight, int parts) -> Tensor",
        name="rows",
        grid=grid,
        shapes={"weight": "x[-1]"},
        check=check,
        reference=lambda x, weight: x * weight,
    )
    x, good, bad = torch.ones(4, 6), torch.ones(6), torch.ones(5)
    on_a_gpu = launched(rows)
    on_a_gpu(x, good, 2)
    before = driver.last.launches
    eager, compiled = (
        rows,
        torch.compile(lambda *args: rows(*args), fullgraph=True, backend="eager"),
    )
    for call in (on_a_gpu, eager, compiled, rows.op):
        with pytest.raises(Exception, match=r"weight must have shape \[6\], got \[(5|s\d+)\]"):
            call(x, bad, 2)
        with pytest.raises(Exception, match="parts must divide 6, got 4"):
            call(x, good, 4)
    with pytest.raises(ValueError, match=r"weight must have shape \[6\], got \[5\]"):
        rows(x.to("meta"), bad.to("meta"), 2)
    with pytest.raises(ValueError, match="x must have at least 1 dimension"):
        rows(torch.ones(()), good, 2)
    assert driver.last.launches == before
    torch.testing.assert_close(compiled(x, good, 3), x)


@pytest.mark.usefixtures("driver")
def test_a_reference_that_returns_something_else_is_an_error():
    for number, reference in enumerate(
        (lambda x: x.sum(), lambda x: x.double(), lambda factor: factor)
    ):
        schema = f"build_kernels::odd{number}(Tensor x, float factor) -> Tensor"
        odd = flexops.kernel(SCALE, schema, name="scale", reference=reference)
        with pytest.raises(FlexopsError, match="something else than the kernel") as caught:
            odd(torch.ones(3), 1.0)
        assert "required: float32 [3]" in str(caught.value)
        compiled = torch.compile(lambda x, odd=odd: odd(x, 1.0), backend="aot_eager")
        for call, device in ((odd, "meta"), (compiled, "cpu"), (launched(odd), "cpu")):
            with pytest.raises(Exception, match="something else than the kernel"):
                call(torch.ones(3, device=device), *(() if call is compiled else (1.0,)))


@pytest.mark.usefixtures("driver")
def test_a_reference_that_needs_values_or_many_steps_is_not_verified():
    for number, reference in enumerate(
        (lambda x: x[: int(x.sum())], lambda x: sum(x[i % 3] for i in range(1100)))
    ):
        schema = f"build_kernels::long{number}(Tensor x, float factor) -> Tensor"
        long = flexops.kernel(SCALE, schema, name="scale", reference=reference)
        assert launched(long)(torch.ones(3), 1.0).shape == (3,)
        with pytest.raises(FlexopsError, match="something else than the kernel"):
            long(torch.zeros(3), 1.0)


def test_what_the_driver_refuses_is_said_with_the_launch(driver):
    scale = flexops.kernel(SCALE, SCHEMA, block=lambda: (64, 32))
    driver.number("refuse").value = 1
    with pytest.raises(
        RuntimeError,
        match=(
            r"scale: CUDA error: invalid argument \(grid \(1, 1, 1\), block \(64, 32, 1\), 0"
            r" bytes.* at most 1024 threads"
        ),
    ):
        launched(scale)(torch.ones(3), 1.0)
    narrow = flexops.kernel(SCALE.replace("__launch_bounds__(256) ", ""), SCHEMA, block=512)
    driver.number("refuse").value = 701
    with pytest.raises(
        RuntimeError, match=r"block \(512, 1, 1\).*: fewer threads in a block, or __launch_bounds__"
    ):
        launched(narrow)(torch.ones(3), 1.0)
    source = f"constexpr int kMost = 128;{SCALE.replace('(256)', '(kMost)', 1)}"
    limited = flexops.kernel(source, SCHEMA)
    driver.number("refuse").value = 1
    with pytest.raises(RuntimeError, match=r"the kernel has __launch_bounds__\(kMost\)"):
        launched(limited)(torch.ones(3), 1.0)
    driver.number("refuse").value = 201  # a thread without a context
    launched(scale)(torch.ones(3), 1.0)
    assert driver.number("contexts").value == 1


@pytest.fixture
def poison(
    driver: FakeDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    require: Callable[..., None],
) -> Iterator[Path]:
    """A remote cache with an entry of ``SCALE``, whole by every digest, whose code is useless."""
    require(importlib.util.find_spec("obstore"), "obstore", "pip install obstore")
    launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(3), 1.0)
    assert driver.number("loads").value == 1
    (entry,) = BuildCache(tmp_path / "cache").entries()
    entry.library.write_bytes(b"\x7fELFuseless")
    manifest = entry.manifest._replace(
        size=11, crc32=file_crc32(entry.library), sha256=cache_key.file_digest(entry.library)
    )
    (entry.directory / "manifest.json").write_text(manifest.to_json())
    store = tmp_path / "store" / manifest.name
    store.mkdir(parents=True)
    assert cache_archive.export(BuildCache(tmp_path / "cache"), store / f"{manifest.key}.tar.gz")
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("FLEXOPS_CACHE_REMOTE", f"file://{tmp_path}/store")
    monkeypatch.setenv("FLEXOPS_CACHE_REMOTE_TIMEOUT", "300")
    monkeypatch.setattr(cache, "_rejected", set())
    settings.current.cache_clear()
    yield store
    if remote := loader.open_cache(settings.current()).remote:
        remote._pause("the test is over", forever=True)


def code_of(folder: Path) -> list[bytes]:
    return [entry.library.read_bytes() for entry in BuildCache(folder).entries()]


def test_useless_code_of_the_remote_cache_is_put_aside_and_compiled_once(
    driver, poison, tmp_path, monkeypatch
):
    """It stopped every reader, also when the store was gone."""
    compiled: list[Path] = []
    real = kernel_compiler.Worker.compile

    def counted(self: Any, plan: Any, output: Path, limit: float) -> Any:
        compiled.append(output)
        return real(self, plan, output, limit)

    monkeypatch.setattr(kernel_compiler.Worker, "compile", counted)
    assert len(list(poison.iterdir())) == 1
    scale = launched(flexops.kernel(SCALE, SCHEMA))
    scale(torch.ones(3), 1.0)
    assert driver.number("loads").value == 3, "the first, the useless one and its successor"
    assert len(compiled) == 1
    (code,) = code_of(tmp_path / "cache")
    assert b"useless" not in code
    (aside,) = (tmp_path / "cache" / ".quarantine").iterdir()
    assert b"useless" in next(aside.glob("*.cubin")).read_bytes()
    monkeypatch.setattr(cache, "_rejected", set())  # as in another process
    launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(3), 1.0)
    assert len(compiled) == 1
    aside_now = list((tmp_path / "cache" / ".quarantine").iterdir())
    assert aside_now == [aside], "what the store has is not fetched again"


def test_useless_code_that_an_older_flexops_has_fetched_is_put_aside(
    driver, poison, tmp_path, monkeypatch
):
    assert driver
    (archive,) = poison.iterdir()
    cache_archive.import_archive(BuildCache(tmp_path / "cache"), archive)
    monkeypatch.delenv("FLEXOPS_CACHE_REMOTE")
    settings.current.cache_clear()
    launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(3), 1.0)
    assert [b"useless" in code for code in code_of(tmp_path / "cache")] == [False]


def test_where_nothing_may_be_compiled_useless_code_is_named(driver, poison, tmp_path, monkeypatch):
    assert driver
    assert poison
    monkeypatch.setenv("FLEXOPS_JIT", "0")
    settings.current.cache_clear()
    for _ in range(2):
        with pytest.raises(NativeUnavailableError) as caught:
            launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(3), 1.0)
    assert caught.value.fix
    assert code_of(tmp_path / "cache") == []
    assert len(list((tmp_path / "cache" / ".quarantine").iterdir())) == 1, "it is fetched once"
    monkeypatch.setattr(cache, "_rejected", set())
    said = r"the driver rejects it: .*error 200.*; it was put aside"
    with pytest.raises(NativeUnavailableError, match=said):
        launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(3), 1.0)


def test_threads_do_not_share_a_buffer(driver):
    scale = launched(flexops.kernel(SCALE, SCHEMA))
    seen: list[bool] = []

    def work(factor: float) -> None:
        x = torch.ones(10)
        for _ in range(200):
            out = scale(x, factor)
            seen.append(driver.parameters("<QQf4xq") == (x.data_ptr(), out.data_ptr(), factor, 10))

    threads = [threading.Thread(target=work, args=(float(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 800
    assert all(seen)


def test_several_kernels_of_one_source_macros_types_and_headers(driver, tmp_path):
    (tmp_path / "mine.cuh").write_text(
        "#pragma once\n__device__ inline float twice(float x) { return 2 * x; }\n"
    )
    source = """
    #include "mine.cuh"
    #include "common/reduce.cuh"
    static_assert(TRUTH == 1);
    namespace mine {
    template <typename T, int kTile> __global__ void first(const T* x, T* out, int n) { if (threadIdx.x < kTile) out[0] += twice(x[0]) * TILE; }
    __global__ void second(const float16* x, bfloat16* out, int n) { out[0] = n ? x[0] * 2 : 0; }
    }"""
    first = flexops.kernel(
        source,
        "first(Tensor x) -> Tensor",
        include=[tmp_path],
        defines={"TILE": 8, "TRUTH": True},
        template={"kTile": 16},
    )
    second = flexops.kernel(
        source,
        "second_of_them(Tensor x) -> Tensor",
        name="second",
        include=[tmp_path],
        defines={"TILE": 8, "TRUTH": True},
        out=lambda x: x.bfloat16(),
    )
    launched(first)(torch.ones(3).bfloat16())
    assert first.expression(torch.ones(3).bfloat16()) == "mine::first<bfloat16, 16>"
    launched(second)(torch.ones(3).half())
    assert b"second" in driver.library.loaded()
    before = first.compile(torch.ones(3), arch="9.0")
    (tmp_path / "mine.cuh").write_text(
        "#pragma once\n__device__ inline float twice(float x) { return x + x + 1; }\n"
    )
    assert first.compile(torch.ones(3), arch="9.0") != before


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("body", "line", "said", "fix"),
    [
        (
            "out[i] = y[i];",
            'scale.cu(4): error: identifier "y" is undefined',
            "out[i] = y[i];",
            "correct the line named above",
        ),
        ("out[i] = __float2half(1.f);", "scale.cu(4): error", "__float2half", ""),
        ("__nv_bfloat16 v;", "scale.cu(4): error", "__nv_bfloat16", "write bfloat16"),
        (
            "out[i] = std::max(1, 2);",
            "scale.cu(4): error",
            "std",
            "the header of C++'s that declares it",
        ),
    ],
)
def test_an_error_shows_the_users_line_and_a_fix(body, line, said, fix):
    source = f"""
    __global__ void scale(const float* x, float* out, int i) {{
      // here
      {body}
    }}"""
    scale = flexops.kernel(
        source, "build_errors::scale(Tensor x, int i) -> Tensor", reference=lambda x, i: x + i
    )
    with pytest.raises(CompileError) as caught:  # a reference hides no mistake in a kernel
        launched(scale)(torch.ones(3), 0)
    text = str(caught.value)
    assert line in text
    shown = text.splitlines()
    at = next(number for number, one in enumerate(shown) if line in one)
    assert said in shown[at + 1]
    assert shown[at + 2].strip() == "^"
    assert fix in caught.value.fix


@pytest.mark.usefixtures("driver")
def test_an_error_in_a_header_is_not_one_of_the_source(tmp_path):
    (tmp_path / "twice.h").write_text("template <class T> T twice(T x) { return x.value * 2; }\n")
    source = '#include "twice.h"\n' + SCALE.replace("float(x[i])", "twice(float(x[i]))")
    with pytest.raises(CompileError) as caught:
        launched(flexops.kernel(source, SCHEMA, include=[tmp_path]))(torch.ones(3), 1.0)
    assert caught.value.fix.startswith("the error is in twice.h, not in your source")


@pytest.mark.usefixtures("driver")
def test_a_header_that_is_missing_says_where_it_could_come_from():
    for source, options, fix in (
        ('#include "mine.h"\n' + SCALE, [], "include=["),
        ("#include <cutlass/array.h>\n" + SCALE, [], "the include directory of CUTLASS"),
        (SCALE, ["--nonsense"], "correct options="),
    ):
        with pytest.raises(CompileError) as caught:
            launched(flexops.kernel(source, SCHEMA, options=options))(torch.ones(3), 1.0)
        assert fix in caught.value.fix


def test_an_error_in_a_header_of_cudas_names_the_use():
    source = """#include <cuda_fp16.h>
    __global__ void use(const float* x, float* out) {
      out[0] = __half(x).x;
    }"""
    with pytest.raises(CompileError) as caught:
        flexops.kernel(source, "use(Tensor x) -> Tensor").compile(torch.ones(1), arch="9.0")
    assert "correct the line named above" in caught.value.fix
    source = source.replace("cuda_fp16.h", "cuda/std/array").replace(
        "__half(x).x", "cuda::std::get<3>(cuda::std::array<float, 2>{x[0], x[1]})"
    )
    with pytest.raises(CompileError) as caught:
        flexops.kernel(source, "use(Tensor x) -> Tensor").compile(torch.ones(1), arch="9.0")
    assert caught.value.fix == "correct how use.cu(3) uses what that header declares"


LIBRARIES = {
    "standard": (
        "#include <cstdint>\n#include <cmath>\n#include <type_traits>",
        "static_assert(std::is_same_v<std::int64_t, int64_t>); out[0] = std::sqrt(x[0]) + pow(x[0], 2);",
    ),
    "runtime": (
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>",
        "out[0] = __bfloat162float(__float2bfloat16(x[0])) + __half2float(__float2half(x[1]));",
    ),
    "groups": (
        "#include <cmath>\n#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>",
        """namespace groups = cooperative_groups;
        auto warp = groups::tiled_partition<32>(groups::this_thread_block());
        out[0] = groups::reduce(warp, std::abs(x[threadIdx.x]), groups::plus<float>());""",
    ),
    "libcu++": (
        "#include <cstdint>\n#include <cuda/atomic>\n#include <cuda/std/limits>",
        """static_assert(sizeof(int64_t) == 8 && cuda::std::numeric_limits<std::int64_t>::is_integer);
        cuda::atomic_ref<float, cuda::thread_scope_device>(out[0]).fetch_add(x[0]);""",
    ),
    "CUB": (
        "#include <cub/cub.cuh>\n#include <limits>",
        """using Reduce = cub::BlockReduce<float, 256>;
        __shared__ typename Reduce::TempStorage storage;
        const float sum = Reduce(storage).Sum(x[threadIdx.x]);
        if (threadIdx.x == 0) out[0] = sum + std::numeric_limits<float>::min();""",
    ),
}


@pytest.mark.parametrize(
    "library",
    [
        one if one in ("standard", "runtime") else pytest.param(one, marks=pytest.mark.extra)
        for one in LIBRARIES
    ],
)
def test_libraries_of_cpp_and_cuda_are_there_without_nvcc(library):
    headers, body = LIBRARIES[library]
    source = f"{headers}\n__global__ void use(const float* x, float* out, int64_t n) {{ {body} }}"
    kernel = flexops.kernel(source, "use(Tensor x) -> Tensor")
    assert kernel.compile(torch.ones(256, device="meta"), arch="9.0")


@pytest.mark.usefixtures("driver")
def test_without_a_compiler_the_reference_runs_or_the_error_says_why(
    monkeypatch,
):
    monkeypatch.setenv("FLEXOPS_JIT", "0")
    settings.current.cache_clear()
    scale = flexops.kernel(SCALE, SCHEMA, reference=lambda x, factor: x * factor)
    with pytest.warns(FallbackWarning, match="build_kernels::scale runs as plain PyTorch"):
        assert torch.equal(launched(scale)(torch.ones(2), 2.0), torch.full((2,), 2.0))
    alone = flexops.kernel(SCALE, SCHEMA)
    with pytest.raises(NativeUnavailableError, match="FLEXOPS_JIT=0"):
        launched(alone)(torch.ones(2), 2.0)
    monkeypatch.delenv("FLEXOPS_JIT")
    settings.current.cache_clear()
    flexops.kernel(SCALE, SCHEMA).compile(torch.ones(2), 2.0, arch="9.0")
    monkeypatch.setenv("FLEXOPS_JIT", "0")
    settings.current.cache_clear()
    assert launched(alone)(torch.ones(2), 2.0).shape == (2,)


def test_a_call_with_too_few_arguments_names_the_operator():
    scale = flexops.kernel(SCALE, SCHEMA, reference=lambda x, factor: x * factor)
    missing = r"^scale\(\) missing 1 required positional argument: 'factor'"
    for call in (scale, scale.compile, scale.expression):
        with pytest.raises(TypeError, match=missing):
            call(torch.ones(2))  # type: ignore[operator]


@pytest.mark.parametrize("defines", [{"A-B": 1}, {3: 1}, {"": 1}])
def test_a_macro_has_a_name(defines):
    with pytest.raises(FlexopsError, match="required: a mapping of macros' names"):
        flexops.kernel(SCALE, SCHEMA, defines=defines)
    flexops.kernel(SCALE, SCHEMA, defines={"twice(x)": "(2 * (x))"})


def test_compile_does_not_take_nvcc_for_nvrtc(monkeypatch):
    """nvcc compiles what NVRTC rejects where the kernel is called: C++'s library, say."""
    known = provider.compiler_for

    def without_nvrtc(*args: Any, **options: Any) -> provider.CompilerChoice:
        choice = known(*args, **options)
        nvcc = choice.compiler._replace(kind="nvcc", path=Path("/nowhere/nvcc"))
        return choice._replace(compiler=nvcc)

    monkeypatch.setattr(provider, "compiler_for", without_nvrtc)
    with pytest.raises(
        ToolchainError, match="scale cannot be verified: there is no NVRTC"
    ) as caught:
        flexops.kernel(SCALE, SCHEMA).compile(torch.ones(2), 2.0, arch="9.0")
    assert "pip install" in caught.value.fix


def test_a_gpu_newer_than_the_compiler_gets_ptx(driver, logged):
    driver.number("major").value = 15
    launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(8), 1.0)
    assert driver.number("is_text").value == 1
    assert "newer than" in logged.getvalue()
    driver.number("major").value = 9
    launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(8), 1.0)
    assert driver.number("is_text").value == 0


@pytest.mark.usefixtures("driver")
def test_a_hanging_compiler_is_stopped(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(kernel_compiler, "_WORKER", worker)
    monkeypatch.setenv("FLEXOPS_COMPILE_TIMEOUT", "1")
    settings.current.cache_clear()
    with pytest.raises(CompileError, match="not done after 1 s"):
        launched(flexops.kernel(SCALE, SCHEMA))(torch.ones(2), 2.0)


@pytest.mark.usefixtures("driver")
def test_what_a_kernel_takes_is_in_its_manifest():
    source = """
    __global__ void hungry(const float* x, float* out) {
      __shared__ float tile[64];
      tile[threadIdx.x] = x[threadIdx.x];
      __syncthreads();
      out[threadIdx.x] = tile[63 - threadIdx.x];
    }
    __global__ void modest(float* out) { out[0] = 1; }"""
    hungry = flexops.kernel(source, "hungry(Tensor x) -> Tensor")
    found = hungry.resources(torch.ones(64), arch="8.0;9.0+PTX")
    assert list(found) == ["8.0", "9.0", "compute_90"]
    assert (found["8.0"]["shared"], found["8.0"]["spill_stores"], found["8.0"]["stack"]) == (
        256,
        0,
        0,
    )
    assert found["9.0"]["registers"] > 0
    assert found["compute_90"] == {}, "PTX has no registers yet"


def test_the_oldest_nvrtc_takes_our_types(tmp_path, nvrtc_of):
    from flexops.build.store.cache import BuildCache
    from flexops.compute_capability import parse_arch_list

    compiler = nvrtc_of((12, 1))
    scale = flexops.kernel(SCALE, SCHEMA)
    plans = [
        scale._code.text_kernel(f"scale<{type_}>").plan(parse_arch_list(arch)[0], compiler)
        for type_, arch in (("bfloat16", "8.0"), ("float16", "7.0"), ("bfloat16", "9.0"))
    ]
    assert [
        result.require().manifest.compiler
        for result in device_code.obtain(plans, BuildCache(tmp_path))
    ] == ["NVRTC 12.1"] * 3


@pytest.mark.usefixtures("driver")
def test_torch_compile_calls_the_kernel_as_one_operator():
    def reference(x: Tensor, factor: float) -> Tensor:
        return x * factor

    scale = flexops.kernel(
        SCALE, "compiled_kernels::scale(Tensor x, float factor) -> Tensor", reference=reference
    )
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: scale(x.relu(), 2.0) + 1, fullgraph=True, dynamic=True, backend=keep)(
        torch.ones(4)
    )
    assert "compiled_kernels.scale" in graphs[0].code
    inductor = torch.compile(lambda x: scale(x.relu(), 2.0) + 1, fullgraph=True)
    assert torch.equal(inductor(torch.ones(4)), torch.full((4,), 3.0))
