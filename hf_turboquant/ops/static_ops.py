"""The store of fixed size as custom ops, which ``torch.compile`` and CUDA graphs take as they are.

The kernels read the counts of a store on the device, so that no step needs the host, and the same graph serves every
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hf_turboquant.errors import ShapeError, ValueRangeError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import AttendOptions, Backend, VectorCodec, attend, quantize
from hf_turboquant.ops.static_spec import SPECS, Count, StaticSpec, exact_view, full_counts


@torch.library.custom_op("hf_turboquant::static_append", mutates_args=("state",))
def static_append(
    keys: torch.Tensor,
    values: torch.Tensor,
    state: torch.Tensor,
    tables: Sequence[torch.Tensor],
    spec: str,
) -> None:
    """Store one token of every sequence, and pack the oldest block of the ring when that is full.

    Args:
        keys: ``(batch, num_kv_heads, 1, head_dim)``.
        values: The same; the last dimension may differ.
        state: ``(state_bytes,)`` uint8, as :meth:`StaticSpec.views` takes apart.
        tables: Tensors of both codecs; empty if the spec names them.
        spec: Name of the :class:`StaticSpec`.
    """
    known = SPECS[spec]
    codecs = known.codecs(tables, keys.device)
    lengths, exact_keys, exact_values, arena = known.views(state)
    if known.resolve(keys.device) is Backend.TRITON:
        from hf_turboquant.ops import triton

        triton.static_append(
            keys, values, lengths, exact_keys, exact_values, arena, codecs,
            sink_tokens=known.sink_tokens, slots=known.slots, max_tokens=known.max_tokens,
        )  # fmt: skip
        return
    _append_on_host(keys, values, lengths, exact_keys, exact_values, arena, codecs, known)


@static_append.register_fake
def _(
    keys: torch.Tensor,
    values: torch.Tensor,
    state: torch.Tensor,
    tables: Sequence[torch.Tensor],
    spec: str,
) -> None:
    # a graph is traced for every new shape: here a wrong one costs nothing to find, and would overwrite memory later
    known = SPECS[spec]
    for name, new, codec, dtype in zip(
        ("keys", "values"), (keys, values), (known.keys, known.values), known.dtypes, strict=True
    ):
        expected = (known.batch, known.heads, 1, codec.format.head_dim)
        if tuple(new.shape) != expected or new.dtype != dtype:
            raise ShapeError(
                f"{name} must be {expected} (batch, num_kv_heads, 1, head_dim) {dtype} like those already stored, got "
                f"{tuple(new.shape)} {new.dtype}; start with a new cache"
            )


def _append_on_host(
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    exact_keys: torch.Tensor,
    exact_values: torch.Tensor,
    arena: torch.Tensor,
    codecs: tuple[VectorCodec, VectorCodec],
    spec: StaticSpec,
) -> None:
    counts = lengths.tolist()
    if counts[Count.TOKENS] >= spec.max_tokens:
        lengths[Count.OVERFLOW] = 1
        return
    to_sinks = counts[Count.SINKS] < spec.sink_tokens and not (counts[Count.BLOCKS] or counts[Count.TAIL_LEN])
    if to_sinks:
        slot = counts[Count.SINKS]
    else:
        slot = spec.sink_tokens + (counts[Count.TAIL_START] + counts[Count.TAIL_LEN]) % spec.slots
    exact_keys[:, :, slot : slot + 1] = keys
    exact_values[:, :, slot : slot + 1] = values
    counts[Count.SINKS if to_sinks else Count.TAIL_LEN] += 1
    counts[Count.TOKENS] += 1
    if counts[Count.TAIL_LEN] == spec.slots:
        # the ring is whole blocks, and so is what was taken from it: the oldest block never wraps
        start = spec.sink_tokens + counts[Count.TAIL_START]
        oldest = slice(start, start + BLOCK_TOKENS)
        out = arena[counts[Count.BLOCKS] : counts[Count.BLOCKS] + 1]
        try:
            quantize(exact_keys[:, :, oldest], exact_values[:, :, oldest], out, *codecs, backend=spec.backend)
        except ValueRangeError:
            counts[Count.FAULT] = 1
        counts[Count.BLOCKS] += 1
        counts[Count.TAIL_LEN] -= BLOCK_TOKENS
        counts[Count.TAIL_START] = (counts[Count.TAIL_START] + BLOCK_TOKENS) % spec.slots
    lengths.copy_(torch.tensor(counts, dtype=torch.int32))


@torch.library.custom_op("hf_turboquant::static_attend", mutates_args=())
def static_attend(
    query: torch.Tensor,
    state: torch.Tensor,
    tables: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    spec: str,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend over all stored tokens with the queries of the newest one.

    Args:
        query: ``(batch, num_q_heads, 1, head_dim)``.
        state: As for :func:`static_append`, and so ``tables``.
        tables: Tensors of both codecs.
        mask: None, or bool or additive float ``(batch | 1, num_q_heads | 1, 1, max_tokens)``.
        sink_logits: As in :class:`AttendOptions`, and so ``scaling`` and ``softcap``.
        spec: Name of the :class:`StaticSpec`.
        scaling: Factor of the products.
        softcap: Cap of the logits, or None.

    Returns:
        ``(batch, num_q_heads, 1, value head_dim)``, dtype of ``query``.
    """
    known = SPECS[spec]
    codecs = known.codecs(tables, query.device)
    lengths, exact_keys, exact_values, arena = known.views(state)
    options = AttendOptions(scaling=scaling, mask=mask, softcap=softcap, sink_logits=sink_logits)
    if known.resolve(query.device) is Backend.TRITON:
        from hf_turboquant.ops import triton

        full = exact_view(known, codecs, exact_keys, exact_values, arena, full_counts(known))
        return triton.static_attend(query, full, options, lengths)
    counts = lengths.tolist()
    if mask is not None:
        options = replace(options, mask=mask[..., : counts[Count.TOKENS]])
    view = exact_view(known, codecs, exact_keys, exact_values, arena, counts)
    return attend(query, view, options, backend=known.backend)


@static_attend.register_fake
def _(
    query: torch.Tensor,
    state: torch.Tensor,
    tables: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    spec: str,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], query.shape[2], SPECS[spec].values.format.head_dim)
