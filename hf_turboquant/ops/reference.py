"""The operations in plain torch: the specification the kernels are held to, and the CPU path.

Everything is computed in float32. Attention walks the store in bounded chunks and never holds the
dequantized history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from hf_turboquant.errors import ValueRangeError
from hf_turboquant.layout import BLOCK_TOKENS, Section, VectorFormat
from hf_turboquant.ops.view import KVView, VectorCodec, VectorTables
from hf_turboquant.packing import pack_codes, plane_row_bytes, unpack_codes

CHUNK_BLOCKS = 16
"""Blocks dequantized at a time by :func:`attend`: 2048 tokens."""

GROUP_SCORES = 1 << 22
"""Scores held at a time by :func:`attend`, over all heads: 16 MiB."""


# quantize


def quantize(vectors: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Quantize whole blocks of vectors to the bytes of their part of a record.

    Args:
        vectors: ``(..., num_kv_heads, 128, head_dim)``, any floating dtype.
        codec: Format and tables.

    Returns:
        ``(..., num_kv_heads, codec.format.nbytes)`` uint8.

    Raises:
        ValueRangeError: A vector holds NaN or infinity, or a norm does not fit ``norm_dtype``.
    """
    fmt, tables = codec.format, codec.tables
    if not torch.isfinite(vectors).all():
        raise ValueRangeError("vectors must be finite to be quantized, got NaN or infinity")
    out = torch.zeros(*vectors.shape[:-2], fmt.nbytes, dtype=torch.uint8, device=vectors.device)
    if fmt.kind == "exact":
        _write(out, fmt.sections["exact"], vectors)
        return out
    rotated = rotate(vectors, tables)
    if fmt.centered:
        mean = rotated.mean(dim=-2, keepdim=True).to(torch.bfloat16)
        _write(out, fmt.sections["mean"], mean)
        # the codes hold what is left after the mean as stored, so its rounding costs nothing
        rotated = rotated - mean.float()
    norms, residual = [], torch.empty_like(rotated)
    for index, group in enumerate(fmt.groups):
        part = rotated[..., group.start : group.start + group.size]
        codes, norm, levels = _quantize_group(part, tables, index, fmt)
        stored = codes.transpose(-1, -2) if fmt.transposed else codes
        section = fmt.sections[f"codes{index}"]
        out[..., section.offset : section.offset + section.nbytes] = pack_codes(stored, group.bits)
        norms.append(norm)
        residual[..., group.start : group.start + group.size] = part - levels * norm.float()[..., None]
    _write(out, fmt.sections["norms"], torch.stack(norms, dim=-2))
    if fmt.kind == "prod":
        assert tables.projection is not None
        signs = (residual @ tables.projection.T >= 0).to(torch.uint8)
        section = fmt.sections["signs"]
        out[..., section.offset : section.offset + section.nbytes] = pack_codes(signs, 1)
        residual_norms = _to_norm_dtype(torch.linalg.vector_norm(residual, dim=-1), fmt)
        _write(out, fmt.sections["residual_norms"], residual_norms[..., None, :])
    return out


