"""mlx-lm's server with the patch on, answering eight requests at once."""

import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

PROMPTS = [
    "The if statement is used for",
    "A list display yields a new list object, the contents",
    "The for",
    "A function definition defines a user-defined function object. Its",
    "An expression",
    "The with statement is used to wrap the execution of a block with methods",
    "Names refer to",
    "The import statement",
]
SERVE = "import sys; from mlx_mittens_cli import main; sys.argv[1:1] = ['run', 'mlx_lm.server']; sys.exit(main())"
PLAIN = "import sys; from mlx_lm.server import main; sys.argv[0] = 'server'; main()"


def free_port() -> int:
    with socket.socket() as a:
        a.bind(("127.0.0.1", 0))
        return a.getsockname()[1]


def complete(port: int, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0.0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def answers(code: str, folder, log, *at_once: int) -> list[list[str]]:
    """What a server of its own answers to all prompts, of which so many are sent at the same time: in turns."""
    port = free_port()
    command = [sys.executable, "-c", code, "--model", str(folder), "--port", str(port)]
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            for _ in range(600):
                assert server.poll() is None, log.read_text()
                with socket.socket() as a:
                    if a.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            texts = []
            for threads in at_once:
                with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                    texts.append(list(pool.map(lambda prompt: complete(port, prompt), PROMPTS)))
            return texts
        except OSError:
            pytest.fail(log.read_text())
        finally:
            server.terminate()
            try:
                assert server.wait(60) == -signal.SIGTERM, log.read_text()  # as without the patch
            finally:
                server.kill()


def test_eight_requests_at_once(trained, tmp_path):
    """The texts of requests one by one, and of mx."""
    together, alone = answers(SERVE, trained / "4bit", tmp_path / "ours.log", 8, 1)
    (theirs,) = answers(PLAIN, trained / "4bit", tmp_path / "theirs.log", 8)
    assert together == alone == theirs and all(together)
