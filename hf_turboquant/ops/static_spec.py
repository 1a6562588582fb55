"""A store of fixed size in one tensor, and everything about it that is no tensor, under a name.

What a step changes is a few counts on the device, :data:`LENGTHS`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from hf_turboquant.layout import BLOCK_TOKENS, VectorFormat
from hf_turboquant.ops import Backend, KVView, VectorCodec, VectorTables, choose_backend

LENGTHS = 16
"""Entries of the counts of a layer, int32. The second half is where a step leaves what the first half becomes."""


class Count(IntEnum):
    """Places in the counts of a layer.

    ``OVERFLOW``: tokens came when there was no room for them, and were not stored. ``FAULT``: a block held values that
    cannot be quantized, and its codes mean nothing.
    """

    SINKS = 0
    BLOCKS = 1
    TAIL_START = 2
    TAIL_LEN = 3
    TOKENS = 4
    OVERFLOW = 5
    FAULT = 6


@dataclass(frozen=True)
class CodecSpec:
    """A codec without its tensors.

    Attributes:
        format: How vectors are stored.
        tables: Groups of channels with centroids.
        matrices: Which of rotation, projection, channel order and query matrix there are.
        projection_scale: As in :class:`VectorTables`.
    """

    format: VectorFormat
    tables: int
    matrices: tuple[bool, ...]
    projection_scale: float

    @classmethod
    def of(cls, codec: VectorCodec) -> CodecSpec:
        """Describe a codec."""
        tables = codec.tables
        there = tuple(matrix is not None for matrix in _matrices(tables))
        return cls(codec.format, len(tables.centroids), there, tables.projection_scale)

    @property
    def num_tensors(self) -> int:
        """Tensors that :func:`codec_tensors` returns for such a codec."""
        return 2 * self.tables + sum(self.matrices)

    def codec(self, tensors: Sequence[torch.Tensor]) -> VectorCodec:
        """Return the codec with the tensors of :func:`codec_tensors`."""
        rest = iter(tensors[2 * self.tables :])
        matrices = [next(rest) if there else None for there in self.matrices]
        return VectorCodec(
            self.format,
            VectorTables(
                tuple(tensors[: self.tables]),
                tuple(tensors[self.tables : 2 * self.tables]),
                matrices[0],
                matrices[1],
                self.projection_scale,
                *matrices[2:],
            ),
        )


def codec_tensors(codec: VectorCodec) -> list[torch.Tensor]:
    """Return the tensors of a codec, in an order that :meth:`CodecSpec.codec` knows."""
    tables = codec.tables
    return [*tables.centroids, *tables.boundaries, *(matrix for matrix in _matrices(tables) if matrix is not None)]


def _matrices(tables: VectorTables) -> tuple[torch.Tensor | None, ...]:
    """Return what :attr:`CodecSpec.matrices` speaks of."""
    return tables.rotation, tables.projection, tables.channel_order, tables.query_matrix


@dataclass(frozen=True)
class StaticSpec:
    """Everything about a store of fixed size that is no tensor.

    Attributes:
        keys: Codec of the keys.
        values: Codec of the values.
        sink_tokens: First tokens kept exact: as many slots at the front of the exact tokens.
        residual_window: Last tokens kept exact; the ring behind the sinks has room for these and a block.
        max_tokens: Tokens there is room for.
        batch: Sequences.
        heads: Key/value heads.
        dtypes: Of exact keys and exact values.
        backend: Who computes.
        tables: Name of the tables, if they are known by one (:func:`register_tables`).
    """

    keys: CodecSpec
    values: CodecSpec
    sink_tokens: int
    residual_window: int
    max_tokens: int
    batch: int
    heads: int
    dtypes: tuple[torch.dtype, torch.dtype]
    backend: str
    tables: str = ""

    @property
    def slots(self) -> int:
        """Slots of the ring."""
        return self.residual_window + BLOCK_TOKENS

    @property
    def max_blocks(self) -> int:
        """Packed blocks of a full store."""
        return max(self.max_tokens - self.sink_tokens - self.residual_window, 0) // BLOCK_TOKENS

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, the tensor that holds all of a store."""
        return sum(size for _, _, size in self._parts())

    def views(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the parts of a state.

        Args:
            state: ``(state_bytes,)`` uint8.

        Returns:
            Counts ``(LENGTHS,)`` int32; exact keys ``(batch, heads, sink_tokens + slots, head_dim)``; exact values, the
            last dimension theirs; packed blocks ``(max_blocks, batch, heads, record bytes)`` uint8.
        """
        views, start = [], 0
        for shape, dtype, size in self._parts():
            used = math.prod(shape) * dtype.itemsize
            views.append(state[start : start + used].view(dtype).view(shape))
            start += size
        return views[0], views[1], views[2], views[3]

    def _parts(self) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
        """Return shape, dtype and bytes with padding of every part of a state."""
        rows, slots = (self.batch, self.heads), self.sink_tokens + self.slots
        keys, values = self.keys.format, self.values.format
        parts: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((LENGTHS,), torch.int32),
            ((*rows, slots, keys.head_dim), self.dtypes[0]),
            ((*rows, slots, values.head_dim), self.dtypes[1]),
            ((max(self.max_blocks, 1), *rows, keys.nbytes + values.nbytes), torch.uint8),
        ]
        return [
            (shape, dtype, -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT) for shape, dtype in parts
        ]

    def codecs(self, tables: Sequence[torch.Tensor], device: torch.device) -> tuple[VectorCodec, VectorCodec]:
        """Return the codecs of keys and values, from the tensors of both if they are not known by name."""
        if self.tables:
            tables = _TABLES[self.tables, device]
        split = self.keys.num_tensors
        return self.keys.codec(tables[:split]), self.values.codec(tables[split:])

    def resolve(self, device: torch.device) -> Backend:
        """Return who computes on a device."""
        return choose_backend(self.backend, device, self.keys.format, self.values.format).backend


_ALIGNMENT = 256
"""Bytes: where the parts of a state may start."""

SPECS: dict[str, StaticSpec] = {}
"""What :func:`register_spec` named: the ops take a name."""

_TABLES: dict[tuple[str, torch.device], Sequence[torch.Tensor]] = {}


def register_spec(spec: StaticSpec) -> str:
    """Return the name of a spec for the ops: equal specs have equal names, in every process."""
    name = repr(spec)
    SPECS[name] = spec
    return name


def register_tables(tensors: Sequence[torch.Tensor], device: torch.device) -> str:
    """Return a name for the tables of a codec pair: equal tables have equal names, in every process.

    A step that names its tables does not take them as inputs, of which every one costs time at every call. They are
    kept for good, which captured graphs need.

    Args:
        tensors: Tables that do not depend on the tokens stored.
        device: Where they are.
    """
    for (name, place), known in list(_TABLES.items()):
        if place == device and len(known) == len(tensors) and all(map(lambda a, b: a is b, known, tensors)):
            return name
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    name = digest.hexdigest()[:32]
    _TABLES.setdefault((name, device), tuple(tensors))
    return name


def exact_view(
    spec: StaticSpec,
    codecs: tuple[VectorCodec, VectorCodec],
    exact_keys: torch.Tensor,
    exact_values: torch.Tensor,
    arena: torch.Tensor,
    counts: Sequence[int],
) -> KVView:
    """View the tokens of a store whose counts the host knows."""
    sinks = counts[Count.SINKS]
    return KVView(
        keys=codecs[0],
        values=codecs[1],
        sink_keys=exact_keys[:, :, :sinks],
        sink_values=exact_values[:, :, :sinks],
        arenas=(arena,),
        num_blocks=counts[Count.BLOCKS],
        block_tokens=None,
        tail_keys=exact_keys[:, :, spec.sink_tokens :],
        tail_values=exact_values[:, :, spec.sink_tokens :],
        tail_start=counts[Count.TAIL_START],
        tail_len=counts[Count.TAIL_LEN],
    )


def full_counts(spec: StaticSpec) -> list[int]:
    """Return counts that no store of a spec exceeds in any place."""
    return [spec.sink_tokens, max(spec.max_blocks, 1), 0, spec.slots, spec.max_tokens]
