"""Decisions of the plans on several GPUs, pinned: a change of a plan shows here, line by line.

`PYTHONPATH=tests python -m unit.test_plans --write` writes the file anew.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.variants import planned_launches

import mlx_mittens as mm
from mlx_mittens import _ext, gpus
from mlx_mittens.frontend.read import sources
from mlx_mittens.frontend.read.instantiations import metal_kernels

FILE = Path(__file__).with_name("plans.txt")
GPUS = ("m1", "m2-max", "m3-ultra", "m5", "h200")
HALF = mx.float16
ATTENTION = [file for file in sources.files() if file.startswith("attention/")]
KERNELS = {name for file in ATTENTION for name in metal_kernels(file)}

Call = Callable[[], object]


def rows(op: str, rows: int, columns: int, dtype: mx.Dtype = HALF) -> tuple[str, Call]:
    x, weight = mx.zeros((rows, columns), dtype), mx.zeros((columns,), dtype)
    call = {"rms_norm": lambda: mm.rms_norm(x, weight, 1e-5), "softmax": lambda: mm.softmax(x, axis=-1)}[op]
    return f"{op} {rows}x{columns}", call


def gemv(rows: int, columns: int, outputs: int, transpose: bool = True) -> tuple[str, Call]:
    x, w = mx.zeros((rows, columns), HALF), mx.zeros((outputs, columns) if transpose else (columns, outputs), HALF)
    return f"gemv {rows}x{columns}x{outputs}{'' if transpose else ' w.T'}", lambda: mm.gemv(w, x, transpose=transpose)


def quantized(rows: int, columns: int, outputs: int, bits: int, transpose: bool = True) -> tuple[str, Call]:
    x = mx.zeros((rows, columns if transpose else outputs), HALF)
    w, scales = mx.zeros((outputs, columns * bits // 32), mx.uint32), mx.zeros((outputs, columns // 64), HALF)
    label = f"quantized_matmul {rows}x{columns}x{outputs} {bits}-bit{'' if transpose else ' w.T'}"
    return label, lambda: mm.quantized_matmul(x, w, scales, scales, transpose=transpose, group_size=64, bits=bits)


def gated(rows: int, columns: int, outputs: int, bits: int = 4) -> tuple[str, Call]:
    x = mx.zeros((rows, columns), HALF)
    w, scales = mx.zeros((outputs, columns * bits // 32), mx.uint32), mx.zeros((outputs, columns // 64), HALF)
    triple = (w, scales, scales)
    return f"quantized_swiglu {rows}x{columns}x{outputs} {bits}-bit", lambda: mm.quantized_swiglu(
        x, triple, triple, group_size=64, bits=bits
    )


def masked(rows: int, columns: int, outputs: int, block_size: int = 64, numbers: bool = False) -> tuple[str, Call]:
    a, b = mx.zeros((rows, columns), HALF), mx.zeros((columns, outputs), HALF)
    mask = mx.ones((1, 1), HALF if numbers else mx.bool_)
    label = f"block_masked_mm {rows}x{columns}x{outputs} {block_size}{' numbers' * numbers}"
    return label, lambda: mm.block_masked_mm(a, b, block_size, None, mask)


def gguf(rows: int, columns: int, outputs: int) -> tuple[str, Call]:
    x, blocks = mx.zeros((rows, columns), HALF), mx.zeros((outputs, columns // 32 * 18), mx.uint8)
    return f"block_matmul {rows}x{columns}x{outputs} q4_0", lambda: mm.block_matmul(x, blocks, "q4_0")


def attention(
    batch: int, queries: int, keys: int, dtype: mx.Dtype = HALF, bits: int = 0, key_heads: int = 8, width: int = 128
) -> tuple[str, Call]:
    heads = 32
    q, shape = mx.zeros((batch, heads, queries, width), dtype), (batch, key_heads, keys)
    label = f"attention {batch}x{heads}x{key_heads}x{queries}x{keys}x{width}{f' {bits}-bit' if bits else ''}"
    if not bits:
        kv = mx.zeros((*shape, width), dtype)
        options = {"scale": 1.0, "mask": "causal" if queries > 1 else None}
        return f"{label} {str(dtype).split('.')[-1]}", lambda: mm.scaled_dot_product_attention(q, kv, kv, **options)
    scales = mx.zeros((*shape, width // 64), dtype)
    packed = (mx.zeros((*shape, width * bits // 32), mx.uint32), scales, scales)
    return label, lambda: mm.quantized_scaled_dot_product_attention(
        q, packed, packed, scale=1.0, group_size=64, bits=bits
    )


def cascade(batch: int, own: int, prefix: int, queries: int = 1, heads: int = 32, width: int = 128) -> tuple[str, Call]:
    q, key_heads = mx.zeros((batch, heads, queries, width), HALF), 8
    kv, shared = (mx.zeros((n, key_heads, keys, width), HALF) for n, keys in ((batch, own), (1, prefix)))
    label = f"cascade_attention {batch}x{heads}x{key_heads}x{queries}x{own}x{prefix}x{width}"
    return label, lambda: mm.cascade_attention(q, kv, kv, shared, shared, scale=1.0)


def paged(batch: int, keys: int, queries: int = 1, heads: int = 32, bits: int = 0) -> tuple[str, Call]:
    q, key_heads, width = mx.zeros((batch, heads, queries, 128), HALF), 8, 128
    table, lengths = mx.zeros((batch, keys // 16), mx.int32), mx.zeros(batch, mx.int32)
    pool = mx.zeros((4, key_heads, 16, width), HALF)
    scales = mx.zeros((4, key_heads, 16, width // 64), HALF)
    packed = (mx.zeros((4, key_heads, 16, width * bits // 32), mx.uint32), scales, scales)
    blocks = packed if bits else pool
    label = f"paged_attention {batch}x{heads}x{key_heads}x{queries}x{keys}x{width}{f' {bits}-bit' if bits else ''}"
    return label, lambda: mm.paged_attention(q, blocks, blocks, table, lengths, scale=1.0)


def experts(op: str, tokens: int, chosen: int, experts: int, columns: int, outputs: int, bits: int = 4):
    """A product with the experts that tokens choose: the first ones, whichever they are."""
    indices = mx.zeros((tokens, chosen), mx.uint32)
    matrix = mx.zeros((experts, outputs, columns * bits // 32), mx.uint32)
    scales = mx.zeros((experts, outputs, columns // 64), HALF)
    packed, options = (matrix, scales, scales), {"group_size": 64, "bits": bits}
    x = mx.zeros((tokens, 1, 1, columns), HALF)
    calls = {
        "gather_qmm": lambda: mm.gather_qmm(x, *packed, rhs_indices=indices, transpose=True, **options),
        "gather_swiglu": lambda: mm.gather_swiglu(x, packed, packed, rhs_indices=indices, **options),
    }
    return f"{op} {tokens}x{chosen}x{experts}x{columns}x{outputs} {bits}-bit", calls[op]


def routed(tokens: int, experts: int, chosen: int) -> tuple[str, Call]:
    logits = mx.zeros((tokens, experts), HALF)
    return f"route_top_k {tokens}x{experts} {chosen}", lambda: mm.route_top_k(logits, chosen)


def delta(
    steps: int, heads: int = 32, width: int = 128, gates_of_columns: bool = False, gates: mx.Dtype = mx.float32
) -> tuple[str, Call]:
    q, v = mx.zeros((1, steps, heads // 2, width), HALF), mx.zeros((1, steps, heads, width), HALF)
    g, beta = (mx.zeros((1, steps, heads, *more), gates) for more in ([width] * gates_of_columns, []))
    state = mx.zeros((1, heads, width, width))
    label = f"gated_delta_update {steps}x{heads}x{width}{' gates of columns' if gates_of_columns else ''}"
    label += " gates of a half type" * (gates == HALF)
    return label, lambda: mm.gated_delta_update(q, q, v, g, beta, state)


def state_space(steps: int) -> tuple[str, Call]:
    heads, rows, columns = 80, 64, 128
    x, b, head = mx.zeros((1, steps, heads, rows), HALF), mx.zeros((1, steps, 1, columns), HALF), mx.zeros((heads,))
    dt, state = mx.zeros((1, steps, heads)), mx.zeros((1, heads, rows, columns))
    return f"ssm_update {steps}x{heads}x{rows}x{columns}", lambda: mm.ssm_update(x, head, b, b, head, dt, head, state)


def sampled(rows: int, vocabulary: int, **options: float) -> tuple[str, Call]:
    logits, key = mx.zeros((rows, vocabulary), HALF), mx.random.key(0)
    named = "".join(f" {name}={value}" for name, value in options.items())
    return f"sample {rows}x{vocabulary}{named}", lambda: mm.sample(logits, key, **options)


def problems() -> dict[str, list[tuple[str, Call]]]:
    """By family."""
    return {
        "norm": [
            rows("rms_norm", 1, 4096), rows("rms_norm", 100, 4096), rows("rms_norm", 4096, 128),
            rows("rms_norm", 16, 8192), rows("softmax", 1, 131072), rows("softmax", 8, 131072),
            rows("softmax", 512, 40000), rows("softmax", 6, 16384, mx.float32),
        ],
        "matmul": [
            gemv(1, 1024, 4096), gemv(1, 4096, 64), gemv(4, 4096, 4096), gemv(8, 4096, 4096), gemv(16, 4096, 14336),
            gemv(1, 4096, 1024, transpose=False),
            quantized(1, 4096, 4096, 4), quantized(1, 4096, 128256, 4), quantized(2, 4096, 1024, 8),
            quantized(8, 4096, 4096, 4), quantized(16, 4096, 14336, 4), quantized(1, 4096, 1024, 4, transpose=False),
            quantized(17, 4096, 4096, 4), quantized(64, 4096, 14336, 8), quantized(65, 4096, 4096, 4),
            quantized(600, 4096, 4096, 4), quantized(2048, 14336, 4096, 4), quantized(32, 4096, 1024, 4),
            gated(1, 4096, 14336), gated(8, 4096, 14336), gated(512, 4096, 14336), gguf(1, 4096, 4096),
            masked(1, 4096, 4096), masked(512, 4096, 4096), masked(512, 4096, 4096, 32), masked(40, 64, 16, 64, True),
            masked(40, 63, 16),
        ],
        "attention": [
            attention(1, 1, 500), attention(1, 1, 4096), attention(1, 1, 20000), attention(8, 1, 4096),
            attention(1, 8, 4096), attention(1, 100, 1000), attention(1, 100, 1000, mx.float32),
            attention(1, 1, 4096, mx.float32), attention(1, 1, 4096, bits=4),
            attention(1, 1, 4096, key_heads=32, width=64),
            cascade(8, 256, 4096), cascade(2, 256, 20000), cascade(4, 64, 4096, queries=8), cascade(8, 10, 20),
            paged(1, 4096), paged(8, 4096), paged(8, 4096, bits=8), paged(2, 1024, queries=20),
        ],
        "moe": [
            experts("gather_qmm", 1, 8, 64, 2048, 1024), experts("gather_qmm", 8, 2, 8, 2048, 1024),
            experts("gather_qmm", 16, 8, 8, 2048, 1024), experts("gather_qmm", 1, 2, 8, 2048, 1024, bits=3),
            experts("gather_swiglu", 1, 8, 64, 2048, 768), experts("gather_swiglu", 4, 2, 8, 2048, 768),
            experts("gather_swiglu", 4, 2, 8, 2048, 768, bits=8), experts("gather_swiglu", 4, 2, 16, 2048, 768),
            experts("gather_qmm", 512, 8, 32, 768, 2048), experts("gather_swiglu", 512, 8, 32, 2048, 768),
            experts("gather_qmm", 40, 2, 8, 2048, 1024, bits=3), experts("gather_qmm", 40, 2, 8, 64, 12),
            routed(1, 128, 8), routed(64, 128, 8), routed(1, 32, 4),
        ],
        "recurrence": [
            delta(1), delta(8), delta(64), delta(1, gates_of_columns=True), delta(1, heads=8, width=64),
            delta(64, gates=HALF), delta(64, heads=8, gates=HALF),
            state_space(1), state_space(8), state_space(9),
        ],
        "sampling": [
            sampled(1, 151936, temperature=0.0), sampled(1, 151936, temperature=0.7),
            sampled(1, 151936, temperature=0.7, top_k=40, top_p=0.9), sampled(8, 32000, temperature=1.0, min_p=0.05),
            sampled(1, 1000, temperature=0.0), sampled(64, 32000, temperature=0.0),
        ],
    }  # fmt: skip


def decision(call: Call, gpu: str) -> str:
    """The launches of a call, without running any; or why it goes to mx."""
    reasons: list[str] = []

    def unless_for_mx() -> object:
        mm.stats(reset=True)
        result = call()
        reasons.extend(reason for op in mm.stats().values() for reason in op["mx"])
        return [] if reasons else result

    launches = planned_launches(unless_for_mx, gpu)
    if reasons:
        return f"mx: {reasons[0]}"
    size = lambda numbers: "x".join(str(n) for n in numbers)
    return "; ".join(f"{x['kernel']} {size(x['threadgroups'])} of {size(x['threads'])}" for x in launches)


def lines(family: str) -> Iterator[str]:
    for label, call in problems()[family]:
        yield f"{family}: {label}"
        yield from (f"  {gpu:<9}{decision(call, gpu)}" for gpu in GPUS)


def pinned() -> list[str]:
    return FILE.read_text().splitlines()


@pytest.mark.parametrize("family", ["norm", "matmul", "attention", "moe", "recurrence", "sampling"])
def test_decisions(native, lenient, family):
    known = pinned()
    of_family = [i for i, line in enumerate(known) if line.startswith(f"{family}: ")]
    last = next((i for i in range(of_family[-1] + 1, len(known)) if not known[i].startswith("  ")), len(known))
    assert [*lines(family)] == known[of_family[0] : last]


def test_small_and_large_gpus_differ(native):
    """An 8-core M1 shares keys and columns among fewer threadgroups than an Ultra of 80 cores."""
    for call in (attention(1, 1, 20000)[1], rows("softmax", 8, 131072)[1], gemv(1, 4096, 1024, False)[1]):
        assert decision(call, "m1") != decision(call, "m3-ultra")


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("dtype", [HALF, mx.float32])
@pytest.mark.parametrize("queries", [1, 2, 100])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_schedules_asked_for_by_name_have_kernels(native, ratio, queries, dtype, bits):
    """A calibration names a schedule for problems near the one that was measured, which may have no such kernel."""
    q, shape = mx.zeros((1, 2 * ratio, queries, 64), dtype), (1, 2, 300)
    scales = mx.zeros((*shape, 1), dtype)
    packed = (mx.zeros((*shape, 64 * bits // 32), mx.uint32), scales, scales)
    kv = mx.zeros((*shape, 64), dtype)

    def call():
        if bits:
            return mm.quantized_scaled_dot_product_attention(q, packed, packed, scale=1.0, group_size=64, bits=bits)
        return mm.scaled_dot_product_attention(q, kv, kv, scale=1.0)

    with mm.strict():
        for name in _ext.plan_schedules("scaled_dot_product_attention"):
            _ext.calibration_force((False, name, 0))
            try:
                for gpu in ("m2-max", "h200"):
                    for launch in decision(call, gpu).split("; "):
                        assert launch.split(" ")[0] in KERNELS, (name, gpu)
            finally:
                _ext.calibration_force(None)


def test_what_no_plan_is_for(native):
    with pytest.raises(ValueError, match="gpu is 'm9': expected one of apple, nvidia, h200, m1-7, m1"):
        gpus.named("m9")


@pytest.mark.parametrize(
    "name, architecture, cores, expected",
    [
        ("Apple M2 Max", "applegpu_g14s", 38, ("m2-max", 14, "max", 38)),
        ("Apple M2 Max", "applegpu_g14s", 30, ("m2-max-30", 14, "max", 30)),
        ("Apple M2 Max", "applegpu_g14s", None, ("m2-max", 14, "max", 38)),
        ("Apple M1", "applegpu_g13g", 8, ("m1", 13, "base", 8)),
        ("Apple M3 Ultra", "applegpu_g15d", 80, ("m3-ultra", 15, "ultra", 80)),
        ("Apple M4 Max", "applegpu_g16s", 36, ("Apple M4 Max", 16, "max", 36)),
        ("Apple M7 Max", "applegpu_g19s", 44, ("Apple M7 Max", 19, "max", 44)),
        ("Apple M6", "applegpu_g18g", None, ("Apple M6", 18, "base", 10)),
        ("Apple Paravirtual device", "applegpu_g13g", None, ("Apple Paravirtual device", 13, "base", 8)),
        ("", "", None, ("", 17, "base", 10)),
    ],
)
def test_the_gpu_of_a_mac(name, architecture, cores, expected):
    """Known chips by name and cores; chips newer than the table by their architecture."""
    gpu = gpus.of_mac(name, architecture, cores)
    assert (gpu.name, gpu.generation, gpu.tier, gpu.cores) == expected
    assert gpu.vendor == "apple" and (gpu.bandwidth_GBps > 0) == (gpu.name in gpus.names() or "M4" in name)
    assert gpu.caches_registers == (gpu.generation >= 15)


def main() -> None:
    parser = argparse.ArgumentParser(description="The decisions of the plans.")
    parser.add_argument("--write", action="store_true", help=f"to {FILE.name}, which a test compares")
    os.environ["MLX_ENABLE_TF32"] = "0"  # as the tests have it
    text = "\n".join(line for family in problems() for line in lines(family)) + "\n"
    FILE.write_text(text) if parser.parse_args().write else print(text, end="")


if __name__ == "__main__":
    main()
