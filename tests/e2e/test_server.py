"""mlx-lm's server with the patch on, answering eight and 32 requests at once."""

import mlx.core as mx
import pytest
from helpers import tiny

from mlx_mittens.bench.serving import PROMPTS, Server, ServerError


def test_eight_requests_at_once(trained, tmp_path):
    """The texts of requests one by one, and of mx."""
    with Server(trained / "4bit", True, tmp_path / "ours.log") as server:
        together, alone = (server.answers(PROMPTS, 24, at_once) for at_once in (8, 1))
    with Server(trained / "4bit", False, tmp_path / "theirs.log") as server:
        theirs = server.answers(PROMPTS, 24, 8)
    assert together.texts == alone.texts == theirs.texts and all(together.texts)
    assert together.tokens == alone.tokens and 8 <= together.tokens <= 8 * 24
    assert together.tokens_per_s > 0


def test_requests_with_quantized_caches(trained, tmp_path):
    """At once in a batch, and one by one."""
    options = ["--kv-bits", "8", "--quantized-kv-start", "0"]
    with Server(trained / "4bit", True, tmp_path / "ours.log", options=options) as server:
        together, alone = (server.answers(PROMPTS, 24, at_once) for at_once in (8, 1))
    with Server(trained / "4bit", False, tmp_path / "theirs.log", options=options) as server:
        theirs = server.answers(PROMPTS, 24, 8)
    assert together.texts == alone.texts == theirs.texts and all(together.texts)


@pytest.mark.parametrize("options", [(), ("--kv-bits", "8", "--quantized-kv-start", "0")], ids=["half", "8 bits"])
def test_thirty_two_requests_at_once(tmp_path, options):
    """None is reset, no thread of the server fails, and each text is the request's alone."""
    folder = tiny.save(tmp_path / "model", "llama-3.2-1b", mx.float32, 4, make=tiny.build_varied)
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(32)]
    with Server(folder, True, tmp_path / "log", exact=True, options=options) as server:
        together, alone = (server.answers(prompts, 8, at_once) for at_once in (32, 1))
    assert together.texts == alone.texts and len(set(together.texts)) > 8
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_model_that_is_not_there(tmp_path):
    with Server(tmp_path / "nowhere", False, tmp_path / "log") as server, pytest.raises(ServerError, match="404"):
        server.answers(PROMPTS[:1], 1, 1)
