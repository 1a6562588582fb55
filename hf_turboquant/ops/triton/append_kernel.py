"""Append: write new tokens into the rings of exact keys and values, both in one launch.

Traffic: each new key and value is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_turboquant.ops.triton.launch import device_of
from hf_turboquant.ops.triton.replay import Launcher, as_is
from hf_turboquant.ops.triton.traits import next_power_of_2

_TOKENS = 16


@triton.jit
def _copy_tokens(
    source_ptr, ring_ptr, batch, head, tokens, mask_tokens, slot, slots,
    source_stride_batch, source_stride_head, source_stride_token,
    ring_stride_batch, ring_stride_head, ring_stride_token,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Copy a tile of tokens of one head to their slots."""
    channels = tl.arange(0, HEAD_DIM_PAD)
    mask = mask_tokens[:, None] & (channels < HEAD_DIM)[None, :]
    source = source_ptr + batch * source_stride_batch + head * source_stride_head
    vectors = tl.load(source + tokens[:, None] * source_stride_token + channels[None, :], mask=mask, other=0.0)
    ring = ring_ptr + batch * ring_stride_batch + head * ring_stride_head
    places = (slot + tokens) % slots
    tl.store(ring + places[:, None] * ring_stride_token + channels[None, :], vectors, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "slot", "slots"])
def append_kernel(
    keys_ptr, values_ptr, tail_keys_ptr, tail_values_ptr,
    num_tokens, slot, slots, num_heads,
    key_stride_batch, key_stride_head, key_stride_token,
    value_stride_batch, value_stride_head, value_stride_token,
    tail_key_stride_batch, tail_key_stride_head, tail_key_stride_token,
    tail_value_stride_batch, tail_value_stride_head, tail_value_stride_token,
    KEY_DIM: tl.constexpr, KEY_DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Copy one tile of tokens of one head. Grid: ``(token tiles, batch * heads)``."""
    pid_head = tl.program_id(1).to(tl.int64)
    batch, head = pid_head // num_heads, pid_head % num_heads
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask_tokens = tokens < num_tokens
    _copy_tokens(
        keys_ptr, tail_keys_ptr, batch, head, tokens, mask_tokens, slot, slots,
        key_stride_batch, key_stride_head, key_stride_token,
        tail_key_stride_batch, tail_key_stride_head, tail_key_stride_token,
        KEY_DIM, KEY_DIM_PAD,
    )  # fmt: skip
    _copy_tokens(
        values_ptr, tail_values_ptr, batch, head, tokens, mask_tokens, slot, slots,
        value_stride_batch, value_stride_head, value_stride_token,
        tail_value_stride_batch, tail_value_stride_head, tail_value_stride_token,
        VALUE_DIM, VALUE_DIM_PAD,
    )  # fmt: skip


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    slot: int,
    *,
    launcher: Launcher = as_is,
) -> None:
    """Write new tokens into the rings, from ``slot`` on and around the end.

    Args:
        keys: ``(batch, num_kv_heads, new tokens, head_dim)``, any strides.
        values: The same; the last dimension may differ.
        tail_keys: Ring ``(batch, num_kv_heads, slots, head_dim)`` with at least as many slots as new tokens.
        tail_values: The same for values.
        slot: Slot of the first new token.
        launcher: What the kernel goes through.
    """
    keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
    batch, heads, count, key_dim = keys.shape
    tokens = min(next_power_of_2(count), _TOKENS)
    with device_of(keys):
        launcher(append_kernel)[(-(-count // tokens), batch * heads)](
            keys, values, tail_keys, tail_values,
            count, slot, tail_keys.shape[2], heads,
            *keys.stride()[:3], *values.stride()[:3], *tail_keys.stride()[:3], *tail_values.stride()[:3],
            key_dim, next_power_of_2(key_dim), values.shape[3], next_power_of_2(values.shape[3]), tokens,
            num_warps=1 if tokens == 1 else 4,
        )  # fmt: skip
