"""The tokens of one layer in memory that is all there from the first token on, and whose counts live on the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from hf_turboquant.errors import CacheStateError, ValueRangeError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import Backend, KVView
from hf_turboquant.ops.static_spec import (
    LENGTHS,
    CodecSpec,
    Count,
    StaticSpec,
    codec_tensors,
    register_spec,
    register_tables,
)
from hf_turboquant.quantizers import LayerCodecs
from hf_turboquant.store import KVStore

_log = logging.getLogger("hf_turboquant")


@lru_cache(maxsize=1)
def _say_few_tokens(wanted: int) -> None:
    """Log it once in a process."""
    _log.warning(
        "the first forward of a cache with max_cache_len decides how keys are stored, and had fewer than %d tokens to "
        "look at: the guard and split channels may choose badly. Give the prompt whole, or leave max_cache_len out",
        wanted,
    )


class StaticStore(KVStore):
    """Compressed keys and values of one layer, for at most ``max_cache_len`` tokens.

    The first tokens stored decide the codecs, however few they are: a step that was compiled cannot.

    A compiled step changes counts on the device only. It sets ``stale``, and the host reads them back before it next
    needs them (:meth:`synchronize`).

    Args:
        *args: As for :class:`KVStore`.
        max_cache_len: Tokens to make room for.
        **kwargs: As for :class:`KVStore`.

    Attributes:
        state: All of it in one tensor, uint8: what the ops of ``ops.static_ops`` take. Every tensor of a step costs
            time at every call.
        buffers: Its parts: counts, exact keys, exact values and packed blocks.
        tables: The tensors of both codecs, if they depend on the tokens; else the spec names them.
        spec: The name of the rest.
        allocated: Whether there are buffers: from the first tokens on.
        stale: Whether the device may hold more than the host knows.
        compileable: Whether a step may be compiled: not after a crop into a block, not for formats without kernel, and
            not when the last place was taken by one that was not.
    """

    state: torch.Tensor | None
    buffers: tuple[torch.Tensor, ...]
    tables: list[torch.Tensor]
    spec: str

    def __init__(self, *args: Any, max_cache_len: int, **kwargs: Any) -> None:
        self.max_cache_len = max_cache_len
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Forget all tokens, the codecs chosen for them, and their memory."""
        super().reset()
        self.state, self.buffers, self.tables, self.spec = None, (), [], ""
        self.allocated = self.stale = self.compileable = False
        self._unseen_steps = 0

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor the store holds."""
        yield from super().tensors()
        yield from self.buffers

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Add tokens; see :meth:`KVStore.append`.

        Raises:
            CacheStateError: There is no room for them. Nothing was stored.
        """
        self._check(keys, values)
        self.synchronize()
        self.check_room(keys.shape[2])
        fresh = not self.allocated
        if fresh:
            self._allocate(keys, values)
        sinks = self.sink_keys.shape[2]
        try:
            view = super().append(keys, values)
        except ValueRangeError:
            if fresh:
                self.reset()
            raise
        if self.sink_keys.shape[2] > sinks:
            self._keep_sinks()
        self.publish()
        return view

    def check_room(self, count: int) -> None:
        """Raise unless there is room for ``count`` more tokens."""
        if self.seq_len + count > self.max_cache_len:
            raise CacheStateError(
                f"max_cache_len must be at least {self.seq_len + count} (tokens) for these, got {self.max_cache_len}; "
                "make the cache longer, at least the prompt and max_new_tokens, or leave max_cache_len out"
            )

    def before_step(self) -> None:
        """Raise if a compiled step would find no room; to be called before each of them.

        Only when it may be so are the counts read back.
        """
        if not self.stale:
            return
        self._unseen_steps += 1
        if self.seq_len + self._unseen_steps >= self.max_cache_len:
            self.synchronize()
            self.check_room(1)

    def crop(self, count: int) -> None:
        """Forget the newest ``count`` tokens; see :meth:`KVStore.crop`."""
        self.synchronize()
        super().crop(count)
        if self.allocated:
            self._view_sinks(self.sink_keys.shape[2])
            self.publish()

    def _append_token(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Write the token at once: graphs know this memory, and attention that is traced must only read it."""
        view = super()._append_token(keys, values)
        view.write_newest()
        return view

    def select_batch(self, indices: torch.Tensor) -> None:
        """Keep, reorder or repeat sequences; with as many as before, in the memory they had."""
        self.synchronize()
        index = indices.to(self._key_like.device)
        self._key_like, self._value_like = (like.index_select(0, index) for like in (self._key_like, self._value_like))
        self._memo, self._accepted = {}, ()
        if not self.allocated:
            self.sink_keys, self.sink_values = self._key_like, self._value_like
            self.use_rings(self._key_like, self._value_like)
            return
        old = self.buffers
        moved = (old[0], *(old[1 + which].index_select(which // 2, index) for which in range(3)))
        if moved[1].shape != old[1].shape:
            self._take_memory(self.sink_keys.shape[2])
        for target, source in zip(self.buffers, moved, strict=True):
            target.copy_(source)

    def adopt(self, other: KVStore) -> None:
        """Take over the tokens of a store that grows, and its codecs. This one must be new.

        Raises:
            CacheStateError: There is no room for them.
        """
        self.check_room(other.seq_len)
        self._use(LayerCodecs(other.keys, other.values, other.guard), chosen=other._chosen)
        view, sinks = other.view(), other.sink_keys.shape[2]
        exact = view.with_exact(view.tail_keys[:, :, :0], view.tail_values[:, :, :0])
        self._allocate(
            torch.cat([other.sink_keys, exact.tail_keys], dim=2),
            torch.cat([other.sink_values, exact.tail_values], dim=2),
        )
        self._view_sinks(sinks)
        self.sink_keys.copy_(other.sink_keys)
        self.sink_values.copy_(other.sink_values)
        self.tail_keys[:, :, : other.tail_len] = exact.tail_keys
        self.tail_values[:, :, : other.tail_len] = exact.tail_values
        self.num_blocks, self.tail_start, self.tail_len = other.num_blocks, 0, other.tail_len
        self.block_tokens = None if other.block_tokens is None else list(other.block_tokens)
        done = 0
        for arena in view.arenas:
            used = min(other.num_blocks - done, arena.shape[0])
            self._reserve_all(done + used)[done : done + used] = arena[:used]
            done += used
        self.publish()

    def synchronize(self) -> None:
        """Read the counts back if a compiled step may have changed them.

        Raises:
            CacheStateError: Such a step found no room for its token.
            ValueRangeError: One packed a block of values that cannot be quantized.
        """
        if not self.stale:
            return
        counts = self.buffers[0].tolist()
        if counts[Count.OVERFLOW]:
            raise CacheStateError(
                f"max_cache_len must be at least as many tokens as are decoded, got {self.max_cache_len}: tokens were "
                "left out, and what was decoded after that means nothing. Call reset(), and make the cache longer"
            )
        if counts[Count.FAULT]:
            raise ValueRangeError(
                "vectors must be finite, and their norms in the range of norm_dtype, to be quantized: those of a block "
                "were not. Call reset(); set norm_dtype='bfloat16' or 'float32' if they were finite"
            )
        self.num_blocks = counts[Count.BLOCKS]
        self.tail_start, self.tail_len = counts[Count.TAIL_START], counts[Count.TAIL_LEN]
        self._view_sinks(counts[Count.SINKS])
        self._memo = {}
        self.stale, self._unseen_steps = False, 0

    def publish(self) -> None:
        """Write the counts of the host to the device."""
        counts = [0] * LENGTHS
        counts[Count.SINKS], counts[Count.BLOCKS] = self.sink_keys.shape[2], self.num_blocks
        counts[Count.TAIL_START], counts[Count.TAIL_LEN] = self.tail_start, self.tail_len
        counts[Count.TOKENS] = self.seq_len
        self.buffers[0].copy_(torch.tensor(counts, dtype=torch.int32))
        room = self.seq_len < self.max_cache_len
        self.compileable = room and self.block_tokens is None and self._computes_on_device

    # memory

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Choose the codecs by the first tokens, and take all memory there will be."""
        if not self._chosen and self._choose is not None and keys.shape[2]:
            after_sinks = self.sink_tokens if keys.shape[2] > self.sink_tokens else 0
            if keys.shape[2] - after_sinks < BLOCK_TOKENS:
                _say_few_tokens(BLOCK_TOKENS)
            self._use(self._choose(keys[:, :, after_sinks:], values[:, :, after_sinks:]), chosen=True)
        self._take_memory(self.sink_keys.shape[2])

    def _take_memory(self, sinks: int) -> None:
        """Make an empty state for as many sequences as there are, and view ``sinks`` of its slots as sinks."""
        device, like = self._key_like.device, (self._key_like, self._value_like)
        tables = [*codec_tensors(self.keys), *codec_tensors(self.values)]
        varying = any(codec.tables.channel_order is not None for codec in (self.keys, self.values))
        self.tables = tables if varying else []
        spec = StaticSpec(
            keys=CodecSpec.of(self.keys),
            values=CodecSpec.of(self.values),
            sink_tokens=self.sink_tokens,
            residual_window=self.residual_window,
            max_tokens=self.max_cache_len,
            batch=like[0].shape[0],
            heads=like[0].shape[1],
            dtypes=(like[0].dtype, like[1].dtype),
            backend=str(Backend(self.backend).value),
            tables="" if varying else register_tables(tables, device),
        )
        self.spec = register_spec(spec)
        # what runs on the host reads counts there, which a CUDA graph cannot
        self._computes_on_device = device.type == "cpu" or spec.resolve(device) is Backend.TRITON
        self.state, self.allocated = torch.zeros(spec.state_bytes, dtype=torch.uint8, device=device), True
        for tensor in (self.state, *self.tables):
            torch._dynamo.mark_static_address(tensor, guard=False)
        self.buffers = spec.views(self.state)
        self._view_sinks(sinks)
        self.use_rings(*(exact[:, :, self.sink_tokens :] for exact in self.buffers[1:3]))
        self.replace_arenas([self.buffers[3]])

    def _view_sinks(self, count: int) -> None:
        self.sink_keys, self.sink_values = self.buffers[1][:, :, :count], self.buffers[2][:, :, :count]

    def _keep_sinks(self) -> None:
        """Move the sinks to the memory meant for them."""
        count = self.sink_keys.shape[2]
        self.buffers[1][:, :, :count] = self.sink_keys
        self.buffers[2][:, :, :count] = self.sink_values
        self._view_sinks(count)

    def _reserve(self, blocks: int) -> list[torch.Tensor]:
        return [self._reserve_all(self.num_blocks + blocks)[self.num_blocks : self.num_blocks + blocks]]

    def _reserve_all(self, blocks: int) -> torch.Tensor:
        """Return the packed blocks, of which there are as many at least."""
        if blocks > self.capacity_blocks:
            # only blocks that were cropped, and so hold less than they could
            raise CacheStateError(
                f"max_cache_len must leave room for {blocks} blocks, cropped ones included, got room for "
                f"{self.capacity_blocks}; make the cache longer"
            )
        return self.arenas[0]

    def _ensure_slots(self, needed: int) -> None:
        assert needed <= self.residual_window + BLOCK_TOKENS
