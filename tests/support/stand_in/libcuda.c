/* A CUDA driver. It takes code as the real one does, and refuses what that one refuses, with its numbers: what flexops calls of it then runs as on a
   machine with such GPUs. Kernels it runs if they are PTX and it is told what translates that (tests/emulated); else it runs nothing.
   What it is, the environment tells; what it was asked for, the file STAND_IN_LOG.

     STAND_IN_GPUS       capabilities of its GPUs: "90,80"; "none" for a driver that counts none, "" for one that does not even start then
     STAND_IN_CUDA       what cuDriverGetVersion says: 13000
     STAND_IN_SMS        multiprocessors of each
     STAND_IN_CLUSTERS   how many clusters run at once
     STAND_IN_PARAMETERS set: each launch's parameters are told, too
     STAND_IN_REFUSE     "cuLaunchKernelEx=719": that call fails so, always; "cuLaunchKernelEx=719@2": at its second call only
     STAND_IN_TRANSLATOR a command that is given the path of a PTX file and prints that of a library with its kernels */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       NO_BINARY = 209, INVALID_PTX = 218, UNSUPPORTED_PTX = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, OUT_OF_RESOURCES = 701, LAUNCH_FAILED = 719 };
enum { WITHOUT_ASKING = 49152, OF_SYSTEM = 1024, GPUS = 8 };

typedef struct { unsigned grid[3], block[3], shared; void* stream; struct { int id, padding; unsigned value[16]; }* attributes; unsigned count; } Config;
typedef int (*Emulate)(const char* symbol, const char* source, const unsigned* grid, const unsigned* block, uint64_t shared, int cooperative,
                       void** arguments, void* packed, uint64_t (*memory)[2], uint64_t count, char* error, size_t error_size);
typedef struct { char* code; int text, sm, accelerated; Emulate emulate; char source[512]; } Library;
typedef struct {
  Library* library;
  char symbol[1024];
  unsigned threads, registers, shared;  /* by the cubin: most threads of a block, registers of a thread, static shared memory */
  int allowed[GPUS];
} Kernel;

static __thread int context = -1;  /* the GPU whose context is this thread's */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t user = 0;  /* the process that has used the driver: what it forks cannot */

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

static int capability(int gpu) {
  const char* at = setting("STAND_IN_GPUS", "90");
  while (gpu > 0 && at) at = strchr(at, ','), at = at ? at + 1 : 0, --gpu;
  return gpu < 0 || !at || !*at ? 0 : atoi(at);
}

static int starts(void) { return *setting("STAND_IN_GPUS", "90") != 0; }
static int shared_of_processor(int known) { return known == 80 || known == 87 ? 167936 : known >= 90 && known < 120 ? 233472 : known == 75 ? 65536 : 102400; }
static int shared_of_block(int known) { return shared_of_processor(known) - (known == 75 ? 0 : OF_SYSTEM); }

static void say(const char* format, const char* text, const unsigned* n) {
  const char* path = getenv("STAND_IN_LOG");
  FILE* file = path ? fopen(path, "a") : 0;
  if (!file) return;
  fprintf(file, format, text, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]);
  fclose(file);
}

/* What the environment has this call fail with. */
static int refused(const char* call) {
  static struct { char wish[64]; int calls; } seen[16];
  const char* wish = setting("STAND_IN_REFUSE", "");
  size_t length = strlen(call);
  if (strncmp(wish, call, length) || wish[length] != '=') return OK;
  const char* at = strchr(wish, '@');
  int calls = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 16; ++i) {
    if (seen[i].wish[0] && strcmp(seen[i].wish, wish)) continue;
    strncpy(seen[i].wish, wish, sizeof seen[i].wish - 1);
    calls = ++seen[i].calls;
    break;
  }
  pthread_mutex_unlock(&lock);
  return !at || atoi(at + 1) == calls ? atoi(wish + length + 1) : OK;
}

