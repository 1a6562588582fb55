"""The solver against an independent integration (scipy), known values and exhaustive search."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, optimize, special

from hf_turboquant.errors import CodebookError
from hf_turboquant.lloyd_max import ScalarQuantizer, coordinate_log_density, solve_lloyd_max, solve_uniform

SHAPES = [(4, 2), (5, 3), (64, 1), (64, 4), (80, 3), (128, 8), (576, 4), (1024, 5)]


def cell_moments(quantizer: ScalarQuantizer, head_dim: int):
    """Mass and first moment of each cell in closed form: the coordinate is a shifted Beta variable."""
    edges = np.concatenate(([-1.0], quantizer.boundaries, [1.0]))
    shape = (head_dim - 1) / 2
    # each half from its own tail, so that no mass is lost to subtraction from 1
    lower = special.betainc(shape, shape, (1 - np.abs(edges)) / 2)
    below = np.where(edges < 0, lower, 1 - lower)
    log_constant = math.lgamma(head_dim / 2) - math.lgamma(shape) - 0.5 * math.log(math.pi)
    antiderivative = -math.exp(log_constant) / (head_dim - 1) * (1 - edges**2) ** shape
    return np.diff(below), np.diff(antiderivative)


@pytest.mark.parametrize(
    ("head_dim", "bits", "mse", "relative_mse"),
    [
        pytest.param(64, 1, 5.600e-3, 0.3584, id="d64-b1"),
        pytest.param(64, 3, 5.217e-4, 0.0334, id="d64-b3"),
        pytest.param(128, 1, 2.819e-3, 0.3609, id="d128-b1"),
        pytest.param(128, 2, 9.063e-4, 0.1160, id="d128-b2"),
        pytest.param(128, 3, 2.654e-4, 0.0340, id="d128-b3"),
        pytest.param(128, 4, 7.277e-5, 0.00931, id="d128-b4"),
        pytest.param(256, 4, 3.675e-5, 0.00941, id="d256-b4"),
        pytest.param(576, 3, 5.975e-5, 0.0344, id="d576-b3"),
    ],
)
def test_distortion_has_the_known_value(head_dim, bits, mse, relative_mse):
    solved = solve_lloyd_max(head_dim, bits)
    assert solved.mse == pytest.approx(mse, rel=2e-4)
    assert head_dim * solved.mse == pytest.approx(relative_mse, rel=2e-3)


def test_centroids_have_the_known_values():
    expected = [0.0216, 0.0666, 0.1181, 0.1884]
    assert solve_lloyd_max(128, 3).centroids[4:] == pytest.approx(expected, abs=5e-5)


def test_large_head_dim_tends_to_the_gaussian_quantizer():
    scaled = solve_lloyd_max(1024, 3).centroids[4:] * math.sqrt(1024)
    assert scaled == pytest.approx([0.2451, 0.7559, 1.3438, 2.1518], rel=2e-3)


@pytest.mark.parametrize(("head_dim", "bits"), SHAPES, ids=[f"d{d}-b{b}" for d, b in SHAPES])
class TestConditions:
    def test_centroids_are_conditional_means(self, head_dim, bits):
        solved = solve_lloyd_max(head_dim, bits)
        mass, first = cell_moments(solved, head_dim)
        assert mass.sum() == pytest.approx(1, abs=1e-12)
        # the tail cells of 8 bits hold 1e-8 of the mass, which bounds what the closed form itself resolves
        tolerance = 1e-11 / math.sqrt(head_dim) + 1e-15 / mass
        assert (np.abs(solved.centroids - first / mass) < tolerance).all()

    def test_boundaries_are_midpoints(self, head_dim, bits):
        solved = solve_lloyd_max(head_dim, bits)
        assert (solved.boundaries == 0.5 * (solved.centroids[1:] + solved.centroids[:-1])).all()

    @pytest.mark.parametrize("solve", [solve_lloyd_max, solve_uniform])
    def test_table_is_ascending_and_antisymmetric(self, solve, head_dim, bits):
        solved = solve(head_dim, bits)
        assert solved.centroids.shape == (2**bits,)
        assert (np.diff(solved.centroids) > 0).all()
        assert (solved.centroids == -solved.centroids[::-1]).all()
        assert np.abs(solved.centroids).max() < 1

    def test_uniform_grid_is_equally_spaced_and_not_better(self, head_dim, bits):
        grid = solve_uniform(head_dim, bits)
        step = grid.centroids[-1] - grid.centroids[-2]
        assert grid.centroids == pytest.approx(step * (np.arange(2**bits) - (2**bits - 1) / 2), rel=1e-12)
        assert grid.mse >= solve_lloyd_max(head_dim, bits).mse * (1 - 1e-9)


@pytest.mark.parametrize(
    ("head_dim", "bits"), [(4, 2), (64, 3), (128, 1), (576, 4)], ids=["d4-b2", "d64-b3", "d128-b1", "d576-b4"]
)
def test_distortion_equals_adaptive_integration(head_dim, bits):
    solved = solve_lloyd_max(head_dim, bits)

    def error(x: float) -> float:
        nearest = solved.centroids[np.searchsorted(solved.boundaries, x)]
        return (x - nearest) ** 2 * math.exp(float(coordinate_log_density(np.float64(x), head_dim)))

    edges = [*solved.boundaries[solved.boundaries >= 0], min(1 - 1e-15, 12 / math.sqrt(head_dim))]
    total = 2 * sum(integrate.quad(error, a, b)[0] for a, b in itertools.pairwise(edges))
    assert solved.mse == pytest.approx(total, rel=1e-8)


@pytest.mark.parametrize(("head_dim", "bits"), [(4, 3), (64, 2), (128, 8)], ids=["d4-b3", "d64-b2", "d128-b8"])
def test_uniform_step_is_the_best_of_a_search(head_dim, bits):
    """Minimise over the step with a plain sum over a fine grid of x."""
    x = np.linspace(0, min(1.0, 12 / math.sqrt(head_dim)), 400_001)[:-1] + 1e-9
    density = np.exp(coordinate_log_density(x, head_dim))
    top = 2 ** (bits - 1) - 0.5

    def distortion(step: float) -> float:
        nearest = step * np.minimum(np.floor(x / step) + 0.5, top)
        return float((density * (x - nearest) ** 2).sum() / density.sum())

    low, high = 1 / (top * math.sqrt(head_dim)), min(1.0, 8 / math.sqrt(head_dim)) / top
    best = optimize.minimize_scalar(distortion, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    grid = solve_uniform(head_dim, bits)
    assert grid.centroids[-1] / top == pytest.approx(best.x, rel=2e-3)
    assert grid.mse == pytest.approx(best.fun, rel=1e-4)


def test_eight_bit_grid_is_exact_in_float32():
    grid = solve_uniform(128, 8)
    step = np.float32(grid.centroids[-1] / 127.5)
    by_arithmetic = (np.arange(256, dtype=np.float32) - np.float32(127.5)) * step
    assert (by_arithmetic.astype(np.float64) == grid.centroids).all()


@pytest.mark.parametrize(
    ("head_dim", "bits", "match"),
    [
        pytest.param(3, 2, "head_dim", id="head_dim-3"),
        pytest.param(1025, 2, "head_dim", id="head_dim-1025"),
        pytest.param(64, 0, "bits", id="bits-0"),
        pytest.param(64, 9, "bits", id="bits-9"),
    ],
)
@pytest.mark.parametrize("solve", [solve_lloyd_max, solve_uniform])
def test_arguments_out_of_range_are_named(solve, head_dim, bits, match):
    with pytest.raises(CodebookError, match=match):
        solve(head_dim, bits)
