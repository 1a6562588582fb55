"""A step of a store of fixed size: store a token, and pack the oldest block of the ring when that is full.

Counts are read and written on the device (``ops.static_spec``). The first kernel reads them and writes what they become
with the token beside them; the second reads that, and writes the counts as they are after packing in their place. So no
program of a kernel writes what another one of it reads. All but one step in 128 find nothing to pack, and the second
kernel returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_turboquant.ops.triton.launch import device_of, matmul_precision, quantize_launch
from hf_turboquant.ops.triton.quantize_kernel import quantize_vectors, table_arguments
from hf_turboquant.ops.triton.traits import next_power_of_2, traits_of
from hf_turboquant.ops.view import VectorCodec

NEXT = tl.constexpr(8)
"""Where the counts with the new token are, behind those without."""


@triton.jit
def append_token_kernel(
    keys_ptr, values_ptr, exact_keys_ptr, exact_values_ptr, lengths_ptr,
    num_heads, sink_tokens, slots, max_tokens,
    key_stride_batch, key_stride_head, value_stride_batch, value_stride_head,
    exact_key_stride_batch, exact_key_stride_head, exact_key_stride_token,
    exact_value_stride_batch, exact_value_stride_head, exact_value_stride_token,
    KEY_DIM: tl.constexpr, KEY_DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Copy the token of one head to its slot. Grid: ``(batch * heads,)``."""
    pid = tl.program_id(0)
    batch, head = pid.to(tl.int64) // num_heads, pid.to(tl.int64) % num_heads
    num_sinks = tl.load(lengths_ptr)
    num_blocks = tl.load(lengths_ptr + 1)
    tail_start = tl.load(lengths_ptr + 2)
    tail_len = tl.load(lengths_ptr + 3)
    num_tokens = tl.load(lengths_ptr + 4)
    stored = (num_tokens < max_tokens).to(tl.int32)
    to_sinks = (num_sinks < sink_tokens) & (num_blocks + tail_len == 0)
    slot = tl.where(to_sinks, num_sinks, sink_tokens + (tail_start + tail_len) % slots)
    channels = tl.arange(0, KEY_DIM_PAD)
    mask = channels < stored * KEY_DIM
    key = tl.load(keys_ptr + batch * key_stride_batch + head * key_stride_head + channels, mask=mask)
    target = exact_keys_ptr + batch * exact_key_stride_batch + head * exact_key_stride_head
    tl.store(target + slot * exact_key_stride_token + channels, key, mask=mask)
    channels = tl.arange(0, VALUE_DIM_PAD)
    mask = channels < stored * VALUE_DIM
    value = tl.load(values_ptr + batch * value_stride_batch + head * value_stride_head + channels, mask=mask)
    target = exact_values_ptr + batch * exact_value_stride_batch + head * exact_value_stride_head
    tl.store(target + slot * exact_value_stride_token + channels, value, mask=mask)
    if pid == 0:
        sink = stored * to_sinks.to(tl.int32)
        tl.store(lengths_ptr + NEXT, num_sinks + sink)
        tl.store(lengths_ptr + NEXT + 1, num_blocks)
        tl.store(lengths_ptr + NEXT + 2, tail_start)
        tl.store(lengths_ptr + NEXT + 3, tail_len + stored - sink)
        tl.store(lengths_ptr + NEXT + 4, num_tokens + stored)
        tl.store(lengths_ptr + NEXT + 5, 1 - stored)


