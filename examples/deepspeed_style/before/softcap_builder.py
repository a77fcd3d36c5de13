"""A builder in the manner of DeepSpeed's op_builder: sources, flags and checks as methods.
Compare it with ``after``."""

from deepspeed.ops.op_builder.builder import CUDAOpBuilder


class SoftcapBuilder(CUDAOpBuilder):
    BUILD_VAR = "DS_BUILD_SOFTCAP"
    NAME = "softcap"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"softcap_lib.{self.NAME}_op"

    def sources(self):
        return ["csrc/softcap/binding.cpp", "csrc/softcap/softcap.cu"]

    def include_paths(self):
        return ["csrc/includes"]

    def cxx_args(self):
        return ["-O3", "-std=c++17", "-g", "-Wno-reorder"]

    def nvcc_args(self):
        flags = [
            "-O3",
            "-std=c++17",
            "-U__CUDA_NO_HALF_OPERATORS__",
            "-U__CUDA_NO_HALF_CONVERSIONS__",
            "--use_fast_math",
        ]
        return flags + self.compute_capability_args()

    def is_compatible(self, verbose=False):
        if self.installed_cuda_version()[0] < 11:
            self.warning("softcap needs CUDA 11 or newer")
            return False
        return super().is_compatible(verbose)