def _quantize_group(
    part: torch.Tensor, tables: VectorTables, index: int, fmt: VectorFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes ``(..., 128, size)``, norms ``(..., 128)`` in the stored dtype, and the unit levels coded."""
    norm = torch.linalg.vector_norm(part, dim=-1)
    unit = part / norm.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(unit, tables.boundaries[index]).to(torch.uint8)
    levels = tables.centroids[index][codes.int()]
    if fmt.scale == "matched":
        stored = norm / torch.linalg.vector_norm(levels, dim=-1)
    elif fmt.scale == "unbiased":
        stored = norm / (unit * levels).sum(dim=-1).clamp_min(torch.finfo(torch.float32).eps)
    else:
        stored = norm
    return codes, _to_norm_dtype(stored, fmt), levels


def _to_norm_dtype(norms: torch.Tensor, fmt: VectorFormat) -> torch.Tensor:
    limit = torch.finfo(fmt.norm_dtype).max
    if norms.numel() and float(norms.max()) > limit:
        raise ValueRangeError(
            f"a norm of {float(norms.max()):.6g} exceeds {limit:.6g}, the largest {str(fmt.norm_dtype)[6:]}; "
            "set norm_dtype='bfloat16' or 'float32'"
        )
    return norms.to(fmt.norm_dtype)


def _write(out: torch.Tensor, section: Section, values: torch.Tensor) -> None:
    """Store ``(..., rows, count)`` values as the raw bytes of a plain section."""
    assert section.dtype is not None
    raw = values.to(section.dtype).contiguous().view(torch.uint8).flatten(-2)
    out[..., section.offset : section.offset + section.nbytes] = raw


# dequantize


def dequantize(packed: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Reconstruct the vectors of whole blocks, in the rotated basis.

    ``x = mean + norms * centroids[codes]`` (+ the sign term of ``prod``).

    Args:
        packed: ``(..., codec.format.nbytes)`` uint8.
        codec: Format and tables that made the bytes.

    Returns:
        ``(..., 128, head_dim)`` float32. For ``exact`` the vectors as stored, not rotated.
    """
    fmt, tables = codec.format, codec.tables
    if fmt.kind == "exact":
        return _read(packed, fmt.sections["exact"]).float()
    norms = _read(packed, fmt.sections["norms"]).float()
    parts = []
    for index, group in enumerate(fmt.groups):
        section = fmt.sections[f"codes{index}"]
        codes = unpack_codes(_bytes(packed, section), group.bits, section.rows, section.count)
        levels = tables.centroids[index][codes.int()]
        parts.append((levels.transpose(-1, -2) if fmt.transposed else levels) * norms[..., index, :, None])
    vectors = torch.cat(parts, dim=-1)
    if fmt.kind == "prod":
        assert tables.projection is not None
        section = fmt.sections["signs"]
        signs = unpack_codes(_bytes(packed, section), 1, section.rows, section.count).float() * 2 - 1
        residual_norms = _read(packed, fmt.sections["residual_norms"]).float().squeeze(-2)
        vectors = vectors + tables.projection_scale * residual_norms[..., None] * (signs @ tables.projection)
    if fmt.centered:
        vectors = vectors + _read(packed, fmt.sections["mean"]).float()
    return vectors


def _bytes(packed: torch.Tensor, section: Section) -> torch.Tensor:
    return packed[..., section.offset : section.offset + section.nbytes]


def _read(packed: torch.Tensor, section: Section) -> torch.Tensor:
    """Return a plain section as ``(..., rows, count)`` in its own dtype."""
    assert section.dtype is not None
    return _bytes(packed, section).contiguous().view(section.dtype).unflatten(-1, (section.rows, section.count))


# rotation


def rotate(vectors: torch.Tensor, tables: VectorTables) -> torch.Tensor:
    """Take vectors to the rotated basis.

    Args:
        vectors: ``(..., num_kv_heads, rows, head_dim)``.
        tables: Rotation and channel order.

    Returns:
        float32, the shape of ``vectors``; the vectors themselves where there is no rotation.
    """
    vectors = vectors.float()
    if tables.rotation is None:
        return vectors
    if tables.channel_order is not None:
        order = tables.channel_order[:, None, :].expand(vectors.shape)
        vectors = vectors.gather(-1, order)
    return vectors @ tables.rotation


def unrotate(vectors: torch.Tensor, tables: VectorTables) -> torch.Tensor:
    """Invert :func:`rotate`."""
    if tables.rotation is None:
        return vectors
    vectors = vectors @ tables.rotation.T
    if tables.channel_order is not None:
        order = tables.channel_order.argsort(dim=-1)[:, None, :].expand(vectors.shape)
        vectors = vectors.gather(-1, order)
    return vectors


# attend


@dataclass(frozen=True)
class AttendOptions:
    """Everything but tensors of the store that changes the result of attention.

    Attributes:
        scaling: Factor of the query-key products.
        mask: None, or bool (True = may attend) or additive float, ``(batch | 1, num_q_heads | 1, q_len | 1, seq_len)``.
        is_causal: With no mask, query ``i`` sees key ``j <= i + seq_len - q_len``.
        sliding_window: With no mask, keys further back than this many tokens are hidden.
        softcap: ``softcap * tanh(score / softcap)`` before the mask.
        sink_logits: ``(num_q_heads,)``, one more logit in every softmax that carries no value.
    """

    scaling: float
    mask: torch.Tensor | None = None
    is_causal: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None


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
    masks = _MaskReader(options, query.shape, view)

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


def _segment_scores(
    segment: _Segment, query: torch.Tensor, rot_query: torch.Tensor, view: KVView
) -> torch.Tensor:
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


def block_scores(rot_query: torch.Tensor, packed: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Multiply queries with the stored keys of a run of blocks.

    Args:
        rot_query: ``(batch, heads, rows, head_dim)`` float32, rotated and scaled.
        packed: ``(batch, heads, blocks, key bytes)`` uint8.
        codec: Key codec.

    Returns:
        ``(batch, heads, rows, blocks * 128)`` float32.
    """
    fmt, tables = codec.format, codec.tables
    if fmt.kind != "mse":
        keys = dequantize(packed, codec).flatten(2, 3)
        return rot_query @ keys.transpose(-1, -2)
    norms = _read(packed, fmt.sections["norms"]).float()
    if fmt.centered:
        means = _read(packed, fmt.sections["mean"]).float().squeeze(-2)
        scores = (rot_query @ means.transpose(-1, -2))[..., None]
    else:
        scores = rot_query.new_zeros(())
    for index, group in enumerate(fmt.groups):
        levels, order = _levels(packed, fmt.sections[f"codes{index}"], tables, index)
        part = rot_query[..., group.start : group.start + group.size]
        part = part if order is None else part.index_select(-1, order)
        product = part @ levels.flatten(2, 3).transpose(-1, -2)
        scores = torch.addcmul(scores, product.unflatten(-1, (-1, BLOCK_TOKENS)), norms[:, :, None, :, index])
    return scores.flatten(-2)


def block_values(weights: torch.Tensor, packed: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Sum the stored values of a run of blocks, weighted.

    Args:
        weights: ``(batch, heads, rows, blocks * 128)`` float32.
        packed: ``(batch, heads, blocks, value bytes)`` uint8.
        codec: Value codec.

    Returns:
        ``(batch, heads, rows, head_dim)`` float32, in the rotated basis.
    """
    fmt, tables = codec.format, codec.tables
    if fmt.kind != "mse":
        return weights @ dequantize(packed, codec).flatten(2, 3)
    norms = _read(packed, fmt.sections["norms"]).float()
    per_block = weights.unflatten(-1, (-1, BLOCK_TOKENS))
    parts = []
    for index, _ in enumerate(fmt.groups):
        section = fmt.sections[f"codes{index}"]
        levels, order = _levels(packed, section, tables, index, rows_first=True)
        scaled = per_block * norms[:, :, None, :, index]
        scaled = scaled if order is None else scaled.index_select(-1, order)
        parts.append(scaled.flatten(-2) @ levels.flatten(-2).transpose(-1, -2))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if fmt.centered:
        means = _read(packed, fmt.sections["mean"]).float().squeeze(-2)
        out = out + per_block.sum(dim=-1) @ means
    return out


def _levels(
    packed: torch.Tensor, section: Section, tables: VectorTables, index: int, *, rows_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Look up the centroids of a packed section of ``(batch, heads, blocks, bytes)``.

    Returns:
        ``(batch, heads, blocks, rows, count)`` float32, or with ``rows_first`` ``(batch, heads, rows, blocks,
        count)``; and the position of each column where they are not in order: two or four codes come out of one
        lookup side by side, which is cheaper than putting them in place.
    """
    assert section.bits is not None
    table = tables.byte_tables[index]
    data = _bytes(packed, section)
    if table is None or section.count * section.bits % 8:
        codes = unpack_codes(data, section.bits, section.rows, section.count)
        codes = codes.transpose(2, 3) if rows_first else codes
        return torch.index_select(tables.centroids[index], 0, codes.int().flatten()).view(codes.shape), None
    keys = _table_index(data, section)
    keys = keys.transpose(2, 3).contiguous() if rows_first else keys
    levels = torch.index_select(table, 0, keys.flatten()).view(torch.float32)
    per_key = section.count // keys.shape[-1]
    order = _byte_order(section.count, per_key, packed.device)
    return levels.view(*keys.shape[:-1], section.count), order


def _table_index(data: torch.Tensor, section: Section) -> torch.Tensor:
    """Return ``(..., rows, keys)`` int32 indices into :attr:`VectorTables.byte_tables`.

    2 and 4 bits: the byte itself. 3 bits: a byte of the low plane, and above it the four sign bits of its codes.
    """
    rows, count = section.rows, section.count
    if section.bits != 3:
        return data.unflatten(-1, (rows, -1)).int()
    low_bytes = plane_row_bytes(count, 2)
    low = data[..., : rows * low_bytes].unflatten(-1, (rows, low_bytes)).int()
    signs = data[..., rows * low_bytes :].unflatten(-1, (rows, -1)).int()
    # byte j of the sign plane holds, at even bits, the signs of byte j of the low plane; at odd bits those of byte j + m
    nibbles = _even_bits(data.device)
    high = torch.cat([nibbles[signs], nibbles[signs >> 1]], dim=-1)
    return low + high


@lru_cache(maxsize=8)
def _even_bits(device: torch.device) -> torch.Tensor:
    """Return ``(256,)`` int32: bits 0, 2, 4, 6 of a byte gathered in bits 8 to 11."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    return sum(((byte >> (2 * part)) & 1) << (8 + part) for part in range(4))  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _byte_order(count: int, per_key: int, device: torch.device) -> torch.Tensor:
    """Return the positions of the codes of a row when its bytes are read one after another."""
    return torch.arange(count, device=device).view(per_key, count // per_key).T.flatten()


# masks


class _MaskReader:
    """Apply the mask of any kind to a segment of scores."""

    def __init__(self, options: AttendOptions, query_shape: torch.Size, view: KVView) -> None:
        self.softcap = options.softcap
        self.mask = options.mask
        batch, num_q_heads, q_len, _ = query_shape
        heads = view.num_kv_heads
        self.shape = (batch, heads, num_q_heads // heads, q_len)
        self.positions: torch.Tensor | None = None
        self.window = options.sliding_window
        if self.mask is not None and self.mask.shape[1] != 1:
            self.mask = self.mask.unflatten(1, (heads, num_q_heads // heads))
        elif self.mask is not None:
            self.mask = self.mask[:, :, None]
        elif (options.is_causal and q_len > 1) or options.sliding_window is not None:
            self.positions = torch.arange(q_len, device=view.tail_keys.device) + (view.seq_len - q_len)
            self.causal = options.is_causal

    def apply(self, scores: torch.Tensor, column: int) -> torch.Tensor:
        """Return ``(batch, heads, rows, keys)`` scores capped and masked; ``column`` is the first key's index."""
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.mask is None and self.positions is None:
            return scores
        keys = scores.shape[-1]
        spread = scores.view(*self.shape, keys)
        if self.mask is not None:
            part = self.mask[..., column : column + keys]
            spread = spread.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else spread + part.float()
        else:
            assert self.positions is not None
            index = torch.arange(column, column + keys, device=scores.device)
            visible = torch.ones(len(self.positions), keys, dtype=torch.bool, device=scores.device)
            if self.causal:
                visible &= index <= self.positions[:, None]
            if self.window is not None:
                visible &= index > self.positions[:, None] - self.window
            spread = spread.masked_fill(~visible, -torch.inf)
        return spread.reshape(scores.shape)
