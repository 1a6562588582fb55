"""Centroids as signed bytes: the tables that byte permutation looks up.

A byte ``l`` stands for ``l * unit``, of 4-bit codes for ``(l + 1/2) * unit``. Codes were made with the float table;
reading them with the nearest table of bytes costs a little distortion, which is kept with the table.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from hf_turboquant.packing import fold_codes


@dataclass(frozen=True)
class LevelTable:
    """Bytes of a codebook of 1 to 4 bits.

    Attributes:
        low: Levels of selectors 0 to 3, the first in the lowest byte, as a signed 32-bit int. 1-bit codes are looked up
            in pairs: the levels of the first of a pair.
        high: Levels of selectors 4 to 7; 0 for 2 bits, of 1-bit codes the levels of the second of a pair.
        unit: What one unit of a level is worth.
        excess: Relative increase of the mean squared error over the float table.
    """

    low: int
    high: int
    unit: float
    excess: float


@lru_cache(maxsize=64)
def level_table(centroids: torch.Tensor, size: int) -> LevelTable:
    """Fit bytes to a symmetric codebook.

    Args:
        centroids: ``(2**bits,)`` float32, ascending, of coordinates with variance ``1 / size``. Copied to the host, so
            that the first call with a tensor waits for the device.
        size: Channels of the vectors the codebook is for.

    Returns:
        The table with the least expected squared difference among those that fit in signed bytes.
    """
    values = centroids.double().cpu().tolist()
    bits = (len(values) - 1).bit_length()
    magnitudes = values[len(values) // 2 :]
    offset = 0.5 if bits == 4 else 0.0
    masses = _masses(values, size)[len(values) // 2 :]
    best: tuple[float, float, list[int]] | None = None
    for top in range(127, 0, -1):
        levels = [round(value / magnitudes[-1] * (top + offset) - offset) for value in magnitudes]
        coded = [level + offset for level in levels]
        unit = sum(p * c * v for p, c, v in zip(masses, coded, magnitudes, strict=True))
        unit /= sum(p * c * c for p, c in zip(masses, coded, strict=True))
        error = 2 * sum(p * (v - unit * c) ** 2 for p, c, v in zip(masses, coded, magnitudes, strict=True))
        # a table must be better by more than rounding to be preferred to one with finer units
        if best is None or error < best[0] * (1 - 1e-6):
            best = (error, unit, levels)
    assert best is not None
    error, unit, levels = best
    distortion = 1.0 / size - 2 * sum(p * v * v for p, v in zip(masses, magnitudes, strict=True))
    if bits == 1:
        return _pair_table(levels[0], unit, error / distortion)
    if bits == 4:
        table = [~level for level in levels]
    else:
        order = fold_codes(torch.arange(len(values), dtype=torch.uint8), bits).tolist()
        signed = [-level for level in reversed(levels)] + levels
        table = [signed[code] for code in order]
    return LevelTable(_word(table[:4]), _word(table[4:]), unit, error / distortion)


def sign_table() -> LevelTable:
    """Return the bytes of signs: as large as can be, so that a unit is worth about what one of centroids is."""
    return _pair_table(127, 1 / 127, 0.0)


def _pair_table(level: int, unit: float, excess: float) -> LevelTable:
    """Return the bytes of two codes of one bit that are looked up together, the first of which changes faster."""
    first, second = ([sign * level for sign in signs] for signs in ((-1, 1, -1, 1), (-1, -1, 1, 1)))
    return LevelTable(_word(first), _word(second), unit, excess)


def _masses(centroids: list[float], size: int) -> list[float]:
    """Return the probability of each cell for a normal coordinate, the limit of the sphere's."""
    edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(centroids)), math.inf]
    below = [0.5 * (1 + math.erf(edge * math.sqrt(size / 2))) for edge in edges]
    return [high - low for low, high in itertools.pairwise(below)]


def _word(levels: list[int]) -> int:
    return int.from_bytes(bytes(level & 0xFF for level in levels), "little", signed=True) if levels else 0
