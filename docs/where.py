"""The tables of ops in the documentation: where each is (docs/architecture.md), and which there are (README.md).

python docs/where.py            prints where each is
python docs/where.py --write    writes both
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
README = ROOT / "README.md"
IN_README = re.compile(r"(?<=<!-- ops -->\n).*?(?=\n<!-- /ops -->)", re.S)
PATTERN = re.compile(r"(?<=<!-- where: begin -->\n).*?(?=<!-- where: end -->)", re.S)


@dataclass(frozen=True)
class Place:
    """The files of one op, or of several that share them.

    Attributes:
        ops: Names in ``mlx_mittens``.
        family: The folder of `python`, `cpp`, `kernels` and `tests`.
        declared: The file of the declaration below mlx_mittens/ops, where it is not the family's.
        cpp: Below csrc/ops/FAMILY.
        plans: The files that choose the kernel and its grid, below csrc/ops/FAMILY.
        kernels: Below metal/FAMILY.
        nvidia: Kernels that plans for NVIDIA GPUs alone launch, below metal/FAMILY.
        cpu: Below csrc/cpu/isa/FAMILY, or below cpu_folder where it is not compiled for each instruction set.
        tests: Below tests/unit/FAMILY.
    """

    ops: tuple[str, ...]
    family: str
    cpp: str
    plans: tuple[str, ...]
    kernels: tuple[str, ...]
    cpu: tuple[str, ...]
    tests: tuple[str, ...]
    nvidia: tuple[str, ...] = ()
    cpu_folder: str = ""
    declared: str = ""

    @property
    def python(self) -> str:
        return self.declared or f"{self.family}.py"

    def columns(self) -> list[tuple[str, tuple[str, ...]]]:
        """Folder and files of each column of the table."""
        return [
            ("mlx_mittens/ops", (self.python,)),
            (f"csrc/ops/{self.family}", (self.cpp,)),
            (f"csrc/ops/{self.family}", self.plans),
            (f"metal/{self.family}", self.kernels),
            (f"metal/{self.family}", self.nvidia),
            (self.cpu_folder or f"csrc/cpu/isa/{self.family}", self.cpu),
            (f"tests/unit/{self.family}", self.tests),
        ]


_PLACES = (
    Place(
        ("rms_norm",), "norm", "rms_norm.cpp", ("plan.cpp",),
        ("rms_norm.metal", "norm_vjp.metal"),
        ("rms_norm.cpp",), ("test_rms_norm.py", "test_long_rows.py"),
    ),
    Place(
        ("layer_norm",), "norm", "layer_norm.cpp", ("plan.cpp",),
        ("layer_norm.metal", "norm_vjp.metal"),
        ("layer_norm.cpp",), ("test_layer_norm.py", "test_long_rows.py"),
    ),
    Place(
        ("add_rms_norm",), "norm", "add_rms_norm.cpp", ("plan.cpp",),
        ("add_rms_norm.metal", "norm_vjp.metal"),
        ("rms_norm.cpp",), ("test_add_rms_norm.py", "test_long_rows.py"),
    ),
    Place(
        ("softmax",), "norm", "softmax.cpp", ("plan.cpp",), ("softmax.metal", "softmax_vjp.metal"),
        ("softmax.cpp",), ("test_softmax.py", "test_long_rows.py"),
    ),
    Place(
        ("norm_add_norm",), "norm", "norm_add_norm.cpp", ("plan.cpp",),
        ("norm_add_norm.metal", "clipped_norm_add_norm.metal", "norm_vjp.metal"),
        ("norm_add_norm.cpp", "clipped_sum.cpp"), ("test_norm_add_norm.py", "test_clipped_sums.py"),
    ),
    Place(
        ("qk_norm",), "norm", "qk_norm.cpp", ("qk_norm.cpp",), ("qk_norm.metal", "norm_vjp.metal"),
        ("head_norm.cpp",), ("test_qk_norm.py",),
    ),
    Place(
        ("softcap",), "norm", "softcap.cpp", ("softcap.cpp",), ("softcap.metal",),
        ("softcap.cpp",), ("test_softcap.py",),
    ),
    Place(
        ("sample",), "sampling", "sample.cpp", ("plan.cpp",),
        ("sample.metal", "sample_adjusted.metal", "sample_logprobs.metal"),
        ("sample.cpp", "adjust_logits.cpp"), ("test_sample.py", "test_penalties.py"),
    ),
    Place(
        ("matmul", "gemv"), "matmul", "gemv.cpp", ("plan_dense.cpp", "plan_columns.cpp"),
        ("gemv.metal", "gemv_tiles.metal", "apple/matmul_tiles.metal", "splitk_reduce.metal"),
        ("gemv.cpp", "tiles.cpp"), ("test_gemv.py", "test_matmul.py", "test_gemv_short.py", "test_product_traffic.py"),
        ("nvidia/gemv_short.metal",),
    ),
    Place(
        ("quantized_matmul",), "matmul", "quantized_matmul.cpp", ("plan_quantized.cpp", "plan_columns.cpp"),
        ("qmv.metal", "qmm.metal", "apple/qmm_tiles.metal", "qvm.metal", "apple/qvm_tiles.metal", "splitk_reduce.metal",
         "apple/m5/int8_rows.metal", "apple/m5/qmm_int8.metal"),
        ("quantized_matmul.cpp", "affine_products.cpp", "small_float_products.cpp", "integer_matmul.cpp",
         "integer_panel_matmul.cpp", "packed_rows.cpp", "tiles.cpp"),
        ("test_quantized_matmul.py", "test_integer_products.py", "test_integer_tiles.py", "test_unpacked_integers.py",
         "test_mma_row.py", "test_product_traffic.py", "test_qmm_int8.py"),
        ("nvidia/rows.metal", "nvidia/tiles.metal", "nvidia/mma_row.metal", "nvidia/columns.metal"),
    ),
    Place(
        ("block_masked_mm",), "matmul", "block_masked_mm.cpp", ("plan_dense.cpp",),
        ("apple/block_masked_mm.metal", "apple/block_masked_row.metal"),
        (), ("test_block_masked_mm.py",),
    ),
    Place(
        ("quantized_matmuls",), "matmul", "quantized_matmuls.cpp", ("quantized_matmuls.cpp",), ("qmv_several.metal",),
        (), ("test_quantized_matmuls.py",),
    ),
    Place(
        ("quantized_embedding",), "matmul", "quantized_embedding.cpp", ("quantized_embedding.cpp",),
        ("quantized_embedding.metal",), ("quantized_embedding.cpp",), ("test_quantized_embedding.py",),
    ),
    Place(
        ("quantized_swiglu",), "matmul", "quantized_swiglu.cpp", ("plan_quantized.cpp",),
        ("quantized_swiglu.metal", "apple/swiglu_tiles.metal"),
        ("quantized_matmul.cpp", "affine_products.cpp", "small_float_products.cpp", "integer_matmul.cpp",
         "integer_panel_matmul.cpp", "packed_rows.cpp", "tiles.cpp"), ("test_quantized_swiglu.py",),
        ("nvidia/quantized_swiglu.metal", "nvidia/quantized_swiglu_mma.metal"),
    ),
    Place(
        ("block_matmul",), "matmul", "gguf_matmul.cpp", ("plan_gguf.cpp",),
        ("gguf_matmul.metal", "apple/gguf_tiles.metal"),
        ("gguf.cpp", "integer_matmul.cpp", "integer_panel_matmul.cpp", "packed_rows.cpp", "tiles.cpp"),
        ("test_gguf.py", "test_gguf_kinds.py", "test_unpacked_integers.py", "test_product_traffic.py"),
    ),
    Place(
        ("block_quantize", "block_dequantize"), "matmul", "gguf_quantize.cpp", ("gguf_quantize.cpp",),
        ("gguf_quantize.metal",), ("gguf.cpp", "packed_rows.cpp"), ("test_gguf.py", "test_gguf_kinds.py"),
    ),
    Place(
        ("scaled_dot_product_attention",), "attention", "attention.cpp", ("plan.cpp",),
        ("attention.metal", "attention_ragged.metal", "attention_combine.metal", "attention_backward.metal"),
        ("attention.cpp", "attention_backward.cpp"),
        (
            "test_attention.py", "test_attention_backward.py", "test_attention_combine.py", "test_exact.py",
            "test_attention_traffic.py", "test_row_keys.py",
        ),
        ("nvidia/attention_ahead.metal",),
    ),
    Place(
        ("cascade_attention",), "attention", "cascade_attention.cpp", ("plan.cpp",),
        ("attention.metal", "attention_ragged.metal", "attention_cascade.metal"),
        ("attention.cpp", "attention_merge.cpp"), ("test_cascade_attention.py",), ("nvidia/attention_ahead.metal",),
    ),
    Place(
        ("paged_attention",), "attention", "paged_attention.cpp", ("plan.cpp",),
        ("attention_paged.metal", "attention_packed_paged.metal", "attention_combine.metal"), ("attention.cpp",),
        ("test_paged_attention.py",),
    ),
    Place(
        ("quantized_scaled_dot_product_attention",), "attention", "quantized_attention.cpp", ("plan.cpp",),
        ("attention_packed.metal", "attention_packed_ragged.metal", "attention_combine.metal"), ("attention.cpp",),
        ("test_quantized_attention.py", "test_attention_traffic.py", "test_row_keys.py"),
        ("nvidia/attention_packed_ahead.metal", "nvidia/attention_unpack.metal"),
    ),
    Place(
        ("rope_append",), "cache", "rope_append.cpp", ("rope_append_primitive.cpp",),
        ("rope_append.metal",), ("rope_append.cpp",),
        ("test_rope_append.py", "test_cache_step.py"),
    ),
    Place(
        ("quantized_rope_append",), "cache", "quantized_rope_append.cpp", ("rope_append_primitive.cpp",),
        ("quantized_rope_append.metal",), ("rope_append.cpp",),
        ("test_quantized_rope_append.py",),
    ),
    Place(
        ("paged_append",), "cache", "paged_append.cpp", (), ("paged_append.metal",), ("paged_append.cpp",),
        ("test_paged_append.py",),
    ),
    Place(
        ("index_scores",), "cache", "index_scores.cpp", (), ("index_scores.metal",), (), ("test_index_scores.py",),
    ),
    Place(
        ("take_tokens",), "cache", "take_tokens.cpp", (), ("take_tokens.metal",), ("take_tokens.cpp",),
        ("test_take_tokens.py",), cpu_folder="csrc/cpu/cache",
    ),
    Place(
        ("gather_qmm",), "moe", "gather_qmm.cpp", ("plan.cpp",),
        ("gather_qmm.metal", "apple/expert_tiles.metal", "apple/gather_qmm_tiles.metal"),
        ("gather.cpp",), ("test_gather.py", "test_expert_tiles.py"), cpu_folder="csrc/cpu/moe",
    ),
    Place(
        ("gather_mm",), "moe", "gather_mm.cpp", ("plan.cpp",),
        ("gather_mm.metal", "apple/expert_tiles.metal", "apple/gather_mm_tiles.metal"),
        ("gather.cpp",), ("test_gather.py", "test_expert_tiles.py"), cpu_folder="csrc/cpu/moe",
    ),
    Place(
        ("gather_swiglu",), "moe", "gather_swiglu.cpp", ("plan.cpp",),
        ("gather_swiglu.metal", "apple/expert_tiles.metal", "apple/gather_swiglu_tiles.metal"),
        ("gather.cpp",), ("test_gather_swiglu.py", "test_expert_tiles.py"), cpu_folder="csrc/cpu/moe",
    ),
    Place(
        ("gather_sum",), "moe", "gather_sum.cpp", ("plan.cpp",),
        ("gather_qmm.metal", "apple/expert_tiles.metal", "apple/gather_qmm_tiles.metal", "apple/row_sums.metal"),
        ("weighted_sum.cpp",), ("test_gather_sum.py", "test_expert_tiles.py"),
    ),
    Place(
        ("mixture",), "moe", "mixture.cpp", ("mixture_primitive.cpp",),
        ("mixture.metal", "apple/normed_mixture.metal"), (),
        ("test_mixture.py", "test_normed_mixture.py"),
    ),
    Place(
        ("route_top_k",), "moe", "route_top_k.cpp", ("route_top_k.cpp",), ("route_top_k.metal",),
        ("route_top_k.cpp",), ("test_route_top_k.py",),
    ),
    Place(
        ("gated_delta_update",), "recurrence", "gated_delta_update.cpp", ("plan.cpp",),
        ("recurrence.metal",), ("recurrence.cpp", "recurrence_vjp.cpp"), ("test_gated_delta_update.py",),
    ),
    Place(
        ("gated_delta_inputs",), "recurrence", "gated_delta_inputs.cpp", (), ("layer_inputs.metal",),
        ("layer_inputs.cpp",), ("test_layer_inputs.py",),
        declared="recurrent_layers.py",
    ),
    Place(
        ("gated_delta_token",), "recurrence", "gated_delta_token.cpp", ("plan.cpp",), ("gated_delta_token.metal",),
        ("gated_delta_token.cpp",), ("test_gated_delta_token.py",),
        declared="recurrent_layers.py",
    ),
    Place(
        ("short_conv_token",), "recurrence", "short_conv_token.cpp", (),
        ("short_conv_token.metal", "apple/short_conv_product.metal"),
        ("short_conv_token.cpp",), ("test_token_layers.py",),
        declared="recurrent_layers.py",
    ),
    Place(
        ("ssm_inputs",), "recurrence", "ssm_inputs.cpp", (), ("layer_inputs.metal",),
        ("layer_inputs.cpp",), ("test_layer_inputs.py",),
        declared="recurrent_layers.py",
    ),
    Place(
        ("ssm_token",), "recurrence", "ssm_token.cpp", ("plan.cpp",), ("ssm_token.metal",),
        ("ssm_token.cpp",), ("test_token_layers.py",),
        declared="recurrent_layers.py",
    ),
    Place(
        ("ssm_update",), "recurrence", "ssm_update.cpp", ("plan.cpp",), ("state_space.metal",),
        ("state_space.cpp", "recurrence_vjp.cpp"), ("test_ssm_update.py",),
    ),
)  # fmt: skip


def _as_new_ops_are() -> Iterator[Place]:
    """The other ops: those whose files `mlx-mittens new` has named."""
    named = {op for place in _PLACES for op in place.ops}
    for family in dict.fromkeys(place.family for place in _PLACES):
        declarations = (ROOT / "mlx_mittens" / "ops" / f"{family}.py").read_text()
        for op in re.findall(r"^@defined_in_extension\ndef (\w+)\(", declarations, re.M):
            if op not in named:
                yield Place((op,), family, f"{op}.cpp", (f"{op}.cpp",), (f"{op}.metal",), (), (f"test_{op}.py",))


PLACES = (*_PLACES, *_as_new_ops_are())


def table() -> str:
    lines = [
        "| op | Python | C++ op | plan | kernels | on NVIDIA GPUs alone | CPU | tests |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for place in PLACES:
        cells = [" ".join(f"`{folder}/{name}`" for name in names) for folder, names in place.columns()]
        lines.append(f"| {', '.join(f'`{op}`' for op in place.ops)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def in_docs() -> str:
    found = PATTERN.search(PAGE.read_text())
    return found[0] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write them into docs/architecture.md and README.md")
    if parser.parse_args().write:
        from mlx_mittens import specs

        PAGE.write_text(PATTERN.sub(lambda _: table(), PAGE.read_text()))
        README.write_text(IN_README.sub(lambda _: specs.markdown(), README.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
