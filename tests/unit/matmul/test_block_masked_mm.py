"""Products with masked blocks: the tiles and the kernels of one row, and their composition elsewhere."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import SUMS, assert_near, assert_product_right, of_product

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.specs import Exact, widen

MASKS = ("mask_out", "mask_lhs", "mask_rhs")


def whole(mask, block_size, shape):
    """A mask for each element, in float64."""
    wide = np.repeat(np.repeat(np.asarray(mask, np.float64), block_size, -2), block_size, -1)
    return wide[..., : shape[-2], : shape[-1]]


def blocks(size, block_size):
    return -(-size // block_size)


def draw_mask(rng, shape, dtype, numbers):
    mask = rng.random(shape) < 0.6
    return mx.array((mask * rng.uniform(0.5, 2, shape)).astype(np.float32)).astype(dtype) if numbers else mx.array(mask)


def exact(a, b, block_size, masks):
    """In float64; masked blocks are left out, whatever they hold."""
    a, b = widen(a), widen(b)
    shape = *np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]
    shapes = {"mask_out": shape, "mask_lhs": a.shape, "mask_rhs": b.shape}
    of = {name: whole(widen(mask), block_size, shapes[name]) for name, mask in masks.items()}
    a = np.where(of.get("mask_lhs", 1) != 0, a, 0) * of.get("mask_lhs", 1)
    b = np.where(of.get("mask_rhs", 1) != 0, b, 0) * of.get("mask_rhs", 1)
    y, size = a @ b, np.sqrt(np.square(a) @ np.square(b))
    out = of.get("mask_out", np.ones(()))
    return Exact(np.where(out != 0, y, 0) * out, np.where(out != 0, size, 0) * np.abs(out))


def draw(rng, dtype, rows, columns, outputs, block_size, transpose, numbers, batches=((), ()), given=MASKS):
    """Both arrays and the masks; batches: of a and of b, whose masks have them too."""
    of_a, of_b = batches
    a = mx.array(rng.standard_normal((*of_a, rows, columns)).astype(np.float32)).astype(dtype)
    b = mx.array(
        rng.standard_normal((*of_b, *((outputs, columns) if transpose else (columns, outputs)))).astype(np.float32)
    ).astype(dtype)
    m, k, n = (blocks(size, block_size) for size in (rows, columns, outputs))
    shapes = {"mask_out": (m, n), "mask_lhs": (*of_a, m, k), "mask_rhs": (*of_b, k, n)}
    masks = {name: draw_mask(rng, shapes[name], dtype, numbers) for name in given}
    return a, b.swapaxes(-1, -2) if transpose else b, masks


def check(rng, dtype, *sizes, **options):
    a, b, masks = draw(rng, dtype, *sizes, **options)
    y = mm.block_masked_mm(a, b, sizes[3], **masks)
    found = exact(a, b, sizes[3], masks)
    assert y.shape == found.value.shape and y.dtype == dtype
    assert_product_right(y, found, dtype)


@pytest.fixture(params=[("m1", 1), ("m4-max", 2)])
def kernels(native, request):
    """The kernels, in two orders of threads; a call gives the launches."""
    gpu, seed = request.param
    with mm.simulator.enabled(seed=seed, gpu=gpu), mm.strict():
        _ext.simulator_record(True)
        yield lambda: [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows, columns, outputs, block_size", [(33, 136, 88, 32), (70, 136, 88, 64), (2, 8, 16, 64)])
def test_tiles(rng, dtype, kernels, rows, columns, outputs, block_size, transpose, numbers):
    """Tails of rows, columns and outputs, and of blocks."""
    check(rng, dtype, rows, columns, outputs, block_size, transpose, numbers)
    assert len(launched := kernels()) == 1 and ("columns" in launched[0]) != transpose
    assert "tiles" in launched[0] and ("scaled" in launched[0]) == numbers


@pytest.mark.parametrize("rows, tile", [(32, "32x64"), (40, "32x64"), (1024, "64x64")])
def test_rows_of_a_tile(rng, kernels, rows, tile):
    check(rng, mx.float16, rows, 8, 1280 if rows > 64 else 16, 64, True, False)
    assert kernels() == [f"block_masked_mm_tiles_{tile}_float16"]


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("columns, outputs, block_size", [(8, 8, 32), (1096, 72, 64), (520, 200, 32)])
def test_one_row(rng, dtype, kernels, columns, outputs, block_size, transpose, numbers):
    check(rng, dtype, 1, columns, outputs, block_size, transpose, numbers)
    assert len(launched := kernels()) == 1 and "row" in launched[0]


@pytest.mark.parametrize("outputs", [1, 3, 5])
def test_few_outputs_of_one_row(rng, dtype, kernels, outputs):
    check(rng, dtype, 1, 72, outputs, 32, True, False)


@pytest.mark.parametrize("transpose", [True, False])
def test_one_column(rng, dtype, kernels, transpose):
    """Of the transpose it is a row."""
    check(rng, dtype, 100, 136, 1, 64, transpose, True)
    assert "row" in kernels()[-1]


@pytest.mark.parametrize("batches", [((2,), ()), ((), (3,)), ((2,), (2,)), ((2, 1), (3,)), ((1, 3), (2, 1))])
@pytest.mark.parametrize("rows, transpose", [(33, True), (33, False), (1, True), (1, False)])
def test_batches(rng, kernels, rows, transpose, batches):
    check(rng, mx.float16, rows, 72, 40, 32, transpose, True, batches=batches)


@pytest.mark.parametrize("given", [("mask_out",), ("mask_lhs",), ("mask_rhs",), ("mask_out", "mask_rhs")])
def test_some_masks(rng, executor, given):
    check(rng, mx.float32, 40, 72, 48, 32, True, False, given=given)


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_what_is_masked_out_is_not_read(rng, kernels, dtype, rows, numbers):
    """NaN and infinity there do not pass, as they do not in mx's kernels."""
    a, b, masks = draw(rng, dtype, rows, 136, 72, 32, True, numbers)
    masks["mask_lhs"][:, 1], masks["mask_lhs"][:, 0] = 0, 1
    masks["mask_rhs"][2, 0] = masks["mask_out"][:, 1] = 0
    masks["mask_rhs"][0], masks["mask_out"][:, 0] = 1, 1
    a[0, 40], b[70, 3], b[3, 40] = mx.nan, mx.inf, mx.nan  # the last is of outputs that are masked out
    y = mm.block_masked_mm(a, b, 32, **masks)
    a[0, 40], b[70, 3], b[3, 40] = 0, 0, 0
    assert_product_right(y, exact(a, b, 32, masks), dtype)


