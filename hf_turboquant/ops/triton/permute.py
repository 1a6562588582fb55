"""Centroid lookup with NVIDIA's byte permutation: the selector nibbles of ``prmt`` are the codes themselves.

A register holds four packed bytes, of which one code each becomes one float16: 1.5 operations per centroid for 1, 2 and
8 bits, 2.75 for 3 and 4 bits, against one comparison and one selection for every entry of the table. The interpreter
cannot run it; ``primitives.lookup`` has the portable form with the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

# In the assembly X and Y take two float16 each, W is four packed bytes and V what holds their high bits; T0 and T2 are
# high bytes of the table, T1 and T3 low bytes.


@triton.constexpr_function
def _assembly(bits: int, shift: int, sign_shift: int) -> str:
    if bits == 8:
        # 0x4800 + byte is 8 + byte / 128 in float16; adding -8 - 127/128 and -1/256 rounds nothing
        return """{ .reg .b32 a, b, c;
            prmt.b32 a, W, 0x48484848, 0x4140;  prmt.b32 b, W, 0x48484848, 0x4342;
            mov.b32 c, 0xC87FC87F;  add.rn.f16x2 a, a, c;  add.rn.f16x2 b, b, c;
            mov.b32 c, 0x9C009C00;  add.rn.f16x2 X, a, c;  add.rn.f16x2 Y, b, c; }"""
    take = f"shr.u32 s, W, {shift};  and.b32 s, s, {0x01010101 * ((1 << min(bits, 3) - (bits == 3)) - 1):#x};"
    if bits <= 2:
        # T0 high bytes, T1 low bytes of the table; a code selects one of each: nibbles code, 4 + code
        return f"""{{ .reg .b32 s, t;
            {take}  mad.lo.u32 s, s, 17, 0x04040404;  shr.u32 t, s, 16;
            prmt.b32 X, T0, T1, s;  prmt.b32 Y, T0, T1, t; }}"""
    # gather the four selectors into 16 bits, look up high and low bytes apart, flip signs, interleave
    gather = f"{take}  shr.u32 t, s, 4;  or.b32 s, s, t;  prmt.b32 s, s, 0, 0x4420;"
    if bits == 3:
        tables = f"prmt.b32 h, T0, 0, s;  prmt.b32 l, T1, 0, s;  shl.b32 t, V, {7 - sign_shift};"
    else:
        # T0 T2 high bytes, T1 T3 low bytes
        tables = f"prmt.b32 h, T0, T2, s;  prmt.b32 l, T1, T3, s;  shl.b32 t, W, {4 - shift};"
    return f"""{{ .reg .b32 s, t, h, l;
        {gather}  {tables}  and.b32 t, t, 0x80808080;  xor.b32 h, h, t;
        prmt.b32 X, l, h, 0x5140;  prmt.b32 Y, l, h, 0x7362; }}"""


@triton.constexpr_function
def _named(assembly: str, names: str) -> str:
    """Put the operands of one call in place of ``X Y W V T0 T1 T2 T3``."""
    for name, operand in zip(("X", "Y", "W", "V", "T0", "T1", "T2", "T3"), names.split(), strict=False):
        assembly = assembly.replace(name, operand)
    return assembly


@triton.constexpr_function
def _constraints(outputs: str, inputs: int) -> str:
    return ",".join([outputs, *["r"] * inputs])


# packed bytes, four elements to a call: every 32-bit operand takes four registers of the same content, of which the
# first is read


@triton.jit
def lookup_by_permutation(packed, signs, table, BITS: tl.constexpr, SHIFT: tl.constexpr, SIGN_SHIFT: tl.constexpr):
    """Turn the codes at bit ``SHIFT`` of packed bytes into float16 centroids; arguments as ``primitives.lookup``."""
    ASSEMBLY: tl.constexpr = _assembly(BITS, SHIFT, SIGN_SHIFT)
    if BITS == 8:
        levels = tl.inline_asm_elementwise(
            _named(ASSEMBLY, "$0 $1 $2"), _constraints("=r,=r", 1), [packed],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    elif BITS <= 2:
        levels = tl.inline_asm_elementwise(
            _named(ASSEMBLY, "$0 $1 $2 - $3 $7"), _constraints("=r,=r", 9), [packed, table[0], table[1]],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    elif BITS == 3:
        levels = tl.inline_asm_elementwise(
            _named(ASSEMBLY, "$0 $1 $2 $3 $4 $8"), _constraints("=r,=r", 10), [packed, signs, table[0], table[1]],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        levels = tl.inline_asm_elementwise(
            _named(ASSEMBLY, "$0 $1 $2 - $3 $7 $11 $15"), _constraints("=r,=r", 17),
            [packed, table[0], table[1], table[2], table[3]],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return levels


# words, one to a call, of which four results come


@triton.constexpr_function
def _word_assembly(bits: int, shift: int, inputs: str) -> str:
    assembly = _named(_assembly(bits, shift, shift), f"x y {inputs}")
    return f"{{ .reg .b32 x, y; {assembly} mov.b32 {{$0, $1}}, x; mov.b32 {{$2, $3}}, y; }}"


@triton.jit
def lookup_words_by_permutation(words, signs, table, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """Turn the codes at bit ``SHIFT`` of the four bytes of words into float16 centroids, four tiles of them."""
    if BITS == 8:
        levels = tl.inline_asm_elementwise(
            _word_assembly(BITS, SHIFT, "$4"), _constraints("=h,=h,=h,=h", 1), [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    elif BITS <= 2:
        levels = tl.inline_asm_elementwise(
            _word_assembly(BITS, SHIFT, "$4 - $5 $6"), _constraints("=h,=h,=h,=h", 3), [words, table[0], table[1]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    elif BITS == 3:
        levels = tl.inline_asm_elementwise(
            _word_assembly(BITS, SHIFT, "$4 $5 $6 $7"), _constraints("=h,=h,=h,=h", 4),
            [words, signs, table[0], table[1]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        levels = tl.inline_asm_elementwise(
            _word_assembly(BITS, SHIFT, "$4 - $5 $6 $7 $8"), _constraints("=h,=h,=h,=h", 5),
            [words, table[0], table[1], table[2], table[3]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    return levels


@triton.constexpr_function
def _shift_assembly() -> str:
    # each byte becomes itself, or the byte of the word shifted by one, of which lookup reads no bit that crossed over
    return """{ .reg .b32 s, m;  mad.lo.u32 m, $2, 255, 0;  shr.u32 s, $1, 1;
        xor.b32 s, s, $1;  and.b32 s, s, m;  xor.b32 $0, s, $1; }"""


@triton.jit
def shift_bytes(signs, halves):
    """Shift bytes right where ``halves``, uint8 of the same shape, is 1 and not where it is 0.

    The highest bit of a shifted byte is that of a neighbour; there is no code in it.
    """
    return tl.inline_asm_elementwise(_shift_assembly(), "=r,r,r", [signs, halves], dtype=tl.uint8, is_pure=True, pack=4)
