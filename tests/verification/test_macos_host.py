"""The macOS extension compiles and links on Linux against the released MLX for macOS, with every symbol found.

The wheel made of it is one that a Mac can install.
"""

import pathlib
import zipfile

import lief
import macos_extension
import macos_wheel
import pytest

NEWEST = macos_extension.newest()
OLDER = list(macos_extension.guard.releases())[:-1]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> pathlib.Path:
    return macos_extension.download(tmp_path_factory.mktemp("downloads"), NEWEST)


@pytest.fixture(scope="session")
def libmlx(site) -> pathlib.Path:
    return site / "mlx" / "lib" / "libmlx.dylib"


@pytest.fixture(scope="session")
def core(site, tmp_path_factory) -> pathlib.Path:
    """The library that the extensions share. It is examined and never run, so it is not optimized."""
    return macos_extension.build_core(site, tmp_path_factory.mktemp("core"), "-O0")


@pytest.fixture(scope="session")
def extension(site, core, tmp_path_factory) -> pathlib.Path:
    """The extension for the newest release of mlx."""
    return macos_extension.build(site, core, tmp_path_factory.mktemp("objects"), "-O0")


def test_the_extension_takes_its_symbols_from_the_released_libraries(extension):
    taken = macos_extension.imports(extension)
    assert set(taken) >= {"/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib", "@rpath/libmlx.dylib"}
    assert any("7mittens3cpu" in name for name in taken["@rpath/libmlx_mittens_core.dylib"]), "it calls the core"
    assert len(taken["@rpath/libmlx.dylib"]) > 20, "the extension calls MLX"
    assert any("get_command_encoder" in name and "5metal" in name for name in taken["@rpath/libmlx.dylib"]), (
        "it reaches Metal's encoder"
    )


def test_a_symbol_that_libmlx_lacks_is_found(extension, libmlx, tmp_path):
    """As if the extension had been linked with another libmlx: this one exports nothing that the extension needs."""
    other = tmp_path / "libmlx.dylib"
    other.write_bytes((libmlx.parent / "libjaccl.dylib").read_bytes())
    found = list(macos_wheel.symbol_problems(lief.parse(str(extension)), other))
    assert any("get_command_encoder" in problem for problem in found)


@pytest.fixture(scope="session")
def wheel(core, extension, tmp_path_factory) -> pathlib.Path:
    return macos_wheel.pack(core, {NEWEST: extension}, tmp_path_factory.mktemp("wheel"))


def test_a_mac_can_use_the_wheel(wheel, libmlx):
    """Its tag, its files, and of the extension: processor, macOS, rpath, libraries, symbols."""
    assert macos_wheel.releases(wheel) == [NEWEST]
    assert macos_wheel.problems(wheel, {NEWEST: libmlx}) == []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        points = archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    assert "Requires-Dist: mlx" in metadata and "mlx-mittens = mlx_mittens_cli:main" in points
    assert "mlx_mittens/apple/chips.csv" in names, "files that are no Python code, too"
    assert not [name for name in names if name.endswith(".metallib")]


# A fault of a wheel, and its message.
FAULTS = {
    "a missing file": (lambda files: files.pop("mlx_mittens/metal/norm/softmax.metal"), "softmax.metal is missing"),
    "a missing plugin": (lambda files: files.pop("mlx_mittens_pytest.py"), "mlx_mittens_pytest.py is missing"),
    "a file of Linux": (
        lambda files: files.update({"mlx_mittens/_ext.cpython-312-x86_64-linux-gnu.so": b"\x7fELF"}),
        "is of no use on a Mac",
    ),
    "an extension of Linux": (
        lambda files: files.update({macos_wheel.extension_name(NEWEST): b"\x7fELF" + bytes(64)}),
        f"the extension for mlx {NEWEST} is no Mach-O file of arm64 alone",
    ),
    "no core": (lambda files: files.pop("mlx_mittens/libmlx_mittens_core.dylib"), "core.dylib is missing"),
    "a core of Linux": (
        lambda files: files.update({"mlx_mittens/libmlx_mittens_core.dylib": b"\x7fELF" + bytes(64)}),
        "the core is no Mach-O file of arm64 alone",
    ),
    "another core than the extension was linked with": (
        lambda files: files.update(
            {"mlx_mittens/libmlx_mittens_core.dylib": files[macos_wheel.extension_name(NEWEST)]}
        ),
        "which libmlx_mittens_core.dylib does not export",
    ),
    "no extension": (lambda files: files.pop(macos_wheel.extension_name(NEWEST)), "expected extensions for mlx"),
    "another file than RECORD says": (
        lambda files: files.update({"mlx_mittens_cli.py": b""}),
        "RECORD has another hash of mlx_mittens_cli.py",
    ),
}


@pytest.mark.parametrize(("plant", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_wheel_is_found(wheel, libmlx, tmp_path, plant, said):
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    plant(files)
    faulty = tmp_path / wheel.name
    with zipfile.ZipFile(faulty, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    assert any(said in problem for problem in macos_wheel.problems(faulty, {NEWEST: libmlx}))


def test_another_tag_than_the_name_is_found(wheel, libmlx, tmp_path):
    other = tmp_path / wheel.name.replace("macosx_14_0", "macosx_11_0")
    other.write_bytes(wheel.read_bytes())
    assert any("expected macOS 14.0" in problem for problem in macos_wheel.problems(other, {NEWEST: libmlx}))


@pytest.mark.nightly
@pytest.mark.parametrize("release", OLDER)
def test_a_mac_can_use_a_wheel_with_an_older_release_too(core, extension, libmlx, tmp_path, release):
    """Its extension compiles against that release's headers for macOS, and finds every symbol in its library."""
    older = macos_extension.download(tmp_path, release)
    built = macos_extension.build(older, core, tmp_path / "objects", "-O0")
    wheel = macos_wheel.pack(core, {release: built, NEWEST: extension}, tmp_path)
    libraries = {release: older / "mlx" / "lib" / "libmlx.dylib", NEWEST: libmlx}
    assert macos_wheel.releases(wheel) == [release, NEWEST]
    assert macos_wheel.problems(wheel, libraries) == []
