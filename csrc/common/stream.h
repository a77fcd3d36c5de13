// torch's current CUDA (or HIP) stream, without linking libtorch_cuda. Included by binding.h.
#pragma once

#include <dlfcn.h>

namespace flexops {

namespace detail {
using CurrentStream = int32_t (*)(int32_t device, void** stream);

/// A function that every torch since 2.2 exports with C linkage; the library that holds it is
/// loaded by torch, never by us.
inline CurrentStream find_current_stream() {
  for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so"}) {
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) {
      if (void* symbol = dlsym(library, "aoti_torch_get_current_cuda_stream"))
        return reinterpret_cast<CurrentStream>(symbol);
    }
  }
  fail({"flexops: this torch has no CUDA: neither libtorch_cuda.so nor libtorch_hip.so is loaded"});
}
}  // namespace detail

/// torch's current stream on the tensor's GPU, as launchers take it.
inline void* current_stream(const Tensor& tensor) {
  static const detail::CurrentStream ask = detail::find_current_stream();
  void* stream = nullptr;
  FLEXOPS_CHECK(ask(tensor.device_index(), &stream) == 0,
                "flexops: torch could not tell its current CUDA stream");
  return stream;
}

}  // namespace flexops
