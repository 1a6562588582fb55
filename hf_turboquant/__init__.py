"""Compressed key/value cache for Hugging Face Transformers: TurboQuant codes, attended over as they are.

    cache = TurboQuantCache(model.config)
    model.generate(**inputs, past_key_values=cache)

Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_turboquant.cache import TurboQuantCache
    from hf_turboquant.config import TurboQuantConfig
    from hf_turboquant.errors import TurboQuantError
    from hf_turboquant.generation import patch_generation
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
    "patch_generation",
]

# names are loaded when first used: torch and transformers take seconds, which the command line has not got
_HOMES = MappingProxyType(
    {
        "PRESETS": "presets",
        "MemoryReport": "report",
        "PathReport": "report",
        "TurboQuantCache": "cache",
        "TurboQuantConfig": "config",
        "TurboQuantError": "errors",
        "disable": "integrate",
        "enable": "integrate",
        "patch_generation": "generation",
    }
)


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
