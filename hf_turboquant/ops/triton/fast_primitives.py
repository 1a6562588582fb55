"""Register-level pieces of the fast attend kernel, NVIDIA only.

Every tensor here is ``[warps, 32]``: one element per thread, so that an assembly statement on it is one instruction of
a warp. A *word* is 32 bits of packed codes. A *level register* holds four signed bytes: the centroids of four codes in
units of a step that the caller keeps (``fast_levels.py``). They are operands of the 8-bit integer matrix product, which
all generations since sm_80 run natively; the floating 8-bit product is emulated on sm_90, sm_100 and sm_110.

``prmt`` with a table of bytes looks up four codes at once, its selector being the nibbles of the word as they are
stored: about 0.6 operations per 2-bit code, 0.8 per 3-bit code and 1.1 per 4-bit code.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# memory


@gluon.constexpr_function
def _load_assembly(count, lasting):
    # packed records do not change while the kernel runs, and are read once
    kind = "ld.global.nc.L1::no_allocate" if lasting else "ld.global"
    if count == 1:
        return f"{kind}.b32 $0, [$1];"
    outputs = ", ".join(f"${index}" for index in range(count))
    return f"{kind}.v{count}.b32 {{{outputs}}}, [${count}];"


@gluon.constexpr_function
def _load_constraints(count):
    return ",".join(["=r"] * count) + ",l"


@gluon.jit
def load_words(address, COUNT: gl.constexpr, LASTING: gl.constexpr = True):
    """Load ``COUNT`` consecutive words (1, 2, or a multiple of 4) at int64 addresses aligned to their size.

    ``LASTING`` is for memory that no kernel writes while this one runs.
    """
    words = ()
    if COUNT == 1:
        words = (
            gl.inline_asm_elementwise(
                _load_assembly(1, LASTING), _load_constraints(1), [address], dtype=gl.int32, is_pure=LASTING, pack=1
            ),
        )
    elif COUNT == 2:
        a, b = gl.inline_asm_elementwise(
            _load_assembly(2, LASTING), _load_constraints(2), [address], dtype=(gl.int32, gl.int32), is_pure=LASTING,
            pack=1,
        )  # fmt: skip
        words = (a, b)
    else:
        for index in gl.static_range(COUNT // 4):
            a, b, c, d = gl.inline_asm_elementwise(
                _load_assembly(4, LASTING), _load_constraints(4), [address + 16 * index],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=LASTING, pack=1,
            )  # fmt: skip
            words = words + (a, b, c, d)
    return words


@gluon.jit
def wait_for_previous():
    """Wait until the kernel before this one has finished and its stores are visible (sm_90 and later)."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_next():
    """Let the programs of the next kernel start as soon as there is room for them (sm_90 and later)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# codes to levels


@gluon.constexpr_function
def _unpack_assembly(bits, half):
    # $4 (or $2) the word; nibbles of a and b select: a the codes of even parts, b those of odd parts
    if half and bits == 1:
        return """{ .reg .b32 a;
            and.b32 a, $2, 0x3333;  prmt.b32 $0, $3, 0, a;  prmt.b32 $1, $4, 0, a; }"""
    if half and bits == 2:
        return """{ .reg .b32 a, b;
            and.b32 a, $2, 0x3333;  shr.u32 b, $2, 2;  and.b32 b, b, 0x3333;
            prmt.b32 $0, $3, 0, a;  prmt.b32 $1, $3, 0, b; }"""
    if half and bits == 3:
        return """{ .reg .b32 a, b, s;
            shl.b32 s, $3, 2;  and.b32 s, s, 0x4444;  lop3.b32 a, $2, 0x3333, s, 0xEA;
            and.b32 s, $3, 0x4444;  shr.u32 b, $2, 2;  lop3.b32 b, b, 0x3333, s, 0xEA;
            prmt.b32 $0, $4, $5, a;  prmt.b32 $1, $4, $5, b; }"""
    if bits == 1:
        # a table for each of two codes that lie side by side: neither needs to be alone in its nibble
        return """{ .reg .b32 a;
            and.b32 a, $4, 0x33333333;  prmt.b32 $0, $5, 0, a;  prmt.b32 $1, $6, 0, a;
            shr.u32 a, a, 16;  prmt.b32 $2, $5, 0, a;  prmt.b32 $3, $6, 0, a; }"""
    if bits == 2:
        return """{ .reg .b32 a, b;
            and.b32 a, $4, 0x33333333;  shr.u32 b, $4, 2;  and.b32 b, b, 0x33333333;
            prmt.b32 $0, $5, 0, a;  prmt.b32 $1, $5, 0, b;
            shr.u32 a, a, 16;  shr.u32 b, b, 16;
            prmt.b32 $2, $5, 0, a;  prmt.b32 $3, $5, 0, b; }"""
    if bits == 3:
        # $5 the high bits, each two bits below the place where the selector wants it or in it
        return """{ .reg .b32 a, b, s;
            shl.b32 s, $5, 2;  and.b32 s, s, 0x44444444;  lop3.b32 a, $4, 0x33333333, s, 0xEA;
            and.b32 s, $5, 0x44444444;  shr.u32 b, $4, 2;  lop3.b32 b, b, 0x33333333, s, 0xEA;
            prmt.b32 $0, $6, $7, a;  prmt.b32 $1, $6, $7, b;
            shr.u32 a, a, 16;  shr.u32 b, b, 16;
            prmt.b32 $2, $6, $7, a;  prmt.b32 $3, $6, $7, b; }"""
    # the table holds the negative levels minus one half; a set high bit makes the complement, the positive one
    return """{ .reg .b32 m, n, y, s, t;
        and.b32 m, $2, 0x77777777;  shr.u32 n, m, 16;  shl.b32 y, $2, 4;
        prmt.b32 s, y, $2, 0xD9C8;  prmt.b32 t, y, $2, 0xFBEA;
        prmt.b32 m, $3, $4, m;  prmt.b32 n, $3, $4, n;
        xor.b32 $0, m, s;  xor.b32 $1, n, t; }"""


@gluon.jit
def unpack(word, high, low_table, high_table, BITS: gl.constexpr, HALF: gl.constexpr = False):
    """Turn a word of codes into level registers: of the lower half word even parts, odd parts, then of the upper half.

    Args:
        word: int32, 16 codes of 2 bits (3 bits: their low two), or 8 codes of 4 bits. Unused for 1 bit.
        high: 3 bits: int32 whose even bits are the high bits of the codes; 1 bit: the codes, in the lower two bits of
            each nibble. Else unused.
        low_table: int32, levels of codes 0 to 3; 1 bit: levels of pairs of codes, by the first of them.
        high_table: int32, levels of codes 4 to 7; 1 bit: levels of pairs, by the second code; unused for 2 bits.
        BITS: 1, 2, 3 or 4.
        HALF: Only the lower half word, not with 4 bits.

    Returns:
        4 level registers, or 2 for 4 bits or half a word. Levels of 4 bits are half a step below what they stand for.
    """
    if HALF and BITS == 1:
        a, b = gl.inline_asm_elementwise(
            _unpack_assembly(1, True), "=&r,=&r,r,r,r", [high, low_table, high_table],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        registers = (a, b)
    elif HALF and BITS == 2:
        a, b = gl.inline_asm_elementwise(
            _unpack_assembly(2, True), "=&r,=&r,r,r", [word, low_table],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        registers = (a, b)
    elif HALF:
        a, b = gl.inline_asm_elementwise(
            _unpack_assembly(BITS, True), "=&r,=&r,r,r,r,r", [word, high, low_table, high_table],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        registers = (a, b)
    elif BITS == 1:
        a, b, c, d = gl.inline_asm_elementwise(
            _unpack_assembly(1, False), "=&r,=&r,=&r,=&r,r,r,r", [high, low_table, high_table],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        registers = (a, b, c, d)
    elif BITS == 2:
        a, b, c, d = gl.inline_asm_elementwise(
            _unpack_assembly(2, False), "=&r,=&r,=&r,=&r,r,r", [word, low_table],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        registers = (a, b, c, d)
    elif BITS == 3:
        a, b, c, d = gl.inline_asm_elementwise(
            _unpack_assembly(3, False), "=&r,=&r,=&r,=&r,r,r,r,r", [word, high, low_table, high_table],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        registers = (a, b, c, d)
    else:
        a, b = gl.inline_asm_elementwise(
            _unpack_assembly(4, False), "=&r,=&r,r,r,r", [word, low_table, high_table],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        registers = (a, b)
    return registers


# matrix products


@gluon.jit
def multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, TYPES: gl.constexpr):
    """``C + A B`` of one warp, ``A`` 16 x 32 bytes, ``B`` 32 x 8 bytes, int32 sums.

    Lane ``4 j + t`` holds of ``A`` rows ``j`` (a0, a2) and ``j + 8`` (a1, a3), of ``B`` column ``j``, of ``C`` rows
    ``j`` (c0, c1) and ``j + 8`` (c2, c3) at columns ``2 t`` and ``2 t + 1``. Registers a0, a1 and b0 of lane ``t`` meet
    the same four summands, a2, a3 and b1 four others; which they are is the caller's choice.
    """
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32." + TYPES + ".s32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """``C + A B`` as :func:`multiply`, with two bfloat16 in a register and float32 sums."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


