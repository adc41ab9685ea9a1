"""One package for several releases of mlx: which are built, which is chosen at import, and messages on others."""

import importlib.machinery
import importlib.metadata
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import zipfile

import pytest

import mlx_mittens as mm

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import backend  # noqa: E402
import guard  # noqa: E402

KNOWN = list(guard.releases())
INSTALLED = importlib.metadata.version("mlx")
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.fixture
def environment(monkeypatch):
    """The build's environment: the mlx that is installed in it, which tests may change."""
    versions = {"mlx": INSTALLED}
    monkeypatch.delenv("MLX_MITTENS_MLX", raising=False)
    monkeypatch.setattr(guard, "installed", lambda package: versions.get(package, ""))
    return versions


def test_each_release_has_a_nanobind_and_the_newest_comes_last():
    assert sorted(KNOWN, key=guard.numbers) == KNOWN
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", nanobind) for nanobind in guard.releases().values())


def test_a_build_is_for_the_mlx_that_is_installed(environment):
    environment["mlx"] = KNOWN[0]
    assert backend.chosen(None) == [KNOWN[0]]
    environment["mlx"] = "9.8.7"
    assert backend.chosen({}) == ["9.8.7"], "one that is not known yet may be tried"


def test_a_build_without_an_mlx_is_for_the_newest(environment, monkeypatch):
    environment.clear()
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    assert backend.chosen(None) == [KNOWN[-1]]


def test_an_isolated_build_is_for_the_mlx_of_the_environment_around_it(environment, monkeypatch, tmp_path):
    """That environment's packages are not on the search path; its name is."""
    environment.clear()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    metadata = tmp_path / "lib" / version / "site-packages" / f"mlx-{KNOWN[0]}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mlx\nVersion: {KNOWN[0]}\n")
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda kind: str(tmp_path / "none"))
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert backend.chosen(None) == [KNOWN[0]]


@pytest.mark.parametrize("by", ["setting", "variable"])
def test_releases_are_named(environment, monkeypatch, by):
    def chosen(text):
        if by == "setting":
            return backend.chosen({"mittens.releases": text})
        monkeypatch.setenv("MLX_MITTENS_MLX", text)
        return backend.chosen(None)

    assert chosen("all") == KNOWN
    assert chosen(KNOWN[-1]) == [KNOWN[-1]]
    assert chosen(f"{KNOWN[-1]}, {KNOWN[0]}") == sorted({KNOWN[0], KNOWN[-1]}, key=guard.numbers)
    with pytest.raises(SystemExit, match=rf"names mlx 9\.8\.7: known are .*{KNOWN[-1]}.*next_mlx"):
        chosen("9.8.7")


def test_an_mlx_older_than_all_is_refused(environment):
    environment["mlx"] = "0.3.1"
    with pytest.raises(SystemExit, match=f"mlx 0.3.1 is installed.*mlx {KNOWN[0]} or later"):
        backend.chosen(None)


def test_an_isolated_build_gets_one_release_and_its_nanobind(environment):
    environment["mlx"] = KNOWN[0]
    wanted = backend.get_requires_for_build_wheel(None)
    assert f"nanobind=={guard.releases()[KNOWN[0]]}" in wanted
    assert any(re.fullmatch(rf"mlx(\[cpu\])?=={re.escape(KNOWN[0])}", requirement) for requirement in wanted)
    assert "pip" not in wanted
    several = backend.get_requires_for_build_editable({"mittens.releases": "all"})
    assert ("pip" in several) == (len(KNOWN) > 1), "which downloads the other releases"


def test_what_is_installed_is_not_downloaded(environment, tmp_path):
    assert list(backend._missing([INSTALLED], tmp_path)) == []