#define ENTER(call)                                \
  do {                                             \
    int status = refused(#call);                   \
    if (status) return status;                     \
    if (!starts() || (user && user != getpid())) return NOT_INITIALIZED; \
  } while (0)
#define ENTER_CONTEXT(call)                        \
  do {                                             \
    ENTER(call);                                   \
    if (context < 0) return INVALID_CONTEXT;       \
  } while (0)

int cuInit(unsigned flags) { return refused("cuInit") ? refused("cuInit") : starts() ? OK : NO_DEVICE; }
int cuGetExportTable(const void** table, const void* id) { return *table = 0, INVALID_VALUE; }  /* NVRTC asks, and does without */
int cuDriverGetVersion(int* version) { return *version = atoi(setting("STAND_IN_CUDA", "13000")), refused("cuDriverGetVersion"); }
int cuDeviceGetCount(int* count) {
  ENTER(cuDeviceGetCount);
  for (*count = 0; *count < GPUS && capability(*count); ++*count) {}
  return OK;
}

int cuDeviceGetAttribute(int* value, int which, int gpu) {
  ENTER(cuDeviceGetAttribute);
  const int known = capability(gpu);
  if (!known) return INVALID_DEVICE;
  *value = which == 75 ? known / 10 : which == 76 ? known % 10 : which == 16 ? atoi(setting("STAND_IN_SMS", "132"))
         : which == 97 ? shared_of_block(known) : which == 81 ? shared_of_processor(known) : 0;
  return OK;
}

int cuDevicePrimaryCtxRetain(void** out, int gpu) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (!capability(gpu)) return INVALID_DEVICE;
  *out = (void*)(intptr_t)(gpu + 1);
  return OK;
}
int cuCtxSetCurrent(void* wanted) {
  ENTER(cuCtxSetCurrent);
  context = (int)(intptr_t)wanted - 1, user = getpid();
  say("context %s%u\n", "", (unsigned[9]){(unsigned)context});
  return OK;
}

/* ---- code -------------------------------------------------------------------------------------------------------------------------------- */

static const Elf64_Shdr* sections(const char* code, int* count) {
  const Elf64_Ehdr* elf = (const Elf64_Ehdr*)code;
  *count = elf->e_shnum;
  return (const Elf64_Shdr*)(code + elf->e_shoff);
}

static const Elf64_Shdr* section(const char* code, const char* prefix, const char* symbol) {
  int count;
  const Elf64_Shdr* all = sections(code, &count);
  const char* names = code + all[((const Elf64_Ehdr*)code)->e_shstrndx].sh_offset;
  for (int i = 0; i < count; ++i) {
    const char* name = names + all[i].sh_name;
    if (!strncmp(name, prefix, strlen(prefix)) && !strcmp(name + strlen(prefix), symbol)) return all + i;
  }
  return 0;
}

static int runs_on(const Library* library, int known) {
  if (library->text) return library->sm <= known;
  return library->accelerated ? library->sm == known : library->sm / 10 == known / 10 && library->sm <= known;
}

/* The kernels of a PTX text as functions of this process. */
static int translate(Library* library) {
  char path[] = "/tmp/stand-in-XXXXXX", command[1024], made[sizeof library->source] = "";
  const int file = mkstemp(path);
  if (file < 0 || write(file, library->code, strlen(library->code)) < 0) return INVALID_PTX;
  close(file);
  snprintf(command, sizeof command, "env -u LD_PRELOAD %s %s", getenv("STAND_IN_TRANSLATOR"), path);
  FILE* answer = popen(command, "r");
  if (answer && fgets(made, sizeof made, answer)) made[strcspn(made, "\n")] = 0;
  const int failed = !answer || pclose(answer);
  unlink(path);
  void* opened = failed ? 0 : dlopen(made, RTLD_NOW | RTLD_LOCAL);
  if (!opened) return fprintf(stderr, "%s: %s\n", command, failed ? "failed" : dlerror()), INVALID_PTX;
  library->emulate = (Emulate)dlsym(opened, "emulate");
  snprintf(library->source, sizeof library->source, "%.*s.ptx", (int)strlen(made) - 3, made);
  return OK;
}

