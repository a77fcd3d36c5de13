// binding.h over torch/library.h, for exactly the torch minor it is compiled against. Include
// binding.h, not this.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

// libgomp's entry point, found in the one that torch itself has loaded: compiling with -fopenmp
// would bring a second one.
extern "C" void GOMP_parallel(void (*body)(void*), void* context, unsigned threads, unsigned flags)
    __attribute__((weak));

namespace at {
TORCH_API int get_num_threads();
TORCH_API bool in_parallel_region();
}  // namespace at

namespace flexops {

namespace detail {
/// torch's name of each Dtype, in the order of the enum.
inline constexpr at::ScalarType kScalarTypes[] = {
    at::ScalarType::Float,  at::ScalarType::Half,          at::ScalarType::BFloat16,
    at::ScalarType::Double, at::ScalarType::Byte,          at::ScalarType::Char,
    at::ScalarType::Short,  at::ScalarType::Int,           at::ScalarType::Long,
    at::ScalarType::Bool,   at::ScalarType::Float8_e4m3fn, at::ScalarType::Float8_e5m2};

inline at::TensorOptions options(const at::Tensor& like, Dtype dtype) {
  return like.options().dtype(kScalarTypes[static_cast<int>(dtype)]);
}
}  // namespace detail

/// A counted reference to a tensor. A default-constructed one is undefined, and only assignment and
/// destruction may touch it.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  const at::Tensor& torch() const { return tensor_; }

  void* data() const { return tensor_.data_ptr(); }
  template <typename T>
  T* data() const {
    return static_cast<T*>(data());
  }
  int64_t numel() const { return tensor_.numel(); }
  int64_t dim() const { return tensor_.dim(); }
  const int64_t* sizes() const { return tensor_.sizes().data(); }
  const int64_t* strides() const { return tensor_.strides().data(); }
  int64_t size(int64_t d) const { return tensor_.size(d); }
  Dtype dtype() const {
    const at::ScalarType type = tensor_.scalar_type();
    int index = 0;
    while (index < static_cast<int>(Dtype::other) && detail::kScalarTypes[index] != type) ++index;
    return static_cast<Dtype>(index);
  }
  bool is_cpu() const { return tensor_.is_cpu(); }
  bool is_cuda() const { return tensor_.is_cuda(); }
  /// The GPU's number; -1 on the CPU.
  int32_t device_index() const { return tensor_.get_device(); }
  bool is_contiguous() const { return tensor_.is_contiguous(); }

 private:
  at::Tensor tensor_;
};

namespace detail {
inline Tensor made(at::Tensor tensor) {
  Tensor result(std::move(tensor));
  if (!FLEXOPS_DEVICE_CUDA)
    prefer_huge_pages(result.data(), static_cast<int64_t>(result.torch().nbytes()));
  return result;
}
}  // namespace detail

/// An uninitialised tensor on the device of `like`; its strides must describe memory without gaps
/// or overlaps.
inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim, Dtype dtype,
                            const Tensor& like) {
  return detail::made(at::empty_strided(at::IntArrayRef(sizes, dim), at::IntArrayRef(strides, dim),
                                        detail::options(like.torch(), dtype)));
}

/// A contiguous one.
inline Tensor empty(const int64_t* sizes, int64_t dim, Dtype dtype, const Tensor& like) {
  return detail::made(at::empty(at::IntArrayRef(sizes, dim), detail::options(like.torch(), dtype)));
}

/// destination[...] = source[...], with torch's conversions and any strides.
inline void copy(const Tensor& destination, const Tensor& source) {
  destination.torch().copy_(source.torch(), /*non_blocking=*/true);
}

/// The tensor itself if it is contiguous, else a contiguous copy.
inline Tensor contiguous(const Tensor& tensor) { return Tensor(tensor.torch().contiguous()); }

