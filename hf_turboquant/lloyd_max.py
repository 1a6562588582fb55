"""Scalar quantizers for one coordinate of a uniform unit vector.

A coordinate ``x`` of a vector drawn uniformly from the unit sphere in ``head_dim`` dimensions has the density

    f(x) = Gamma(head_dim / 2) / (sqrt(pi) Gamma((head_dim - 1) / 2)) * (1 - x^2)^((head_dim - 3) / 2),   |x| <= 1.

With ``x = sin(t)`` the measure becomes ``C cos(t)^(head_dim - 2) dt``, which is smooth up to both ends for every
``head_dim``, so Gauss-Legendre quadrature of each cell is exact to rounding. All cells are symmetric about zero: only
the positive half is solved, and the negative half is its mirror image bit for bit.

Source: arXiv:2504.19874, Section 3.1 and Algorithm 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hf_turboquant.errors import CodebookError

Array = npt.NDArray[np.float64]

MIN_HEAD_DIM: Final = 4
MAX_HEAD_DIM: Final = 1024
MAX_BITS: Final = 8

_NODES: Final = 64
_TAIL_SIGMAS: Final = 12.0
_MOVEMENT: Final = 1e-12
_MAX_ITERATIONS: Final = 1000
_BISECTIONS: Final = 80
_STEP_BITS: Final = 16


@dataclass(frozen=True, eq=False)
class ScalarQuantizer:
    """Table of a scalar quantizer.

    Attributes:
        centroids: ``(2**bits,)`` float64, ascending, ``centroids[i] == -centroids[-1 - i]``.
        boundaries: ``(2**bits - 1,)`` float64, midpoints of neighbouring centroids.
        mse: Expected squared error of one coordinate.
    """

    centroids: Array
    boundaries: Array
    mse: float


def solve_lloyd_max(head_dim: int, bits: int) -> ScalarQuantizer:
    """Solve the quantizer of least mean squared error (Lloyd-Max).

    It meets two conditions: boundaries are midpoints, and every centroid is the conditional mean of its cell. The
    density is log-concave, so the solution is unique. Newton steps on the second condition start from the quantiles
    of ``f^(1/3)``, the best density of levels at high rate; where a step would leave the ascending order, the plain
    Lloyd step is taken instead.

    Args:
        head_dim: Dimension of the unit vectors, 4 to 1024.
        bits: Bits per coordinate, 1 to 8.

    Raises:
        CodebookError: An argument is out of range, or the iteration did not settle.
    """
    _check_arguments(head_dim, bits)
    levels = _point_density_quantiles(head_dim, 2 ** (bits - 1))
    for _ in range(_MAX_ITERATIONS):
        moved = _newton_step(levels, head_dim)
        movement = float(np.abs(moved - levels).max())
        levels = moved
        if movement <= _MOVEMENT / math.sqrt(head_dim):
            return _mirror(levels, head_dim)
    raise CodebookError(
        f"Lloyd-Max for head_dim {head_dim} and {bits} bits moved by {movement:.3g} after {_MAX_ITERATIONS} "
        "iterations and did not settle; load a codebook from a path instead"
    )


def solve_uniform(head_dim: int, bits: int) -> ScalarQuantizer:
    """Solve the best symmetric uniform grid, ``step * (i - (2**bits - 1) / 2)``.

    The step balances the error inside the grid against clipping beyond its outer cells. It is rounded to 16 significant
    bits, so that float32 holds every centroid exactly and a kernel that multiplies the step gets the table bit for bit.

    Args:
        head_dim: Dimension of the unit vectors, 4 to 1024.
        bits: Bits per coordinate, 1 to 8.

    Raises:
        CodebookError: An argument is out of range.
    """
    _check_arguments(head_dim, bits)
    half_steps = np.arange(2 ** (bits - 1)) + 0.5
    sigma = 1 / math.sqrt(head_dim)
    # a grid that ends at one sigma clips too much; one that reaches the end of the density is too coarse
    low, high = 2 * sigma / 2**bits, 2 * min(1.0, _TAIL_SIGMAS * sigma) / 2**bits
    for _ in range(_BISECTIONS):
        step = 0.5 * (low + high)
        mass, first, _ = _cell_moments(_inner_edges(step * half_steps), head_dim)
        # minus half the derivative of the distortion by the step; moving edges add nothing to it
        if float(half_steps @ (first - step * half_steps * mass)) > 0:
            low = step
        else:
            high = step
    mantissa, exponent = math.frexp(low)
    return _mirror(math.ldexp(round(mantissa * 2**_STEP_BITS), exponent - _STEP_BITS) * half_steps, head_dim)


def coordinate_log_density(x: Array, head_dim: int) -> Array:
    """Return ``log f(x)`` for ``|x| < 1``, any shape, float64."""
    log_density: Array = _log_constant(head_dim) + 0.5 * (head_dim - 3) * np.log1p(-np.square(x))
    return log_density


def _log_constant(head_dim: int) -> float:
    return math.lgamma(head_dim / 2) - math.lgamma((head_dim - 1) / 2) - 0.5 * math.log(math.pi)


def _check_arguments(head_dim: int, bits: int) -> None:
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise CodebookError(f"head_dim must be {MIN_HEAD_DIM} to {MAX_HEAD_DIM} (channels), got {head_dim!r}")
    if not 1 <= bits <= MAX_BITS:
        raise CodebookError(f"bits must be 1 to {MAX_BITS} (bits per coordinate), got {bits!r}")


def _inner_edges(levels: Array) -> Array:
    """Return the lower edge of each positive cell: zero, then the midpoints."""
    return np.concatenate(([0.0], 0.5 * (levels[1:] + levels[:-1])))


@functools.lru_cache(maxsize=1)
def _quadrature() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return 0.5 * (nodes + 1), 0.5 * weights


def _cell_moments(edges: Array, head_dim: int) -> tuple[Array, Array, Array]:
    """Integrate 1, x and x^2 over the positive cells that begin at ``edges``; the last one is open.

    Returns:
        Three arrays of the shape of ``edges``: mass, first and second moment.
    """
    nodes, weights = _quadrature()
    # less than 1e-31 of the mass lies beyond; a shorter outer cell keeps the quadrature exact
    end = min(0.5 * math.pi, _TAIL_SIGMAS / math.sqrt(head_dim))
    angles = np.append(np.arcsin(edges), end)
    width = np.diff(angles)[:, None]
    t = angles[:-1, None] + width * nodes
    density = width * weights * np.exp(_log_constant(head_dim) + (head_dim - 2) * np.log(np.cos(t)))
    x = np.sin(t)
    return density.sum(axis=1), (density * x).sum(axis=1), (density * x * x).sum(axis=1)


def _point_density_quantiles(head_dim: int, count: int) -> Array:
    """Return ``count`` positive levels at the mid-quantiles of ``f^(1/3)``."""
    x = np.linspace(0.0, min(1.0, _TAIL_SIGMAS / math.sqrt(head_dim)), 8193)
    x = 0.5 * (x[1:] + x[:-1])
    cumulative = np.cumsum(np.exp(coordinate_log_density(x, head_dim) / 3))
    quantiles: Array = np.interp((np.arange(count) + 0.5) / count * cumulative[-1], cumulative, x)
    return quantiles


def _newton_step(levels: Array, head_dim: int) -> Array:
    """Return better positive levels: a Newton step towards the conditional means, or else a Lloyd step."""
    edges = _inner_edges(levels)
    mass, first, _ = _cell_moments(edges, head_dim)
    means = first / mass
    # how the mean of a cell follows its two edges; an edge moves half as far as each level beside it
    density = np.exp(coordinate_log_density(edges[1:], head_dim))
    by_lower = 0.5 * density * (means[1:] - edges[1:]) / mass[1:]
    by_upper = 0.5 * density * (edges[1:] - means[:-1]) / mass[:-1]
    jacobian = np.eye(len(levels))
    jacobian -= np.diag(by_lower, -1) + np.diag(by_upper, 1)
    jacobian -= np.diag(np.append(0.0, by_lower)) + np.diag(np.append(by_upper, 0.0))
    moved: Array = levels - np.linalg.solve(jacobian, levels - means)
    ascending = moved[0] > 0 and moved[-1] < 1 and bool((np.diff(moved) > 0).all())
    return moved if ascending else means


def _mirror(levels: Array, head_dim: int) -> ScalarQuantizer:
    """Complete positive levels to the symmetric table and measure its distortion."""
    mass, first, second = _cell_moments(_inner_edges(levels), head_dim)
    mse = 2 * float((second - 2 * levels * first + np.square(levels) * mass).sum())
    centroids = np.concatenate((-levels[::-1], levels))
    return ScalarQuantizer(centroids, 0.5 * (centroids[1:] + centroids[:-1]), mse)
