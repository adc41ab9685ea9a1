"""The package as a package: its files, and its messages where the environment does not fit."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import mlx.core as mx
import pytest
from helpers import scripts

import mlx_mittens as mm

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import guard  # noqa: E402


def run_python(code: str, folder: pathlib.Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *options, "-c", code], cwd=folder, capture_output=True, text=True)


def installed_files() -> pathlib.Path:
    return pathlib.Path(mm._ext.__file__).parents[1]  # the extension is in the folder of its release of mlx


def test_types_and_stub_are_installed():
    assert (installed_files() / "_ext.pyi").read_text().count("def rms_norm") == 1
    assert (pathlib.Path(mm.__file__).parent / "py.typed").exists()


def run_beside_mlx(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Without site there is no hook of an editable install; MLX is found all the same."""
    packages = pathlib.Path(mx.__file__).parents[2 if mx.__file__.endswith("__init__.py") else 1]
    return run_python(f"import sys; sys.path.append({str(packages)!r}); {code}", folder, "-S")


def test_a_wheel_holds_all_that_it_needs(tmp_path):
    """A kernel runs from the wheel's files alone."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    # Without the virtual environment's cmake, which an isolated build cannot run: pip would install another version for
    # it than the first build had, and all would be compiled anew.
    own = pathlib.Path(sys.prefix) / "bin" if sys.prefix != sys.base_prefix else None
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if pathlib.Path(folder) != own]
    subprocess.run(command, check=True, env={**os.environ, "PATH": os.pathsep.join(folders)})
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    code = (
        "import mlx.core as mx, mlx_mittens as mm; mx.set_default_device(mx.cpu); print(mm.__file__)\n"
        "with mm.simulator.enabled(): mx.eval(mm.softmax(mx.ones((2, 8)), -1)); print(mm.stats())"
    )
    result = run_beside_mlx(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout and "simulator" in result.stdout
    assert (tmp_path / "mlx_mittens_cli.py").is_file()
    names = {path.relative_to(tmp_path / "mlx_mittens") for path in (tmp_path / "mlx_mittens").rglob("*")}
    sources = {path.relative_to(ROOT) for path in (ROOT / "metal").rglob("[!.]*") if path.is_file()}
    data = {pathlib.Path("apple/chips.csv"), pathlib.Path("apple/errors.csv"), pathlib.Path("apple/mesa.patch")}
    assert names >= {pathlib.Path("py.typed"), pathlib.Path("_ext.pyi"), *data, *sources}


def test_source_tree_without_a_build_says_how_to_build(tmp_path):
    shutil.copytree(
        ROOT / "mlx_mittens", tmp_path / "mlx_mittens", ignore=shutil.ignore_patterns("_ext*", "_mlx_*", "__pycache__")
    )
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    result = run_beside_mlx("import mlx_mittens", tmp_path)
    assert result.returncode != 0
    assert "source folder" in result.stderr and 'pip install -e ".[cpu]"' in result.stderr


def test_another_mlx_version_is_named_before_the_extension_loads(tmp_path):
    plant(tmp_path, "mlx", "0.99.0")
    result = run_command(sys.executable, "-c", "import mlx_mittens", environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode != 0
    assert "installed is mlx 0.99.0" in result.stderr and f"mlx=={importlib.metadata.version('mlx')}" in result.stderr


def test_another_nanobind_tag_is_an_import_error():
    class Foreign:
        def __call__(self):
            pass

    extension = type("extension", (), {"simulator_enabled": Foreign()})
    with pytest.raises(ImportError, match="nanobind") as raised:
        mm._guard.check_tag(extension, mx)
    check_advice(str(raised.value))


def check_advice(text):
    """No index has the package: nothing can be installed from there by its name."""
    assert "again" in text and not re.search(r"pip install[^,:`]* mlx[-_]mittens", text), text


def test_a_package_without_its_extension_says_to_install_it_again(tmp_path):
    shutil.copytree(
        ROOT / "mlx_mittens", tmp_path / "mlx_mittens", ignore=shutil.ignore_patterns("_ext*", "_mlx_*", "__pycache__")
    )
    result = run_beside_mlx("import mlx_mittens", tmp_path)
    assert result.returncode != 0 and "has no extension for this Python" in result.stderr
    check_advice(result.stderr.splitlines()[-1])


def guard_on(tmp_path: pathlib.Path, tag: int) -> subprocess.CompletedProcess:
    """Runs the configure-time guard in an environment whose nanobind carries another tag."""
    package = tmp_path / "nanobind"
    (package / "src").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "src" / "nb_internals.h").write_text(f"#  define NB_INTERNALS_VERSION {tag}\n")
    metadata = tmp_path / "nanobind-9.9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nanobind\nVersion: 9.9.9\n")
    return subprocess.run(
        [sys.executable, ROOT / "cmake" / "guard.py"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )


def tag_of_mlx() -> int:
    return guard.nanobind_tag_of_mlx(pathlib.Path(mx.__file__).parent)


def test_configure_guard_names_both_tags(tmp_path):
    result = guard_on(tmp_path, tag_of_mlx() + 1)
    assert result.returncode != 0
    assert (
        f"v{tag_of_mlx()}" in result.stderr
        and f"v{tag_of_mlx() + 1}" in result.stderr
        and "pip install" in result.stderr
    )


def test_configure_guard_names_the_oldest_mlx(tmp_path):
    metadata = tmp_path / "mlx-0.3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx\nVersion: 0.3.1\n")
    result = guard_on(tmp_path, tag_of_mlx())
    assert result.returncode != 0
    oldest = next(iter(guard.releases()))
    assert "mlx 0.3.1 is installed" in result.stderr and f"mlx {oldest} or later" in result.stderr


def test_configure_guard_accepts_the_same_tag(tmp_path):
    result = guard_on(tmp_path, tag_of_mlx())
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip().split(";")) == 3


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="this machine has a GPU")
def test_gpu_stream_without_a_gpu_says_what_is_missing():
    x = mx.ones((2, 4))
    with pytest.raises((ValueError, RuntimeError), match="cuda13"):
        mx.eval(mm.rms_norm(x, None, 1e-5, stream=mx.gpu))


def test_executors_say_what_runs_here():
    found = mm.executors()
    assert set(found) == {"metal", "cuda", "simulator", "native"}
    assert found["native"].startswith("ready") and found["simulator"] == "ready"
    if not mx.is_available(mx.gpu):
        assert "cuda13" in found["cuda"]


def test_console_script_is_outside_of_the_package():
    scripts = importlib.metadata.entry_points(group="console_scripts")
    assert next(iter(scripts.select(name="mlx-mittens"))).value == "mlx_mittens_cli:main"


def run_command(*command: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, env={**os.environ, **environment}, cwd="/", capture_output=True, text=True)


def plant(folder: pathlib.Path, package: str, version: str) -> None:
    """Metadata of a package, which comes before the installed package's where the folder is in PYTHONPATH."""
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def hide(folder: pathlib.Path, prefix: str) -> None:
    """Hides the metadata of packages that are installed, where the folder is in PYTHONPATH."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nimport os\nlistdir, version = os.listdir, m.version\n"
        f"folder, prefix = {str(folder)!r}, {prefix!r}\n"
        "shown = lambda place: lambda name: str(place) == folder or not name.startswith(prefix)\n"
        "os.listdir = lambda place='.': list(filter(shown(place), listdir(place)))\n"
        "def hidden(name):\n"
        "  if name + '-' == prefix: raise m.PackageNotFoundError(name)\n"
        "  return version(name)\n"
        "m.version = hidden\n"
    )


@pytest.mark.parametrize("command", ["doctor", "bench", "check", "simulate", "--version"])
@pytest.mark.parametrize("start", [scripts.command(), [sys.executable, "-m", "mlx_mittens"]], ids=["script", "module"])
@pytest.mark.parametrize(
    "version, sentence",
    [("0.99.0", "installed is mlx 0.99.0"), (None, "mlx_mittens needs MLX")],
    ids=["another", "missing"],
)
def test_commands_say_in_a_sentence_that_mlx_does_not_fit(tmp_path, command, start, version, sentence):
    if version:
        plant(tmp_path, "mlx", version)
    else:
        hide(tmp_path, "mlx-")
    result = run_command(*start, command, environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert sentence in result.stderr and "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    if command == "doctor" and "-c" in start:
        versions = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert versions["mlx"] == (version or "not installed")
        assert versions["numpy"] and versions["mlx-mittens"] and versions["python"] and versions["system"]
    else:
        assert result.stdout == ""


def test_mlx_without_its_files_is_an_import_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="without its files"):
        mm._guard.check_libmlx()


@pytest.mark.skipif(sys.platform != "linux", reason="on a Mac mlx brings its library along")
def test_mlx_without_a_backend_is_an_import_error_that_says_what_to_add(tmp_path, monkeypatch):
    """As `pip install mlx-mittens` without an extra leaves it on Linux."""
    spec = type("spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    version = importlib.metadata.version("mlx")
    with pytest.raises(ImportError) as error:
        mm._guard.check_libmlx()
    assert f'pip install "mlx[cpu]=={version}"' in str(error.value) and f"mlx[cuda13]=={version}" in str(error.value)


OLDER = "0.0.1"


@pytest.mark.skipif(sys.platform != "linux", reason="on a Mac mlx brings its library along")
@pytest.mark.parametrize(
    "installed, advice",
    [
        ({"mlx-cpu": OLDER}, 'pip install "mlx[cpu]=={version}"'),
        ({"mlx-cuda-12": OLDER}, 'pip install "mlx[cuda12]=={version}"'),
        ({"mlx-cuda-13": OLDER}, 'pip install "mlx[cuda13]=={version}"'),
        (
            {"mlx-cpu": OLDER, "mlx-cuda-13": None},
            "pip uninstall --yes mlx-cpu, then pip install --force-reinstall --no-deps mlx-cuda-13=={version}",
        ),
    ],
    ids=str,
)
def test_a_backend_of_another_release_is_named_before_mlx_is_imported(tmp_path, installed, advice):
    """As `pip install` of a wheel without an extra leaves it: mlx.core would end with the name of a symbol."""
    version = importlib.metadata.version("mlx")
    hide(tmp_path, "mlx_c")
    for package, its in installed.items():
        plant(tmp_path, package, its or version)
    code = "import sys\ntry:\n  import mlx_mittens\nexcept ImportError as e: print(e, 'mlx.core' in sys.modules)"
    result = run_command(sys.executable, "-c", code, environment={"PYTHONPATH": str(tmp_path)})
    assert result.stdout.startswith(f"mlx {version} is installed beside {next(iter(installed))} {OLDER}")
    assert result.stdout.endswith(f"{advice.format(version=version)}. False\n")


@pytest.mark.parametrize("installed, builds", [("0.3.1", False), ("99.0.0", True)])
def test_a_build_is_offered_for_a_later_mlx_only(monkeypatch, installed, builds):
    """The build refuses an older one."""
    monkeypatch.setattr(mm._guard, "_versions", lambda: {"mlx": installed})
    with pytest.raises(ImportError) as error:
        mm._guard.chosen({"0.32.4": pathlib.Path("_ext.so")})
    assert ("from its source" in str(error.value)) == builds


@pytest.mark.parametrize("arguments", [["doctor", "--ops", "softmax"], ["--version"], ["check", "{file}"]], ids=str)
def test_a_broken_pipe_ends_quietly(tmp_path, arguments):
    file = tmp_path / "wrong.metal"
    file.write_text("#include <metal_stdlib>\nkernel void f(device double* x [[buffer(0)]]) { x[0] = 1; }\n")
    command = scripts.command(*(text.format(file=file) for text in arguments))
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")
