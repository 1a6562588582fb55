"""What the fast attend kernel does with one packed block: scores, weights, weighted values. All in registers.

Queries are 16-bit integers in two bytes, which are two columns of the right operand; keys and values are the left
operand as level registers. Softmax weights are 16-bit integers too, scaled anew for each block, so that sums inside a
block are exact and sums over blocks are float32.

Lane ``4 j + t`` holds the scores of query row ``t`` with 16 tokens of a block, and the sums of query row ``t`` in
channels ``j`` modulo 8. Which tokens is dictated by the bytes of the value codes, so that weights need one
transposition of 8 x 8 and no more: the *near* token and the *far* one, 64 behind it, of each of eight *row tiles*.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_turboquant.ops.triton.fast_primitives import (
    fuse,
    join_columns,
    load_words,
    max_over_tokens,
    multiply,
    multiply_bf16,
    pick_halves,
    power_of_2,
    reciprocal,
    transpose_weights,
    unpack,
)

LOWEST = gl.constexpr(-1.0e6)
"""Score, in the domain of exp2, of a token that is not there, and peak before the first.

Finite, so that differences stay numbers, and small enough that rounding leaves ``exp2(score * scale - peak * scale)``
close to 1 where both are this.
"""


@gluon.constexpr_function
def _word_of_tile(tile, width):
    """Return which word of the norms of a lane holds the two tokens of a row tile."""
    return tile if width == 4 else tile % 2 * 4 + tile // 2


@gluon.constexpr_function
def _tile_offset(tile, width):
    """Return by how many tokens a row tile is ahead of the first."""
    return 2 * tile if width == 4 else 2 * (tile // 2) + 32 * (tile % 2)


@gluon.jit
def zeros(L: gl.constexpr, W: gl.constexpr):
    """Return int32 zeros, one for each thread."""
    return gl.full([W, 32], 0, gl.int32, layout=L)


# keys


@gluon.jit
def _load_norms(part, lane_offset, OFFSET: gl.constexpr, V: gl.constexpr):
    """Load the float16 norms a lane needs, each with its neighbour: 8 words of the first 64 tokens, 8 of the others."""
    address = part + lane_offset
    if V.groups[0].width == 4:
        words = load_words(address + OFFSET, 8) + load_words(address + (OFFSET + 128), 8)
    else:
        words = load_words(address + OFFSET, 4) + load_words(address + (OFFSET + 64), 4)
        words = words + load_words(address + (OFFSET + 128), 4) + load_words(address + (OFFSET + 192), 4)
    return words


@gluon.jit
def _load_row(address, high_address, ROW: gl.constexpr, G: gl.constexpr):
    """Load the words of this lane of a row of codes, first plane then high bits."""
    WORDS: gl.constexpr = G.lane_words
    words = ()
    if G.bits > 1:
        words = load_words(address + (G.codes + ROW * G.row_bytes), WORDS)
    if G.bits % 2 == 1:
        words = words + load_words(high_address + (G.sign_codes + ROW * G.sign_row_bytes), WORDS)
    return words


@gluon.jit
def lane_offsets_of(row, t, G: gl.constexpr):
    """Return where this lane reads in the first plane and in the plane of high bits, bytes behind row ``row``."""
    if G.lane_bytes == 2:
        return row * G.row_bytes + t // 2 * 4, row * G.sign_row_bytes
    return row * G.row_bytes + t * G.lane_bytes, row * G.sign_row_bytes + t % 2 * G.lane_bytes


@gluon.jit
def _load_keys(part, offsets, G: gl.constexpr, V: gl.constexpr):
    """Load the codes of the 16 tokens of this lane: near and far token of each row tile."""
    WIDTH: gl.constexpr = V.groups[0].width
    address = part + offsets[0]
    high_address = part + offsets[1]
    rows = ()
    for tile in gl.static_range(8):
        rows = rows + (
            _load_row(address, high_address, _tile_offset(tile, WIDTH), G),
            _load_row(address, high_address, _tile_offset(tile, WIDTH) + 64, G),
        )
    return rows


@gluon.jit
def _unpack_row(words, shifts, low_table, high_table, G: gl.constexpr):
    """Turn the words of a row into level registers, 4 codes each."""
    WORDS: gl.constexpr = G.lane_words
    HALF: gl.constexpr = G.lane_bytes == 2
    registers = ()
    for index in gl.static_range(WORDS):
        word = words[index]
        high = word
        if G.bits == 3:
            high = words[WORDS + index]
        # of high bits a lane takes every other one, of codes of one bit every other pair
        shift = shifts[0] * 2 if G.bits == 1 else shifts[0]
        if HALF:
            word = word >> shifts[1]
            high = high >> (shift + shifts[1])
        elif G.bits % 2 == 1:
            high = high >> shift
        registers = registers + unpack(word, high, low_table, high_table, G.bits, HALF)
    return registers


@gluon.jit
def _group_products(
    near_words, far_words, shifts, query, half, low_table, high_table,
    G: gl.constexpr, TILES: gl.constexpr, START: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Return for each query tile the products of a near and a far token with the query row of this lane."""
    COUNT: gl.constexpr = G.size // 16
    near = _unpack_row(near_words, shifts, low_table, high_table, G)
    far = _unpack_row(far_words, shifts, low_table, high_table, G)
    products = ()
    for tile in gl.static_range(TILES):
        c0 = half[tile] * 0
        c1 = c0
        if G.bits == 4:
            c1 = half[tile]
        c2 = c0
        c3 = c1
        for step in gl.static_range(COUNT // 2):
            c0, c1, c2, c3 = multiply(
                near[2 * step], far[2 * step], near[2 * step + 1], far[2 * step + 1],
                query[tile * REGISTERS + START + 2 * step], query[tile * REGISTERS + START + 2 * step + 1],
                c0, c1, c2, c3, "s8.s8",
            )  # fmt: skip
        products = products + (join_columns(c0, c1), join_columns(c2, c3))
    return products


@gluon.jit
def load_key_block(part, lane_offsets, K: gl.constexpr, V: gl.constexpr):
    """Load all of a block's keys that this lane reads: codes and norms of one or two groups."""
    # an element of a tuple is a constant only by a name of its own
    FIRST: gl.constexpr = K.operand_groups[0]
    FIRST_NORMS: gl.constexpr = K.operand_norms[0]
    words = (_load_keys(part, lane_offsets[0], FIRST, V), _load_norms(part, lane_offsets[2], FIRST_NORMS, V))
    if K.num_operand_groups == 2:
        SECOND: gl.constexpr = K.operand_groups[1]
        SECOND_NORMS: gl.constexpr = K.operand_norms[1]
        others = (_load_keys(part, lane_offsets[1], SECOND, V), _load_norms(part, lane_offsets[2], SECOND_NORMS, V))
        words = words + others
    return words


@gluon.jit
def block_scores(
    words, shifts, parity, query, half, bias, tables,
    K: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Return the scores of the 16 tokens of this lane, per row tile: near token, far token, for each query tile.

    They are in units of the query scale: to be multiplied with it once, in the exponent.
    """
    WIDTH: gl.constexpr = V.groups[0].width
    FIRST: gl.constexpr = K.operand_groups[0]
    SECOND: gl.constexpr = K.operand_groups[K.num_operand_groups - 1]
    scores = ()
    for tile in gl.static_range(8):
        near, far = pick_halves(words[1][_word_of_tile(tile, WIDTH)], words[1][8 + _word_of_tile(tile, WIDTH)], parity)
        products = _group_products(
            words[0][2 * tile], words[0][2 * tile + 1], shifts, query, half[0], tables[0], tables[1],
            FIRST, TILES, 0, REGISTERS,
        )  # fmt: skip
        if K.num_operand_groups == 2:
            other_near, other_far = pick_halves(
                words[3][_word_of_tile(tile, WIDTH)], words[3][8 + _word_of_tile(tile, WIDTH)], parity
            )
            other = _group_products(
                words[2][2 * tile], words[2][2 * tile + 1], shifts, query, half[1], tables[2], tables[3],
                SECOND, TILES, FIRST.size // 16, REGISTERS,
            )  # fmt: skip
        for index in gl.static_range(TILES):
            near_score = fuse(products[2 * index], near, bias[index])
            far_score = fuse(products[2 * index + 1], far, bias[index])
            if K.num_operand_groups == 2:
                near_score = fuse(other[2 * index], other_near, near_score)
                far_score = fuse(other[2 * index + 1], other_far, far_score)
            scores = scores + (near_score, far_score)
    return scores


@gluon.jit
def hide_missing(scores, first_token, count, lowest, V: gl.constexpr, TILES: gl.constexpr):
    """Lower the scores of tokens that were cropped from the end of their block."""
    kept = ()
    for tile in gl.static_range(8):
        token = first_token + _tile_offset(tile, V.groups[0].width)
        for index in gl.static_range(TILES):
            kept = kept + (
                gl.where(token < count, scores[2 * (tile * TILES + index)], lowest[index]),
                gl.where(token + 64 < count, scores[2 * (tile * TILES + index) + 1], lowest[index]),
            )
    return kept


@gluon.jit
def mean_scores(near, far, query_address, zero, K: gl.constexpr, TILES: gl.constexpr):
    """Return per query tile the products of query row ``t`` with the means of blocks ``j`` and ``j + 8``."""
    scores = ()
    for tile in gl.static_range(TILES):
        query = load_words(query_address + tile * (16 * K.head_dim), K.head_dim // 8, False)
        c0 = zero
        c1 = zero
        c2 = zero
        c3 = zero
        for step in gl.static_range(K.head_dim // 16):
            c0, c1, c2, c3 = multiply_bf16(
                near[2 * step], far[2 * step], near[2 * step + 1], far[2 * step + 1],
                query[2 * step], query[2 * step + 1], c0, c1, c2, c3,
            )  # fmt: skip
        scores = scores + (c0 + c1, c2 + c3)
    return scores


# weights


@gluon.jit
def weigh(scores, norms, parity, peak, total, scale, TILE: gl.constexpr, TILES: gl.constexpr, V: gl.constexpr):
    """Fold the scores of a block into the running softmax of a query tile.

    Returns:
        The weights times value norms as eight right operands; what one unit of them is worth; new peak and total; and
        the factor of what was before. The peak is in units of ``1 / scale``.
    """
    highest = scores[2 * TILE]
    for index in gl.static_range(1, 16):
        highest = gl.maximum(highest, scores[index // 2 * (2 * TILES) + 2 * TILE + index % 2])
    new_peak = gl.maximum(peak, max_over_tokens(highest))
    decay = power_of_2((peak - new_peak) * scale)
    shift = -new_peak * scale
    total = total * decay
    WIDTH: gl.constexpr = V.groups[0].width
    weights = ()
    largest = total * 0.0
    for tile in gl.static_range(8):
        near, far = pick_halves(norms[_word_of_tile(tile, WIDTH)], norms[8 + _word_of_tile(tile, WIDTH)], parity)
        near_weight = power_of_2(fuse(scores[2 * (tile * TILES + TILE)], scale, shift))
        far_weight = power_of_2(fuse(scores[2 * (tile * TILES + TILE) + 1], scale, shift))
        total += near_weight
        total += far_weight
        near_weight = near_weight * near
        far_weight = far_weight * far
        largest = gl.maximum(gl.maximum(largest, near_weight), far_weight)
        weights = weights + (near_weight, far_weight)
    largest = gl.maximum(max_over_tokens(largest), 1.0e-30)
    factor = reciprocal(largest) * 65535.0
    unit = largest * (1.0 / 65535.0)
    magic = factor * 0.0 + 8388608.0
    operands = ()
    for tile in gl.static_range(8):
        operands = operands + (
            transpose_weights(fuse(weights[2 * tile], factor, magic), fuse(weights[2 * tile + 1], factor, magic)),
        )
    return operands, unit, new_peak, total, decay


# values


@gluon.jit
def half_totals(
    operands, FIRST: gl.constexpr, STEPS: gl.constexpr, TYPES: gl.constexpr, L: gl.constexpr, W: gl.constexpr
):
    """Return half the sum of the integers of query row ``t``, queries or weights: what levels of 4 bits lack."""
    ones = gl.full([W, 32], 0x01010101, gl.int32, layout=L)
    c0 = zeros(L, W)
    c1 = c0
    c2 = c0
    c3 = c0
    for step in gl.static_range(STEPS):
        c0, c1, c2, c3 = multiply(
            ones, ones, ones, ones, operands[FIRST + 2 * step], operands[FIRST + 2 * step + 1], c0, c1, c2, c3, TYPES
        )
    return (c0 * 256 + c1) >> 1


@gluon.jit
def load_value_block(part, lane_offsets, V: gl.constexpr):
    """Load all of a block's values that this lane reads: rows ``j`` and ``j + 8`` of each row tile, and norms."""
    G: gl.constexpr = V.groups[0]
    address = part + lane_offsets[3][0]
    high_address = part + lane_offsets[3][1]
    rows = ()
    for index in gl.static_range(V.head_dim // 8):
        rows = rows + (_load_row(address, high_address, 8 * index, G),)
    return rows, _load_norms(part, lane_offsets[2], V.norms, V)


@gluon.jit
def add_values(
    rows, shifts, weights, units, decays, sums, tables,
    V: gl.constexpr, TILES: gl.constexpr, L: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Rescale the sums and add the weighted values of a block; two channels per row tile and query tile."""
    G: gl.constexpr = V.groups[0]
    zero = zeros(L, W)
    starts = ()
    for tile in gl.static_range(TILES):
        start = zero
        if G.bits == 4:
            start = half_totals(weights[tile], 0, 4, "s8.u8", L, W)
        starts = starts + (start,)
    out = ()
    for block in gl.static_range(G.size // 16):
        near = _unpack_row(rows[2 * block], shifts, tables[0], tables[1], G)
        far = _unpack_row(rows[2 * block + 1], shifts, tables[0], tables[1], G)
        for tile in gl.static_range(TILES):
            c0 = zero
            c1 = starts[tile]
            c2 = zero
            c3 = starts[tile]
            for step in gl.static_range(4):
                c0, c1, c2, c3 = multiply(
                    near[2 * step], far[2 * step], near[2 * step + 1], far[2 * step + 1],
                    weights[tile][2 * step], weights[tile][2 * step + 1], c0, c1, c2, c3, "s8.u8",
                )  # fmt: skip
            out = out + (
                fuse(join_columns(c0, c1), units[tile], sums[2 * (block * TILES + tile)] * decays[tile]),
                fuse(join_columns(c2, c3), units[tile], sums[2 * (block * TILES + tile) + 1] * decays[tile]),
            )
    return out
