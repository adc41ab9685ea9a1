"""Whole models in a block of `predicted`: our launches, MLX's launches, and operations that are left out."""

import contextlib
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_mittens as mm
from mlx_mittens import frontend
from mlx_mittens.apple import agx_compiler
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.cli import predicted_models
from mlx_mittens.prediction import mlx_launches
from mlx_mittens.prediction.mlx_graph import Array, Operation, Recorder
from mlx_mittens.simulator import EstimatedLaunch
from tests.helpers import tiny

problem = frontend.compiler_problem() or agx_compiler.problem()
pytestmark = pytest.mark.skipif(bool(problem), reason=problem)


def token(patched, layers=2, name="llama-3.2-1b", dtype=mx.float16):
    """The launches of one token of a tiny model with 4-bit weights, after a prompt of two and a token."""
    model = tiny.build(name, dtype, bits=4, num_hidden_layers=layers)
    cache = make_prompt_cache(model)
    for tokens in ([1, 2], [3]):
        mx.eval(model(mx.array([tokens]), cache=cache))
    with mm.patched() if patched else contextlib.nullcontext():
        with mm.simulator.enabled(), mm.simulator.predicted("m2-max", peer="metal") as launches:
            mx.eval(model(mx.array([[4]]), cache=cache))
    return launches


def names(launches):
    return Counter(one.name if isinstance(one, EstimatedLaunch) else one.launch.kernel for one in launches)


def starting(counts, words):
    return sum(count for name, count in counts.items() if name.startswith(words))


def test_a_token_of_a_model_is_predicted_as_mlx_launches_it():
    """A layer has 7 products, 2 norms, 2 rotations, 2 copies into the cache, attention, SwiGLU and 2 sums."""
    launches = token(patched=False)
    counts = names(launches)
    assert starting(counts, "affine_qmv") == 2 * 7 + 1
    assert starting(counts, "sdpa_vector") == 2
    assert counts["mx.fast.rms_norm"] == 2 * 2 + 1
    assert (counts["mx.fast.rope"], counts["SliceUpdate"], counts["Add"], starting(counts, "Compiled")) == (4, 4, 4, 2)
    assert counts["Gather"] == 3 and counts["mx.dequantize"] == 1  # the embedding
    assert len(launches) == 2 * 17 + 6 and not launches.left_out
    assert launches.total.microseconds > sum(one.prediction.microseconds - 2.5 for one in launches)
    text = str(launches)
    assert "40 launches one after another" in text and "estimated from bytes" in text and "Predicted, not" in text
    assert len(launches.on(find_chip("m4-max"))) == 40
    assert launches.on(find_chip("m4-max")).total.microseconds != launches.total.microseconds


def test_the_patched_model_is_predicted_beside_it():
    launches = token(patched=True)
    counts = names(launches)
    assert starting(counts, "quantized_matmul_") == 2 * 2 + 1
    assert starting(counts, "quantized_matmuls_") == starting(counts, "quantized_swiglu") == 2
    assert starting(counts, "rope_append") == starting(counts, "attention_decode") == 2
    assert starting(counts, "quantized_matmul_sum") == 3  # with the norms between products
    assert starting(counts, "rms_norm") + starting(counts, "add_rms_norm") == 2
    assert starting(counts, "quantized_embedding") == 1
    assert not {name for name in counts if name[0].isupper() or name.startswith("mx.")}
    assert not launches.left_out and len(launches) == 16


def test_norms_that_add_one_to_their_weights_are_part_of_the_append():
    """Gemma 3 norms heads of queries and keys, over rotating caches in all layers but one."""
    counts = names(token(patched=True, name="gemma-3-1b", dtype=mx.bfloat16))
    assert starting(counts, "rope_append_normed") == 2
    assert counts["Add"] == 0 and counts["AsType"] <= 1  # from the embedding's scale


def test_a_layer_more_takes_as_many_launches_and_as_much_time_more():
    one, two, three = (token(patched=False, layers=n) for n in (1, 2, 3))
    assert len(three) - len(two) == len(two) - len(one) == 17
    more, before = three.total.microseconds - two.total.microseconds, two.total.microseconds - one.total.microseconds
    assert more == pytest.approx(before, rel=1e-6)


