"""The operations as Triton kernels. Importing this package imports Triton; nothing above ``ops`` needs to."""

from __future__ import annotations

from hf_turboquant.ops.triton.attend import (
    AttendResult,
    BlockTable,
    attend,
    attend_with_lse,
    build_block_table,
    merge_results,
    needs_block_table,
)
from hf_turboquant.ops.triton.dequantize import dequantize
from hf_turboquant.ops.triton.quantize import quantize

__all__ = [
    "AttendResult",
    "BlockTable",
    "attend",
    "attend_with_lse",
    "build_block_table",
    "dequantize",
    "merge_results",
    "needs_block_table",
    "quantize",
]
