// What the bindings of multi-tensor ops share: lists of tensors are checked and laid out as rows.
#pragma once

#include "common/binding.h"
#include "common/multi_tensor.h"

#if !defined(FLEXOPS_STABLE_ABI)
#define FLEXOPS_STABLE_ABI 0
#endif

// Of the Python that runs this process, if one does; in its stable ABI since 3.2.
extern "C" {
int Py_IsInitialized() __attribute__((weak, visibility("default")));
int PyGILState_Ensure() __attribute__((weak, visibility("default")));
void PyGILState_Release(int state) __attribute__((weak, visibility("default")));
}

namespace flexops {

/// Lets go of the tensors of lists when it is destroyed. In a torch with the stable ABI, whoever
/// drops the last reference to a tensor but Python's own needs the GIL, which torch gives up for
/// the time of a call: taken and given back for each of a thousand parameters and states, that was
/// a third of what their step cost the host. Here it is taken once.
class LetGo {
 public:
  LetGo() = default;
  LetGo(LetGo&&) = default;
  ~LetGo() {
    if (lists_.size() < 2) return;  // gradients alone, which their parameters hold, too
    const bool python = FLEXOPS_STABLE_ABI && PyGILState_Ensure && PyGILState_Release &&
                        Py_IsInitialized && Py_IsInitialized();
    const int state = python ? PyGILState_Ensure() : 0;
    for (TensorList* list : lists_) list->clear();
    if (python) PyGILState_Release(state);
  }

  void add(TensorList& list) { lists_.push_back(&list); }

 private:
  std::vector<TensorList*> lists_;
};

/// One of an op's lists, as array k of every row.
struct TensorColumn {
  const char* name;
  TensorList& tensors;
  bool any_width;       // fp32, bf16 or fp16; else of `dtype`
  bool written = true;  // a copy that stands in for a tensor is written back
  Dtype dtype = Dtype::f32;
  bool optional = false;  // an empty list: no row has that array
  int64_t block = 0;      // if not 0: a number for each so many elements of the row, contiguous
};

inline Text name_of(const char* list, size_t index) { return {list, "[", index, "]"}; }

inline void check_length(const char* op, const char* list, const TensorList& tensors,
                         const char* first, size_t expected) {
  FLEXOPS_CHECK(tensors.size() == expected, op, ": ", list, " must hold ", expected,
                " tensors, as ", first, " does, got ", tensors.size());
}

/// As on_this_device_type, but on this very device. No other device has a GPU's number, and there
/// is one CPU.
inline bool is_on(const Tensor& tensor, int32_t device) {
  return FLEXOPS_DEVICE_CUDA ? tensor.device_index() == device : on_this_device_type(tensor);
}

/// The address of an optional number that is read on the device when the op runs; nullptr if it is
/// not there.
inline const float* check_number(const char* op, const char* first, int32_t device,
                                 const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return nullptr;
  FLEXOPS_CHECK(tensor->numel() == 1 && tensor->dtype() == Dtype::f32, op, ": ", name,
                " must be a float32 tensor of one element");
  FLEXOPS_CHECK(is_on(*tensor, device), op, ": ", name, " must be on the device of ", first);
  return tensor->data<const float>();
}

/// Checks every tensor, and lays out what the launchers take. Tensors whose elements do not lie in
/// memory as their parameter's (the first column's) do, or not row-major if that is asked for, are
/// replaced by contiguous copies, which finish() writes back.
class TensorTable {
 public:
  TensorTable(const char* op, std::initializer_list<TensorColumn> columns, const char* steps_name,
              TensorList* steps, bool row_major)
      : op_(op),
        first_(columns.begin()->name),
        device_(columns.begin()->tensors[0].device_index()),
        row_major_(row_major) {
    const size_t count = columns.begin()->tensors.size();
    for (const TensorColumn& column : columns) let_go_.add(column.tensors);
    if (steps) let_go_.add(*steps);
    Columns present;
    int place = 0;
    for (const TensorColumn& column : columns) {
      if (!column.optional || !column.tensors.empty()) {
        check_length(op, column.name, column.tensors, first_, count);
        present.column[present.count] = &column, present.place[present.count++] = place;
      }
      ++place;
    }
    rows_.resize(count);
    for (size_t i = 0; i < count; ++i) add(present, i);
    if (steps) add_steps(steps_name, *steps);
  }

  TensorRow* data() { return rows_.data(); }
  /// One more list of the op's, which the table then lets go, too.
  void hold(TensorList& list) { let_go_.add(list); }
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  int32_t device() const { return device_; }

  const float* number(const char* name, const std::optional<Tensor>& tensor) const {
    return check_number(op_, first_, device_, name, tensor);
  }

  void check_place(const char* list, size_t index, const Tensor& tensor) const {
    FLEXOPS_CHECK(is_on(tensor, device_), op_, ": ", name_of(list, index),
                  " must be on the device of ", first_, "[0]");
  }

  void finish() {
    for (const auto& [original, temporary] : replaced_) copy(original, temporary);
  }

 private:
  /// The columns that are there, and the numbers of their arrays.
  struct Columns {
    const TensorColumn* column[TensorRow::kMostArrays];
    int place[TensorRow::kMostArrays];
    int count = 0;
  };

