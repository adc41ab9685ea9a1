"""Models sharded over two processes by MLX's own engine, patched: the tokens of one process."""

import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys

import mlx.core as mx
import pytest
from helpers import tiny
from helpers.support import TESTS, child_environment

SCRIPT = TESTS / "helpers" / "sharded.py"
PROMPT = list(range(5, 40))
COUNT = 30
# NCCL is tried where there are two GPUs, the ring everywhere.
BACKENDS = ["ring"] + ["nccl"] * (mx.is_available(mx.gpu) and mx.device_count(mx.gpu) > 1)
PORT = {"ring": "--starting-port", "nccl": "--nccl-port"}


def answer(*command: object) -> dict:
    result = subprocess.run(
        list(map(str, command)), env=child_environment(), capture_output=True, text=True, timeout=120
    )
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


def of_one_and_two(backend: str, folder: pathlib.Path) -> tuple[dict, dict]:
    """What a model gives on one process and sharded over two: the same tokens."""
    arguments = (SCRIPT, backend, folder, json.dumps(PROMPT), COUNT)
    launch = shutil.which("mlx.launch", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    alone = answer(sys.executable, *arguments)
    options = ("-n", 2, "--backend", backend, PORT[backend], free_ports(), "--python", sys.executable)
    both = answer(launch, *options, *arguments)
    assert (alone["size"], both["size"]) == (1, 2)
    assert both["tokens"] == alone["tokens"]
    return alone, both


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights, op", [("dense", "gemv"), ("4bit", "quantized_matmul")])
def test_two_processes_give_the_tokens_of_one(trained, weights, op, backend):
    alone, both = of_one_and_two(backend, trained / weights)
    for each in (both, alone):  # of gate and up, which are one kernel where a layer is whole
        each["ran"][op] += 2 * each["ran"].pop("quantized_swiglu", 0)
    for each in ("rms_norm", op):
        assert both["ran"][each] == alone["ran"][each] > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [None, 4])
def test_two_processes_give_the_tokens_of_a_mixture(tmp_path, bits, backend):
    """Each process has a part of every expert. Their sums come before the router's next choice."""
    folder = tiny.save(tmp_path / "mixture", "qwen3-30b-a3b", mx.float32, bits, moe_intermediate_size=128)
    alone, both = of_one_and_two(backend, folder)
    experts = ("gather_swiglu", "gather_qmm") if bits else ("gather_mm",)
    for op in (*experts, "rope_append", "scaled_dot_product_attention"):
        assert both["ran"].get(op, 0) > 0, f"{op}: {both['ran']}"
    assert alone["ran"]["rope_append"] == both["ran"]["rope_append"]
