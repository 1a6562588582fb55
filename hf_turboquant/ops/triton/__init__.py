"""The operations as Triton kernels. Importing this package imports Triton; nothing above ``ops`` needs to."""

from __future__ import annotations

from hf_turboquant.ops.triton.append_kernel import append
from hf_turboquant.ops.triton.attend_launch import AttendResult, attend_portable, merge_results
from hf_turboquant.ops.triton.block_table import BlockTable, build_block_table, needs_block_table
from hf_turboquant.ops.triton.dequantize_kernel import dequantize
from hf_turboquant.ops.triton.dispatch import (
    attend,
    attend_and_prepare,
    attend_with_lse,
    fast_obstacle,
)
from hf_turboquant.ops.triton.quantize_kernel import quantize
from hf_turboquant.ops.triton.static_append import static_append
from hf_turboquant.ops.triton.static_attend import static_attend

__all__ = [
    "AttendResult",
    "BlockTable",
    "append",
    "attend",
    "attend_and_prepare",
    "attend_portable",
    "attend_with_lse",
    "build_block_table",
    "dequantize",
    "fast_obstacle",
    "merge_results",
    "needs_block_table",
    "quantize",
    "static_append",
    "static_attend",
]
