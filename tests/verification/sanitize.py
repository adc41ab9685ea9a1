"""Builds the extension with sanitizers, and runs the quick tests and the fuzz on it.

    python tests/verification/sanitize.py address    ASan and UBSan, with each instruction set that this machine has
    python tests/verification/sanitize.py address --instructions avx512    one part of that
    python tests/verification/sanitize.py thread     ThreadSanitizer, on the tests of threads

The environment that runs this needs GCC, and packages to build and test this one: `pip install -e ".[cpu,test]"`,
with scikit-build-core and nanobind. The build and a virtual environment for it lie in ~/.cache/mlx-mittens/sanitize.
The first report ends the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mlx-mittens" / "sanitize"

UNIT = ROOT / "tests" / "unit"

# Tests of tests/unit that run for each instruction set as a whole, since many of them do not name the native executor.
WHOLE = (
    "bad_input",
    "cache_step",
    "composed",
    "integer_products",
    "integer_tiles",
    "shapeless",
    "unpacked_integers",
    "vmap",
    "zero_sizes",
)
# Tests of the simulator, of plans and of users' kernels run once: no instruction set changes them.
ONCE = (
    "exact_steps",
    "expert_tiles",
    "normed_mixture",
    "normed_products",
    "qmm_int8",
    "quantized_matmuls",
    "short_conv_product",
    "simulator",
    "simulator_lanes",
    "simulator_private",
    "simulator_watcher",
    "launch_kernel",
    "matrix_units",
    "mlx_internals",
    "plans",
)
# Other tests have the extension compute the same as these: files and tables that are read, and kernels alone, whose
# machine code has no sanitizer. The fuzz in the simulator launches such kernels.
LEFT_OUT = (
    "architecture",
    "counts",
    "scheduling",
    "specs",
    "supports",
    "tolerances",
    "attention_combine",
    "attention_traffic",
    "gemv_short",
    "product_traffic",
    "prompts_on_nvidia",
    "mma_row",
)


def name_of(path: Path) -> str:
    """As the tuples above have it."""
    return path.stem.removeprefix("test_")


# The others run for each instruction set, as far as they name the native executor.
NATIVE = sorted(path for path in UNIT.rglob("test_*.py") if name_of(path) not in (*WHOLE, *ONCE, *LEFT_OUT))


@dataclass(frozen=True)
class Sanitizer:
    """How to build with sanitizers, and how to run the build.

    Attributes:
        checks: Value of -fsanitize=.
        libraries: Libraries of the compiler that have to be loaded before Python.
        options: Environment variables of the run.
    """

    checks: str
    libraries: tuple[str, ...]
    options: Mapping[str, str]


SANITIZERS = {
    "address": Sanitizer(
        "address,undefined",
        # libstdc++, since ASan looks for the function that throws before the extension brings it.
        ("libasan.so", "libubsan.so", "libstdc++.so.6"),
        {
            # Python keeps objects until it exits. A huge allocation is std::bad_alloc, as it is without ASan.
            # GCC 13 does not align the frames that detect a use after return to the 64 bytes of AVX-512 vectors.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            # Else Python's own allocator hides the objects within its pools.
            "PYTHONMALLOC": "malloc",
        },
    ),
    "thread": Sanitizer(
        "thread",
        ("libtsan.so", "libstdc++.so.6"),
        {"TSAN_OPTIONS": f"halt_on_error=1:suppressions={ROOT / 'tests' / 'verification' / 'sanitize_thread.txt'}"},
    ),
}


def site_packages(prefix: Path) -> Path:
    """Where a virtual environment keeps packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)}, scheme="venv"))


def build(name: str) -> Path:
    """Installs the package, built with a sanitizer, into an environment of its own; returns that one's Python.

    It finds all other packages in this one, but not the package itself: folders that a .pth file names are searched,
    and the .pth files there, of an editable install among them, are not read.
    """
    prefix = CACHE / name / "venv"
    python = prefix / "bin" / "python"
    if not python.exists():
        venv.create(prefix, symlinks=True)
    packages = [path for path in sys.path if path.endswith("-packages")]
    (site_packages(prefix) / "parent.pth").write_text("\n".join(packages) + "\n")
    settings = {
        "build-dir": CACHE / name / "build",
        "cmake.build-type": "RelWithDebInfo",
        "cmake.define.MITTENS_SANITIZE": SANITIZERS[name].checks,
    }
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--ignore-installed", ROOT]
        + [f"--config-settings={key}={value}" for key, value in settings.items()],
        check=True,
    )
    return python


