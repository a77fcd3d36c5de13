"""Splitting a `.cu`: what the host compiler gets, what NVRTC gets, and what neither gets because it
is not surely understood."""

from __future__ import annotations

import contextlib
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexops.build.describe.cpp_text import Unclear, brackets, tokens_of
from flexops.build.describe.cuda_declarations import Unsplittable
from flexops.build.describe.cuda_source import Split, split
from flexops.build.load.extension_nvrtc import expression_of, flags_of, kernel_of
from flexops.build.plan.kernel_names import alike
from flexops.errors import ToolchainError

KERNEL = (
    "template <typename T>\n__global__ void scale(const T* x, T* y, int n) {\n  y[threadIdx.x] ="
    " x[0];\n}\n"
)


def halves(text: str, path: str = "scale.cu", include: tuple[str, ...] = ()) -> Split:
    return split(path, text, include, 0)


def launches(text: str) -> str:
    """The host's half of a function that says ``text``."""
    return halves(f"void f() {{ {text} }}").host.partition("void f() { ")[2].rpartition(" }")[0]


# ---- tokens ----


def test_comments_strings_and_raw_strings_are_no_code():
    text = """int a; // k<<<1, 2>>>(x) \\
still a comment
const char* s = "<<<\\"" R"x({ )" )x" u8"}"; /* { */ char c = '"', d = '\\'', e = 1'000'0;
#define TEXT "{" /* over
two lines */ 'x'
int b;"""
    tokens = tokens_of(text)
    assert [token.text for token in tokens if token.kind == "word"] == [
        "int",
        "a",
        "const",
        "char",
        "s",
        "char",
        "c",
        "d",
        "e",
        "int",
        "b",
    ]
    assert [token.text for token in tokens if token.kind == "string"] == [
        '"<<<\\""',
        'R"x({ )" )x"',
        'u8"}"',
        "'\"'",
        "'\\''",
    ]
    assert [(token.directive, token.line) for token in tokens if token.kind == "directive"] == [
        ("define", 4)
    ]
    assert tokens[-1].line == 6
    assert brackets(tokens) == {}


@pytest.mark.parametrize(
    "text",
    [
        "/* never",
        '"never',
        "'never",
        'R"x(never)y"',
        "#define X /* never",
        "int a = `;",
        "x # y",
        '"over\na line"',
    ],
)
def test_what_does_not_end_is_said(text):
    with pytest.raises(Unclear):
        tokens_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "f(}",
        "{",
        "}",
        "\n#if A\nvoid f() {\n#else\nvoid g() {\n#endif\n}\n",
        "\n#if A\n}{\n#endif\n",
        "\n#endif\n",
        "\n#if A\n",
        "(]",
    ],
)
def test_brackets_that_do_not_match_in_each_branch_are_said(text):
    with pytest.raises(Unclear):
        brackets(tokens_of(text))


PIECES = st.sampled_from(
    [
        "<<<",
        ">>>",
        "<",
        ">",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
        ";",
        ",",
        "::",
        "__global__",
        "__device__",
        "void",
        "template",
        "k",
        "T",
        " ",
        "\n",
        "#if A\n",
        "#else\n",
        "#endif\n",
        "#define M ",
        '"',
        "'",
        "//",
        "/*",
        "*/",
        'R"(',
        "\\\n",
        "=",
        ":",
        "struct",
        "namespace",
        "1",
        "operator",
        "#include <torch/extension.h>\n",
        "\\",
    ]
)


@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_text_is_split_or_rejected(text):
    """Tokens are the text less blanks and comments, in order; and whatever the text is, there is an
    answer, on whose every line the user's is."""
    try:
        tokens = tokens_of(text)
    except Unclear:
        tokens = []
    assert all(text[token.start : token.end] == token.text for token in tokens)
    assert all(first.end <= second.start for first, second in itertools.pairwise(tokens))
    try:
        found = halves(text)
    except Unsplittable:
        return
    for half in (found.host, found.device):
        assert half.count("\n") == text.count("\n") + 1
        brackets(tokens_of(half))


@given(st.text(alphabet="<>(){};:,\"'/*\\\n #kT1=", max_size=80))
def test_any_characters_are_split_or_rejected(text):
    with contextlib.suppress(Unsplittable):
        halves(text)


