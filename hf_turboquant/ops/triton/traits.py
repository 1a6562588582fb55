"""What a kernel knows of a format when it is compiled: numbers and short strings, hashable.

An instance is passed as one ``constexpr`` argument. Its ``repr`` is part of the compile key, so that two formats never
share a binary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from hf_turboquant.errors import ShapeError
from hf_turboquant.layout import BLOCK_TOKENS, EXACT_BITS, VectorFormat
from hf_turboquant.ops.backend import format_obstacle
from hf_turboquant.packing import PLANE_WIDTHS

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


@dataclass(frozen=True)
class GroupTraits:
    """A channel group with codes.

    Attributes:
        index: Position among the groups with codes: the row of its norms.
        start: First channel.
        size: Channels, a multiple of 8.
        bits: Bits per code.
        codes: Byte offset of its code section.
        rows: Rows of the code section.
        count: Codes in a row.
    """

    index: int
    start: int
    size: int
    bits: int
    codes: int
    rows: int
    count: int

    @property
    def width(self) -> int:
        """Bits of the first plane."""
        return PLANE_WIDTHS[self.bits][0]

    @property
    def parts(self) -> int:
        """Codes in a byte of the first plane."""
        return 8 // self.width

    @property
    def row_bytes(self) -> int:
        """Bytes in a row of the first plane."""
        return self.count * self.width // 8

    @property
    def lane_bytes(self) -> int:
        """Bytes of a row for each of four lanes, of 1-bit codes as if they had two bits.

        Two lanes share the bytes of 1-bit codes and of high bits, each taking every other bit.
        """
        return self.count * max(self.width, 2) // 32

    @property
    def lane_words(self) -> int:
        """Words that a lane loads; of rows of 32 narrow codes it needs half a word."""
        return max(self.lane_bytes // 4, 1)

    @property
    def row_words(self) -> int:
        """Words of a row, of 1-bit codes as if they had two bits; 0 where four lanes cannot read them in equal runs."""
        words = self.lane_bytes
        even = self.count * max(self.width, 2) == 32 * words
        return words if even and words >= 4 and words == next_power_of_2(words) else 0

    @property
    def word_parts(self) -> int:
        """Codes in a byte of :attr:`row_words`."""
        return 8 // max(self.width, 2)

    @property
    def word_pieces(self) -> int:
        """Into how many loads a row is cut: a lane loads four words at once."""
        return max(self.row_words // 16, 1)

    @property
    def operands(self) -> int:
        """Products over a row: one for each code of a byte, and for each piece."""
        return self.word_parts * self.word_pieces if self.row_words else self.parts

    @property
    def row_bytes_pad(self) -> int:
        """``row_bytes`` as a tile extent: a power of two that a matrix product can sum over."""
        return max(next_power_of_2(self.row_bytes), 16)

    @property
    def sign_row_bytes(self) -> int:
        """Bytes in a row of the plane of high bits (3-bit and 1-bit codes)."""
        return self.count // 8

    @property
    def sign_codes(self) -> int:
        """Byte offset of the plane of high bits: of 3-bit codes the second plane, of 1-bit codes the only one."""
        return self.codes + (self.rows * self.row_bytes if self.bits > 1 else 0)

    @property
    def size_pad(self) -> int:
        """``size`` as a tile extent."""
        return max(next_power_of_2(self.size), 16)

    @property
    def eighth(self) -> int:
        """Channels in an eighth of the group: the order in which codes are packed."""
        return self.size // 8

    @property
    def eighth_pad(self) -> int:
        """``eighth`` as a tile extent."""
        return max(next_power_of_2(self.eighth), 2)


@dataclass(frozen=True)
class ExactTraits:
    """A channel group kept as it is, beside groups with codes.

    Attributes:
        start: First channel.
        size: Channels; 0 where there is no such group.
        offset: Byte offset of its section.
    """

    start: int = 0
    size: int = 0
    offset: int = 0

    @property
    def half(self) -> int:
        """``size`` as a tile extent, and half of what a matrix product sums over."""
        return max(next_power_of_2(self.size), 8)


@dataclass(frozen=True)
class VectorTraits:
    """A :class:`VectorFormat` as constants.

    ``groups`` are those with codes. Section attributes (``norms``, ``residual_norms``, ``signs``, ``mean``, ``exact``,
    ``scales``, ``zeros``) are byte offsets in the part of the record that holds these vectors, -1 where there is no
    such section.
    """

    kind: str
    head_dim: int
    groups: tuple[GroupTraits, ...]
    exact_group: ExactTraits
    transposed: bool
    centered: bool
    scale: str
    norm_dtype: str
    exact_dtype: str
    norms: int
    residual_norms: int
    signs: int
    mean: int
    exact: int
    scales: int
    zeros: int

    @property
    def num_groups(self) -> int:
        """Channel groups with codes."""
        return len(self.groups)

    @property
    def word_groups(self) -> bool:
        """Whether all codes are read by words."""
        groups = (*self.groups, self.sign_traits) if self.signs >= 0 else self.groups
        return bool(groups) and self.exact_group.size == 0 and all(group.row_words for group in groups)

    @property
    def has_word_order(self) -> bool:
        """Whether a step over values takes tokens in the order of the words that hold their codes."""
        return self.kind == "mse" and self.word_groups and len({group.word_parts for group in self.groups}) == 1

    @property
    def head_dim_pad(self) -> int:
        """``head_dim`` as a tile extent."""
        return max(next_power_of_2(self.head_dim), 16)

    @property
    def first(self) -> GroupTraits:
        """The first group with codes; all channels, as if they had 8 bits, where there is none."""
        return self.groups[0] if self.groups else GroupTraits(0, 0, self.head_dim, 8, 0, BLOCK_TOKENS, self.head_dim)

    @property
    def second(self) -> GroupTraits:
        """The second group with codes; one that is never read where there is none."""
        return self.groups[1] if len(self.groups) == 2 else self.first

    @property
    def sign_traits(self) -> GroupTraits:
        """The sign section of ``prod`` and ``qjl``, seen as a group of 1-bit codes over all channels."""
        return GroupTraits(0, 0, self.head_dim, 1, self.signs, BLOCK_TOKENS, self.head_dim)

    @property
    def operand_groups(self) -> tuple[GroupTraits, ...]:
        """What products of the fast kernel sum over: groups with codes, and the signs of ``prod`` as one more."""
        return (*self.groups, self.sign_traits) if self.kind == "prod" else self.groups

    @property
    def num_operand_groups(self) -> int:
        """How many :attr:`operand_groups` there are."""
        return len(self.operand_groups)

    @property
    def operand_norms(self) -> tuple[int, ...]:
        """Byte offset of the norms of each of the :attr:`operand_groups`, which are 128 float16 each."""
        norms = tuple(self.norms + 2 * BLOCK_TOKENS * group.index for group in self.groups)
        return (*norms, self.residual_norms) if self.kind == "prod" else norms

    @property
    def operand_channels(self) -> int:
        """Channels of all :attr:`operand_groups`."""
        return sum(group.size for group in self.operand_groups)

    @property
    def wide_norms(self) -> bool:
        """Whether vectors have a norm that may leave the range of float16."""
        return self.norms >= 0 and self.norm_dtype != "fp16"

    @property
    def norm_bytes(self) -> int:
        """Bytes of a norm."""
        return 4 if self.norm_dtype == "fp32" else 2

    @property
    def norm_limit(self) -> float:
        """Largest finite norm of the stored type."""
        names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        return torch.finfo(names[self.norm_dtype]).max


@dataclass(frozen=True)
class MaskTraits:
    """What a call does to scores before the softmax, as constants.

    Attributes:
        kind: Of the mask: ``none``, ``bool`` or ``float``.
        window: Whether tokens before a bound are hidden.
        softcap: Whether scores are capped.
        by_row: Whether mask or bound differ among the query rows of a KV head.
    """

    kind: str = "none"
    window: bool = False
    softcap: bool = False
    by_row: bool = False

    @property
    def hides(self) -> bool:
        """Whether tokens that are there may be hidden."""
        return self.kind != "none" or self.window

    @property
    def is_plain(self) -> bool:
        """Whether scores are left as they are."""
        return not (self.hides or self.softcap)

    @property
    def scaled(self) -> bool:
        """Whether scores must be exponents of 2 for it, not multiples of what a query is in units of."""
        return self.softcap or self.kind == "float"


@lru_cache(maxsize=256)
def traits_of(fmt: VectorFormat) -> VectorTraits:
    """Return the constants of a format.

    Raises:
        ShapeError: The kernels have no tile for it; the reference backend has.
    """
    obstacle = format_obstacle(fmt)
    if obstacle:
        raise ShapeError(f"vectors must have a format that backend='triton' reads: {obstacle}; use backend='reference'")
    coded = [(index, group) for index, group in enumerate(fmt.groups) if group.bits != EXACT_BITS]
    kept = [(index, group) for index, group in enumerate(fmt.groups) if group.bits == EXACT_BITS]
    sections = fmt.sections
    groups = tuple(
        GroupTraits(row, group.start, group.size, group.bits, section.offset, section.rows, section.count)
        for row, (index, group) in enumerate(coded)
        for section in (sections[f"codes{index}"],)
    )
    exact_groups = [ExactTraits(group.start, group.size, sections[f"exact{index}"].offset) for index, group in kept]
    offsets = {
        name: sections[name].offset if name in sections else -1
        for name in ("norms", "residual_norms", "signs", "mean", "exact", "scales", "zeros")
    }
    return VectorTraits(
        fmt.kind,
        fmt.head_dim,
        groups,
        exact_groups[0] if exact_groups else ExactTraits(),
        fmt.transposed,
        fmt.centered,
        fmt.scale,
        DTYPE_NAMES[fmt.norm_dtype],
        "" if fmt.exact_dtype is None else DTYPE_NAMES[fmt.exact_dtype],
        **offsets,
    )


def coded_tables(tables: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the tables of the groups with codes, in the order of :attr:`VectorTraits.groups`."""
    return [table for table in tables if table.numel()]
