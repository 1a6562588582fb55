"""The three operations on the store: quantize, dequantize, attend. Checked here, computed by a backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hf_turboquant.errors import ShapeError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import reference
from hf_turboquant.ops.backend import Backend, BackendChoice, choose_backend, resolve_backend
from hf_turboquant.ops.view import AttendOptions, KVView, NewToken, VectorCodec, VectorTables, ring_slices

__all__ = [
    "AttendOptions",
    "Backend",
    "BackendChoice",
    "KVView",
    "NewToken",
    "VectorCodec",
    "VectorTables",
    "attend",
    "choose_backend",
    "dequantize",
    "extend_ring",
    "materialize",
    "quantize",
    "resolve_backend",
    "ring_slices",
]

MAX_STEP = 16
"""Most queries of a call that may come again in the next step."""

TILE_SCORES = 1 << 24
"""Scores the reference holds at a time for one tile of queries, over all heads: 64 MiB."""


def quantize(
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    key_codec: VectorCodec,
    value_codec: VectorCodec,
    *,
    backend: Backend | str = Backend.AUTO,
) -> None:
    """Quantize whole blocks of keys and values into records, in place.

    Args:
        keys: ``(batch, num_kv_heads, blocks * 128, head_dim)``, any floating dtype and strides.
        values: The same; the last dimension may differ.
        out: ``(blocks, batch, num_kv_heads, record bytes)`` uint8, overwritten.
        key_codec: Format and tables of keys.
        value_codec: Format and tables of values.
        backend: Who computes.

    Raises:
        ShapeError: ``out`` does not fit.
        ValueRangeError: Keys or values hold NaN or infinity, or a norm does not fit ``norm_dtype``. ``out`` is then
            undefined.
    """
    batch, heads, tokens, _ = keys.shape
    blocks, odd = divmod(tokens, BLOCK_TOKENS)
    record = key_codec.format.nbytes + value_codec.format.nbytes
    if odd or out.shape != (blocks, batch, heads, record):
        raise ShapeError(
            f"out must have shape (blocks, batch, num_kv_heads, record bytes) = {(blocks, batch, heads, record)} for "
            f"{tokens} tokens (a multiple of {BLOCK_TOKENS}), got {tuple(out.shape)}"
        )
    if choose_backend(backend, keys.device, key_codec.format, value_codec.format).backend is Backend.TRITON:
        from hf_turboquant.ops import triton

        triton.quantize(keys, values, out, key_codec, value_codec)
        return
    split = key_codec.format.nbytes
    for source, codec, part in ((keys, key_codec, out[..., :split]), (values, value_codec, out[..., split:])):
        part.copy_(reference.quantize(source.unflatten(2, (blocks, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4), codec))


def dequantize(packed: torch.Tensor, codec: VectorCodec, *, backend: Backend | str = Backend.AUTO) -> torch.Tensor:
    """Reconstruct the vectors of whole blocks, in the rotated basis.

    Args:
        packed: ``(..., codec.format.nbytes)`` uint8, the key or the value part of records.
        codec: Format and tables that made the bytes.
        backend: Who computes.

    Returns:
        ``(..., 128, head_dim)`` float32.

    Raises:
        ShapeError: The last dimension of ``packed`` is not one part of a record.
    """
    if packed.shape[-1] != codec.format.nbytes:
        raise ShapeError(
            f"packed must hold {codec.format.nbytes} bytes per block in its last dimension, got {packed.shape[-1]}"
        )
    if choose_backend(backend, packed.device, codec.format).backend is Backend.TRITON:
        from hf_turboquant.ops import triton

        return triton.dequantize(packed, codec)
    return reference.dequantize(packed, codec)


def attend(
    query: torch.Tensor, view: KVView, options: AttendOptions, *, backend: Backend | str = Backend.AUTO
) -> torch.Tensor:
    """Attend over the stored tokens of one layer, and write the newest to its slot if it waits for that.

    Args:
        query: ``(batch, num_q_heads, q_len, head_dim)``; the query heads of a KV head are adjacent.
        view: Stored tokens.
        options: Scaling, mask and their kin.
        backend: Who computes.

    Returns:
        ``(batch, num_q_heads, q_len, value head_dim)``, dtype of ``query``.

    Raises:
        ShapeError: Query or mask do not fit the view.
        BackendUnavailableError: ``backend`` was named and cannot run on the device of ``query``.
    """
    form = _form(backend, query, view, options)
    step = view.prepared.find(form)
    if step is not None:
        # made after the checks below, for all calls of this form
        out: torch.Tensor | None = step.attend(query, view, options)
        if out is not None:
            return out
    _check_attend(query, view, options)
    if choose_backend(backend, query.device, view.keys.format, view.values.format).backend is Backend.TRITON:
        from hf_turboquant.ops import triton

        table = view.memo.get("block_table")
        if table is None and triton.needs_block_table(view):
            table = triton.build_block_table(view.arenas, view.num_blocks, view.block_tokens)
            view.memo["block_table"] = table
        # a token that waits is that of a decode step, and more will follow
        if form is None or not view.prepared.is_due(form, at_once=view.waiting is not None):
            return triton.attend(query, view, options, block_table=table)
        result, step = triton.attend_and_prepare(query, view, options, block_table=table)
        view.prepared.keep(form, step)
        return result
    view.write_newest()
    return torch.cat([reference.attend(*tile) for tile in _query_tiles(query, view, options)], dim=2)


def _form(
    backend: Backend | str, query: torch.Tensor, view: KVView, options: AttendOptions
) -> tuple[object, ...] | None:
    """Return what calls must have in common to be prepared together; None for calls that are not prepared."""
    if query.shape[2] > MAX_STEP:
        return None
    seen: object = options.sliding_window is not None
    mask, logits = options.mask, options.sink_logits
    if mask is not None:
        if mask.ndim != 4 or mask.stride(3) != 1:
            return None
        # its length and the strides that go with it change from step to step, as does the length of a window
        seen = (mask.shape[:3], mask.stride(1) == 0, mask.stride(2) == 0, mask.dtype, mask.device)
    extra = None if logits is None else (logits.shape, logits.stride(), logits.dtype, logits.device)
    waiting = view.waiting
    form = (query.shape, query.stride(), query.dtype, query.device, None if waiting is None else waiting.strides)
    return (backend, options.scaling, options.is_causal, options.softcap, seen, extra, *form)


def _query_tiles(
    query: torch.Tensor, view: KVView, options: AttendOptions
) -> Iterator[tuple[torch.Tensor, KVView, AttendOptions]]:
    """Cut long runs of queries so that the scores of one tile stay bounded; causal tiles do not see later keys."""
    batch, num_q_heads, q_len, _ = query.shape
    tile = max(TILE_SCORES // max(batch * num_q_heads * view.seq_len, 1), 1)
    if q_len <= tile:
        yield query, view, options
        return
    for start in range(0, q_len, tile):
        part = query[:, :, start : start + tile]
        mask, later = options.mask, q_len - start - part.shape[2]
        if mask is not None:
            rows = mask if mask.shape[2] == 1 else mask[:, :, start : start + tile]
            yield part, view, replace(options, mask=rows)
        elif options.is_causal or options.sliding_window is not None:
            # keys behind the last query of the tile are all in the tail, which holds every fresh token
            yield part, replace(view, tail_len=view.tail_len - later), replace(options, is_causal=True)
        else:
            yield part, view, options


def extend_ring(
    keys: torch.Tensor,
    values: torch.Tensor,
    view: KVView,
    slot: int,
    *,
    backend: Backend | str = Backend.AUTO,
) -> None:
    """Write new tokens into the rings of exact keys and values, from ``slot`` on and around the end.

    Args:
        keys: ``(batch, num_kv_heads, new tokens, head_dim)``, at most as many tokens as the ring has slots.
        values: The same; the last dimension may differ.
        view: Its rings are written in place.
        slot: Slot of the first new token.
        backend: Who copies.
    """
    if resolve_backend(backend, keys.device).backend is Backend.TRITON:
        from hf_turboquant.ops import triton

        triton.append(keys, values, view.tail_keys, view.tail_values, slot)
        return
    written = 0
    keys, values = keys.detach(), values.detach()
    for span in ring_slices(slot, keys.shape[2], view.tail_keys.shape[2]):
        size = span.stop - span.start
        view.tail_keys[:, :, span] = keys[:, :, written : written + size]
        view.tail_values[:, :, span] = values[:, :, written : written + size]
        written += size


def materialize(view: KVView, *, which: str, backend: Backend | str = Backend.AUTO) -> torch.Tensor:
    """Rebuild all keys, or all values, of a layer as a dense tensor.

    Args:
        view: Stored tokens.
        which: ``keys`` or ``values``.
        backend: Who computes.

    Returns:
        ``(batch, num_kv_heads, seq_len, head_dim)`` in the dtype of the exact tokens.
    """
    view.write_newest()
    keys = which == "keys"
    codec = view.keys if keys else view.values
    sinks, tail = (view.sink_keys, view.tail_keys) if keys else (view.sink_values, view.tail_values)
    split = view.record.value_offset
    parts = [sinks]
    left = view.num_blocks
    for arena in view.arenas:
        records = arena[: min(left, arena.shape[0])]
        left -= records.shape[0]
        if records.shape[0]:
            packed = records[..., :split] if keys else records[..., split:]
            rotated = dequantize(packed.permute(1, 2, 0, 3).contiguous(), codec, backend=backend)
            parts.append(reference.unrotate(rotated.flatten(2, 3), codec.tables).to(tail.dtype))
    if view.block_tokens is not None and view.num_blocks:
        packed_tokens = torch.cat(parts[1:], dim=2)
        kept = [i * BLOCK_TOKENS + t for i, count in enumerate(view.block_tokens) for t in range(count)]
        parts = [sinks, packed_tokens[:, :, torch.tensor(kept, device=tail.device)]]
    parts += [tail[..., slots, :] for slots in view.tail_slices()]
    return torch.cat(parts, dim=2)


def _check_attend(query: torch.Tensor, view: KVView, options: AttendOptions) -> None:
    batch, num_q_heads, q_len, head_dim = query.shape
    if batch != view.batch or head_dim != view.tail_keys.shape[-1]:
        raise ShapeError(
            f"query must be (batch={view.batch}, num_q_heads, q_len, head_dim={view.tail_keys.shape[-1]}) like the "
            f"stored keys, got {tuple(query.shape)}"
        )
    if num_q_heads % view.num_kv_heads:
        raise ShapeError(f"num_q_heads must be a multiple of num_kv_heads={view.num_kv_heads}, got {num_q_heads}")
    if query.device != view.tail_keys.device:
        raise ShapeError(f"query must be on {view.tail_keys.device} like the store, got {query.device}")
    mask = options.mask
    if mask is None:
        return
    expected = (batch, num_q_heads, q_len, view.seq_len)
    fits = mask.ndim == 4 and all(m in (1, e) for m, e in zip(mask.shape[:3], expected[:3], strict=True))
    if not fits or mask.shape[3] != view.seq_len:
        raise ShapeError(
            f"mask must have shape (batch | 1, num_q_heads | 1, q_len | 1, seq_len) for {expected}, got "
            f"{tuple(mask.shape)}"
        )
