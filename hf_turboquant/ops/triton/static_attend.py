"""Attend over a store of fixed size: the fast kernel where it serves a call, the portable one elsewhere."""

from __future__ import annotations

import torch

from hf_turboquant.ops.triton.attend_launch import attend_portable
from hf_turboquant.ops.triton.dispatch import fast_obstacle
from hf_turboquant.ops.view import AttendOptions, KVView


def static_attend(query: torch.Tensor, view: KVView, options: AttendOptions, lengths: torch.Tensor) -> torch.Tensor:
    """Attend over all stored tokens with the queries of the newest one.

    Args:
        query: ``(batch, num_q_heads, 1, head_dim)``, any strides.
        view: The store with the largest counts there can be, its tail behind its sinks.
        options: Scaling, mask and their kin; no window, no causality.
        lengths: Counts on the device, as ``ops.static_spec`` has them.

    Returns:
        ``(batch, num_q_heads, 1, value head_dim)``, dtype of ``query``.
    """
    if fast_obstacle(query, view, options):
        return attend_portable(query, view, options, lengths=lengths)
    # imported here: older Tritons have no Gluon
    from hf_turboquant.ops.triton.static_fast import static_fast_attend

    return static_fast_attend(query, view, options, lengths)
