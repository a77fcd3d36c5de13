// The small op that `flexops doctor` builds and loads to see that the toolchain works. Not in the
// catalogue, and of no other use.

namespace flexops::FLEXOPS_ISA {

void doctor_square_cpu(const TensorView& x, const TensorView& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) out.as<float>()[i] = x.as<float>()[i] * x.as<float>()[i];
}

}  // namespace flexops::FLEXOPS_ISA
