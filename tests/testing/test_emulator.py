"""``flexops.testing.emulate``: a kernel's results on the CPU, and what it does wrong."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

import flexops
from flexops import settings
from flexops.build.load import loader
from flexops.errors import ArchitectureError
from flexops.testing import EmulationError, emulate
from flexops.testing.emulator import ptx

SUMS = r"""
__global__ void sums(const float* x, float* out, int x_size1, int which) {
  __shared__ float part[8];
  float sum = 0;
  for (int i = threadIdx.x; i < x_size1; i += blockDim.x) sum += x[blockIdx.x * x_size1 + i];
  for (int lanes = 16; lanes; lanes >>= 1) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0 && which != 1) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) total += part[warp];
  out[blockIdx.x] = total;
  if (which == 2) out[gridDim.x] = total;
}
"""


def sums(**options: object) -> flexops.Kernel:
    return flexops.kernel(
        SUMS,
        "emulated::sums(Tensor x, int which=0) -> Tensor",
        out=lambda x: x.new_empty(x.shape[0]),
        grid=lambda x: x.shape[0],
        block=64,
        **options,
    )


@pytest.mark.usefixtures("host_compiler")
def test_results_and_what_a_kernel_does_wrong_with_the_line_of_the_source():
    kernel, x = sums(), torch.randn(3, 100)
    torch.testing.assert_close(emulate(kernel, x), x.sum(1))
    torch.testing.assert_close(emulate(kernel, x, reverse=True), x.sum(1))
    with pytest.raises(
        EmulationError, match=r"sums: byte 0 of shared memory was never written, in block \(0, 0, 0"
    ) as caught:
        emulate(kernel, x, which=1)
    assert "sums.cu, line 11: " in str(caught.value)
    with pytest.raises(EmulationError, match=r"4 bytes at 0x\w+ are out of bounds") as caught:
        emulate(kernel, x, 2)
    assert "sums.cu, line 13: " in str(caught.value)


@pytest.mark.usefixtures("host_compiler")
def test_what_is_not_emulated_has_a_fix():
    for number, (line, fix) in enumerate(
        (
            ("assert(x[0] > 1);", "-DNDEBUG"),
            ('printf("%d", n);', "remove printf"),
            ("x[1] = pow(2.0, double(x[2]));", "have the function inlined"),
        )
    ):
        source = f"__global__ void said(float* x, int n) {{ {line} x[0] = 2; }}"
        schema = f"emulated::said{number}(Tensor(a!) x) -> ()"
        with pytest.raises(EmulationError, match=f"cannot be emulated(.|\\n)*fix: .*{fix}"):
            emulate(flexops.kernel(source, schema, name="said", grid=1, block=1), torch.zeros(3))
    x = torch.zeros(3)
    source = "__global__ void said(float* x) { assert(x[0] > 1); x[0] = 2; }"
    quiet = flexops.kernel(source, "emulated::quiet(Tensor(a!) x) -> ()", name="said", grid=1,
                           block=1, options=["-DNDEBUG"])  # fmt: skip
    emulate(quiet, x)
    assert x[0] == 2


@pytest.mark.usefixtures("host_compiler")
def test_what_was_compiled_is_within_the_bound_of_the_cache(cache_dir, monkeypatch):
    for number in range(2):
        source = f"__global__ void fill(float* x) {{ *x = {number + 1}; }}"
        schema = f"emulated::fill{number}(Tensor(a!) x) -> ()"
        x = torch.zeros(1)
        emulate(flexops.kernel(source, schema, name="fill", grid=1, block=1), x)
        assert x == number + 1
        cache = loader.open_cache(settings.current())
        assert cache.info().size <= cache.max_bytes
        (entry,) = cache.entries(("emulated",))
        assert list((cache_dir / "emulated").iterdir()) == [entry.directory]
        monkeypatch.setenv("FLEXOPS_CACHE_MAX_SIZE", str(entry.size + 100))
        settings.current.cache_clear()


@pytest.mark.usefixtures("host_compiler")
def test_what_the_compiler_says_is_in_the_error(monkeypatch):
    monkeypatch.setattr(ptx, "translate", lambda _: "int odd = nothing;")
    odd = flexops.kernel("__global__ void odd(float* x) { *x = 7; }",
                         "emulated::odd(Tensor(a!) x) -> ()", grid=1, block=1)  # fmt: skip
    with pytest.raises(EmulationError, match=r"emulated: (.|\n)*nothing. was not declared"):
        emulate(odd, torch.zeros(1))


def test_a_result_on_another_device_is_no_memory():
    ramp = flexops.kernel(
        "__global__ void ramp(float* out, int n) { if (threadIdx.x < n) out[threadIdx.x] = 1; }",
        "emulated::ramp(int n, *, Device device) -> Tensor",
        out=lambda n: torch.empty(n, device="meta"),
    )
    with pytest.raises(ValueError, match="out must be on the device of device, got meta"):
        emulate(ramp, 3, device="cpu")


WRONG = r"""
__global__ void wrong(float* x, int n, int which) {
  __shared__ volatile float row[64];
  const int i = threadIdx.x;
  float* volatile far = x + n;
  if (which == 0) { row[i] = x[i]; __syncthreads(); x[i] = row[63 - i] + __shfl_xor_sync(~0u, x[i], 1); }
  if (which == 1) *reinterpret_cast<volatile long long*>(far - 3) = 1;
  if (which == 2) row[i + n] = 1;
  if (which == 3 && i < 40) asm volatile("bar.sync 1, 64;");
  if (which == 4 && i % 32 < 16) x[i] = __shfl_sync(~0u, x[i], 0);
  if (which == 5) {
    asm volatile("{ .reg .u64 at; cvta.to.shared.u64 at, %0; cp.async.ca.shared.global [at], [%1], 4; }" :: "l"(&row[i]), "l"(x + i));
    asm volatile("cp.async.commit_group;");
    x[i] = row[i];
  }
}
"""


@pytest.mark.usefixtures("host_compiler")
def test_what_the_emulator_notices():
    """Each branch of the kernel does one thing wrong; the first nothing."""
    wrong = flexops.kernel(
        WRONG,
        "emulated::wrong(Tensor(a!) x, int which) -> ()",
        args={"n": lambda x: x.numel()},
        block=64,
        grid=1,
    )
    x = torch.arange(64.0)
    emulate(wrong, x, 0)
    assert torch.equal(x, 63 - torch.arange(64.0) + (torch.arange(64) ^ 1))
    for which, words in enumerate(
        (
            "8 bytes at 0x[0-9a-f]+ are misaligned",
            "256 bytes from the start of shared memory, is outside of its 256",
            "waits for a barrier, and so does every other thread that has not ended .40 of 64.",
            "waits for lanes of its warp",
            "byte 0 of shared memory was never written",
        ),
        1,
    ):
        with pytest.raises(EmulationError, match=words):
            emulate(wrong, x, which)


@pytest.mark.usefixtures("host_compiler")
def test_what_a_kernel_does_not_write_is_not_the_result_of_the_call_before():
    source = """
    __global__ void half(const float* x, float* out, int* count, int n, int whole) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n && (whole || i % 2)) out[i] = x[i], count[i] = 1;
    }"""
    half = flexops.kernel(
        source,
        "emulated::half(Tensor x, int whole) -> (Tensor out, Tensor count)",
        out=lambda x: (torch.empty_like(x), x.new_empty(x.shape, dtype=torch.int32)),
    )
    x = torch.randn(1000)
    for _ in range(2):
        assert torch.equal(emulate(half, x, 1)[0], x)
        out, count = emulate(half, x, 0)
        assert out[::2].isnan().all()
        assert (count[::2] == torch.iinfo(torch.int32).max).all()
        assert torch.equal(out[1::2], x[1::2])
    assert not torch.are_deterministic_algorithms_enabled()


GRANULES = """
__global__ void granules(const float* x, float* out, int n, int more) {
  const long long head = reinterpret_cast<long long>(x) % 16 / 4;
  const float4 read = reinterpret_cast<const float4*>(x - head)[int(threadIdx.x) - more];
  const float all[] = {read.x, read.y, read.z, read.w};
  for (int i = 0; i < 4; ++i) {
    const long long at = 4 * threadIdx.x + i - head;
    if (at >= 0 && at < n) out[at] = all[i];
  }
}
"""


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("shift", range(4))
def test_16_aligned_bytes_are_read_whole(shift):
    """A GPU's memory begins and ends at such: kernels read rows at any address so."""
    kernel = flexops.kernel(
        GRANULES,
        "emulated::granules(Tensor x, Tensor(a!) out, int more) -> ()",
        args={"n": lambda x: x.numel()},
        grid=1,
        block=2,
    )
    x = torch.randn(12)[shift : shift + 5]
    out = torch.zeros(5)
    emulate(kernel, x, out, 0)
    assert torch.equal(out, x)
    with pytest.raises(EmulationError, match=r"16 bytes at 0x[0-9a-f]+ are out of bounds"):
        emulate(kernel, x, out, 1)


