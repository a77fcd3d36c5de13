// binding.h over torch's stable ABI: one library serves every torch from 2.11 on. Include
// binding.h, not this.
//
// Only the C functions are used, which are the stable ABI. torch's C++ layer over them
// (torch/csrc/stable/library.h) doubles the time a binding takes to compile, and its Tensor
// allocates a control block each, which a multi-tensor op with thousands of arguments feels.
#pragma once

#include <cstring>

#include "common/torch_abi.h"

namespace flexops {

namespace detail {
[[noreturn, gnu::noinline, gnu::cold]] inline void torch_failed(const char* call) {
  fail({"flexops: torch failed in ", call, " (see the log above)"});
}
}  // namespace detail

// torch's C functions tell only that they failed, and print why.
#define FLEXOPS_TORCH(call)                                                       \
  do {                                                                            \
    if (__builtin_expect((call) != 0, 0)) ::flexops::detail::torch_failed(#call); \
  } while (0)

namespace detail {
/// torch's number of each Dtype, in the order of the enum; asked once, because they may differ
/// between torch versions.
struct DtypeTable {
  int32_t codes[static_cast<int>(Dtype::other)];
  DtypeTable()
      : codes{aoti_torch_dtype_float32(),       aoti_torch_dtype_float16(),
              aoti_torch_dtype_bfloat16(),      aoti_torch_dtype_float64(),
              aoti_torch_dtype_uint8(),         aoti_torch_dtype_int8(),
              aoti_torch_dtype_int16(),         aoti_torch_dtype_int32(),
              aoti_torch_dtype_int64(),         aoti_torch_dtype_bool(),
              aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e5m2()} {}
  static const DtypeTable& get() {
    static const DtypeTable table;
    return table;
  }
};
}  // namespace detail

/// A counted reference to a tensor. A default-constructed one is undefined, and only assignment and
/// destruction may touch it.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle owned) : handle_(owned) {}
  Tensor(const Tensor& other) {
    if (other.handle_) FLEXOPS_TORCH(aoti_torch_new_tensor_handle(other.handle_, &handle_));
  }
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle handle() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  void* data() const {
    void* out;
    FLEXOPS_TORCH(aoti_torch_get_data_ptr(handle_, &out));
    return out;
  }
  template <typename T>
  T* data() const {
    return static_cast<T*>(data());
  }
  int64_t numel() const { return ask(aoti_torch_get_numel); }
  int64_t dim() const { return ask(aoti_torch_get_dim); }
  const int64_t* sizes() const {
    int64_t* out;
    FLEXOPS_TORCH(aoti_torch_get_sizes(handle_, &out));
    return out;
  }
  const int64_t* strides() const {
    int64_t* out;
    FLEXOPS_TORCH(aoti_torch_get_strides(handle_, &out));
    return out;
  }
  int64_t size(int64_t d) const { return sizes()[d < 0 ? d + dim() : d]; }
  Dtype dtype() const {
    int32_t code;
    FLEXOPS_TORCH(aoti_torch_get_dtype(handle_, &code));
    const int32_t* codes = detail::DtypeTable::get().codes;
    int index = 0;
    while (index < static_cast<int>(Dtype::other) && codes[index] != code) ++index;
    return static_cast<Dtype>(index);
  }
  bool is_cpu() const { return device_type() == aoti_torch_device_type_cpu(); }
  bool is_cuda() const { return device_type() == aoti_torch_device_type_cuda(); }
  /// The GPU's number; -1 on the CPU (as for torch's get_device).
  int32_t device_index() const {
    int32_t out;
    FLEXOPS_TORCH(aoti_torch_get_device_index(handle_, &out));
    return out;
  }
  bool is_contiguous() const {
    bool out;
    FLEXOPS_TORCH(aoti_torch_is_contiguous(handle_, &out));
    return out;
  }

 private:
  int64_t ask(AOTITorchError (*question)(AtenTensorHandle, int64_t*)) const {
    int64_t out;
    FLEXOPS_TORCH(question(handle_, &out));
    return out;
  }
  int32_t device_type() const {
    int32_t out;
    FLEXOPS_TORCH(aoti_torch_get_device_type(handle_, &out));
    return out;
  }

  AtenTensorHandle handle_ = nullptr;
};

/// An uninitialised tensor on the device of `like`; its strides must describe memory without gaps
/// or overlaps.
inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim, Dtype dtype,
                            const Tensor& like) {
  int32_t type;
  FLEXOPS_TORCH(aoti_torch_get_device_type(like.handle(), &type));
  AtenTensorHandle out;
  FLEXOPS_TORCH(aoti_torch_empty_strided(dim, sizes, strides,
                                         detail::DtypeTable::get().codes[static_cast<int>(dtype)],
                                         type, like.device_index(), &out));
  Tensor result(out);
  if (!FLEXOPS_DEVICE_CUDA)
    detail::prefer_huge_pages(result.data(), result.numel() * dtype_size(dtype));
  return result;
}

/// A contiguous one.
[[gnu::noinline]] inline Tensor empty(const int64_t* sizes, int64_t dim, Dtype dtype,
                                      const Tensor& like) {
  FLEXOPS_CHECK(dim <= kMostDims, "flexops: a result would have more than ", kMostDims,
                " dimensions");
  int64_t strides[kMostDims], stride = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return empty_strided(sizes, strides, dim, dtype, like);
}

/// destination[...] = source[...], with torch's conversions and any strides.
inline void copy(const Tensor& destination, const Tensor& source) {
  FLEXOPS_TORCH(aoti_torch_copy_(destination.handle(), source.handle(), /*non_blocking=*/1));
}

