"""Merge of the partial results of ``static_attend_kernel``."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.fast_combine import merge_splits


@triton.jit(do_not_specialize=["q_len", "packed_splits", "num_splits"])
def static_combine_kernel(
    partial_ptr, peak_ptr, total_ptr, rotation_ptr, order_ptr, sink_logits_ptr, out_ptr, lengths_ptr,
    num_heads, group_size, q_len, packed_splits, num_splits,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    HAS_ORDER: tl.constexpr, SINK_LOGITS: tl.constexpr, OVERLAP: tl.constexpr, HIDES: tl.constexpr,
    EXACT_TOKENS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Merge the splits that had work. Grid and constants as of ``fast_combine_kernel``.

    Which they are follows from the counts as in ``static_attend_kernel``, with its ``EXACT_TOKENS`` and ``W``.
    """
    rounds = tl.cdiv(tl.load(lengths_ptr + 1), W)
    packed_end = tl.cdiv(rounds, tl.maximum(tl.cdiv(rounds, packed_splits), 1))
    tiles = tl.cdiv(tl.load(lengths_ptr), EXACT_TOKENS) + tl.cdiv(tl.load(lengths_ptr + 3), EXACT_TOKENS)
    exact_end = packed_splits + tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, num_splits - packed_splits), 1))
    merge_splits(
        partial_ptr, peak_ptr, total_ptr, rotation_ptr, order_ptr, sink_logits_ptr, out_ptr, out_ptr,
        num_heads, group_size, q_len, packed_splits, num_splits, packed_end, exact_end,
        HEAD_DIM, SPLITS, EXACT, COLUMNS, STEP, HAS_ORDER, SINK_LOGITS, False, OVERLAP, HIDES, True,
    )  # fmt: skip
