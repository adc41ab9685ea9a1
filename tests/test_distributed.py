"""A model sharded over two processes by MLX's own engine, patched: the tokens of one process."""

import json
import pathlib
import random
import socket
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "sharded.py"
PROMPT = list(range(5, 40))
COUNT = 30


def answer(*command: object) -> dict:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads([line for line in result.stdout.splitlines() if line.startswith("{")][-1])


def free_ports() -> int:
    """The first of two neighbouring ports that no one listens on."""
    for _ in range(100):
        port = random.randrange(20000, 60000, 2)
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no two neighbouring ports are free")


@pytest.mark.parametrize("weights, op", [("dense", "gemv"), ("4bit", "quantized_matmul")])
def test_two_processes_give_the_tokens_of_one(trained, weights, op):
    arguments = (SCRIPT, trained / weights, json.dumps(PROMPT), COUNT)
    launch = pathlib.Path(sys.executable).parent / "mlx.launch"
    alone = answer(sys.executable, *arguments)
    options = ("-n", 2, "--backend", "ring", "-p", free_ports(), "--python", sys.executable)
    both = answer(launch, *options, *arguments)
    assert (alone["size"], both["size"]) == (1, 2)
    assert both["tokens"] == alone["tokens"]
    for each in ("rms_norm", op):
        assert both["ran"][each] == alone["ran"][each] > 0
