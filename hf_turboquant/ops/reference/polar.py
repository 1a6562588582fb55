"""The recursive polar transform: a vector as angles on several levels, and the radii that are left.

Level 1 takes channels in pairs to an angle of the full circle and a radius. Every further level takes the radii of
the level below in pairs to an angle between 0 and pi / 2, because radii are not negative, and a radius. Pairs are
``j`` and ``j + count / 2``: after a random rotation any pairing has the same law.

Source: arXiv:2502.02617.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_polar(vectors: torch.Tensor, *, levels: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Transform vectors.

    Args:
        vectors: ``(..., head_dim)`` float32; ``head_dim`` a multiple of ``2**levels``.
        levels: Levels of angles.

    Returns:
        Angles in radians, level 1 ``(..., head_dim / 2)`` in [0, 2 pi), then half as many a level in [0, pi / 2]; and
        radii ``(..., head_dim / 2**levels)``.
    """
    angles: list[torch.Tensor] = []
    radii = vectors
    for _ in range(levels):
        first, second = radii.chunk(2, dim=-1)
        angle = torch.atan2(second, first)
        angles.append(angle if angles else angle % (2 * torch.pi))
        radii = torch.hypot(first, second)
    return angles, radii


def from_polar(angles: Sequence[torch.Tensor], radii: torch.Tensor) -> torch.Tensor:
    """Invert :func:`to_polar`."""
    for angle in reversed(angles):
        radii = torch.cat([radii * angle.cos(), radii * angle.sin()], dim=-1)
    return radii
