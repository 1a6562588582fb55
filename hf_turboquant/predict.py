"""How long a decode step will take on a machine that is not at hand: bytes, instructions and launches.

The time of one layer is what it takes to read the cache at the bandwidth of the machine, and then to issue the
instructions of the main loop, and then what the launches cost whatever the length:

    seconds = launches * launch_seconds + bytes / bytes_per_second + instructions / (4 * num_sms * clock_hz)

A multiprocessor issues four instructions of a warp a cycle at best. Reading and issuing overlap in part, and no kernel
issues at the full rate; their plain sum is close to what an H200 measured (``docs/thor.md`` has both side by side).
Instructions are counted in the binaries that the kernels compile to for the machine, which needs no such machine
(``evals/thor.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import torch

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.layout import BLOCK_TOKENS, VectorFormat
from hf_turboquant.presets import resolve_config
from hf_turboquant.shapes import LayerShape, ModelShape, layer_formats

ISSUE_PER_CYCLE: Final = 4
"""Instructions of a warp that a multiprocessor starts in a cycle at most."""

LAUNCHES: Final = 3
"""Kernels of one attention call: query, partial results, merge. A dense split-KV kernel has two."""

ROWS_OF_TILE: Final = 4
"""Query rows that share one pass over the codes of a block."""


@dataclass(frozen=True)
class Speed:
    """What a GPU does in a second.

    Attributes:
        capability: Compute capability of the binaries counted, ``10 * major + minor``.
        num_sms: Streaming multiprocessors.
        clock_hz: Clock of the multiprocessors.
        bytes_per_second: Memory bandwidth.
        launch_seconds: What a launch costs that nothing hides.
        source: Where the figures are from.
    """

    capability: int
    num_sms: int
    clock_hz: float
    bytes_per_second: float
    launch_seconds: float
    source: str


SPEEDS: Final[Mapping[str, Speed]] = MappingProxyType(
    {
        "thor": Speed(110, 20, 1.575e9, 273e9, 15e-6, "maker's data sheet; launch cost as reported for an eager loop"),
        "h200": Speed(90, 132, 1.98e9, 4.27e12, 4.6e-6, "clock: data sheet; bandwidth and launches: measured"),
    }
)
"""Machines whose speed a plan knows."""


INSTRUCTIONS: Final[Mapping[tuple[int, int, tuple[int, ...], int, int], int]] = MappingProxyType(
    {
        (90, 64, (3, 1), 2, 1): 919,
        (90, 64, (3, 1), 2, 2): 1194,
        (90, 64, (4,), 3, 1): 911,
        (90, 64, (4,), 3, 2): 1180,
        (90, 64, (4,), 4, 1): 1004,
        (90, 64, (4,), 4, 2): 1287,
        (90, 64, (4, 2), 2, 1): 882,
        (90, 64, (4, 2), 2, 2): 1200,
        (90, 64, (4, 2), 3, 1): 979,
        (90, 64, (4, 2), 3, 2): 1271,
        (90, 128, (2,), 2, 1): 1044,
        (90, 128, (2,), 2, 2): 1350,
        (90, 128, (3,), 2, 1): 1193,
        (90, 128, (3,), 2, 2): 1527,
        (90, 128, (3,), 3, 1): 1346,
        (90, 128, (3,), 3, 2): 1676,
        (90, 128, (3, 1), 2, 1): 1246,
        (90, 128, (3, 1), 2, 2): 1615,
        (90, 128, (4,), 3, 1): 1508,
        (90, 128, (4,), 3, 2): 1858,
        (90, 128, (4,), 4, 1): 1659,
        (90, 128, (4,), 4, 2): 2046,
        (90, 128, (4, 2), 2, 1): 1308,
        (90, 128, (4, 2), 2, 2): 1705,
        (90, 128, (4, 2), 3, 1): 1466,
        (90, 128, (4, 2), 3, 2): 1868,
        (90, 256, (3, 1), 2, 1): 2047,
        (90, 256, (3, 1), 2, 2): 2552,
        (90, 256, (4,), 3, 1): 2673,
        (90, 256, (4,), 3, 2): 3168,
        (90, 256, (4,), 4, 1): 2983,
        (90, 256, (4,), 4, 2): 3574,
        (90, 256, (4, 2), 2, 1): 2171,
        (90, 256, (4, 2), 2, 2): 2716,
        (90, 256, (4, 2), 3, 1): 2468,
        (90, 256, (4, 2), 3, 2): 3007,
        (110, 64, (3, 1), 2, 1): 900,
        (110, 64, (3, 1), 2, 2): 1160,
        (110, 64, (4,), 3, 1): 892,
        (110, 64, (4,), 3, 2): 1135,
        (110, 64, (4,), 4, 1): 988,
        (110, 64, (4,), 4, 2): 1246,
        (110, 64, (4, 2), 2, 1): 856,
        (110, 64, (4, 2), 2, 2): 1171,
        (110, 64, (4, 2), 3, 1): 962,
        (110, 64, (4, 2), 3, 2): 1238,
        (110, 128, (2,), 2, 1): 1023,
        (110, 128, (2,), 2, 2): 1316,
        (110, 128, (3,), 2, 1): 1175,
        (110, 128, (3,), 2, 2): 1492,
        (110, 128, (3,), 3, 1): 1328,
        (110, 128, (3,), 3, 2): 1641,
        (110, 128, (3, 1), 2, 1): 1228,
        (110, 128, (3, 1), 2, 2): 1580,
        (110, 128, (4,), 3, 1): 1490,
        (110, 128, (4,), 3, 2): 1825,
        (110, 128, (4,), 4, 1): 1654,
        (110, 128, (4,), 4, 2): 2010,
        (110, 128, (4, 2), 2, 1): 1295,
        (110, 128, (4, 2), 2, 2): 1679,
        (110, 128, (4, 2), 3, 1): 1447,
        (110, 128, (4, 2), 3, 2): 1826,
        (110, 256, (3, 1), 2, 1): 2030,
        (110, 256, (3, 1), 2, 2): 2515,
        (110, 256, (4,), 3, 1): 2655,
        (110, 256, (4,), 3, 2): 3135,
        (110, 256, (4,), 4, 1): 2996,
        (110, 256, (4,), 4, 2): 3532,
        (110, 256, (4, 2), 2, 1): 2154,
        (110, 256, (4, 2), 2, 2): 2676,
        (110, 256, (4, 2), 3, 1): 2453,
        (110, 256, (4, 2), 3, 2): 2973,
    }
)
"""Instructions of a warp for one block of one KV head.

