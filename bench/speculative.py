"""Speculative decoding over many tokens: whether `mm.patch(exact=True)` accepts what plain decoding gives, bit for bit.

A small Llama with random weights, and a draft model that is the same with noise in its last norm. Prints a table:

python bench/speculative.py [--tokens 1000] [--device gpu]
python bench/speculative.py --simulated m2-max    in the kernels of a GPU, with smaller models
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step

import mlx_mittens as mm
from mlx_mittens.bench import architectures, machine

SIZES = {
    **{"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 704, "vocab_size": 320, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
SMALLER = {
    **{"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 64, "head_dim": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
WEIGHTS = ((mx.float16, 8), (mx.bfloat16, None))
DRAFTED = range(2, 9)


def compare(plain: list, steps: list) -> tuple[int, int]:
    """How many tokens differ, and of how many the logarithmic probabilities do in any bit."""
    tokens = sum(int(a) != int(b) for (a, _), (b, _, _) in zip(plain, steps, strict=True))
    bits = sum(not mx.array_equal(a, b).item() for (_, a), (_, b, _) in zip(plain, steps, strict=True))
    return tokens, bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--simulated", metavar="GPU", help="run the kernels of this GPU in the simulator")
    options = parser.parse_args()
    mx.set_default_device(getattr(mx, options.device))
    simulated = mm.simulator.enabled(gpu=options.simulated) if options.simulated else nullcontext()
    with simulated:
        compare_all(options.tokens, SMALLER if options.simulated else SIZES)


def compare_all(count: int, sizes: dict[str, int]) -> None:
    """Prints the table of a number of tokens, of models of these sizes."""
    print(f"{machine.headline(machine.describe())}. Of {count} tokens each:\n")
    print("| weights | patch | drafted at once | accepted | other tokens | other bits |\n|---|---|--:|--:|--:|--:|")
    for dtype, bits in WEIGHTS:
        mx.random.seed(0)
        model = architectures.build(
            "llama-3.2-1b", dtype, bits, **{**architectures.ARCHITECTURES["llama-3.2-1b"], **sizes}
        )
        draft = copy.deepcopy(model)
        noise = mx.random.normal(draft.model.norm.weight.shape).astype(dtype)
        draft.model.norm.weight = draft.model.norm.weight + noise / 16
        prompt = mx.array(list(range(1, 22)))
        for exact in (True, False):
            with mm.patched(exact=exact):
                plain = list(generate_step(prompt, model, max_tokens=count))
                for drafted in DRAFTED if exact else (8,):
                    steps = list(
                        speculative_generate_step(prompt, model, draft, num_draft_tokens=drafted, max_tokens=count)
                    )
                    tokens, changed = compare(plain, steps)
                    accepted = sum(from_draft for _, _, from_draft in steps)
                    name = f"{str(dtype).removeprefix('mlx.core.')}{f', {bits} bits' if bits else ''}"
                    print(
                        f"| {name} | {'exact' if exact else 'plain'} | {drafted} | {accepted} | {tokens} | {changed} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
