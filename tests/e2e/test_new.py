"""The command `new`: names that it refuses, files that it writes, and that these build and pass as they are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mittens.cli import new
from mlx_mittens.cli.main import main
from mlx_mittens.frontend.check import dialect
from mlx_mittens.frontend.read import sources

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The files of a clone that the command reads and writes, and the folder that it runs in."""
    for folder in ("metal", "csrc", "mlx_mittens/ops", "mlx_mittens/specs", "tests/unit", str(new.SKELETONS)):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *arguments: str) -> str:
    assert main(["new", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith("mlx-mittens new: ")
    return printed.err


def files_of(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", ["L2", "2norm", "l2-norm", "_l2", "l2_", "l2__norm", "norm_2", "", "größe", "a b", "../x"]
)
def test_refuses_an_invalid_name(clone, capsys, name):
    before = files_of(clone)
    text = refusal(capsys, name, "--family", "norm")
    assert repr(name) in text and "expected words of lower-case letters" in text
    assert files_of(clone) == before


WORDS = (
    *("lambda", "class", "match", "list", "template", "half", "kernel", "static_cast", "nullptr", "true", "xor"),
    *("co_await", "register", "size_t", "uint32_t", "bfloat", "float4", "half2x4", "packed_float3", "texture2d"),
    *("max", "min", "exp", "isnan", "simd_sum", "simd_shuffle_xor", "popcount", "as_type", "atomic_uint"),
)


@pytest.mark.parametrize("family", new.FAMILIES)
def test_refuses_words_of_the_languages(clone, capsys, family):
    before = files_of(clone)
    for name in WORDS:
        assert f"{name!r} is a word of Python, C++ or Metal" in refusal(capsys, name, "--family", family)
    assert files_of(clone) == before


@pytest.mark.parametrize(
    "name, reason",
    [
        ("op", "stands for a name in the skeletons"),
        ("op_name", "stands for a name in the skeletons"),
        ("mx", "is a name of an import in modules and tests"),
        ("np", "is a name of an import in modules and tests"),
        ("mm", "is a name of an import in modules and tests"),
        ("specs", "is a name of an import in modules and tests"),
        ("norm", "exists: mlx_mittens/ops/norm.py is there"),
        ("cache", "exists: mlx_mittens/ops/cache.py is there"),
        ("moe", "exists: mlx_mittens/ops/moe.py is there"),
        ("custom", "exists: mlx_mittens/ops/custom.py is there"),
        ("shaped", "exists: mlx_mittens/specs/shaped.py is there"),
        ("tests", "exists: mlx_mittens/specs/norm.py has _tests"),
        ("draw", "exists: mlx_mittens/specs/norm.py has _draw"),
        ("row_sum", "exists: metal/mittens/tile.h uses it"),
        ("instantiate_kernel", "exists: metal/attention/dense.h uses it"),
        ("launch", "exists: csrc/backends/launch.h has a type Launch"),
        ("arrays", "exists: csrc/runtime/primitive.h has a type Arrays"),
        ("kernel_primitive", "exists: csrc/runtime/primitive.h has a type KernelPrimitive"),
        ("primitive", "exists: csrc/runtime/primitive.h has a type Primitive"),
        ("name", "is a word of Python, C++ or Metal"),
    ],
)
def test_refuses_names_that_the_clone_uses(clone, capsys, name, reason):
    before = files_of(clone)
    assert f"{name!r} {reason}" in refusal(capsys, name, "--family", "norm")
    assert files_of(clone) == before


@pytest.mark.parametrize("family", new.FAMILIES)
def test_takes_other_names(clone, family):
    for name in (
        "l2",
        "instance_norm",
        "rms",
        "outer_product",
        "plain_attention",
        "row_append",
        "float_norm",
        "max_pool",
    ):
        new._check(name, family, clone)


@pytest.mark.parametrize(
    "name, what",
    [
        ("rms_norm", "metal/norm/rms_norm.metal is there"),
        ("attention", "metal/attention/attention.metal is there"),
        ("block_matmul", "mlx_mittens/ops/matmul.py declares it"),
        ("gguf", "tests/unit/matmul/test_gguf.py is there"),
        ("simulator", "mlx_mittens has something else of that name"),
    ],
)
@pytest.mark.parametrize("family", new.FAMILIES)
def test_refuses_a_name_that_exists(clone, capsys, name, what, family):
    """In whatever family it exists."""
    before = files_of(clone)
    text = refusal(capsys, name, "--family", family)
    assert f"{name!r} exists: {what}" in text
    assert files_of(clone) == before


def test_refuses_an_unknown_family(clone, capsys):
    text = refusal(capsys, "l2_norm", "--family", "norms")
    assert "no family 'norms'" in text and "norm, matmul, attention, cache" in text


def test_refuses_a_place_that_is_no_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = refusal(capsys, "l2_norm", "--family", "norm")
    assert f"{tmp_path} is not in a clone of the mlx-mittens repository" in text
    assert not list(tmp_path.iterdir())


def test_works_from_a_folder_of_the_clone_and_once(clone, monkeypatch, capsys):
    monkeypatch.chdir(clone / "metal" / "norm")
    assert main(["new", "l2_norm", "--family", "norm"]) == 0
    printed = capsys.readouterr().out
    assert "pip install -e ." in printed and "pytest tests/unit/norm/test_l2_norm.py" in printed
    assert (clone / "metal/norm/l2_norm.metal").is_file()
    assert "'l2_norm' exists: metal/norm/l2_norm.metal is there" in refusal(capsys, "l2_norm", "--family", "cache")


@pytest.mark.parametrize("name", ["l2", "a_long_name_whose_lines_are_broken_anew"])
@pytest.mark.parametrize("family", new.FAMILIES)
def test_what_is_written_passes_the_checks_of_style(clone, monkeypatch, family, name):
    """As .ci/run has them; the kernel also compiles, and uses nothing that a Mac's compiler would refuse."""
    before = files_of(clone)
    written = new.write(name, family, clone)
    changed = {path for path, text in files_of(clone).items() if before.get(path) != text}
    assert changed == {str(clone / path) for path in written} and len(written) == 5
    row = (clone / f"mlx_mittens/specs/{family}.py").read_text().split(f'name="{name}"')[1]
    assert re.search(r'twin_text="`[^`"]+`",', row), "the README's table has the twin as code"
    assert not re.search("op_?name", "".join((clone / path).read_text() for path in new.files(name, family)), re.I)
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["clang-format", "--dry-run", "-Werror"]):
        mine = [path for path in written if path.endswith(".cpp" if command[0] == "clang-format" else ".py")]
        done = subprocess.run([*command, *mine], cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.setattr(sources, "metal_folder", lambda: clone / "metal")
    assert dialect.check(f"{family}/{name}.metal") == []


def test_every_family_has_skeletons():
    for family in new.FAMILIES:
        for skeleton in new.files("op", family).values():
            assert (ROOT / new.SKELETONS / family / skeleton).is_file()


OPS = {"norm": "l2_norm", "matmul": "dense_product", "attention": "plain_attention", "cache": "row_append"}


# Compositions that an evaluation cannot take: the change in a norm, and the error of a call. The last fails in
# the middle, where operations that write memory are on their way.
WRONG = {
    "wrong_type": (
        "mx::astype(mx::multiply(wide, n, s), x.dtype(), s)",
        "mx::multiply(wide, n, s)",
        "composed() returns array 0 of shape (2,8) and dtype float32: expected (2,8) and float16",
    ),
    "wrong_stream": (
        "mx::square(wide, s)",
        "mx::square(wide, mx::new_stream(mx::Device::cpu))",
        "composed() has an operation, Square, on another stream: expected stream() as the last argument",
    ),
    "wrong_recursion": (
        "return {compose(inputs[0], eps_, stream())};",
        "const mx::array wide = mx::exp(mx::astype(inputs[0], mx::float32, stream()), stream());\n"
        "    const mx::array x = mx::astype(wide, mx::float16, stream());\n"
        "    return {mx::multiply(only_output(x.shape(), std::make_shared<WrongRecursion>(stream(), eps_), {x}),\n"
        "                         mx::sin(x, stream()), stream())};",
        "composed() calls the op itself, which has no native code: expected operations of mx",
    ),
}

CALLS = """
import mlx.core as mx, mlx_mittens as mm
mx.set_default_device(mx.cpu)
mx.set_cache_limit(0)  # what is freed is no memory any more
small, large = mx.zeros((2, 8), mx.float16), mx.zeros((4096, 4096), mx.float16)
mx.eval(small, large)
before = mx.get_active_memory()
for op in {ops}:
    for x in (small, large):
        y = getattr(mm, op)(x, 1e-5)
        try:
            mx.eval(y)
        except RuntimeError as error:
            if x is small:
                print(op, error)
        del y
        assert mx.array_equal(mx.exp(small), mx.ones_like(small))  # the stream goes on
mx.synchronize()
print(mx.get_active_memory() - before, "bytes are left")
"""


@pytest.mark.nightly
def test_adding_a_kernel(tmp_path):
    """A copy of the tree with a new op of each family is built, and all that is tested of every op passes."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "build", "__pycache__"))
    for family, name in OPS.items():
        new.write(name, family, tree)
    for name, (right, wrong, _) in WRONG.items():
        new.write(name, "norm", tree)
        source = tree / "csrc" / "ops" / "norm" / f"{name}.cpp"
        assert source.read_text().count(right) == 1
        source.write_text(source.read_text().replace(right, wrong))

    # -I: the extension is not in the source folder, which Python would look into first.
    def run(*command: str, cwd: Path = tree) -> str:
        done = subprocess.run([str(python), "-I", *command], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    python = Path(sys.executable)
    run("-m", "venv", str(tmp_path / "venv"))
    python = tmp_path / "venv" / "bin" / "python"
    packages = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    run("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--editable", ".")
    run("docs/where.py", "--write")
    run("-m", "pytest", "-q", *(f"tests/unit/{family}/test_{name}.py" for family, name in OPS.items()))
    chosen = " or ".join(OPS.values())
    every_op = ["ops", "specs", "vmap", "zero_sizes", "bad_input", "architecture"]
    run("-m", "pytest", "-q", *(f"tests/unit/test_{part}.py" for part in every_op), "-k", f"{chosen} or table or call")
    run("-m", "pytest", "-q", "tests/verification/test_variants.py", "tests/verification/test_quick.py", "-k", chosen)
    run("-m", "mlx_mittens", "doctor", "--ops", ",".join(OPS.values()), cwd=tmp_path)
    said = run("-c", CALLS.format(ops=tuple(WRONG)))
    assert "\n0 bytes are left" in said
    for name, (_, _, message) in WRONG.items():
        assert f"{name} [Mittens{''.join(map(str.capitalize, name.split('_')))}] {message}" in said
