"""The doctor command."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_mittens import cases, doctor
from mlx_mittens.__main__ import main


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(cases, "OPS", tuple(replace(op, tests=op.tests[:3], cases=op.cases[:1]) for op in cases.OPS))


def test_all_is_well(few_cases, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for word in ("mlx ", "mlx_mittens", "executors", "native", "simulator", "rms_norm", "All is well."):
        assert word in text
    result = json.loads(file.read_text())
    assert result["passed"] and all(case["passed"] for case in result["cases"])
    assert {case["op"] for case in result["cases"]} == {op.name for op in cases.OPS}
    assert {case["dtype"] for case in result["cases"]} == set(cases.DTYPES)
    assert result["executors"].keys() >= {"native", "simulator"}


def test_some_ops(few_cases, tmp_path):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--ops", "softmax,rms_norm", "--json", str(file)]) == 0
    assert {case["op"] for case in json.loads(file.read_text())["cases"]} == {"softmax", "rms_norm"}


def test_says_what_failed(few_cases, monkeypatch, tmp_path, capsys):
    wrong = replace(cases.OPS[0], ours=lambda x, weight, eps: x * 3)
    monkeypatch.setattr(cases, "OPS", (wrong, *cases.OPS[1:]))
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "worst at" in text and "All is well." not in text
    assert not json.loads(file.read_text())["passed"]


def test_an_exception_is_a_finding(rng):
    def broken(x, weight, eps):
        raise RuntimeError("rms_norm.metal:7: no such type")

    op = cases.get("rms_norm")
    finding = doctor.examine(replace(op, ours=broken), op.tests[0], "float32", rng)
    assert not finding.passed and finding.detail == "RuntimeError: rms_norm.metal:7: no such type"


def test_bad_arguments(capsys):
    assert main(["doctor", "--json", "no/such/folder/x.json"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["doctor", "--ops", "hardmax"]) == 2
    assert "hardmax" in capsys.readouterr().err
    if not mx.is_available(mx.gpu):
        assert main(["doctor", "--device", "gpu"]) == 2
