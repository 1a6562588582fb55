"""The tokens of one layer: sinks, packed blocks, exact window.

A token enters the window (the first ones go to the sinks), stays exact while it is among the last
``residual_window``, and is quantized once, together with the 127 others of its block, when that block leaves. Packed
blocks lie in *arenas*, which are only ever added: growing copies nothing and frees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_turboquant.errors import CacheStateError, ShapeError, ValueRangeError
from hf_turboquant.exact_tokens import ExactTokens
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import KVView, NewToken, VectorCodec, extend_ring, quantize, ring_slices
from hf_turboquant.quantizers import LayerCodecs

GROWTH_DIVISOR = 32
"""A new arena holds one block for every so many already packed: growth steps of one thirty-second."""


class KVStore(ExactTokens):
    """Compressed keys and values of one layer.

    The first block that is quantized may decide how (``choose``); the codecs then stay until :meth:`reset`.

    Args:
        keys: Codec of keys, until ``choose`` returns another.
        values: Codec of values, likewise.
        like_keys: ``(batch, num_kv_heads, any, head_dim)``; its geometry, dtype and device are the store's.
        like_values: The same for values.
        sink_tokens: First tokens kept exact.
        residual_window: Last tokens kept exact, a multiple of 128.
        backend: Who quantizes.
        choose: Given the first keys and values to be quantized, returns the codecs to use; None keeps the above.

    Attributes:
        guard: What the guard did to the keys of this layer, and why; empty if nothing.
    """

    _memo: dict[str, Any]
    _last_frame: KVView | None
    _accepted: tuple[object, ...]

    def __init__(
        self,
        keys: VectorCodec,
        values: VectorCodec,
        *,
        like_keys: torch.Tensor,
        like_values: torch.Tensor,
        sink_tokens: int,
        residual_window: int,
        backend: str = "auto",
        choose: Callable[[torch.Tensor, torch.Tensor], LayerCodecs] | None = None,
    ) -> None:
        self._initial = LayerCodecs(keys, values)
        self._choose = choose
        self.sink_tokens = sink_tokens
        self.residual_window = residual_window
        self.backend = backend
        self._key_like = like_keys.detach()[:, :, :0].clone()
        self._value_like = like_values.detach()[:, :, :0].clone()
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and the codecs chosen for them, and free their memory."""
        self._use(self._initial, chosen=self._choose is None)
        self.sink_keys, self.sink_values = self._key_like, self._value_like
        self.arenas: list[torch.Tensor] = []
        self.num_blocks = 0
        self.block_tokens: list[int] | None = None
        self.use_rings(self._key_like, self._value_like)
        self.tail_start = self.tail_len = 0
        self._renew()
        self._accepted = ()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of a copy what a backend keeps with these very tensors."""
        self._write_newest()
        return {**self.__dict__, "_newest": None, "_memo": {}, "_last_frame": None}

    def _use(self, codecs: LayerCodecs, *, chosen: bool) -> None:
        self.keys, self.values, self.guard = codecs.keys, codecs.values, codecs.note
        self._chosen = chosen

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return self._key_like.shape[0]

    @property
    def packed_tokens(self) -> int:
        """Tokens held in packed blocks."""
        return self.num_blocks * BLOCK_TOKENS if self.block_tokens is None else sum(self.block_tokens)

    @property
    def seq_len(self) -> int:
        """Tokens held."""
        return self.sink_keys.shape[-2] + self.packed_tokens + self.tail_len

    @property
    def capacity_blocks(self) -> int:
        """Blocks the arenas have room for."""
        return sum(arena.shape[0] for arena in self.arenas)

    @property
    def record_bytes(self) -> int:
        """Bytes of 128 packed tokens of one KV head."""
        return self.keys.format.nbytes + self.values.format.nbytes

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor the store holds: tokens, and the channel orders that are its own."""
        yield from (self.sink_keys, self.sink_values, self.tail_keys, self.tail_values, *self.arenas)
        for codec in (self.keys, self.values):
            if codec.tables.channel_order is not None:
                yield codec.tables.channel_order

    def view(self) -> KVView:
        """Return what attention may read now. It is valid until the store next changes."""
        self._write_newest()
        return self._frame().with_tail(self.tail_start, self.tail_len)

    def _frame(self) -> KVView:
        """Return a view of the present tensors and blocks; its tail may be that of an earlier step."""
        frame = self._last_frame
        if (
            frame is None
            or frame.memo is not self._memo
            or frame.tail_keys is not self._rings[0]
            or frame.sink_keys is not self.sink_keys
            or frame.keys is not self.keys
        ):
            counts = None if self.block_tokens is None else tuple(self.block_tokens)
            frame = self._last_frame = KVView(
                self.keys, self.values, self.sink_keys, self.sink_values, self._arenas_in_order(), self.num_blocks,
                counts, *self._rings, self.tail_start, self.tail_len, memo=self._memo,
            )  # fmt: skip
            # counted now, the views of later steps know it too
            _ = frame.packed_tokens
        return frame

    def _renew(self) -> None:
        """Forget what was kept with blocks and tensors, some of which were replaced."""
        self._memo, self._last_frame = {}, None

    def _arenas_in_order(self) -> tuple[torch.Tensor, ...]:
        """Return the arenas, the oldest block first."""
        return tuple(self.arenas)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Add tokens, and return what the queries of these tokens attend to.

        A chunk no longer than the window is read from the store itself. A longer one is read exactly: the view then
        holds the old blocks, and the old window and the chunk as its tail. A single token is written by the attention
        of its step: until then, or until the store is read otherwise, its tensors must not change.

        Args:
            keys: ``(batch, num_kv_heads, new tokens, head_dim)``.
            values: The same; the last dimension is the value head_dim.

        Returns:
            A view of all old and new tokens, valid until the store next changes.

        Raises:
            ShapeError: Geometry, dtype or device differ from the store's. Nothing was stored.
            ValueRangeError: A block that leaves the window cannot be quantized. Nothing was stored.
        """
        self._check(keys, values)
        count = keys.shape[-2]
        if count == 1 and 0 < self.tail_len < min(self._rings[0].shape[2], self.residual_window + BLOCK_TOKENS - 1):
            return self._append_token(keys, values)
        before = self.view().with_exact(keys, values) if count > max(1, self.residual_window) else None

        take = min(self.sink_tokens - self.sink_keys.shape[-2], count) if not (self.num_blocks or self.tail_len) else 0
        fresh = (keys[:, :, take:], values[:, :, take:])
        blocks = max(0, self.tail_len + count - take - self.residual_window) // BLOCK_TOKENS
        if blocks:
            self._pack_oldest(fresh, blocks)
        if take:
            self.sink_keys = torch.cat([self.sink_keys, keys[:, :, :take]], dim=2)
            self.sink_values = torch.cat([self.sink_values, values[:, :, :take]], dim=2)
        self._drop_oldest_and_extend(fresh, blocks * BLOCK_TOKENS)
        return before or self.view()

    def _append_token(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Give a token a slot in the ring, which has room: what all but few decode steps do."""
        self._write_newest()
        frame = self._frame()
        slot = (self.tail_start + self.tail_len) % frame.tail_keys.shape[2]
        self._newest = newest = NewToken(keys, values, self._rings, slot)
        self.tail_len += 1
        return frame.with_tail(self.tail_start, self.tail_len, newest)

    def crop(self, count: int) -> None:
        """Forget the newest ``count`` tokens. What is left of a packed block stays readable as it is.

        Raises:
            CacheStateError: More tokens than held. Nothing was removed.
        """
        if count > self.seq_len:
            raise CacheStateError(f"crop must remove at most the {self.seq_len} tokens held, got {count}")
        self._write_newest()
        from_tail = min(count, self.tail_len)
        self.tail_len -= from_tail
        count -= from_tail
        from_blocks = min(count, self.packed_tokens)
        if from_blocks:
            self._crop_blocks(from_blocks)
        count -= from_blocks
        if count:
            kept = self.sink_keys.shape[-2] - count
            self.sink_keys = self.sink_keys[:, :, :kept].clone()
            self.sink_values = self.sink_values[:, :, :kept].clone()

    def select_batch(self, indices: torch.Tensor) -> None:
        """Keep, reorder or repeat sequences: row ``i`` becomes the old row ``indices[i]``."""
        index = indices.to(self.tail_keys.device)
        self.select_exact(index)
        self._key_like, self._value_like = (t.index_select(0, index) for t in (self._key_like, self._value_like))
        self.arenas = [arena.index_select(1, index.to(arena.device)) for arena in self.arenas]
        self._accepted = ()
        self._renew()

    def replace_arenas(self, arenas: list[torch.Tensor]) -> None:
        """Take other tensors with the same blocks for the arenas."""
        self.arenas = arenas
        self._renew()

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compare new tensors with the geometry of the store."""
        form = (keys.shape, keys.dtype, keys.device, values.shape, values.dtype, values.device)
        if form == self._accepted:
            return
        for name, new, own in (("keys", keys, self._key_like), ("values", values, self._value_like)):
            if new.ndim != 4 or new.shape[:2] != own.shape[:2] or new.shape[3] != own.shape[3]:
                raise ShapeError(
                    f"{name} must have shape (batch={own.shape[0]}, num_kv_heads={own.shape[1]}, tokens, "
                    f"head_dim={own.shape[3]}) like those already stored, got {tuple(new.shape)}; to change the batch "
                    "use batch_select_indices or batch_repeat_interleave, or start with a new cache"
                )
            if new.dtype != own.dtype or new.device != own.device:
                raise ShapeError(
                    f"{name} must be {own.dtype} on {own.device} like those already stored, got {new.dtype} on "
                    f"{new.device}"
                )
        counts = keys.shape[2], values.shape[2]
        if counts[0] != counts[1]:
            raise ShapeError(f"keys and values must hold equally many tokens, got {counts[0]} and {counts[1]}")
        self._accepted = form

    def _pack_oldest(self, fresh: tuple[torch.Tensor, torch.Tensor], blocks: int) -> None:
        """Quantize the oldest exact tokens into records behind those in use."""
        wanted = blocks * BLOCK_TOKENS
        from_tail = min(wanted, self.tail_len)
        oldest = []
        for tail, new in ((self.tail_keys, fresh[0]), (self.tail_values, fresh[1])):
            slices = ring_slices(self.tail_start, from_tail, tail.shape[2])
            parts = [*(tail[:, :, s] for s in slices), new[:, :, : wanted - from_tail]]
            parts = [part for part in parts if part.shape[2]]
            oldest.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
        first = not self._chosen
        if first and self._choose is not None:
            self._use(self._choose(oldest[0], oldest[1]), chosen=True)
        try:
            self._quantize(oldest, blocks)
        except ValueRangeError:
            if first:
                # nothing was stored, so nothing was decided either; the room reserved has the size of these records
                self._use(self._initial, chosen=False)
                self.arenas = []
            raise
        self.num_blocks += blocks
        self._renew()
        if self.block_tokens is not None:
            self.block_tokens += [BLOCK_TOKENS] * blocks

    def _quantize(self, oldest: list[torch.Tensor], blocks: int) -> None:
        """Write records of ``oldest`` behind those in use."""
        done = 0
        for out in self._reserve(blocks):
            span = slice(done * BLOCK_TOKENS, (done + out.shape[0]) * BLOCK_TOKENS)
            quantize(oldest[0][:, :, span], oldest[1][:, :, span], out, self.keys, self.values, backend=self.backend)
            done += out.shape[0]

    def _reserve(self, blocks: int) -> list[torch.Tensor]:
        """Return record tensors with room for ``blocks`` behind those in use, adding an arena where needed."""
        missing = blocks - (self.capacity_blocks - self.num_blocks)
        if missing > 0:
            batch, heads = self._key_like.shape[:2]
            step = -(-(self.num_blocks + blocks) // GROWTH_DIVISOR) if self.arenas else 0
            shape = (max(missing, step), batch, heads, self.record_bytes)
            self.arenas.append(torch.empty(shape, dtype=torch.uint8, device=self._key_like.device))
        spans, first = [], 0
        for arena in self.arenas:
            low = max(self.num_blocks - first, 0)
            high = min(self.num_blocks + blocks - first, arena.shape[0])
            if low < high:
                spans.append(arena[low:high])
            first += arena.shape[0]
        return spans

    def _drop_oldest_and_extend(self, fresh: tuple[torch.Tensor, torch.Tensor], drop: int) -> None:
        """Take ``drop`` tokens off the front of window and fresh tokens, and put the rest in the ring."""
        from_tail = min(drop, self.tail_len)
        self.tail_len -= from_tail
        self.tail_start = (self.tail_start + from_tail) % self.tail_keys.shape[2] if self.tail_len else 0
        keys, values = (tensor[:, :, drop - from_tail :] for tensor in fresh)
        self._ensure_slots(self.tail_len + keys.shape[2])
        slots = self.tail_keys.shape[2]
        if keys.shape[2]:
            slot = (self.tail_start + self.tail_len) % slots
            extend_ring(keys, values, self._frame(), slot, backend=self.backend)
        self.tail_len += keys.shape[2]

    def _crop_blocks(self, count: int) -> None:
        """Forget the newest ``count`` packed tokens."""
        counts = self.block_tokens or [BLOCK_TOKENS] * self.num_blocks
        while count:
            removed = min(count, counts[-1])
            counts[-1] -= removed
            count -= removed
            if not counts[-1]:
                counts.pop()
        self.num_blocks = len(counts)
        self._renew()
        self.block_tokens = None if all(tokens == BLOCK_TOKENS for tokens in counts) else counts