# exchange between lanes


@gluon.jit
def max_over_tokens(x):
    """Return the maximum over the eight lanes that hold the same query row."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 a;
            shfl.sync.bfly.b32 a, $1, 4, 31, -1;  max.f32 $0, $1, a;
            shfl.sync.bfly.b32 a, $0, 8, 31, -1;  max.f32 $0, $0, a;
            shfl.sync.bfly.b32 a, $0, 16, 31, -1;  max.f32 $0, $0, a; }""",
        "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def sum_over_tokens(x):
    """Return the sum over the eight lanes that hold the same query row."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 a;
            shfl.sync.bfly.b32 a, $1, 4, 31, -1;  add.f32 $0, $1, a;
            shfl.sync.bfly.b32 a, $0, 8, 31, -1;  add.f32 $0, $0, a;
            shfl.sync.bfly.b32 a, $0, 16, 31, -1;  add.f32 $0, $0, a; }""",
        "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def from_lane(x, lane):
    """Return float32 ``x`` of another lane of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, lane], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def vote(x):
    """Return a word in which bit ``i`` says whether the int32 ``x`` of lane ``i`` is not zero."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p;  setp.ne.b32 p, $1, 0;  vote.sync.ballot.b32 $0, p, -1; }",
        "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def transpose_weights(first, second):
    """Bring the weights of two tokens into the layout of the right operand of :func:`multiply`.

    Args:
        first: float32 in ``[2**23, 2**24)``; its low 16 bits are the weight of a token of row ``j``, query row ``t``,
            for lane ``4 j + t``.
        second: The same for a second token.

    Returns:
        int32: lane ``4 n + t`` holds bytes first(2t), second(2t), first(2t + 1), second(2t + 1) of query row
        ``n // 2``: the high bytes for even ``n``, the low bytes for odd ``n``.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a;
            prmt.b32 a, $1, $2, 0x4051;  movmatrix.sync.aligned.m8n8.trans.b16 $0, a; }""",
        "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


