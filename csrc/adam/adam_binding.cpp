// flexops::adam_ and flexops::adam_copy_: argument checks and registration (schemas: flexops/ops/adam.py).

#include "adam/adam.h"
#include "common/binding.h"
#include "common/cpu.h"

#include <math.h>

namespace flexops {
namespace {

/// The arguments that adam_ and adam_copy_ share.
struct Lists {
  const char* op;
  TensorList &params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &state_steps, &copies;
};

struct Numbers {
  double lr, beta1, beta2, eps, weight_decay;
  bool amsgrad, maximize, decoupled;
  std::optional<Tensor>&lr_tensor, &grad_scale, &found_inf;
};

std::string name_of(const char* list, size_t index) { return std::string(list) + "[" + std::to_string(index) + "]"; }

AdamType type_of(const char* op, const char* list, size_t index, const Tensor& tensor) {
  switch (tensor.dtype()) {
    case Dtype::f32:
      return AdamType::f32;
    case Dtype::f16:
      return AdamType::f16;
    case Dtype::bf16:
      return AdamType::bf16;
    default:
      detail::fail({op, ": ", name_of(list, index), " must be float32, bfloat16 or float16, got ", dtype_name(tensor.dtype())});
  }
}

void check_length(const char* op, const char* list, const TensorList& tensors, size_t expected) {
  FLEXOPS_CHECK(tensors.size() == expected, op, ": ", list, " must hold ", expected, " tensors, as params does, got ", tensors.size());
}

void check_lengths(const Lists& lists, bool amsgrad, bool with_copies) {
  const size_t count = lists.params.size();
  check_length(lists.op, "grads", lists.grads, count);
  check_length(lists.op, "exp_avgs", lists.exp_avgs, count);
  check_length(lists.op, "exp_avg_sqs", lists.exp_avg_sqs, count);
  if (amsgrad) check_length(lists.op, "max_exp_avg_sqs", lists.max_exp_avg_sqs, count);
  check_length(lists.op, "state_steps", lists.state_steps, count);
  if (with_copies) check_length(lists.op, "copies", lists.copies, count);
}

const float* check_number(const char* op, const char* name, const std::optional<Tensor>& tensor, int32_t device) {
  if (!tensor) return nullptr;
  FLEXOPS_CHECK(tensor->numel() == 1 && tensor->dtype() == Dtype::f32, op, ": ", name, " must be a float32 tensor of one element");
  FLEXOPS_CHECK(on_this_device_type(*tensor) && tensor->device_index() == device, op, ": ", name, " must be on the device of params");
  return tensor->data<const float>();
}

/// Checks every tensor, and lays out what the launchers take. Tensors whose elements do not lie in memory as their parameter's do are
/// replaced by contiguous copies, which finish() writes back.
class Batch {
 public:
  Batch(const Lists& lists, bool amsgrad, bool with_copies) : op_(lists.op), device_(lists.params[0].device_index()) {
    check_lengths(lists, amsgrad, with_copies);
    tensors_.resize(lists.params.size());
    for (size_t i = 0; i < tensors_.size(); ++i) add(lists, i, amsgrad, with_copies);
  }

  const std::vector<AdamTensor>& tensors() const { return tensors_; }
  int32_t device() const { return device_; }

  void finish() {
    for (const auto& [original, temporary] : replaced_) copy(original, temporary);
  }

 private:
  void add(const Lists& lists, size_t i, bool amsgrad, bool with_copies) {
    const Tensor& param = lists.params[i];
    const Tensor& step = lists.state_steps[i];
    AdamTensor& t = tensors_[i];
    check_place("params", i, param);
    t.numel = param.numel();
    t.param_type = type_of(op_, "params", i, param);
    t.grad_type = type_of(op_, "grads", i, lists.grads[i]);
    check_place("state_steps", i, step);
    FLEXOPS_CHECK(step.dtype() == Dtype::f32 && step.numel() == 1, op_, ": ", name_of("state_steps", i),
                  " must be a float32 tensor of one element, got ", dtype_name(step.dtype()), " ", shape_text(step));
    t.step = step.data<float>();

    const Tensor* others[5] = {&lists.grads[i], &lists.exp_avgs[i], &lists.exp_avg_sqs[i]};
    static constexpr const char* kNames[] = {"grads", "exp_avgs", "exp_avg_sqs"};
    const char* names[5] = {kNames[0], kNames[1], kNames[2]};
    int count = 3;
    if (amsgrad) others[count] = &lists.max_exp_avg_sqs[i], names[count++] = "max_exp_avg_sqs";
    if (with_copies) {
      t.copy_type = type_of(op_, "copies", i, lists.copies[i]);
      others[count] = &lists.copies[i], names[count++] = "copies";
    } else {
      t.copy_type = AdamType::f32;
    }
    bool contiguous_all = param.is_contiguous(), same = true;
    for (int k = 0; k < count; ++k) {
      check_place(names[k], i, *others[k]);
      FLEXOPS_CHECK(same_shape(param, *others[k]), op_, ": ", name_of(names[k], i), " must have the shape of its parameter, ",
                    shape_text(param), ", got ", shape_text(*others[k]));
      contiguous_all = contiguous_all && others[k]->is_contiguous();
    }
    for (int k = 1; k < (amsgrad ? 4 : 3); ++k) {
      FLEXOPS_CHECK(others[k]->dtype() == Dtype::f32, op_, ": ", name_of(names[k], i), " must be float32, got ",
                    dtype_name(others[k]->dtype()));
    }
    if (!contiguous_all) {
      same = is_dense(param);
      for (int k = 0; same && k < count; ++k) same = same_strides(param, *others[k]);
    }
    const auto place = [&](const Tensor& tensor) { return same || tensor.is_contiguous() ? tensor.data() : replace(tensor); };
    t.param = place(param);
    t.grad = place(*others[0]);
    t.exp_avg = static_cast<float*>(place(*others[1]));
    t.exp_avg_sq = static_cast<float*>(place(*others[2]));
    t.max_exp_avg_sq = amsgrad ? static_cast<float*>(place(*others[3])) : nullptr;
    t.copy = with_copies ? place(*others[count - 1]) : nullptr;
  }