# ---- both halves ----


def test_a_kernel_is_a_stub_on_the_host_and_itself_on_the_device():
    found = halves(
        f"#include <torch/extension.h>\n{KERNEL}torch::Tensor f(torch::Tensor x) {{\n  return"
        " x;\n}\nint last;\n"
    )
    assert (
        "scale(const T* x, T* y, int n) { struct flexops_stub_0 {};"
        " ::flexops_extension::launch<flexops_stub_0>(x, y, n); }" in found.host
    )
    assert "threadIdx" not in found.host
    assert "y[threadIdx.x] = x[0];" in found.device
    assert "torch" not in found.device
    assert "last" not in found.device
    for half in (found.host, found.device):
        assert half.startswith('#line 1 "scale.cu"\n')
        assert half.splitlines()[3].startswith("__global__"), "the user's line 3"
    assert found.host.splitlines()[10 - 1 + 0] == "int last;"


def test_functions_are_where_they_run():
    found = halves("""
#define HD __host__ __device__
__device__ float one(float x) { return __fmul_rn(x, x); }
HD float two(float x) { return x; }
constexpr int three(int x) { return x; }
inline int four(int x) { return x; }
struct Five {
  int value;
  HD Five(int v) : value{v} {}
  __device__ __forceinline__ int operator()(int a, int b = (1 < 2)) const { return __clz(a); }
  __device__ Five();
  __device__ ~Five() { __syncwarp(); }
};
__device__ Five::Five() : value(1) { __syncwarp(); }
__device__ int kept;
const int kConstant = 3;
static std::vector<int> list = {1, 2};
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("f", &four); }
""")
    host, device = found.host, found.device
    assert "__device__ float one(float x) ;" in host
    assert "operator()(int a, int b = (1 < 2)) const ;" in host
    assert "__device__ ~Five() ;" in host
    assert "Five::Five" not in host
    assert not re.search(r"__fmul_rn|__clz|__syncwarp", host)
    assert all(
        text in device
        for text in (
            "__fmul_rn",
            "HD float two",
            "three(int x)",
            "__clz",
            "Five::Five() : value(1)",
            "int kept",
            "kConstant",
        )
    )
    assert not re.search(r"four|vector|PYBIND", device)
    assert all(
        text in host
        for text in (
            "two(float x) { return x; }",
            "four(int x)",
            "vector",
            "PYBIND11_MODULE",
            "value{v} {}",
        )
    )


@pytest.mark.parametrize(
    ("launch", "kernel"),
    [
        ("k<<<1, 2>>>(x);", "k"),
        ("ns::k<T, 4, (3 > 2)><<<1, 2>>>(x);", "ns::k<T, 4, (3 > 2)>"),
        (
            "::k<std::vector<std::pair<int, int>>><<<1, 2>>>(x);",
            "::k<std::vector<std::pair<int, int>>>",
        ),
        ("traits<T>::template k<int><<<1, 2>>>(x);", "traits<T>::template k<int>"),
        ("(*pick(1))<<<1, 2>>>(x);", "(*pick(1))"),
        ("kernels[i][0]<<<1, 2>>>(x);", "kernels[i][0]"),
        ("this->table.k<<<1, 2>>>(x);", "this->table.k"),
        ("if (a) k<<<1, 2>>>(x); else k<<<1, 2>>>(x);", "k"),
        ("AT_DISPATCH(t, [&] { k<scalar_t><<<1, 2>>>(x); });", "k<scalar_t>"),
        ("a ? k<<<1, 2>>>(x) : void();", "k"),
    ],
)
def test_a_launch_is_configured_and_called(launch, kernel):
    wanted = f"(::flexops_extension::Configured(1, 2), {kernel}(x))"
    assert launches(launch) == launch.replace(f"{kernel}<<<1, 2>>>(x)", wanted)


