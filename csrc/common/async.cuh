// Copies from global to shared memory that a thread starts and does not wait for. A thread's copies
// form groups, in order:
//
//   async_copy16(&slot[0], pointer, valid), async_commit();  // as often as slots are free
//   async_wait(1);                                           // until at most one group is left
//
// What a thread has waited for is in its own sight; others see it after a __syncthreads(). Without
// such copies (HIP, sm_75) they are plain ones, done when the call returns.
#pragma once

#include "common/device.cuh"

#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FLEXOPS_HAS_ASYNC_COPY 1
#else
#define FLEXOPS_HAS_ASYNC_COPY 0
#endif

namespace flexops {

#if !FLEXOPS_HIP
/// To an address in shared memory, on sm_80 and newer; the rest as below.
FLEXOPS_DEVICE void async_copy16(u32 shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
#endif
/// 16 bytes, both ends aligned to that; zeros, and nothing is read, if not valid.
FLEXOPS_DEVICE void async_copy16(void* shared, const void* global, bool valid) {
#if FLEXOPS_HAS_ASYNC_COPY
  async_copy16(static_cast<u32>(__cvta_generic_to_shared(shared)), global, valid);
#else
  *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
#endif
}

/// Closes the group of this thread's copies since the last call; it may be empty.
FLEXOPS_DEVICE void async_commit() {
#if FLEXOPS_HAS_ASYNC_COPY
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most kPending of this thread's latest groups are under way.
template <int kPending>
FLEXOPS_DEVICE void async_wait() {
#if FLEXOPS_HAS_ASYNC_COPY
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

/// Waits until at most `pending` (0 to 7) of this thread's latest groups are under way.
FLEXOPS_DEVICE void async_wait(int pending) {
#if FLEXOPS_HAS_ASYNC_COPY
#define FLEXOPS_ASYNC_WAIT(n)                                 \
  case n:                                                     \
    asm volatile("cp.async.wait_group " #n ";" ::: "memory"); \
    break;
  switch (pending) {
    FLEXOPS_ASYNC_WAIT(1)
    FLEXOPS_ASYNC_WAIT(2)
    FLEXOPS_ASYNC_WAIT(3)
    FLEXOPS_ASYNC_WAIT(4)
    FLEXOPS_ASYNC_WAIT(5)
    FLEXOPS_ASYNC_WAIT(6)
    FLEXOPS_ASYNC_WAIT(7)
    default:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
#undef FLEXOPS_ASYNC_WAIT
#else
  (void)pending;
#endif
}

// Kernels of a stream that overlap, on sm_90 and newer (LaunchConfig::early): the next one starts
// once all blocks of this one have said so, and reads what this one writes only after it has
// waited.
FLEXOPS_DEVICE void let_next_start() {
#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
FLEXOPS_DEVICE void wait_for_previous() {
#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flexops
