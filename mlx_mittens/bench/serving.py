"""mlx-lm's server in a process of its own, with the patch or without, and requests to it."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Beginnings of text on Python, as examples/train_tiny.py trains on, of several lengths.
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

_PATCHED = "import sys; from mlx_mittens_cli import main; sys.exit(main())"
_PLAIN = "import sys; from mlx_lm.server import main; sys.argv[0] = 'server'; main()"
_START_SECONDS = 120.0


class ServerError(RuntimeError):
    """The server ended, or did not start; the message is its log."""


@dataclass(frozen=True)
class Answers:
    """Answers of a server to prompts.

    Attributes:
        texts: One for each prompt.
        tokens: How many tokens all of them have.
        seconds: From the first request to the last answer.
    """

    texts: list[str]
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Server:
    """A server of a model folder, for as long as the block lasts.

    Args:
        folder: A model in mlx-lm's format.
        patched: Whether it runs as ``mlx-mittens run mlx_lm.server``.
        log: A file for its output.
        exact: Whether it runs with ``--exact``, where it is patched.
        options: More words of the server's command line.
    """

    def __init__(self, folder: Path, patched: bool, log: Path, exact: bool = False, options: Sequence[str] = ()):
        self._log = log
        words = ["run", *(["--exact"] if exact else []), "mlx_lm.server"] if patched else []
        self._command = [sys.executable, "-c", _PATCHED if patched else _PLAIN, *words, "--model", str(folder)]
        self._command += options

    def __enter__(self) -> Server:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self._port = unused.getsockname()[1]
        with open(self._log, "w") as output:
            command = [*self._command, "--port", str(self._port)]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            self._wait()
        except BaseException:
            self._process.kill()
            raise
        return self

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.1)
        raise ServerError(self._log.read_text())

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            status = self._process.wait(60)
        finally:
            self._process.kill()
        if status != -signal.SIGTERM:
            raise ServerError(f"it ended with status {status}:\n{self._log.read_text()}")

    def _complete(self, prompt: str, tokens: int) -> tuple[str, int]:
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0.0}).encode()
        url = f"http://127.0.0.1:{self._port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    def answers(self, prompts: Sequence[str], tokens: int, at_once: int) -> Answers:
        """Greedy answers to all prompts.

        Args:
            prompts: The prompt of each request.
            tokens: The most tokens of an answer.
            at_once: How many requests are under way at a time.

        Raises:
            ServerError: A request failed.
        """
        start = time.perf_counter()
        try:
            with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                found = list(pool.map(lambda prompt: self._complete(prompt, tokens), prompts))
        except OSError as error:
            raise ServerError(f"{error}\n{self._log.read_text()}") from error
        seconds = time.perf_counter() - start
        return Answers([text for text, _ in found], sum(count for _, count in found), seconds)
