// The usual binding of a CUDA extension: torch/extension.h and pybind11. What flexops is measured against; flexops itself does not use it.
#include <torch/extension.h>

#include <vector>

void adam_step_cuda(std::vector<torch::Tensor> params, std::vector<torch::Tensor> grads, std::vector<torch::Tensor> exp_avgs,
                    std::vector<torch::Tensor> exp_avg_sqs, std::vector<torch::Tensor> max_exp_avg_sqs, std::vector<torch::Tensor> copies,
                    std::vector<torch::Tensor> steps, double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad,
                    bool maximize, bool decoupled, c10::optional<torch::Tensor> grad_scale, c10::optional<torch::Tensor> found_inf);

static void check_lists(const std::vector<torch::Tensor>& params, const std::vector<torch::Tensor>& others, const char* name) {
  TORCH_CHECK(others.empty() || others.size() == params.size(), name, " must hold ", params.size(), " tensors, got ", others.size());
  for (size_t i = 0; i < others.size(); ++i) {
    TORCH_CHECK(others[i].is_cuda() && others[i].is_contiguous(), name, "[", i, "] must be a contiguous CUDA tensor");
    TORCH_CHECK(others[i].numel() == params[i].numel(), name, "[", i, "] must have as many elements as params[", i, "]");
  }
}

static void adam_step(std::vector<torch::Tensor> params, std::vector<torch::Tensor> grads, std::vector<torch::Tensor> exp_avgs,
                      std::vector<torch::Tensor> exp_avg_sqs, std::vector<torch::Tensor> max_exp_avg_sqs, std::vector<torch::Tensor> copies,
                      std::vector<torch::Tensor> steps, double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad,
                      bool maximize, bool decoupled, c10::optional<torch::Tensor> grad_scale, c10::optional<torch::Tensor> found_inf) {
  check_lists(params, params, "params");
  check_lists(params, grads, "grads");
  check_lists(params, exp_avgs, "exp_avgs");
  check_lists(params, exp_avg_sqs, "exp_avg_sqs");
  check_lists(params, max_exp_avg_sqs, "max_exp_avg_sqs");
  check_lists(params, copies, "copies");
  TORCH_CHECK(!amsgrad || max_exp_avg_sqs.size() == params.size(), "amsgrad needs max_exp_avg_sqs");
  TORCH_CHECK(steps.size() == params.size(), "steps must hold ", params.size(), " tensors, got ", steps.size());
  adam_step_cuda(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies, steps, lr, beta1, beta2, eps, weight_decay, amsgrad, maximize,
                 decoupled, grad_scale, found_inf);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("adam_step", &adam_step, "One step of Adam or AdamW on lists of tensors"); }