int cuLibraryLoadData(void** out, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  ENTER(cuLibraryLoadData);
  Library* library = calloc(1, sizeof *library);
  const Elf64_Ehdr* elf = code;
  library->text = memcmp(code, ELFMAG, SELFMAG) != 0;
  library->code = (char*)code;
  unsigned version = 0;
  if (library->text) {
    const char *made = strstr(code, ".version "), *target = strstr(code, ".target sm_");
    if (!made || !target) return INVALID_IMAGE;
    int major, minor;
    sscanf(made, ".version %d.%d", &major, &minor);  /* of PTX: 8.0 is CUDA 12.0's, 9.0 CUDA 13.0's */
    version = (unsigned)((major + 4) * 1000 + minor * 10);
    library->sm = atoi(target + 11);
    if (version > (unsigned)atoi(setting("STAND_IN_CUDA", "13000"))) return UNSUPPORTED_PTX;
    size_t size = strlen(code) + 1;
    library->code = memcpy(malloc(size), code, size);
    const int wrong = getenv("STAND_IN_TRANSLATOR") ? translate(library) : OK;
    if (wrong) return wrong;
  } else {
    if (elf->e_machine != 190) return INVALID_IMAGE;
    const int newer = elf->e_ident[EI_ABIVERSION] >= 8;
    library->sm = newer ? elf->e_flags >> 8 & 0xff : elf->e_flags & 0xff;
    library->accelerated = newer ? elf->e_flags & 8 ? 1 : 0 : elf->e_flags >> 11 & 1;
    if (newer && atoi(setting("STAND_IN_CUDA", "13000")) < 13000) return NO_BINARY;
    size_t size = elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize;
    int count;
    const Elf64_Shdr* all = sections(code, &count);
    for (int i = 0; i < count; ++i)
      if (all[i].sh_type != SHT_NOBITS && all[i].sh_offset + all[i].sh_size > size) size = all[i].sh_offset + all[i].sh_size;
    library->code = memcpy(malloc(size), code, size);  /* the caller may throw it away, as it may with the real one */
  }
  int serves = 0;
  for (int gpu = 0; gpu < GPUS && capability(gpu); ++gpu) serves |= runs_on(library, capability(gpu));
  if (!serves) return NO_BINARY;
  say("load %s %u\n", library->text ? "ptx" : library->accelerated ? "cubin-a" : "cubin", (unsigned[9]){(unsigned)library->sm});
  *out = library;
  return OK;
}

int cuLibraryUnload(void* library) { return say("unload%s\n", "", (unsigned[9]){0}), OK; }
int cuLibraryGetKernel(void** out, void* handle, const char* symbol) {
  ENTER(cuLibraryGetKernel);
  Library* library = handle;
  if (library->text ? !strstr(library->code, symbol) : !section(library->code, ".text.", symbol)) return NOT_FOUND;
  Kernel* kernel = calloc(1, sizeof *kernel);
  kernel->library = library;
  kernel->threads = 1024;
  strncpy(kernel->symbol, symbol, sizeof kernel->symbol - 1);
  for (int gpu = 0; gpu < GPUS; ++gpu) kernel->allowed[gpu] = -1;
  if (!library->text) {
    const Elf64_Shdr *info = section(library->code, ".nv.info.", symbol), *shared = section(library->code, ".nv.shared.", symbol),
                     *text = section(library->code, ".text.", symbol);
    kernel->shared = shared ? (unsigned)shared->sh_size : 0;
    kernel->registers = text->sh_info >> 24;
    for (const char *at = library->code + (info ? info->sh_offset : 0), *end = at + (info ? info->sh_size : 0); at + 4 <= end;) {
      const unsigned form = (unsigned char)at[0], kind = (unsigned char)at[1], size = *(const uint16_t*)(at + 2);
      const unsigned* value = (const unsigned*)(at + 4);
      if (form == 4 && kind == 5) kernel->threads = value[0] * value[1] * value[2];
      at += form == 4 ? 4 + size : 4;
    }
  }
  *out = kernel;
  return OK;
}