/// The tensor itself if it is contiguous, else a contiguous copy.
inline Tensor contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  Tensor out = empty(tensor.sizes(), tensor.dim(), tensor.dtype(), tensor);
  copy(out, tensor);
  return out;
}

/// Calls body(begin, end) on pieces of [begin, end), on torch's threads; on all of it at once where
/// there are no more than `grain` items, which are not worth waking threads for. Once they are
/// awake, pieces of an eighth of that are. The body must not throw.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& body) {
  if (begin >= end) return;
  if (end - begin <= grain) return body(begin, end);
  FLEXOPS_TORCH(torch_parallel_for(
      begin, end, (grain + 7) / 8,
      [](int64_t from, int64_t to, void* context) { (*static_cast<const F*>(context))(from, to); },
      const_cast<void*>(static_cast<const void*>(&body))));
}

/// Makes the tensor's GPU the current device for the guard's lifetime. On a CPU it does nothing.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& tensor) {
    if (FLEXOPS_DEVICE_CUDA) begin(tensor);
  }
  ~DeviceGuard() {
    if (FLEXOPS_DEVICE_CUDA) end();
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  [[gnu::noinline]] void begin(const Tensor& tensor) {
    FLEXOPS_TORCH(aoti_torch_create_device_guard(tensor.device_index(), &guard_));
    detail::guarded_gpu = tensor.device_index();
  }
  [[gnu::noinline]] void end() { aoti_torch_delete_device_guard(guard_); }

  DeviceGuardHandle guard_ = nullptr;
};

namespace detail {

// Arguments come as 64-bit words that own what they point to: each must be taken exactly once.
template <typename T>
struct Take {  // int64_t, double, bool and handles: the value is in the word's first bytes
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(StableIValue) &&
                __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  static T from(StableIValue word) {
    T out;
    memcpy(&out, &word, sizeof(T));
    return out;
  }
};
template <>
struct Take<Tensor> {
  static Tensor from(StableIValue word) { return Tensor(Take<AtenTensorHandle>::from(word)); }
};
template <>
struct Take<std::vector<Tensor>> {
  static std::vector<Tensor> from(StableIValue word) {
    struct List {
      StableListHandle handle;
      ~List() { torch_delete_list(handle); }
    } list{Take<StableListHandle>::from(word)};
    size_t size = 0;
    FLEXOPS_TORCH(torch_list_size(list.handle, &size));
    std::vector<Tensor> out;
    out.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      FLEXOPS_TORCH(torch_list_get_item(list.handle, i, &element));
      out.push_back(Take<Tensor>::from(element));
    }
    return out;
  }
};
template <typename T>
struct Take<std::optional<T>> {
  static std::optional<T> from(StableIValue word) {
    auto* boxed = Take<StableIValue*>::from(word);
    if (boxed == nullptr) return std::nullopt;
    StableIValue inner = *boxed;
    delete boxed;  // made by torch with new: what its own headers do for a TORCH_TARGET_VERSION
                   // before 2.13
    return Take<T>::from(inner);
  }
};

inline StableIValue word_of(Tensor& result) {
  AtenTensorHandle handle = result.release();
  StableIValue word = 0;
  memcpy(&word, &handle, sizeof handle);
  return word;
}
inline void put(StableIValue* stack, Tensor result) { stack[0] = word_of(result); }
template <typename... T>
void put(StableIValue* stack, std::tuple<T...> results) {
  std::apply([&](T&... each) { ((*stack++ = word_of(each)), ...); }, results);
}

template <auto function>
struct Boxed;
template <typename R, typename... A, R (*function)(A...)>
struct Boxed<function> {
  static void call(StableIValue* stack, uint64_t arguments, uint64_t) {
    FLEXOPS_CHECK(arguments == sizeof...(A), "flexops: the schema has ", arguments,
                  " arguments, the kernel ", sizeof...(A));
    call(stack, std::index_sequence_for<A...>{});
  }
  template <size_t... I>
  static void call(StableIValue* stack, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
      function(Take<A>::from(stack[I])...);
    } else {
      put(stack, function(Take<A>::from(stack[I])...));
    }
  }
};

/// A block of registrations, undone when the library is unloaded.
class Library {
 public:
  Library(const char* key, const char* file, uint32_t line, void (*fill)(Library&)) {
    FLEXOPS_TORCH(aoti_torch_library_init_impl(FLEXOPS_NAMESPACE_TEXT, key, file, line, &library_));
    fill(*this);
  }
  ~Library() { aoti_torch_delete_library_object(library_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  void impl(const char* name, void (*kernel)(StableIValue*, uint64_t, uint64_t)) {
    FLEXOPS_TORCH(torch_library_impl(library_, name, kernel, FLEXOPS_STABLE_ABI));
  }

 private:
  TorchLibraryHandle library_ = nullptr;
};

}  // namespace detail
}  // namespace flexops

#define FLEXOPS_REGISTER(m)                                                                      \
  static void flexops_register(::flexops::detail::Library& m);                                   \
  static const ::flexops::detail::Library flexops_library(FLEXOPS_DEVICE_CUDA ? "CUDA" : "CPU",  \
                                                          __FILE__, __LINE__, flexops_register); \
  static void flexops_register(::flexops::detail::Library& m)
#define FLEXOPS_IMPL(m, name, function) m.impl(name, &::flexops::detail::Boxed<&function>::call)
