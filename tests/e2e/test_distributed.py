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


def answers(*command: object) -> list[dict]:
    """The output of a command, for each model."""
    result = subprocess.run(
        list(map(str, command)), env=child_environment(), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


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


@pytest.fixture(scope="module", params=BACKENDS)
def of_one_and_two(request, trained, tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """The results of each model on one process and sharded over two, which run all models one after the other."""
    backend, folder = request.param, tmp_path_factory.mktemp("mixtures")
    folders = {name: trained / name for name in ("dense", "4bit")}
    for name, bits in (("mixture", None), ("mixture in 4 bits", 4)):
        size = {"moe_intermediate_size": 128}
        folders[name] = tiny.save(folder / name, "qwen3-30b-a3b", mx.float32, bits, **size)
    arguments = (SCRIPT, backend, json.dumps(PROMPT), COUNT, *folders.values())
    launch = shutil.which("mlx.launch", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    options = ("-n", 2, "--backend", backend, PORT[backend], free_ports(), "--python", sys.executable)
    pairs = zip(answers(sys.executable, *arguments), answers(launch, *options, *arguments), strict=True)
    return dict(zip(folders, pairs, strict=True))


def with_equal_tokens(alone: dict, both: dict) -> tuple[dict, dict]:
    """How often the kernels of each op ran on one process, and on the first of two."""
    assert (alone["size"], both["size"]) == (1, 2)
    assert both["tokens"] == alone["tokens"] and len(alone["tokens"]) == COUNT
    return alone["ran"], both["ran"]


@pytest.mark.parametrize("weights, op", [("dense", "gemv"), ("4bit", "quantized_matmul")])
def test_two_processes_give_the_tokens_of_one(of_one_and_two, weights, op):
    alone, both = with_equal_tokens(*of_one_and_two[weights])
    for ran in (both, alone):  # of gate and up, which are one kernel where a layer is whole
        ran[op] += 2 * ran.pop("quantized_swiglu", 0)
    assert both["rms_norm"] == alone["rms_norm"] > 0
    # One process appends the first prompt by our kernel, which takes the last layer's queries along: nobody reads them.
    assert both[op] == alone[op] - 1 > 0


@pytest.mark.parametrize(
    "weights, experts", [("mixture", ["gather_mm"]), ("mixture in 4 bits", ["gather_swiglu", "gather_qmm"])]
)
def test_two_processes_give_the_tokens_of_a_mixture(of_one_and_two, weights, experts):
    """Each process has a part of every expert. Their sums come before the router's next choice."""
    alone, both = with_equal_tokens(*of_one_and_two[weights])
    for op in (*experts, "rope_append", "scaled_dot_product_attention"):
        assert both.get(op, 0) > 0, f"{op}: {both}"
    # Of two processes mlx-lm appends the first prompt, in each of the two layers.
    assert both["rope_append"] == alone["rope_append"] - 2
