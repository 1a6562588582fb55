"""Tiles of codes that go from memory to the matrix products without a change of registers.

A lane loads words, and looks four codes up in each. The index that a product sums over has an order in which those
codes are where the lane wants them, so that nothing passes through shared memory: four lanes share a row, each with
``LANE_WORDS`` words beside each other, and 16 positions of the index are the codes of one word of each lane. Which
channel or token a position means is free as long as both operands agree. Where the compiler lays registers out in
another way, or there are several warps, results are the same and only the time differs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.permute import lookup_words_by_permutation
from hf_turboquant.ops.triton.primitives import add_product, load_as_float, lookup

EARLY = tl.constexpr(triton.__version__.startswith("3.6."))
"""How the compiler lays registers out.

Triton 3.6 gives neighbouring lanes the first of axes that look alike, and a lane four positions beside each other of
an operand that was joined; Triton 3.9 gives them the last, and a lane two.
"""


@triton.jit
def byte_of_position(position, LANE_WORDS: tl.constexpr):
    """Return which byte of ``16 * LANE_WORDS`` is at a position of the index that a product sums over."""
    if EARLY:
        lane, byte = position // 4 % 4, position % 4
    else:
        lane, byte = position // 2 % 4, position // 8 % 2 * 2 + position % 2
    return (lane * LANE_WORDS + position // 16) * 4 + byte


@triton.jit
def _rows_and_lanes(rows, LANES: tl.constexpr):
    """Return ``rows`` and the numbers of lanes along two axes of three, in the order that the compiler is to keep."""
    lanes = tl.multiple_of(tl.arange(0, LANES), 1)
    if EARLY:
        rows, lanes = rows[None, :, None], lanes[:, None, None]
    else:
        rows, lanes = rows[:, None, None], lanes[None, :, None]
    return rows, lanes


@triton.jit
def _lookup_words(words, signs, table, BITS: tl.constexpr, SHIFT: tl.constexpr, DTYPE: tl.constexpr, PERMUTE):
    """Return the centroids of the codes at bit ``SHIFT`` of the four bytes of each word, as four tiles."""
    if PERMUTE:
        levels = lookup_words_by_permutation(words, signs, table, BITS, SHIFT)
    else:
        levels = ()
        for byte in tl.static_range(4):
            low = (words >> (8 * byte)) & 255
            high = (signs >> (8 * byte)) & 255
            levels = levels + (lookup(low, high, table, BITS, SHIFT, SHIFT, DTYPE, False),)
    return levels


@triton.jit
def _operand(
    words, signs, table, BITS: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, LANE_WORDS: tl.constexpr, DTYPE: tl.constexpr, PERMUTE: tl.constexpr,
):  # fmt: skip
    """Return the centroids of one code of each byte, ``[ROWS, 16 * LANE_WORDS]`` in the order of positions."""
    levels = _lookup_words(words, signs, table, BITS, SHIFT, DTYPE, PERMUTE)
    tile = tl.join(tl.join(levels[0], levels[1]), tl.join(levels[2], levels[3]))
    tile = tl.permute(tile, (1, 2, 0, 4, 3)) if EARLY else tl.permute(tile, (0, 2, 4, 1, 3))
    return tl.reshape(tile, (ROWS, 16 * LANE_WORDS))


@triton.jit
def _load_words(part_ptr, rows, first, G: tl.constexpr, LANE_WORDS: tl.constexpr):
    """Load words ``[first, first + 4 * LANE_WORDS)`` of rows of a code section, and of its plane of high bits.

    Of 1-bit codes there is the plane of high bits only; a word of it stands for two, with every other bit.

    Both are int32, with axes for rows and lanes and one of ``LANE_WORDS``.
    """
    rows, lanes = _rows_and_lanes(rows, 4)
    columns = lanes * LANE_WORDS + tl.arange(0, LANE_WORDS)[None, None, :] + first
    SIGN_WORDS: tl.constexpr = G.row_words // 2
    if G.bits == 3 or G.bits == 1:
        sign_ptr = (part_ptr + G.sign_codes).to(tl.pointer_type(tl.int32), bitcast=True)
        signs = tl.load(sign_ptr + rows * SIGN_WORDS + columns % SIGN_WORDS) >> (columns // SIGN_WORDS)
        words = signs
    if G.bits != 1:
        word_ptr = (part_ptr + G.codes).to(tl.pointer_type(tl.int32), bitcast=True)
        words = tl.load(word_ptr + rows * G.row_words + columns)
        if G.bits != 3:
            signs = words
    return words, signs


@triton.jit
def load_word_query(base_ptr, row_offsets, mask_rows, index, G: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Load the operand ``[positions, ROWS]`` of one code of each byte of a piece of a row; see ``part_channels``."""
    LANE_WORDS: tl.constexpr = G.row_words // (4 * G.word_pieces)
    first = G.start + index % G.word_parts * (4 * G.row_words) + index // G.word_parts * (16 * LANE_WORDS)
    words, lanes, codes = tl.arange(0, LANE_WORDS), tl.arange(0, 4), tl.arange(0, 4)[None, None, None, :]
    rows, mask = row_offsets[None, :, None, None], mask_rows[None, :, None, None]
    if EARLY:
        channels = (lanes[:, None, None, None] * LANE_WORDS + words[None, None, :, None]) * 4 + codes + first
        query = tl.load(base_ptr + rows + channels, mask=mask, other=0.0).to(DTYPE)
        query = tl.permute(query, (2, 0, 3, 1))
    else:
        channels = (lanes[None, None, :, None] * LANE_WORDS + words[:, None, None, None]) * 4 + codes + first
        query = tl.load(base_ptr + rows + channels, mask=mask, other=0.0).to(DTYPE)
        query = tl.permute(tl.reshape(query, (LANE_WORDS, ROWS, 4, 2, 2)), (0, 3, 2, 4, 1))
    return tl.reshape(query, (16 * LANE_WORDS, ROWS))


