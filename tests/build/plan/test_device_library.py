"""Which headers of others a program for NVRTC includes."""

from flexops.build.plan import device_library


def test_headers_that_include_cccl_are_first_and_bring_its_directory(tmp_path, monkeypatch):
    cccl = tmp_path / "cccl"
    (cccl / "cuda" / "std").mkdir(parents=True)
    (cccl / "cuda" / "std" / "type_traits").touch()
    cuda = tmp_path / "cuda"
    cuda.mkdir()
    (cuda / "curand_kernel.h").write_text("#include <cuda/std/type_traits>\n")
    (cuda / "math_constants.h").touch()
    both = (("<cuda headers 0>", cuda), ("<cuda headers 1>", cccl))
    monkeypatch.setattr(device_library, "roots_of", lambda _: both)
    monkeypatch.setattr(device_library, "_identities", lambda _: ["cccl"])
    known = (("<cuda 0>", cuda),)
    for header, roots in (("curand_kernel.h", [cuda, cccl]), ("math_constants.h", [])):
        text = f"#include <{header}>\n"
        found = device_library.of_program(text, known, {}, None)
        assert [path for _, path in found.roots] == roots
        assert bool(device_library.first([header])) == bool(roots)