int cuKernelGetFunction(void** out, void* kernel) {
  ENTER_CONTEXT(cuKernelGetFunction);
  *out = kernel;
  return runs_on(((Kernel*)kernel)->library, capability(context)) ? OK : NO_BINARY;
}

int cuKernelGetAttribute(int* value, int attribute, void* kernel, int gpu) {
  ENTER_CONTEXT(cuKernelGetAttribute);
  *value = attribute == 5 ? ((Kernel*)kernel)->library->sm : 0;
  return OK;
}

int cuKernelSetAttribute(int attribute, int value, void* handle, int gpu) {
  ENTER_CONTEXT(cuKernelSetAttribute);
  Kernel* kernel = handle;
  if (attribute != 8 || value + (int)kernel->shared > shared_of_block(capability(gpu))) return INVALID_VALUE;
  kernel->allowed[gpu] = value;
  return OK;
}

/* ---- launches ---------------------------------------------------------------------------------------------------------------------------- */

static unsigned cluster_of(const Config* config) { return config->count ? config->attributes[0].value[0] : 1; }

static int judge(const Kernel* kernel, const Config* c) {
  const unsigned threads = c->block[0] * c->block[1] * c->block[2], cluster = cluster_of(c), all = c->shared + kernel->shared;
  if (!runs_on(kernel->library, capability(context))) return NO_BINARY;
  for (int d = 0; d < 3; ++d)
    if (!c->grid[d] || !c->block[d] || c->grid[d] > (d ? 65535u : 2147483647u)) return INVALID_VALUE;
  if (threads > 1024 || c->block[2] > 64 || threads > kernel->threads) return INVALID_VALUE;
  if ((kernel->allowed[context] < 0 ? all > WITHOUT_ASKING : (int)c->shared > kernel->allowed[context] && all > WITHOUT_ASKING) || (int)all > shared_of_block(capability(context))) return INVALID_VALUE;
  if (kernel->registers * ((threads + 31) / 32 * 32) > 65536) return OUT_OF_RESOURCES;
  if (cluster > 1 && (capability(context) < 90 || cluster > 8 || c->grid[0] % cluster)) return INVALID_VALUE;
  return OK;
}

int cuOccupancyMaxActiveClusters(int* clusters, void* function, const Config* config) {
  ENTER_CONTEXT(cuOccupancyMaxActiveClusters);
  const int wrong = judge(function, config);
  *clusters = atoi(setting("STAND_IN_CLUSTERS", "16"));
  return wrong;
}

static int run(const Kernel* kernel, const Config* c, void** arguments, void** extra) {
  static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
  size_t (*const memory_of)(uint64_t (*)[2], size_t) = (size_t (*)(uint64_t (*)[2], size_t))dlsym(RTLD_DEFAULT, "stand_in_memory");
  char error[2048] = "";
  const size_t most = memory_of ? memory_of(0, 0) + 64 : 0;
  uint64_t (*memory)[2] = malloc(most * sizeof *memory);
  const size_t count = memory_of ? memory_of(memory, most) : 0;
  pthread_mutex_lock(&one);
  const int failed = kernel->library->emulate(kernel->symbol, kernel->library->source, c->grid, c->block, c->shared, 0, arguments,
                                              extra ? extra[1] : 0, memory, count, error, sizeof error);
  pthread_mutex_unlock(&one);
  free(memory);
  if (failed) fprintf(stderr, "%s\n", error), say("fault %s\n", error, (unsigned[9]){0});
  return failed ? LAUNCH_FAILED : OK;
}

