"""PolarQuant: rotate the vector, write it in recursive polar coordinates, code the angles, keep the radii.

Four levels of angles with 4, 2, 2 and 2 bits, and one radius for 16 channels. After the rotation the angles are
independent with known densities: uniform on the circle on level 1, and ``sin(2 angle)^(2^(level - 1) - 1)`` on
[0, pi / 2] above. Source: arXiv:2502.02617.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from hf_turboquant.config import RotationKind, TurboQuantConfig
from hf_turboquant.errors import CodebookError, ConfigError
from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import VectorCodec, VectorTables
from hf_turboquant.rotation import build_rotation

Array = npt.NDArray[np.float64]

LEVEL_BITS = (4, 2, 2, 2)
"""Bits of the angles of each level, from the channels up."""

CHANNELS_PER_RADIUS = 1 << len(LEVEL_BITS)

_NODES = 64
_MOVEMENT = 1e-13
_MAX_ITERATIONS = 10_000


@dataclass(frozen=True, eq=False)
class PolarCodebook:
    """Table of the angles of one level.

    Attributes:
        centroids: ``(2**bits,)`` float32 on the CPU, radians, ascending.
        boundaries: ``(2**bits - 1,)`` float32, midpoints.
        mse: Expected squared error of an angle.
    """

    centroids: torch.Tensor
    boundaries: torch.Tensor
    mse: float


def polar_codec(
    config: TurboQuantConfig, head_dim: int, device: torch.device, *, transposed: bool, centered: bool
) -> VectorCodec:
    """Return the codec of polar coordinates.

    Args:
        config: Rotation, seed and norm dtype (of the radii) are taken from it.
        head_dim: Channels of a vector, a multiple of 16.
        device: Where the tables live.
        transposed: True for values: codes packed along the tokens of a block.
        centered: Whether blocks store their mean.

    Raises:
        ConfigError: ``head_dim`` is not a multiple of 16.
    """
    if head_dim % CHANNELS_PER_RADIUS:
        raise ConfigError(
            f"head_dim must be a multiple of {CHANNELS_PER_RADIUS} (channels, {len(LEVEL_BITS)} levels of pairs) with "
            f"codec 'polar', got {head_dim}; use codec 'mse'"
        )
    groups, start = [], 0
    for level, bits in enumerate(LEVEL_BITS, start=1):
        groups.append(ChannelGroup(start, head_dim >> level, bits))
        start += head_dim >> level
    fmt = VectorFormat(
        "polar",
        head_dim,
        tuple(groups),
        transposed=transposed,
        centered=centered,
        norm_dtype=config.torch_norm_dtype,
    )
    return VectorCodec(fmt, _polar_tables(config.rotation, head_dim, config.seed, device))


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _polar_tables(rotation: RotationKind, head_dim: int, seed: int, device: torch.device) -> VectorTables:
    books = [polar_codebook(level, bits) for level, bits in enumerate(LEVEL_BITS, start=1)]
    return VectorTables(
        centroids=tuple(book.centroids.to(device) for book in books),
        boundaries=tuple(book.boundaries.to(device) for book in books),
        rotation=build_rotation(rotation, head_dim, seed).to(device),
    )


@lru_cache(maxsize=16)
def polar_codebook(level: int, bits: int) -> PolarCodebook:
    """Solve the quantizer of least mean squared error for the angles of a level (Lloyd-Max).

    Args:
        level: 1 for pairs of channels, then up.
        bits: Bits of an angle.

    Raises:
        CodebookError: The iteration did not settle.
    """
    count = 1 << bits
    circle = 2 * math.pi if level == 1 else 0.5 * math.pi
    levels: Array = (np.arange(count, dtype=np.float64) + 0.5) * (circle / count)
    if level == 1:
        return _table(levels, (circle / count) ** 2 / 12)
    power = 2 ** (level - 1) - 1
    for _ in range(_MAX_ITERATIONS):
        mass, first, second = _cell_moments(levels, power)
        moved: Array = first / mass
        settled = float(np.abs(moved - levels).max()) <= _MOVEMENT
        levels = moved
        if settled:
            return _table(levels, float((second - 2 * levels * first + levels**2 * mass).sum()))
    raise CodebookError(f"Lloyd-Max for polar level {level} and {bits} bits did not settle in {_MAX_ITERATIONS} steps")


def _table(levels: Array, mse: float) -> PolarCodebook:
    # a table made under inference mode could not take part in autograd later
    with torch.inference_mode(False):
        boundaries = 0.5 * (levels[1:] + levels[:-1])
        return PolarCodebook(torch.from_numpy(levels).float(), torch.from_numpy(boundaries).float(), mse)


def _cell_moments(levels: Array, power: int) -> tuple[Array, ...]:
    """Integrate 1, x and x^2 of the density ``sin(2 x)^power`` over the cells between midpoints of ``levels``."""
    edges = np.concatenate(([0.0], 0.5 * (levels[1:] + levels[:-1]), [math.pi / 2]))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    width = np.diff(edges)[:, None]
    x = edges[:-1, None] + width * 0.5 * (nodes + 1)
    density = width * weights * np.sin(2 * x) ** power
    density /= density.sum()
    return density.sum(axis=1), (density * x).sum(axis=1), (density * x * x).sum(axis=1)
