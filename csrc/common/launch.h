// Launching kernels, the same for CUDA's driver and HIP's runtime. A launcher names a kernel by a
// C++ expression, which the host compiler checks, as it checks the arguments:
//
//   const KernelOf<Params> kKernels[] = {kernel<scale<float>>, kernel<scale<bf16>>};
//   launch(kKernels[type], {blocks(n), {256}, stream}, params);
//   return last_error();
//
// For CUDA a library holds no device code. It holds the names of the kernels that it launches, as
// NVRTC takes them (flexops/build/compile/device_code.py reads them from its file), and asks for
// each at its first launch on a device: flexops_set_provider() says whom. Only the driver is
// called, through the libcuda.so.1 that torch has opened; every driver since 525 has what is used.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/arithmetic.h"
#if FLEXOPS_EXTENSION  // people's own sources, which have CUDA's headers and runtime:
                       // extension_launch.h
#define FLEXOPS_HIP 0
namespace flexops {
inline int current_gpu() {
  int gpu = 0;
  cudaGetDevice(&gpu);
  return gpu;
}
}  // namespace flexops
#else
#include "common/current_gpu.h"
#include "common/dtypes.cuh"
#include "common/element_type.h"
#endif
#if !FLEXOPS_HIP
#include <dlfcn.h>

#include <typeinfo>
#endif

namespace flexops {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  Dim3 grid, block;
  void* stream = nullptr;
  int64_t shared_bytes = 0;  // dynamic shared memory
  unsigned cluster = 1;      // blocks of a cluster, along x
  bool early = false;        // starts while the kernel before it ends, for which it waits itself:
                             // where its code is for 9.0 or newer
  bool together = false;     // all blocks run at once: they wait for each other
};

/// Of a kernel that may start early: they wait beside those of the kernel ahead.
constexpr int64_t kFewBlocks = 128;
constexpr int kMaxGpus = 32;

/// A kernel, whatever it takes.
struct Kernel {
#if FLEXOPS_HIP
  const void* function;
#else
  const char* (*name)();
  void* handle[kMaxGpus];  // CUkernel; null until the GPU's first launch
  uint64_t text;           // number of what the provider compiles it with besides; 0: nothing
  uint64_t shared;         // see allow_shared()
  uint64_t waiting;        // see waits()
#endif
};

/// A kernel that takes arguments of these types.
template <typename... A>
struct KernelOf {
  Kernel* kernel;
};

namespace detail {
/// Has the kernel's name in it, which flexops/build/compile/device_code.py finds: "... [with auto
/// function = flexops::rope::rotate<float>]", or, because clang leaves out the template's arguments
/// there, a mangled one.
template <auto function>
struct NameOf {};
template <auto function>
const char* kernel_name() {
#if defined(__clang__)
  return typeid(NameOf<function>).name();
#else
  return __PRETTY_FUNCTION__;
#endif
}
/// The same for a rare kernel.
template <auto function>
struct RareNameOf {};
template <auto function>
const char* rare_name() {
#if defined(__clang__)
  return typeid(RareNameOf<function>).name();
#else
  return __PRETTY_FUNCTION__;
#endif
}
template <auto function>
#if FLEXOPS_HIP
inline Kernel instance = {reinterpret_cast<const void*>(function)};
#else
inline Kernel instance = {kernel_name<function>, {}, 0, 0};
template <auto function>
inline Kernel rare_instance = {rare_name<function>, {}, 0, 0};
template <auto function, typename... A>
constexpr KernelOf<A...> typed_rare(void (*)(A...)) {
  return {&rare_instance<function>};
}
#endif
template <auto function, typename... A>
constexpr KernelOf<A...> typed(void (*)(A...)) {
  return {&instance<function>};
}
template <typename T>
struct Same {
  using type = T;
};
}  // namespace detail

template <auto function>
inline constexpr auto kernel = detail::typed<function>(function);
/// A kernel that builds ahead of time leave out, because few calls launch it: it is compiled when
/// it is first launched. Where that cannot be, last_error() reports it and the reference stands
/// in: nothing of the call may have been launched before that writes to its arguments.
template <auto function>
#if FLEXOPS_HIP
inline constexpr auto rare_kernel = kernel<function>;
#else
inline constexpr auto rare_kernel = detail::typed_rare<function>(function);
#endif

