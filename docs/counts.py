"""Work of our kernels and MLX's, counted by the simulator: the tables of docs/kernels, a page for each family.

python docs/counts.py            prints them
python docs/counts.py --write    writes them into the pages
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mittens import ops, specs
from mlx_mittens.cli import simulate
from mlx_mittens.frontend import compiler

PAGES = Path(__file__).resolve().parent / "kernels"
FAMILIES = ("norm", "sampling", "matmul", "attention", "cache", "moe", "recurrence")
PATTERN = re.compile(r"(?<=<!-- counts: begin -->\n).*?(?=<!-- counts: end -->)", re.S)


@dataclass(frozen=True)
class Counted:
    """A case that stands for the calls which reach some kernels.

    Attributes:
        op: Its op.
        case: Words of the case's name, as `mlx-mittens simulate` takes them.
        slow: Whether it takes seconds.
        dtype: Of its arrays.
    """

    op: str
    case: str
    slow: bool = False
    dtype: mx.Dtype = mx.float16


CASES = (
    Counted("softmax", "scores decode 1x32x1x4096"),
    Counted("softmax", "1x128256"),
    Counted("softmax", "130x1030 vjp"),
    Counted("rms_norm", "1x4096"),
    Counted("add_rms_norm", "1x4096"),
    Counted("layer_norm", "1x768"),
    Counted("norm_add_norm", "test 2x200"),
    Counted("norm_add_norm", "test 2x250 clip_sum=True"),
    Counted("qk_norm", "test 1x4x2x64"),
    Counted("softcap", "test 3x1025"),
    Counted("sample", "test 5x515"),
    Counted("sample", "test 1x9001 temperature=0.0"),
    Counted("sample", "test 1x9001 temperature=0.0 logprobs=all"),
    Counted("sample", "test 1x9001 temperature=0.0 repetition_penalty=1.3 masks=True"),
    Counted("rms_norm", "130x1030 vjp"),
    Counted("gemv", "1x1024x1024"),
    Counted("gemv", "1x600x72 transpose=False"),
    Counted("gemv", "8x520x19"),
    Counted("gemv", "1x512x17 nvidia"),
    Counted("matmul", "37x160x69", dtype=mx.bfloat16),
    Counted("quantized_matmul", "1x1024x1024 bits=4"),
    Counted("quantized_matmul", "1x4096x64 transpose=False bits=4"),
    Counted("quantized_matmul", "11x448x37 bits=4"),
    Counted("quantized_matmul", "16x320x9 bits=4"),
    Counted("quantized_matmul", "19x160x133 bits=4"),
    Counted("quantized_matmul", "37x160x69 bits=4"),
    Counted("quantized_matmul", "37x72x96 transpose=False bits=4"),
    Counted("quantized_matmuls", "1x320x9x4x1 bits=4"),
    Counted("quantized_embedding", "test 5x288x9 bits=4"),
    Counted("block_masked_mm", "1x136x80 block_size=64 transpose=True numbers=False"),
    Counted("block_masked_mm", "37x136x88 block_size=64 transpose=True numbers=False"),
    Counted("block_masked_mm", "64x72x40 block_size=64 transpose=False numbers=False"),
    Counted("block_masked_mm", "64x72x40 block_size=32 transpose=True numbers=True"),
    Counted("quantized_matmul", "1x128x4099 nvidia"),
    Counted("quantized_matmul", "1x2880x9 bits=4 nvidia"),
    Counted("quantized_matmul", "11x320x9 bits=4 nvidia"),
    Counted("quantized_matmul", "1x4096x64 transpose=False bits=4 nvidia"),
    Counted("quantized_swiglu", "1x2880x9 bits=4"),
    Counted("quantized_swiglu", "37x160x69 bits=4"),
    Counted("quantized_swiglu", "1x320x9 bits=4 nvidia"),
    Counted("quantized_swiglu", "1x2880x9 nvidia"),
    Counted("block_matmul", "1x2880x9 q4_0"),
    Counted("block_matmul", "20x256x21 q4_0"),
    Counted("block_quantize", "9x96x0 q4_0"),
    Counted("block_dequantize", "9x96x0 q4_0 float16"),
    Counted("scaled_dot_product_attention", "test 2x4x2x1x70x64"),
    Counted("scaled_dot_product_attention", "1x4x1x5x40x128 causal"),
    Counted("scaled_dot_product_attention", "decode 1x32x8x1x1024x128", slow=True),
    Counted("scaled_dot_product_attention", "1x2x1x20x20x80"),
    Counted("scaled_dot_product_attention", "2x2x1x20x37x64 causal"),
    Counted("scaled_dot_product_attention", "prompt 1x8x8x512x512x64 causal", slow=True),
    Counted("scaled_dot_product_attention", "1x2x1x18x40x64 additive vjp"),
    Counted("scaled_dot_product_attention", "2x2x1x1x40x64 causal ragged=True"),
    Counted("cascade_attention", "test 3x4x2x1x12x90x64"),
    Counted("paged_attention", "test 3x4x2x1x40x64"),
    Counted("paged_attention", "2x4x2x1x70x64 bits=8"),
    Counted("quantized_scaled_dot_product_attention", "1x8x2x1x70x64 bits=4"),
    Counted("quantized_scaled_dot_product_attention", "1x4x2x2x45x64 bits=4"),
    Counted("quantized_scaled_dot_product_attention", "2x2x1x1x40x64 causal ragged=True bits=4"),
    Counted("scaled_dot_product_attention", "1x2x1x1x70x64 causal nvidia"),
    Counted("quantized_scaled_dot_product_attention", "1x2x1x1x70x64 causal bits=4 nvidia"),
    Counted("quantized_scaled_dot_product_attention", "1x2x1x33x40x64 causal bits=4 nvidia"),
    Counted("rope_append", "1x2x1x1x64 offset=0"),
    Counted("rope_append", "2x3x1x3x80 dims=80"),
    Counted("quantized_rope_append", "1x4x2x1x64 bits=4"),
    Counted("quantized_rope_append", "2x1x2x3x96 bits=6"),
    Counted("paged_append", "test 2x2x1x64"),
    Counted("paged_append", "2x2x3x64 bits=8"),
    Counted("index_scores", "test 1x17x1x128x70"),
    Counted("take_tokens", "test 1x1x9x64x32x5"),
    Counted("gather_qmm", "1x8x16x320x10 bits=4"),
    Counted("gather_qmm", "11x6x7x96x33 bits=4"),
    Counted("gather_mm", "test 1x8x16x320x10"),
    Counted("gather_mm", "11x6x7x96x33"),
    Counted("gather_swiglu", "1x8x16x320x10 bits=4"),
    Counted("gather_swiglu", "11x6x7x96x33 bits=4"),
    Counted("gather_sum", "1x8x16x320x10 bits=4"),
    Counted("gather_sum", "11x6x7x64x33 bits=4"),
    Counted("mixture", "1x8x16x320x64 bits=4"),
    Counted("mixture", "1x3x5x96x96 bits=4 is_normed=x"),
    Counted("route_top_k", "2x128 scores=softmax"),
    Counted("gated_delta_update", "test 1x1x2x4x33x128"),
    Counted("gated_delta_inputs", "test 1x5x4x2x4x32x64"),
    Counted("gated_delta_token", "test 1x4x2x4x33x128"),
    Counted("gated_delta_token", "1x4x2x2x33x128 per_column"),
    Counted("short_conv_token", "test 1x3x200"),
    Counted("short_conv_token", "test 2x3x33x37"),
    Counted("short_conv_token", "test 1x3x38 columns=96 group_size=32 bits=4"),
    Counted("ssm_inputs", "test 1x5x4x96x32"),
    Counted("ssm_token", "test 1x4x1x4x33x128"),
    Counted("ssm_update", "test 1x1x1x4x33x128"),
)

_HEAD = (
    "| kernel | threadgroups x threads | loaded | stored | barriers | SIMD | matrix | threadgroup memory |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|\n"
)


def rows(counted: Counted) -> str:
    """The rows of a case: its name, a launch of ours a line, a launch of MLX's a line."""
    op = specs.get(counted.op)
    case = simulate.find_case(op, counted.case)
    check, ours = simulate.simulate(op, case, counted.dtype)
    if not check.passed:
        raise ValueError(f"{op.name}, {case.name}: {check.detail}")
    theirs = simulate.peer_launches(op, case, counted.dtype)
    lines = [_row("", launch) for launch in ours] + [_row("MLX: ", launch) for launch in theirs]
    return "".join(f"{line}\n" for line in (heading(counted), *lines) if line)