By capability, head_dim, bits of the key groups, bits of values, and query tiles of four rows; counted by ``python -m
evals.thor --count``.
"""


def decode_seconds(
    layer: LayerShape,
    config: TurboQuantConfig | str | None,
    tokens: int,
    speed: Speed,
    *,
    batch: int = 1,
    group_size: int = 4,
) -> float | None:
    """Predict the attention time of one layer for one new token of each sequence.

    Args:
        layer: Full-attention layer.
        config: Preset or configuration; ``"dense"`` for a 16-bit cache.
        tokens: Tokens in the cache.
        speed: The machine.
        batch: Sequences.
        group_size: Query heads of a KV head.

    Returns:
        Seconds, or None where the instructions of such a layer were not counted.
    """
    if config == "dense":
        size = 2 * batch * layer.values_per_token * tokens
        return (LAUNCHES - 1) * speed.launch_seconds + size / speed.bytes_per_second
    settings = resolve_config(config)
    keys, values = layer_formats(layer, settings)
    counted = loop_instructions(keys, values, speed.capability, group_size)
    if counted is None:
        return None
    blocks = max(tokens - settings.sink_tokens - settings.residual_window, 0) // BLOCK_TOKENS
    exact = tokens - blocks * BLOCK_TOKENS
    heads = batch * layer.num_kv_heads
    size = heads * blocks * (keys.nbytes + values.nbytes) + 2 * batch * layer.values_per_token * exact
    instructions, passes = counted
    issued = heads * blocks * instructions * passes / (ISSUE_PER_CYCLE * speed.num_sms * speed.clock_hz)
    return LAUNCHES * speed.launch_seconds + size / speed.bytes_per_second + issued


def model_decode_seconds(
    model: ModelShape, config: TurboQuantConfig | str | None, tokens: int, speed: Speed
) -> float | None:
    """Predict the attention time of one token in all full-attention layers of a model; None where one is not known."""
    layers = [layer for layer in model.layers if layer.kind == "full"]
    times = [decode_seconds(layer, config, tokens, speed, group_size=layer.group_size) for layer in layers]
    known = [time for time in times if time is not None]
    return sum(known) if layers and len(known) == len(times) else None


def loop_instructions(
    keys: VectorFormat, values: VectorFormat, capability: int, group_size: int
) -> tuple[int, int] | None:
    """Return the instructions of the main loop for one block of one KV head, and how often the block is read.

    Returns:
        None where the fast kernel does not serve the formats, or has not been counted for them.
    """
    plain = (keys.kind, values.kind) == ("mse", "mse") and keys.head_dim == values.head_dim and len(values.groups) == 1
    # what was counted has block means and the narrow norms
    narrow = {keys.norm_dtype, values.norm_dtype} == {torch.float16}
    if not plain or not narrow or not keys.centered or values.centered:
        return None
    tiles = 1 if group_size <= ROWS_OF_TILE else 2
    bits = tuple(group.bits for group in keys.groups)
    count = INSTRUCTIONS.get((capability, keys.head_dim, bits, values.groups[0].bits, tiles))
    return None if count is None else (count, -(-group_size // (ROWS_OF_TILE * tiles)))


@lru_cache(maxsize=1)
def counted_formats() -> tuple[tuple[int, tuple[int, ...], int], ...]:
    """Return head_dim, key bits and value bits of every pair of formats that was counted."""
    return tuple(sorted({key[1:4] for key in INSTRUCTIONS}))
