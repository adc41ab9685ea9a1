"""Runs the macOS dispatch code on Linux over a recording device; the simulator executes the recorded launches."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile

import mlx.core as mx
import numpy as np
from verification import quick

import mlx_mittens as mm
from helpers import int8_products
from helpers.tolerances import LAYERS
from helpers.variants import simulate
from mlx_mittens import _ext, frontend, specs

ROOT = pathlib.Path(__file__).parents[2]

METAL = ROOT / "csrc" / "backends" / "metal.cpp"

SEED = 2  # another thread order than in test_variants and test_quick


# Other sources of the shared object.
OTHERS = (
    ROOT / "csrc" / "backends" / "compiled.cpp",
    *(ROOT / "csrc" / "mlx_internals" / name for name in ("buffer_ownership.cpp", "known.cpp")),
    ROOT / "tests" / "verification" / "macos" / "recorder.cpp",
)


@functools.cache
def _folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(prefix="mlx-mittens-"))


def _mlx() -> pathlib.Path:
    folders = importlib.util.find_spec("mlx").submodule_search_locations
    return next(pathlib.Path(folder) for folder in folders if (pathlib.Path(folder) / "lib").is_dir())


def _call_compiler(*arguments: object) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    result = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@functools.cache
def _compiled(source: pathlib.Path) -> pathlib.Path:
    handle, path = tempfile.mkstemp(".o", dir=_folder())
    os.close(handle)
    options = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-D_METAL_"]
    own = (ROOT / folder for folder in ("tests/verification/macos/recording", "csrc", "metal"))
    _call_compiler(*options, *(f"-I{folder}" for folder in (_mlx() / "include", *own)), "-c", source, "-o", path)
    return pathlib.Path(path)


@functools.cache
def build(metal: pathlib.Path = METAL) -> str:
    """The macOS code, built against a device that records, as a shared object."""
    handle, library = tempfile.mkstemp(".so", "recorder", dir=_folder())
    os.close(handle)
    libraries = f"-L{_mlx() / 'lib'}", "-lmlx", f"-Wl,-rpath,{_mlx() / 'lib'}"
    _call_compiler("-shared", "-o", library, *map(_compiled, (metal, *OTHERS)), *libraries)
    return library


@contextlib.contextmanager
def through_macos_code(library: str | None = None):
    """Launches in the simulator go through the macOS code: as `build` has made it, or a process that began this one."""
    _ext.simulator_host(library or build())
    try:
        yield
    finally:
        _ext.simulator_host("")


@contextlib.contextmanager
def one_by_one(library: str):
    """Through the macOS code, with each kernel compiled from the very text that Metal would be given for it.

    Yields the recorder, a library of C functions. The simulator runs a kernel from a source that is registered as
    ``file:kernel``, in which there is no other.
    """
    recorder = ctypes.CDLL(library)
    names = {}

    def register(file: bytes, kernel: bytes) -> int:
        text, only = frontend.metal_text(file.decode(), kernel.decode())
        assert only == kernel.decode(), f"{only!r} is alone in the text"
        name = f"{file.decode()}:{only}"
        frontend.register_source(name, text)
        names[name] = ctypes.create_string_buffer(name.encode())  # for as long as C++ has its address
        return ctypes.addressof(names[name])

    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    mittens_texts = recorder.mittens_texts
    mittens_texts.argtypes = [callback]
    texts = callback(register)
    mittens_texts(texts)
    recorder.mittens_libraries.restype = recorder.mittens_compiled.restype = ctypes.c_char_p
    try:
        with through_macos_code(library):
            yield recorder
    finally:
        mittens_texts(callback())


def strided_views(rng: np.random.Generator):
    """Inputs that reach runtime/copy.metal: a view is copied before the norm."""
    for dtype in (mx.float16, mx.float32):
        x = mx.array(rng.standard_normal((6, 40, 3))).astype(dtype)
        yield x.transpose(2, 0, 1)
        yield x[:, ::2][:, :, 0]


@functools.cache
def recorded_kernels() -> frozenset[str]:
    """Runs every op through the macOS code; the kernels it launched with right results, as ``file:kernel``.

    It runs the cases of the table that reach every variant: the code depends on the launch and not on the sizes.
    """
    chosen = quick.chosen()
    with through_macos_code(), mm.strict():
        _ext.simulator_record(True)
        for op in specs.OPS:
            for dtype in specs.DTYPES:
                wanted = lambda case, i: (op.name, case.name, dtype, i) in chosen
                rng = np.random.default_rng(SEED)  # for each: no op's inputs depend on the cases of another
                for case, _, check in simulate(op, specs.DTYPES[dtype], SEED, rng, wanted):
                    assert check.passed, f"{op.name} {case.name}: {check.detail}"
        for view in strided_views(np.random.default_rng(0)):
            with mm.simulator.enabled():
                seen = mm.rms_norm(view, None, 1e-5)
                plain = mm.rms_norm(mx.contiguous(view), None, 1e-5)
                assert mx.allclose(seen, plain, rtol=LAYERS, atol=LAYERS).item()
        int8_products.run_all()
    return frozenset(f"{run['file']}:{run['kernel']}" for run in _ext.simulator_record(False))