def heading(counted: Counted) -> str:
    """The row that names a case."""
    op = specs.get(counted.op)
    return f"| **{op.name}**, {simulate.find_case(op, counted.case).name} |" + " |" * 7


def _row(whose: str, launch: dict[str, Any]) -> str:
    """A launch; nothing for a copy that makes an argument contiguous, which only the table's inputs need."""
    if launch["file"] == "runtime/copy.metal":
        return ""
    size = [" x ".join(str(n) for n in launch[key] if n > 1) or "1" for key in ("threadgroups", "threads")]
    counts = launch["counts"]
    cells = [
        counts["device_bytes_loaded"] - counts["params_bytes_loaded"],
        counts["device_bytes_stored"],
        counts["threadgroup_barriers"],
        counts["simd_operations"],
        counts["matrix_operations"],
        counts["threadgroup_bytes"],
    ]
    numbers = " | ".join(f"{cell:,}" for cell in cells)
    return f"| {whose}`{launch['kernel']}` | ({size[0]}) x ({size[1]}) | {numbers} |"


def made_with() -> str:
    """The line that names the compiler, on which some counts depend."""
    return f"Compiled by {compiler.find_compiler().identity}.\n"


def family(op: str) -> str:
    """The family of an op."""
    modules = {name: name for name in FAMILIES} | {"recurrent_layers": "recurrence"}
    return next(name for file, name in modules.items() if op in import_module(f"{ops.__name__}.{file}").__all__)


def table(name: str) -> str:
    """The table of a family."""
    return f"{made_with()}\n{_HEAD}{''.join(rows(case) for case in CASES if family(case.op) == name)}"


def in_docs(*names: str) -> str:
    """The tables as the pages have them, of some families or all."""
    texts = [(PAGES / f"{name}.md").read_text() for name in names or FAMILIES]
    return "".join(match[0] for text in texts if (match := PATTERN.search(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write them into docs/kernels")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for name in FAMILIES:
        text, page = table(name), PAGES / f"{name}.md"
        if arguments.write:
            page.write_text(PATTERN.sub(lambda _, text=text: text, page.read_text()))
        else:
            print(text)


if __name__ == "__main__":
    main()
