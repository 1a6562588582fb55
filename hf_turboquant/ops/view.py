"""What the operations may see: tables of a codec, the stored tokens of one layer, and the options of attention."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from hf_turboquant.layout import BLOCK_TOKENS, RecordFormat, VectorFormat
from hf_turboquant.packing import fold_codes, unpack_codes


@dataclass(frozen=True)
class VectorTables:
    """Tensors a codec needs on one device. Shared by every layer of the same geometry.

    Attributes:
        centroids: Per channel group ``(2**bits,)`` float32, ascending; empty for a group of 16 bits. Angles for
            ``polar``.
        boundaries: Per channel group ``(2**bits - 1,)`` float32, midpoints; empty likewise.
        rotation: ``(head_dim, head_dim)`` float32, orthogonal; ``rotated = vectors @ rotation``. Block-diagonal over
            channel groups, the identity on exact ones. None where nothing is rotated: ``exact``, ``group``, ``qjl``.
        projection: ``(head_dim, head_dim)`` float32 matrix ``S`` of the QJL stage; signs are those of
            ``residual @ projection.T``. None unless ``prod`` or ``qjl``.
        projection_scale: Factor of the sign term: sqrt(pi/2)/head_dim for Gaussian ``S``, sqrt(pi/2/head_dim) for
            orthogonal.
        channel_order: ``(num_kv_heads, head_dim)`` int16, or None: channel ``channel_order[h, i]`` goes to place ``i``
            before the rotation. It belongs to one layer; everything else is shared.
        query_matrix: ``(head_dim, 2 * head_dim)`` float32, of ``prod`` only: what takes a query to the factors of codes
            and of signs at once, ``[rotation, projection_scale * rotation @ projection.T]``.
    """

    centroids: tuple[torch.Tensor, ...] = ()
    boundaries: tuple[torch.Tensor, ...] = ()
    rotation: torch.Tensor | None = None
    projection: torch.Tensor | None = None
    projection_scale: float = 0.0
    channel_order: torch.Tensor | None = None
    query_matrix: torch.Tensor | None = None

    @cached_property
    def byte_tables(self) -> tuple[torch.Tensor | None, ...]:
        """Per channel group the centroids of all codes of a byte, as one wide scalar; None where there is no table.

        4 bits: ``(256,)`` of two float32. 2 bits: ``(256,)`` of four. 3 bits: ``(4096,)`` of four, indexed by a byte of
        the low plane and, in bits 8 to 11, the high bits of its codes.
        """
        return tuple(_byte_table(centroids) for centroids in self.centroids)

    def with_order(self, channel_order: torch.Tensor) -> VectorTables:
        """Return the same tables for a layer with a channel order of its own."""
        ordered = replace(self, channel_order=channel_order)
        # what is derived from shared tensors is shared too
        ordered.__dict__["byte_tables"] = self.byte_tables
        return ordered

    def with_projection(self, projection: torch.Tensor, scale: float) -> VectorTables:
        """Return the tables of ``prod``: these, and what its signs need.

        Args:
            projection: As the attribute, on the device of the rotation.
            scale: As ``projection_scale``.
        """
        assert self.rotation is not None
        rotation = self.rotation.cpu().double()
        matrix = torch.cat([rotation, scale * rotation @ projection.cpu().double().T], dim=1)
        return replace(
            self, projection=projection, projection_scale=scale, query_matrix=matrix.float().to(projection.device)
        )

    def __deepcopy__(self, memo: dict[int, object]) -> VectorTables:
        """Return the tables themselves: nothing writes to them."""
        return self


def _byte_table(centroids: torch.Tensor) -> torch.Tensor | None:
    bits = (centroids.numel() - 1).bit_length() if centroids.numel() else 0
    if bits not in (2, 3, 4):
        return None
    if bits == 3:
        index = torch.arange(4096, device=centroids.device)[:, None]
        part = torch.arange(4, device=centroids.device)
        folded = ((index >> (2 * part)) & 3) | (((index >> (8 + part)) & 1) << 2)
        codes = fold_codes(folded.to(torch.uint8), 3)
    else:
        every_byte = torch.arange(256, dtype=torch.uint8, device=centroids.device)
        codes = unpack_codes(every_byte, bits, 256, 8 // bits)
    scalar = torch.int64 if bits == 4 else torch.complex128
    return centroids[codes.int()].contiguous().view(scalar).squeeze(-1)


@dataclass(frozen=True)
class VectorCodec:
    """A format with its tables: all an operation needs to quantize or read one kind of vector."""

    format: VectorFormat
    tables: VectorTables


MAX_FORMS = 32
"""Forms of calls that are counted for one layer before all are forgotten."""


class PreparedCalls:
    """What a backend has prepared for calls that come again and again, by what those calls have in common.

    Preparing costs more than one call, so that it is for the second call of a form, unless more are sure to follow.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, int] = {}
        self._prepared: dict[Hashable, Any] = {}

    def find(self, form: Hashable) -> Any:
        """Return what was prepared for a form; None if nothing was."""
        return self._prepared.get(form)

    def is_due(self, form: Hashable, *, at_once: bool = False) -> bool:
        """Count a call that found nothing prepared, and say whether to prepare: the second of a form, or the first."""
        if form not in self._calls and len(self._calls) == MAX_FORMS:
            self._calls.clear()
            self._prepared.clear()
        self._calls[form] = count = self._calls.get(form, 0) + 1
        return count == (1 if at_once else 2)

    def keep(self, form: Hashable, prepared: Any) -> None:
        """Keep what serves further calls; None if nothing can."""
        self._prepared[form] = prepared


