"""The bit format: exact round trips, known bytes, true sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_turboquant.errors import ConfigError, ShapeError
from hf_turboquant.packing import (
    PLANE_WIDTHS,
    fold_codes,
    pack_codes,
    plane_row_bytes,
    plane_widths,
    row_bytes,
    unpack_codes,
)

BITS = sorted(PLANE_WIDTHS)


def random_codes(bits: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=200, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    rows=st.integers(1, 9),
    count=st.integers(1, 200),
    lead=st.sampled_from([(), (2,), (2, 3)]),
    seed=st.integers(0, 2**31),
)
def test_round_trip_is_exact(bits, rows, count, lead, seed):
    codes = random_codes(bits, *lead, rows, count, seed=seed)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*lead, rows * row_bytes(count, bits))
    unpacked = unpack_codes(packed, bits, rows, count)
    assert unpacked.dtype == torch.uint8
    assert torch.equal(unpacked, codes)


@settings(max_examples=100, deadline=None)
@given(
    bits=st.sampled_from(BITS), rows=st.integers(1, 4), count=st.integers(1, 16).map(lambda n: 8 * n), data=st.data()
)
def test_every_byte_string_unpacks_and_packs_back(bits, rows, count, data):
    """Where rows fill their bytes there are no spare bits, so packing is a bijection."""
    size = rows * row_bytes(count, bits)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    packed = torch.tensor(list(raw), dtype=torch.uint8)
    assert torch.equal(pack_codes(unpack_codes(packed, bits, rows, count), bits), packed)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 80, 96, 127, 128, 576])
def test_round_trip_of_every_code_at_every_position(bits, count):
    codes = (torch.arange(2**bits)[:, None] + torch.arange(count)).remainder(2**bits).to(torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, 2**bits, count), codes)


@pytest.mark.parametrize("bits", BITS)
def test_non_contiguous_codes_pack_alike(bits):
    codes = random_codes(bits, 2, 24, 40)
    turned = codes.transpose(-1, -2)
    assert torch.equal(pack_codes(turned, bits), pack_codes(turned.contiguous(), bits))


# known bytes


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        # position j + p * row bytes lies at bit p * width
        pytest.param(1, [1, 0, 0, 0, 0, 0, 0, 1], [0b10000001], id="b1-one-byte"),
        pytest.param(1, [1, 0] * 8, [0xFF, 0x00], id="b1-positions-alternate-between-two-bytes"),
        # ascending 0 1 2 3 is folded to 1 0 2 3
        pytest.param(2, [0, 1, 2, 3], [0b11_10_00_01], id="b2-one-byte"),
        pytest.param(2, [0, 1, 2, 3, 0, 1, 2, 3], [0b10_01_10_01, 0b11_00_11_00], id="b2-two-bytes"),
        # ascending 0..7 is folded to 3 2 1 0 4 5 6 7: low bits 3 2 1 0 0 1 2 3, high bits 0 0 0 0 1 1 1 1
        pytest.param(3, list(range(8)), [0b10_00_01_11, 0b11_01_00_10, 0b1111_0000], id="b3-low-plane-then-high-plane"),
        # ascending 0 and 15 are folded to 7 and 15
        pytest.param(4, [0, 15], [0xF7], id="b4-one-byte"),
        pytest.param(4, [8, 7, 9, 6], [0x98, 0x10], id="b4-two-bytes"),
        pytest.param(8, [0, 127, 128, 255], [0, 127, 128, 255], id="b8-as-it-is"),
        # spare bits are zero
        pytest.param(1, [1], [1], id="b1-single-code"),
        pytest.param(3, [7], [3, 1], id="b3-single-code"),
        pytest.param(4, [8, 15, 9], [0x98, 0x0F], id="b4-odd-count"),
    ],
)
def test_known_bytes_of_one_row(bits, codes, expected):
    packed = pack_codes(torch.tensor([codes], dtype=torch.uint8), bits)
    assert packed.tolist() == expected


def test_all_rows_of_a_plane_come_before_the_next_plane():
    codes = torch.tensor([[7] * 8, [4] * 8], dtype=torch.uint8)
    # two rows of low bits (11 and 00), then two rows of high bits
    assert pack_codes(codes, 3).tolist() == [0xFF, 0xFF, 0x00, 0x00, 0xFF, 0xFF]


# folding


@pytest.mark.parametrize("bits", BITS)
def test_folding_is_its_own_inverse(bits):
    codes = torch.arange(2**bits, dtype=torch.uint8)
    folded = fold_codes(codes, bits)
    assert torch.equal(fold_codes(folded, bits), codes)
    assert sorted(folded.tolist()) == codes.tolist()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_folded_codes_are_sign_and_magnitude(bits):
    """The mirror of a code differs from it in the high bit alone, and the low bits grow with the magnitude."""
    half = 1 << (bits - 1)
    codes = torch.arange(2**bits, dtype=torch.uint8)
    folded = fold_codes(codes, bits)
    mirrored = fold_codes(codes.flip(0), bits)
    assert ((folded ^ mirrored) == half).all()
    assert (folded[half:] & (half - 1)).tolist() == list(range(half))
    assert ((folded & half) != 0).tolist() == [False] * half + [True] * half


@pytest.mark.parametrize("bits", [1, 8])
def test_one_and_eight_bits_are_not_folded(bits):
    codes = torch.arange(2**bits, dtype=torch.uint8)
    assert torch.equal(fold_codes(codes, bits), codes)


# sizes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [8, 64, 80, 96, 128, 576])
def test_codes_cost_their_bits_and_no_more(bits, count):
    assert row_bytes(count, bits) * 8 == count * bits


@pytest.mark.parametrize(
    ("count", "bits", "expected"),
    [
        pytest.param(1, 3, 2, id="one-code-of-3-bits-takes-a-byte-of-each-plane"),
        pytest.param(9, 1, 2, id="9x1"),
        pytest.param(5, 2, 2, id="5x2"),
        pytest.param(5, 3, 3, id="5x3"),
        pytest.param(3, 4, 2, id="3x4"),
        pytest.param(0, 4, 0, id="none"),
    ],
)
def test_rows_are_rounded_up_to_bytes(count, bits, expected):
    assert row_bytes(count, bits) == expected


def test_plane_widths_sum_to_the_bits_and_divide_a_byte():
    for bits in BITS:
        assert sum(plane_widths(bits)) == bits
        assert all(8 % width == 0 for width in plane_widths(bits))
    assert plane_row_bytes(128, 2) == 32


# errors


@pytest.mark.parametrize("bits", [0, 5, 6, 7, 16])
def test_width_without_a_format_is_refused(bits):
    with pytest.raises(ConfigError, match=rf"bits must be one of \[1, 2, 3, 4, 8\].*got {bits}"):
        plane_widths(bits)


def test_wrong_number_of_bytes_is_refused():
    with pytest.raises(ShapeError, match=r"96 bytes for 2 rows of 128 codes at 3 bits, got 95"):
        unpack_codes(torch.zeros(95, dtype=torch.uint8), 3, 2, 128)
