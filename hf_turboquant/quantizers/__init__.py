"""Codecs: a configuration bound to a geometry, a device and, for split channels and hard layers, to first tokens."""

from __future__ import annotations

from hf_turboquant.quantizers.exact import exact_codec
from hf_turboquant.quantizers.mse import mse_codec
from hf_turboquant.quantizers.plan import CodecPlan, LayerCodecs, build_key_codec, build_value_codec
from hf_turboquant.quantizers.polar import PolarCodebook, polar_codebook
from hf_turboquant.quantizers.prod import prod_codec

__all__ = [
    "CodecPlan",
    "LayerCodecs",
    "PolarCodebook",
    "build_key_codec",
    "build_value_codec",
    "exact_codec",
    "mse_codec",
    "polar_codebook",
    "prod_codec",
]
