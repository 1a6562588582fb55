"""Compressed key/value cache for Hugging Face Transformers: TurboQuant codes, attended over as they are.

    cache = TurboQuantCache(model.config)
    model.generate(**inputs, past_key_values=cache)
"""

from hf_turboquant.cache import TurboQuantCache
from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import TurboQuantError
from hf_turboquant.integrate import disable, enable
from hf_turboquant.presets import PRESETS
from hf_turboquant.report import MemoryReport, PathReport

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "MemoryReport",
    "PathReport",
    "TurboQuantCache",
    "TurboQuantConfig",
    "TurboQuantError",
    "__version__",
    "disable",
    "enable",
]
