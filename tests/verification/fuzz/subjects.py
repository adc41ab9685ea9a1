"""The subjects of the fuzzer: each op, and combinations that no single op has."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from verification.fuzz import attention, cache, experts, layer_inputs, modes, norms, products, recurrences, token_layers
from verification.fuzz.aliasing import aliasing
from verification.fuzz.bad_input import bad_input
from verification.fuzz.blocks import block_bytes
from verification.fuzz.case import Case
from verification.fuzz.draw import Draw
from verification.fuzz.growing import growing_caches
from verification.fuzz.memory import PROGRAMS, memory
from verification.fuzz.patched import patched_errors
from verification.fuzz.sampling import sample
from verification.fuzz.threads import threads
from verification.fuzz.trial import Trial

import mlx_mittens as mm

mx.set_default_device(mx.cpu)

# Whose GPUs the simulator stands for; None where native code runs.
EXECUTORS = {"native": None, "apple": "apple", "nvidia": "nvidia"}


def _of_op(draw_case: Callable[[Draw], Case]) -> Callable[[Draw], Trial]:
    def draw_trial(draw: Draw) -> Trial:
        case = draw_case(draw)
        mode = modes.draw_mode(draw, case)
        return Trial(mode, case.text, lambda: modes.run(case, mode, draw))

    return draw_trial


OPS: dict[str, Callable[[Draw], Trial]] = {
    function.__name__: _of_op(function)
    for function in (
        norms.rms_norm,
        norms.layer_norm,
        norms.softmax,
        norms.add_rms_norm,
        norms.norm_add_norm,
        norms.qk_norm,
        norms.softcap,
        products.gemv,
        products.matmul,
        products.quantized_matmul,
        products.quantized_matmuls,
        products.quantized_embedding,
        products.block_masked_mm,
        products.quantized_swiglu,
        products.block_matmul,
        experts.gather_qmm,
        experts.gather_mm,
        experts.gather_swiglu,
        experts.gather_sum,
        experts.mixture,
        experts.route_top_k,
        attention.scaled_dot_product_attention,
        attention.quantized_scaled_dot_product_attention,
        attention.cascade_attention,
        attention.paged_attention,
        attention.index_scores,
        cache.rope_append,
        cache.paged_append,
        cache.take_tokens,
        cache.quantized_rope_append,
        layer_inputs.gated_delta_inputs,
        layer_inputs.ssm_inputs,
        recurrences.gated_delta_token,
        token_layers.short_conv_token,
        token_layers.ssm_token,
        recurrences.gated_delta_update,
        recurrences.ssm_update,
    )
}
SUBJECTS = {
    **OPS,
    "sample": sample,
    "block_bytes": block_bytes,
    "bad_input": bad_input,
    "patched_errors": patched_errors,
    "aliasing": aliasing,
    "growing_caches": growing_caches,
    "heads_of_latents": cache.heads_of_latents,
    "threads": threads,
    "memory": memory,
}
NATIVE_ONLY = ("patched_errors", "threads", "memory")

# How many cases of an op take as long as one of these: mx compiles the time steps of each shape, or its quantization.
COST = {"ssm_update": 6, "quantized_rope_append": 6, "growing_caches": 6, "threads": 100, "memory": 1000}

# Cases that it takes to cover each kind.
FEWEST = {"threads": 2, "memory": len(PROGRAMS)}


def cases_of(subject: str, cases: int) -> int:
    """How many cases of a subject stand for `cases` of an op."""
    return max(FEWEST.get(subject, 1), cases // COST.get(subject, 1))


def executors_of(subject: str) -> tuple[str, ...]:
    return ("native",) if subject in NATIVE_ONLY else tuple(EXECUTORS)


def draw_trial(subject: str, executor: str, seed: int, index: int) -> Trial:
    """A case, drawn but not run."""
    with np.errstate(all="ignore"):
        return SUBJECTS[subject](Draw.of(subject, EXECUTORS[executor], seed, index))


def run_trial(trial: Trial, executor: str, index: int) -> str | None:
    """Runs a case; returns its fault, which may be an unexpected exception."""
    gpu = EXECUTORS[executor]
    simulated = mm.simulator.enabled(seed=index % 7, gpu=gpu) if gpu else contextlib.nullcontext()
    try:
        with np.errstate(all="ignore"), simulated:
            return trial.run()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{type(error).__name__}: {error} ({frames[-1].name}, line {frames[-1].lineno})"