class NewToken:
    """The newest token of a layer, which has a slot in the rings and may not be written there yet.

    Whoever attends over the token next writes it first: a kernel that is launched anyway, where there is one, which
    saves a launch in every decode step of a layer. Until then the tensors must not change.

    Args:
        keys: ``(batch, num_kv_heads, 1, head_dim)``.
        values: The same; the last dimension may differ.
        rings: Rings of keys and values, ``(batch, num_kv_heads, slots, head_dim)``.
        slot: Slot of the token.

    Attributes:
        slot: Slot of the token.
        states: Keys and values, the last dimension contiguous; None once the token is written.
    """

    __slots__ = ("_rings", "slot", "states")

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, rings: tuple[torch.Tensor, torch.Tensor], slot: int
    ) -> None:
        self.states: tuple[torch.Tensor, torch.Tensor] | None = (_in_order(keys), _in_order(values))
        self._rings = rings
        self.slot = slot

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Strides of keys and of values; empty once the token is written."""
        return () if self.states is None else (self.states[0].stride(), self.states[1].stride())

    def write(self) -> None:
        """Write the token, if nobody has."""
        if self.states is not None:
            # tensors made in inference mode can be written in it only
            with torch.inference_mode() if self._rings[0].is_inference() else nullcontext():
                for ring, state in zip(self._rings, self.states, strict=True):
                    ring[:, :, self.slot] = state[:, :, 0]
            self.written()

    def written(self) -> None:
        """Take note that the token is in the rings."""
        self.states = None


def _in_order(states: torch.Tensor) -> torch.Tensor:
    """Return a tensor outside of autograd whose last dimension is contiguous."""
    states = states.detach() if states.requires_grad else states
    return states if states.stride(-1) == 1 else states.contiguous()


@dataclass(frozen=True)
class KVView:
    """The tokens of one layer that attention may read, oldest first. Read-only.

    Token order: sinks, packed blocks, tail. The tail is the exact window (or, while a long chunk is being
    added, old window and fresh tokens together).

    Attributes:
        keys: Codec of the keys in the records.
        values: Codec of the values in the records.
        sink_keys: ``(batch, num_kv_heads, sinks, head_dim)``.
        sink_values: The same for values; the last dimension may differ.
        arenas: Block records, each ``(capacity, batch, num_kv_heads, record bytes)`` uint8. Blocks fill the first
            arena, then the next.
        num_blocks: Blocks in use over all arenas.
        block_tokens: Valid tokens of each block where some were cropped; None when all hold 128.
        tail_keys: Ring ``(batch, num_kv_heads, slots, head_dim)``.
        tail_values: The same for values.
        tail_start: Slot of the oldest tail token.
        tail_len: Tail tokens; token ``i`` lies in slot ``(tail_start + i) % slots``.
        newest: The last tail token, where its slot may not be written yet. Who reads the rings writes it first.
        memo: What a backend keeps with these arenas and blocks; the store empties it when they change.
        prepared: Calls prepared for these very tensors. A view made by :meth:`with_tail` shares them, any other view
            has its own.
    """

    keys: VectorCodec
    values: VectorCodec
    sink_keys: torch.Tensor
    sink_values: torch.Tensor
    arenas: tuple[torch.Tensor, ...]
    num_blocks: int
    block_tokens: tuple[int, ...] | None
    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    tail_start: int
    tail_len: int
    newest: NewToken | None = field(default=None, compare=False, repr=False)
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    prepared: PreparedCalls = field(default_factory=PreparedCalls, init=False, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of a copy what a backend keeps with these very tensors."""
        self.write_newest()
        return {**self.__dict__, "newest": None, "memo": {}, "prepared": PreparedCalls()}

    def with_tail(self, start: int, length: int, newest: NewToken | None = None) -> KVView:
        """Return a view that differs in its tail only, and knows all that this one knows."""
        view = object.__new__(KVView)
        # a decode step makes one for each layer: a copy of the attributes costs a fraction of the constructor
        view.__dict__.update(self.__dict__, tail_start=start, tail_len=length, newest=newest)
        return view

    @property
    def waiting(self) -> NewToken | None:
        """The last tail token while it is not in the rings; None when all are."""
        newest = self.newest
        return None if newest is None or newest.states is None else newest

    def write_newest(self) -> None:
        """See to it that the rings hold all tail tokens."""
        if self.newest is not None:
            self.newest.write()

    def with_exact(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Return a view whose tail is the tail of this one and then other tokens, not a ring."""
        self.write_newest()
        tails = []
        for tail, new in ((self.tail_keys, keys), (self.tail_values, values)):
            parts = [*(tail[:, :, span] for span in self.tail_slices()), new]
            tails.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
        return replace(self, tail_keys=tails[0], tail_values=tails[1], tail_start=0, tail_len=tails[0].shape[2])

    @cached_property
    def record(self) -> RecordFormat:
        """Format of the block records."""
        return RecordFormat(self.keys.format, self.values.format)

    @property
    def num_sinks(self) -> int:
        """Sink tokens stored."""
        return self.sink_keys.shape[-2]

    @cached_property
    def packed_tokens(self) -> int:
        """Tokens held in packed blocks."""
        if self.block_tokens is not None:
            return sum(self.block_tokens)
        return self.num_blocks * BLOCK_TOKENS

    @property
    def seq_len(self) -> int:
        """Tokens attention reads: sinks, packed and tail."""
        return self.sink_keys.shape[-2] + self.packed_tokens + self.tail_len

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return self.tail_keys.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.tail_keys.shape[1]

    def tail_slices(self) -> list[slice]:
        """Return the ring slots of the tail tokens, oldest first, as one or two slices."""
        return ring_slices(self.tail_start, self.tail_len, self.tail_keys.shape[-2])


def ring_slices(start: int, count: int, slots: int) -> list[slice]:
    """Return the slots of ``count`` tokens from ``start`` in a ring, as at most two slices."""
    if not count:
        return []
    end = start + count
    if end <= slots:
        return [slice(start, end)]
    return [slice(start, slots), slice(0, end - slots)]


def dense_view(keys: torch.Tensor, values: torch.Tensor) -> KVView:
    """See plain keys and values ``(batch, num_kv_heads, seq_len, head_dim)`` as a layer of exact tokens."""
    codecs = [
        VectorCodec(VectorFormat("exact", tensor.shape[3], exact_dtype=tensor.dtype), VectorTables())
        for tensor in (keys, values)
    ]
    return KVView(
        keys=codecs[0],
        values=codecs[1],
        sink_keys=keys[:, :, :0],
        sink_values=values[:, :, :0],
        arenas=(),
        num_blocks=0,
        block_tokens=None,
        tail_keys=keys,
        tail_values=values,
        tail_start=0,
        tail_len=keys.shape[2],
    )


@dataclass(frozen=True)
class AttendOptions:
    """Everything but tensors of the store that changes the result of attention.

    Attributes:
        scaling: Factor of the query-key products.
        mask: None, or bool (True = may attend) or additive float, ``(batch | 1, num_q_heads | 1, q_len | 1, seq_len)``.
        is_causal: With no mask, query ``i`` sees key ``j <= i + seq_len - q_len``.
        sliding_window: With no mask, keys further back than this many tokens are hidden.
        softcap: ``softcap * tanh(score / softcap)`` before the mask.
        sink_logits: ``(num_q_heads,)``, one more logit in every softmax that carries no value.
    """

    scaling: float
    mask: torch.Tensor | None = None
    is_causal: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
