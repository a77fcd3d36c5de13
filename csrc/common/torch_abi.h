// The functions of torch's stable C ABI that bindings call. Include binding.h, not this.
//
// torch declares them too, in torch/csrc/stable/c/shim.h and what that includes; but with these
// come <complex> and <sstream>, which take half of the time that a binding needs to compile. That
// the declarations agree is tested: tests/csrc/common/test_torch_abi.py compiles both.
//
// With FLEXOPS_TORCH_BODY defined as a function's body, this is a source: of the library that
// bindings are linked against in the place of libtorch_cpu.so (plan.py), because the linker takes
// half a second to read the 75000 symbols of that.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct AtenTensorOpaque;
struct DeviceGuardOpaque;
struct StableListOpaque;
struct TorchLibraryOpaque;

extern "C" {

using AOTITorchError = int32_t;  // 0: went well
using AtenTensorHandle = AtenTensorOpaque*;
using DeviceGuardHandle = DeviceGuardOpaque*;
using StableListHandle = StableListOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;
typedef void (*ParallelFunc)(int64_t begin, int64_t end, void* context);

#define FLEXOPS_TORCH_ABI __attribute__((__visibility__("default")))
#if !defined(FLEXOPS_TORCH_BODY)
#define FLEXOPS_TORCH_BODY
#endif

FLEXOPS_TORCH_ABI int32_t aoti_torch_device_type_cpu() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_device_type_cuda() FLEXOPS_TORCH_BODY;

FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_float32() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_float16() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_bfloat16() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_float64() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_uint8() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_int8() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_int16() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_int32() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_int64() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_bool() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_float8_e4m3fn() FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI int32_t aoti_torch_dtype_float8_e5m2() FLEXOPS_TORCH_BODY;

// Tensors. What is said to be new belongs to the caller, who deletes it; the rest is borrowed.
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_new_tensor_handle(
    AtenTensorHandle tensor, AtenTensorHandle* new_handle) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor)
    FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_empty_strided(
    int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
    int32_t device_index, AtenTensorHandle* new_tensor) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_copy_(AtenTensorHandle destination,
                                                  AtenTensorHandle source,
                                                  int32_t non_blocking) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor,
                                                         void** out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor,
                                                      int64_t* out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor,
                                                    int64_t* out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor,
                                                      int64_t** out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor,
                                                        int64_t** out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor,
                                                      int32_t* out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor,
                                                            int32_t* out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor,
                                                             int32_t* out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor,
                                                          bool* out) FLEXOPS_TORCH_BODY;

FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_create_device_guard(
    int32_t device_index, DeviceGuardHandle* new_guard) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard)
    FLEXOPS_TORCH_BODY;

FLEXOPS_TORCH_ABI AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                                    ParallelFunc body,
                                                    void* context) FLEXOPS_TORCH_BODY;

// What comes in an operator's arguments.
FLEXOPS_TORCH_ABI AOTITorchError torch_list_size(StableListHandle list,
                                                 size_t* out) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError torch_list_get_item(StableListHandle list, size_t index,
                                                     StableIValue* element) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError torch_delete_list(StableListHandle list) FLEXOPS_TORCH_BODY;

// Registration.
FLEXOPS_TORCH_ABI AOTITorchError
aoti_torch_library_init_impl(const char* name_space, const char* key, const char* file,
                             uint32_t line, TorchLibraryHandle* new_library) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                                    void (*kernel)(StableIValue*, uint64_t,
                                                                   uint64_t),
                                                    uint64_t built_for) FLEXOPS_TORCH_BODY;
FLEXOPS_TORCH_ABI AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle library)
    FLEXOPS_TORCH_BODY;

#undef FLEXOPS_TORCH_ABI
#undef FLEXOPS_TORCH_BODY

}  // extern "C"
