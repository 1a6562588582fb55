"""16 bits: vectors kept as they are, in the same records as everything else. Proves the plumbing."""

from __future__ import annotations

import torch

from hf_turboquant.layout import VectorFormat
from hf_turboquant.ops import VectorCodec, VectorTables


def exact_codec(head_dim: int, dtype: torch.dtype) -> VectorCodec:
    """Return the codec that stores vectors of ``dtype`` unchanged and unrotated."""
    return VectorCodec(VectorFormat("exact", head_dim, exact_dtype=dtype), VectorTables())