@triton.jit
def pack_block_kernel(
    exact_keys_ptr, exact_values_ptr, arena_ptr, lengths_ptr,
    key_order_ptr, key_rotation_ptr, key_projection_ptr,
    key_centroids0_ptr, key_boundaries0_ptr, key_centroids1_ptr, key_boundaries1_ptr,
    value_order_ptr, value_rotation_ptr, value_projection_ptr,
    value_centroids0_ptr, value_boundaries0_ptr, value_centroids1_ptr, value_boundaries1_ptr,
    key_stride_batch, key_stride_head, key_stride_token,
    value_stride_batch, value_stride_head, value_stride_token,
    num_heads, sink_tokens, slots, block_stride,
    K: tl.constexpr, V: tl.constexpr, KEY_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
    KEY_ORDER: tl.constexpr, VALUE_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pack the oldest block of one head if the ring is full. Grid: ``(batch * heads, 2)``: keys, values."""
    pid = tl.program_id(0)
    batch_head = pid.to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    num_blocks = tl.load(lengths_ptr + NEXT + 1)
    tail_start = tl.load(lengths_ptr + NEXT + 2)
    tail_len = tl.load(lengths_ptr + NEXT + 3)
    full = tail_len == slots
    if full:
        record_ptr = arena_ptr + num_blocks.to(tl.int64) * block_stride + batch_head * RECORD_BYTES
        # the ring is whole blocks, and so is what was taken from it: the oldest block never wraps
        first = (sink_tokens + tail_start).to(tl.int64)
        if tl.program_id(1) == 0:
            x_ptr = exact_keys_ptr + batch * key_stride_batch + head * key_stride_head + first * key_stride_token
            quantize_vectors(
                x_ptr, key_stride_token, 1, key_order_ptr + head * K.head_dim, key_rotation_ptr,
                key_projection_ptr, key_centroids0_ptr, key_boundaries0_ptr, key_centroids1_ptr, key_boundaries1_ptr,
                record_ptr, lengths_ptr + 6, K, KEY_ORDER, BLOCK_K, PRECISION,
            )  # fmt: skip
        else:
            x_ptr = exact_values_ptr + batch * value_stride_batch + head * value_stride_head
            quantize_vectors(
                x_ptr + first * value_stride_token, value_stride_token, 1, value_order_ptr + head * V.head_dim,
                value_rotation_ptr, value_projection_ptr, value_centroids0_ptr, value_boundaries0_ptr,
                value_centroids1_ptr, value_boundaries1_ptr, record_ptr + KEY_BYTES, lengths_ptr + 6, V, VALUE_ORDER,
                BLOCK_K, PRECISION,
            )  # fmt: skip
    if (pid == 0) & (tl.program_id(1) == 0):
        packed = full.to(tl.int32)
        tl.store(lengths_ptr, tl.load(lengths_ptr + NEXT))
        tl.store(lengths_ptr + 1, num_blocks + packed)
        tl.store(lengths_ptr + 2, (tail_start + 128 * packed) % slots)
        tl.store(lengths_ptr + 3, tail_len - 128 * packed)
        tl.store(lengths_ptr + 4, tl.load(lengths_ptr + NEXT + 4))
        tl.store(lengths_ptr + 5, tl.load(lengths_ptr + 5) | tl.load(lengths_ptr + NEXT + 5))


def static_append(
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    exact_keys: torch.Tensor,
    exact_values: torch.Tensor,
    arena: torch.Tensor,
    codecs: tuple[VectorCodec, VectorCodec],
    *,
    sink_tokens: int,
    slots: int,
    max_tokens: int,
) -> None:
    """Store one token of every sequence, and pack the oldest block of the ring when that is full.

    Args:
        keys: ``(batch, num_kv_heads, 1, head_dim)``, any strides.
        values: The same; the last dimension may differ.
        lengths: Counts, as ``ops.static_spec`` has them.
        exact_keys: ``(batch, num_kv_heads, sink_tokens + slots, head_dim)``, last dimension contiguous.
        exact_values: The same for values.
        arena: ``(blocks, batch, num_kv_heads, record bytes)`` uint8, contiguous.
        codecs: Of keys and values.
        sink_tokens: Slots of the sinks, in front of the ring.
        slots: Slots of the ring, whole blocks.
        max_tokens: Tokens that are stored at most.
    """
    keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
    batch, heads, _, key_dim = keys.shape
    value_dim = values.shape[3]
    key_codec, value_codec = codecs
    key_traits, value_traits = traits_of(key_codec.format), traits_of(value_codec.format)
    launch = quantize_launch(key_traits, value_traits)
    with device_of(keys):
        append_token_kernel[(batch * heads,)](
            keys, values, exact_keys, exact_values, lengths, heads, sink_tokens, slots, max_tokens,
            *keys.stride()[:2], *values.stride()[:2], *exact_keys.stride()[:3], *exact_values.stride()[:3],
            key_dim, next_power_of_2(key_dim), value_dim, next_power_of_2(value_dim), num_warps=1,
        )  # fmt: skip
        pack_block_kernel[(batch * heads, 2)](
            exact_keys, exact_values, arena, lengths,
            *table_arguments(key_codec.tables, arena), *table_arguments(value_codec.tables, arena),
            *exact_keys.stride()[:3], *exact_values.stride()[:3],
            heads, sink_tokens, slots, batch * heads * arena.shape[-1],
            K=key_traits, V=value_traits, KEY_BYTES=key_codec.format.nbytes, RECORD_BYTES=arena.shape[-1],
            KEY_ORDER=key_codec.tables.channel_order is not None,
            VALUE_ORDER=value_codec.tables.channel_order is not None,
            BLOCK_K=launch.block_k, PRECISION=matmul_precision(torch.float32),
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
