"""Attention over the store, in bounded chunks: the dequantized history is never held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.reference.basis import rotate, unrotate
from hf_turboquant.ops.reference.masks import MaskReader
from hf_turboquant.ops.reference.products import block_scores, block_values
from hf_turboquant.ops.view import AttendOptions, KVView, VectorTables

CHUNK_BLOCKS = 16
"""Blocks dequantized at a time by :func:`attend`: 2048 tokens."""

GROUP_SCORES = 1 << 22
"""Scores held at a time by :func:`attend`, over all heads: 16 MiB."""


class _Softmax:
    """Running softmax over groups of keys, with one accumulator for each basis of the values.

    Attributes:
        peak: ``(batch * heads, rows)``, largest score so far.
        total: ``(batch * heads, rows)``, sum of the weights so far.
        exact: ``(batch * heads, rows, value head_dim)``, weighted sum of exact values; None before the first.
        rotated: The same for values in their rotated basis.
    """

    def __init__(self) -> None:
        self.peak: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.exact: torch.Tensor | None = None
        self.rotated: torch.Tensor | None = None

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Add a group of ``(..., rows, keys)`` scores; return its weights and rescale the past."""
        # a row that sees nothing has a peak of -inf, which would make its weights NaN
        peak = scores.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
        if self.peak is not None:
            peak = torch.maximum(peak, self.peak)
        weights = torch.exp(scores - peak[..., None])
        total = weights.sum(dim=-1)
        if self.peak is not None and self.total is not None:
            decay = torch.exp(self.peak - peak)
            total += self.total * decay
            for past in (self.exact, self.rotated):
                if past is not None:
                    past *= decay[..., None]
        self.peak, self.total = peak, total
        return weights

    def add_exact(self, values: torch.Tensor) -> None:
        """Add weighted exact values."""
        self.exact = values if self.exact is None else self.exact.add_(values)

    def add_rotated(self, values: torch.Tensor) -> None:
        """Add weighted values in their rotated basis."""
        self.rotated = values if self.rotated is None else self.rotated.add_(values)

    def result(self, tables: VectorTables, heads: tuple[int, int]) -> torch.Tensor:
        """Return the weighted mean of all values, zero for rows that saw nothing."""
        assert self.total is not None
        out = self.exact
        if self.rotated is not None:
            plain = unrotate(self.rotated.unflatten(0, heads), tables).flatten(0, 1)
            out = plain if out is None else out + plain
        assert out is not None
        return out / self.total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]


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
    rot_query = rotate(grouped, view.keys.tables).flatten(0, 1) if view.num_blocks else grouped
    grouped = grouped.flatten(0, 1)
    state = _Softmax()
    masks = MaskReader(options, query.shape, view)

    column = 0
    segments = _segments(view, in_order=masks.by_position)
    for group in _groups(segments, limit=max(GROUP_SCORES // (rows[0] * rows[1] * rows[2]), 1)):
        scores = [_segment_scores(segment, grouped, rot_query, view) for segment in group]
        weights = state.weigh(masks.apply(torch.cat(scores, dim=-1), column))
        for segment, part in zip(group, weights.split([s.tokens for s in group], dim=-1), strict=True):
            _add_values(state, segment, part, view)
            column += segment.tokens

    if options.sink_logits is not None:
        logits = options.sink_logits.float().view(1, view.num_kv_heads, -1, 1).expand(batch, -1, -1, q_len)
        state.weigh(logits.reshape(-1, rows[2], 1))
    if view.seq_len == 0:
        return query.new_zeros(batch, num_q_heads, q_len, view.tail_values.shape[-1])
    return state.result(view.values.tables, rows[:2]).reshape(batch, num_q_heads, q_len, -1).to(query.dtype)


def _groups(segments: Iterator[_Segment], limit: int) -> Iterator[list[_Segment]]:
    """Yield segments together while they hold at most ``limit`` tokens."""
    group: list[_Segment] = []
    size = 0
    for segment in segments:
        if group and size + segment.tokens > limit:
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.tokens
    if group:
        yield group


def _segments(view: KVView, *, in_order: bool) -> Iterator[_Segment]:
    """Yield all tokens: oldest first if ``in_order``, else the exact ones together, which is fewer products."""
    exact = [(view.sink_keys, view.sink_values)] if view.num_sinks else []
    tail = [(view.tail_keys[:, :, slots], view.tail_values[:, :, slots]) for slots in view.tail_slices()]
    if in_order:
        yield from (_Segment(pair[0].shape[2], exact=pair) for pair in exact)
        yield from _block_segments(view)
        yield from (_Segment(pair[0].shape[2], exact=pair) for pair in tail)
        return
    yield from _block_segments(view)
    exact += tail
    if exact:
        keys, values = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*exact, strict=True))
        yield _Segment(keys.shape[2], exact=(keys, values))


