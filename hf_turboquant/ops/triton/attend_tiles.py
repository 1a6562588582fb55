"""Pieces of attend: scores of a tile of keys, and weighted sums of a tile of values."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.primitives import (
    add_product,
    align_signs,
    fold,
    load_as_float,
    lookup,
    mask_scores,
    update_softmax,
)
from hf_turboquant.ops.triton.word_tiles import (
    add_word_values,
    in_positions,
    load_norms,
    load_value_words,
    word_scores,
)

# packed blocks


@triton.jit
def _group_scores(
    part_ptr, tokens, parts, table,
    G: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of ``TOKENS`` keys of a block with the queries over group ``G``, without norms."""
    if G.row_words > 0:
        scores = word_scores(part_ptr, tokens, parts, table, G, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION)
    else:
        scores = _byte_scores(part_ptr, tokens, parts, table, G, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION)
    if G.bits == 8:
        scores *= table[0]
    return scores


@triton.jit
def _byte_scores(
    part_ptr, tokens, parts, table,
    G: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do what :func:`word_scores` does for rows that are not whole words of four lanes."""
    columns = tl.arange(0, G.row_bytes_pad)
    mask = ((columns < G.row_bytes) & (columns >= 0))[None, :]
    packed = tl.load(part_ptr + G.codes + tokens[:, None] * G.row_bytes + columns[None, :], mask=mask, other=0)
    signs = packed
    if G.bits == 3:
        # the byte of the high bits is shared by two bytes of low bits; moved so that both read the same bit
        offsets = tokens[:, None] * G.sign_row_bytes + (columns % G.sign_row_bytes)[None, :]
        signs = tl.load(part_ptr + G.sign_codes + offsets, mask=mask, other=0)
        signs = align_signs(signs, (columns // G.sign_row_bytes)[None, :], PERMUTE)
    PARTS: tl.constexpr = G.parts
    scores = tl.zeros([TOKENS, ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        levels = lookup(packed, signs, table, G.bits, part * G.width, 2 * part, DTYPE, PERMUTE)
        scores = add_product(scores, levels, parts[part], PRECISION)
    return scores


@triton.jit
def _exact_group_scores(
    part_ptr, tokens, exact_query, F: tl.constexpr, E: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the products of keys of a block with the queries over channels kept as they are."""
    EXACT: tl.constexpr = F.exact_dtype
    channels = tl.arange(0, 2 * E.half) % E.half
    mask = (channels < E.size)[None, :] & (tokens >= 0)[:, None]
    keys = load_as_float(part_ptr + E.offset, tokens[:, None] * E.size + channels[None, :], mask, EXACT)
    return tl.dot(keys.to(DTYPE), exact_query, input_precision=PRECISION)


@triton.jit
def key_scores(
    part_ptr, step, tokens, parts0, parts1, sign_parts, exact_parts, table0, table1, sign_table, mean_scores,
    F: tl.constexpr, V: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, EXACT_GROUP_DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores ``[TOKENS, ROWS]`` of keys of a block."""
    E: tl.constexpr = F.exact_group
    NORM: tl.constexpr = F.norm_dtype
    EXACT: tl.constexpr = F.exact_dtype
    G0: tl.constexpr = F.first
    G1: tl.constexpr = F.second
    SIGNS: tl.constexpr = F.sign_traits
    there = tokens >= 0
    if F.kind == "exact":
        channels = tl.arange(0, F.head_dim_pad)
        offsets = tokens[:, None] * F.head_dim + channels[None, :]
        keys = load_as_float(part_ptr + F.exact, offsets, there[:, None] & (channels < F.head_dim)[None, :], EXACT)
        scores = tl.dot(keys.to(DTYPE), parts0[0], input_precision=PRECISION)
    elif F.kind == "qjl":
        norms = load_norms(part_ptr + F.norms, step, tokens, V, TOKENS, ROWS, NORM)
        scores = _group_scores(part_ptr, tokens, sign_parts, sign_table, SIGNS, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION)
        scores *= norms
    else:
        norms = load_norms(part_ptr + F.norms, step, tokens, V, TOKENS, ROWS, NORM)
        scores = _group_scores(part_ptr, tokens, parts0, table0, G0, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION)
        scores *= norms
        if F.num_groups == 2:
            norms = load_norms(part_ptr + F.norms + 128 * F.norm_bytes, step, tokens, V, TOKENS, ROWS, NORM)
            other = _group_scores(part_ptr, tokens, parts1, table1, G1, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION)
            scores += other * norms
        if F.kind == "prod":
            norms = load_norms(part_ptr + F.residual_norms, step, tokens, V, TOKENS, ROWS, NORM)
            signs = _group_scores(
                part_ptr, tokens, sign_parts, sign_table, SIGNS, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION
            )
            scores += signs * norms
        if E.size > 0:
            scores += _exact_group_scores(part_ptr, tokens, exact_parts[0], F, E, EXACT_GROUP_DTYPE, PRECISION)
    if F.centered:
        scores += mean_scores[None, :]
    return scores


@triton.jit
def _load_value_group(
    part_ptr, step, tokens, F: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the norms of group ``G`` of the values, and the words with codes where they are read by words."""
    NORM: tl.constexpr = F.norm_dtype
    words = ()
    if F.has_word_order:
        words = load_value_words(part_ptr, step, G)
    norms = load_norms(part_ptr + F.norms + G.index * 128 * F.norm_bytes, step, tokens, F, TOKENS, ROWS, NORM)
    return norms, words


@triton.jit
def load_values(part_ptr, step, tokens, F: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Load what a step reads of values that are coded by centroids, for both groups of channels.

    This is before the scores of the step are computed, so that memory answers meanwhile.
    """
    G0: tl.constexpr = F.first
    G1: tl.constexpr = F.second
    loaded0 = ()
    loaded1 = ()
    if F.kind == "mse":
        loaded0 = _load_value_group(part_ptr, step, tokens, F, G0, TOKENS, ROWS)
        if F.num_groups == 2:
            loaded1 = _load_value_group(part_ptr, step, tokens, F, G1, TOKENS, ROWS)
    return loaded0, loaded1


@triton.jit
def _add_group_values(
    part_ptr, loaded, weights, acc, table, scale,
    F: tl.constexpr, G: tl.constexpr, STEP, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``values . weights`` of the tokens of a step to ``acc`` ``[channels, rows]``."""
    norms = loaded[0] * scale
    if G.bits == 8:
        norms *= table[0]
    weights = in_positions((weights * norms).to(DTYPE), F, TOKENS, ROWS)
    if F.has_word_order:
        acc = add_word_values(loaded[1], weights, acc, table, G, TOKENS, DTYPE, PERMUTE, PRECISION)
    else:
        acc = _add_byte_values(part_ptr, weights, acc, table, G, STEP, TOKENS, DTYPE, PERMUTE, PRECISION)
    return acc


@triton.jit
def _add_byte_values(
    part_ptr, weights, acc, table,
    G: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr,
    DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do what :func:`add_word_values` does, for tokens in ascending order."""
    FIRST: tl.constexpr = STEP * TOKENS
    tokens = tl.arange(0, TOKENS)
    channels = tl.arange(0, G.size_pad)
    mask = ((channels < G.size) & (channels >= 0))[:, None]
    offsets = channels[:, None] * G.row_bytes + FIRST % G.row_bytes + tokens[None, :]
    packed = tl.load(part_ptr + G.codes + offsets, mask=mask, other=0)
    signs = packed
    if G.bits == 3:
        offsets = channels[:, None] * 16 + (tokens % 16)[None, :]
        signs = tl.load(part_ptr + G.sign_codes + offsets, mask=mask, other=0)
        signs = align_signs(signs, (tokens // 16)[None, :], PERMUTE)
    levels = lookup(packed, signs, table, G.bits, FIRST // G.row_bytes * G.width, FIRST // 16, DTYPE, PERMUTE)
    return add_product(acc, levels, weights, PRECISION)


@triton.jit
def _add_range_values(
    part_ptr, weights, acc,
    F: tl.constexpr, G: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add weighted values that are coded between the least and the largest of 32 channels."""
    NORM: tl.constexpr = F.norm_dtype
    FIRST: tl.constexpr = STEP * TOKENS
    tokens = tl.arange(0, TOKENS)
    channels = tl.arange(0, G.size_pad)
    mask = (channels < G.size)[:, None] & (tokens >= 0)[None, :]
    offsets = channels[:, None] * G.row_bytes + FIRST % G.row_bytes + tokens[None, :]
    packed = tl.load(part_ptr + G.codes + offsets, mask=mask, other=0).to(tl.int32)
    codes = fold((packed >> (FIRST // G.row_bytes * G.width)) & ((1 << G.bits) - 1), G.bits)
    offsets = (channels // 32)[:, None] * 128 + FIRST + tokens[None, :]
    values = codes.to(tl.float32) * load_as_float(part_ptr + F.scales, offsets, mask, NORM)
    values += load_as_float(part_ptr + F.zeros, offsets, mask, NORM)
    return add_product(acc, values.to(DTYPE), weights.to(DTYPE), PRECISION)


@triton.jit
def _add_mean(part_ptr, totals, acc, F: tl.constexpr, G: tl.constexpr):
    """Add the mean of the block's values, once for every unit of weight."""
    channels = tl.arange(0, G.size_pad)
    mean = load_as_float(part_ptr + F.mean, G.start + channels, channels < G.size, "bf16")
    return acc + mean[:, None] * totals[None, :]


@triton.jit
def _add_exact_values(
    part_ptr, weights, acc,
    F: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = F.exact_dtype
    tokens = STEP * TOKENS + tl.arange(0, TOKENS)
    channels = tl.arange(0, F.head_dim_pad)
    mask = (channels < F.head_dim)[:, None] & (tokens >= 0)[None, :]
    values = load_as_float(part_ptr + F.exact, tokens[None, :] * F.head_dim + channels[:, None], mask, EXACT)
    return add_product(acc, values.to(DTYPE), weights.to(DTYPE), PRECISION)


@triton.jit
def _highest_norm(loaded0, loaded1, F: tl.constexpr):
    """Return the largest value norm of some tokens of a block."""
    highest = tl.max(loaded0[0])
    if F.num_groups == 2:
        highest = tl.maximum(highest, tl.max(loaded1[0]))
    return highest


@triton.jit
def add_values(
    part_ptr, loaded0, loaded1, weights, decay, scale, acc0, acc1, table0, table1,
    F: tl.constexpr, STEP, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rescale both accumulators and add the weighted values of one step, of which :func:`load_values` has loaded parts.

    ``scale`` keeps weights in the range of the product's type where norms may leave it: the accumulators hold the
    result divided by the largest norm so far.
    """
    G0: tl.constexpr = F.first
    G1: tl.constexpr = F.second
    inverse = 1.0
    if F.wide_norms:
        higher = tl.maximum(scale, _highest_norm(loaded0, loaded1, F))
        decay *= scale / higher
        scale = higher
        inverse = 1.0 / higher
    acc0 *= decay[None, :]
    if F.kind == "exact":
        acc0 = _add_exact_values(part_ptr, weights, acc0, F, STEP, TOKENS, DTYPE, PRECISION)
    elif F.kind == "group":
        acc0 = _add_range_values(part_ptr, weights, acc0, F, G0, STEP, TOKENS, DTYPE, PRECISION)
    else:
        if F.centered:
            totals = tl.sum(weights, 0) * inverse
            acc0 = _add_mean(part_ptr, totals, acc0, F, G0)
        acc0 = _add_group_values(
            part_ptr, loaded0, weights, acc0, table0, inverse, F, G0, STEP, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION
        )
        if F.num_groups == 2:
            acc1 *= decay[None, :]
            if F.centered:
                acc1 = _add_mean(part_ptr, totals, acc1, F, G1)
            acc1 = _add_group_values(
                part_ptr, loaded1, weights, acc1, table1, inverse, F, G1, STEP, TOKENS, ROWS, DTYPE, PERMUTE, PRECISION
            )
    return scale, acc0, acc1


# exact tokens


@triton.jit
def attend_exact_tile(
    keys_ptr, values_ptr, key_stride_token, value_stride_token, slots, columns, kept, query, qk_scale,
    peak, total, acc, positions, mask_ptrs, mask_stride_key, window, softcap,
    K: tl.constexpr, V: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Fold a tile of dense keys and values into the running softmax."""
    key_channels = tl.arange(0, K.head_dim_pad)
    offsets = slots.to(tl.int64)[:, None] * key_stride_token + key_channels[None, :]
    mask = kept[:, None] & (key_channels < K.head_dim)[None, :]
    keys = tl.load(keys_ptr + offsets, mask=mask, other=0.0).to(DTYPE)
    scores = tl.dot(keys, query, input_precision=PRECISION) * qk_scale
    scores = mask_scores(
        scores, columns, kept, positions, mask_ptrs, mask_stride_key, window, softcap,
        MASK, CAUSAL, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    weights, peak, total, decay = update_softmax(scores, peak, total)
    value_channels = tl.arange(0, V.head_dim_pad)
    offsets = slots.to(tl.int64)[None, :] * value_stride_token + value_channels[:, None]
    mask = (value_channels < V.head_dim)[:, None] & kept[None, :]
    values = tl.load(values_ptr + offsets, mask=mask, other=0.0).to(DTYPE)
    acc = add_product(acc * decay[None, :], values, weights.to(DTYPE), PRECISION)
    return peak, total, acc
