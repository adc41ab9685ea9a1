"""A quantized cache of several requests with a sliding window, as mlx-lm's `BatchRotatingKVCache` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from .. import _ext
from .batch_caches import BatchQuantizedKVCache, Packed, rolled

__all__ = ["BatchRotatingQuantizedKVCache"]


class BatchRotatingQuantizedKVCache(BatchQuantizedKVCache):
    """The last keys and values of several requests, in 4 or 8 bits, padded on their left.

    It has the interface of mlx-lm's ``BatchRotatingKVCache``. mlx-lm quantizes no rotating cache, so ``extract`` gives
    a batch of one row. Tokens stand in their order, and the window moves over the buffers: where these are full, the
    last ``max_size - 1`` tokens move to the front of new ones, with room for a step behind them.

    Args:
        max_size (int): How many tokens a token sees, itself among them.
        left_padding (list of int): How many tokens of padding come before each request's own.
        group_size (int): Of the quantization: 32, 64 or 128.
        bits (int): Of the quantization: 2, 3, 4, 6 or 8. Attention has kernels for 4 and 8.

    Raises:
        ValueError: ``max_size`` is not positive.

    Example:
        >>> cache = mm.nn.BatchRotatingQuantizedKVCache(4, [2, 0], bits=8)
        >>> for tokens in (3, 1, 1):
        ...     fresh = mx.ones((2, 4, tokens, 64))
        ...     keys, values = cache.update_and_fetch(fresh, fresh)
        >>> keys[0].shape  # words of the last four tokens
        (2, 4, 4, 16)
    """

    def __init__(self, max_size: int, left_padding: Sequence[int], group_size: int = 64, bits: int = 8):
        if max_size < 1:
            raise ValueError(f"[BatchRotatingQuantizedKVCache] max_size is {max_size}: expected a positive number")
        super().__init__(left_padding, group_size, bits)
        self.max_size = max_size
        self._has_dropped = False
        self._lengths: mx.array | None = None  # positions at which each row's prompt ends, while prompts are padded

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Appends tokens of every row; the packed keys and values that they see, up to ``max_size - 1`` before."""
        self._move_padding()
        self._drop(keys.shape[2])
        super().update_and_fetch(keys, values)
        return self._last(self.max_size - 1 + keys.shape[2])

    def _last(self, tokens: int) -> tuple[Packed, Packed]:
        first = max(self._idx - tokens, 0)
        return cast("tuple[Packed, Packed]", tree_map(lambda a: a[:, :, first : self._idx], (self.keys, self.values)))

    def keys_and_values(self) -> tuple[Packed, Packed]:
        """Words, scales and biases of the keys and values of the last ``max_size`` tokens."""
        return self._last(self.max_size)

    def _drop(self, tokens: int) -> None:
        """Drops tokens that no later one sees, where they fill a step or room for the new ones is lacking."""
        stale = self._idx - (self.max_size - 1)
        if self.keys is None or stale <= 0 or (stale < self.step and self._idx + tokens <= self.keys[0].shape[2]):
            return
        self.keys, self.values = self._last(self.max_size - 1)
        self._idx -= stale
        self.left_padding = mx.maximum(self.left_padding - stale, 0)
        self._has_dropped = True

    def _move_padding(self) -> None:
        """Moves tokens behind a row's prompt to its left, so that they push none of its own out of the window."""
        if self._lengths is None or self.keys is None:
            return
        shifts = mx.maximum(0, self.offset - self._lengths)
        self.keys, self.values = tree_map(lambda a: rolled(a[:, :, : self._idx], shifts), (self.keys, self.values))
        self.left_padding = self.left_padding + shifts
        self.offset = self.offset - shifts

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        """Says how the prompts that come next are padded.

        Args:
            left_padding (list of int, optional): Before them, of a cache that is empty.
            lengths (list of int, optional): Tokens of each prompt, where they are padded on their right.
            right_padding (list of int, optional): Behind them: it is moved to the left.

        Raises:
            ValueError: ``left_padding`` is given for a cache that holds tokens, or ``right_padding`` without
                ``lengths``.
        """
        super().prepare(left_padding=left_padding)
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError(
                    f"[{type(self).__name__}.prepare] right_padding is given without lengths: expected both"
                )
            self._lengths = mx.array(lengths, mx.int32) + self.offset

    def finalize(self) -> None:
        """Ends the prompts that were padded on their right."""
        self._move_padding()
        self._lengths = None

    @property
    def state(self) -> tuple[Any, ...]:
        """All that the cache holds."""
        return *super().state, self.max_size, self._has_dropped

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        BatchQuantizedKVCache.state.fset(self, state[:-2])  # type: ignore[attr-defined]
        self.max_size, self._has_dropped = state[-2:]
        self._lengths = None

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken back: as long as none has been dropped."""
        return not self._has_dropped

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """The mask of the next N tokens, which attention knows by the array."""
        before = min(self.max_size - 1, self._idx)
        hidden = self._idx - before
        padding = mx.maximum(self.left_padding - hidden, 0) if hidden else self.left_padding
        return _ext.row_mask(N, before, window_size or self.max_size, padding)

    def _join(self, caches: Sequence[BatchQuantizedKVCache]) -> None:
        windows = sorted({str(getattr(cache, "max_size", None)) for cache in caches})
        if len(windows) > 1:
            raise ValueError(
                f"[{type(self).__name__}] caches with windows of {', '.join(windows)} tokens: expected the same for all"
            )
        self._has_dropped = any(cast("BatchRotatingQuantizedKVCache", cache)._has_dropped for cache in caches)
        super()._join(caches)

    def extract(self, idx: int) -> BatchRotatingQuantizedKVCache:
        """A row alone, as a batch of one."""
        row = type(self)(self.max_size, [0], self.group_size, self.bits)
        own = cast("list[int]", self.left_padding.tolist())[idx]
        first = max(own, self._idx - self.max_size)
        row._has_dropped = self._has_dropped or first > own
        row.offset = self.offset[idx : idx + 1]
        row._idx = self._copy_row(idx, first, row)
        return row

    @classmethod
    def quantized(cls, cache: Any, group_size: int, bits: int) -> BatchRotatingQuantizedKVCache:
        """The content of mlx-lm's ``RotatingKVCache``, as a batch of one row.

        Raises:
            ValueError: The cache keeps its first tokens.
        """
        if cache.keep:
            raise ValueError(
                f"[{cls.__name__}.quantized] the cache keeps its first {cache.keep} tokens: expected none that it keeps"
            )
        row = cls(cache.max_size, [0], group_size, bits)
        row.offset = mx.array([cache.offset], mx.int32)
        if cache.keys is not None and (held := cache.size()):
            row.keys, row.values = (
                mx.quantize(cache._temporal_order(a)[:, :, -held:], group_size=group_size, bits=bits)
                for a in (cache.keys, cache.values)
            )
            row._idx = held
            row._has_dropped = cache.offset > held
        return row

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchRotatingQuantizedKVCache:
        """A batch of several, of the same window, bits and groups.

        Raises:
            ValueError: The caches differ in their window, bits or groups.
        """
        merged = cls(caches[0].max_size, [], *cls._common_format(caches))
        merged._join(caches)
        return merged

    def size(self) -> int:
        """Tokens of the longest row that a next token sees, with its padding, and one more."""
        return min(self._idx, self.max_size)