def test_a_launch_takes_all_that_stands_between_its_brackets():
    configured = launches(
        "k<int><<<dim3(n / 2, g<a>(1)), dim3{1, 2}, // threads\n  n * sizeof(float),"
        " at::cuda::getCurrentCUDAStream()>>>(x, f(y, z));"
    )
    assert (
        configured
        == "(::flexops_extension::Configured(dim3(n / 2, g<a>(1)), dim3{1, 2}, // threads\n"
        "  n * sizeof(float), at::cuda::getCurrentCUDAStream()), k<int>(x, f(y, z)));"
    )


def test_launches_in_macros():
    found = halves(
        "#define GO(T, ...) \\\n  k<T><<<1, 2, 0, s>>>(__VA_ARGS__); \\\n  check()\nvoid f() {"
        " GO(int, 1); }\n"
    )
    assert (
        "#define GO(T, ...) \\\n  (::flexops_extension::Configured(1, 2, 0, s), k<T>(__VA_ARGS__));"
        " \\\n  check()\n" in found.host
    )


@pytest.mark.parametrize(("parameters", "names"), [
    ("", ""),
    ("void", ""),
    ("const float* __restrict__ x, int n = f(1, 2)", "x, n"),
    (("const torch::PackedTensorAccessor32<T, 2, torch::RestrictPtrTraits> a,"
      " std::pair<int, int> b"), "a, b"),
    ("const __grid_constant__ Params params, float table[4][2]", "params, table"),
    ("A... more", "more..."),
    ("unsigned long long n, struct Options options", "n, options"),
])  # fmt: skip
def test_a_kernels_parameters(parameters, names):
    assert (
        f"launch<flexops_stub_0>({names});"
        in halves(f"template <typename... A> __global__ void k({parameters}) {{}}").host
    )


def test_what_a_comment_says_in_a_macro_is_no_attribute():
    found = halves(
        "#define N 256 // threads of each __global__ function {\ntemplate <int B = N> void go() {"
        " k<<<1, B>>>(); }\n"
    )
    assert "(::flexops_extension::Configured(1, B), k());" in found.host


def test_pointers_to_functions_and_operators_outside_of_classes():
    found = halves("""
typedef float (*Function)(float);
struct Op { __device__ float operator()(float a) const; };
__device__ float Op::operator()(float a) const { return __fadd_rn(a, 1.f); }
__device__ Function table[] = {f};
#define SET(k) cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536)
""")
    assert "typedef float (*Function)(float);" in found.device
    assert "Op::operator()" not in found.host
    assert "Op::operator()" in found.device
    assert "#define SET(k) ::flexops_extension::set_attribute(k," in found.host


def test_own_headers_are_part_of_the_source(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "deep.cuh").write_text(
        "#pragma once\n#include <torch/extension.h>\n__device__ float deep(float x) { return"
        " __expf(x); }\n"
    )
    (tmp_path / "mïne.cuh").write_text(
        '#pragma once\n#include <deep.cuh>\n#include "mïne.cuh"\nvoid host_only(torch::Tensor x);\n'
    )
    source = tmp_path / "k.cu"
    found = halves(
        f'#include "mïne.cuh"\n#include <deep.cuh>\n{KERNEL}',
        str(source),
        (str(tmp_path / "include"),),
    )
    assert "__expf" in found.device
    assert "__expf" not in found.host
    assert "host_only" not in found.device
    assert f'#line 1 "{tmp_path}/include/deep.cuh"' in found.device
    assert f'#line 2 "{source}"' in found.device
    assert found.host.count("#include <torch/extension.h>") == 2, "each within its guard"
    assert all(mark.isascii() for mark in re.findall(r"FLEXOPS_ONCE_\w+", found.host))


def test_conditions_are_kept_where_their_code_is_not():
    found = halves(
        "void f() {\n#ifdef __CUDACC__\n  a();\n#else\n  b();\n#endif\n}\n__device__ void g()"
        " {\n#if __CUDA_ARCH__ >= 800\n  c();\n#endif\n}\n"
    )
    assert "#ifdef FLEXOPS_CUDACC\n  a();" in found.host, (
        "which nvcc defines for the host, too, and torch's headers must not see"
    )
    for half, gone in ((found.host, "c()"), (found.device, "a()")):
        assert gone not in half
        assert half.count("#endif") == 2


