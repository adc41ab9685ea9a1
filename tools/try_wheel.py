"""The path of a user of a wheel, in a fresh environment in which there is no compiler.

python tools/try_wheel.py FILE.whl                        with the Python that runs this
python tools/try_wheel.py FILE.whl --python python3.12    with another one, which the wheel is for
python tools/try_wheel.py FILE.whl --tests                then names of mx, and the tests with the marker `quick`, too
python tools/try_wheel.py FILE.whl --tests-only           these alone
python tools/try_wheel.py FILE.whl --tests-only --only float16    only tests with this word in their names
python tools/try_wheel.py FILE.whl --mlx 0.31.2           beside that release of mlx, and the mlx-lm that goes with it

It installs the wheel as the README says, step by step, and checks what each step makes possible: the error of `import`
without MLX's library, the quick benchmark, a kernel of mx.fast.metal_kernel without and with the simulator's clang, a
tiny model with and without the patch. pip downloads the wheel's requirements. The exit status is 1 where a step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import documentation  # noqa: E402

# Variables that would find another compiler, or another Python's packages.
_DROPPED = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "VIRTUAL_ENV")
_DROPPED_PREFIXES = ("CMAKE_", "CCACHE_", "MLX_", "PYTHON")

# Names of mx that only newer releases have, used by code that runs with these alone.
_NEWER_NAMES = ("mx.fast.gated_delta_update",)

# Prints names of mx that the package's modules ask for and this mlx lacks.
_MISSING_NAMES = r"""
import ast, operator, pathlib, re, mlx.core as mx, mlx_mittens
for path in pathlib.Path(mlx_mittens.__file__).parent.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"mx\.(fast\.)?\w+", name):
            try:
                operator.attrgetter(name.removeprefix("mx."))(mx)
            except AttributeError:
                print(name)
