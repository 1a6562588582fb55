"""What docs/sources.md says against the sources, checked: every statement there names the test that stands for it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from evals.baselines import BASELINES
from evals.common import ROOT
from hf_turboquant import PRESETS, TurboQuantConfig
from hf_turboquant.codebook import load_codebook
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import dequantize, quantize, reference
from hf_turboquant.planner import SHAPES
from hf_turboquant.quantizers import build_key_codec, build_value_codec

CPU = torch.device("cpu")
PRINTED = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
"""Distortions that the paper prints, by bits."""


def key_bits(config: TurboQuantConfig, head_dim: int = 128) -> float:
    """Return the bits per key coordinate in a packed block, everything counted."""
    return build_key_codec(config, head_dim, torch.bfloat16, CPU).format.bits_per_value


def distortion(bits: int, head_dim: int = 128) -> float:
    """Return the relative squared error of the optimal codes."""
    return head_dim * load_codebook(head_dim, bits).mse


def coded_unit_vectors(head_dim: int, blocks: int, **fields) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random unit vectors ``(128, head_dim)`` and what is read back, with another rotation in each block."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(blocks):
        config = TurboQuantConfig().replace(key_centering="none", rotation="qr", seed=seed, **fields)
        keys, values = (build(config, head_dim, torch.float32, CPU) for build in (build_key_codec, build_value_codec))
        vectors = torch.randn(BLOCK_TOKENS, head_dim, generator=generator)
        vectors /= vectors.norm(dim=-1, keepdim=True)
        records = torch.empty(1, 1, 1, keys.format.nbytes + values.format.nbytes, dtype=torch.uint8)
        quantize(vectors[None, None], vectors[None, None], records, keys, values, backend="reference")
        packed = records[0, ..., : keys.format.nbytes].contiguous()
        yield vectors, reference.unrotate(dequantize(packed, keys, backend="reference"), keys.tables)[0, 0]


def slope_and_variance(**fields) -> tuple[float, float]:
    """Return how long the reconstruction is along the vector, and head_dim x variance of products with unit vectors."""
    pairs = list(coded_unit_vectors(128, 48, **fields))
    vectors, read = (torch.cat(column).double() for column in zip(*pairs, strict=True))
    queries = vectors.roll(BLOCK_TOKENS, 0)
    missed = (read - vectors) * queries
    return float((read * vectors).sum(-1).mean()), 128 * float(missed.sum(-1).square().mean())


# the paper


def test_paper_calls_two_and_a_quarter_bits_two_and_a_half():
    assert (32 * 3 + 96 * 2) / 128 == 2.25
    assert key_bits(PRESETS["tq2.5"]) == 2.25 + 2 * 16 / 128
    assert key_bits(PRESETS["tq2.5"], head_dim=64) == 2.25 + 2 * 16 / 64


def test_paper_cuts_its_three_bit_value_short():
    assert {d: round(distortion(3, d), 4) for d in (64, 128, 256, 576)} == {
        64: 0.0334,
        128: 0.0340,
        256: 0.0343,
        576: 0.0344,
    }
    # the other three are rounded
    assert all(abs(distortion(bits, 576) / PRINTED[bits] - 1) < 0.06 for bits in (1, 2, 4))


def test_paper_four_bit_inner_product_inherits_it():
    assert round(math.pi / 2 * PRINTED[3], 3) == 0.047
    assert round(math.pi / 2 * distortion(3), 4) == 0.0534
    slope, variance = slope_and_variance(key_bits=4, key_codec="prod", scale="norm")
    assert slope == pytest.approx(1.0, abs=0.002)
    assert variance == pytest.approx(0.0531, rel=0.04)


@pytest.mark.parametrize(
    ("columns", "average"),
    [
        pytest.param((45.29, 45.16, 26.55, 68.38, 59.54, 46.28), 50.06, id="full"),
        pytest.param((43.38, 37.99, 27.16, 68.38, 59.50, 44.68), 48.50, id="KIVI 3"),
        pytest.param((45.04, 45.70, 26.47, 68.57, 59.55, 46.41), 50.16, id="KIVI 5"),
        pytest.param((45.01, 45.31, 26.00, 68.63, 59.95, 46.17), 50.06, id="TurboQuant 3.5"),
        pytest.param((44.16, 44.96, 24.80, 68.01, 59.65, 45.76), 49.44, id="TurboQuant 2.5"),
    ],
)
def test_paper_average_is_that_of_thirteen_data_sets(columns, average):
    data_sets = (2, 2, 2, 3, 2, 2)
    assert sum(n * x for n, x in zip(data_sets, columns, strict=True)) / 13 == pytest.approx(average, abs=0.01)
    assert abs(sum(columns) / 6 - average) > 1


def test_unbiased_scores_need_no_second_stage():
    prod_slope, prod_variance = slope_and_variance(key_bits=3, key_codec="prod", scale="norm")
    slope, variance = slope_and_variance(key_bits=3, scale="unbiased")
    assert prod_slope == pytest.approx(1.0, abs=0.003)
    assert slope == pytest.approx(1.0, abs=0.003)
    assert prod_variance == pytest.approx(0.181, rel=0.04)
    assert variance == pytest.approx(0.0348, rel=0.04)


# the Jetson article


def test_article_bounds_are_optimal_values():
    bounds = {bits: math.sqrt(3) * math.pi / 2 / 4**bits for bits in PRINTED}
    assert {bits: round(bound, 4) for bits, bound in bounds.items()} == {1: 0.6802, 2: 0.17, 3: 0.0425, 4: 0.0106}
    assert all(distortion(bits) < bounds[bits] for bits in PRINTED)


def test_article_excess_at_three_bits_is_rounding():
    assert distortion(3, 128) < distortion(3, 576)
    assert distortion(3, 128) / PRINTED[3] == pytest.approx(1.13, abs=0.005)


def test_article_cache_is_not_14_gb():
    shape = SHAPES["qwen2.5-7b"]
    assert shape.dense_bytes(32_768) == 28 * 2 * 4 * 128 * 2 * 32_768 == 1_879_048_192
    # its own count, a key and a value of 128 channels in 28 layers, is smaller still
    assert 28 * 2 * 128 * 2 * 32_768 < 0.5e9


def test_article_freed_memory_is_a_page_pool():
    dense = SHAPES["qwen2.5-7b"].dense_bytes_per_token
    assert 17_544e6 / dense == pytest.approx(305_943, abs=1)
    config = PRESETS["thor-k3v2"]
    values = build_value_codec(config, 128, torch.bfloat16, CPU).format.bits_per_value
    assert 3e6 / (dense * (key_bits(config) + values) / 2 / 16) == pytest.approx(268, abs=1)


def test_article_relative_error_is_that_of_the_estimator():
    # mean of |error| over mean of |<y, x>|: both normal, so that it is the quotient of their deviations
    assert math.sqrt((math.pi / 2 - 1 / 128) * distortion(2)) == pytest.approx(0.426, abs=0.001)
    assert math.sqrt(distortion(3)) == pytest.approx(0.184, abs=0.001)


# the walk-through


def test_walkthrough_bits_of_three_and_a_half():
    paper = TurboQuantConfig(key_centering="none", key_codec="prod")
    assert key_bits(paper.replace(key_bits=3)) == (2 * 128 + 128 + 2 * 16) / 128 == 3.25
    assert key_bits(paper.replace(key_bits=4)) == (3 * 128 + 128 + 2 * 16) / 128 == 4.25
    assert key_bits(PRESETS["tq3.5"]) == (32 * 4 + 96 * 3 + 2 * 16) / 128 == 3.5


def test_walkthrough_scales_are_not_stored_with_every_token():
    # a channel's scale and zero serve 32 tokens
    assert BASELINES["kivi4"].key_bits == 4 + (16 + 16) / 32 == 5


WALKTHROUGH_ROTATION = torch.tensor(
    [
        [0.5749, -0.1185, 0.5297, -0.2713, 0.3579, 0.0038, 0.2283, 0.3478],
        [0.6323, 0.3805, -0.0269, 0.3757, -0.2374, 0.4113, -0.2233, -0.1953],
        [0.0485, 0.0090, 0.0018, 0.7615, 0.0409, -0.4966, 0.1353, 0.3886],
        [0.0279, -0.7642, 0.2188, 0.2120, -0.4788, 0.2508, 0.1521, -0.0843],
        [0.3035, 0.0251, 0.0184, -0.3433, -0.5648, -0.6470, -0.2196, -0.0566],
        [0.2532, -0.0127, -0.6730, -0.1686, -0.1433, 0.0855, 0.6179, 0.2114],
        [-0.3153, 0.3869, 0.2877, -0.0948, -0.4841, 0.2719, 0.0736, 0.5877],
        [-0.1040, 0.3265, 0.3672, 0.0713, -0.1037, -0.1463, 0.6489, -0.5380],
    ]
)
WALKTHROUGH_KEY = torch.tensor([0.02, -0.05, 0.03, 87.4, 0.01, -0.04, 0.06, -42.1])
WALKTHROUGH_QUERY = torch.tensor([0.5, -0.3, 0.8, 0.1, -0.6, 0.4, -0.2, 0.7])


def test_walkthrough_rotated_example_is_no_better():
    rotation, key, query = WALKTHROUGH_ROTATION, WALKTHROUGH_KEY, WALKTHROUGH_QUERY
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(8), rtol=0, atol=2e-4)
    exact = float(query @ key)
    printed = torch.tensor([-43.03, 43.03, 50.20, 28.69, -28.69, -28.69, -28.69, 28.69])
    rotated_error = abs(float(rotation @ query @ printed) - exact)
    plain_error = abs(0.1 * 87.4 + 0.7 * -49.94 - exact)
    assert exact == pytest.approx(-20.715, abs=1e-3)
    assert rotated_error / abs(exact) == pytest.approx(0.334, abs=0.002)
    assert plain_error / abs(exact) == pytest.approx(0.266, abs=0.002)


def test_walkthrough_grid_has_no_zero():
    grid = torch.arange(8) - 3.5
    step = 87.4 / 3.5
    nearest = grid[(WALKTHROUGH_KEY[:, None] / step - grid).abs().argmin(1)]
    assert 0 not in grid
    assert nearest.abs().tolist() == [0.5, 0.5, 0.5, 3.5, 0.5, 0.5, 0.5, 1.5]


def test_walkthrough_estimator_lacks_its_factor():
    residual, query = torch.tensor([0.15, 0.05]), torch.tensor([0.7, 0.3])
    signs = torch.tensor([[1.0, -1], [-1, -1], [1, 1], [-1, 1]])
    assert float(residual @ query) == pytest.approx(0.12)
    printed = float(((signs @ query) * (signs @ residual).sign()).mean())
    factor = math.sqrt(math.pi / 2) * float(residual.norm())
    assert printed == pytest.approx(0.70)
    assert printed * factor == pytest.approx(0.139, abs=0.001)
    # with many Gaussian projections it tends to another number still, and to the product with the factor
    gaussian = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0))
    many = float(((gaussian @ query) * (gaussian @ residual).sign()).mean())
    assert many == pytest.approx(0.606, abs=0.01)
    assert many * factor == pytest.approx(0.12, abs=0.002)


def test_walkthrough_gap_is_half_the_logarithm():
    assert 0.5 * math.log2(math.sqrt(3) * math.pi / 2) == pytest.approx(0.72, abs=0.005)
    gaps = [0.5 * math.log2(distortion(bits, 576) * 4**bits) for bits in (1, 2, 3, 4)]
    assert gaps == pytest.approx([0.27, 0.45, 0.57, 0.64], abs=0.01)


def test_walkthrough_nvfp4_has_no_zero_point():
    assert BASELINES["nvfp4"].key_bits == 4 + 8 / 16 == 4.5


# the codebook tutorial


@pytest.mark.parametrize(
    ("bits", "cosine"),
    [pytest.param(2, 0.940, id="2 bits"), pytest.param(3, 0.983, id="3 bits"), pytest.param(4, 0.995, id="4 bits")],
)
def test_tutorial_cosine(bits, cosine):
    measured = [
        float(torch.cosine_similarity(vectors, read, dim=-1).mean())
        for vectors, read in coded_unit_vectors(128, 8, key_bits=bits)
    ]
    assert sum(measured) / len(measured) == pytest.approx(cosine, abs=0.001)
    # what the best codes can reach
    assert math.sqrt(1 - distortion(bits)) == pytest.approx(cosine, abs=0.001)


def test_tutorial_uniform_grid_is_a_strawman():
    x = np.linspace(-1, 1, 200_001)
    density = stats.beta.pdf((x + 1) / 2, 127 / 2, 127 / 2) / 2

    def error(step: float) -> float:
        codes = np.clip(np.round(x / step + 3.5), 0, 7)
        return float(np.trapezoid((x - (codes - 3.5) * step) ** 2 * density, x))

    best = load_codebook(128, 3).mse
    assert error(0.25) / best == pytest.approx(21.6, abs=0.2)
    narrow = optimize.minimize_scalar(error, bounds=(0.01, 0.25), method="bounded")
    assert narrow.fun / best == pytest.approx(1.08, abs=0.005)


def test_tutorial_wider_heads_are_not_easier():
    for bits in (1, 2, 3, 4):
        errors = [distortion(bits, head_dim) for head_dim in (64, 128, 256, 576)]
        assert all(first < second for first, second in itertools.pairwise(errors))


def test_tutorial_table_is_right():
    codebook = load_codebook(128, 3)
    assert [round(float(level), 4) for level in codebook.centroids] == [
        -0.1884, -0.1181, -0.0666, -0.0216, 0.0216, 0.0666, 0.1181, 0.1884,
    ]  # fmt: skip
    assert codebook.mse == pytest.approx(2.6536e-4, rel=1e-4)


# the page


def test_every_check_is_on_the_page_and_every_name_there_exists():
    page = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", page))
    here = {name for name in globals() if name.startswith("test_")} - {
        "test_every_check_is_on_the_page_and_every_name_there_exists"
    }
    assert named == here
