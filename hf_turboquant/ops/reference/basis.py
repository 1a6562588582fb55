"""To the basis of a codec and back: channel order, then rotation."""

from __future__ import annotations

import torch

from hf_turboquant.ops.view import VectorTables


def rotate(vectors: torch.Tensor, tables: VectorTables) -> torch.Tensor:
    """Take vectors to the rotated basis.

    Args:
        vectors: ``(..., num_kv_heads, rows, head_dim)``.
        tables: Rotation and channel order.

    Returns:
        float32, the shape of ``vectors``; the vectors themselves where there is no rotation.
    """
    vectors = vectors.float()
    if tables.rotation is None:
        return vectors
    if tables.channel_order is not None:
        order = tables.channel_order.long()[:, None, :].expand(vectors.shape)
        vectors = vectors.gather(-1, order)
    return vectors @ tables.rotation


def unrotate(vectors: torch.Tensor, tables: VectorTables) -> torch.Tensor:
    """Invert :func:`rotate`."""
    if tables.rotation is None:
        return vectors
    vectors = vectors @ tables.rotation.T
    if tables.channel_order is not None:
        order = tables.channel_order.argsort(dim=-1)[:, None, :].expand(vectors.shape)
        vectors = vectors.gather(-1, order)
    return vectors