# small arithmetic


@gluon.jit
def fuse(x, y, z):
    """Return ``x * y + z`` with one rounding."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def power_of_2(x):
    """Return ``2**x`` to about 22 bits; results below 2**-126 are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    """Return ``1 / x`` to about 23 bits."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def join_columns(high, low):
    """Return ``256 * high + low`` as float32, from the int32 sums of the two halves of a 16-bit operand."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a;  mad.lo.s32 a, $1, 256, $2;  cvt.rn.f32.s32 $0, a; }",
        "=f,r,r", [high, low], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pick_halves(first, second, selector):
    """Return two of the four float16 in two words as float32, the pair that ``selector`` (of ``prmt``) names."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a;  .reg .b16 x, y;
            prmt.b32 a, $2, $3, $4;  mov.b32 {x, y}, a;
            cvt.f32.f16 $0, x;  cvt.f32.f16 $1, y; }""",
        "=f,=f,r,r,r", [first, second, selector], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def record_address(arena_ptr, block_address_ptr, block, block_stride, head_offset, TABLE: gl.constexpr):
    """Return the int64 address of the record of a block."""
    if TABLE:
        address = gl.load(block_address_ptr + block)
    else:
        address = arena_ptr.to(gl.int64) + block.to(gl.int64) * block_stride
    return address + head_offset
