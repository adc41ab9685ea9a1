"""Mistakes in a new op that once passed the build, or were an error far from their cause."""

import importlib
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import mlx.core as mx
import nanobind
import pytest

import mlx_mittens as mm
from mlx_mittens import frontend
from mlx_mittens.frontend.read import sources
from mlx_mittens.ops._declaration import defined_in_extension

ROOT = Path(__file__).parents[2]

# Files of ops that a build once let through: a primitive that evaluates itself, and types in signatures, of arguments
# and of results, without the headers by which nanobind converts them.
MISTAKES = """
#include <map>
#include <vector>
#include "mlx/utils.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"
namespace mittens {
struct Wrong : mx::Primitive {
  using mx::Primitive::Primitive;
  void eval_cpu(const Arrays&, Arrays&) override {}
  void eval_gpu(const Arrays&, Arrays&) override {}
  const char* name() const override { return "Wrong"; }
};
mx::array wrong(const mx::array& x, mx::Stream s) {
  return only_output(x.shape(), std::make_shared<Wrong>(s), {x});
}
mx::array vector(const mx::array& x, const std::vector<int>& axes);
mx::array deeper(const mx::array& x, const std::optional<std::vector<float>>& scales);
std::tuple<mx::array, mx::array> results(const mx::array& x);
std::optional<mx::array> attempt(const mx::array& x, const std::string& kind);
mx::array other(const mx::array& x, const std::string& kind);
mx::array table(const mx::array& x, const std::map<int, int>& pairs);
mx::array right(const mx::array& x, const std::optional<mx::array>& weight, float eps, bool flag, mx::StreamOrDevice);
void bind(nanobind::module_& module) {
  bind_function(module, "vector", &vector);
  bind_function(module, "deeper", &deeper);
  bind_function(module, "results", &results);
  bind_function(module, "table", &table);
  define(module, "other", &attempt, &other);
  bind_function(module, "right", &right);
}
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_build_names_what_would_fail_in_a_call(tmp_path):
    (tmp_path / "op.cpp").write_text(MISTAKES)
    includes = [ROOT / "csrc", ROOT / "metal", Path(next(iter(importlib.import_module("mlx").__path__))) / "include"]
    includes += [nanobind.include_dir(), sysconfig.get_path("include")]
    command = ["c++", "-std=c++20", "-fsyntax-only", "-w", *(f"-I{path}" for path in includes), tmp_path / "op.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = re.findall(r"error: (.*)", done.stderr)
    assert sum("the primitive of an op derives from mittens::KernelPrimitive" in error for error in errors) == 1
    missing = ["vector<int", "vector<float", "tuple<", "basic_string<char|string", "map<int, int"]
    for name in missing:
        assert re.search(rf"Converter<std::(?:__\w+::)?(?:{name})", done.stderr), done.stderr
    assert sum("include the header for it, as <nanobind/stl/vector.h>" in error for error in errors) == len(missing)


def configure(folder: Path, sources: dict[str, str]) -> subprocess.CompletedProcess:
    """Runs CMake's check of dispatch by instruction set, on a tree of these sources."""
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(test LANGUAGES NONE)\n"
        f'include("{ROOT}/cmake/Instructions.cmake")\nmittens_check_versions(cpu cpu/isa)\n'
    )
    return subprocess.run(["cmake", "-B", "out", "."], cwd=folder, capture_output=True, text=True)


def test_native_code_that_no_file_defines_is_refused_when_it_is_configured(tmp_path):
    """As a symbol that is not there it would show when the extension is imported."""
    done = configure(tmp_path, {"cpu/l2_norm.cpp": "MITTENS_VERSIONS(l2_norm)\n", "cpu/isa/norm/other.cpp": "int x;\n"})
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "cpu/l2_norm.cpp has MITTENS_VERSIONS(l2_norm)" in said
    assert "write it in cpu/isa/FAMILY/l2_norm.cpp" in said


def test_native_code_that_a_file_defines_is_not(tmp_path):
    defined = "void l2_norm(Type type, const void* x) {\n}\n"
    done = configure(tmp_path, {"cpu/l2_norm.cpp": "MITTENS_VERSIONS(l2_norm)\n", "cpu/isa/norm/l2_norm.cpp": defined})
    assert done.returncode == 0, done.stderr


def test_an_op_that_is_declared_and_not_built_is_named():
    def no_such_op(x: mx.array) -> mx.array:
        raise NotImplementedError

    with pytest.raises(ImportError, match=r"declares 'no_such_op', .* build it again, with `pip install -e \.`"):
        defined_in_extension(no_such_op)


def test_an_op_of_one_variant_needs_no_name_for_it():
    """The name that the host asks for and the one that the macro makes are the same: <op>_<dtype>."""
    frontend.register_source(
        "one_variant.metal",
        '#include <metal_stdlib>\n#include "mittens/instantiate.h"\nusing namespace metal;\n'
        "template <typename T> [[kernel]] void one(device T* y [[buffer(0)]]) { y[0] = T(1); }\n"
        'instantiate_types("one", one)\n',
    )
    names = [variant.name for variant in frontend.variants("one_variant.metal")]
    assert names == ["one_float32", "one_float16", "one_bfloat16"]


def test_a_kernel_that_is_not_there_is_named_beside_those_that_are(tmp_path, monkeypatch, native):
    """As where the host asks for a variant by another name than the file has."""
    sources.flatten("norm/rms_norm.metal")  # That of another folder, seen before, is not taken for this one's.
    shutil.copytree(sources.metal_folder(), tmp_path / "metal")
    file = tmp_path / "metal" / "norm" / "rms_norm.metal"
    file.write_text(file.read_text().replace('instantiate_rows("rms_norm"', 'instantiate_rows("rms_norms"'))
    monkeypatch.setattr(sources, "metal_folder", lambda: tmp_path / "metal")
    message = r'norm/rms_norm.metal has no kernel "rms_norm_simd8_float32"; it has .*\brms_norms_simd8_float32\b'
    with mm.simulator.enabled(), pytest.raises(ValueError, match=message):
        mx.eval(mm.rms_norm(mx.ones((2, 8)), None, 1e-5))