def test_what_nvcc_defines_for_both_halves_is_defined_in_both():
    """CUDA_VERSION is <cuda.h>'s, which NVRTC has not read; __NVCC__ is nvcc's alone; a macro may
    ask for either."""
    found = halves("""#include <cuda.h>
#define BY_CUDA defined(__CUDACC__)
#if CUDA_VERSION >= 12000 && defined(__NVCC__) && BY_CUDA
__device__ int kept;
#endif
""")
    for half, name in ((found.host, "FLEXOPS_CUDACC"), (found.device, "__CUDACC__")):
        assert (
            f"#define BY_CUDA defined({name})\n#if CUDART_VERSION >= 12000 && defined({name}) &&"
            " BY_CUDA\n__device__ int kept;" in half
        )


def test_a_macro_that_a_header_defines_as_well_is_found_out_by_the_host_compiler():
    """Torch's headers would define it for nvcc's device code, and NVRTC has not read them."""
    found = halves(
        "#include <torch/extension.h>\n#ifndef LANES\n#define LANES 4\n#endif\n#ifdef"
        " LANES\n__device__ int kept[LANES];\n#endif\n"
    )
    guard = (
        "#ifdef LANES\n#error LANES is defined by a header that device code has not been given:"
        " nvcc has to compile this\n#endif\n"
    )
    assert f'{guard}#line 2 "scale.cu"\n#ifndef LANES\n#define LANES 4' in found.host
    assert found.host.count("#error") == 1, "from there on it is the source's own"
    assert "#error" not in found.device
    assert "#error" not in halves("#ifndef M_PI\n#define M_PI 3.14159\n#endif\n").host, (
        "nvcc has that from the first line on"
    )
    commanded = split(
        "scale.cu", "#ifndef LANES\n#define LANES 4\n#endif\n", (), 0, frozenset(["LANES"])
    )
    assert "#error" not in commanded.host, "the command's are both halves'"
    with pytest.raises(Unsplittable, match="above what defines it"):
        halves("#if defined(__CUDACC__)\n#elif LANES > 2\n#endif\n#define LANES 4\n")
    assert (
        "#error"
        not in halves("#include <torch/extension.h>\n#if TORCH_VERSION_MAJOR > 1\n#endif\n").host
    )


def test_macros_that_define_device_code_are_expanded(tmp_path):
    """Kernels and classes, with pasted and quoted arguments; lines stay the source's."""
    (tmp_path / "make.cuh").write_text(
        "#pragma once\n#define OP(a, b) (a + b)\n"
        "#define CLASS(NAME) struct Atomic##NAME { \\\n"
        "  __device__ void operator()(float* x) { *x = OP(*x, 1); /* { */ } \\\n};\n"
        "#define KERNEL(NAME, ...) __global__ void NAME##_kernel(float* x) { \\\n"
        '  Atomic##NAME{}(x); say(#NAME "NAME", __VA_ARGS__); }\n'
        "#define BOTH(NAME, more) CLASS(NAME) KERNEL(NAME, (1, 2), more)\n"
    )
    found = halves(
        '#include "make.cuh"\nBOTH(Add,\n  3)\n#undef CLASS\n'
        "#define CLASS(NAME) __device__ int NAME() { return 1; }\nCLASS(one)\n"
        "void f(float* x) { Add_kernel<<<1, 2>>>(x); }\n",
        str(tmp_path / "made.cu"),
    )
    kernel = '{ AtomicAdd{}(x); say("Add" "NAME", (1, 2), 3); }'
    lines = found.device.splitlines()
    after = lines.index(f'#line 2 "{tmp_path}/made.cu"')
    assert "struct AtomicAdd {" in lines[after + 1]
    assert "{ *x = OP(*x, 1);" in lines[after + 1]
    assert f"__global__ void Add_kernel(float* x) {kernel}" in " ".join(lines[after + 1].split())
    assert lines[after + 5 :][0] == "__device__ int one() { return 1; }"
    assert "void f(" not in found.device
    assert "struct flexops_stub_0" in found.host
    assert "AtomicAdd{}" not in found.host, "a kernel's body is the device's"
    assert "Configured(1, 2), Add_kernel(x))" in found.host