  /// Row i; all of it was zero.
  void add(const Columns& columns, size_t i) {
    TensorRow& row = rows_[i];
    const Tensor& param = columns.column[0]->tensors[i];
    const int64_t dim = param.dim(), *sizes = param.sizes();
    bool all_contiguous = true;
    for (int n = 0; n < columns.count; ++n) {
      const TensorColumn& column = *columns.column[n];
      const Tensor& tensor = column.tensors[i];
      check_place(column.name, i, tensor);
      row.type[columns.place[n]] = type_of(column, i, tensor);
      if (column.block) continue;
      FLEXOPS_CHECK(n == 0 || has_shape(tensor, sizes, dim), op_, ": ", name_of(column.name, i),
                    " must have the shape of its parameter, ", shape_text(param), ", got ",
                    shape_text(tensor));
      all_contiguous = all_contiguous && tensor.is_contiguous();
    }
    bool same = all_contiguous;  // elements lie in the same order everywhere
    if (!all_contiguous && !row_major_) {
      same = is_dense(param);
      for (int n = 0; same && n < columns.count; ++n)
        same = columns.column[n]->block || same_strides(param, columns.column[n]->tensors[i]);
    }
    row.numel = 1;
    for (int64_t d = 0; d < dim; ++d) row.numel *= sizes[d];
    for (int n = 0; n < columns.count; ++n) {
      const TensorColumn& column = *columns.column[n];
      const Tensor& tensor = column.tensors[i];
      if (column.block) check_blocks(column, i, tensor, row.numel);
      row.array[columns.place[n]] = same || column.block || tensor.is_contiguous()
                                        ? tensor.data()
                                        : replace(column, i, tensor);
    }
  }

  void check_blocks(const TensorColumn& column, size_t i, const Tensor& tensor,
                    int64_t numel) const {
    const int64_t blocks = numel / column.block + (numel % column.block != 0);
    FLEXOPS_CHECK(tensor.numel() >= blocks && tensor.is_contiguous(), op_, ": ",
                  name_of(column.name, i), " must be a contiguous ", dtype_name(tensor.dtype()),
                  " tensor of at least ", blocks, " elements, got shape ", shape_text(tensor));
  }

  static bool has_shape(const Tensor& tensor, const int64_t* sizes, int64_t dim) {
    return tensor.dim() == dim &&
           memcmp(tensor.sizes(), sizes, static_cast<size_t>(dim) * sizeof *sizes) == 0;
  }

  /// A tensor of one element for each row, or one tensor for all rows.
  void add_steps(const char* name, const TensorList& steps) {
    const bool joined = steps.size() == 1 && steps[0].dim() == 1 && steps[0].numel() == size() &&
                        steps[0].is_contiguous();
    if (!joined) check_length(op_, name, steps, first_, rows_.size());
    for (size_t i = 0; i < steps.size(); ++i) {
      const Tensor& step = steps[i];
      check_place(name, i, step);
      FLEXOPS_CHECK(step.dtype() == Dtype::f32 && (joined || step.numel() == 1), op_, ": ",
                    name_of(name, i), " must be a float32 tensor of one element, got ",
                    dtype_name(step.dtype()), " ", shape_text(step));
      rows_[i].step = step.data<float>();
    }
    for (size_t i = 1; joined && i < rows_.size(); ++i) rows_[i].step = rows_[0].step + i;
  }

  ElementType type_of(const TensorColumn& column, size_t i, const Tensor& tensor) const {
    const Dtype dtype = tensor.dtype();
    if (!column.any_width) {
      FLEXOPS_CHECK(dtype == column.dtype, op_, ": ", name_of(column.name, i), " must be ",
                    dtype_name(column.dtype), ", got ", dtype_name(dtype));
      return ElementType::f32;
    }
    FLEXOPS_CHECK(dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16, op_, ": ",
                  name_of(column.name, i), " must be float32, bfloat16 or float16, got ",
                  dtype_name(dtype));
    return dtype == Dtype::f32    ? ElementType::f32
           : dtype == Dtype::bf16 ? ElementType::bf16
                                  : ElementType::f16;
  }

  void* replace(const TensorColumn& column, size_t i, const Tensor& tensor) {
    FLEXOPS_CHECK(!column.written || !is_expanded(tensor), op_, ": ", name_of(column.name, i),
                  kExpanded);
    Tensor temporary = contiguous(tensor);
    void* data = temporary.data();
    if (column.written) {
      replaced_.emplace_back(tensor, std::move(temporary));
    } else {
      kept_.push_back(std::move(temporary));
    }
    return data;
  }

  LetGo let_go_;
  const char* op_;
  const char* first_;
  int32_t device_;
  bool row_major_;
  std::vector<TensorRow> rows_;
  std::vector<std::pair<Tensor, Tensor>> replaced_;
  std::vector<Tensor> kept_;
};

/// Calls body(i, begin, end) on pieces of every row i: all rows as one range of elements, shared
/// out evenly among threads. Cuts fall on multiples of `unit` elements of a row.
template <typename F>
void for_each_piece(const TensorRow* rows, size_t count, int64_t unit, const F& body) {
  constexpr int64_t kGrain = 32768;
  std::vector<int64_t> start(count + 1, 0);
  for (size_t i = 0; i < count; ++i) start[i + 1] = start[i] + rows[i].numel;
  parallel_for(0, start[count], kGrain, [&](int64_t begin, int64_t end) {
    const auto cut = [&](int64_t at, size_t i) {
      return at >= start[i + 1] ? rows[i].numel
             : at <= start[i]   ? 0
                                : (at - start[i]) / unit * unit;
    };
    size_t low = 0, high = count;  // the last row that starts at or before `begin`
    while (high - low > 1) (start[(low + high) / 2] <= begin ? low : high) = (low + high) / 2;
    for (size_t i = low; i < count && start[i] < end; ++i) {
      const int64_t from = cut(begin, i), to = cut(end, i);
      if (from < to) body(i, from, to);
    }
  });
}

}  // namespace flexops