def test_a_release_that_is_not_installed_is_downloaded_with_its_nanobind(environment, monkeypatch, tmp_path):
    environment["mlx"] = "9.8.7"
    monkeypatch.setattr(guard, "folder", lambda package, holding: None)
    first, second = ([requirements, place.name] for requirements, place in backend._missing([KNOWN[0]], tmp_path))
    assert first[0][0] == f"mlx=={KNOWN[0]}" and first[0][1].endswith(f"=={KNOWN[0]}") and first[1] == f"mlx-{KNOWN[0]}"
    nanobind = guard.releases()[KNOWN[0]]
    assert second == [[f"nanobind=={nanobind}"], f"nanobind-{nanobind}"]


def plant_pip(folder: pathlib.Path, code: str) -> str:
    """A Python whose pip runs some code, for the environment variable PYTHONPATH."""
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__main__.py").write_text(f"import sys\n{code}\n")
    (folder / "pip" / "__init__.py").write_text("")
    return str(folder)


def test_a_download_is_unpacked_as_a_whole(monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as wheel:
        wheel.writestr("mlx/include/mlx/array.h", "// here\n")
    code = (
        "import pathlib, shutil\nto = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\nto.mkdir()\n"
        f"shutil.copy({str(tmp_path / 'made.whl')!r}, to)"
    )
    monkeypatch.setenv("PYTHONPATH", plant_pip(tmp_path / "planted", code))
    backend._download(["mlx==1.2.3"], tmp_path / "releases" / "mlx-1.2.3")
    assert (tmp_path / "releases" / "mlx-1.2.3" / "mlx" / "include" / "mlx" / "array.h").read_text() == "// here\n"
    assert [path.name for path in (tmp_path / "releases").iterdir()] == ["mlx-1.2.3"]


def test_a_download_that_fails_says_what(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", plant_pip(tmp_path / "planted", "sys.exit('no route to the index')"))
    with pytest.raises(SystemExit, match="pip cannot download mlx==1.2.3 and mlx-cpu==1.2.3:\nno route to the index"):
        backend._download(["mlx==1.2.3", "mlx-cpu==1.2.3"], tmp_path / "releases" / "mlx-1.2.3")
    assert list((tmp_path / "releases").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"\x00v19_system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1\x00", b"\x00nanobind_system_libstdcpp_a1_v19\x00"],
    ids=["until v21", "from v22"],
)
def test_the_tag_of_an_mlx_is_found_in_either_form(tmp_path, content):
    (tmp_path / "core.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF" + content + b"\x00")
    assert guard.nanobind_tag_of_mlx(tmp_path) == 19


def test_a_release_that_is_neither_installed_nor_unpacked_is_an_error(tmp_path):
    command = [sys.executable, ROOT / "cmake" / "guard.py", "--releases", "9.8.7", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "mlx 9.8.7 is neither installed" in done.stderr and str(tmp_path) in done.stderr


# The import.


def extension(folder: pathlib.Path, release: str, suffix: str = SUFFIX) -> pathlib.Path:
    path = folder / f"_mlx_{release.replace('.', '_')}" / f"_ext{suffix}"
    path.parent.mkdir()
    path.write_bytes(b"")
    return path


def test_the_extension_of_the_installed_release_is_chosen(tmp_path):
    wanted = extension(tmp_path, INSTALLED)
    extension(tmp_path, "0.9.10"), extension(tmp_path, "0.10.1")
    extension(tmp_path, "7.7.7", ".cpython-27-x86_64-linux-gnu.so")
    found = mm._guard.built([str(tmp_path / "empty"), str(tmp_path)])
    assert list(found) == ["0.9.10", "0.10.1", INSTALLED], "by number, and none for another Python"
    assert mm._guard.chosen(found) == wanted


def test_a_wheel_without_the_installed_release_says_what_to_do(tmp_path):
    for release in ("0.31.2", "0.99.1"):
        extension(tmp_path, release)
    with pytest.raises(ImportError) as error:
        mm._guard.chosen(mm._guard.built([str(tmp_path)]))
    said = str(error.value)
    assert f"built for mlx 0.31.2 and 0.99.1, installed is mlx {INSTALLED}" in said
    assert 'pip install "mlx==0.99.1"' in said and said.endswith("pip install --no-deps .")


def left_over(folder: pathlib.Path, *versions: str, metadata: bool = True) -> None:
    for version in versions:
        (folder / f"mlx-{version}.dist-info").mkdir()
        if metadata:
            text = f"Metadata-Version: 2.1\nName: mlx\nVersion: {version}\n"
            (folder / f"mlx-{version}.dist-info" / "METADATA").write_text(text)


@pytest.mark.parametrize("versions, metadata", [(("0.31.2", "0.32.4"), True), (("0.32.4",), False)], ids=str)
def test_what_is_left_of_an_mlx_is_named_before_mlx_is_imported(tmp_path, versions, metadata):
    """Two in one folder, or one whose files are gone: pip was ended."""
    left_over(tmp_path, *versions, metadata=metadata)
    code = "import sys\ntry:\n  import mlx_mittens\nexcept ImportError as e: print(e, 'mlx.core' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True)
    assert done.stdout.startswith(f"{tmp_path} has {' and '.join(f'mlx-{version}.dist-info' for version in versions)}")
    assert f"remove {'them' if len(versions) > 1 else 'it'}, then pip install --force-reinstall" in done.stdout
    assert done.stdout.endswith(" False\n")


def test_the_extension_has_one_name_whichever_release_it_is_for():
    assert mm._ext.__name__ == "mlx_mittens._ext" == mm._ext.FunctionWrapper.__module__
    assert sys.modules["mlx_mittens._ext"] is mm._ext
    assert pathlib.Path(mm._ext.__file__).parent.name == f"_mlx_{INSTALLED.replace('.', '_')}"
    assert mm._ext.mlx_version == INSTALLED


# Imports the guard alone, from the folder that the first argument names.
GUARD = (
    "import json, pathlib, sys, types\n"
    "package = types.ModuleType('mlx_mittens'); package.__path__ = [sys.argv[1]]\n"
    "sys.modules['mlx_mittens'] = package\n"
    "import mlx_mittens._guard as guard\n"
)


def test_choosing_reads_the_names_of_folders_alone(tmp_path):
    """importlib.metadata, which parses metadata, takes several times as long to import as the choice takes."""
    extension(tmp_path, INSTALLED)
    code = GUARD + (
        "found = guard.chosen(guard.built([sys.argv[2]])); guard.check_libmlx()\n"
        "print(json.dumps([found.parent.name, 'importlib.metadata' in sys.modules]))"
    )
    command = [sys.executable, "-S", "-c", code, str(ROOT / "mlx_mittens"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [f"_mlx_{INSTALLED.replace('.', '_')}", False]


def test_an_mlx_that_is_no_folder_of_the_search_path_is_found(monkeypatch):
    monkeypatch.setattr(mm._guard, "_metadata", dict)
    assert mm._guard._versions()["mlx"] == INSTALLED


def test_an_extension_that_does_not_load_leaves_nothing_behind(tmp_path):
    code = GUARD + (
        "try: guard.load(pathlib.Path(sys.argv[2]))\n"
        "except ImportError: print(json.dumps('mlx_mittens._ext' in sys.modules))\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "mlx_mittens"), str(extension(tmp_path, "1.2.3"))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is False


def test_the_check_of_an_arm64_wheel_covers_each_extension(tmp_path):
    tool = runpy.run_path(str(ROOT / "tools" / "arm64_wheel.py"))
    folder = f"mlx_mittens/_mlx_{INSTALLED.replace('.', '_')}"
    for processor, missing in (("aarch64", []), ("x86_64", [INSTALLED])):
        with zipfile.ZipFile(tmp_path / "made.whl", "w") as wheel:
            wheel.writestr(f"{folder}/_ext.cpython-311-{processor}-linux-gnu.so", b"")
        assert tool["releases_missing"](tmp_path / "made.whl", "") == missing
    assert tool["releases_missing"](tmp_path / "made.whl", f"0.1.2,{INSTALLED}") == ["0.1.2", INSTALLED]
