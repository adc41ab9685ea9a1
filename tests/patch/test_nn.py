"""Drop-in modules, and the conversion of a model to them."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.tolerances import SUMS
from mlx.utils import tree_flatten

import mlx_mittens as mm

PAIRS = [
    ("rms_norm", lambda: nn.RMSNorm(64), mm.nn.RMSNorm),
    ("layer_norm", lambda: nn.LayerNorm(64), mm.nn.LayerNorm),
    ("layer_norm", lambda: nn.LayerNorm(64, affine=False), mm.nn.LayerNorm),
    ("layer_norm", lambda: nn.LayerNorm(64, bias=False), mm.nn.LayerNorm),
    ("gemv", lambda: nn.Linear(64, 48), mm.nn.Linear),
    ("gemv", lambda: nn.Linear(64, 48, bias=False), mm.nn.Linear),
    ("quantized_matmul", lambda: nn.QuantizedLinear(64, 48, group_size=32, bits=8), mm.nn.QuantizedLinear),
    ("quantized_matmul", lambda: nn.QuantizedLinear(64, 48, bias=False), mm.nn.QuantizedLinear),
]
EMBEDDINGS = [
    ("gemv", lambda: nn.Embedding(48, 64), mm.nn.Embedding),
    ("quantized_matmul", lambda: nn.QuantizedEmbedding(48, 64), mm.nn.QuantizedEmbedding),
]


def randomised(module, rng):
    """Norms start as ones and zeros, which would hide a weight that is not used."""
    for name in ("weight", "bias"):
        if name in module and module[name].dtype == mx.float32:
            module[name] = mx.array(rng.normal(size=module[name].shape).astype(np.float32))
    return module


@pytest.mark.parametrize("op, make, ours", PAIRS)
def test_a_module_takes_over_its_twin(rng, op, make, ours):
    twin = randomised(make(), rng)
    x = mx.array(rng.normal(size=(2, 3, 64)).astype(np.float32))
    expected = np.array(twin(x))
    weights = dict(tree_flatten(twin.parameters()))

    module = mm.nn.convert(twin)
    mm.stats(reset=True)
    result = np.array(module(x))

    assert module is twin and type(module) is ours and isinstance(module, type(make()))
    assert all(value is weights[name] for name, value in tree_flatten(module.parameters()))
    assert sum(mm.stats()[op]["kernels"].values()) == 1 and list(mm.stats()) == [op]
    np.testing.assert_allclose(result, expected, rtol=SUMS, atol=SUMS)


@pytest.mark.parametrize("op, make, ours", EMBEDDINGS)
def test_embeddings_as_linear(rng, op, make, ours):
    twin = make()
    x = mx.array(rng.normal(size=(2, 64)).astype(np.float32))
    expected, rows = np.array(twin.as_linear(x)), np.array(twin(mx.array([3, 5])))
    module = mm.nn.convert(twin)
    mm.stats(reset=True)
    np.testing.assert_allclose(np.array(module.as_linear(x)), expected, rtol=SUMS, atol=SUMS)
    assert list(mm.stats()) == [op] and type(module) is ours
    np.testing.assert_array_equal(np.array(module(mx.array([3, 5]))), rows)


@pytest.mark.parametrize("op, make, ours", PAIRS)
def test_modules_of_ones_own(rng, op, make, ours):
    arguments = {mm.nn.Linear: (64, 48), mm.nn.QuantizedLinear: (64, 48)}.get(ours, (64,))
    y = ours(*arguments)(mx.array(rng.normal(size=(1, 64)).astype(np.float32)))
    assert y.shape == (1, arguments[-1])


def test_quantizing_a_converted_model_keeps_it_ours(rng):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 64)
            self.layers = [nn.Linear(64, 64) for _ in range(2)]

    model = mm.nn.convert(Model())
    nn.quantize(model)
    assert type(model.embed) is mm.nn.QuantizedEmbedding
    assert all(type(layer) is mm.nn.QuantizedLinear for layer in model.layers)


def test_shared_and_frozen_modules_stay_so(rng):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = self.a
            self.b.freeze()

    model = mm.nn.convert(Model())
    assert model.a is model.b and type(model.a) is mm.nn.Linear and not model.trainable_parameters()["a"]


def test_modules_of_other_classes_are_left_alone(rng):
    class Scaled(nn.RMSNorm):
        def __call__(self, x):
            return 2 * super().__call__(x)

    x = mx.array(rng.normal(size=(1, 64)).astype(np.float32))
    module = Scaled(64)
    expected = np.array(module(x))
    assert type(mm.nn.convert(module)) is Scaled
    np.testing.assert_array_equal(np.array(module(x)), expected)


@pytest.mark.parametrize("given, found", [
    (None, "None"), ((nn.Linear(8, 8), "tokenizer"), "a tuple"), ([], "a list"), (nn.Linear, "a type")
], ids=str)  # fmt: skip
def test_what_is_no_module_is_not_converted(given, found):
    with pytest.raises(TypeError, match=rf"\[convert\] model is {found}: expected an mlx\.nn\.Module, as the first"):
        mm.nn.convert(given)
