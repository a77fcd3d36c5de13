// What a binding sees of torch, the same for the stable ABI (torch >= 2.11, FLEXOPS_STABLE_ABI=1)
// and for torch/library.h (any older torch).
//
// A binding checks arguments, calls a launcher and registers itself. One that is written by hand is
// compiled once per device type, with FLEXOPS_DEVICE_CPU or FLEXOPS_DEVICE_CUDA defined to 1; those
// of flexops' own that are written from schemas once (common/device_type.h):
//
//   #include "common/binding.h"
//   #include "scale/scale.h"
//   namespace flexops {
//   // By value: int64_t, double, bool, Tensor, TensorList, and std::optional of those.
//   static Tensor scale(Tensor x, double factor, std::optional<Tensor> bias) {
//     FLEXOPS_CHECK(x.dtype() == Dtype::f32, "flexops::scale: x must be float32, got ",
//                   dtype_name(x.dtype()));
//     x = contiguous(x);
//     Tensor out = empty_like_contiguous(x, x.dtype());
//   #if FLEXOPS_DEVICE_CUDA
//     DeviceGuard guard(x);  // does nothing on a CPU
//     check_launch("flexops::scale", scale_cuda(x.data<float>(), out.data<float>(), x.numel(),
//                                               factor, current_stream(x)));
//   #else
//     parallel_for(0, x.numel(), 4096, [&](int64_t begin, int64_t end) {
//       FLEXOPS_ISA_CALL(scale_cpu)(..., begin, end);  // common/cpu.h
//     });
//   #endif
//     return out;  // void, Tensor, or std::tuple of Tensors
//   }
//   FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "scale", scale); }
//   }  // namespace flexops
//
// Every error is an Error (RuntimeError in Python), whose text starts with the op and names the
// argument. A Tensor is a counted reference: copying one is cheap, moving one is free. Nothing here
// needs libtorch_cuda to link: a torch without CUDA can build CUDA libraries.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/device_type.h"
#if !defined(FLEXOPS_DEVICE_ANY)
#if FLEXOPS_DEVICE_CPU + FLEXOPS_DEVICE_CUDA != 1
#error "define exactly one of FLEXOPS_DEVICE_CPU and FLEXOPS_DEVICE_CUDA to 1"
#endif
#endif

// Whose operators they are: the namespace in torch.
#if !defined(FLEXOPS_NAMESPACE)
#define FLEXOPS_NAMESPACE flexops
#endif
#define FLEXOPS_TEXT_OF(word) #word
#define FLEXOPS_TEXT(word) FLEXOPS_TEXT_OF(word)
#define FLEXOPS_NAMESPACE_TEXT FLEXOPS_TEXT(FLEXOPS_NAMESPACE)

#if defined(_LIBCPP_VERSION)
// The library that runs it is torch's libstdc++ (cxx_runtime.c), which has these inline.
inline std::bad_alloc::bad_alloc() noexcept {}
inline std::bad_array_new_length::bad_array_new_length() noexcept {}
#endif

#include "common/element_type.h"
#include "common/tensor_view.h"

namespace flexops {

/// Of a ScalarType as a schema hands it over, in the low half of the word. The numbers are those
/// that saved models hold, so they do not change. Which dtypes it takes, each op checks itself.
inline Dtype dtype_of_code(int64_t code) {
  static constexpr int32_t kCodes[] = {6, 5, 15, 7, 0, 1, 2, 3, 4, 11, 24, 23};
  int index = 0;
  while (index < static_cast<int>(Dtype::other) && kCodes[index] != static_cast<int32_t>(code))
    ++index;
  return static_cast<Dtype>(index);
}

/// A piece of a text: other text, or a whole number.
struct Part {
  const char* text = nullptr;
  int64_t number = 0;
  Part(const char* value) : text(value) {}
  template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
  Part(T value) : number(static_cast<int64_t>(value)) {}
  template <typename T, typename = decltype(std::declval<const T&>().c_str()), typename = void>
  Part(const T& value) : text(value.c_str()) {}
};

/// What an error says, and what goes into it: of limited length, cut off there. Not a std::string:
/// <string> and <stdexcept>, and what is made of them for each binding, take it a third of its time
/// to compile.
class Text {
 public:
  Text(std::initializer_list<Part> parts) {
    for (const Part& part : parts) *this += part;
  }
  [[gnu::noinline, gnu::cold]] Text& operator+=(const Part& part) {
    char digits[24];
    const char* from = part.text;
    if (from == nullptr) {
      char* digit = digits + sizeof digits;
      *--digit = '\0';
      const bool negative = part.number < 0;
      uint64_t rest =
          negative ? -static_cast<uint64_t>(part.number) : static_cast<uint64_t>(part.number);
      do *--digit = static_cast<char>('0' + rest % 10);
      while (rest /= 10);
      if (negative) *--digit = '-';
      from = digit;
    }
    while (*from != '\0' && length_ + 1 < sizeof text_) text_[length_++] = *from++;
    text_[length_] = '\0';
    return *this;
  }
  const char* c_str() const { return text_; }

 private:
  char text_[1024] = {};
  size_t length_ = 0;
};

/// In Python a RuntimeError.
class Error : public std::exception {
 public:
  explicit Error(std::initializer_list<Part> parts) : text_(parts) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  Text text_;
};

namespace detail {
// One function for all messages: a template per message would double the time that a binding takes
// to compile.
[[noreturn, gnu::noinline, gnu::cold]] inline void fail(std::initializer_list<Part> parts) {
  throw Error(parts);
}
[[noreturn, gnu::noinline, gnu::cold]] inline void not_in_this_library(const bool& without) {
  fail({"flexops: a launcher of another device type was called", without ? "." : ""});
}
}  // namespace detail

}  // namespace flexops