def _block_segments(view: KVView) -> Iterator[_Segment]:
    """Yield the packed blocks, :data:`CHUNK_BLOCKS` at a time whatever arenas they lie in."""
    first = 0
    for parts in _chunks(view):
        # (batch * heads, blocks, bytes): one pass over bytes, so that the products below are plain batched ones
        turned = [part.flatten(1, 2).transpose(0, 1) for part in parts]
        records = turned[0].contiguous() if len(turned) == 1 else torch.cat(turned, dim=1)
        blocks = records.shape[1]
        tokens, kept = blocks * BLOCK_TOKENS, None
        counts = view.block_tokens[first : first + blocks] if view.block_tokens is not None else ()
        if counts and min(counts) < BLOCK_TOKENS:
            tokens = sum(counts)
            valid = torch.arange(BLOCK_TOKENS)[None] < torch.tensor(counts)[:, None]
            kept = valid.flatten().nonzero().flatten().to(records.device)
        yield _Segment(tokens, records=records, kept=kept)
        first += blocks


def _chunks(view: KVView) -> Iterator[list[torch.Tensor]]:
    """Yield the blocks in use as runs of arenas of :data:`CHUNK_BLOCKS` in all, the last of what is left."""
    parts: list[torch.Tensor] = []
    left, room = view.num_blocks, CHUNK_BLOCKS
    for arena in view.arenas:
        start, used = 0, min(left, arena.shape[0])
        while start < used:
            part = arena[start : min(start + room, used)]
            parts.append(part)
            start, room = start + part.shape[0], room - part.shape[0]
            if not room:
                yield parts
                parts, room = [], CHUNK_BLOCKS
        left -= used
    if parts:
        yield parts


def _segment_scores(segment: _Segment, query: torch.Tensor, rot_query: torch.Tensor, view: KVView) -> torch.Tensor:
    """Return ``(batch * heads, rows, tokens)`` products of the queries with the keys of a segment."""
    if segment.exact is not None:
        return torch.bmm(query, segment.exact[0].float().flatten(0, 1).mT)
    assert segment.records is not None
    scores = block_scores(rot_query, segment.records[..., : view.record.value_offset], view.keys)
    return scores if segment.kept is None else scores[..., segment.kept]


def _add_values(state: _Softmax, segment: _Segment, weights: torch.Tensor, view: KVView) -> None:
    """Add the weighted values of a segment to the accumulator of their basis."""
    if segment.exact is not None:
        state.add_exact(torch.bmm(weights, segment.exact[1].float().flatten(0, 1)))
        return
    assert segment.records is not None
    if segment.kept is not None:
        blocks = segment.records.shape[1]
        spread = weights.new_zeros(*weights.shape[:-1], blocks * BLOCK_TOKENS)
        weights = spread.index_copy(-1, segment.kept, weights)
    state.add_rotated(block_values(weights, segment.records[..., view.record.value_offset :], view.values))
