"""`mlx-mittens validate`: tokens and logits beside mx's, judged by float32, and kernels that are wrong."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.bench import model_folders, validation
from mlx_mittens.cli.main import main
from mlx_mittens.cli.validate import report
from mlx_mittens.patching import patches

pytestmark = pytest.mark.usefixtures("lenient")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    mx.random.seed(7)
    return tiny.save(tmp_path_factory.mktemp("models") / "4bit", "llama-3.2-1b", mx.float32, 4)


def model(bits=4):
    mx.random.seed(3)
    return tiny.build("llama-3.2-1b", mx.float32, bits)


def attention_of_ours(monkeypatch, change):
    """Puts an attention layer in the place of ours, which changes the results of ours as soon as there are 12 keys."""

    def attempt(layer, x, mask=None, cache=None):
        late = cache is not None and cache.offset >= 12
        result = _ext.try_attention_layer(layer, x, mask, cache)
        return change(result) if late and result is not None else result

    broken = lambda target: replace(target, attempt=attempt) if "llama.Attention" in target.name else target
    monkeypatch.setattr(patches, "TARGETS", list(map(broken, patches.TARGETS)))


def run(*arguments):
    return main(["validate", *map(str, arguments)])


@pytest.mark.parametrize("option, fused", [((), "attention_layer"), (("--convert",), "rope_append")])
def test_a_model_whose_tokens_are_the_same(folder, tmp_path, capsys, option, fused):
    file = tmp_path / "found.json"
    assert run(folder, "--tokens", 40, "--prompt", "one two", "--json", file, *option) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{folder}: llama, 4-bit, float32; native"
    assert out[1].startswith("7 tokens of the prompt, 40 generated; ") and out[1].endswith(" 0 calls went to mx")
    assert out[2] == "tokens: the same 40" and out[-1] == "verdict: as good as mx" and len(out) == 5
    found = json.loads(file.read_text())
    assert found["passed"] is True and found["same"] == found["tokens"] == 40 and found["differences"] == []
    assert found["compared"] == ("convert" if option else "patch") and found["versions"]["mlx_lm"]
    assert 0 < found["difference"] < 1e-4 and 0 < found["error"] < 1e-4
    assert sum(found["stats"]["rope_append"]["kernels"].values()) > 40


def test_activations_of_8_bits_are_measured(folder, tmp_path, capsys):
    file = tmp_path / "found.json"
    arguments = (folder, "--tokens", 8, "--prompt", "one two", "--json", file)
    run(*arguments)
    before = json.loads(file.read_text())
    run(*arguments, "--activations", "int8")
    found = json.loads(file.read_text())
    capsys.readouterr()
    assert (before["activations"], found["activations"]) == (None, "int8")
    if _ext.cpu_instructions in ("avx2", "avxvnni", "avx512", "avx512vnni", "avx512amx", "dotprod", "i8mm"):
        assert found["typical_error"] > 10 * before["typical_error"]


def test_activations_of_8_bits_on_an_m5_are_measured():
    """Of a prompt; its tokens one by one are not rounded."""
    prompt = [int(token) for token in np.arange(40) % 31]
    with mm.simulator.enabled(gpu="m5"):
        before = validation.validate(model(), prompt, 2)
        found = validation.validate(model(), prompt, 2, activations="int8")
    assert any("qmm_int8" in name for name in found.stats["quantized_matmul"]["kernels"])
    assert not [name for name in before.stats["quantized_matmul"]["kernels"] if "int8" in name]
    assert found.typical_error > 10 * before.typical_error and found.typical_error < 0.1


def test_wrong_kernels_are_found(folder, monkeypatch, tmp_path, capsys):
    attention_of_ours(monkeypatch, lambda y: -30 * y)
    loaded = model_folders.load(str(folder))
    prompt = loaded.tokenizer.encode("one two")
    theirs = tiny.tokens(loaded.model, prompt, 30)
    with mm.patched():
        ours = tiny.tokens(loaded.model, prompt, 30)
    first = next(i for i in range(30) if ours[i] != theirs[i])
    assert 12 - 7 < first < 29  # nothing is wrong before

    file = tmp_path / "found.json"
    assert run(folder, "--tokens", 30, "--prompt", "one two", "--json", file) == 1
    out = capsys.readouterr().out.splitlines()
    words = [f"{token} {loaded.tokenizer.decode([token])!r}" for token in (ours[first], theirs[first])]
    assert out[2] == f"tokens: the first {first} are the same; then {words[0]} patched, {words[1]} by mx"
    assert out[3].startswith("float32 takes mx's token, which is ") and "rounding" not in out[3]
    assert out[-1].startswith("verdict: worse than mx: float32 has the patched token ")
    found = json.loads(file.read_text())
    assert found["passed"] is False and found["same"] == first and found["difference"] > 1
    one = found["differences"][0]
    assert (one["position"], one["ours"], one["mx"], one["float32"]) == (first, ours[first], theirs[first], one["mx"])
    assert one["ahead"] < 0 and one["passed"] is False


def test_logits_that_are_wrong_are_found_where_tokens_are_the_same(folder, monkeypatch, capsys):
    attention_of_ours(monkeypatch, lambda y: 1.03 * y)
    assert run(folder, "--tokens", 20, "--prompt", "one two") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[2] == "tokens: the same 20"
    assert out[-1].startswith("verdict: worse than mx: the patched logits are typically ")


def test_numbers_that_are_none_are_found(folder, monkeypatch, tmp_path, capsys):
    attention_of_ours(monkeypatch, lambda y: y * mx.nan)
    file = tmp_path / "found.json"
    assert run(folder, "--tokens", 20, "--prompt", "one two", "--json", file) == 1
    assert "verdict: worse than mx" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["difference"] is None and found["passed"] is False


def test_an_error_of_ours_is_a_verdict(folder, monkeypatch, tmp_path, capsys):
    def fail(_):
        raise ValueError("no such kernel")

    attention_of_ours(monkeypatch, fail)
    file = tmp_path / "found.json"
    assert run(folder, "--tokens", 20, "--prompt", "one two", "--json", file) == 1
    said = "worse than mx: the patched model failed: ValueError: no such kernel"
    assert f"verdict: {said}" in capsys.readouterr().out
    assert json.loads(file.read_text())["failure"] == "ValueError: no such kernel"


def test_a_model_that_mx_cannot_run_is_said(folder, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("only float32")

    monkeypatch.setattr("mlx_lm.models.llama.Model.__call__", fail)
    assert run(folder, "--tokens", 4) == 2
    assert "mx cannot run" in (said := capsys.readouterr().err) and "RuntimeError: only float32" in said


def test_mx_generates_no_longer_than_asked(folder, tmp_path):
    file = tmp_path / "found.json"
    assert run(folder, "--tokens", 40, "--seconds", "1e-9", "--json", file) == 0
    assert json.loads(file.read_text())["tokens"] == 1


def test_logits_are_those_along_mx_tokens(monkeypatch):
    attention_of_ours(monkeypatch, lambda y: -30 * y)
    whole, prompt = model(), [5, 6, 7, 8, 9]
    theirs = validation._generate(whole, prompt, 20)
    with mm.patched():
        along = validation._generate(whole, prompt, 20, along=theirs.tokens)
    exact = np.array(whole(mx.array([[*prompt, *theirs.tokens[:-1]]]))[0, len(prompt) - 1 :])
    assert [len(run.logits) for run in (theirs, along)] == [20, 20] and theirs.tokens == exact.argmax(1).tolist()
    np.testing.assert_allclose(np.array(mx.stack(theirs.logits)), exact, atol=LAYERS)
    right = 12 - len(prompt)  # steps before ours is wrong, which then sees mx's tokens and not its own
    np.testing.assert_allclose(np.array(mx.stack(along.logits[:right])), exact[:right], atol=LAYERS)
    assert np.abs(np.array(along.logits[right + 1]) - exact[right + 1]).max() > 1
    judge = list(validation._float32_logits(whole, [*prompt, *theirs.tokens[:-1]], len(prompt) - 1))
    np.testing.assert_allclose(np.stack(judge), exact, atol=LAYERS)


def test_float32_judges_a_16_bit_model_in_steps(monkeypatch):
    mx.random.seed(3)
    whole = tiny.build("gemma-3-1b", mx.bfloat16, 4)
    tokens = list(range(1, 100))
    halves = np.array(whole(mx.array([tokens]))[0, 20:].astype(mx.float32))
    steps = np.stack(list(validation._float32_logits(whole, tokens, 20)))
    monkeypatch.setattr(validation, "_STEP", 1000)
    np.testing.assert_allclose(steps, np.stack(list(validation._float32_logits(whole, tokens, 20))), atol=LAYERS)
    assert steps.shape == halves.shape and np.abs(steps - halves).max() > 1e-2


def test_a_long_run_says_how_long_the_rest_takes(monkeypatch):
    clock = iter([0.0, 4.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr(validation.time, "perf_counter", lambda: next(clock))
    said = []
    progress = validation._Progress(100, said.append, seconds=60)
    for done in (1, 3, 4, 50):
        progress.step(done)
    assert said == ["  3 of 100, 48 s left", "  50 of 100, 30 s left"]


def test_functions_that_mx_compiles_run_on_ours_after_mx():
    step = mx.compile(lambda x: mx.softmax(x, axis=-1))

    class Squeezed(type(model())):
        def __call__(self, *arguments, **options):
            return step(super().__call__(*arguments, **options))

    squeezed = model()
    squeezed.__class__ = Squeezed
    found = validation.validate(squeezed, [1, 2, 3], 5)
    assert sum(found.stats["softmax"]["kernels"].values()) >= 5 and found.passed
    with mm.strict(False):
        mm.stats(reset=True)
        validation._generate(squeezed, [1, 2, 3], 5)
    assert not mm.stats()


# Logits of some tokens by ours, by mx and by float32, of a bfloat16 model: the judge's verdict on ours.
JUDGED = {
    "float32 is with ours": ([1.0, 0.5], [1.0, 1.1], [1.0, 0.9], (True, 0)),
    "float32 is with mx, within mx's error": ([1.2, 1.1], [0.7, 1.1], [1.0, 1.1], (True, 1)),
    "float32 is with mx, beyond mx's error": ([1.2, 1.1], [0.99, 1.11], [1.0, 1.1], (False, 1)),
    "mx's logits overflow": ([1.2, 1.1, 0.0], [0.99, 1.11, -np.inf], [1.0, 1.1, 0.0], (False, 1)),
    "float32 is with mx, by less than a unit": ([1.0, 0.9], [0.9, 0.906], [0.9, 0.906], (True, 1)),
}


@pytest.mark.parametrize("ours, theirs, exact, expected", JUDGED.values(), ids=JUDGED)
def test_which_token_float32_takes(monkeypatch, ours, theirs, exact, expected):
    runs = [
        validation._Run([int(np.argmax(row))], [mx.array(row, mx.float32).astype(mx.bfloat16)])
        for row in (theirs, ours)
    ]
    monkeypatch.setattr(validation, "_float32_logits", lambda *_: iter([np.array(exact, np.float32)]))
    found = validation._compare(None, [1], runs[0], runs[1].tokens, runs[1], mm.stats())
    assert found.first.passed is expected[0] and found.first.float32 == expected[1]
    assert (found.worst is None) is expected[0]


def example(*differences, **changes):
    """A validation with these differences, the last three of (ours, mx, float32, ahead, within rounding)."""
    found = [validation.Difference(position, *rest) for position, *rest in differences]
    whole = {"prompt_tokens": 5, "tokens": 9, "same": found[0].position if found else 9, "repeatable": True}
    whole |= {"difference": 0.5, "error": 0.2, "mx_error": 0.4}
    whole |= {"typical_error": 0.1, "typical_mx_error": 0.1, "allowed_error": 0.2}
    return validation.Validation(differences=found, stats=mm.stats(reset=True), **{**whole, **changes})


REPORTS = {
    "ours": (example((3, 65, 66, 65, 0.25, False)), "float32 takes the patched token, which is 0.25 ahead", "as good"),
    "mx's": (
        example((3, 65, 66, 66, -0.01, True)),
        "float32 takes mx's token, which is 0.01 ahead, which is within rounding",
        "as good",
    ),
    "neither": (
        example((3, 65, 66, 67, 0.25, False)),
        "float32 takes neither, but 67 'C'; of the two the patched one is 0.25 ahead",
        "as good",
    ),
    "one later": (
        example((3, 65, 66, 65, 0.2, False), (5, 65, 66, 66, -0.1, True), (7, 65, 66, 66, -3.0, False)),
        "along mx's tokens 2 more differ: float32 is 1 for mx's within rounding, 1 for mx's clearly",
        "worse than mx: float32 has the patched token 8 3 below mx's",
    ),
    "the first": (
        example((0, 65, 66, 65, 0.2, False)),
        "tokens: the first one differs; then 65 'A' patched",
        "as good",
    ),
    "not repeated": (
        example((3, 65, 66, 65, 0.2, False), repeatable=False),
        "does not repeat its own tokens",
        "as good",
    ),
    "logits": (
        example(typical_error=0.3),
        "typically 0.3 patched, 0.1 by mx",
        "worse than mx: the patched logits are typically 0.3",
    ),
    "no kernel": (example(), "0 kernels ran", "as good as mx; none of the kernels ran"),
}


@pytest.mark.parametrize("found, line, verdict", REPORTS.values(), ids=REPORTS)
def test_what_is_printed(found, line, verdict):
    class Letters:
        def decode(self, tokens):
            return "".join(map(chr, tokens))

    loaded = model_folders.LoadedModel("m", nn.Module(), Letters(), "llama", "4-bit", "bfloat16")
    lines = report(found, loaded, "patched")
    assert any(line in text for text in lines), lines
    assert lines[-1].startswith(f"verdict: {verdict}") and found.passed is verdict.startswith("as good")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "0"], "--tokens takes 1 or more"),
        (["--seconds", "0"], "--seconds more than 0"),
        (["--prompt", ""], "--prompt: the tokenizer of "),
        (["--json", "no/such/file"], "--json: the folder "),
        (["--activations", "int8", "--convert"], "--activations is of the patch: leave out --convert"),
    ],
)
def test_bad_arguments(folder, capsys, arguments, message):
    assert run(folder, *arguments) == 2
    assert message in capsys.readouterr().err