/// Calls body(begin, end) on pieces of [begin, end), on torch's threads; on all of it at once where
/// there are no more than `grain` items, which are not worth waking threads for. Once they are
/// awake, pieces of an eighth of that are. The body must not throw.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& body) {
  if (begin >= end) return;
  const int64_t least = grain > 8 ? (grain + 7) / 8 : 1, threads = at::get_num_threads();
  const int64_t pieces =
      end - begin <= grain ? 1 : std::min<int64_t>(threads, (end - begin + least - 1) / least);
  if (pieces <= 1 || GOMP_parallel == nullptr || at::in_parallel_region()) return body(begin, end);
  struct Context {
    const F& body;
    int64_t begin, end, size;
    std::atomic<int64_t> next;
  } context{body, begin, end, (end - begin + pieces - 1) / pieces, {0}};
  // The team may be smaller than asked for, so its members fetch pieces until none is left. It is
  // torch's, whatever there is to do: GNU's runtime ends the threads that a smaller team leaves
  // over, and making them anew takes most of a millisecond.
  GOMP_parallel(
      [](void* raw) {
        auto& c = *static_cast<Context*>(raw);
        for (int64_t at; (at = c.begin + c.next.fetch_add(1) * c.size) < c.end;)
          c.body(at, std::min(at + c.size, c.end));
      },
      &context, static_cast<unsigned>(threads), 0);
}

/// Makes the tensor's GPU the current device for the guard's lifetime. On a CPU it does nothing.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& tensor) {
    if (!FLEXOPS_DEVICE_CUDA) return;
    guard_.reset_device(tensor.torch().device());
    detail::guarded_gpu = tensor.device_index();
  }

 private:
  c10::OptionalDeviceGuard guard_;
};

namespace detail {

template <typename T>
struct Take {
  static T from(c10::IValue&& value) { return std::move(value).to<T>(); }  // int64_t, double, bool
};
template <>
struct Take<Tensor> {
  static Tensor from(c10::IValue&& value) { return Tensor(std::move(value).toTensor()); }
};
template <>
struct Take<std::vector<Tensor>> {
  static std::vector<Tensor> from(c10::IValue&& value) {
    std::vector<Tensor> out;
    for (at::Tensor& each : std::move(value).toTensorVector()) out.emplace_back(std::move(each));
    return out;
  }
};
template <typename T>
struct Take<std::optional<T>> {
  static std::optional<T> from(c10::IValue&& value) {
    if (value.isNone()) return std::nullopt;
    return Take<T>::from(std::move(value));
  }
};

inline void put(torch::jit::Stack* stack, const Tensor& result) {
  stack->emplace_back(result.torch());
}
template <typename... T>
void put(torch::jit::Stack* stack, const std::tuple<T...>& results) {
  std::apply([&](const T&... each) { (stack->emplace_back(each.torch()), ...); }, results);
}

template <auto function>
struct Boxed;
template <typename R, typename... A, R (*function)(A...)>
struct Boxed<function> {
  static void call(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    call(stack, std::index_sequence_for<A...>{});
  }
  template <size_t... I>
  static void call(torch::jit::Stack* stack, std::index_sequence<I...>) {
    constexpr size_t kCount = sizeof...(A);
    if constexpr (std::is_void_v<R>) {
      function(Take<A>::from(std::move(torch::jit::peek(*stack, I, kCount)))...);
      torch::jit::drop(*stack, kCount);
    } else {
      R result = function(Take<A>::from(std::move(torch::jit::peek(*stack, I, kCount)))...);
      torch::jit::drop(*stack, kCount);
      put(stack, result);
    }
  }
};

}  // namespace detail
}  // namespace flexops

// TORCH_LIBRARY_IMPL, whose dispatch key is known only when the program runs.
#define FLEXOPS_REGISTER(m)                                                                      \
  static void flexops_register(torch::Library& m);                                               \
  static const torch::detail::TorchLibraryInit flexops_library(                                  \
      torch::Library::IMPL, flexops_register, FLEXOPS_NAMESPACE_TEXT,                            \
      FLEXOPS_DEVICE_CUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU, __FILE__, __LINE__); \
  static void flexops_register(torch::Library& m)
#define FLEXOPS_IMPL(m, name, function) \
  m.impl(name,                          \
         torch::CppFunction::makeFromBoxedFunction<&::flexops::detail::Boxed<&function>::call>())