"""

# Packages that running the tests needs besides the extras `kernels` and `lm`.
_TEST_PACKAGES = ("pytest-xdist", "gguf", "lief", "ml_dtypes")


def _is_old(mlx: str) -> bool:
    """Whether a release of MLX asks on Linux for a Mac, or for g++, where later ones do not: up to 0.31."""
    return bool(mlx) and [int(part) for part in mlx.split(".")] < [0, 32]


class Failed(Exception):
    """A step went wrong; its text says how."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that finds nothing outside of it.

    Attributes:
        folder: The environment's.
        variables: Of every program that is run.
    """

    folder: Path
    variables: Mapping[str, str]

    @classmethod
    def make(cls, python: str, scratch: Path, kernels: Path, mlx: str = "") -> Environment:
        folder = scratch / "environment"
        cache = subprocess.run([python, "-m", "pip", "cache", "dir"], capture_output=True, text=True).stdout.strip()
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        dropped = lambda name: name in _DROPPED or name.startswith(_DROPPED_PREFIXES)
        variables = {name: value for name, value in os.environ.items() if not dropped(name)}
        variables |= {
            "PATH": os.pathsep.join([str(folder / "bin"), *[os.environ["PATH"]] * _is_old(mlx)]),
            "XDG_CACHE_HOME": str(scratch / "cache"),
            "MLX_MITTENS_CACHE": str(kernels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        if mlx:  # whatever requires mlx gets this one
            constraints = scratch / "constraints.txt"
            constraints.write_text(f"mlx=={mlx}\n")
            variables["PIP_CONSTRAINT"] = str(constraints)
        return cls(folder, variables | ({"PIP_CACHE_DIR": cache} if cache else {}))

    def run(self, program: str, *arguments: object, folder: Path, fails: bool = False) -> str:
        """Runs a program of the environment; returns its output on both streams.

        Raises:
            Failed: It ends with an error, or, if it is to fail, without one.
        """
        command = [str(self.folder / "bin" / program), *map(str, arguments)]
        done = subprocess.run(
            command, env=self.variables, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if bool(done.returncode) != fails:
            raise Failed(
                f"{program} {' '.join(map(str, arguments))} ends with {done.returncode}\n{done.stdout[-4000:]}"
            )
        return done.stdout


@dataclass(frozen=True)
class Trial:
    """A wheel and the environment that it is tried in.

    Attributes:
        wheel: The file.
        environment: Where it is installed.
        folder: Where programs run.
        mlx: The release of mlx to run beside; empty for the newest.
        only: A word in the names of the tests to run; empty for all.
    """

    wheel: Path
    environment: Environment
    folder: Path
    mlx: str = ""
    only: str = ""

    @property
    def runs_metal_kernels(self) -> bool:
        """Whether MLX writes the signature of a kernel here, which its oldest releases do on a Mac alone."""
        return sys.platform == "darwin" or not _is_old(self.mlx)

    def install(self, extras: str = "", *others: str) -> None:
        named = f"{self.wheel}[{extras}]" if extras else str(self.wheel)
        if "lm" in extras.split(",") and sys.platform == "linux":  # there its extra alone says which mlx it is for
            others += ("mlx-lm[cpu]",)
        self.environment.run("python", "-m", "pip", "install", "--quiet", named, *others, folder=self.folder)

    def python(self, *arguments: object, fails: bool = False) -> str:
        return self.environment.run("python", *arguments, folder=self.folder, fails=fails)

    def alone(self) -> str:
        """Installed without extras, Linux has no libmlx: the import says what to add."""
        self.install()
        said = self.python("-c", "import mlx_mittens", fails=True).strip().splitlines()[-1]
        return _containing(said, "ImportError", "pip install", "mlx[cpu]==")

    def bench(self) -> str:
        """The quick benchmark: no row is wrong."""
        self.install("cpu,bench")
        self.environment.run("mlx-mittens", "bench", "--quick", "--json", "bench.json", folder=self.folder)
        rows = json.loads((self.folder / "bench.json").read_text())["rows"]
        wrong = [row for row in rows if "wrong" in row]
        if wrong or not rows:
            raise Failed(f"{len(wrong)} of {len(rows)} rows are wrong")
        return f"{len(rows)} rows, none is wrong"

    def readme(self) -> str:
        """The README's first snippet."""
        first = next(block for block in _readme() if block.language == "python" and "mm.rms_norm" in block.text)
        (self.folder / "first.py").write_text(first.text)
        return " ".join(self.python("first.py").split())[:60]

    def kernel_without_clang(self) -> str:
        """A kernel of the user's without the simulator's clang: the error says what to add."""
        test = _kernel_test()
        (self.folder / test.test_file).write_text(test.text + f"\n{test.test_file.removesuffix('.py')}()\n")
        said = self.python(test.test_file, fails=True).strip().splitlines()[-1]
        return _containing(said, "pip install ziglang" if self.runs_metal_kernels else "mlx 0.32.0 is the first")

    def kernel(self) -> str:
        """The README's test of a kernel, by pytest."""
        self.install("kernels,lm")
        test = _kernel_test()
        (self.folder / test.test_file).write_text(test.text)
        works = self.runs_metal_kernels
        said = self.environment.run("pytest", "-q", test.test_file, folder=self.folder, fails=not works).strip()
        return said.splitlines()[-1] if works else _containing(said, "mlx 0.32.0 is the first").splitlines()[-1]

    def model(self) -> str:
        """A model that is trained here: in 4 bits it gives the same tokens with the patch and without."""
        train, generate = ROOT / "examples" / "train_tiny.py", ROOT / "examples" / "generate.py"
        self.python(train, "--out", "tiny", "--steps", 20, "--width", 128)
        said = self.python(generate, "tiny/4bit", "--tokens", 16, "--check").splitlines()
        return next(line for line in said if line.startswith("the same"))

    def ptx(self) -> str:
        """The kernels as PTX, where the wheel was built with them: one for each variant."""
        inside = {name for name in zipfile.ZipFile(self.wheel).namelist() if name.endswith(".ptx")}
        if not inside:
            return "none in this wheel"
        code = (
            "from mlx_mittens import frontend\n"
            "from mlx_mittens.frontend import library\n"
            "for file in frontend.files():\n"
            "    key = library.prebuilt_key(frontend.flatten(file))\n"
            "    for variant in frontend.variants(file): print(frontend.entry_name(variant.name), key)\n"
        )
        wanted = dict(line.split(maxsplit=1) for line in self.python("-c", code).splitlines())
        found = {Path(name).stem: _first_line(self.wheel, name).removeprefix("// ") for name in inside}
        if found != wanted:
            differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise Failed(
                f"{len(differing)} of {len(wanted)} variants have no PTX, or that of other text: {differing[:3]}"
            )
        return f"{len(found)} files, one for each variant"

    def names(self) -> str:
        """The names of mx that the package's modules ask for are there."""
        self.install("cpu")
        if missing := set(self.python("-c", _MISSING_NAMES).split()) - {*_NEWER_NAMES}:
            raise Failed(f"this mlx lacks {', '.join(sorted(missing))}")
        return "all are there"

    def tests(self) -> str:
        """The tests with the marker `quick`, of the clone, on the installed package."""
        self.install("kernels,lm", *_TEST_PACKAGES)
        options = ["-k", self.only] if self.only else []
        options += [*"-q -p no:cacheprovider -n 2 -m quick".split(), "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
        said = self.environment.run("pytest", *options, ROOT / "tests" / "verification", folder=self.folder)
        return said.strip().splitlines()[-1].strip("= ")


def _readme() -> list[documentation.Block]:
    return documentation.blocks(ROOT / "README.md")


def _kernel_test() -> documentation.Block:
    return next(block for block in _readme() if block.is_test_file)


def _first_line(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as file:
        return file.readline().decode().strip()


def _containing(said: str, *words: str) -> str:
    if missing := [word for word in words if word not in said]:
        raise Failed(f"{missing} is not in what was said: {said}")
    return said


def steps(trial: Trial) -> list[Callable[[], str]]:
    """In the order in which a user takes them; each builds on those before it."""
    return [trial.alone, trial.bench, trial.readme, trial.kernel_without_clang, trial.kernel, trial.model, trial.ptx]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, metavar="FILE.whl")
    parser.add_argument(
        "--python", default=sys.executable, help="that the environment is made of (the one that runs this)"
    )
    parser.add_argument("--mlx", default="", metavar="VERSION", help="the release of mlx to install (the newest)")
    parser.add_argument("--cache", type=Path, help="folder that keeps compiled kernels for the next wheel (none)")
    parser.add_argument("--tests", action="store_true", help="then run the tests with the marker `quick`, too")
    parser.add_argument("--tests-only", action="store_true", help="run these tests alone")
    parser.add_argument("--only", default="", metavar="WORD", help="run only the tests with this word in their names")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "elsewhere"
        folder.mkdir()
        kernels = arguments.cache.resolve() if arguments.cache else Path(scratch) / "kernels"
        environment = Environment.make(arguments.python, Path(scratch), kernels, arguments.mlx)
        trial = Trial(arguments.wheel.resolve(), environment, folder, arguments.mlx, arguments.only)
        path = [] if arguments.tests_only else steps(trial)
        tests = [trial.names, trial.tests] if arguments.tests or arguments.tests_only else []
        for step in [*path, *tests]:
            start = time.monotonic()
            try:
                said, failed = step(), False
            except Failed as error:
                said, failed = str(error), True
            seconds = time.monotonic() - start
            print(f"{'FAILED' if failed else 'ok':6} {seconds:4.0f} s  {step.__name__:20} {said}", flush=True)
            if failed:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