def test_nan_and_infinity_pass_elsewhere(rng, executor):
    a, b, masks = draw(rng, mx.float32, 40, 72, 40, 32, False, False)
    masks = {name: mx.ones_like(mask) for name, mask in masks.items()}
    a[3, 5], a[7, 70] = mx.nan, mx.inf
    y = np.array(mm.block_masked_mm(a, b, 32, **masks))
    assert np.isnan(y[3]).all() and np.isinf(y[7]).all()
    assert np.isfinite(np.delete(y, [3, 7], 0)).all()


def test_float16_overflows_once(rng, kernels):
    """Sums and products with masks are in float32: only the result may be infinite."""
    a, b = mx.full((40, 64), 200, mx.float16), mx.full((64, 48), 200, mx.float16)
    half, many = mx.array([[0.0001]], mx.float16), mx.array([[1.0]], mx.float16)
    y = mm.block_masked_mm(a, b, 64, half, many)
    assert_near(y, np.full((40, 48), 200 * 200 * 64 * float(half[0, 0])), "product", of_product(mx.float16))
    assert mx.isinf(mm.block_masked_mm(a, b, 64, None, many)).all()


def test_result_masked_out_is_zero(rng, dtype, kernels):
    a, b, masks = draw(rng, dtype, 70, 72, 80, 64, True, False)
    masks["mask_out"] = mx.zeros_like(masks["mask_out"])
    assert not mm.block_masked_mm(a, b, 64, **masks).any()


def test_strided_views(rng, kernels):
    """Of masks, and of arrays whose rows are not contiguous in memory."""
    a, b, masks = draw(rng, mx.float16, 66, 144, 80, 32, False, False)
    views = {name: mx.stack([mask, mask], -1)[..., 0] for name, mask in masks.items()}
    y = mm.block_masked_mm(mx.stack([a, a], -1)[..., 1], mx.stack([b, b], -1)[..., 0], 32, **views)
    assert_product_right(y, exact(a, b, 32, masks), mx.float16)


def test_masks_of_several_types(rng, kernels):
    """Masks of operands are of one type in the kernels, the result's may be of another."""
    a, b, masks = draw(rng, mx.bfloat16, 40, 72, 40, 32, True, True)
    for other in ("mask_out", "mask_lhs"):
        some = {**masks, other: masks[other] != 0}
        assert_product_right(mm.block_masked_mm(a, b, 32, **some), exact(a, b, 32, some), mx.bfloat16)


