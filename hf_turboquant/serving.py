"""Continuous batching with packed pages: what ``generate_batch()`` keeps of many requests at once. Experimental.

    with patch_serving(model, "k4v4") as serving:
        results = model.generate_batch(prompts, generation_config=settings)
        serving.report()

Needs transformers 5.24 or newer and the sdpa or eager attention. Pages hold 128 tokens whatever ``page_size`` says;
sliding-window layers keep transformers' own pages. Every request has one or two pages of exact tokens besides
(``residual_window=0``: one), so requests of a few hundred tokens save nothing. Not served: flash attention, CUDA
graphs, ``torch.compile``, asynchronous batches and offloading to the CPU, and settings that differ between layers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from transformers import PreTrainedModel

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import BackendUnavailableError, ConfigError, UnsupportedModelError
from hf_turboquant.generation import PatchedMethod
from hf_turboquant.layer_choice import settings_for
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.paged_store import check_pages
from hf_turboquant.presets import resolve_config

_METHOD: Final = "init_continuous_batching"
_FULL_ATTENTION: Final = "full_attention"
_ATTENTIONS: Final = ("sdpa", "eager", "paged|eager")
_NOT_GIVEN: Final = object()

# the engine finds its allocators in a table of its module, which is ours only while one engine is made
_TABLE_LOCK: Final = threading.Lock()


@dataclass(frozen=True)
class ServingReport:
    """Bytes and routes of the packed pages of all engines made so far.

    Attributes:
        layers: Layers with packed pages, in the engine made last.
        bytes_per_token: Bytes of a token in its packed pages, over these layers.
        dense_bytes_per_token: Bytes of the same token in transformers' own pages.
        exact_bytes: The most bytes one engine held beside its pages: newest tokens, and the first ones.
        compressed_calls: Attentions that read packed pages.
        materialized_calls: Dense tensors rebuilt because an attention could not.
    """

    layers: int
    bytes_per_token: float
    dense_bytes_per_token: float
    exact_bytes: int
    compressed_calls: int
    materialized_calls: int

    @property
    def ratio(self) -> float:
        """How many tokens a page holds for one in a page of transformers' own of the same bytes."""
        return self.dense_bytes_per_token / self.bytes_per_token if self.bytes_per_token else 1.0

    def __str__(self) -> str:
        """Say it in a line."""
        return (
            f"{self.layers} layers: {self.bytes_per_token:.0f} bytes per token in pages where a dense cache takes "
            f"{self.dense_bytes_per_token:.0f} ({self.ratio:.2f}x smaller), {self.exact_bytes} bytes beside them; "
            f"{self.compressed_calls} attentions read packed pages, {self.materialized_calls} rebuilt dense tensors"
        )


