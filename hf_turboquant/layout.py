"""Where everything lies inside a block record.

The unit of the compressed store is the *block record*: 128 consecutive tokens of one KV head, keys first,
values behind them, in one run of bytes. A record is cut into *sections* (codes, norms, means), each aligned
to 16 bytes at an offset known from the configuration alone, so that a kernel addresses it with constants.

Key codes are token-major: row = token, packed along the channels. Value codes are channel-major: row = channel,
packed along the 128 tokens of the block. Both are thus packed along the dimension a matrix product sums over.
``docs/format.md`` draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import torch

from hf_turboquant.packing import row_bytes

BLOCK_TOKENS: Final = 128
"""Tokens in one packed block."""

SECTION_ALIGNMENT: Final = 16
"""Bytes every section offset and record size is a multiple of."""

Kind = Literal["mse", "prod", "exact"]
Scale = Literal["matched", "norm", "unbiased"]


@dataclass(frozen=True)
class Section:
    """One run of bytes inside a record: ``rows`` x ``count`` items.

    ``bits`` is the code width of a packed section; ``dtype`` the element type of an unpacked one.
    """

    offset: int
    nbytes: int
    rows: int
    count: int
    bits: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ChannelGroup:
    """Contiguous channels of the rotated basis that share a norm and a code width."""

    start: int
    size: int
    bits: int


@dataclass(frozen=True)
class VectorFormat:
    """How one kind of vector (keys, or values) is stored in a block.

    Attributes:
        kind: ``mse`` codes and a norm; ``prod`` adds signs of a projected residual; ``exact`` keeps the vectors.
        head_dim: Channels of a vector.
        groups: Channel groups with their code widths; one group unless channels are split. Empty for ``exact``.
        transposed: False: rows are tokens (keys). True: rows are channels (values).
        centered: Whether the block stores the mean of its vectors (bfloat16, rotated basis) and codes the rest.
        scale: What the stored norm makes true of a reconstruction: ``matched`` keeps the norm of the vector,
            ``norm`` is the paper's plain norm, ``unbiased`` keeps ``<x, reconstruction> = <x, x>``.
        norm_dtype: Floating type of the stored norms.
        exact_dtype: Element type of an ``exact`` section.
    """

    kind: Kind
    head_dim: int
    groups: tuple[ChannelGroup, ...] = ()
    transposed: bool = False
    centered: bool = False
    scale: Scale = "matched"
    norm_dtype: torch.dtype = torch.float16
    exact_dtype: torch.dtype | None = None

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Sections by name, in the order they lie in the record.

        ``codes0``, ``codes1``: packed codes of a group. ``signs``: packed signs (``prod``). ``norms``:
        ``(groups, 128)``. ``residual_norms``: ``(1, 128)`` (``prod``). ``mean``: ``(1, head_dim)``
        bfloat16. ``exact``: ``(128, head_dim)``.
        """
        builder = _SectionBuilder()
        if self.kind == "exact":
            assert self.exact_dtype is not None
            builder.add_plain("exact", BLOCK_TOKENS, self.head_dim, self.exact_dtype)
            return builder.sections
        for index, group in enumerate(self.groups):
            rows, count = (group.size, BLOCK_TOKENS) if self.transposed else (BLOCK_TOKENS, group.size)
            builder.add_codes(f"codes{index}", rows, count, group.bits)
        if self.kind == "prod":
            builder.add_codes("signs", BLOCK_TOKENS, self.head_dim, 1)
        builder.add_plain("norms", len(self.groups), BLOCK_TOKENS, self.norm_dtype)
        if self.kind == "prod":
            builder.add_plain("residual_norms", 1, BLOCK_TOKENS, self.norm_dtype)
        if self.centered:
            builder.add_plain("mean", 1, self.head_dim, torch.bfloat16)
        return builder.sections

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one block of these vectors, a multiple of 16."""
        last = list(self.sections.values())[-1]
        return _align(last.offset + last.nbytes)

    @property
    def bits_per_value(self) -> float:
        """Bits stored per coordinate: codes, norms, means and alignment, all counted."""
        return self.nbytes * 8 / (BLOCK_TOKENS * self.head_dim)


@dataclass(frozen=True)
class RecordFormat:
    """A block record: the key part, then the value part."""

    keys: VectorFormat
    values: VectorFormat

    @property
    def value_offset(self) -> int:
        """Byte offset of the value part inside the record."""
        return self.keys.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of one record: 128 tokens of one KV head."""
        return self.keys.nbytes + self.values.nbytes


class _SectionBuilder:
    """Lay sections one behind another, aligned."""

    def __init__(self) -> None:
        self.sections: dict[str, Section] = {}
        self._end = 0

    def add_codes(self, name: str, rows: int, count: int, bits: int) -> None:
        self._add(name, rows * row_bytes(count, bits), rows, count, bits=bits)

    def add_plain(self, name: str, rows: int, count: int, dtype: torch.dtype) -> None:
        self._add(name, rows * count * dtype.itemsize, rows, count, dtype=dtype)

    def _add(
        self, name: str, nbytes: int, rows: int, count: int, *, bits: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        offset = _align(self._end)
        self.sections[name] = Section(offset, nbytes, rows, count, bits, dtype)
        self._end = offset + nbytes


def _align(size: int) -> int:
    return -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
