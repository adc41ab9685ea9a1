"""A quantized key-value cache of several requests, as mlx-lm's `BatchKVCache` is one of half types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map, tree_reduce

from .. import _ext

__all__ = ["BatchQuantizedKVCache", "Packed", "rolled"]

Packed = tuple[mx.array, mx.array, mx.array]


def _mlx_lm_cache() -> Any:
    import mlx_lm.models.cache  # a package that need not be installed

    return mlx_lm.models.cache


def rolled(rows: mx.array, shifts: mx.array) -> mx.array:
    """Tokens of each row moved to the right by its shift, the last ones to the front."""
    tokens = rows.shape[2]
    index = (mx.arange(tokens) - shifts[:, None]) % tokens
    return mx.take_along_axis(rows, index[:, None, :, None], axis=2)


class BatchQuantizedKVCache:
    """Keys and values of several requests, in 4 or 8 bits, padded on their left.

    It has the interface of mlx-lm's ``BatchKVCache``, and takes the place of several ``QuantizedKVCache`` of mlx-lm's:
    ``merge`` makes one of them, ``extract`` gives one back. Its masks are known to attention, which reads only a row's
    own keys (``mlx_mittens.patch``). Under the patch a layer's keys are turned and quantized, and appended with
    its values, in one launch.

    Args:
        left_padding (list of int): How many tokens of padding come before each request's own.
        group_size (int): Of the quantization: 32, 64 or 128.
        bits (int): Of the quantization: 2, 3, 4, 6 or 8. Attention has kernels for 4 and 8.

    Example:
        >>> cache = mm.nn.BatchQuantizedKVCache([2, 0], bits=8)
        >>> keys, values = cache.update_and_fetch(mx.ones((2, 4, 3, 64)), mx.ones((2, 4, 3, 64)))
        >>> keys[0].shape, keys[1].shape  # words, scales
        ((2, 4, 3, 16), (2, 4, 3, 1))
    """

    step = 256

    def __init__(self, left_padding: Sequence[int], group_size: int = 64, bits: int = 8):
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.left_padding = mx.array(list(left_padding), mx.int32)
        self.offset = -self.left_padding
        self.group_size = group_size
        self.bits = bits
        self._idx = 0
        self._right_padding: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Appends tokens of every row; the keys and values of all so far, packed."""
        tokens = keys.shape[2]
        seen = _ext.try_append_packed(self, keys, values)
        self.offset = self.offset + tokens
        if seen is not None:
            self._idx += tokens
            return seen
        self._make_room(keys, values)
        first, self._idx = self._idx, self._idx + tokens
        for held, fresh in ((self.keys, keys), (self.values, values)):
            for buffer, part in zip(held or (), mx.quantize(fresh, group_size=self.group_size, bits=self.bits)):
                buffer[:, :, first : self._idx] = part
        return self.keys_and_values()

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        tokens = keys.shape[2]
        if self.keys is not None and self._idx + tokens <= self.keys[0].shape[2]:
            return
        more = -(-tokens // self.step) * self.step

        def empty(like: mx.array) -> Packed:
            shape, width = (*like.shape[:2], more), like.shape[3]
            groups = (*shape, width // self.group_size)
            return (
                mx.zeros((*shape, width * self.bits // 32), mx.uint32),
                mx.zeros(groups, like.dtype),
                mx.zeros(groups, like.dtype),
            )

        fresh = empty(keys), empty(values)
        if self.keys is None:
            self.keys, self.values = fresh
            return
        end = self._idx if self._idx % self.step else self.keys[0].shape[2]
        self.keys, self.values = tree_map(
            lambda held, new: mx.concatenate([held[:, :, :end], new], axis=2), (self.keys, self.values), fresh
        )

    def keys_and_values(self) -> tuple[Packed, Packed]:
        """Words, scales and biases of the keys and of the values so far."""
        return tree_map(lambda a: a[:, :, : self._idx], (self.keys, self.values))

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        """Says how the prompts that come next are padded.

        Args:
            left_padding (list of int, optional): Before them, of a cache that is empty.
            lengths (list of int, optional): Not used; for the interface.
            right_padding (list of int, optional): Behind them: `finalize` moves it to the left.
        """
        if left_padding is not None:
            if self.keys is not None:
                raise ValueError(
                    f"[{type(self).__name__}.prepare] left_padding is given, and the cache holds {self._idx} tokens: "
                    "expected an empty one"
                )
            padding = mx.array(left_padding, mx.int32)
            self.left_padding = self.left_padding + padding
            self.offset = self.offset - padding
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = mx.array(right_padding, mx.int32)

    def finalize(self) -> None:
        """Moves padding on the right to the left."""
        if self._right_padding is None:
            return
        padding, self._right_padding = self._right_padding, None
        if self.keys is not None:
            self.keys, self.values = tree_map(lambda a: rolled(a[:, :, : self._idx], padding), (self.keys, self.values))
        self.offset = self.offset - padding
        self.left_padding = self.left_padding + padding

    @property
    def state(self) -> tuple[Any, ...]:
        """All that the cache holds."""
        return self.keys, self.values, self.offset, self.left_padding, self._idx, self.group_size, self.bits

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.left_padding, self._idx, self.group_size, self.bits = state

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken back."""
        return True

    def trim(self, n: int) -> int:
        """Takes back the last n tokens of every row, as many as there are; says how many."""
        n = min(self._idx, n)
        self._idx -= n
        self.offset = self.offset - n
        return n

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """The mask of the next N tokens, which attention knows by the array."""
        return _ext.row_mask(N, self._idx, window_size, self.left_padding)

    def filter(self, batch_indices: Any) -> None:
        """Keeps some of the rows, and no more padding than they need."""
        index = batch_indices if isinstance(batch_indices, mx.array) else mx.array(list(batch_indices), mx.int32)
        self.offset, self.left_padding = self.offset[index], self.left_padding[index]
        least = min(cast("list[int]", self.left_padding.tolist()), default=0)
        if self.keys is not None:
            self.keys, self.values = tree_map(lambda a: a[index][:, :, max(least, 0) :], (self.keys, self.values))
        if least > 0:
            self._idx -= least
            self.left_padding = self.left_padding - least

    def extend(self, other: BatchQuantizedKVCache) -> None:
        """Appends another cache's rows; the shorter rows get padding on their left."""
        if (self.group_size, self.bits) != (other.group_size, other.bits):
            raise ValueError(
                f"[{type(self).__name__}.extend] caches of {self.bits} bits in groups of {self.group_size} and of "
                f"{other.bits} bits in groups of {other.group_size}: expected the same"
            )
        self._join([self, other])

    def _join(self, caches: Sequence[BatchQuantizedKVCache]) -> None:
        """Becomes the rows of several caches, one below the other."""
        most = max(cache._idx for cache in caches)
        full = next((cache for cache in caches if cache.keys is not None), None)

        def padded(cache: BatchQuantizedKVCache) -> Any:
            rows, left = cache.offset.shape[0], most - cache._idx
            if cache.keys is None:  # of the others' heads
                return tree_map(lambda a: mx.zeros((rows, a.shape[1], most, a.shape[3]), a.dtype), like)
            pad = [(0, 0), (0, 0), (left, 0), (0, 0)]
            return tree_map(lambda a: mx.pad(a[:, :, : cache._idx], pad), (cache.keys, cache.values))

        if full is not None:
            like = full.keys, full.values
            joined = tree_map(lambda *parts: mx.concatenate(list(parts)), *map(padded, caches))
        self.left_padding = mx.concatenate([cache.left_padding + (most - cache._idx) for cache in caches])
        self.offset = mx.concatenate([cache.offset for cache in caches])
        self._idx = most
        if full is not None:
            self.keys, self.values = joined

    def extract(self, idx: int) -> Any:
        """A row alone, as mlx-lm's ``QuantizedKVCache``."""
        cache = _mlx_lm_cache().QuantizedKVCache(self.group_size, self.bits)
        cache.offset = self._copy_row(idx, cast("list[int]", self.left_padding.tolist())[idx], cache)
        return cache

    def _copy_row(self, idx: int, first: int, to: Any) -> int:
        """Copies a row's tokens from a place on into another cache; says how many there are."""
        if self.keys is None or first >= self._idx:
            return 0
        to.keys, to.values = tree_map(
            lambda a: mx.contiguous(a[idx : idx + 1, :, first : self._idx]), (self.keys, self.values)
        )
        return self._idx - first

    @classmethod
    def _common_format(cls, caches: Sequence[Any]) -> tuple[int, int]:
        """The group size and the bits of caches that are to be merged."""
        formats = {(cache.group_size, cache.bits) for cache in caches}
        if len(formats) != 1:
            raise ValueError(
                f"[{cls.__name__}.merge] caches of group sizes and bits {sorted(formats)}: expected the same for all"
            )
        return formats.pop()

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        """A batch of mlx-lm's ``QuantizedKVCache``, of the same bits and groups.

        Raises:
            ValueError: The caches differ in bits or groups.
        """
        group_size, bits = cls._common_format(caches)
        most = max(cache.offset for cache in caches)
        merged = cls([most - cache.offset for cache in caches], group_size, bits)
        full = next((cache for cache in caches if cache.keys is not None), None)
        if full is None or most == 0:
            return merged

        def row(cache: Any) -> Any:
            if cache.keys is None:
                return tree_map(lambda a: mx.zeros((1, a.shape[1], most, a.shape[3]), a.dtype), held(full))
            pad = [(0, 0), (0, 0), (most - cache.offset, 0), (0, 0)]
            return tree_map(lambda a: mx.pad(a[:, :, : cache.offset], pad), held(cache))

        def held(cache: Any) -> Any:
            return tuple(cache.keys), tuple(cache.values)

        merged.keys, merged.values = tree_map(lambda *parts: mx.concatenate(list(parts)), *map(row, caches))
        merged.offset = merged.offset + most
        merged._idx = most
        return merged

    def size(self) -> int:
        """Tokens of the longest row, with its padding."""
        return self._idx

    def empty(self) -> bool:
        """Whether nothing has been appended."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return 0 if self.keys is None else tree_reduce(lambda total, a: total + a.nbytes, (self.keys, self.values), 0)
