"""Tokens a second of mlx-lm's server, with the patch and without, for one request at a time and for eight.

python bench/serving.py FOLDER [--tokens 128]    FOLDER is a model in mlx-lm's format; prints a table
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mlx_mittens.bench import machine
from mlx_mittens.bench.serving import PROMPTS, Answers, Server

AT_ONCE = (1, 8)


def measure(folder: Path, patched: bool, tokens: int) -> list[Answers]:
    """The better of two rounds for each number of requests at once, after a round that compiles."""
    with tempfile.TemporaryDirectory() as scratch, Server(folder, patched, Path(scratch) / "log") as server:
        for at_once in AT_ONCE:
            server.answers(PROMPTS, tokens, at_once)
        rounds = [[server.answers(PROMPTS, tokens, at_once) for _ in range(2)] for at_once in AT_ONCE]
    return [max(pair, key=lambda answers: answers.tokens_per_s) for pair in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    ours, theirs = (measure(options.folder, patched, options.tokens) for patched in (True, False))
    print(f"{machine.processor()}, {machine.cores()} cores. {len(PROMPTS)} requests of {options.tokens} tokens:\n")
    print("| requests at once | patched, tokens/s | mlx-lm, tokens/s | speedup | texts that differ |")
    print("|--:|--:|--:|--:|--:|")
    for at_once, our, their in zip(AT_ONCE, ours, theirs, strict=True):
        differ = sum(a != b for a, b in zip(our.texts, their.texts, strict=True))
        speedup = our.tokens_per_s / their.tokens_per_s
        print(f"| {at_once} | {our.tokens_per_s:.4g} | {their.tokens_per_s:.4g} | {speedup:.2f} | {differ} |")


if __name__ == "__main__":
    main()