class PatchedServing(PatchedMethod):
    """What :func:`patch_serving` returns; as a context manager it undoes the change on exit.

    Engines made before that keep their pages.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, _METHOD)
        self.engines: list[Any] = []

    def __enter__(self) -> PatchedServing:
        """Return this object."""
        return self

    def report(self) -> ServingReport:
        """Say what pages took and how they were read, over all engines made since the patch."""
        last = self.engines[-1] if self.engines else None
        recorders = [recorder for engine in self.engines for recorder in engine.recorders.values()]
        return ServingReport(
            layers=last.layers if last else 0,
            bytes_per_token=last.bytes_per_token if last else 0.0,
            dense_bytes_per_token=last.dense_bytes_per_token if last else 0.0,
            exact_bytes=max((engine.exact_bytes for engine in self.engines), default=0),
            compressed_calls=sum(recorder.compressed_calls for recorder in recorders),
            materialized_calls=sum(sum(recorder.materialized_calls.values()) for recorder in recorders),
        )


class _OfThisThread:
    """Stands for a class of allocators: ours in the thread that made this, transformers' own in any other."""

    def __init__(self, ours: Callable[..., Any], stock: type) -> None:
        self._ours, self._stock, self._owner = ours, stock, threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        make = self._ours if threading.get_ident() == self._owner else self._stock
        return make(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def patch_serving(
    model: PreTrainedModel, config: TurboQuantConfig | str | None = None, **overrides: Any
) -> PatchedServing:
    """Let continuous batching of a model keep full-attention layers in packed pages. Experimental.

    Nothing outside the model is changed for longer than an engine takes to be made.

    Args:
        model: A transformers model. Changed in place.
        config: Preset name or :class:`TurboQuantConfig`; None for the default preset.
        **overrides: Fields of :class:`TurboQuantConfig` to change.

    Returns:
        A context manager that undoes the change, with a ``report()``.

    Raises:
        BackendUnavailableError: This transformers has no pages that can be replaced; 5.24 has.
        ConfigError: The preset or a field is unknown or not valid, or differs between layers.
        UnsupportedModelError: The model has no continuous batching, or no full-attention layer, or an attention that
            cannot read packed pages.
    """
    try:
        from hf_turboquant import paged_allocator  # what it imports is new in transformers 5.24
    except ImportError as error:
        raise BackendUnavailableError(
            f"serving from packed pages needs transformers 5.24 or newer with its cache allocators: {error}. Update "
            "transformers, or use model.generate() with a TurboQuantCache"
        ) from error
    from transformers.generation.continuous_batching import cache as paged

    settings = resolve_config(config, **overrides)
    check_pages(settings)
    _check_model(model, paged)
    settings = settings_for(settings, model.config.get_text_config(decoder=True))
    inner = getattr(model, _METHOD)
    inner = getattr(inner, "turboquant_inner", inner)
    patched = PatchedServing(model)

    def init_compressed(
        generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        manager = inner(generation_config, _engine_config(continuous_batching_config), workload_hints)
        make_processor = manager._create_batch_processor

        def make_with_packed_pages() -> Any:
            statistics = paged_allocator.PageStatistics()
            packed = partial(paged_allocator.PackedAllocator, settings=settings, statistics=statistics)
            with _TABLE_LOCK:
                stock = paged.ATTN_TYPE_TO_ALLOCATOR[_FULL_ATTENTION]
                paged.ATTN_TYPE_TO_ALLOCATOR[_FULL_ATTENTION] = _OfThisThread(packed, stock)  # type: ignore[assignment]
                try:
                    processor = make_processor()
                finally:
                    paged.ATTN_TYPE_TO_ALLOCATOR[_FULL_ATTENTION] = stock
            if statistics.layers:
                patched.engines.append(statistics)
            return processor

        manager._create_batch_processor = make_with_packed_pages
        return manager

    init_compressed.turboquant_inner = inner  # type: ignore[attr-defined]
    model.__dict__[_METHOD] = init_compressed
    return patched


def _check_model(model: PreTrainedModel, paged: Any) -> None:
    """Refuse a model that continuous batching, or packed pages, cannot serve."""
    if not hasattr(model, _METHOD):
        raise UnsupportedModelError(
            f"model must have continuous batching, got {type(model).__name__}; load it with a class such as "
            "AutoModelForCausalLM"
        )
    text = model.config.get_text_config(decoder=True)
    attention = text._attn_implementation
    if attention not in _ATTENTIONS:
        raise UnsupportedModelError(
            f"the attention must be one of {_ATTENTIONS} to read packed pages, got {attention!r}; call "
            "model.set_attn_implementation('sdpa'), or hf_turboquant.disable(model) if it was enabled"
        )
    try:
        kinds = paged.group_layers_by_attn_type(text)
    except ValueError as error:
        raise UnsupportedModelError(f"continuous batching cannot serve this model: {error}") from error
    if _FULL_ATTENTION not in kinds:
        raise UnsupportedModelError(
            f"model must have full-attention layers for packed pages, got {sorted(kinds)}; it is served as it is"
        )


def _engine_config(given: Any) -> Any:
    """Return the settings of an engine that reads packed pages, without changing those given.

    Raises:
        ConfigError: They ask for what packed pages cannot do.
    """
    from transformers import ContinuousBatchingConfig

    config = copy.copy(given) if given is not None else ContinuousBatchingConfig()
    graphs = config.use_cuda_graph
    refused = {
        "use_cuda_graph": any(graphs) if isinstance(graphs, tuple) else bool(graphs),
        "use_async_batching": bool(config.use_async_batching),
        "varlen_compile_config": config.varlen_compile_config is not None,
        "decode_compile_config": config.decode_compile_config is not None,
        "default_compile_level": bool(config.default_compile_level),
        "cpu_offload_space": bool(config.cpu_offload_space),
    }
    asked = [name for name, wanted in refused.items() if wanted]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)} must not be set for packed pages, which are read and written by Python code in every "
            "step; leave it out"
        )
    config.page_size = BLOCK_TOKENS
    config.use_cuda_graph = config.use_async_batching = config.auto_switch_to_flash = False
    config.max_blocks_per_request = 0
    return config