def test_names_of_the_host_that_device_code_may_say():
    """A class whose members the host defines, a template's parameter, a loop's variable."""
    found = halves(
        "struct Matrix { Matrix(int n); ~Matrix(); void fill(); float* data; };\n"
        "Matrix::Matrix(int n) : data(make(n)) {}\nMatrix::~Matrix() {}\n"
        "void Matrix::fill() {}\n"
        "template <typename key> class Table { key* keys; torch::Tensor x; };\n"
        "void cluster(torch::Tensor x) {}\n"
        "struct Two { __device__ Two& operator+=(Two o) { return *this; } };\n"
        "template <typename key> __global__ void k(key* x, Matrix m, int n) {\n"
        "  for (int cluster = 0; cluster < n; ++cluster) x[cluster] = m.data[cluster];\n}\n"
    )
    assert "struct Matrix { Matrix(int n); ~Matrix(); void fill(); float* data; };" in found.device
    assert "Matrix::" not in found.device
    assert "Table" not in found.device
    assert "operator+=(Two o) { return *this; }" in found.device
    members = halves(
        "struct Mask {\n  int n;\n  ~Mask() { cudaFree(x); }\n  static Mask of(torch::Tensor x) { return {int(x.size(0))}; }\n"
        "  __device__ bool at(int i) { return i < n; }\n  torch::Tensor tensor();\n};\n"
        "struct Held { virtual void hold(torch::Tensor x); int n; };\n"
        "template <typename T> __global__ void k(T mask, bool* x) { x[0] = mask.at(1); }\n"
    )
    assert "torch" not in members.device
    assert "~Mask() ;" in members.device
    assert "__device__ bool at(int i) { return i < n; }" in members.device
    assert "static Mask of(torch::Tensor x)" in members.host
    assert "Held" not in members.device, "without its functions it would be another class"
    for used in ("cluster(1)", "Matrix::shared(1)", "make<int>()"):
        with pytest.raises(Unsplittable, match="declared for the host alone"):
            halves(
                "void cluster(int n) {}\nint shared(int n) { return n; }\n"
                "template <typename T> T make() { return T(); }\n"
                f"__global__ void k(int* x) {{ {used}; }}\n"
            )


def test_versions_and_systems_are_known_to_both_halves():
    found = halves(
        "#include <torch/extension.h>\n#include <THC/THCAtomics.cuh>\n"
        "#if defined(__x86_64__) && CUDA_VERSION >= 9000 && __CUDACC_VER_MAJOR__ >= 11\n#endif\n"
        "#ifdef __HIP__\n__constant__ int never;\n#endif\n"
        "__global__ void k(at::cuda::detail::TensorInfo<int, int> x) {}\n"
        "struct Of { static __host__ __device__ int get(at::cuda::detail::TensorInfo<int, int> x)"
        " { return 0; } };\n"
    )
    assert "#include <ATen/cuda/Atomic.cuh>" in found.device
    assert "struct Of" in found.device
    applied = halves("#include <ATen/cuda/CUDAApplyUtils.cuh>\n__global__ void k(int* x) {}\n")
    assert "#include <ATen/cuda/ApplyGridUtils.cuh>" in applied.host
    assert "#include <ATen/cuda/Atomic.cuh>" in applied.device
    assert "CUDART_VERSION >= 9000 && FLEXOPS_CUDACC_VER_MAJOR >= 11" in found.host
    assert "CUDART_VERSION >= 9000 && __CUDACC_VER_MAJOR__ >= 11" in found.device
    assert "never" not in found.host + found.device


# ---- what is rejected ----


