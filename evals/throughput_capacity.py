"""How much fits into the memory of the GPU: computed from the shapes, and held to one allocation.

Computed are the most sequences of 32k tokens, and the longest context of one sequence, beside the weights and one
layer's fresh keys and values (which a prompt holds besides the store). The sequences are then really stored, every
layer of them, with as many bytes put aside as the weights have: the row says whether they fit, and what was held.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers import DynamicCache, LlamaConfig

from evals.speed_log import FAILED, OK, SKIPPED, ResultLog
from hf_turboquant import TurboQuantCache
from hf_turboquant.planner import SHAPES, Budget, ModelShape, longest_context, users

CAPACITY_TOKENS: Final = 32_768
CAPACITY_CACHES: Final = ("dynamic", "k4v4", "k3v2")
VERIFIED_MODEL: Final = "qwen2.5-7b"
PLANNER_NAMES: Final = {"qwen2.5-7b": "qwen2.5-7b", "llama-3.1-8b": "llama-8b"}
EXPECTED_S: Final = 25.0
SPARE_BYTES: Final = 3 * 2**30
"""What the allocator and the driver need besides."""


def capacity(shape: ModelShape, cache: str, memory: int) -> tuple[int, int | None]:
    """Return how many sequences of 32k tokens fit, and the longest context of one; bytes counted as held.

    Args:
        shape: The model, with its weights.
        cache: ``dynamic`` or a preset.
        memory: Bytes of the GPU.
    """

    def held(tokens: int) -> float:
        # a prompt holds its layer's keys and values in full, beside what is kept of them
        return held_bytes(shape, cache, tokens) + shape.dense_bytes(tokens) / len(shape.layers)

    budget = Budget(memory, weight_bytes=shape.weight_bytes or 0, fixed_bytes=SPARE_BYTES)
    return users(budget, held, CAPACITY_TOKENS), longest_context(budget, held)


def held_bytes(shape: ModelShape, cache: str, tokens: int) -> int:
    """Return the bytes of the cache of one sequence after a prompt."""
    return shape.dense_bytes(tokens) if cache == "dynamic" else shape.held_bytes(tokens, cache, grown=False)


def store_all(shape: ModelShape, cache: str, sequences: int, tokens: int, device: str) -> int:
    """Store random tokens in every layer and return the bytes of the cache; raises where they do not fit."""
    layer = shape.layers[0]
    config = LlamaConfig(
        num_hidden_layers=len(shape.layers),
        num_attention_heads=layer.num_kv_heads,
        num_key_value_heads=layer.num_kv_heads,
        head_dim=layer.key_dim,
        hidden_size=layer.num_kv_heads * layer.key_dim,
    )
    made = DynamicCache(config=config) if cache == "dynamic" else TurboQuantCache(config, cache)
    size = (sequences, layer.num_kv_heads, tokens, layer.key_dim)
    for index in range(len(shape.layers)):
        # made anew for each layer, as a forward pass makes them
        keys, values = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
        made.update(keys, values, index)
        del keys, values
    if isinstance(made, TurboQuantCache):
        return int(made.memory_report().bytes_held)
    return sum(part.numel() * part.element_size() for one in made.layers for part in (one.keys, one.values))


def capacity_rows(log: ResultLog, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Compute every row that is missing, hold those of one model to an allocation, and yield them once on disk."""
    memory = torch.cuda.get_device_properties(device).total_memory
    for model, name in PLANNER_NAMES.items():
        for cache in CAPACITY_CACHES:
            identifier = f"capacity/{model}/{cache}"
            if identifier in log.done or not log.has_time(EXPECTED_S):
                continue
            row = {"id": identifier, "eval": "throughput", "kind": "capacity", "model": model, "cache": cache}
            row |= capacity_row(SHAPES[name], cache, memory, device if model == VERIFIED_MODEL else None)
            log.write(row)
            yield row
            gc.collect()
            torch.cuda.empty_cache()


def capacity_row(shape: ModelShape, cache: str, memory: int, device: str | None) -> dict[str, Any]:
    """Return what fits; with a device, whether it really did.

    Args:
        shape: The model.
        cache: ``dynamic`` or a preset.
        memory: Bytes of the GPU.
        device: Where to store the sequences; None computes only.
    """
    sequences, longest = capacity(shape, cache, memory)
    row: dict[str, Any] = {
        "context": CAPACITY_TOKENS,
        "memory_bytes": memory,
        "users": sequences,
        "longest": longest,
        "verified": False,
        "held_bytes": sequences * held_bytes(shape, cache, CAPACITY_TOKENS),
    }
    if device is None:
        return {**row, "status": OK}
    try:
        weights = torch.empty(shape.weight_bytes or 0, dtype=torch.uint8, device=device)
        held = store_all(shape, cache, sequences, CAPACITY_TOKENS, device)
        del weights
    except torch.OutOfMemoryError as error:
        return {**row, "status": SKIPPED, "reason": f"does not fit: {str(error).partition('.')[0]}"}
    except (RuntimeError, ValueError, TypeError) as error:
        return {**row, "status": FAILED, "reason": f"{type(error).__name__}: {str(error)[:300]}"}
    return {**row, "status": OK, "verified": True, "held_bytes": held}