def environment(name: str) -> dict[str, str]:
    """The environment of a process that loads the extension."""
    sanitizer = SANITIZERS[name]
    compiler = os.environ.get("CXX", "c++")

    def path_of(library: str) -> str:
        found = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
        path = found.stdout.strip()
        if path == library:  # a compiler without it prints its name
            sys.exit(f"{compiler} has no {library}: install the one of its version")
        return path

    return {
        **os.environ,
        **sanitizer.options,
        "LD_PRELOAD": " ".join(map(path_of, sanitizer.libraries)),
        "PYTHONPATH": str(ROOT / "tests"),
    }


INSTRUCTION_SETS = ("avx512amx", "avx512vnni", "avx512", "avxvnni", "avx2", "baseline", "i8mm", "dotprod", "neon")


def instruction_sets(python: Path, options: Mapping[str, str]) -> Iterator[str]:
    """The instruction sets that this machine has, the best one first.

    Raises:
        subprocess.CalledProcessError: The extension cannot be imported, or a sanitizer reports something.
    """
    command = [python, "-c", "import mlx_mittens"]
    unset = {key: value for key, value in options.items() if key != "MLX_MITTENS_CPU"}
    subprocess.run(command, env=unset, cwd=ROOT / "tests", check=True)
    for name in INSTRUCTION_SETS:
        environment = {**options, "MLX_MITTENS_CPU": name}
        tried = subprocess.run(command, env=environment, cwd=ROOT / "tests", stderr=subprocess.PIPE, text=True)
        if tried.returncode == 0:
            yield name
        elif f"MLX_MITTENS_CPU is '{name}', this machine runs" in tried.stderr:
            print(f"{name}: this machine does not have it", flush=True)
        else:
            print(tried.stderr, file=sys.stderr, flush=True)
            tried.check_returncode()


def tests(names: Iterable[str]) -> list[str]:
    return [str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in names]


def commands(name: str, cases: int, jobs: int) -> Iterator[tuple[bool, list[str]]]:
    """The runs, as arguments of Python, and whether each is for all instruction sets."""
    pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--numprocesses={jobs}", "--durations=0"]
    fuzz = ["-m", "verification.fuzz", f"--jobs={jobs}", "--log=/dev/null"]
    if name == "thread":
        yield False, [*fuzz, "--op=threads", f"--cases={100 * cases}"]
        return
    yield True, [*pytest, "-k", "native", *map(str, NATIVE)]
    yield True, [*pytest, *tests(WHOLE)]
    yield True, [*fuzz, f"--cases={cases}"]
    yield False, [*pytest, *tests(ONCE)]
    for gpu in ("apple", "nvidia"):
        yield False, [*fuzz, f"--simulate={gpu}", f"--cases={max(1, cases // 10)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the quick tests and the fuzz under sanitizers.")
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("--cases", type=int, default=100, help="of the fuzz, for each op; in the simulator a tenth")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--instructions", nargs="+", choices=INSTRUCTION_SETS, help="instead of all of this machine")
    arguments = parser.parse_args()
    python, options = build(arguments.sanitizer), environment(arguments.sanitizer)
    sets = list(instruction_sets(python, options))
    asked = [name for name in sets if name in (arguments.instructions or sets)]
    if not asked:
        sys.exit(
            f"this machine has none of the instruction sets: {', '.join(arguments.instructions or INSTRUCTION_SETS)}"
        )
    for instructions in asked:
        for for_each, command in commands(arguments.sanitizer, arguments.cases, arguments.jobs):
            # Tests of no instruction set's own code run with the best one.
            if not for_each and instructions != sets[0]:
                continue
            print(f"{instructions}: python {' '.join(command)}", flush=True)
            # Not where the package's source lies, which Python would find first.
            chosen = {**options, "MLX_MITTENS_CPU": instructions}
            ran = subprocess.run([python, *command], env=chosen, cwd=ROOT / "tests")
            if ran.returncode:
                sys.exit(f"{instructions}: failed, with status {ran.returncode}")
    print("nothing was reported")


if __name__ == "__main__":
    main()
