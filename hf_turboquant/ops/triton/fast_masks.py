"""What the fast attend kernel does to scores before the softmax: softcap, masks, sliding windows.

A hidden token has the score -inf, so that it weighs nothing even where every token is hidden; peaks stay finite.

A boolean mask that all query rows of a KV head share is one bit for each token: the lanes of a warp load the bytes of a
block together, and vote. Other masks are loaded where the scores are: lane ``4 j + t`` holds those of query row ``t``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_turboquant.ops.triton.fast_blocks import _tile_offset, zeros
from hf_turboquant.ops.triton.fast_primitives import fuse, power_of_2, reciprocal, vote

LOG2E = gl.constexpr(1.4426950408889634)

LOWEST_BIAS = gl.constexpr(-3.0e38)
"""Bias of a float mask, in the domain of exp2, that only discourages: a row of nothing else weighs all tokens alike.

It swallows every score it is added to. The peak before the first token is not above it.
"""


@gluon.constexpr_function
def _bit_of(tile, side, width):
    """Return which bit of a word of :func:`_shared_bits` is the near or far token of a row tile."""
    return 16 * side + (2 * tile if width == 4 else 2 * (tile // 2) + tile % 2)


@gluon.constexpr_function
def _offset_of(tile, side, width):
    """Return by how many tokens the near or far token of a row tile is ahead of the first."""
    return _tile_offset(tile, width) + 64 * side


@gluon.constexpr_function
def _place_of(tile, index, side, tiles, by_row):
    """Return where among the values of :func:`load_shown` that of a token and a query tile is."""
    return 2 * (tile * tiles + index) + side if by_row else 2 * tile + side


@gluon.jit
def _exponent_of(bias):
    """Return a bias in the domain of exp2. The lowest float times log2(e) would be -inf, which hides."""
    return gl.where(bias == -float("inf"), bias, gl.maximum(bias * LOG2E, LOWEST_BIAS))


# packed blocks


@gluon.jit
def block_bounds(
    masking, lane, t, first_token, first_row, num_rows,
    H: gl.constexpr, TILES: gl.constexpr, L: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Return for each query tile, or for all, what :func:`load_shown` needs of a mask or a window.

    Args:
        masking: Mask of the first query head of this KV head; its strides between heads, queries and keys; queries;
            column of the first packed token; column of the first token that the first query sees; softcap.
        lane: ``[warps, 32]``, and so ``t`` and ``first_token``, as of the kernel.
        t: Query row of this lane in a tile.
        first_token: First token of this lane in a block.
        first_row: First query row of the program.
        num_rows: Query rows of the KV head.
        H: The :class:`MaskTraits`.
        TILES: Query tiles.
        L: Layout.
        W: Warps.

    Returns:
        Of a mask, pointers to the first packed token that this lane reads; of a window, the first token that is seen,
        counted from ``first_token``.
    """
    bounds = ()
    for tile in gl.static_range(TILES if H.by_row else 1):
        row = gl.minimum(first_row + 4 * tile + t, num_rows - 1)
        if H.kind == "none":
            bound = masking[6] - masking[5] - first_token
            if H.by_row:
                bound += row % masking[4]
            bounds = bounds + (bound,)
        else:
            token = first_token
            if H.kind == "bool" and not H.by_row:
                token = lane
            offset = (masking[5] + token).to(gl.int64) * masking[3]
            if H.by_row:
                offset += (row // masking[4]).to(gl.int64) * masking[1] + (row % masking[4]).to(gl.int64) * masking[2]
            bounds = bounds + (masking[0] + offset,)
    return bounds


@gluon.jit
def _shared_bits(
    pointers, lane, j, first_token, count, stride_key,
    V: gl.constexpr, TABLE: gl.constexpr, L: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Return a word that says of each of the 16 tokens of this lane whether it is seen; see :func:`_bit_of`."""
    WIDTH: gl.constexpr = V.groups[0].width
    words = ()
    for part in gl.static_range(4):
        places = pointers + (zeros(L, W).to(gl.int64) + 32 * part) * stride_key
        if TABLE:
            seen = gl.load(places, mask=lane + 32 * part < count, other=0)
        else:
            seen = gl.load(places)
        words = words + (vote(seen.to(gl.int32)),)
    if WIDTH == 4:
        near = gl.where(j < 4, words[0], words[1]) >> (first_token % 32)
        far = gl.where(j < 4, words[2], words[3]) >> (first_token % 32)
    else:
        near = ((words[0] >> first_token) & 0x55) | (((words[1] >> first_token) & 0x55) << 1)
        far = ((words[2] >> first_token) & 0x55) | (((words[3] >> first_token) & 0x55) << 1)
    return (near & 0xFFFF) | (far << 16)


@gluon.jit
def load_shown(
    bounds, stride_key, start, count, lane, j, first_token,
    H: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, TABLE: gl.constexpr, L: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Load what :func:`shape_scores` needs of a mask or a window for one block.

    Args:
        bounds: As :func:`block_bounds` returns them.
        stride_key: Elements between keys of the mask.
        start: ``[warps, 32]``, packed tokens before the block.
        count: ``[warps, 32]``, tokens of the block; read if ``TABLE``.
        lane: As for :func:`block_bounds`, and so ``first_token`` and the constants.
        j: Lane group.
        first_token: First token of this lane.
        H: The :class:`MaskTraits`.
        V: Traits of the values.
        TILES: Query tiles.
        TABLE: Whether blocks may be cropped.
        L: Layout.
        W: Warps.
    """
    WIDTH: gl.constexpr = V.groups[0].width
    ROWS: gl.constexpr = TILES if H.by_row else 1
    shown = ()
    if H.kind == "none":
        for index in gl.static_range(ROWS):
            shown = shown + (bounds[index] - start,)
    elif H.kind == "bool" and not H.by_row:
        pointers = bounds[0] + start.to(gl.int64) * stride_key
        shown = (_shared_bits(pointers, lane, j, first_token, count, stride_key, V, TABLE, L, W),)
    else:
        for tile in gl.static_range(8):
            for index in gl.static_range(ROWS):
                for side in gl.static_range(2):
                    places = bounds[index] + start.to(gl.int64) * stride_key
                    places = places + (zeros(L, W).to(gl.int64) + _offset_of(tile, side, WIDTH)) * stride_key
                    kept = first_token + _offset_of(tile, side, WIDTH) < count
                    if TABLE and H.kind == "bool":
                        value = gl.load(places, mask=kept, other=0)
                    elif TABLE:
                        value = gl.load(places, mask=kept, other=-float("inf"))
                    else:
                        value = gl.load(places)
                    if H.kind == "float":
                        value = _exponent_of(value.to(gl.float32))
                    shown = shown + (value,)
    return shown


@gluon.jit
def shape_scores(scores, shown, scales, softcap, there, hidden, H: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr):
    """Cap and hide the scores of a block.

    Args:
        scores: As ``block_scores`` returns them; of tokens that are not ``there`` -inf.
        shown: As :func:`load_shown` returns it.
        scales: Scale of each query tile.
        softcap: Cap of the scores; read if ``H.softcap``.
        there: ``[warps, 32]``, whether the block is one.
        hidden: ``[warps, 32]`` of -inf.
        H: The :class:`MaskTraits`.
        V: Traits of the values.
        TILES: Query tiles.

    Returns:
        Scores; times their scale if ``H.scaled``.
    """
    WIDTH: gl.constexpr = V.groups[0].width
    kept = ()
    if H.softcap:
        # cap * tanh(x / cap) = cap - 2 cap / (exp(2 x / cap) + 1), where cap is also that of a token that is not there
        cap = softcap * LOG2E
        slope = scales[0] * 0.0 - 2.0 * cap
        top = gl.where(there, cap + scales[0] * 0.0, hidden)
    for tile in gl.static_range(8):
        for index in gl.static_range(TILES):
            for side in gl.static_range(2):
                score = scores[2 * (tile * TILES + index) + side]
                if H.softcap:
                    score = power_of_2(score * (scales[index] * (2.0 / softcap)))
                    score = fuse(reciprocal(score + 1.0), slope, top)
                if H.window:
                    bound = shown[_place_of(0, index, 0, TILES, H.by_row) // 2]
                    score = gl.where(bound <= _offset_of(tile, side, WIDTH), score, hidden)
                elif H.kind == "bool" and not H.by_row:
                    score = gl.where((shown[0] & (1 << _bit_of(tile, side, WIDTH))) != 0, score, hidden)
                elif H.kind == "bool":
                    score = gl.where(shown[_place_of(tile, index, side, TILES, H.by_row)] != 0, score, hidden)
                elif H.kind == "float" and H.softcap:
                    score = score + shown[_place_of(tile, index, side, TILES, H.by_row)]
                elif H.kind == "float":
                    score = fuse(score, scales[index], shown[_place_of(tile, index, side, TILES, H.by_row)])
                kept = kept + (score,)
    return kept


# exact tokens


@gluon.jit
def shape_exact(scores, seen, columns, rows, masking, H: gl.constexpr):
    """Cap and hide the scores of a tile of exact tokens.

    Args:
        scores: ``[rows, tokens]``, in the domain of exp2.
        seen: The same, bool: tokens that are there.
        columns: ``[tokens]`` int32, place of each token in the sequence.
        rows: ``[rows]`` int32, query rows, all of which are there.
        masking: As for :func:`block_bounds`.
        H: The :class:`MaskTraits`.

    Returns:
        Scores, and which of them count.
    """
    if H.softcap:
        cap = masking[7] * LOG2E
        scores = cap - 2.0 * cap / (gl.exp2(scores * (2.0 / masking[7])) + 1.0)
    if H.window:
        bound = masking[6] + rows % masking[4]
        seen = seen & (columns[None, :] >= bound[:, None])
    if H.kind != "none":
        offsets = (rows // masking[4]).to(gl.int64) * masking[1] + (rows % masking[4]).to(gl.int64) * masking[2]
        places = masking[0] + (offsets[:, None] + columns.to(gl.int64)[None, :] * masking[3])
        value = gl.load(places, mask=seen, other=0)
        if H.kind == "bool":
            seen = seen & (value != 0)
        else:
            bias = _exponent_of(value.to(gl.float32))
            seen = seen & (bias > -float("inf"))
            scores = scores + bias
    return scores, seen
