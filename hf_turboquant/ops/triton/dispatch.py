"""Attend: the fast kernel where it serves a call, the portable one elsewhere. The result is the same.

What a decode step does again and again is prepared once and kept with the view.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_turboquant.ops.triton import attend_launch
from hf_turboquant.ops.triton.attend_launch import AttendResult, BlockTable, block_table_of, rows_in_order
from hf_turboquant.ops.triton.fast_plan import triton_obstacle
from hf_turboquant.ops.triton.launch import device_limits
from hf_turboquant.ops.view import AttendOptions, KVView


def fast_obstacle(query: torch.Tensor, view: KVView, options: AttendOptions) -> str:
    """Say why a call goes to the portable kernel; empty when the fast one serves it."""
    obstacle = triton_obstacle()
    if obstacle or not query.is_cuda:
        return obstacle or f"the fast kernel needs a cuda device, got {query.device}"
    # imported here: older Tritons have no Gluon
    from hf_turboquant.ops.triton import fast_attend

    return fast_attend.supports(view, query, options, device_limits(query.device)[0])


def attend(
    query: torch.Tensor, view: KVView, options: AttendOptions, *, block_table: BlockTable | None = None
) -> torch.Tensor:
    """Attend over the stored tokens of one layer.

    Args:
        query: ``(batch, num_q_heads, q_len, head_dim)``, any strides; the query heads of a KV head are adjacent.
        view: Stored tokens.
        options: Scaling, mask and their kin.
        block_table: Table of the view's blocks if the caller keeps one; built here where it is needed and not given.

    Returns:
        ``(batch, num_q_heads, q_len, value head_dim)``, dtype of ``query``. Rows that may attend to nothing are zero.
    """
    return _attend(query, view, options, block_table, None)


def attend_with_lse(
    query: torch.Tensor, view: KVView, options: AttendOptions, *, block_table: BlockTable | None = None
) -> AttendResult:
    """Attend as :func:`attend`, and return what ``merge_results`` needs to join it with other tokens."""
    lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    return AttendResult(_attend(query, view, options, block_table, lse), lse)


def _attend(
    query: torch.Tensor, view: KVView, options: AttendOptions, block_table: BlockTable | None, lse: torch.Tensor | None
) -> torch.Tensor:
    if fast_obstacle(query, view, options):
        return attend_launch.attend_portable(query, view, options, block_table=block_table, lse=lse)
    from hf_turboquant.ops.triton import fast_attend

    block_table = block_table_of(view, block_table)
    return fast_attend.fast_attend(rows_in_order(query), view, options, block_table=block_table, lse=lse)


def attend_and_prepare(
    query: torch.Tensor, view: KVView, options: AttendOptions, *, block_table: BlockTable | None = None
) -> tuple[torch.Tensor, Any]:
    """Attend as :func:`attend` does, and return what serves later calls of the same form.

    Args:
        query: As for :func:`attend`.
        view: Stored tokens.
        options: Scaling, mask and their kin.
        block_table: Table of the view's blocks where it needs one.

    Returns:
        The result, and a ``Step``; None where every call needs launches of its own.
    """
    if fast_obstacle(query, view, options):
        return attend_launch.attend_portable_and_prepare(query, view, options, block_table=block_table)
    if query.stride(-1) != 1:
        return attend(query, view, options, block_table=block_table), None
    from hf_turboquant.ops.triton import fast_attend

    block_table = block_table_of(view, block_table)
    return fast_attend.fast_attend_and_prepare(query, view, options, block_table=block_table)
