"""Sizes of one call of the portable attend kernel, and the memory that goes with them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton.language as tl

from hf_turboquant.ops.triton.launch import AttendLaunch, ProductDtypes
from hf_turboquant.ops.triton.traits import VectorTraits
from hf_turboquant.ops.view import KVView

_TORCH_DTYPES = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}

Pieces = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PortablePlan:
    """Sizes of one call.

    Attributes:
        keys: What the kernels are compiled for in keys.
        values: The same in values.
        dtypes: Operand types of the products.
        launch: How the attend kernel is launched.
        num_rows: Query rows of a KV head.
        block_parts: Parts of a block, which splits may divide.
        packed_splits: Splits that read packed blocks.
        tiles_per_split: Tiles of exact tokens of an exact split.
        exact_splits: Splits that read exact tokens.
    """

    keys: VectorTraits
    values: VectorTraits
    dtypes: ProductDtypes
    launch: AttendLaunch
    num_rows: int
    block_parts: int
    packed_splits: int
    tiles_per_split: int
    exact_splits: int

    @property
    def num_splits(self) -> int:
        """Partial results of a row."""
        return self.packed_splits + self.exact_splits


def allocate(query: torch.Tensor, view: KVView, plan: PortablePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the bytes for what passes between the kernels."""
    out = query.new_empty(*query.shape[:3], view.values.format.head_dim)
    return out, torch.empty(_parts(view, plan)[-1], dtype=torch.uint8, device=query.device)


def split_scratch(scratch: torch.Tensor, view: KVView, plan: PortablePlan) -> tuple[Pieces, Pieces]:
    """Return the parts of scratch bytes: partial results, peaks and totals; then the rotated query.

    The latter is rotated, projected, and over exact channels, each ``(batch, heads, rows, channels)``.
    """
    pieces = [scratch[low:high] for low, high in itertools.pairwise(_parts(view, plan))]
    partial, peak, total, *_, exact_query = (piece.view(torch.float32) for piece in pieces)
    rot_query, sign_query = (piece.view(_TORCH_DTYPES[plan.dtypes.keys]) for piece in pieces[3:5])
    # an empty piece has no address
    sign_query, exact_query = (piece if piece.numel() else rot_query for piece in (sign_query, exact_query))
    return (partial, peak, total), (rot_query, sign_query, exact_query)


def _parts(view: KVView, plan: PortablePlan) -> tuple[int, ...]:
    """Return where each part of the scratch bytes starts, and how many there are in all.

    Every start is a multiple of 16 bytes: alignment is part of what a kernel is compiled for.
    """
    queries = view.batch * view.num_kv_heads * plan.num_rows
    rows = queries * plan.num_splits
    rotated = queries * plan.keys.head_dim * _TORCH_DTYPES[plan.dtypes.keys].itemsize if plan.packed_splits else 0
    sizes = (rows * plan.values.head_dim * 4, rows * 4, rows * 4)
    sizes += (rotated, rotated if plan.keys.signs >= 0 else 0, queries * plan.keys.exact_group.size * 4)
    return tuple(itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0))
