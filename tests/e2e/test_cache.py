"""The cache on disk: listed, cleared, and kept below a size."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_mittens.cli.main import main
from mlx_mittens.frontend import cache, cache_limit

KERNELS = ("a-1.ptx", "b-2.so", "c-3.spv", "d-4.agx.gz", "e-5.json")
OTHERS = ("asahi_clc-0123", "asahi_clc-0123.version", "calibration/cpu.json")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache with 1,000 bytes of each kind; a later entry of `KERNELS` was used later."""
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    monkeypatch.delenv(cache_limit.VARIABLE, raising=False)
    monkeypatch.setattr(cache, "_checked", set())
    (tmp_path / "calibration").mkdir()
    for day, name in enumerate((*KERNELS, *OTHERS)):
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (86400 * day, 86400 * day))
    (tmp_path / ".half-written.ptx").write_bytes(bytes(1000))
    return tmp_path


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_is_listed(folder, capsys):
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    assert str(folder) in text and "at most 4 GB" in text and "5 kB" in text
    lines = {" ".join(line.split()[:-3]): line.split()[-4:] for line in text.splitlines()[2:-1]}
    assert len(lines) == len(KERNELS) + 2 and "PTX for NVIDIA GPUs 1" in lines
    assert max(map(len, text.splitlines()[1:])) <= 80


def test_an_empty_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path / "none"))
    assert main(["cache"]) == 0 and "It is empty." in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0 and "0 files deleted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ([], OTHERS),
        (["kernels"], OTHERS),
        (["calibration"], (*KERNELS, *OTHERS[:2])),
        (["agx-compiler"], (*KERNELS, *OTHERS[2:])),
        (["all"], ()),
    ],
    ids=str,
)
def test_it_is_cleared(folder, capsys, arguments, left):
    assert main(["cache", "--clear", *arguments]) == 0
    assert names(folder) == {*left, ".half-written.ptx"}
    assert "files deleted" in capsys.readouterr().out


def test_what_cannot_be_deleted_is_said(folder, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    assert main(["cache", "--clear"]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_the_oldest_go_first(folder):
    assert cache_limit.trim(folder, 5000) == []
    assert [entry.path.name for entry in cache_limit.trim(folder, 4000)] == ["a-1.ptx", "b-2.so"]
    assert names(folder) == {*KERNELS[2:], *OTHERS, ".half-written.ptx"}


def test_what_killed_processes_left_goes(folder):
    """A day later: nobody waits a day for another process. Other files in the folder stay, at any age."""
    new = f"{cache_limit.UNFINISHED}x.so"
    for name in (f"{cache_limit.UNFINISHED}b-2.so.lock", f"{cache_limit.UNFINISHED}8xk2.o", ".bashrc", ".old.ptx", new):
        (folder / name).write_bytes(bytes(10))
        if name != new:
            os.utime(folder / name, (86400, 86400))
    assert cache_limit.trim(folder, 5000) == []
    assert names(folder) == {*KERNELS, *OTHERS, ".half-written.ptx", ".bashrc", ".old.ptx", new}


def test_what_is_written_is_known_by_its_name(folder):
    def make(path):
        written = names(folder) - {*KERNELS, *OTHERS, ".half-written.ptx"}
        assert len(written) == 2 and all(name.startswith(cache_limit.UNFINISHED) for name in written)
        path.write_text("")

    cache.cached("f-6.so", make)
    assert names(folder) == {*KERNELS, *OTHERS, ".half-written.ptx", "f-6.so"}


def test_what_is_used_stays(folder):
    """Also where the disk takes no note of it, as with relatime: a process may be about to load it."""
    cache.cached("a-1.ptx", lambda path: pytest.fail("it is there"))
    assert [entry.path.name for entry in cache_limit.trim(folder, 4000)] == ["b-2.so", "c-3.spv"]
    assert [entry.path.name for entry in cache_limit.trim(folder, 1)] == ["d-4.agx.gz", "e-5.json"]
    assert names(folder) == {"a-1.ptx", *OTHERS, ".half-written.ptx"}


def test_it_is_made_once(folder):
    made = []

    def make(path):
        made.append(path)
        time.sleep(0.3)
        path.write_bytes(b"kernel")

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: cache.cached("new-6.ptx", make), range(4)))
    assert paths == {folder / "new-6.ptx"} and len(made) == 1
    assert names(folder) == {*KERNELS, *OTHERS, ".half-written.ptx", "new-6.ptx"}


def test_what_could_not_be_made_is_made_by_the_next(folder):
    begun, may_fail = threading.Event(), threading.Event()

    def fail(path):
        begun.set()
        may_fail.wait()
        raise ValueError("no")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.cached, "new-6.ptx", fail)
        begun.wait()
        second = pool.submit(cache.cached, "new-6.ptx", lambda path: path.write_bytes(b"kernel"))
        may_fail.set()
        assert second.result().read_bytes() == b"kernel"
        with pytest.raises(ValueError, match="no"):
            first.result()


def test_a_new_kernel_keeps_the_cache_below_its_limit(folder, monkeypatch):
    monkeypatch.setenv(cache_limit.VARIABLE, "0.000004")
    cache.cached("new-6.ptx", lambda path: path.write_bytes(bytes(1000)))
    left = names(folder) & {*KERNELS, "new-6.ptx"}
    assert left == {"d-4.agx.gz", "e-5.json", "new-6.ptx"}, "what was made just now stays"
    (folder / "large.ptx").write_bytes(bytes(10000))
    cache.cached("next-7.ptx", lambda path: path.write_bytes(bytes(1000)))
    assert (folder / "large.ptx").exists(), "a process looks once"


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_a_limit_that_is_no_size(folder, monkeypatch, capsys, text):
    monkeypatch.setenv(cache_limit.VARIABLE, text)
    assert main(["cache"]) == 2 and "expected a number of GB above 0" in capsys.readouterr().err
    with pytest.warns(RuntimeWarning, match="expected a number of GB"):
        cache.cached("new-6.ptx", lambda path: path.write_bytes(b""))
    assert set(KERNELS) < names(folder)
