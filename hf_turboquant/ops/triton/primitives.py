"""What several kernels do, named once. Every primitive runs under the interpreter too.

bfloat16 is a storage type: it is read and written as 16-bit words and rounded here, so that all machines round alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.permute import lookup_by_permutation, shift_bytes

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST_BIAS = tl.constexpr(-3.0e38)


# storage types


@triton.jit
def load_as_float(ptr, offsets, mask, DTYPE: tl.constexpr):
    """Load ``fp16``, ``bf16`` or ``fp32`` elements behind a byte pointer as float32; 0 where masked."""
    if DTYPE == "fp32":
        values = tl.load(ptr.to(tl.pointer_type(tl.float32), bitcast=True) + offsets, mask=mask, other=0.0)
    elif DTYPE == "fp16":
        half = tl.load(ptr.to(tl.pointer_type(tl.float16), bitcast=True) + offsets, mask=mask, other=0.0)
        values = half.to(tl.float32)
    else:
        word = tl.load(ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + offsets, mask=mask, other=0)
        values = (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values


@triton.jit
def store_rounded(ptr, offsets, values, mask, DTYPE: tl.constexpr):
    """Store float32 values that :func:`round_to` has rounded, behind a byte pointer."""
    if DTYPE == "fp32":
        tl.store(ptr.to(tl.pointer_type(tl.float32), bitcast=True) + offsets, values, mask=mask)
    elif DTYPE == "fp16":
        tl.store(ptr.to(tl.pointer_type(tl.float16), bitcast=True) + offsets, values.to(tl.float16), mask=mask)
    else:
        word = (values.to(tl.int32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + offsets, word, mask=mask)


@triton.jit
def round_to(values, DTYPE: tl.constexpr):
    """Round float32 values to nearest even in a storage type; the result is float32."""
    if DTYPE == "fp16":
        rounded = values.to(tl.float16).to(tl.float32)
    elif DTYPE == "bf16":
        word = values.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
        rounded = word.to(tl.float32, bitcast=True)
    else:
        rounded = values
    return rounded


# codes


@triton.jit
def load_table(centroids_ptr, BITS: tl.constexpr, PERMUTE: tl.constexpr):
    """Load what :func:`lookup` needs of a symmetric codebook: its positive half, or 128 steps of a uniform one."""
    table = ()
    if BITS == 8:
        # uniform, and the last of 256 levels is 127.5 steps
        table = table + (tl.load(centroids_ptr + 255) * (128 / 127.5),)
    else:
        for index in tl.static_range(1 << (BITS - 1)):
            table = table + (tl.load(centroids_ptr + (1 << (BITS - 1)) + index),)
        table = prepare_table(table, BITS, PERMUTE)
    return table


@triton.jit
def prepare_table(magnitudes, BITS: tl.constexpr, PERMUTE: tl.constexpr):
    """Bring the positive centroids, ascending, to the form :func:`lookup` reads.

    For ``PERMUTE`` that is the high and the low bytes of float16 values, four to a word, in the order of the folded
    codes; of 3 and 4 bits only the negative half, whose sign a positive code flips.
    """
    if not PERMUTE:
        table = magnitudes
    elif BITS == 1:
        word = _half_word(magnitudes[0])
        table = (_pack_bytes(word ^ 0x8000, word, 0, 0, 8), _pack_bytes(word ^ 0x8000, word, 0, 0, 0))
    elif BITS == 2:
        low = _half_word(magnitudes[0])
        high = _half_word(magnitudes[1])
        table = (
            _pack_bytes(low ^ 0x8000, high ^ 0x8000, low, high, 8),
            _pack_bytes(low ^ 0x8000, high ^ 0x8000, low, high, 0),
        )
    else:
        words = ()
        for index in tl.static_range(1 << (BITS - 1)):
            words = words + (_half_word(magnitudes[index]) ^ 0x8000,)
        table = (
            _pack_bytes(words[0], words[1], words[2], words[3], 8),
            _pack_bytes(words[0], words[1], words[2], words[3], 0),
        )
        if BITS == 4:
            table = table + (
                _pack_bytes(words[4], words[5], words[6], words[7], 8),
                _pack_bytes(words[4], words[5], words[6], words[7], 0),
            )
    return table


@triton.jit
def _half_word(value):
    """Return the bits of a value as float16, in an int32."""
    return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _pack_bytes(first, second, third, fourth, SHIFT: tl.constexpr):
    """Return the bytes at ``SHIFT`` of four words as one word."""
    low = ((first >> SHIFT) & 255) | (((second >> SHIFT) & 255) << 8)
    return low | (((third >> SHIFT) & 255) << 16) | (((fourth >> SHIFT) & 255) << 24)


@triton.jit
def lookup(
    packed, signs, table,
    BITS: tl.constexpr, SHIFT: tl.constexpr, SIGN_SHIFT: tl.constexpr, DTYPE: tl.constexpr, PERMUTE: tl.constexpr,
):  # fmt: skip
    """Turn the codes at bit ``SHIFT`` of packed bytes into centroids.

    Args:
        packed: Bytes of the first plane, any shape.
        signs: Bytes of the plane of high bits, the same shape (3-bit codes); the code's bit is ``SIGN_SHIFT``.
        table: From :func:`load_table`.
        BITS: Bits per code.
        SHIFT: Position of the code in its byte.
        SIGN_SHIFT: Position of the high bit in its byte.
        DTYPE: Type of the result.
        PERMUTE: Look up by byte permutation (NVIDIA, float16); else by selection, which runs anywhere.

    Returns:
        Centroids in ``DTYPE``; for 8 bits divided by ``table[0]``, 128 steps, so that they are exact.
    """
    if PERMUTE:
        levels = lookup_by_permutation(packed, signs, table, BITS, SHIFT, SIGN_SHIFT)
    elif BITS == 8:
        levels = ((packed.to(tl.float32) - 127.5) * 0.0078125).to(DTYPE)
    else:
        word = packed.to(tl.int32)
        if BITS == 3:
            negative = (signs.to(tl.int32) & (1 << SIGN_SHIFT)) == 0
        else:
            negative = (word & (1 << (SHIFT + BITS - 1))) == 0
        magnitude = table[0].to(DTYPE)
        if BITS == 2:
            magnitude = tl.where((word & (1 << SHIFT)) != 0, table[1].to(DTYPE), magnitude)
        elif BITS > 2:
            low = (word & (1 << SHIFT)) != 0
            middle = (word & (2 << SHIFT)) != 0
            magnitude = tl.where(low, table[1].to(DTYPE), magnitude)
            magnitude = tl.where(middle, tl.where(low, table[3].to(DTYPE), table[2].to(DTYPE)), magnitude)
            if BITS == 4:
                upper = tl.where(low, table[5].to(DTYPE), table[4].to(DTYPE))
                upper = tl.where(middle, tl.where(low, table[7].to(DTYPE), table[6].to(DTYPE)), upper)
                magnitude = tl.where((word & (4 << SHIFT)) != 0, upper, magnitude)
        levels = tl.where(negative, -magnitude, magnitude)
    return levels


@triton.jit
def align_signs(signs, halves, PERMUTE: tl.constexpr):
    """Shift bytes of the plane of high bits right where ``halves`` is 1: two bytes of low bits share each of them."""
    if PERMUTE:
        aligned = shift_bytes(signs, tl.broadcast_to(halves.to(tl.uint8), signs.shape))
    else:
        aligned = signs.to(tl.int32) >> halves
    return aligned


@triton.jit
def load_codes(part_ptr, rows, columns, mask, G: tl.constexpr):
    """Load ascending codes ``[rows, columns]`` of a code section by address.

    Args:
        part_ptr: First byte of the part of the record that holds the section.
        rows: Row indices, broadcastable against ``columns``.
        columns: Code indices in the row.
        mask: Which to load; 0 elsewhere.
        G: The section.

    Returns:
        int32 codes.
    """
    byte = rows * G.row_bytes + columns % G.row_bytes
    shift = columns // G.row_bytes * G.width
    word = tl.load(part_ptr + G.codes + byte, mask=mask, other=0).to(tl.int32)
    codes = (word >> shift) & ((1 << G.width) - 1)
    if G.bits == 3:
        byte = rows * G.sign_row_bytes + columns % G.sign_row_bytes
        word = tl.load(part_ptr + G.sign_codes + byte, mask=mask, other=0).to(tl.int32)
        codes |= ((word >> (columns // G.sign_row_bytes)) & 1) << 2
    return fold(codes, G.bits)


@triton.jit
def fold(codes, BITS: tl.constexpr):
    """Swap between ascending and sign-magnitude codes, int32; its own inverse."""
    if BITS == 1 or BITS == 8:
        folded = codes
    else:
        HALF: tl.constexpr = 1 << (BITS - 1)
        folded = tl.where(codes < HALF, codes ^ (HALF - 1), codes)
    return folded


@triton.jit
def add_product(acc, left, right, PRECISION: tl.constexpr):
    """Return ``acc + left @ right``; float32 operands are summed by themselves before they are added.

    A product that starts from ``acc`` is one chain of roundings over all that went into it, and the compiler makes one
    of every sum. Of a difference it does not.
    """
    if left.dtype == tl.float32:
        total = acc - tl.dot(-left, right, input_precision=PRECISION)
    else:
        total = tl.dot(left, right, acc, input_precision=PRECISION)
    return total


@triton.jit
def take_columns(tile, index, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return columns ``[index * WIDTH, (index + 1) * WIDTH)`` of a register tile ``[ROWS, COLUMNS]``."""
    parts = tl.reshape(tile, (ROWS, COLUMNS // WIDTH, WIDTH))
    chosen = tl.arange(0, COLUMNS // WIDTH)[None, :, None] == index
    return tl.sum(tl.where(chosen, parts, 0.0), axis=1)


# attention


@triton.jit
def tanh(x):
    """Hyperbolic tangent, float32, without a vendor library; within a few ulp."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.05396825 + square * 0.021869488))))
    wide = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, series, wide)


@triton.jit
def mask_scores(
    scores,
    columns,
    kept,
    positions,
    mask_ptrs,
    mask_stride_key,
    window,
    softcap,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Cap and mask a tile of scores; the result is in the domain of exp2.

    Args:
        scores: ``[keys, rows]``, times log2(e) already unless ``SOFTCAP``.
        columns: ``[keys]`` index of each key in the sequence.
        kept: ``[keys]`` whether the key exists; read when ``KEPT``.
        positions: ``[rows]`` index of each query in the sequence.
        mask_ptrs: ``[rows]`` pointers to the mask of each query.
        mask_stride_key: Elements between keys of the mask.
        window: Keys further back than this are hidden when ``WINDOW``.
        softcap: Cap of the scores when ``SOFTCAP``.
        MASK: ``none``, ``bool`` or ``float``.
        CAUSAL: Hide keys behind the query.
        WINDOW: Whether ``window`` counts.
        SOFTCAP: Whether ``softcap`` counts.
        KEPT: Whether ``kept`` counts.
    """
    if SOFTCAP:
        scores = tanh(scores / softcap) * (softcap * LOG2E)
    if MASK != "none":
        offsets = columns.to(tl.int64)[:, None] * mask_stride_key
        there = (columns >= 0)[:, None]
        if KEPT:
            there = kept[:, None]
        if MASK == "bool":
            seen = tl.load(mask_ptrs[None, :] + offsets, mask=there, other=0)
            scores = tl.where(seen != 0, scores, -float("inf"))
        else:
            bias = tl.load(mask_ptrs[None, :] + offsets, mask=there, other=0.0).to(tl.float32)
            # the lowest float times log2(e) would become -inf, which hides where the mask only discourages
            scores += tl.where(bias == -float("inf"), bias, tl.maximum(bias * LOG2E, LOWEST_BIAS))
    if CAUSAL:
        scores = tl.where(columns[:, None] <= positions[None, :], scores, -float("inf"))
    if WINDOW:
        scores = tl.where(columns[:, None] > positions[None, :] - window, scores, -float("inf"))
    if KEPT:
        scores = tl.where(kept[:, None], scores, -float("inf"))
    return scores


@triton.jit
def update_softmax(scores, peak, total):
    """Fold a tile ``[keys, rows]`` of exp2-domain scores into a running softmax.

    Returns:
        Weights ``[keys, rows]`` against the new peak, the peak, the total, and the factor of what was before.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 0))
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    decay = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[None, :])
    return weights, new_peak, total * decay + tl.sum(weights, 0), decay