  void check_place(const char* list, size_t index, const Tensor& tensor) const {
    FLEXOPS_CHECK(on_this_device_type(tensor) && tensor.device_index() == device_, op_, ": ", name_of(list, index),
                  " must be on the device of params[0]");
  }

  void* replace(const Tensor& tensor) {
    replaced_.emplace_back(tensor, contiguous(tensor));
    return replaced_.back().second.data();
  }

  const char* op_;
  int32_t device_;
  std::vector<AdamTensor> tensors_;
  std::vector<std::pair<Tensor, Tensor>> replaced_;
};

#if FLEXOPS_DEVICE_CUDA

void launch(const char* op, const std::vector<AdamTensor>& tensors, const AdamOptions& options, const Tensor& where) {
  check_launch(op, adam_cuda(tensors.data(), static_cast<int64_t>(tensors.size()), options, current_stream(where)));
}

#else

AdamStep make_step(const AdamOptions& o, double step) {
  const double lr = o.lr_tensor ? *o.lr_tensor : o.lr;
  AdamStep s;
  s.beta1 = static_cast<float>(o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  s.eps = static_cast<float>(o.eps);
  s.step_size = static_cast<float>(lr / (1 - pow(o.beta1, step)));
  s.inverse_bias2 = static_cast<float>(1 / sqrt(1 - pow(o.beta2, step)));
  s.l2 = o.decoupled ? 0.0f : static_cast<float>(o.weight_decay);
  s.decay = o.decoupled ? static_cast<float>(lr * o.weight_decay) : 0.0f;
  s.sign = o.maximize ? -1.0f : 1.0f;
  s.grad_scale = o.grad_scale ? *o.grad_scale : 0.0f;
  return s;
}

/// All tensors as one range of elements, shared out evenly among threads; cuts fall on multiples of a cache line.
void launch(const char*, const std::vector<AdamTensor>& tensors, const AdamOptions& options, const Tensor&) {
  if (options.found_inf && *options.found_inf != 0) return;
  constexpr int64_t kGrain = 32768, kLine = 32;
  const size_t count = tensors.size();
  std::vector<AdamStep> steps(count);
  std::vector<int64_t> start(count + 1, 0);
  for (size_t i = 0; i < count; ++i) {
    steps[i] = make_step(options, *tensors[i].step += 1.0f);
    start[i + 1] = start[i] + tensors[i].numel;
  }
  parallel_for(0, start[count], kGrain, [&](int64_t begin, int64_t end) {
    const auto cut = [&](int64_t at, size_t i) {
      return at >= start[i + 1] ? tensors[i].numel : at <= start[i] ? 0 : (at - start[i]) / kLine * kLine;
    };
    size_t low = 0, high = count;  // the last tensor that starts at or before `begin`
    while (high - low > 1) (start[(low + high) / 2] <= begin ? low : high) = (low + high) / 2;
    for (size_t i = low; i < count && start[i] < end; ++i) {
      const int64_t from = cut(begin, i), to = cut(end, i);
      if (from < to) FLEXOPS_ISA_CALL(adam_cpu)(tensors[i], steps[i], from, to);
    }
  });
}

#endif

void run(const Lists& lists, const Numbers& n, bool with_copies) {
  if (lists.params.empty()) return;
  Batch batch(lists, n.amsgrad, with_copies);
  AdamOptions options;
  options.lr = n.lr;
  options.beta1 = n.beta1;
  options.beta2 = n.beta2;
  options.eps = n.eps;
  options.weight_decay = n.weight_decay;
  options.amsgrad = n.amsgrad;
  options.maximize = n.maximize;
  options.decoupled = n.decoupled;
  options.lr_tensor = check_number(lists.op, "lr", n.lr_tensor, batch.device());
  options.grad_scale = check_number(lists.op, "grad_scale", n.grad_scale, batch.device());
  options.found_inf = check_number(lists.op, "found_inf", n.found_inf, batch.device());
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(lists.params[0]);
#endif
  launch(lists.op, batch.tensors(), options, lists.params[0]);
  batch.finish();
}

void adam_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
           TensorList state_steps, double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad, bool maximize,
           bool decoupled, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  TensorList copies;
  run({"flexops::adam_", params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, copies},
      {lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled, lr_tensor, grad_scale, found_inf}, false);
}

void adam_copy_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                TensorList state_steps, TensorList copies, double lr, double beta1, double beta2, double eps, double weight_decay,
                bool amsgrad, bool maximize, bool decoupled, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
                std::optional<Tensor> found_inf) {
  run({"flexops::adam_copy_", params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, copies},
      {lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled, lr_tensor, grad_scale, found_inf}, true);
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "adam_", adam_);
  FLEXOPS_IMPL(m, "adam_copy_", adam_copy_);
}

}  // namespace flexops
