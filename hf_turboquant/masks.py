"""The mask function that goes with the registered attention.

Transformers builds no mask at all for an attention name without one, and then causality and padding are lost
without a word. This one returns None where the attention knows by itself what to do, which is nearly always, and
transformers' boolean mask otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_torchdynamo_compiling


def turboquant_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return the mask of one layer kind for the registered attention.

    Args:
        batch_size: Sequences in the batch.
        q_length: Queries.
        kv_length: Keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: Pattern; plain causality needs no mask.
        attention_mask: ``(batch, seen tokens)`` padding, True for tokens, or None.
        local_size: Window of sliding attention, or None.
        allow_is_causal_skip: Whether transformers itself would allow no mask.
        allow_is_bidirectional_skip: Whether the request is for bidirectional attention.
        **kwargs: Passed on.

    Returns:
        None, or ``(batch, 1, q_length, kv_length)`` bool, True where a query may attend.
    """
    unpadded = attention_mask is None or (not is_torchdynamo_compiling() and bool(attention_mask.all()))
    if unpadded and not allow_is_bidirectional_skip:
        # the pattern decides, not allow_is_causal_skip: a cache that can be compiled asks for a mask at every step
        if mask_function is causal_mask_function:
            return None
        windowed = local_size is not None and q_length == 1 and allow_is_causal_skip
        if windowed and _sees_oldest(mask_function, q_offset, kv_offset):
            return None
    mask: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # a tensor in static caches
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )
    return mask


def _sees_oldest(mask_function: Callable[..., Any], q_offset: int | torch.Tensor, kv_offset: int) -> bool:
    """Say whether a single query sees the oldest key, and so all: windows and chunks hide old keys first."""
    if isinstance(q_offset, torch.Tensor):
        return False
    first = torch.zeros((), dtype=torch.long)
    return bool(mask_function(first, first, torch.tensor(q_offset), torch.tensor(kv_offset)))
