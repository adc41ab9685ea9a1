"""mlx-lm's server with the patch on, answering eight requests at once."""

import pytest

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


def test_a_model_that_is_not_there(tmp_path):
    with Server(tmp_path / "nowhere", False, tmp_path / "log") as server, pytest.raises(ServerError, match="404"):
        server.answers(PROMPTS[:1], 1, 1)