ACTIVE = r"""
__global__ void active(const int* x, int* lanes, int* count, int n) {
  const int i = threadIdx.x;
  if (i == 95) while (*static_cast<volatile int*>(count) == 0) {}  // another lane writes it
  if (i >= n) return;
  for (int j = 0; i % 32 < 10 && j < 3; ++j) __shfl_sync(0x3ff, i, j);  // these lanes come later
  if (x[i] > 0) {
    const unsigned mask = __activemask();
    lanes[i] = mask;
    if ((mask & ((1u << (i % 32)) - 1)) == 0) atomicAdd(count, __popc(mask));
    __syncwarp(mask);
  }
  __syncwarp(n - i + i % 32 >= 32 ? ~0u : (1u << n % 32) - 1);
}
"""


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("reverse", [False, True])
def test_the_active_lanes_are_those_of_the_branch(reverse):
    kernel = flexops.kernel(
        ACTIVE,
        "emulated::active(Tensor x, Tensor(a!) lanes, Tensor(b!) count) -> ()",
        args={"n": lambda x: x.numel()},
        grid=1,
        block=96,
    )
    x = torch.randint(-3, 8, (75,), dtype=torch.int32)
    lanes, count = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32)
    emulate(kernel, x, lanes, count, reverse=reverse)
    inside = x > 0
    for first in range(0, 75, 32):
        there = inside[first : first + 32]
        mask = (there.long() << torch.arange(len(there))).sum()
        assert ((lanes[first : first + 32].long() & 0xFFFFFFFF)[there] == mask).all()
    assert (lanes[~inside] == 0).all()
    assert count == inside.sum()