@triton.jit
def word_scores(
    part_ptr, tokens, parts, table,
    G: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of ``TOKENS`` keys of a block with the queries over group ``G``, without norms."""
    PIECES: tl.constexpr = G.word_pieces
    PARTS: tl.constexpr = G.word_parts
    LANE_WORDS: tl.constexpr = G.row_words // (4 * G.word_pieces)
    scores = tl.zeros([TOKENS, ROWS], tl.float32)
    for piece in tl.static_range(PIECES):
        words, signs = _load_words(part_ptr, tokens, piece * 4 * LANE_WORDS, G, LANE_WORDS)
        for part in tl.static_range(PARTS):
            levels = _operand(words, signs, table, G.bits, part * (8 // PARTS), TOKENS, LANE_WORDS, DTYPE, PERMUTE)
            scores = add_product(scores, levels, parts[piece * PARTS + part], PRECISION)
    return scores


@triton.jit
def load_value_words(part_ptr, step, G: tl.constexpr):
    """Load the words with the codes of a step: 16 bytes of each row."""
    # rows that pad the tile repeat the last one; nothing keeps their sums
    channels = tl.minimum(tl.arange(0, G.size_pad), G.size - 1)
    return _load_words(part_ptr, channels, step * 4, G, 1)


@triton.jit
def add_word_values(
    words, weights, acc, table,
    G: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr, PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``values . weights`` of a step to ``acc``; ``weights`` have norms, positions and the type of the product."""
    PARTS: tl.constexpr = G.word_parts
    levels = ()
    for part in tl.static_range(PARTS):
        levels = levels + (
            _operand(words[0], words[1], table, G.bits, part * (8 // PARTS), G.size_pad, 1, DTYPE, PERMUTE),
        )
    if PARTS == 1:
        operand = levels[0]
    elif PARTS == 2:
        operand = tl.permute(tl.join(levels[0], levels[1]), (0, 2, 1))
    else:
        operand = tl.join(tl.join(levels[0], levels[1]), tl.join(levels[2], levels[3]))
        operand = tl.permute(operand, (0, 3, 2, 1))
    return add_product(acc, tl.reshape(operand, (G.size_pad, TOKENS)), weights, PRECISION)


# tokens of a step
#
# Row ``8 * i + lane`` of a tile of scores is token ``lane * TOKENS / 8 + i`` of the step: so the scores that a lane
# holds belong to tokens beside each other, whose norms it loads at once.


@triton.jit
def step_tokens(step, V: tl.constexpr, TOKENS: tl.constexpr):
    """Return the tokens of a step, one for each row of scores.

    With word order they are those whose codes are in 16 bytes of the rows of the values, else they are consecutive.
    """
    rows = tl.arange(0, TOKENS)
    if V.has_word_order:
        RUN: tl.constexpr = 4 * V.first.row_words
        index = rows % 8 * (TOKENS // 8) + rows // 8
        tokens = index // 16 * RUN + step * 16 + index % 16
    else:
        tokens = step * TOKENS + rows
    return tokens


@triton.jit
def in_positions(weights, V: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Bring rows of weights to the order of positions."""
    if V.has_word_order:
        weights = tl.permute(tl.reshape(weights, (TOKENS // 8, 8, ROWS)), (1, 0, 2))
        if not EARLY:
            weights = tl.permute(tl.reshape(weights, (TOKENS // 16, 4, 2, 2, ROWS)), (0, 2, 1, 3, 4))
        weights = tl.reshape(weights, (TOKENS, ROWS))
    return weights


@triton.jit
def load_norms(norms_ptr, step, tokens, V: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Load one norm for each token of a step, float32, to multiply ``[TOKENS, ROWS]`` tiles with."""
    if V.has_word_order and ROWS <= 16:
        # every lane loads the norms of its rows of the product's result
        RUN: tl.constexpr = 4 * V.first.row_words
        LANE_TOKENS: tl.constexpr = TOKENS // 8
        lanes, others = _rows_and_lanes(tl.arange(0, 8), 4)
        first = lanes // (16 // LANE_TOKENS) * RUN + lanes % (16 // LANE_TOKENS) * LANE_TOKENS + step * 16
        offsets = first + others * 0 + tl.arange(0, LANE_TOKENS)[None, None, :]
        norms = load_as_float(norms_ptr, offsets, lanes >= 0, DTYPE)
        norms = norms if not EARLY else tl.permute(norms, (1, 0, 2))
        norms = tl.join(norms, norms)
        if ROWS == 8:
            norms = tl.permute(norms, (2, 0, 1, 3))
        else:
            norms = tl.permute(tl.join(norms, norms), (2, 0, 4, 1, 3))
        norms = tl.reshape(norms, (TOKENS, ROWS))
    else:
        norms = load_as_float(norms_ptr, tokens, tokens >= 0, DTYPE)[:, None]
    return norms
