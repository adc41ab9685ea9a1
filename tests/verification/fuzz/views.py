"""Arrays that hold given numbers in every layout that MLX has: transposed, strided, offset, reversed, broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

_STORED = {mx.uint8: np.uint8, mx.uint32: np.uint32, mx.int32: np.int32, mx.bool_: np.bool_}


def store(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """A contiguous array of numbers, which it rounds to its type."""
    if dtype in _STORED:
        return mx.array(np.ascontiguousarray(values.astype(_STORED[dtype])))
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.asarray(values, dtype=np.float32)
    array = mx.array(narrow).astype(dtype)
    mx.eval(array)
    return array


def _junk(rng: np.random.Generator, shape: Sequence[int], like: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Elements around a view: NaN, so that a read of it shows, or random integers."""
    if dtype not in _STORED:
        return np.full(shape, np.nan)
    return rng.integers(0, 2 if dtype == mx.bool_ else 2**8, shape).astype(like.dtype)


def _transposed(rng: np.random.Generator, values: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, str]:
    order = [int(axis) for axis in rng.permutation(values.ndim)]
    stored = store(values.transpose(order), dtype)
    return stored.transpose(*np.argsort(order).tolist()), f"transposed {order}"


def _sliced(steps: bool, everywhere: bool) -> Callable[..., tuple[mx.array, str]]:
    def lay_out(rng: np.random.Generator, values: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, str]:
        shape, place = list(values.shape), []
        for axis, length in enumerate(values.shape):
            if not (everywhere or rng.random() < (0.7 if steps and axis == values.ndim - 1 else 0.4)):
                place.append(slice(None))
                continue
            step = int(rng.integers(2, 4)) if steps else 1
            before, after = (int(n) for n in rng.integers(0, 5, 2))
            shape[axis] = before + length * step + after
            place.append(slice(before, before + length * step, step))
        larger = _junk(rng, shape, values, dtype)
        larger[tuple(place)] = values
        text = ", ".join(":" if s.start is None else f"{s.start}:{s.stop}:{s.step}" for s in place)
        return store(larger, dtype)[tuple(place)], f"{shape}[{text}]"

    return lay_out


def _reversed(rng: np.random.Generator, values: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, str]:
    axes = [axis for axis in range(values.ndim) if rng.random() < 0.5] or [values.ndim - 1]
    backwards = tuple(slice(None, None, -1) if axis in axes else slice(None) for axis in range(values.ndim))
    return store(values[backwards], dtype)[backwards], f"reversed {axes}"


def _broadcast(rng: np.random.Generator, values: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, str]:
    axis = int(rng.integers(0, values.ndim))
    first = store(values.take(range(min(1, values.shape[axis])), axis), dtype)
    return mx.broadcast_to(first, values.shape), f"broadcast {axis}"


def _second_of_two(rng: np.random.Generator, values: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, str]:
    return store(np.stack([_junk(rng, values.shape, values, dtype), values]), dtype)[1], "second of two"


def _padded_and_swapped(rng: np.random.Generator, values: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, str]:
    """Two axes of a padded buffer, swapped: as a cache's [batch, tokens, heads, width]."""
    if values.ndim < 2:
        return _sliced(False, True)(rng, values, dtype)
    one, other = (int(axis) for axis in rng.choice(values.ndim, 2, replace=False))
    swapped = np.swapaxes(values, one, other)
    before, after = (int(n) for n in rng.integers(0, 5, 2))
    length = swapped.shape[-1]
    larger = _junk(rng, [*swapped.shape[:-1], before + length + after], values, dtype)
    larger[..., before : before + length] = swapped
    array = store(larger, dtype)[..., before : before + length].swapaxes(one, other)
    return array, f"padded, axes {one} {other} swapped"


LAYOUTS: tuple[Callable[..., tuple[mx.array, str]], ...] = (
    _transposed,
    _sliced(steps=True, everywhere=False),
    _sliced(steps=False, everywhere=True),
    _sliced(steps=False, everywhere=False),
    _reversed,
    _broadcast,
    _second_of_two,
    _padded_and_swapped,
)


def lay_out(rng: np.random.Generator, values: np.ndarray, dtype: mx.Dtype, view: float) -> tuple[mx.array, str]:
    """An array of the numbers, in a random layout with the probability `view`, and the layout in words."""
    if values.ndim == 0 or rng.random() >= view:
        array, layout = store(values, dtype), "plain"
    else:
        array, layout = LAYOUTS[int(rng.integers(0, len(LAYOUTS)))](rng, values, dtype)
    if rng.random() < 0.5:
        mx.eval(array)
    return array, layout