LOOPS = r"""
__global__ void loops(const float* x, float* out, int which) {
  __shared__ volatile int flag;
  float local[8];
  const int i = threadIdx.x;
  if (i == 0) flag = 0;
  __syncthreads();
  if (which == 0 && i < 32) while (flag == 0) {}  // another warp writes it
  if (i == 40) flag = 1;
  for (int j = 0; which == 1 && j < 1 << 24; ++j) flag = 2;  // half a minute
  for (int j = 0; j < 8; ++j) local[j] = x[i] * j;
  const long long start = clock64();
  out[i] = local[i % 8] + sinf(x[i]) + __ffs(i) + (clock64() <= start);
}
"""


@pytest.mark.usefixtures("host_compiler")
def test_a_loop_lets_other_threads_run_and_can_be_interrupted():
    schema = "emulated::loops(Tensor x, Tensor(a!) out, int which) -> ()"
    kernel = flexops.kernel(LOOPS, schema, grid=1, block=64)
    x, out = torch.randn(64), torch.zeros(64)
    timer = threading.Timer(1, signal.raise_signal, (signal.SIGINT,))
    emulate(kernel, x, out, 2)  # compiled before
    expected = out.clone()
    first_bits = torch.tensor([(i & -i).bit_length() for i in range(64)])
    torch.testing.assert_close(expected, x * (torch.arange(64) % 8) + x.sin() + first_bits)
    for reverse in (False, True):
        emulate(kernel, x, out.zero_(), 0, reverse=reverse)
        assert torch.equal(out, expected)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        emulate(kernel, x, out.zero_(), 1)
    assert not out.any()


COPIED = r"""
#include "common/hopper.cuh"
namespace hopper = flexops::hopper;
__global__ void copied(const float* x, float* out, int which) {
  __shared__ alignas(16) float row[64];
  __shared__ unsigned long long barrier;
  const int i = threadIdx.x;
  const unsigned full = hopper::shared_address(&barrier), to = hopper::shared_address(row);
  if (i == 0 && which != 1) hopper::init(full, 1), hopper::fence_init();
  __syncthreads();
  for (int round = 0; round < 3; ++round) {
    if (i == 0) {
      hopper::load_bytes(to, x + 64 * round, 256, full);
      if (which == 2) hopper::arrive(full);
      if (which != 2) hopper::expect(full, which == 3 ? 128 : which == 4 ? 512 : 256);
      if (which == 5) hopper::arrive(full);
      if (which == 6) hopper::load_bytes(to + 128, x, 128, full);
    }
    if (which == 7) return;
    if (which == 8) __syncthreads();
    if (which != 8) hopper::wait(full, round % 2);
    out[64 * round + i] = row[i];
    __syncthreads();
  }
}
"""


@pytest.mark.usefixtures("host_compiler")
def test_a_copy_arrives_when_a_thread_waits_for_its_mbarrier():
    """Each number of ``which`` but the first does one thing wrong."""
    kernel = flexops.kernel(
        COPIED, "emulated::copied(Tensor x, Tensor(a!) out, int which) -> ()", grid=2, block=64
    )
    x = torch.randn(192)
    for reverse in (False, True):
        out = torch.zeros(192)
        emulate(kernel, x, out, 0, arch="9.0a", reverse=reverse)
        assert torch.equal(out, x)
    for which, words in enumerate(
        (
            "no mbarrier is at 0x[0-9a-f]+, in block",
            "no thread expects 256 bytes that are copied for it",
            "no thread expects 128 bytes that are copied for it",
            "waits for an mbarrier, and so does every other thread that has not ended .64 of 64.",
            "an arrival too many: the mbarrier's phase waits for 0 of 1, and for 256 bytes",
            "a copy to where another is under way, byte 128 of shared memory",
            "its block ends while this copy is under way",
            r"a copy to byte \d+ of shared memory is under way(.|\n)*copied.cu, line 22: ",
        ),
        1,
    ):
        with pytest.raises(EmulationError, match=words):
            emulate(kernel, x, out, which, arch="9.0a")
    with pytest.raises(ArchitectureError):
        emulate(kernel, x, out, 0, arch="9.0z")


