"""Attention over the store, in bounded chunks: the dequantized history is never held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.reference.basis import rotate, unrotate
from hf_turboquant.ops.reference.masks import MaskReader
from hf_turboquant.ops.reference.products import block_scores, block_values
from hf_turboquant.ops.view import AttendOptions, KVView

CHUNK_BLOCKS = 16
"""Blocks dequantized at a time by :func:`attend`: 2048 tokens."""

GROUP_SCORES = 1 << 22
"""Scores held at a time by :func:`attend`, over all heads: 16 MiB."""


class _Softmax:
    """Running softmax of ``rows`` over groups of keys, with one accumulator per basis of the values."""

    def __init__(self, rows: tuple[int, ...], value_dim: int, device: torch.device) -> None:
        self.peak = torch.full(rows, -torch.inf, device=device)
        self.total = torch.zeros(rows, device=device)
        self.exact = torch.zeros(*rows, value_dim, device=device)
        self.rotated = torch.zeros(*rows, value_dim, device=device)

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Add a group of ``(..., rows, keys)`` scores; return its weights and rescale the past."""
        peak = torch.maximum(self.peak, scores.amax(dim=-1))
        base = peak.clamp_min(torch.finfo(torch.float32).min)
        decay = torch.exp(self.peak - base)
        weights = torch.exp(scores - base[..., None])
        self.total = self.total * decay + weights.sum(dim=-1)
        self.exact *= decay[..., None]
        self.rotated *= decay[..., None]
        self.peak = peak
        return weights


@dataclass(frozen=True)
class _Segment:
    """A run of tokens: exact keys and values, or block records with the valid tokens of each block."""

    tokens: int
    exact: tuple[torch.Tensor, torch.Tensor] | None = None
    records: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def attend(query: torch.Tensor, view: KVView, options: AttendOptions) -> torch.Tensor:
    """Attend over the stored tokens of one layer.

    Args:
        query: ``(batch, num_q_heads, q_len, head_dim)``; the query heads of a KV head are adjacent.
        view: Stored tokens.
        options: Scaling, mask and their kin.

    Returns:
        ``(batch, num_q_heads, q_len, value head_dim)``, dtype of ``query``. Rows that may attend to nothing are zero.
    """
    batch, num_q_heads, q_len, head_dim = query.shape
    rows = (batch, view.num_kv_heads, num_q_heads // view.num_kv_heads * q_len)
    grouped = (query.float() * options.scaling).reshape(*rows, head_dim)
    rot_query = rotate(grouped, view.keys.tables) if view.num_blocks else grouped
    state = _Softmax(rows, view.tail_values.shape[-1], query.device)
    masks = MaskReader(options, query.shape, view)

    column = 0
    for group in _groups(view, limit=max(GROUP_SCORES // (rows[0] * rows[1] * rows[2]), 1)):
        scores = [_segment_scores(segment, grouped, rot_query, view) for segment in group]
        weights = state.weigh(masks.apply(torch.cat(scores, dim=-1), column))
        for segment, part in zip(group, weights.split([s.tokens for s in group], dim=-1), strict=True):
            _add_values(state, segment, part, view)
            column += segment.tokens

    if options.sink_logits is not None:
        logits = options.sink_logits.float().view(1, view.num_kv_heads, -1, 1).expand(batch, -1, -1, q_len)
        state.weigh(logits.reshape(*rows, 1))
    out = state.exact + unrotate(state.rotated, view.values.tables) if view.num_blocks else state.exact
    total = torch.where(state.total == 0, 1.0, state.total)
    return (out / total[..., None]).reshape(batch, num_q_heads, q_len, -1).to(query.dtype)


def _groups(view: KVView, limit: int) -> Iterator[list[_Segment]]:
    """Yield segments oldest first, together while they hold at most ``limit`` tokens."""
    group: list[_Segment] = []
    size = 0
    for segment in _segments(view):
        if group and size + segment.tokens > limit:
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.tokens
    if group:
        yield group


def _segments(view: KVView) -> Iterator[_Segment]:
    if view.num_sinks:
        yield _Segment(view.num_sinks, exact=(view.sink_keys, view.sink_values))
    done = 0
    for arena in view.arenas:
        used = min(view.num_blocks - done, arena.shape[0])
        for start in range(0, used, CHUNK_BLOCKS):
            stop = min(start + CHUNK_BLOCKS, used)
            # (batch, heads, blocks, bytes): one pass over bytes, so that the products below are plain batched ones
            records = arena[start:stop].permute(1, 2, 0, 3).contiguous()
            tokens, kept = (stop - start) * BLOCK_TOKENS, None
            counts = view.block_tokens[done + start : done + stop] if view.block_tokens is not None else ()
            if counts and min(counts) < BLOCK_TOKENS:
                tokens = sum(counts)
                valid = torch.arange(BLOCK_TOKENS)[None] < torch.tensor(counts)[:, None]
                kept = valid.flatten().nonzero().flatten().to(arena.device)
            yield _Segment(tokens, records=records, kept=kept)
        done += used
    for slots in view.tail_slices():
        yield _Segment(slots.stop - slots.start, exact=(view.tail_keys[:, :, slots], view.tail_values[:, :, slots]))


def _segment_scores(segment: _Segment, query: torch.Tensor, rot_query: torch.Tensor, view: KVView) -> torch.Tensor:
    """Return ``(batch, heads, rows, tokens)`` products of the queries with the keys of a segment."""
    if segment.exact is not None:
        return query @ segment.exact[0].float().transpose(-1, -2)
    assert segment.records is not None
    scores = block_scores(rot_query, segment.records[..., : view.record.value_offset], view.keys)
    return scores if segment.kept is None else scores[..., segment.kept]


def _add_values(state: _Softmax, segment: _Segment, weights: torch.Tensor, view: KVView) -> None:
    """Add the weighted values of a segment to the accumulator of their basis."""
    if segment.exact is not None:
        state.exact += weights @ segment.exact[1].float()
        return
    assert segment.records is not None
    if segment.kept is not None:
        blocks = segment.records.shape[2]
        spread = weights.new_zeros(*weights.shape[:-1], blocks * BLOCK_TOKENS)
        weights = spread.index_copy(-1, segment.kept, weights)
    state.rotated += block_values(weights, segment.records[..., view.record.value_offset :], view.values)