/* The parameters' bytes as the real driver copies them: as many of each as the code says that it takes. */
static void say_parameters(const Kernel* kernel, void** arguments) {
  const char* path = getenv("STAND_IN_LOG");
  const Elf64_Shdr* info = kernel->library->text ? 0 : section(kernel->library->code, ".nv.info.", kernel->symbol);
  FILE* file = info && getenv("STAND_IN_PARAMETERS") && path ? fopen(path, "a") : 0;
  if (!file) return;
  fprintf(file, "parameters %s", kernel->symbol);
  for (unsigned wanted = 0, found = 1; found; ++wanted) {
    found = 0;
    for (const char *at = kernel->library->code + info->sh_offset, *end = at + info->sh_size; at + 4 <= end;) {
      const unsigned form = (unsigned char)at[0], kind = (unsigned char)at[1], size = *(const uint16_t*)(at + 2);
      if (form == 4 && kind == 0x17 && *(const uint16_t*)(at + 8) == wanted) {  /* EIATTR_KPARAM_INFO */
        const unsigned bytes = *(const unsigned*)(at + 12) >> 18;
        fprintf(file, " ");
        for (unsigned i = 0; i < bytes; ++i) fprintf(file, "%02x", ((unsigned char*)arguments[wanted])[i]);
        found = 1;
      }
      at += form == 4 ? 4 + size : 4;
    }
  }
  fprintf(file, "\n");
  fclose(file);
}

int cuLaunchKernelEx(const Config* c, void* handle, void** arguments, void** extra) {
  ENTER_CONTEXT(cuLaunchKernelEx);
  const Kernel* kernel = handle;
  const int wrong = judge(kernel, c);
  const unsigned n[9] = {c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1] * c->block[2], c->shared, cluster_of(c), (unsigned)context, (unsigned)wrong};
  say("launch %s grid %u %u %u block %u %u shared %u cluster %u gpu %u status %u\n", kernel->symbol, n);
  if (!wrong) say_parameters(kernel, arguments);
  return wrong || !kernel->library->emulate ? wrong : run(kernel, c, arguments, extra);
}

int cuMemsetD32Async(uint64_t pointer, unsigned value, size_t count, void* stream) {
  ENTER_CONTEXT(cuMemsetD32Async);
  if (getenv("STAND_IN_TRANSLATOR"))
    for (size_t i = 0; i < count; ++i) ((uint32_t*)pointer)[i] = value;
  say("memset%s %u\n", "", (unsigned[9]){(unsigned)count});
  return OK;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* data, const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
                           const unsigned* steps, int interleave, int swizzle, int l2, int fill) {
  ENTER(cuTensorMapEncodeTiled);
  if ((uintptr_t)data % 16 || rank < 1 || rank > 5) return INVALID_VALUE;
  for (unsigned d = 0; d < rank; ++d)
    if (!sizes[d] || sizes[d] > (uint64_t)1 << 32 || !box[d] || box[d] > 256 || (d + 1 < rank && (strides[d] % 16 || strides[d] >= (uint64_t)1 << 40))) return INVALID_VALUE;
  say("tensor map%s %u\n", "", (unsigned[9]){rank});
  return OK;
}

int cuGetErrorString(int error, const char** text) {
  static const struct { int number; const char* text; } known[] = {
      {0, "no error"}, {1, "invalid argument"}, {2, "out of memory"}, {3, "initialization error"}, {100, "no CUDA-capable device is detected"},
      {101, "invalid device ordinal"}, {200, "device kernel image is invalid"}, {201, "invalid device context"},
      {209, "no kernel image is available for execution on the device"}, {218, "a PTX JIT compilation failed"},
      {222, "the provided PTX was compiled with an unsupported toolchain."}, {400, "invalid resource handle"}, {500, "named symbol not found"},
      {701, "too many resources requested for launch"}, {LAUNCH_FAILED, "unspecified launch failure"}};
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
    if (known[i].number == error) return *text = known[i].text, OK;
  return *text = 0, INVALID_VALUE;
}
