"""The names of torch and of the standard library that device code has when NVRTC compiles it
(``csrc/common/extension_device.cuh``)."""

HOST_NAMESPACES = ("torch", "at", "c10", "std", "py", "pybind11")
HALVES = frozenset(["Half", "BFloat16"])
ACCESSORS = frozenset(
    [
        "PackedTensorAccessor32",
        "PackedTensorAccessor64",
        "GenericPackedTensorAccessor",
        "TensorAccessor",
        "RestrictPtrTraits",
        "DefaultPtrTraits",
    ]
)
STANDARD = frozenset(
    [
        "numeric_limits",
        "is_same",
        "is_same_v",
        "enable_if",
        "enable_if_t",
        "conditional",
        "conditional_t",
        "is_integral",
        "is_integral_v",
        "is_floating_point",
        "is_floating_point_v",
        "true_type",
        "false_type",
        "integral_constant",
        "remove_reference",
        "remove_reference_t",
        "remove_cv",
        "remove_cv_t",
        "remove_const",
        "remove_const_t",
        "decay_t",
        "min",
        "max",
        "swap",
        "move",
        "forward",
        "size_t",
        "ptrdiff_t",
        "int8_t",
        "uint8_t",
        "int16_t",
        "uint16_t",
        "int32_t",
        "uint32_t",
        "int64_t",
        "uint64_t",
        "memcpy",
        "is_trivially_copyable",
        "is_trivially_copyable_v",
        "declval",
    ]
)
DEVICE_NAMES = {
    "torch": HALVES | ACCESSORS,
    "at": HALVES | ACCESSORS,
    "c10": HALVES,
    "std": STANDARD,
}
