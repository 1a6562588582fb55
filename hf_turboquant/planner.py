"""How many tokens, users and GPUs: arithmetic on the shape of a model, without the model and without a GPU.

Two figures stand side by side. The *nominal* one multiplies elements by bits, as papers and tables do. The *held* one
is what our store keeps alive at that length: whole records with norms, means and alignment, sinks, the exact window,
and the room a growing store has not filled yet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.predict import SPEEDS, Speed, model_decode_seconds
from hf_turboquant.presets import resolve_config
from hf_turboquant.shapes import GB, SHAPES, LayerShape, ModelShape

__all__ = [
    "DEVICES",
    "SHAPES",
    "SPEEDS",
    "Budget",
    "Device",
    "LayerShape",
    "ModelShape",
    "PlanRow",
    "find_device",
    "gpus_needed",
    "longest_context",
    "parse_count",
    "parse_size",
    "plan",
    "users",
]

GIB: Final = 1024**3
MAX_TOKENS: Final = 1 << 40
"""Where the search for a longest context stops: beyond it nothing grows with the context."""


@dataclass(frozen=True)
class Device:
    """A kind of machine: its name and the bytes of memory of one of it."""

    name: str
    memory_bytes: int


DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {
        "thor": Device("Jetson AGX Thor", round(122.8 * GIB)),
        "orin-64gb": Device("Jetson AGX Orin 64GB", 64 * GB),
        "rtx-4090": Device("GeForce RTX 4090", 24 * GB),
        "a100-80gb": Device("A100 80GB", 80 * GB),
        "h100-80gb": Device("H100 80GB", 80 * GB),
        "h200": Device("H200", 141 * GB),
    }
)
"""Machines by name. Thor's memory is what its software reports, the others' what their makers print."""


_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": GB, "TB": 10**12, "MIB": 2**20, "GIB": GIB}
_COUNTS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_size(text: str) -> int:
    """Return the bytes of ``"24GB"``, ``"122.8GiB"`` or a plain number.

    Raises:
        ConfigError: The text is not a number with one of these units.
    """
    return _parse(text, _UNITS, "a size such as 24GB, 122.8GiB or 500MB")


def parse_count(text: str) -> int:
    """Return the number in ``"128k"`` (128,000), ``"1M"`` or ``"32768"``.

    Raises:
        ConfigError: The text is not such a number.
    """
    return _parse(text, _COUNTS, "a number such as 32768, 128k or 1M")


def _parse(text: str, units: Mapping[str, int], rule: str) -> int:
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2).upper() not in units:
        raise ConfigError(f"{text!r} must be {rule}")
    return round(float(match.group(1).replace("_", "")) * units[match.group(2).upper()])


def find_device(name: str) -> Device:
    """Return a machine by name.

    Raises:
        ConfigError: It is unknown; the message lists the known.
    """
    if name.lower() not in DEVICES:
        raise ConfigError(f"unknown device {name!r}; known are {', '.join(DEVICES)}; or give --memory, such as 24GB")
    return DEVICES[name.lower()]


# questions


@dataclass(frozen=True)
class Budget:
    """Memory there is, and what of it is not for caches. All in bytes.

    Attributes:
        memory_bytes: Of one GPU.
        gpus: GPUs that share weights and caches evenly.
        weight_bytes: Weights, all GPUs together.
        fixed_bytes: Anything else that does not grow with requests, per GPU.
        request_bytes: Activations of one request, per GPU.
    """

    memory_bytes: float
    gpus: int = 1
    weight_bytes: float = 0
    fixed_bytes: float = 0
    request_bytes: float = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.gpus < 1:
            raise ConfigError(f"gpus must be at least 1, got {self.gpus}")
        for name in ("memory_bytes", "weight_bytes", "fixed_bytes", "request_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative (bytes), got {getattr(self, name)}")

    @property
    def free_bytes(self) -> float:
        """Bytes for requests on one GPU; negative if the model does not fit."""
        return self.memory_bytes - self.fixed_bytes - self.weight_bytes / self.gpus


CacheBytes = Callable[[int], float]
"""Bytes of the cache of one sequence by its tokens."""


def users(budget: Budget, cache: CacheBytes, tokens: int) -> int:
    """Return how many requests of ``tokens`` tokens fit at once; 0 if none does."""
    each = cache(tokens) / budget.gpus + budget.request_bytes
    return max(0, math.floor(budget.free_bytes / each)) if each else 0


def longest_context(budget: Budget, cache: CacheBytes, concurrent: int = 1) -> int | None:
    """Return the most tokens each of ``concurrent`` requests may have; None if the cache does not grow."""
    room = budget.free_bytes - concurrent * budget.request_bytes

    def fits(tokens: int) -> bool:
        return concurrent * cache(tokens) / budget.gpus <= room

    if not fits(0):
        return 0
    if fits(MAX_TOKENS):
        return None
    low, high = 0, MAX_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def gpus_needed(budget: Budget, cache: CacheBytes, tokens: int, concurrent: int = 1) -> int | None:
    """Return the fewest GPUs for ``concurrent`` requests; None if what each GPU must hold by itself is too much."""
    own = budget.memory_bytes - budget.fixed_bytes - concurrent * budget.request_bytes
    if own <= 0:
        return None
    return max(1, math.ceil((budget.weight_bytes + concurrent * cache(tokens)) / own))


@dataclass(frozen=True)
class PlanRow:
    """One cache in a plan. ``nominal_*`` counts bits only, the others what is held.

    Attributes:
        cache: Preset, or ``dense``.
        bits: Bits per coordinate held at the planned length, everything counted.
        bytes_per_token: Bytes held per token at that length.
        nominal_bytes: Cache of one request.
        held_bytes: The same as held.
        nominal_longest: Longest context of one request, in tokens; None if nothing limits it.
        longest: The same as held.
        nominal_users: Requests at once.
        users: The same as held.
        gpus: GPUs needed for one request; None if no number is enough.
        attention_seconds: Predicted time of attention for one new token, all layers, on one GPU; None where it is not
            known (:mod:`hf_turboquant.predict`).
    """

    cache: str
    bits: float
    bytes_per_token: float
    nominal_bytes: float
    held_bytes: float
    nominal_longest: int | None
    longest: int | None
    nominal_users: int
    users: int
    gpus: int | None
    attention_seconds: float | None = None


def plan(
    model: ModelShape, budget: Budget, tokens: int, presets: Sequence[str], speed: Speed | None = None
) -> list[PlanRow]:
    """Answer every question for a dense cache and some presets.

    Args:
        model: Its ``weight_bytes`` are not looked at; those of the budget are.
        budget: Memory.
        tokens: Context of a request.
        presets: Names of presets.
        speed: The machine, for predicted times; None for none.

    Raises:
        ConfigError: A preset is unknown, or ``tokens`` is not positive.
    """
    if tokens < 1:
        raise ConfigError(f"tokens must be at least 1, got {tokens}")
    coordinates = sum(layer.values_per_token * layer.dense_tokens(tokens) for layer in model.layers)
    if not coordinates:
        raise ConfigError(f"{model.name} has no layer whose cache grows with the context")
    rows = [_row("dense", model.dense_bytes, model.dense_bytes, coordinates, budget, tokens)]
    for name in presets:
        config = resolve_config(name)

        def nominal(count: int, config: TurboQuantConfig = config) -> float:
            return model.code_bytes(count, config)

        def held(count: int, config: TurboQuantConfig = config) -> float:
            return model.held_bytes(count, config)

        rows.append(_row(name, nominal, held, coordinates, budget, tokens))
    if speed is None:
        return rows
    return [replace(row, attention_seconds=model_decode_seconds(model, row.cache, tokens, speed)) for row in rows]


def _row(name: str, nominal: CacheBytes, held: CacheBytes, coordinates: int, budget: Budget, tokens: int) -> PlanRow:
    size = held(tokens)
    return PlanRow(
        cache=name,
        bits=8 * size / coordinates,
        bytes_per_token=size / tokens,
        nominal_bytes=nominal(tokens),
        held_bytes=size,
        nominal_longest=longest_context(budget, nominal),
        longest=longest_context(budget, held),
        nominal_users=users(budget, nominal, tokens),
        users=users(budget, held, tokens),
        gpus=gpus_needed(budget, held, tokens),
    )