/// A kernel of each type, by ElementType: FLEXOPS_EACH_TYPE(rare_kernel, scale, true) is
/// {rare_kernel<scale<float, true>>, ...}.
#define FLEXOPS_EACH_TYPE(which, name, ...)                            \
  {which<name<float, ##__VA_ARGS__>>, which<name<f16, ##__VA_ARGS__>>, \
   which<name<bf16, ##__VA_ARGS__>>}

/// The same where float16 is rare, as it is in training.
#define FLEXOPS_EACH_COMMON_TYPE(name, ...)                                   \
  {kernel<name<float, ##__VA_ARGS__>>, rare_kernel<name<f16, ##__VA_ARGS__>>, \
   kernel<name<bf16, ##__VA_ARGS__>>}

// ---- the driver ----

namespace detail {

#if FLEXOPS_HIP

inline thread_local hipError_t status = hipSuccess;

inline void note(hipError_t result) {
  if (status == hipSuccess) status = result;
}

inline void start(Kernel& kernel, const LaunchConfig& c, void** arguments) {
  if (status != hipSuccess) return;
  note(hipLaunchKernel(kernel.function, dim3(c.grid.x, c.grid.y, c.grid.z),
                       dim3(c.block.x, c.block.y, c.block.z), arguments,
                       static_cast<size_t>(c.shared_bytes), static_cast<hipStream_t>(c.stream)));
}

using GpuAttribute = hipDeviceAttribute_t;
constexpr GpuAttribute kProcessors = hipDeviceAttributeMultiprocessorCount,
                       kSharedOfBlock = hipDeviceAttributeMaxSharedMemoryPerBlock,
                       kSharedOfProcessor = hipDeviceAttributeMaxSharedMemoryPerMultiprocessor,
                       kMajor = hipDeviceAttributeComputeCapabilityMajor,
                       kMinor = hipDeviceAttributeComputeCapabilityMinor;

inline int gpu_attribute(GpuAttribute which) {
  int value = 0;
  note(hipDeviceGetAttribute(&value, which, current_gpu()));
  return value;
}

#else

/// What is used of cuda.h, whose numbers and layouts do not change.
struct DriverLaunch {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
struct alignas(8) DriverLaunchAttribute {
  int id, padding;
  unsigned value[16];
};
constexpr int kCooperative = 2;       // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
constexpr int kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kOverlap = 6;           // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kPtxVersion = 5;        // CU_FUNC_ATTRIBUTE_PTX_VERSION
constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kNotInitialized = 3, kInvalidContext = 201;
/// The driver's own text names no cure. A process that has GPU tensors and no CUDA is a child of
/// the one that it was forked from.
constexpr const char* kNotStarted =
    "initialization error (a process that was forked after its parent had used CUDA cannot use it: "
    "multiprocessing.set_start_method(\"spawn\"))";

struct Driver {
  int (*cuLaunchKernelEx)(const DriverLaunch*, void* kernel, void** arguments, void** extra);
  int (*cuKernelSetAttribute)(int attribute, int value, void* kernel, int device);
  int (*cuKernelGetAttribute)(int* value, int attribute, void* kernel, int device);
  int (*cuKernelGetFunction)(void** function, void* kernel);
  int (*cuOccupancyMaxActiveClusters)(int* clusters, void* function, const DriverLaunch*);
  int (*cuMemsetD32Async)(uint64_t pointer, unsigned value, size_t count, void* stream);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(void** context, int device);
  int (*cuCtxSetCurrent)(void* context);
  int (*cuTensorMapEncodeTiled)(void* map, int type, unsigned rank, void* data,
                                const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
                                const unsigned* steps, int interleave, int swizzle,
                                int l2_promotion, int fill);
  int (*cuGetErrorString)(int error, const char** text);
  bool whole = true;

  template <typename F>
  void find(void* library, F*& function, const char* name) {
    function = library ? reinterpret_cast<F*>(dlsym(library, name)) : nullptr;
    whole = whole && function;
  }
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    find(library, cuLaunchKernelEx, "cuLaunchKernelEx");
    find(library, cuKernelSetAttribute, "cuKernelSetAttribute");
    find(library, cuKernelGetAttribute, "cuKernelGetAttribute");
    find(library, cuKernelGetFunction, "cuKernelGetFunction");
    find(library, cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters");
    find(library, cuMemsetD32Async, "cuMemsetD32Async");
    find(library, cuDeviceGetAttribute, "cuDeviceGetAttribute");
    find(library, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(library, cuCtxSetCurrent, "cuCtxSetCurrent");
    find(library, cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
    find(library, cuGetErrorString, "cuGetErrorString");
  }
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }
};

/// Gives the CUkernel of that name for a GPU, or null and a text. Python's: it compiles what is not
/// there yet.
using Provider = void* (*)(const char* name, int device, char* error, int error_size);
inline Provider provider = nullptr;

inline thread_local const char* status = nullptr;
inline thread_local char provider_error[2048], unknown_error[64];

inline void note(const char* error) {
  if (!status) status = error;
}

/// Whether the driver's call went well.
inline bool note(int result) {
  if (result == 0) return true;
  const char* text = nullptr;
  Driver::get().cuGetErrorString(result, &text);
  if (!text)
    snprintf(unknown_error, sizeof unknown_error, "error %d, which this driver has no text for",
             result);
  if (result == kNotInitialized) text = kNotStarted;
  note(text ? text : unknown_error);
  return false;
}

[[gnu::noinline, gnu::cold]] inline void* obtain(Kernel& kernel, int device) {
  if (!Driver::get().whole)
    return note("the CUDA driver (libcuda.so.1) is missing or older than 525"), nullptr;
  if (!provider)
    return note(
               "this library was opened by something other than flexops, so nobody provides its "
               "kernels"),
           nullptr;
  char name[1024];
  const char* const with_text = kernel.text ? "%s#%llu" : "%s";
  snprintf(name, sizeof name, with_text, kernel.name(),
           static_cast<unsigned long long>(kernel.text));
  void* handle = provider(name, device, provider_error, sizeof provider_error);
  if (!handle) note(provider_error);
  if (handle && device < kMaxGpus)
    __atomic_store_n(&kernel.handle[device], handle, __ATOMIC_RELEASE);
  return handle;
}

/// The kernel for the current GPU; null if there is none.
inline void* find(Kernel& kernel) {
  const int device = current_gpu();
  void* handle =
      device < kMaxGpus ? __atomic_load_n(&kernel.handle[device], __ATOMIC_ACQUIRE) : nullptr;
  return __builtin_expect(handle != nullptr, 1) ? handle : obtain(kernel, device);
}

/// The kernel compiled with a text of this number (flexops/build/load/provider_texts.py). Each is
/// made once and stays; two threads may both make it.
inline Kernel* with_text(Kernel* kernel, uint64_t text) {
  struct Made {
    Kernel kernel;
    Kernel* of;
    Made* next;
  };
  static Made* last = nullptr;
  Made* known = __atomic_load_n(&last, __ATOMIC_ACQUIRE);
  for (Made* made = known; made; made = made->next) {
    if (made->of == kernel && made->kernel.text == text) return &made->kernel;
  }
  Made* made = static_cast<Made*>(calloc(1, sizeof(Made)));
  if (!made) return note("there is no memory for a kernel's name"), kernel;
  made->kernel.name = kernel->name, made->kernel.text = text, made->of = kernel, made->next = known;
  while (!__atomic_compare_exchange_n(&last, &made->next, made, false, __ATOMIC_RELEASE,
                                      __ATOMIC_RELAXED)) {}
  return &made->kernel;
}

/// A thread on which nothing of CUDA's runtime has run yet has no context: the runtime's own is the
/// device's primary one.
[[gnu::noinline, gnu::cold]] inline bool enter_context() {
  void* context = nullptr;
  const Driver& driver = Driver::get();
  return note(driver.cuDevicePrimaryCtxRetain(&context, current_gpu())) &&
         note(driver.cuCtxSetCurrent(context));
}

/// What the driver answers to a call that needs a context, which is entered where there is none.
template <class Call>
int in_context(const Call& call) {
  const int result = call();
  const bool none = result == kInvalidContext || result == kNotInitialized;
  return __builtin_expect(none, 0) && enter_context() ? call() : result;
}

/// A configuration as the driver takes it.
struct DriverConfig {
  DriverLaunchAttribute attributes[3];
  DriverLaunch launch;

  explicit DriverConfig(const LaunchConfig& c)
      : launch{{c.grid.x, c.grid.y, c.grid.z},
               {c.block.x, c.block.y, c.block.z},
               static_cast<unsigned>(c.shared_bytes),
               c.stream,
               attributes,
               0} {
    if (c.cluster > 1) add(kClusterDimension, c.cluster);
    if (c.early) add(kOverlap, 1);
    if (c.together) add(kCooperative, 1);
  }
  void add(int id, unsigned value) {
    attributes[launch.attribute_count++] = {id, 0, {value, 1, 1}};
  }
  DriverConfig(const DriverConfig&) = delete;
  DriverConfig& operator=(const DriverConfig&) = delete;
};

/// The GPUs on which a kernel may have `known >> 32` bytes of dynamic shared memory are the bits of
/// `known`.
inline bool is_allowed(uint64_t known, int64_t bytes, uint64_t gpu) {
  return known >> 32 >= static_cast<uint64_t>(bytes) && (known & gpu);
}

/// Threads ask one after another, and never for less than another one has got: it may not have
/// launched yet.
[[gnu::noinline, gnu::cold]] inline int ask_for_shared(Kernel& kernel, void* handle, int64_t bytes,
                                                       uint64_t gpu) {
  static int taken = 0;
  while (__atomic_exchange_n(&taken, 1, __ATOMIC_ACQUIRE)) {}
  const uint64_t known = kernel.shared, before = known >> 32;
  const uint64_t most =
      before > static_cast<uint64_t>(bytes) ? before : static_cast<uint64_t>(bytes);
  const auto ask = [&](uint64_t wanted) {
    return Driver::get().cuKernelSetAttribute(kMaxDynamicShared, static_cast<int>(wanted), handle,
                                              current_gpu());
  };
  int refused = ask(most);
  if (refused == 0 && gpu) {
    __atomic_store_n(&kernel.shared, most << 32 | (most == before ? known & 0xffffffffu : 0) | gpu,
                     __ATOMIC_RELEASE);
  } else if (refused != 0 && most > static_cast<uint64_t>(bytes)) {  // another GPU has more
    refused = ask(static_cast<uint64_t>(bytes));
  }
  __atomic_store_n(&taken, 0, __ATOMIC_RELEASE);
  return refused;
}

/// Lets the kernel have so much dynamic shared memory, which is asked for once, and not at each
/// launch.
inline int allow_shared(Kernel& kernel, void* handle, int64_t bytes) {
  constexpr int64_t kWithoutAsking = 40000;  // of the 48 KiB, less what a kernel has beside
  if (bytes <= kWithoutAsking) return 0;
  const uint64_t gpu = current_gpu() < kMaxGpus ? uint64_t{1} << current_gpu() : 0;
  return is_allowed(__atomic_load_n(&kernel.shared, __ATOMIC_ACQUIRE), bytes, gpu)
             ? 0
             : ask_for_shared(kernel, handle, bytes, gpu);
}

/// Whether a kernel waits for the one before it, which code for GPUs before 9.0 does not: a GPU may
/// have compiled that for itself. Of each GPU it is asked once.
inline bool waits(Kernel& kernel, void* handle) {
  const int gpu = current_gpu();
  const uint64_t asked = gpu < kMaxGpus ? uint64_t{1} << gpu : 0, waiting = asked << 32;
  const uint64_t known = __atomic_load_n(&kernel.waiting, __ATOMIC_ACQUIRE);
  if (known & asked) return known & waiting;
  int version = 0;
  const int refused = Driver::get().cuKernelGetAttribute(&version, kPtxVersion, handle, gpu);
  if (refused != 0) return false;
  const bool found = version >= 90;
  __atomic_fetch_or(&kernel.waiting, found ? asked | waiting : asked, __ATOMIC_RELEASE);
  return found;
}

inline void start(Kernel& kernel, LaunchConfig c, void** arguments) {
  if (__builtin_expect(status != nullptr, 0)) return;
  void* handle = find(kernel);
  if (!handle) return;
  const int result = in_context([&] {
    const int refused = allow_shared(kernel, handle, c.shared_bytes);
    if (refused) return refused;
    c.early = c.early && waits(kernel, handle);
    const DriverConfig config(c);
    return Driver::get().cuLaunchKernelEx(&config.launch, handle, arguments, nullptr);
  });
  if (__builtin_expect(result != 0, 0)) note(result);
}

/// What is refused here is no error of the launch, which takes another kernel then: nor is that
/// this one is not compiled.
inline int ask_clusters(Kernel& kernel, const LaunchConfig& c) {
  const char* const before = status;
  void *handle = find(kernel), *function = nullptr;
  status = before;
  const Driver& driver = Driver::get();
  int version = 0, clusters = 0;
  const DriverConfig config(c);
  const auto ask = [&] {
    int refused = driver.cuKernelGetAttribute(&version, kPtxVersion, handle, current_gpu());
    if (refused == 0) refused = allow_shared(kernel, handle, c.shared_bytes);
    if (refused == 0) refused = driver.cuKernelGetFunction(&function, handle);
    return refused ? refused
                   : driver.cuOccupancyMaxActiveClusters(&clusters, function, &config.launch);
  };
  return handle && in_context(ask) == 0 && version >= 90 ? clusters : 0;
}

using GpuAttribute = int;
constexpr GpuAttribute kProcessors = 16, kSharedOfBlock = 97, kSharedOfProcessor = 81, kMajor = 75,
                       kMinor = 76;  // CU_DEVICE_ATTRIBUTE_...

inline int gpu_attribute(GpuAttribute which) {
  int value = 0;
  const Driver& driver = Driver::get();
  if (driver.whole) note(driver.cuDeviceGetAttribute(&value, which, current_gpu()));
  return value;
}

#endif

}  // namespace detail

/// Queues a kernel. What goes wrong is reported by last_error(), and ends the call: later kernels,
/// which need what the first would have written, are not queued.
template <typename... A>
void launch(const KernelOf<A...>& kernel, const LaunchConfig& config,
            const typename detail::Same<A>::type&... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  detail::start(*kernel.kernel, config, pointers);
}

/// Whether the kernel can be had on the current GPU, if that is not known yet; last_error() tells
/// why not.
template <typename... A>
bool ready(const KernelOf<A...>& kernel) {
#if FLEXOPS_HIP
  return (void)kernel, true;
#else
  return detail::find(*kernel.kernel) != nullptr;
#endif
}

/// nullptr, or the text of the first thing that has gone wrong on this thread since the last call.
inline const char* last_error() {
  const auto error = detail::status;
  detail::status = {};
#if FLEXOPS_HIP
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
#else
  return error;
#endif
}

/// Sets `count` words on the device to 0, as part of the stream.
inline void set_zero(uint32_t* words, int64_t count, void* stream) {
#if FLEXOPS_HIP
  detail::note(
      hipMemsetAsync(words, 0, static_cast<size_t>(count) * 4, static_cast<hipStream_t>(stream)));
#else
  detail::note(detail::in_context([&] {
    return detail::Driver::get().cuMemsetD32Async(reinterpret_cast<uint64_t>(words), 0,
                                                  static_cast<size_t>(count), stream);
  }));
#endif
}

/// What launchers ask of the current GPU.
struct Gpu {
  int processors, shared_of_block, shared_of_processor;  // multiprocessors; bytes
  int capability;                                        // 90 for 9.0
};

/// Asked once by each thread, and again when it has gone on to another GPU.
inline const Gpu& gpu_facts() {
  thread_local Gpu known;
  thread_local int device = -1;
  if (device != current_gpu()) {
    const int processors = detail::gpu_attribute(detail::kProcessors);
    known = {processors > 0 ? processors : 1, detail::gpu_attribute(detail::kSharedOfBlock),
             detail::gpu_attribute(detail::kSharedOfProcessor),
             10 * detail::gpu_attribute(detail::kMajor) + detail::gpu_attribute(detail::kMinor)};
    device = current_gpu();
  }
  return known;
}

/// How many clusters of so many blocks, one on a multiprocessor, run at once on a GPU of Hopper's,
/// less a few: parts of an H200 differ in their numbers of processors.
inline int clusters_of(int size, int processors) {
  constexpr int kClusters[] = {132, 64, 38, 28, 20, 14, 13, 13};
  return kClusters[size - 1] * processors / 132;
}

#if !FLEXOPS_HIP
/// How many such clusters the current GPU runs at once; 0 if it or the kernel's code has none. A
/// thread keeps its latest answers.
template <typename... A>
int resident_clusters(const KernelOf<A...>& kernel, const LaunchConfig& config) {
  struct Answer {
    const Kernel* kernel;
    int gpu;
    unsigned cluster, threads;
    int64_t shared_bytes;
    int clusters;
  };
  constexpr unsigned kKept = 16;
  thread_local Answer known[kKept];
  thread_local unsigned oldest = 0;
  for (const Answer& answer : known) {
    if (answer.kernel == kernel.kernel && answer.gpu == current_gpu() &&
        answer.cluster == config.cluster && answer.threads == config.block.x &&
        answer.shared_bytes == config.shared_bytes)
      return answer.clusters;
  }
  Answer& answer = known[oldest++ % kKept];
  answer = {kernel.kernel,  current_gpu(),       config.cluster,
            config.block.x, config.shared_bytes, detail::ask_clusters(*kernel.kernel, config)};
  return answer.clusters;
}
#endif

inline Dim3 blocks(int64_t x, int64_t y = 1, int64_t z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

}  // namespace flexops

#if !FLEXOPS_HIP
/// Called once, by the loader; see obtain().
extern "C" __attribute__((visibility("default"), weak)) void flexops_set_provider(
    flexops::detail::Provider provider) {
  flexops::detail::provider = provider;
}
#endif
