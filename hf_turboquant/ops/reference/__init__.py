"""The operations in plain torch: the specification the kernels are held to, and the CPU path.

Everything is computed in float32.
"""

from __future__ import annotations

from hf_turboquant.ops.reference.attention import attend
from hf_turboquant.ops.reference.basis import rotate, unrotate
from hf_turboquant.ops.reference.codec import dequantize, quantize
from hf_turboquant.ops.reference.products import block_scores, block_values

__all__ = [
    "attend",
    "block_scores",
    "block_values",
    "dequantize",
    "quantize",
    "rotate",
    "unrotate",
]
