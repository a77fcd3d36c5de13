"""What a launch asks of the driver: ``csrc/common/launch.h`` over a driver that counts, in a
program of its own."""

from __future__ import annotations

import os
import subprocess

from processes import c_library, completed

from flexops.build.describe import layout

DRIVER = """
#include <stddef.h>
static int allowed[2] = {49152, 49152}, most[2] = {232448, 101376}, current = 0;
int asked = 0, launches = 0, versions = 0;
unsigned attributes = 0;
int cuLaunchKernelEx(const unsigned* config, void* kernel, void** arguments, void** extra) {
  ++launches, attributes = config[12];
  return config[6] > allowed[current] ? 1 : 0;
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  ++asked, current = device;
  if (value > most[device]) return 1;
  allowed[device] = value;
  return 0;
}
int cuDeviceGetAttribute(int* value, int which, int device) { return *value = 0; }
int cuGetErrorString(int status, const char** text) { return *text = "invalid argument", 0; }
int cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  return ++versions, *value = device ? 80 : 90, attribute != 5;
}
int cuKernelGetFunction(void) { return 0; }
int cuOccupancyMaxActiveClusters(void) { return 0; }
int cuMemsetD32Async(void) { return 0; }
int cuDevicePrimaryCtxRetain(void) { return 0; }
int cuCtxSetCurrent(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
"""

PROGRAM = """
#include "common/kernel.cuh"
#include "common/launch.h"
#include <atomic>
#include <thread>
namespace flexops {
template <int number> __global__ void nothing(int) {}
static void* provide(const char*, int, char*, int) { return reinterpret_cast<void*>(0x4242); }
}
extern "C" int asked, launches, versions;
extern "C" unsigned attributes;
using namespace flexops;
template <int number> static void run(int gpu, int64_t bytes) {
  detail::guarded_gpu = gpu;
  launch(kernel<nothing<number>>, {{1}, {32}, nullptr, bytes}, 1);
  const char* error = last_error();
  printf("gpu %d, %d bytes: asked %d, launched %d, %s\\n", gpu, (int)bytes, asked, launches, error ? error : "well");
}
static void start_early(int gpu) {
  detail::guarded_gpu = gpu;
  LaunchConfig config{{1}, {32}, nullptr};
  config.early = true;
  launch(kernel<nothing<3>>, config, 1);
  const char* said = last_error() ? "error" : "well";
  printf("gpu %d, early: asked %d, %u attributes, %s\\n", gpu, versions, attributes, said);
}
int main() {
  flexops_set_provider(provide);
  run<0>(0, 1000), run<0>(0, 90000), run<0>(0, 90000), run<0>(0, 60000), run<0>(0, 200000), run<0>(0, 90000);
  run<0>(1, 90000), run<0>(1, 90000);
  run<1>(0, 300000), run<1>(0, 90000);
  start_early(0), start_early(0), start_early(1), start_early(1), start_early(0);
  std::atomic<int> failed{0};
  std::thread threads[8];
  for (int i = 0; i < 8; ++i) {
    threads[i] = std::thread([&, i] {
      detail::guarded_gpu = 0;
      for (int bytes = 50000 + i; bytes < 200000; bytes += 500) {
        launch(kernel<nothing<2>>, {{1}, {32}, nullptr, bytes}, 1);
        failed += last_error() != nullptr;
      }
    });
  }
  for (std::thread& each : threads) each.join();
  printf("eight threads: %d failed\\n", failed.load());
}
"""


def test_what_a_driver_is_asked_for_once(tmp_path, host_compiler):
    """A kernel is allowed its shared memory at its first launch on a GPU, and again only for more
    of it; a GPU that has less gets what a launch wants. Nothing that a thread was allowed is taken
    back by another one before it has launched. A kernel whose code is for older GPUs than 9.0 does
    not start early."""
    (tmp_path / "driver.c").write_text(DRIVER)
    (tmp_path / "program.cpp").write_text(PROGRAM)
    compiler = host_compiler.path
    driver = tmp_path / "libcuda.so.1"
    c_library(compiler, driver, tmp_path / "driver.c", f"-Wl,-soname,{driver.name}")
    program = [
        str(tmp_path / "program.cpp"),
        str(driver),
        "-o",
        str(tmp_path / "program"),
        "-ldl",
        "-pthread",
    ]
    subprocess.run([compiler, "-std=c++17", "-O1", f"-I{layout.csrc_root()}", *program], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    result = completed([str(tmp_path / "program")], env=environment)
    assert result.stdout.splitlines() == [
        "gpu 0, 1000 bytes: asked 0, launched 1, well",
        "gpu 0, 90000 bytes: asked 1, launched 2, well",
        "gpu 0, 90000 bytes: asked 1, launched 3, well",
        "gpu 0, 60000 bytes: asked 1, launched 4, well",
        "gpu 0, 200000 bytes: asked 2, launched 5, well",
        "gpu 0, 90000 bytes: asked 2, launched 6, well",
        # first for as much as the other GPU has, which is more than there is
        "gpu 1, 90000 bytes: asked 4, launched 7, well",
        "gpu 1, 90000 bytes: asked 6, launched 8, well",
        "gpu 0, 300000 bytes: asked 7, launched 8, invalid argument",
        "gpu 0, 90000 bytes: asked 8, launched 9, well",
        "gpu 0, early: asked 1, 1 attributes, well",
        "gpu 0, early: asked 1, 1 attributes, well",
        "gpu 1, early: asked 2, 0 attributes, well",
        "gpu 1, early: asked 2, 0 attributes, well",
        "gpu 0, early: asked 2, 1 attributes, well",
        "eight threads: 0 failed",
    ]
