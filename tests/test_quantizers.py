"""What codecs promise: distortion, unbiasedness, norms, and exact algebra of means."""

from __future__ import annotations

import math

import pytest
import torch

from hf_turboquant import PRESETS, TurboQuantConfig
from hf_turboquant.codebook import load_codebook
from hf_turboquant.config import EXACT_BITS
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import VectorCodec, dequantize, reference
from hf_turboquant.quantizers import build_key_codec, build_value_codec

CPU = torch.device("cpu")
PLAIN = TurboQuantConfig(key_centering="none", scale="norm", norm_dtype="float32")


def key_codec(head_dim: int = 64, **changes: object) -> VectorCodec:
    return build_key_codec(PLAIN.replace(**changes), head_dim, torch.float32, CPU)


def value_codec(head_dim: int = 64, **changes: object) -> VectorCodec:
    return build_value_codec(PLAIN.replace(**changes), head_dim, torch.float32, CPU)


def unit_blocks(blocks: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    """Return ``(1, blocks, 128, head_dim)`` unit vectors, uniform on the sphere."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(1, blocks, BLOCK_TOKENS, head_dim, generator=generator)
    return vectors / vectors.norm(dim=-1, keepdim=True)


def round_trip(vectors: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Quantize and rebuild ``(..., heads, 128, head_dim)`` in the original basis."""
    return reference.unrotate(dequantize(reference.quantize(vectors, codec), codec), codec.tables)


def within(sample: torch.Tensor, expected: float, errors: float = 4.0) -> bool:
    """Whether the mean of independent samples is ``expected``, within so many standard errors."""
    error = sample.std() / math.sqrt(sample.numel())
    return bool((sample.mean() - expected).abs() <= errors * error)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rotation", ["hadamard", "qr"])
def test_distortion_is_that_of_the_codebook(bits: int, head_dim: int, rotation: str) -> None:
    vectors = unit_blocks(16, head_dim)
    rebuilt = round_trip(vectors, key_codec(head_dim, key_bits=bits, rotation=rotation))
    errors = (rebuilt - vectors).square().sum(dim=-1).flatten()
    assert within(errors, head_dim * load_codebook(head_dim, bits).mse)


@pytest.mark.parametrize("bits", [2, 4])
def test_values_have_the_distortion_of_keys(bits: int) -> None:
    vectors = unit_blocks(4, 64)
    keys = round_trip(vectors, key_codec(key_bits=bits))
    values = round_trip(vectors, value_codec(value_bits=bits))
    torch.testing.assert_close(keys, values)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_matched_scale_keeps_the_norm(bits: int) -> None:
    vectors = 5 * torch.randn(2, 3, BLOCK_TOKENS, 64)
    rebuilt = round_trip(vectors, key_codec(key_bits=bits, scale="matched"))
    torch.testing.assert_close(rebuilt.norm(dim=-1), vectors.norm(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_unbiased_scale_keeps_the_product_with_the_vector(bits: int) -> None:
    vectors = torch.randn(2, 3, BLOCK_TOKENS, 64)
    rebuilt = round_trip(vectors, key_codec(key_bits=bits, scale="unbiased"))
    torch.testing.assert_close((rebuilt * vectors).sum(-1), vectors.square().sum(-1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_plain_norm_shrinks_products_by_the_distortion(bits: int) -> None:
    # what makes the other scales worth having: E <x, x~> = |x|^2 - D for centroids
    vectors = unit_blocks(16, 64)
    products = (round_trip(vectors, key_codec(key_bits=bits)) * vectors).sum(-1).flatten()
    assert within(products, 1 - 64 * load_codebook(64, bits).mse)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("projection", ["gaussian", "orthogonal"])
@pytest.mark.parametrize("scale", ["norm", "matched", "unbiased"])
def test_prod_is_unbiased_over_projections(bits: int, projection: str, scale: str) -> None:
    vectors = unit_blocks(1, 64)
    query = unit_blocks(1, 64, seed=1)
    errors = []
    for seed in range(60):
        codec = key_codec(key_codec="prod", key_bits=bits, projection=projection, seed=seed, scale=scale)
        rebuilt = round_trip(vectors, codec)
        # vectors of one seed share a matrix: their mean is one sample
        errors.append(((rebuilt - vectors) * (query + vectors)).sum(-1).mean())
    assert within(torch.stack(errors), 0.0)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_prod_variance_is_within_the_bound_of_the_paper(bits: int) -> None:
    vectors, query = unit_blocks(16, 128), unit_blocks(16, 128, seed=1)
    rebuilt = round_trip(vectors, key_codec(128, key_codec="prod", key_bits=bits))
    errors = ((rebuilt - vectors) * query).sum(-1)
    assert errors.square().mean() < math.sqrt(3) * math.pi**2 / 128 * 4.0**-bits


def test_prod_of_orthogonal_rows_has_less_variance() -> None:
    vectors, query = unit_blocks(16, 128), unit_blocks(16, 128, seed=1)
    spread = {}
    for projection in ("gaussian", "orthogonal"):
        rebuilt = round_trip(vectors, key_codec(128, key_codec="prod", key_bits=3, projection=projection))
        spread[projection] = ((rebuilt - vectors) * query).sum(-1).square().mean()
    assert spread["orthogonal"] < 0.45 * spread["gaussian"]


@pytest.mark.parametrize("codec", ["mse", "prod"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_input_is_quantized_as_its_float32_value(codec: str, dtype: torch.dtype) -> None:
    vectors = torch.randn(1, 2, BLOCK_TOKENS, 64).to(dtype)
    built = key_codec(key_codec=codec)
    assert torch.equal(reference.quantize(vectors, built), reference.quantize(vectors.float(), built))


@pytest.mark.parametrize("name", ["zero", "one zero vector", "constant"])
@pytest.mark.parametrize("changes", [{}, {"key_codec": "prod"}, {"key_centering": "block"}], ids=str)
def test_degenerate_blocks_stay_finite(name: str, changes: dict[str, object]) -> None:
    vectors = torch.randn(1, 1, BLOCK_TOKENS, 64)
    if name == "zero":
        vectors.zero_()
    elif name == "constant":
        vectors[:] = vectors[:, :, :1].clone()
    else:
        vectors[0, 0, 3] = 0
    for scale in ("matched", "norm", "unbiased"):
        rebuilt = round_trip(vectors, key_codec(scale=scale, **changes))
        assert torch.isfinite(rebuilt).all()
        if name == "zero":
            assert (rebuilt == 0).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_shared_mean_costs_nothing_once_centred(bits: int) -> None:
    noise = torch.randn(1, 4, BLOCK_TOKENS, 64)
    offset = 30 * torch.randn(1, 4, 1, 64)
    centred = key_codec(key_bits=bits, key_centering="block")
    plain = key_codec(key_bits=bits)
    with_offset = (round_trip(noise + offset, centred) - noise - offset).square().mean()
    without = (round_trip(noise, plain) - noise).square().mean()
    assert with_offset < 1.02 * without
    assert (round_trip(noise + offset, plain) - noise - offset).square().mean() > 100 * without


def test_mean_is_stored_rounded_and_the_codes_make_up_for_it() -> None:
    vectors = 100 + torch.randn(1, 1, BLOCK_TOKENS, 64)
    codec = key_codec(key_bits=8, key_centering="block")
    rebuilt = round_trip(vectors, codec)
    # a bfloat16 mean of 800 is off by up to 2; 8-bit codes of a residual of norm 10 by about 0.03
    assert (rebuilt - vectors).abs().max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_keep_vectors_as_they_are(dtype: torch.dtype) -> None:
    vectors = torch.randn(2, 2, BLOCK_TOKENS, 24).to(dtype)
    config = TurboQuantConfig(key_bits=EXACT_BITS)
    codec = build_key_codec(config, 24, dtype, CPU)
    assert torch.equal(dequantize(reference.quantize(vectors, codec), codec), vectors.float())


@pytest.mark.parametrize(
    ("head_dim", "config", "key_bits", "value_bits"),
    [
        # codes, one float16 norm a vector, one bfloat16 mean a block
        pytest.param(128, "k4v4", 4 + 16 / 128 + 16 / 128, 4 + 16 / 128, id="k4v4"),
        pytest.param(64, "k4v4", 4 + 16 / 64 + 16 / 128, 4 + 16 / 64, id="k4v4 d64"),
        pytest.param(128, "k8v4", 8 + 16 / 128, 4 + 16 / 128, id="k8v4"),
        pytest.param(128, PLAIN.replace(key_codec="prod", key_bits=3), 3 + 2 * 32 / 128, 4 + 32 / 128, id="prod"),
        pytest.param(128, TurboQuantConfig(key_bits=16, value_bits=16), 32, 32, id="exact float32"),
    ],
)
def test_bits_per_value_count_everything(
    head_dim: int, config: str | TurboQuantConfig, key_bits: float, value_bits: float
) -> None:
    config = PRESETS[config] if isinstance(config, str) else config
    keys = build_key_codec(config, head_dim, torch.float32, CPU).format
    values = build_value_codec(config, head_dim, torch.float32, CPU).format
    assert (keys.bits_per_value, values.bits_per_value) == (key_bits, value_bits)
    assert (
        keys.nbytes
        == reference.quantize(
            torch.zeros(1, BLOCK_TOKENS, head_dim),
            VectorCodec(keys, build_key_codec(config, head_dim, torch.float32, CPU).tables),
        ).shape[-1]
    )


def test_tables_are_shared_between_layers() -> None:
    first, second = key_codec(), key_codec()
    assert first.tables is second.tables
    assert key_codec(seed=1).tables is not first.tables