@pytest.mark.parametrize(("line", "what"), [
    ("__constant__ float table[4];", "constant or managed memory (__constant__)"),
    ("void f() { cudaMemcpyToSymbol(a, b, 4); }", "the host reads or writes (cudaMemcpyToSymbol)"),
    ("void f() { cudaOccupancyMaxPotentialBlockSize(&a, &b, k); }", "asked about a kernel"),
    (("void f() { cudaFuncSetAttribute(k, cudaFuncAttributeNonPortableClusterSizeAllowed,"
      " 1); }"), "an attribute of a kernel"),
    ("void f() { cudaLaunchCooperativeKernel(k, a, b, c); }", "(cudaLaunchCooperativeKernel)"),
    ("void f() { thrust::sort(a, b); }", "thrust (thrust)"),
    ("struct Traits { using Reduce = cub::BlockReduce<float, 1>; };", "CUB in host code"),
    ("texture<float> t;", "a texture"),
    ("void f() { g([=] __device__(int i) {}); }", "a lambda for the device"),
    ("__global__ void k() { k<<<1, 1>>>(); }", "launched by device code"),
    ("#define MAKE(n) __global__ void n() { }\n#define MAKE(n) __device__ void n() { }",
     "another definition of the macro MAKE"),
    ("#define MAKE(n) __global__ void n() { }\nMAKE(a, b)", "2 arguments of the macro MAKE"),
    ("#if __SOMETHING__", "a condition on __SOMETHING__"),
    ("#include <cutlass/cutlass.h>", "the header cutlass/cutlass.h"),
    ("#include HEADER", "a name that is a macro"),
    ("__global__ void k(int, float y) {}", "parameter without a name"),
    ("__global__ void k(void (*call)(int)) {}",
     "parameter without a name, or a function's pointer"),
    ("int h(int x) { return x; }\n__global__ void k(int* x) { *x = h(1); }",
     "h in device code, which is declared for the host alone"),
    ("void f() { k<<<1, 2>>> (x); a < k<<<1, 2>>>(x); }", "a launch of something"),
    ("void f() { k<<<1, 2; }", "<<< >>> is not understood"),
    ("enum { kAdd = __COUNTER__ };", "(__COUNTER__)"),
    ("#define SYNC \\ \n  __syncthreads();", "a backslash with blanks behind it"),
    ("// and so on \\ \n__device__ int kept;", "a backslash with blanks behind it"),
    ("__host__ __device__ void f() {\n#include <body>\n}", "an #include within a declaration"),
    ("struct Mine {\n#include <body>\n};", "an #include within a declaration"),
    ("struct Mine { int n; } mine;\n__global__ void k(int* x) { *x = mine.n; }",
     "mine in device code"),
    (("struct Mine { inline static int a = 1, n; };\n__global__ void k(int* x) { *x ="
      " Mine::n; }"), "n in device code"),
    ("#if CUDA_VERSION >= 11000", "a condition on CUDA_VERSION without #include <cuda.h>"),
    ("#if TORCH_VERSION_MAJOR > 1",
     "a condition on TORCH_VERSION_MAJOR without #include <torch/version.h>"),
    ("#if FLT_MAX", "a condition on FLT_MAX"),
    ("#define NDEBUG", "#define NDEBUG"),
    ("#undef NDEBUG", "#undef NDEBUG"),
    ("template <typename T> requires(sizeof(T) > 1) __global__ void k(T x) {}", "a constraint"),
])  # fmt: skip
def test_what_is_not_surely_understood_is_rejected_by_name_and_line(line, what):
    text = f"// a comment\n{line}\n" + ("#endif\n" if line.startswith("#if ") else "")
    at = 2 if "backslash" in what else 3 if "#include within" in what else 2 + line.count("\n")
    with pytest.raises(Unsplittable) as caught:
        halves(text, "/folder/scale.cu")
    assert what in caught.value.what
    assert (caught.value.path, caught.value.line) == ("/folder/scale.cu", at)


# ---- names and arguments ----


@pytest.mark.parametrize(
    ("stub", "symbol", "expression"),
    [
        ("Z5scaleIfLi4EEvPT_iE14flexops_stub_0", "_Z5scaleIfLi4EEvPT_i", "scale<float, 4>"),
        (
            "\x00_ZTSZN12_GLOBAL__N_15scaleIN3c104HalfEEEvPT_E14flexops_stub_0"[1:],
            "_ZN12_GLOBAL__N_15scaleIN3c104HalfEEEvPT_",
            "scale<c10::Half>",
        ),
        ("*ZN2ns5plainEPfE14flexops_stub_0", "_ZN2ns5plainEPf", "ns::plain"),
        ("abZZ1kE14flexops_stub_0"[3:], "k", "k"),
        ("ZL1kPFvvEE14flexops_stub_0", "_ZL1kPFvvE", "k"),
    ],
)
def test_a_stub_names_its_kernel(stub, symbol, expression):
    assert kernel_of(stub) == (0, symbol)
    assert expression_of(symbol) == expression


