/* Preloaded into a process whose torch knows no GPU: to libraries of flexops' its tensors, of the CPU, are then on a GPU, whose number
   stand_in_gpu() sets for the thread. Takes the place of the functions of torch's C ABI that tell of devices; the others stay torch's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

static __thread int gpu = 0;

void stand_in_gpu(int number) { gpu = number; }

enum { CPU = 0, CUDA = 1 }; /* c10::DeviceType */
int32_t aoti_torch_get_device_type(void* tensor, int32_t* type) { return *type = CUDA, 0; }
int32_t aoti_torch_get_device_index(void* tensor, int32_t* index) { return *index = gpu, 0; }
int32_t aoti_torch_create_device_guard(int32_t index, void** guard) { return *guard = 0, 0; }
int32_t aoti_torch_delete_device_guard(void* guard) { return 0; }
int32_t aoti_torch_get_current_cuda_stream(int32_t index, void** stream) { return *stream = (void*)(intptr_t)(0x5000 + index), 0; }

int32_t aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t type, int32_t index, void** out) {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  int32_t (*real)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**) = dlsym(torch, "aoti_torch_empty_strided");
  return real(dim, sizes, strides, dtype, CPU, 0, out);
}
