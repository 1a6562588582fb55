"""Time the decode step of one layer: a token appended to a long cache, and attention over all of it.

Keys and values are random: the kernels do the same work for any. The dense cache is transformers' own, its growth by
copying included, read by whatever kernel sdpa picks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaConfig

from hf_turboquant.cache import TurboQuantCache
from hf_turboquant.errors import ConfigError
from hf_turboquant.ops import resolve_backend
from hf_turboquant.presets import resolve_config

DENSE: Final = "dense"
WARM_UP: Final = 3


@dataclass(frozen=True)
class Geometry:
    """Shape of the layer and its cache, one sequence.

    Attributes:
        num_q_heads: Query heads.
        num_kv_heads: Key/value heads, a divisor of ``num_q_heads``.
        head_dim: Channels of a head.
        tokens: Tokens in the cache.
    """

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 4096

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_q_heads must be a multiple of num_kv_heads ({self.num_kv_heads}), got {self.num_q_heads}"
            )

    def model_config(self) -> LlamaConfig:
        """Return the configuration of a model with this one layer."""
        return LlamaConfig(
            num_hidden_layers=1,
            num_attention_heads=self.num_q_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.num_q_heads * self.head_dim,
        )


@dataclass(frozen=True)
class BenchRow:
    """Times of one cache, medians.

    Attributes:
        cache: Preset, or ``dense``.
        backend: Who computes.
        step_us: Append and attention, in microseconds.
        attention_us: Attention alone, in microseconds.
        bytes_held: Bytes of the cache.
        speedup: Step of the dense cache over this step.
    """

    cache: str
    backend: str
    step_us: float
    attention_us: float
    bytes_held: int
    speedup: float


def new_cache(name: str, model_config: LlamaConfig) -> DynamicCache:
    """Return an empty cache: ``dense``, or that of a preset."""
    return DynamicCache(config=model_config) if name == DENSE else TurboQuantCache(model_config, name)


def bench(
    geometry: Geometry, presets: Sequence[str], *, device: torch.device, dtype: torch.dtype, steps: int = 20
) -> list[BenchRow]:
    """Time the dense cache and some presets.

    Args:
        geometry: What to time.
        presets: Names of presets.
        device: Where.
        dtype: Of keys, values and queries.
        steps: Decode steps timed, after three that are not.

    Raises:
        ConfigError: A preset is unknown or ``steps`` is not positive.
    """
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}")
    for name in presets:
        resolve_config(name)
    rows: list[BenchRow] = []
    for name in (DENSE, *presets):
        step, attention, held = _time_cache(name, geometry, device, dtype, steps)
        choice = "sdpa" if name == DENSE else resolve_backend(resolve_config(name).backend, device).backend.value
        rows.append(BenchRow(name, choice, step, attention, held, rows[0].step_us / step if rows else 1.0))
    return rows


@torch.inference_mode()
def _time_cache(
    name: str, geometry: Geometry, device: torch.device, dtype: torch.dtype, steps: int
) -> tuple[float, float, int]:
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int, tokens: int) -> torch.Tensor:
        shape = (1, heads, tokens, geometry.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    cache = new_cache(name, geometry.model_config())
    cache.update(random(geometry.num_kv_heads, geometry.tokens), random(geometry.num_kv_heads, geometry.tokens), 0)
    query = random(geometry.num_q_heads, 1)
    token = random(geometry.num_kv_heads, 1)
    latest: list[torch.Tensor] = []

    def attend() -> Any:
        return scaled_dot_product_attention(query, latest[0], latest[1], enable_gqa=True)

    def step() -> Any:
        latest[:] = cache.update(token, token, 0)
        return attend()

    step_us = _median_us(step, steps, device)
    attention_us = _median_us(attend, steps, device)
    return step_us, attention_us, _bytes_held(cache)


def _median_us(run: Callable[[], object], steps: int, device: torch.device) -> float:
    times = []
    for index in range(WARM_UP + steps):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        if index >= WARM_UP:
            times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes_held(cache: DynamicCache) -> int:
    if isinstance(cache, TurboQuantCache):
        return cache.memory_report().bytes_held
    tensors = (getattr(cache.layers[0], name) for name in ("keys", "values"))
    return sum(int(tensor.untyped_storage().nbytes()) for tensor in tensors)