def test_symbols_are_compared_without_what_is_a_compilers_own():
    assert alike("_ZN2ns12_GLOBAL__N_11qILi3EEEvPf") == alike(
        "_ZN2ns30_GLOBAL__N__00000000_4_k_cu_ec1qILi3EEEvPf"
    )
    assert alike("_ZL2stPf") == alike("_Z2stPf")
    assert alike("_Z1kIfEvPT_") != alike("_Z1kIdEvPT_")


def test_nvccs_arguments_are_distinguished():
    flags = flags_of(
        [
            "-O3",
            "--use_fast_math",
            "-DA=1",
            "-U",
            "B",
            "-Xcompiler",
            "-Wall,-g",
            "-gencode=arch=compute_80,code=sm_80",
            "-I/x",
            "--ptxas-options=-v",
            "-std=c++20",
            "-Xfatbin",
            "-compress-all",
            "-lineinfo",
            "-Xptxas=-O2,-dlcm=ca",
        ]
    )
    assert flags.host == ("-O3", "-DA=1", "-UB", "-Wall", "-g", "-std=c++20")
    ptxas = [f"--ptxas-options={one}" for one in ("-v", "-O2", "-dlcm=ca")]
    expected = ("--use_fast_math", "-DA=1", "-UB", ptxas[0], "--std=c++20", "--generate-line-info")
    assert flags.device == (*expected, *ptxas[1:])
    assert flags.include_dirs == ("/x",)
    assert not flags.own
    assert flags_of(["-arch=sm_90a", "-gencode", "arch=compute_90a,code=sm_90a"]).own == ("90a",)
    assert flags_of(["-Xcompiler", "-Wall,-DA=2"]).device == ("-DA=2",), "as nvcc does"
    for wrong in ("-I/y", "-include", "-isystem"):
        with pytest.raises(ToolchainError, match=wrong):
            flags_of(["-Xcompiler", f"-Wall,{wrong}"])
    refused = (
        "-rdc=true",
        "-dc",
        "--default-stream=per-thread",
        "-include",
        "--relocatable-device-code=true",
        "-arch=sm_100f",
    )
    for wrong in (*refused, "-DCUDA_API_PER_THREAD_DEFAULT_STREAM"):
        with pytest.raises(ToolchainError, match=re.escape(wrong)):
            flags_of([wrong])


def test_what_other_systems_and_the_host_read_is_left_out():
    text = """
#include <ATen/cuda/detail/IndexUtils.cuh>
#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#ifdef __cplusplus
extern "C" {
#endif
void of_c(int);
#ifdef __cplusplus
}
#endif
#ifndef USE_ROCM
#include <cub/cub.cuh>
#else
#include <hipcub/hipcub.hpp>
#endif
#if defined(_WIN32)
__constant__ int never;
#endif
#ifdef PROJECT_EXPORTS
#define EXPORT
#endif
__global__ void k(const __nv_bfloat16* x, float* out) {
  using Reduce = cub::BlockReduce<float, 32>;
  __shared__ typename Reduce::TempStorage storage;
  out[0] = Reduce(storage).Sum(__bfloat162float(x[threadIdx.x]));
}
"""
    halves = split("mine.cu", text, [], 0)
    assert "#include <cub/cub.cuh>" in halves.device
    assert "#include <ATen/cuda/detail/TensorInfo.cuh>" in halves.device
    for half in (halves.host, halves.device):
        assert "hipcub" not in half
        assert "__constant__" not in half
    assert "#include <cuda_pipeline_primitives.h>" in halves.device
    assert "pipeline" not in halves.host
    assert "cub" not in halves.host
    assert "#include <ATen/cuda/detail/IndexUtils.cuh>" in halves.host
    assert "#ifdef PROJECT_EXPORTS\n#error" in halves.host or "elif" in halves.host
    # a macro that nothing here defines must not come from a header that the host alone reads
    assert "#ifdef PROJECT_EXPORTS\n#error" in halves.host