/// FLEXOPS_CHECK(condition, "flexops::op: argument must be ..., got ", value): throws if the
/// condition does not hold. The parts of the message are text (const char* or a Text) and whole
/// numbers.
#define FLEXOPS_CHECK(condition, ...)                                              \
  do {                                                                             \
    if (__builtin_expect(!(condition), 0)) ::flexops::detail::fail({__VA_ARGS__}); \
  } while (0)

#include "common/current_gpu.h"
#include "common/huge_pages.h"
#if defined(FLEXOPS_STABLE_ABI) && FLEXOPS_STABLE_ABI
#include "common/binding_stable.h"
#else
#include "common/binding_classic.h"
#endif

namespace flexops {

using TensorList = std::vector<Tensor>;

/// Whether the elements fill one block of memory without gaps or overlaps, in whatever order of
/// dimensions.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const int64_t dim = tensor.dim();
  const int64_t *sizes = tensor.sizes(), *strides = tensor.strides();
  int64_t expected = 1;
  for (int64_t seen = 1, total = tensor.numel();
       seen < total;) {  // each round finds the dimension whose stride is `expected`
    int64_t found = -1;
    for (int64_t d = 0; d < dim && found < 0; ++d) {
      if (sizes[d] > 1 && strides[d] == expected) found = d;
    }
    if (found < 0) return false;
    seen *= sizes[found];
    expected *= sizes[found];
  }
  return true;
}

/// Whether several elements are one in memory, as expand() makes them: nothing can be written
/// there.
inline bool is_expanded(const Tensor& tensor) {
  const int64_t *sizes = tensor.sizes(), *strides = tensor.strides();
  bool repeated = false;
  for (int64_t d = 0, dim = tensor.dim(); d < dim; ++d) {
    if (sizes[d] == 0) return false;
    repeated = repeated || (sizes[d] > 1 && strides[d] == 0);
  }
  return repeated;
}

constexpr const char* kExpanded =
    " is written, and must not be expanded (several of its elements are one in memory): clone() it";

inline bool same_shape(const Tensor& a, const Tensor& b) {
  const int64_t dim = a.dim();
  if (dim != b.dim()) return false;
  const int64_t *left = a.sizes(), *right = b.sizes();
  for (int64_t d = 0; d < dim; ++d) {
    if (left[d] != right[d]) return false;
  }
  return true;
}

/// Whether two tensors of one shape hold their elements in the same order (strides of dimensions of
/// size 1 mean nothing).
inline bool same_strides(const Tensor& a, const Tensor& b) {
  const int64_t *sizes = a.sizes(), *left = a.strides(), *right = b.strides();
  for (int64_t d = 0, dim = a.dim(); d < dim; ++d) {
    if (sizes[d] > 1 && left[d] != right[d]) return false;
  }
  return true;
}

/// A contiguous, uninitialised tensor of the shape and on the device of `like`.
inline Tensor empty_like_contiguous(const Tensor& like, Dtype dtype) {
  return empty(like.sizes(), like.dim(), dtype, like);
}

/// A contiguous copy in memory of its own, which is aligned.
inline Tensor contiguous_copy(const Tensor& tensor) {
  Tensor out = empty_like_contiguous(tensor, tensor.dtype());
  copy(out, tensor);
  return out;
}

[[gnu::noinline]] inline TensorView view_of(const Tensor& tensor) {
  TensorView view{tensor.data(), tensor.dtype(), tensor.dim(), 1, tensor.sizes(), tensor.strides()};
  for (int64_t d = 0; d < view.dim; ++d) view.numel *= view.sizes[d];
  return view;
}

/// "[2, 3]", for error messages.
[[gnu::noinline, gnu::cold]] inline Text sizes_text(const int64_t* sizes, int64_t dim) {
  Text out{"["};
  for (int64_t d = 0; d < dim; ++d) (out += d ? ", " : "") += sizes[d];
  return out += "]";
}
inline Text shape_text(const Tensor& tensor) { return sizes_text(tensor.sizes(), tensor.dim()); }

/// Whether the tensor is on the device type that this library is for.
inline bool on_this_device_type(const Tensor& tensor) {
  return FLEXOPS_DEVICE_CUDA ? tensor.is_cuda() : tensor.is_cpu();
}

/// Throws if `tensor` is not on the very device of `other`, which is of that type.
[[gnu::noinline]] inline void check_device(const char* op, const char* name, const Tensor& tensor,
                                           const char* other_name, const Tensor& other) {
  FLEXOPS_CHECK(on_this_device_type(tensor) && tensor.device_index() == other.device_index(), op,
                ": ", name, " must be on the device of ", other_name);
}

/// Of a tensor of floats; throws if its dtype is another. `argument` may begin with the op's name,
/// which is then left out.
[[gnu::noinline]] inline ElementType element_type(const char* op, const char* argument,
                                                  Dtype dtype) {
  FLEXOPS_CHECK(dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16, op,
                *op ? ": " : "", argument, " must be float32, float16 or bfloat16, got ",
                dtype_name(dtype));
  return static_cast<ElementType>(dtype);  // the first three have the same values
}

/// Throws if a launcher returned an error text (nullptr means success).
inline void check_launch(const char* op, const char* error) {
  FLEXOPS_CHECK(error == nullptr, op, ": CUDA error: ", error);
}

}  // namespace flexops

// FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "op", function); } adds this device type's kernels to ops
// that Python has defined.

#include "common/stream.h"