@pytest.mark.parametrize("shape_of_a, shape_of_b", [((72,), (72, 40)), ((40, 72), (72,)), ((72,), (72,))])
def test_vectors(rng, executor, shape_of_a, shape_of_b):
    a, b = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in (shape_of_a, shape_of_b))
    m, n = ([2] if array.ndim > 1 else [] for array in (a, b))
    masks = {"mask_out": mx.ones([*m, *n]) * 2, "mask_lhs": mx.array([1.0, 0, 3]), "mask_rhs": mx.ones([3, *n])}
    y = mm.block_masked_mm(a, b, 32, **masks)
    assert_near(y, mx.block_masked_mm(a, b, 32, **masks, stream=mx.cpu), "product")


@pytest.mark.parametrize("numbers", [False, True])
def test_gradients(rng, executor, numbers):
    a, b, masks = draw(rng, mx.float32, 40, 72, 48, 32, True, numbers, batches=((2,), ()))
    wide = {"mask_out": (40, 48), "mask_lhs": (40, 72), "mask_rhs": (72, 48)}

    def ours(a, b, *masks):
        return mm.block_masked_mm(a, b, 32, *masks).square().sum()

    def composed(a, b, *masks):
        of = [
            mx.repeat(mx.repeat(mask.astype(mx.float32), 32, -2), 32, -1)[..., : shape[0], : shape[1]]
            for mask, shape in zip(masks, wide.values())
        ]
        return (((a * of[1]) @ (b * of[2])) * of[0]).square().sum()

    arrays = [a, b, *masks.values()]
    argnums = list(range(5 if numbers else 2))
    for y, right in zip(mx.grad(ours, argnums)(*arrays), mx.grad(composed, argnums)(*arrays)):
        assert_near(y, right, "gradient", SUMS)


def test_of_second_order(rng, executor):
    a, b, masks = draw(rng, mx.float32, 40, 40, 40, 32, False, True)
    product = lambda a, b: mm.block_masked_mm(a, b, 32, **masks).square().sum()
    second = mx.grad(lambda a, b: mx.grad(product)(a, b).square().sum(), argnums=1)(a, b)
    masks_of_mx = [whole(widen(masks[name]), 32, (40, 40)).astype(np.float32) for name in MASKS]
    out, lhs, rhs = map(mx.array, masks_of_mx)
    composed = lambda a, b: (((a * lhs) @ (b * rhs)) * out).square().sum()
    assert_near(second, mx.grad(lambda a, b: mx.grad(composed)(a, b).square().sum(), argnums=1)(a, b), "gradient")


@pytest.mark.parametrize("columns, outputs", [(70, 40), (72, 8)])
def test_what_kernels_do_not_cover(rng, dtype, columns, outputs):
    """Columns that are not whole 16 bytes, and fewer outputs than a simdgroup has, are mx's, where it has the type."""
    a, b, masks = draw(rng, dtype, 40, columns, outputs, 32, False, False)
    columns_fit = columns * dtype.size % 16 == 0
    with mm.simulator.enabled(gpu="m1"), mm.strict(False):
        y = mm.block_masked_mm(a, b, 32, **masks)
        assert_product_right(y, exact(a, b, 32, masks), dtype)
    with mm.simulator.enabled(gpu="m1"), mm.strict():
        reason = "fewer than 16 outputs" if columns_fit else "columns that are not whole 16 bytes"
        with pytest.raises(RuntimeError, match=reason):
            mm.block_masked_mm(a, b, 32, **masks)


def test_without_masks_it_is_a_product(rng):
    a, b, _ = draw(rng, mx.float32, 5, 8, 6, 32, False, False, given=())
    with mm.strict(False):
        assert_near(mm.block_masked_mm(a, b), a @ b, "product")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((4, 8), (8, 4), 16, (1, 1)), r"block_size is 16: expected 32 or 64"),
        (((4, 8), (9, 4), 32, (1, 1)), r"a has 8 columns, b has shape \(9,4\): expected 9 columns"),
        (((), (9, 4), 32, (1, 1)), r"a has no dimensions"),
        (((40, 8), (8, 4), 32, (1, 1, 2)), r"mask_out has shape \(1,1,2\)"),
        (((40, 8), (8, 4), 32, (3, 1)), r"mask_out has shape \(3,1\): expected one that broadcasts to \(2,1\)"),
    ],
)
def test_bad_input(arguments, message):
    a, b, block_size, mask = arguments
    with pytest.raises(ValueError, match=message):
        mm.block_masked_mm(mx.ones(a), mx.ones(b), block_size, mx.ones(mask))


def test_bad_types():
    with pytest.raises(TypeError, match="a has dtype int32"):
        mm.block_masked_mm(mx.ones((4, 8), mx.int32), mx.ones((8, 4), mx.int32), 32, mx.ones((1, 1)))
