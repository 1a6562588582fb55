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

EXACT_BITS: Final = 16
"""Width that means: kept as they are, in a floating type."""

SCALE_GROUP: Final = 32
"""Channels that share a scale and a zero in the ``group`` kind."""

Kind = Literal["mse", "prod", "qjl", "polar", "group", "exact"]
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
    """Contiguous channels of the rotated basis that share a norm and a code width.

    With 16 bits the channels are kept as they are and have no norm. For ``polar`` a group is one level of angles.
    """

    start: int
    size: int
    bits: int


@dataclass(frozen=True)
class VectorFormat:
    """How one kind of vector (keys, or values) is stored in a block.

    Attributes:
        kind: ``mse``: codes of coordinates and a norm. ``prod``: the same, and signs of the projected residual with its
            norm. ``qjl``: signs of the projected vector and its norm. ``polar``: codes of angles on several levels, and
            radii. ``group``: codes between the least and the largest of 32 channels. ``exact``: the vectors.
        head_dim: Channels of a vector.
        groups: Channel groups with their code widths; one group unless channels are split or some are exact. Empty
            for ``exact`` and ``qjl``.
        transposed: False: rows are tokens (keys). True: rows are channels (values).
        centered: Whether the block stores the mean of its vectors (bfloat16, rotated basis) and codes the rest.
        scale: What the stored norm makes true of a reconstruction: ``matched`` keeps the norm of the vector,
            ``norm`` is the paper's plain norm, ``unbiased`` keeps ``<x, reconstruction> = <x, x>``.
        norm_dtype: Floating type of the stored norms.
        exact_dtype: Element type of ``exact`` sections.
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

        ``codes0``, ``codes1``: packed codes of a group. ``exact0``: a group of 16 bits, ``(128, size)``. ``signs``:
        packed signs (``prod``, ``qjl``). ``norms``: ``(coded groups, 128)``. ``residual_norms``: ``(1, 128)``
        (``prod``). ``radii``: ``(radii, 128)`` (``polar``). ``scales``, ``zeros``: ``(head_dim / 32, 128)``
        (``group``). ``mean``: ``(1, head_dim)`` bfloat16. ``exact``: ``(128, head_dim)``.
        """
        builder = _SectionBuilder()
        if self.kind == "exact":
            assert self.exact_dtype is not None
            builder.add_plain("exact", BLOCK_TOKENS, self.head_dim, self.exact_dtype)
            return builder.sections
        for index, group in enumerate(self.groups):
            if group.bits == EXACT_BITS:
                assert self.exact_dtype is not None
                assert not self.transposed
                builder.add_plain(f"exact{index}", BLOCK_TOKENS, group.size, self.exact_dtype)
                continue
            rows, count = (group.size, BLOCK_TOKENS) if self.transposed else (BLOCK_TOKENS, group.size)
            builder.add_codes(f"codes{index}", rows, count, group.bits)
        if self.kind in ("prod", "qjl"):
            builder.add_codes("signs", BLOCK_TOKENS, self.head_dim, 1)
        for name, rows in self._float_rows().items():
            builder.add_plain(name, rows, BLOCK_TOKENS, self.norm_dtype)
        if self.centered:
            builder.add_plain("mean", 1, self.head_dim, torch.bfloat16)
        return builder.sections

    def _float_rows(self) -> dict[str, int]:
        """Return the sections of ``norm_dtype`` with their rows of 128."""
        if self.kind == "group":
            return {"scales": self.head_dim // SCALE_GROUP, "zeros": self.head_dim // SCALE_GROUP}
        if self.kind == "polar":
            return {"radii": self.head_dim >> len(self.groups)}
        if self.kind == "qjl":
            return {"norms": 1}
        norms = {"norms": sum(group.bits != EXACT_BITS for group in self.groups)}
        return {**norms, "residual_norms": 1} if self.kind == "prod" else norms

    def norm_row(self, index: int) -> int:
        """Return the row of ``norms`` that belongs to a coded group: its position among the coded groups."""
        return sum(group.bits != EXACT_BITS for group in self.groups[:index])

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
        self,
        name: str,
        nbytes: int,
        rows: int,
        count: int,
        *,
        bits: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        offset = _align(self._end)
        self.sections[name] = Section(offset, nbytes, rows, count, bits, dtype)
        self._end = offset + nbytes


def _align(size: int) -> int:
    return -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
