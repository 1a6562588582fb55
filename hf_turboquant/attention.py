"""The attention function registered with transformers."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_turboquant.errors import UnsupportedModelError
from hf_turboquant.handle import KVHandle, attend_handle, paired_view
from hf_turboquant.ops import AttendOptions, attend
from hf_turboquant.ops.view import dense_view
from hf_turboquant.static_layers import ATTENTION_NAME, StaticRecorder, attend_store, take_store

NAME: Final = ATTENTION_NAME
"""Name under which attention and mask function are registered."""

_SPARSE_ARGUMENTS: Final = ("indices", "block_indices")


def turboquant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the compressed store when key and value are its handles, else over the tensors given.

    Args:
        module: Attention module; ``is_causal`` is read from it when not given.
        query: ``(batch, num_q_heads, q_len, head_dim)``.
        key: Handle or tensor ``(batch, num_kv_heads, seq_len, head_dim)``.
        value: Handle or tensor; the last dimension may differ.
        attention_mask: None, bool or additive float, ``(batch | 1, num_q_heads | 1, q_len, seq_len)``.
        dropout: Attention dropout; only tensors, in training, support it.
        scaling: Factor of the products; ``head_dim ** -0.5`` when None.
        is_causal: Whether no mask means causal.
        softcap: Cap of the logits.
        sliding_window: Window of the layer. Its mask, when one is needed, is already in ``attention_mask``.
        s_aux: ``(num_q_heads,)`` sink logits.
        position_bias: Additive float bias ``(batch | 1, num_q_heads, q_len, seq_len)``.
        **kwargs: What a model passes to any attention; sparse index arguments send the call to sdpa.

    Returns:
        ``(batch, q_len, num_q_heads, value head_dim)``, and None for the weights.
    """
    view = paired_view(key, value)
    sparse = any(kwargs.get(name) is not None for name in _SPARSE_ARGUMENTS)
    s_aux = s_aux if s_aux is not None else kwargs.get("sinks")
    store = take_store(key, value)
    if store is not None:
        if sparse or dropout or position_bias is not None:
            raise UnsupportedModelError(
                "sparse indices, dropout and a position bias cannot be served in a compiled step; pass "
                "disable_compile=True to generate(), or leave max_cache_len out"
            )
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        options = AttendOptions(scaling=scaling, mask=attention_mask, softcap=softcap, sink_logits=s_aux)
        return attend_store(query, store, options).transpose(1, 2).contiguous(), None
    if view is not None and attention_mask is not None:
        attention_mask = _without_room(attention_mask, key)
    plain = softcap is None and s_aux is None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if sparse or dropout or _needs_graph(query, key, value) or (view is None and plain):
        extras = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window, **kwargs}
        if attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]:
            # no mask means the last key belongs to the last query here, and the first to the first in sdpa
            attention_mask = _causal_mask(query, key)
        out, _ = sdpa_attention_forward(
            module,
            query,
            _tensor(key),
            _tensor(value),
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **{name: item for name, item in {**extras, "position_bias": position_bias}.items() if item is not None},
        )
        return out, None
    options = AttendOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=_merge_bias(attention_mask, position_bias, query, key, causal=causal),
        is_causal=causal and query.shape[2] > 1,
        softcap=softcap,
        sink_logits=s_aux,
    )
    if view is None:
        out = attend(query, dense_view(key, value), options)
    else:
        assert isinstance(key, KVHandle)
        out = attend_handle(query, key, options)
    return out.transpose(1, 2).contiguous(), None


def _without_room(mask: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Cut a mask that was made for a step that may be compiled: it has a column for every token there is room for."""
    recorder = key.recorder if isinstance(key, KVHandle) else None
    if isinstance(recorder, StaticRecorder) and mask.shape[-1] == recorder.max_cache_len:
        return mask[..., : key.shape[2]]
    return mask


def _tensor(states: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor for what may be a handle."""
    if isinstance(states, KVHandle):
        states.recorder.materialized("an attention the store cannot serve")
        return states.materialize()
    return states


def _needs_graph(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return ``(1, 1, q_len, seq_len)`` bool, the last query aligned with the last key."""
    q_len, kv_len = query.shape[2], key.shape[2]
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)[None, None]


def _merge_bias(
    mask: torch.Tensor | None, bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, *, causal: bool
) -> torch.Tensor | None:
    """Fold a position bias, and the causality that no mask stands for, into one additive mask."""
    if bias is None:
        return mask
    if mask is None and causal and query.shape[2] > 1:
        mask = _causal_mask(query, key)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