def test_a_model_whose_caches_its_configuration_counts(monkeypatch):
    """Mamba 2 has as many as layers there, not as the body has: a layer more has a state of its own."""
    monkeypatch.setattr(predicted_models, "CONTEXT", 4)
    model = tiny.build("mamba2-2.7b", mx.float16, bits=4, num_hidden_layers=1)
    with mm.patched():
        short = predicted_models.token(model, find_chip("m1"))
        whole = predicted_models.token(model, find_chip("m1"), is_short=False)
    assert len(short.whole) - len(short.ends) == 4  # two products, one with the norm before it, and two between
    assert len(whole.whole) == len(whole.ends) == len(short.ends)


def test_a_model_that_goes_through_layers_and_their_kinds_side_by_side(monkeypatch):
    """gpt-oss has windows in every other layer: layers that are there twice have their launches twice."""
    monkeypatch.setattr(predicted_models, "CONTEXT", 4)
    model = tiny.build("gpt-oss-20b", mx.float16, bits=4, num_hidden_layers=2)
    kinds = model.model.layer_types
    with mm.patched():
        short = predicted_models.token(model, find_chip("m1"))
    counts = [names(launches) for launches in (short.ends, short.whole)]
    once, twice = (starting(each, "attention_") for each in counts)
    assert twice == 2 * once > 0
    assert model.model.layer_types is kinds


def predicted(function, *arrays, **options):
    mx.eval(arrays)
    with mm.simulator.predicted("m2-max", peer="metal", **options) as launches:
        mx.eval(function(*arrays))
    return launches


def test_functions_are_what_they_were_after_the_block():
    before = mx.eval, mx.fast.rms_norm, mx.dequantize, mx.array.item, mx.array.__bool__, mx.async_eval
    with mm.patched():
        wrapper = mx.fast.rope
        parts = wrapper.attempt, wrapper.original
        predicted(lambda x: x + 1, mx.ones((8,)))
        assert mx.fast.rope is wrapper and (wrapper.attempt, wrapper.original) == parts
    assert before == (mx.eval, mx.fast.rms_norm, mx.dequantize, mx.array.item, mx.array.__bool__, mx.async_eval)


def test_a_map_is_limited_by_the_bytes_that_it_moves():
    """16 MB each way through the 409.6 GB/s of an M2 Max, where 93 % is reached; the scalar is read once."""
    (launch,) = predicted(lambda x: x * 3, mx.ones((1 << 22,)))
    assert launch.name == "Multiply" and launch.prediction.limit == "device memory"
    assert launch.prediction.microseconds == pytest.approx(2 * 4 * (1 << 22) / (0.926 * 409.6e3) + 2.5, rel=0.05)


def test_views_are_no_launches_and_what_they_scatter_is_a_copy():
    x = mx.ones((4, 8, 16))
    assert not predicted(lambda x: x.reshape(32, 16)[3:5, None], x)
    (launch,) = predicted(lambda x: x.transpose(1, 0, 2).reshape(32, 16), x)
    assert launch.name == "Reshape (copy)" and launch.work.lines == 2 * 4 * 8 * 16 * 4 / 128
    assert not predicted(lambda x: x[:1].transpose(1, 0, 2).reshape(8, 16), x)  # an axis of one
    assert not predicted(lambda x: x[..., 4:8].reshape(4, 2, 4, 2, 2)[..., 0], x)  # axes that are split
    (launch,) = predicted(lambda x: x[..., 4:8].reshape(4, 2, 4, 2, 2).reshape(32, 4), x)
    assert launch.name == "Reshape (copy)"


def test_products_are_mlx_own_kernels_where_they_are_known():
    x, w = mx.ones((1, 256), mx.float16), mx.ones((64, 256), mx.float16)
    (launch,) = predicted(lambda x, w: x @ w.T, x, w)
    assert launch.launch.kernel.startswith("gemv_half") and launch.work.lines >= 64 * 256 * 2 / 128
    (turned,) = predicted(lambda x, w: x @ w, x, mx.ones((256, 64), mx.float16))
    assert turned.launch.kernel.startswith("gemv_t_half")
    (product,) = predicted(lambda x, w: x @ w.T, mx.ones((512, 256), mx.float16), w)
    assert isinstance(product, EstimatedLaunch) and product.work.instructions.matrix == 512 * 256 * 64 / 512