ARRIVALS = r"""
#include "common/hopper.cuh"
namespace hopper = flexops::hopper;
__global__ void arrivals(const float* x, int* out) {
  __shared__ alignas(16) float rows[2][4];
  __shared__ unsigned long long barriers[2];
  __shared__ int count;
  const int i = threadIdx.x;
  const unsigned full = hopper::shared_address(&barriers[i]);
  hopper::init(full, 1);
  count = 0;
  __syncthreads();
  if (i == 0) {
    for (int j = 0; j < 2; ++j) {
      hopper::expect(full + 8 * j, 16);
      hopper::load_bytes(hopper::shared_address(rows[j]), x, 16, full + 8 * j);
    }
  }
  __syncthreads();
  hopper::wait(full, 0);
  out[i] = atomicAdd(&count, 1);
}
"""


@pytest.mark.usefixtures("host_compiler")
def test_copies_arrive_in_another_order_in_the_reversed_one():
    kernel = flexops.kernel(
        ARRIVALS, "emulated::arrivals(Tensor x, Tensor(a!) out) -> ()", grid=1, block=2
    )
    out = torch.zeros(2, dtype=torch.int32)
    for reverse in (False, True):
        emulate(kernel, torch.zeros(4), out, arch="9.0a", reverse=reverse)
        assert out.tolist() == [reverse, not reverse]


MEETING = r"""
__global__ void meeting(int* count, int* out) {
  __shared__ int own;
  __shared__ int before[64];
  before[threadIdx.x] = out[blockIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    own = blockIdx.x + 1;
    out[blockIdx.x] = own;
    __threadfence();
    atomicAdd(count, 1);
    while (*static_cast<volatile int*>(count) < gridDim.x) {}
  }
  __syncthreads();
  int sum = own + before[63 - threadIdx.x];
  for (int block = 0; block < gridDim.x; ++block) sum += out[block];
  out[gridDim.x + blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("reverse", [False, True])
def test_the_blocks_of_a_cooperative_launch_run_at_once(reverse):
    schema = "emulated::meeting(Tensor(a!) count, Tensor(b!) out) -> ()"
    kernel = flexops.kernel(MEETING, schema, grid=5, block=64, cooperative=True)
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(5 + 5 * 64, dtype=torch.int32)
    emulate(kernel, count, out, reverse=reverse)
    assert out[:5].tolist() == [1, 2, 3, 4, 5]
    assert (out[5:].view(5, 64) == 15 + torch.arange(1, 6)[:, None]).all()


def test_what_cannot_be_emulated_is_named():
    with pytest.raises(ValueError, match="tensors must be on the CPU, got one on meta"):
        emulate(sums(), torch.empty(3, 4, device="meta"))
    with pytest.raises(TypeError, match=r"must be what flexops.kernel returned, got function"):
        emulate(lambda x: x, torch.empty(3))
    for odd, found in (("x", "str"), ([torch.empty(3)], "list"), (None, "None")):
        with pytest.raises(TypeError, match=f"must be a tensor, got {found}"):
            emulate(sums(), odd)
    with pytest.raises(
        TypeError, match=r"must be a dense \(strided\) tensor, got torch.sparse_coo"
    ):
        emulate(sums(), torch.eye(3).to_sparse())


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
def test_a_cluster_is_rejected_and_a_written_tensor_is_written():
    with pytest.raises(EmulationError, match="cannot be launched") as caught:
        emulate(sums(cluster=2), torch.randn(2, 4))
    assert "a launch with a cluster" in str(caught.value)
    bounded = flexops.kernel(
        "template <int kBlock> __global__ void __launch_bounds__(kBlock) one(float* y) { *y = 1; }",
        "emulated::one(Tensor(a!) y) -> ()",
        template={"kBlock": 64},
    )
    with pytest.raises(EmulationError, match=r"one cannot be launched(.|\n)*256 threads.*allow 64"):
        emulate(bounded, torch.zeros(1))
    add = flexops.kernel(
        "__global__ void add(float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] += 1; }",
        "emulated::add(Tensor(a!) y) -> ()",
    )
    y = torch.zeros(5)
    assert emulate(add, y) is None
    assert y.tolist() == [1.0] * 5
