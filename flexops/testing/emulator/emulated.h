// Included first in a library for CUDA whose GPU is emulated: torch's tensors of the CPU are on a
// GPU, and the driver's functions are those that flexops_emulate() was given.
#pragma once

#include <dlfcn.h>

#include "common/torch_abi.h"

namespace flexops::emulated {
inline void* (*symbol)(const char* name) = nullptr;
inline void (*note_memory)(void* begin, int64_t numel, int32_t dtype) = nullptr;

inline int32_t device_type(AtenTensorHandle, int32_t* out) {
  return *out = aoti_torch_device_type_cuda(), 0;
}
inline int32_t device_index(AtenTensorHandle, int32_t* out) { return *out = 0; }
inline int32_t create_guard(int32_t, DeviceGuardHandle* out) { return *out = nullptr, 0; }
inline int32_t delete_guard(DeviceGuardHandle) { return 0; }
inline int32_t empty(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                     int32_t, int32_t, AtenTensorHandle* out) {
  const int32_t cpu = aoti_torch_device_type_cpu();
  const int32_t failed = aoti_torch_empty_strided(dim, sizes, strides, dtype, cpu, 0, out);
  if (!failed) {
    void* begin;
    int64_t numel;
    aoti_torch_get_data_ptr(*out, &begin);
    aoti_torch_get_numel(*out, &numel);
    note_memory(begin, numel, dtype);
  }
  return failed;
}
}  // namespace flexops::emulated

extern "C" __attribute__((visibility("default"), weak)) void flexops_emulate(
    void* (*symbol)(const char*), void (*note_memory)(void*, int64_t, int32_t)) {
  flexops::emulated::symbol = symbol;
  flexops::emulated::note_memory = note_memory;
}

#define aoti_torch_get_device_type flexops::emulated::device_type
#define aoti_torch_get_device_index flexops::emulated::device_index
#define aoti_torch_create_device_guard flexops::emulated::create_guard
#define aoti_torch_delete_device_guard flexops::emulated::delete_guard
#define aoti_torch_empty_strided flexops::emulated::empty
#define dlopen(...) static_cast<void*>(&flexops::emulated::symbol)
#define dlsym(library, name) flexops::emulated::symbol(name)