def test_attention_with_sinks_is_one_kernel():
    q, k, sinks = mx.ones((1, 4, 1, 64), mx.float16), mx.ones((1, 2, 48, 64), mx.float16), mx.ones((4,), mx.float16)
    attend = lambda q, k, sinks: mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, sinks=sinks)  # fmt: skip
    (launch,) = predicted(attend, q, k, sinks)
    assert launch.launch.kernel.startswith("sdpa_vector")


def test_a_convolution_of_each_channel_is_estimated():
    x, w = mx.ones((1, 4, 256), mx.float16), mx.ones((256, 4, 1), mx.float16)
    (launch,) = predicted(lambda x, w: mx.conv1d(x, w, groups=256), x, w)
    assert launch.name == "Convolution" and launch.work.lines == (x.nbytes + w.nbytes + 512) / 128


def test_what_no_launch_is_known_for_is_left_out_by_name():
    launches = predicted(lambda x: mx.linalg.inv(x, stream=mx.cpu) + mx.fft.fft(x).real, mx.eye(4))
    assert launches.left_out == {"Inverse": 1, "FFT": 1}
    assert "left out: FFT, 1 time\n" in str(launches)
    assert {one.name for one in launches} >= {"Add", "Real"}


def test_many_operations_are_known():
    x, at = mx.ones((4, 8)), mx.array([0, 1])

    def many(x, at):
        found = [x.view(mx.int32), mx.cumsum(x), mx.cumprod(x), mx.sort(x), mx.argsort(x), mx.argmax(x), mx.max(x, 0)]
        found += [mx.logsumexp(x), x.at[at].add(x[:2]), mx.pad(x, 1), mx.topk(x, 2), mx.random.categorical(x)]
        found += [mx.take_along_axis(x, at[:1, None], 1), mx.concatenate([x, x]), mx.where(x > 0, x, 1), x.all()]
        return [*found, mx.put_along_axis(x, mx.zeros((4, 1), mx.int32), x[:, :1], 1), mx.var(x), mx.tri(4)]

    launches = predicted(many, x, at)
    assert not launches.left_out and len(launches) > 20
    assert not predicted(lambda x: x.view(mx.int32), x)


def test_our_ops_outside_of_the_simulator_are_left_out_by_name():
    launches = predicted(lambda x: mm.softmax(x, axis=-1, stream=mx.cpu), mx.ones((2, 64)))
    assert not launches and sum(launches.left_out.values()) == 1
    assert "outside of mm.simulator.enabled()" in str(launches)


def test_values_that_python_asks_for_are_evaluations():
    x = mx.ones((2, 64))
    with mm.simulator.predicted("m1", peer="metal") as launches:
        assert (x + 1).sum().item() == 256 and (x[0] * 2).tolist()[0] == 2
        norm = nn.RMSNorm(64)
        mx.async_eval(norm(x))
        if (x[0, 0] > 0) and float(x[0, 1] - 1) == 0:
            pass
    counts = names(launches)
    once = ("Add", "Sum", "Multiply", "mx.fast.rms_norm", "Greater", "Subtract")
    assert {name: counts[name] for name in once} == dict.fromkeys(once, 1)


def test_arrays_in_lists_are_inputs_and_are_not_evaluated(monkeypatch):
    monkeypatch.setattr(mx.fast, "rope", lambda a, dims, freqs: a * freqs[1][0])
    with Recorder() as recorder:
        y = mx.fast.rope(mx.ones(4), 2, freqs=(3, [mx.exp(mx.zeros(4))]))
        assert not recorder.evaluations
        mx.eval(y)
    *_, made, call = recorder.evaluations[0][0]
    assert (made.name, call.name) == ("Exp", "mx.fast.rope")
    assert call.arguments == ("a", "freqs[0]") and len(call.inputs) == 2
    assert dict(call.options) == {"1": "2", "freqs": "(3, ['array'])"}


def test_primitives_of_a_gpu_are_estimated_too():
    """Where mx's device is a GPU, functions of mx.fast are primitives of their own."""
    rows = Array((512, 4096), "float16", 2)
    for name in ("RMSNorm", "LayerNorm", "RoPE", "ScaledDotProductAttention", "Quantize"):
        (estimate,) = mlx_launches.plan(Operation(name, (), (rows,), (rows,)), [])
        assert estimate.work.lines == 2 * 512 * 4096 * 2 / 128, name


def test_another_peer_is_refused():
    with pytest.raises(ValueError, match="peer is 'cuda': expected 'metal'"):
        mm.simulator.predicted("m1", peer="cuda")
