"""tools/native_cases.py, by which native code is examined under an emulator."""

import native_cases
import pytest


@pytest.fixture
def seconds(monkeypatch):
    """Gives the program a number of seconds for each op."""
    return lambda value: monkeypatch.setattr("sys.argv", ["native_cases.py", "--seconds", str(value)])


def test_one_case_of_each_op_is_right(seconds, capsys):
    seconds(0)
    assert native_cases.main() == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == [op.name for op in native_cases.specs.OPS]
    assert all(int(row[2]) == 1 and int(row[3]) == 0 for row in rows)


def test_a_wrong_case_is_named(seconds, capsys, monkeypatch):
    wrong = native_cases.doctor.Finding("gemv", "of one", "float32", False, 1.0, 0.0, "far off")
    monkeypatch.setattr(native_cases.doctor, "examine", lambda *arguments: wrong)
    seconds(0)
    assert native_cases.main() == 1
    assert "gemv of one float32: far off" in capsys.readouterr().out
