/* Preloaded into a process whose torch knows no GPU: to libraries of flexops' its tensors, of the CPU, are then on a GPU, whose number
   stand_in_gpu() sets for the thread. Takes the place of the functions of torch's C ABI that tell of devices; the others stay torch's.
   And of those by which torch takes memory for tensors: stand_in_memory() tells what they have now. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
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

/* ---- memory: what is before each piece chains it to the others ------------------------------------------------------------------------------ */

typedef struct Piece { uint64_t mark; size_t size; struct Piece *before, *after; void* whole; char padding[24]; } Piece;
static Piece pieces = {0, 0, &pieces, &pieces, 0, {0}};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t mark_of(const Piece* piece) { return (uintptr_t)piece ^ 0x5ca1ab1e0ddba11; }

void* __libc_memalign(size_t alignment, size_t size);
void __libc_free(void* pointer);

int posix_memalign(void** out, size_t alignment, size_t size) {
  const size_t ahead = alignment < sizeof(Piece) ? sizeof(Piece) : alignment;
  char* whole = size + ahead + 16 < size ? 0 : __libc_memalign(ahead, size + ahead + 16);
  if (!whole) return ENOMEM;
  Piece* piece = (Piece*)(whole + ahead) - 1;
  pthread_mutex_lock(&lock);
  *piece = (Piece){mark_of(piece), size, &pieces, pieces.after, whole, {0}};
  pieces.after->before = piece, pieces.after = piece;
  pthread_mutex_unlock(&lock);
  *out = piece + 1;
  return 0;
}

void free(void* pointer) {
  Piece* piece = (Piece*)pointer - 1;
  if (!pointer || (uintptr_t)pointer % sizeof(Piece) || piece->mark != mark_of(piece)) {
    __libc_free(pointer);
    return;
  }
  pthread_mutex_lock(&lock);
  piece->before->after = piece->after, piece->after->before = piece->before, piece->mark = 0;
  pthread_mutex_unlock(&lock);
  __libc_free(piece->whole);
}

/* Begin and end of each piece, of `most` at most; how many there are. */
size_t stand_in_memory(uint64_t (*out)[2], size_t most) {
  size_t count = 0;
  pthread_mutex_lock(&lock);
  for (const Piece* piece = pieces.after; piece != &pieces; piece = piece->after, ++count)
    if (count < most) out[count][0] = (uintptr_t)(piece + 1), out[count][1] = (uintptr_t)(piece + 1) + piece->size;
  pthread_mutex_unlock(&lock);
  return count;
}
