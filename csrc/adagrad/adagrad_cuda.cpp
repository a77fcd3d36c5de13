// Adagrad's launcher.

#include "adagrad/adagrad.h"

#include "adagrad/adagrad.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

using multi::Data;

adagrad::Shared make_shared(const AdagradOptions& o) {
  adagrad::Shared s = multi::make_numbers<adagrad::Shared>(o);
  s.lr_decay = static_cast<float>(o.lr_decay), s.eps = static_cast<float>(o.eps);
  return s;
}

}  // namespace

const char* adagrad_cuda(const TensorRow* rows, int64_t count, const AdagradOptions& options,
                         void* stream) {
  multi::step_rows(rows, count, multi::data_of<adagrad::Rule<Data::mixed>>, make_shared(options),
                   stream, kernel<adagrad::adagrad_kernel<Data::f32>>,
                   kernel<adagrad::adagrad_kernel<Data::bf16>>,
                   rare_kernel<adagrad::adagrad_kernel<Data::mixed>>);
  return last_error();
}

}  // namespace flexops
