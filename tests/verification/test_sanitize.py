"""The run under sanitizers does not pass if it checks nothing."""

import re
import subprocess

import pytest
from verification import sanitize

REFUSAL = "[mlx_mittens] MLX_MITTENS_CPU is '%s', this machine runs 'avx2', 'baseline'"


@pytest.fixture
def python(tmp_path):
    """Makes a stand-in for Python, a shell script."""

    def python(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return python


@pytest.mark.parametrize("name", ["", "avx2"])
def test_an_import_that_fails_is_no_missing_instruction_set(python, name, capfd):
    failing = python(f'[ "$MLX_MITTENS_CPU" = "{name}" ] && echo "heap-buffer-overflow" >&2 && exit 1; exit 0')
    with pytest.raises(subprocess.CalledProcessError):
        list(sanitize.instruction_sets(failing, {}))
    assert "heap-buffer-overflow" in capfd.readouterr().err


def test_what_the_extension_refuses_is_left_out(python):
    refusing = 'case "$MLX_MITTENS_CPU" in ""|avx2|baseline) exit 0; esac; '
    refusing += f'printf "{REFUSAL}" "$MLX_MITTENS_CPU" >&2; exit 1'
    assert list(sanitize.instruction_sets(python(refusing), {})) == ["avx2", "baseline"]


def test_a_run_without_an_instruction_set_fails(monkeypatch, python):
    monkeypatch.setattr("sys.argv", ["sanitize.py", "address"])
    monkeypatch.setattr(sanitize, "build", lambda name: python("exit 0"))
    monkeypatch.setattr(sanitize, "environment", lambda name: {})
    monkeypatch.setattr(sanitize, "instruction_sets", lambda *_: iter(()))
    with pytest.raises(SystemExit, match="none of the instruction sets"):
        sanitize.main()


def test_the_named_tests_are_there():
    assert len(sanitize.tests([*sanitize.WHOLE, *sanitize.ONCE])) == len({*sanitize.WHOLE, *sanitize.ONCE})
    assert {"test_rms_norm.py", "test_attention.py", "test_ops.py"} <= {path.name for path in sanitize.NATIVE}


@pytest.mark.parametrize("part", ["WHOLE", "ONCE", "NATIVE"])
def test_every_part_is_run(part):
    """By the commands of the run, with all files of the part."""
    files = sanitize.NATIVE if part == "NATIVE" else sanitize.tests(getattr(sanitize, part))
    runs = [command for _, command in sanitize.commands("address", 10, 2) if {*map(str, files)} <= set(command)]
    assert len(runs) == 1 and ("-k" in runs[0]) == (part == "NATIVE")


@pytest.mark.parametrize("path", sorted(sanitize.UNIT.rglob("test_*.py")), ids=lambda path: path.name)
def test_every_unit_test_is_in_one_part(path):
    """Where a test has the executor for a parameter, it is run natively; others are named elsewhere."""
    name = sanitize.name_of(path)
    parts = [part for part in ("WHOLE", "ONCE", "LEFT_OUT") if name in getattr(sanitize, part)]
    parts += ["NATIVE"] * (path in sanitize.NATIVE)
    names_executors = bool(re.search(r"\b(executor|EXECUTORS)\b", path.read_text()))
    assert len(parts) == 1
    assert names_executors if parts == ["NATIVE"] else not names_executors or parts == ["WHOLE"]
