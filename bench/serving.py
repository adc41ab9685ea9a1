"""Tokens a second of mlx-lm's server, with the patch, also exact, and without, for one request at a time and for eight.

python bench/serving.py FOLDER [--tokens 128]    FOLDER is a model in mlx-lm's format; prints a table
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mlx_mittens.bench import machine
from mlx_mittens.bench.serving import PROMPTS, Answers, Server

AT_ONCE = (1, 8)


def measure(folder: Path, tokens: int, patched: bool, exact: bool = False) -> list[Answers]:
    """The better of two rounds for each number of requests at once, after a round that compiles."""
    with tempfile.TemporaryDirectory() as scratch, Server(folder, patched, Path(scratch) / "log", exact) as server:
        for at_once in AT_ONCE:
            server.answers(PROMPTS, tokens, at_once)
        rounds = [[server.answers(PROMPTS, tokens, at_once) for _ in range(2)] for at_once in AT_ONCE]
    return [max(pair, key=lambda answers: answers.tokens_per_s) for pair in rounds]


def others(a: Answers, b: Answers) -> int:
    """How many texts differ."""
    return sum(x != y for x, y in zip(a.texts, b.texts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    print(f"{machine.headline(machine.describe())}. {len(PROMPTS)} requests of {options.tokens} tokens:\n")
    print("| server | requests at once | tokens/s | by mlx-lm's | texts other than one by one | than mlx-lm's |")
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    of_mlx_lm: list[Answers] = []
    for name, how in {"mlx-lm": (False,), "patched": (True,), "patched, exact": (True, True)}.items():
        answers = measure(options.folder, options.tokens, *how)
        of_mlx_lm = of_mlx_lm or answers
        for at_once, one, theirs in zip(AT_ONCE, answers, of_mlx_lm, strict=True):
            speedup = one.tokens_per_s / theirs.tokens_per_s
            alone, mlx_lm = (others(one, than) for than in (answers[0], theirs))
            print(f"| {name} | {at_once} | {one.tokens_per_s:.4g} | {speedup:.2f} | {alone} | {mlx_lm} |", flush=True)


if __name__ == "__main__":
    main()
