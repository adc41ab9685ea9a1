"""The run under sanitizers does not pass if it checks nothing."""

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
    assert len(sanitize.tests([*sanitize.WHOLE, *sanitize.SIMULATOR])) == 7
    assert {"test_rms_norm.py", "test_attention.py"} <= {path.name for path in sanitize.NATIVE}
