"""Codecs beside mse and prod: QJL, PolarQuant, integer ranges, channels kept exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.errors import ValueRangeError
from hf_turboquant.layout import BLOCK_TOKENS, SCALE_GROUP
from hf_turboquant.ops import AttendOptions, VectorCodec, attend, dequantize, reference
from hf_turboquant.ops.reference.polar import from_polar, to_polar
from hf_turboquant.quantizers import build_key_codec, build_value_codec, polar_codebook
from hf_turboquant.quantizers.mse import grouped_codec
from hf_turboquant.quantizers.split import channel_groups
from tests.test_quantizers import PLAIN, key_codec, round_trip, unit_blocks, value_codec, within
from tests.test_quantizers_attend import GROUP, HEAD_DIM, dense_reference, filled_store

CPU = torch.device("cpu")

# PolarQuant


@pytest.mark.parametrize("levels", [1, 4])
def test_polar_transform_is_inverted_by_its_inverse(levels: int) -> None:
    vectors = torch.randn(3, 5, 32)
    angles, radii = to_polar(vectors, levels=levels)
    assert [angle.shape[-1] for angle in angles] == [32 >> level for level in range(1, levels + 1)]
    torch.testing.assert_close(radii.norm(dim=-1), vectors.norm(dim=-1))
    assert angles[0].min() >= 0
    assert angles[0].max() < 2 * math.pi
    for angle in angles[1:]:
        assert angle.min() >= 0
        assert angle.max() <= math.pi / 2
    torch.testing.assert_close(from_polar(angles, radii), vectors)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_polar_codebook_is_optimal_for_the_angles_of_gaussian_vectors(level: int, bits: int) -> None:
    book = polar_codebook(level, bits)
    angles = to_polar(torch.randn(10_000, 16), levels=4)[0][level - 1].flatten()
    codes = torch.bucketize(angles, book.boundaries)
    errors = (angles - book.centroids[codes]).square()
    assert within(errors, book.mse)
    for code in range(1 << bits):
        cell = angles[codes == code]
        assert within(cell - book.centroids[code], 0.0, errors=5)


def test_polar_codebooks_above_the_first_level_are_symmetric_about_45_degrees() -> None:
    centroids = polar_codebook(3, 2).centroids.double()
    np.testing.assert_allclose(centroids + centroids.flip(0), math.pi / 2, atol=1e-6)


def test_polar_angles_of_four_levels_cost_3_875_bits() -> None:
    assert key_codec(128, key_codec="polar", norm_dtype="float16").format.bits_per_value == 3.875
    assert value_codec(64, value_codec="polar", norm_dtype="float16").format.bits_per_value == 3.875


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_polar_has_the_distortion_of_three_bits(head_dim: int) -> None:
    """Its angles cost 2.875 bits; what they lose is near the mse of 3-bit codes, not of 4-bit ones."""
    vectors = unit_blocks(8, head_dim)
    errors = (round_trip(vectors, key_codec(head_dim, key_codec="polar")) - vectors).square().sum(-1)
    assert 0.030 < errors.mean() < 0.050


def test_polar_keeps_norms() -> None:
    vectors = 7 * torch.randn(1, 2, BLOCK_TOKENS, 64)
    rebuilt = round_trip(vectors, key_codec(key_codec="polar"))
    torch.testing.assert_close(rebuilt.norm(dim=-1), vectors.norm(dim=-1), rtol=1e-5, atol=0)


def test_polar_values_equal_polar_keys() -> None:
    vectors = torch.randn(1, 2, BLOCK_TOKENS, 64)
    keys, values = key_codec(key_codec="polar"), value_codec(value_codec="polar")
    torch.testing.assert_close(round_trip(vectors, keys), round_trip(vectors, values))


# QJL


@pytest.mark.parametrize("projection", ["gaussian", "orthogonal"])
def test_qjl_is_unbiased_over_projections(projection: str) -> None:
    vectors, query = unit_blocks(1, 64), unit_blocks(1, 64, seed=1)
    errors = []
    for seed in range(80):
        codec = key_codec(key_codec="qjl", key_bits=1, projection=projection, seed=seed)
        errors.append(((round_trip(vectors, codec) - vectors) * (query + vectors)).sum(-1).mean())
    assert within(torch.stack(errors), 0.0)


def test_qjl_is_the_estimator_written_out() -> None:
    vectors, query = 3 * torch.randn(1, 1, BLOCK_TOKENS, 64), torch.randn(64)
    codec = key_codec(key_codec="qjl", key_bits=1)
    matrix = codec.tables.projection
    assert matrix is not None
    estimate = math.sqrt(math.pi / 2) / 64 * vectors.norm(dim=-1) * (torch.sign(vectors @ matrix.T) @ (matrix @ query))
    torch.testing.assert_close(round_trip(vectors, codec) @ query, estimate, rtol=1e-4, atol=1e-3)


def test_qjl_costs_one_bit_and_a_norm() -> None:
    assert key_codec(128, key_codec="qjl", key_bits=1, norm_dtype="float16").format.bits_per_value == 1 + 16 / 128


# integer ranges


@pytest.mark.parametrize("bits", [2, 4])
def test_ranges_are_rounded_to_the_nearest_step(bits: int) -> None:
    vectors = torch.randn(2, 3, BLOCK_TOKENS, 64)
    rebuilt = round_trip(vectors, value_codec(value_codec="group", value_bits=bits))
    parts = vectors.unflatten(-1, (-1, SCALE_GROUP))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    expected = low + step * ((parts - low) / step).round()
    torch.testing.assert_close(rebuilt, expected.flatten(-2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
def test_ranges_cost_a_scale_and_a_zero_for_32_channels(bits: int) -> None:
    fmt = value_codec(128, value_codec="group", value_bits=bits, norm_dtype="float16").format
    assert fmt.bits_per_value == bits + 1


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_constant_ranges_are_exact(value: float) -> None:
    vectors = torch.full((1, 1, BLOCK_TOKENS, 32), value)
    assert torch.equal(round_trip(vectors, value_codec(32, value_codec="group", value_bits=2)), vectors)


def test_ranges_with_a_far_offset_lose_only_what_float16_does() -> None:
    vectors = 1000 + torch.rand(1, 1, BLOCK_TOKENS, 32)
    rebuilt = round_trip(vectors, value_codec(32, value_codec="group", value_bits=4, norm_dtype="float16"))
    # float16 zeros near 1000 are half apart; codes are taken from the zero as stored
    assert (rebuilt - vectors).abs().max() < 0.6


def test_ranges_that_do_not_fit_are_refused() -> None:
    vectors = torch.full((1, 1, BLOCK_TOKENS, 32), -1e6)
    with pytest.raises(ValueRangeError, match="65504"):
        reference.quantize(vectors, value_codec(32, value_codec="group", value_bits=2, norm_dtype="float16"))


# channels kept exact


def exact_codec_of(split: str, bits: int, *, centered: bool, dtype: torch.dtype = torch.float32) -> VectorCodec:
    groups = channel_groups(split, 64, bits, exact_channels=8)  # type: ignore[arg-type]
    codec = grouped_codec(PLAIN, groups, CPU, transposed=False, centered=centered, dtype=dtype)
    order = torch.stack([torch.randperm(64) for _ in range(3)]).to(torch.int16)
    return VectorCodec(codec.format, codec.tables.with_order(order))


@pytest.mark.parametrize(("split", "bits"), [("none", 4), ("even", 3), ("outlier", 2)])
@pytest.mark.parametrize("centered", [False, True])
def test_exact_channels_come_back_as_they_are(split: str, bits: int, centered: bool) -> None:
    codec = exact_codec_of(split, bits, centered=centered)
    vectors = torch.randn(2, 3, BLOCK_TOKENS, 64).bfloat16().float()
    rebuilt = round_trip(vectors, codec)
    order = codec.tables.channel_order
    assert order is not None
    kept = order.long()[None, :, None, :8].expand(2, 3, BLOCK_TOKENS, 8)
    # with a mean taken off first, bfloat16 rounds what is left
    torch.testing.assert_close(
        rebuilt.gather(-1, kept), vectors.gather(-1, kept), rtol=0, atol=0.02 if centered else 1e-6
    )
    assert not torch.allclose(rebuilt, vectors, atol=0.02)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
    ids=str,
)
def test_exact_channels_take_16_bits(dtype: torch.dtype, stored: torch.dtype) -> None:
    fmt = exact_codec_of("none", 4, centered=False, dtype=dtype).format
    assert fmt.exact_dtype is stored
    assert fmt.sections["exact0"].nbytes == BLOCK_TOKENS * 8 * 2
    assert fmt.sections["norms"].rows == 1
    assert fmt.bits_per_value == (8 * 16 + 56 * 4 + 32) / 64


# attention over them


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TurboQuantConfig(key_codec="qjl", key_bits=1), id="qjl"),
        pytest.param(TurboQuantConfig(key_codec="polar", value_codec="polar"), id="polar"),
        pytest.param(TurboQuantConfig(value_codec="polar", value_centering="block"), id="polar centred"),
        pytest.param(TurboQuantConfig(value_codec="group", value_bits=2), id="group 2"),
        pytest.param(TurboQuantConfig(value_codec="group", key_codec="prod", key_bits=3), id="prod and group 4"),
    ],
)
def test_attend_equals_dense_attention_on_rebuilt_tensors(config: TurboQuantConfig) -> None:
    store = filled_store(config, 600)
    query = torch.randn(2, 2 * GROUP, 2, HEAD_DIM)
    options = AttendOptions(scaling=0.2, is_causal=True)
    got = attend(query, store.view(), options)
    torch.testing.assert_close(got.double(), dense_reference(query, store, options), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["qjl", "polar", "group"])
def test_zero_vectors_stay_finite(kind: str) -> None:
    zeros = torch.zeros(1, 1, BLOCK_TOKENS, 64)
    if kind == "group":
        codec = build_value_codec(PLAIN.replace(value_codec="group"), 64, torch.float32, CPU)
    else:
        bits = 1 if kind == "qjl" else 4
        codec = build_key_codec(PLAIN.replace(key_codec=kind, key_bits=bits), 64, torch.float32, CPU)
    assert (dequantize(reference.quantize(zeros, codec), codec) == 0).all()
