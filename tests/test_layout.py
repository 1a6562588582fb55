"""Block records: sections in order, aligned, apart, and counted in full."""

import pytest
import torch

from hf_turboquant.layout import (
    BLOCK_TOKENS,
    SECTION_ALIGNMENT,
    ChannelGroup,
    RecordFormat,
    VectorFormat,
    _SectionBuilder,
)


def one_group(head_dim: int, bits: int) -> tuple[ChannelGroup, ...]:
    return (ChannelGroup(0, head_dim, bits),)


def halves(head_dim: int, first: int, second: int) -> tuple[ChannelGroup, ...]:
    half = head_dim // 2
    return ChannelGroup(0, half, first), ChannelGroup(half, half, second)


FORMATS = {
    "mse-d128-b4": VectorFormat("mse", 128, one_group(128, 4)),
    "mse-d128-b3-centered": VectorFormat("mse", 128, one_group(128, 3), centered=True),
    "mse-d64-b2-values": VectorFormat("mse", 64, one_group(64, 2), transposed=True),
    "mse-d576-b8-float32": VectorFormat("mse", 576, one_group(576, 8), norm_dtype=torch.float32),
    "mse-d80-b1-values-centered": VectorFormat("mse", 80, one_group(80, 1), transposed=True, centered=True),
    "mse-d128-split-4-2-centered": VectorFormat("mse", 128, halves(128, 4, 2), centered=True),
    "prod-d128-b3": VectorFormat("prod", 128, one_group(128, 2)),
    "prod-d96-b4-centered": VectorFormat("prod", 96, one_group(96, 3), centered=True),
    "mse-d7-b3-odd-size": VectorFormat("mse", 7, one_group(7, 3), centered=True),
    "exact-d128-bfloat16": VectorFormat("exact", 128, exact_dtype=torch.bfloat16),
    "exact-d33-float32": VectorFormat("exact", 33, exact_dtype=torch.float32),
}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
class TestSections:
    def test_are_aligned_in_order_and_do_not_overlap(self, fmt):
        end = 0
        for section in fmt.sections.values():
            assert section.offset % SECTION_ALIGNMENT == 0
            assert end <= section.offset < end + SECTION_ALIGNMENT
            assert section.nbytes > 0
            end = section.offset + section.nbytes
        assert fmt.nbytes % SECTION_ALIGNMENT == 0
        assert end <= fmt.nbytes < end + SECTION_ALIGNMENT

    def test_hold_what_they_say(self, fmt):
        for section in fmt.sections.values():
            items = section.rows * section.count
            if section.dtype is None:
                assert section.nbytes * 8 >= items * section.bits
                assert section.nbytes * 8 < items * section.bits + section.rows * 16
            else:
                assert section.bits is None
                assert section.nbytes == items * section.dtype.itemsize

    def test_every_code_has_a_place(self, fmt):
        if fmt.kind == "exact":
            assert list(fmt.sections) == ["exact"]
            return
        for index, group in enumerate(fmt.groups):
            section = fmt.sections[f"codes{index}"]
            shape = (group.size, BLOCK_TOKENS) if fmt.transposed else (BLOCK_TOKENS, group.size)
            assert (section.rows, section.count, section.bits) == (*shape, group.bits)
        assert fmt.sections["norms"].rows == len(fmt.groups)
        assert fmt.sections["norms"].count == BLOCK_TOKENS
        assert ("mean" in fmt.sections) == fmt.centered
        assert ("signs" in fmt.sections) == ("residual_norms" in fmt.sections) == (fmt.kind == "prod")

    def test_bits_per_value_counts_every_byte(self, fmt):
        assert fmt.bits_per_value == fmt.nbytes * 8 / (BLOCK_TOKENS * fmt.head_dim)


@pytest.mark.parametrize(
    ("name", "nbytes", "bits_per_value"),
    [
        # codes + float16 norms (2 bytes a token) + bfloat16 mean (2 bytes a channel)
        pytest.param("mse-d128-b4", 8192 + 256, 4.125, id="4-bit"),
        pytest.param("mse-d128-b3-centered", 6144 + 256 + 256, 3.25, id="3-bit-centered"),
        pytest.param("mse-d64-b2-values", 2048 + 256, 2.25, id="2-bit-values"),
        pytest.param("mse-d128-split-4-2-centered", 4096 + 2048 + 512 + 256, 3.375, id="4-and-2-bit"),
        pytest.param("prod-d128-b3", 4096 + 2048 + 256 + 256, 3.25, id="prod-3-bit"),
        pytest.param("exact-d128-bfloat16", 32768, 16.0, id="exact"),
        # low plane 2 bytes, high plane 1 byte a token; the mean of 14 bytes is padded to 16
        pytest.param("mse-d7-b3-odd-size", 128 * 3 + 256 + 16, 656 * 8 / 896, id="odd-size"),
    ],
)
def test_known_sizes(name, nbytes, bits_per_value):
    assert FORMATS[name].nbytes == nbytes
    assert FORMATS[name].bits_per_value == pytest.approx(bits_per_value)


def test_section_behind_an_odd_one_is_aligned():
    builder = _SectionBuilder()
    builder.add_codes("codes", 5, 3, 4)
    builder.add_plain("mean", 1, 7, torch.bfloat16)
    assert [(s.offset, s.nbytes) for s in builder.sections.values()] == [(0, 10), (16, 14)]


def test_values_lie_behind_keys():
    keys, values = FORMATS["mse-d128-b3-centered"], FORMATS["mse-d64-b2-values"]
    record = RecordFormat(keys, values)
    assert record.value_offset == keys.nbytes
    assert record.value_offset % SECTION_ALIGNMENT == 0
    assert record.nbytes == keys.nbytes + values.nbytes


def test_formats_are_values():
    first = VectorFormat("mse", 64, one_group(64, 2))
    second = VectorFormat("mse", 64, one_group(64, 2))
    assert first.sections == second.sections
    assert first == second
    assert hash(first) == hash(second)
