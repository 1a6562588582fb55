"""What is timed: one decode step of one layer, by contender, shape, batch and context.

A contender is ``sdpa_flash``, ``sdpa_cudnn`` or ``split_kv`` over dense bfloat16; a rung of the ladder;
``fast/FORMAT`` or ``portable/FORMAT``, our two kernels over a store of that preset; ``quantize/FORMAT``, storing the
context rather than reading it; or ``empty3``, three launches that do nothing. FORMAT is a preset, alone or with
settings to change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from evals import speed_ladder
from evals.common import parse_settings
from evals.speed_kernels import empty_launches, split_kv
from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.layers import TurboQuantLayer
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import AttendOptions, KVView
from hf_turboquant.ops import triton as kernels
from hf_turboquant.presets import resolve_config

SHAPES: Final[Mapping[str, tuple[int, int, int]]] = MappingProxyType(
    {
        "llama-3.1-8b": (32, 8, 128),
        "qwen2.5-7b": (28, 4, 128),
        "gemma-3-4b": (8, 4, 256),
        "smollm2-135m": (9, 3, 64),
    }
)
"""Query heads, KV heads and head_dim by model, the most important first."""

DENSE: Final = ("sdpa_flash", "sdpa_cudnn", "split_kv")
UNIFORM_2_BIT: Final = "k2v2:key_split=none"
FORMATS: Final = ("k4v4", "k3v2", "k2v2")
ALL: Final = (
    *DENSE,
    *(f"fast/{name}" for name in FORMATS),
    f"fast/{UNIFORM_2_BIT}",
    *(f"portable/{name}" for name in (*FORMATS, speed_ladder.FORMAT)),
    *speed_ladder.RUNGS,
    "empty3",
    "quantize/k4v4",
)
FEW: Final = (*DENSE, *(f"fast/{name}" for name in FORMATS), "portable/k4v4")

DISTINCT_BLOCKS: Final = 8
"""Blocks that are quantized; longer contexts repeat them, since a kernel does the same for any codes."""

MEMORY_SHARE: Final = 0.9
"""Part of the free memory that a row may take."""


class UnsuitableError(Exception):
    """A contender cannot run a case here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One row of results.

    Attributes:
        shape: A name of :data:`SHAPES`.
        batch: Sequences.
        context: Tokens in the cache.
        contender: Who computes.
    """

    shape: str
    batch: int
    context: int
    contender: str

    @property
    def id(self) -> str:
        """Name of the row, unique."""
        return f"{self.shape}/b{self.batch}/{self.context}/{self.contender}"

    @property
    def elements(self) -> int:
        """Coordinates of the keys, as many as of the values."""
        _, heads, head_dim = SHAPES[self.shape]
        return self.batch * heads * self.context * head_dim

    @property
    def bytes_needed(self) -> int:
        """Upper bound of the bytes the step takes, its input included."""
        if self.contender in DENSE:
            return 4 * self.elements
        if self.contender in ("v1", "v4"):
            return speed_ladder.BYTES_PER_ELEMENT * self.elements
        if self.contender.startswith("quantize/"):
            return 6 * self.elements
        return 0 if self.contender == "empty3" else 2 * self.elements


@dataclass(frozen=True)
class Step:
    """A decode step ready to run.

    Attributes:
        run: Computes it once, on the current stream, without waiting.
        nbytes: Bytes it must read at least, and write where it writes more than its result.
    """

    run: Callable[[], object]
    nbytes: int


def prepare(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Step:
    """Make the input of a case and return its step.

    Raises:
        UnsuitableError: The contender cannot serve the case.
    """
    name, _, spec = case.contender.partition("/")
    if name == "empty3":
        return Step(functools.partial(empty_launches, torch.zeros(1, device=device), 3), 0)
    query = _random(case, SHAPES[case.shape][0], 1, device, dtype)
    if case.contender in DENSE:
        keys, values = (_random(case, SHAPES[case.shape][1], case.context, device, dtype) for _ in range(2))
        step = functools.partial(_DENSE_STEPS[case.contender], query, keys, values)
        return Step(step, 2 * keys.numel() * keys.element_size())
    if name in speed_ladder.RUNGS:
        store = ladder_case(case, device, dtype)
        return Step(functools.partial(speed_ladder.RUNGS[name], query, store), store.bytes_read(name))
    view = stored_view(case, spec, device, dtype)
    if name == "quantize":
        return _quantize_step(case, view, device, dtype)
    return _own_step(name, query, view)


def _own_step(name: str, query: torch.Tensor, view: KVView) -> Step:
    options = AttendOptions(query.shape[-1] ** -0.5)
    exact = 2 * view.batch * view.num_kv_heads * (view.num_sinks + view.tail_len) * query.shape[-1]
    nbytes = sum(arena.numel() for arena in view.arenas) + exact * query.element_size()
    if name == "portable":
        return Step(functools.partial(kernels.attend_portable, query, view, options), nbytes)
    obstacle = kernels.fast_obstacle(query, view, options)
    if obstacle:
        raise UnsuitableError(obstacle)
    return Step(functools.partial(kernels.attend, query, view, options), nbytes)


def _quantize_step(case: Case, view: KVView, device: torch.device, dtype: torch.dtype) -> Step:
    if not view.num_blocks:
        raise UnsuitableError("the context holds no whole block")
    tokens = view.num_blocks * BLOCK_TOKENS
    dense = [_random(case, SHAPES[case.shape][1], tokens, device, dtype) for _ in range(2)]
    step = functools.partial(kernels.quantize, *dense, view.arenas[0], view.keys, view.values, check=False)
    return Step(step, 2 * dense[0].numel() * dense[0].element_size() + view.arenas[0].numel())


# input


def stored_view(case: Case, spec: str, device: torch.device, dtype: torch.dtype) -> KVView:
    """Return a layer of a preset after a prompt of the context: its few distinct blocks are repeated to the length."""
    _, heads, _ = SHAPES[case.shape]
    config = settings(spec)
    blocks = max(case.context - config.sink_tokens - config.residual_window, 0) // BLOCK_TOKENS
    few = min(blocks, DISTINCT_BLOCKS)
    tokens = case.context - (blocks - few) * BLOCK_TOKENS
    layer = TurboQuantLayer(config, 0)
    layer.update(*(_random(case, heads, tokens, device, dtype) for _ in range(2)))
    assert layer.store is not None
    view = layer.store.view()
    if blocks == few:
        return view
    index = torch.arange(blocks, device=device) % few
    return replace(view, arenas=(view.arenas[0][index],), num_blocks=blocks, memo={})


def ladder_case(case: Case, device: torch.device, dtype: torch.dtype) -> speed_ladder.LadderStore:
    """Return what the ladder keeps of the context."""
    few = replace(case, context=min(case.context, (DISTINCT_BLOCKS + 2) * BLOCK_TOKENS))
    view = stored_view(few, speed_ladder.FORMAT, device, dtype)
    if not view.num_blocks:
        raise UnsuitableError("the context holds no whole block")
    store = speed_ladder.ladder_store(view)
    return store.repeat(case.context - store.recent_keys.shape[2])


def settings(spec: str) -> TurboQuantConfig:
    """Return the configuration of a preset, alone or with settings to change: ``k2v2:key_split=none``."""
    name, _, changes = spec.partition(":")
    return resolve_config(name, **parse_settings(changes))


def _random(case: Case, heads: int, tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(case.batch, heads, tokens, SHAPES[case.shape][2], device=device, dtype=dtype)


def _sdpa(backend: SDPBackend, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True)


_DENSE_STEPS: Final[Mapping[str, Callable[..., torch.Tensor]]] = MappingProxyType(
    {
        "sdpa_flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        "split_kv": split_kv,
    }
)


# which rows there are

CONTEXTS: Final = (4096, 32768, 131072, 1024, 16384, 524288)
"""Tokens, the most important first."""

MAIN_CONTEXTS: Final = 3
BATCHES: Final = (1, 8, 32)


def grid() -> list[Case]:
    """Return all rows, the most important first: Llama at batch 1 and 4k, 32k, 128k with every contender."""
    ranked = sorted(_ranked_points(), key=lambda point: point[0])
    return [
        Case(shape, batch, context, contender)
        for _, shape, batch, context in ranked
        for contender in (ALL if (shape, batch) == (next(iter(SHAPES)), 1) else FEW)
    ]


def _ranked_points() -> Iterator[tuple[int, str, int, int]]:
    for shape_rank, shape in enumerate(SHAPES):
        for batch_rank, batch in enumerate(BATCHES):
            for place, context in enumerate(CONTEXTS):
                yield shape_rank + batch_rank + (place >= MAIN_CONTEXTS), shape, batch, context
