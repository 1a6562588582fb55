"""Layers of a cache of fixed size, whose decode step can be compiled and captured in a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import StaticSlidingWindowLayer

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import CacheStateError, UnsupportedModelError
from hf_turboquant.handle import PathRecorder
from hf_turboquant.layers import TurboQuantLayer
from hf_turboquant.ops import AttendOptions
from hf_turboquant.ops.static_ops import static_append, static_attend
from hf_turboquant.ops.static_spec import Count
from hf_turboquant.quantizers import CodecPlan
from hf_turboquant.static_store import StaticStore
from hf_turboquant.store import KVStore

ATTENTION_NAME: Final = "turboquant"
"""Name under which attention and mask function are registered."""

_log = logging.getLogger("hf_turboquant")

_eager_update: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compiler.disable(TurboQuantLayer.update)
"""A compiled step that cannot use the ops leaves the graph here, and is served like an eager one."""


class _Handover:
    """What the last traced ``update`` leaves for the attention that follows it.

    Dynamo traces both, and sees that the attention reads what ``update`` wrote: no lookup is left in the graph.
    """

    def __init__(self) -> None:
        self.store: StaticStore | None = None
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None


_HANDOVER: Final = _Handover()


class StaticRecorder(PathRecorder):
    """Counter of a layer of fixed size, by which the attention knows a handle of such a layer.

    Args:
        layer_idx: As for :class:`PathRecorder`.
        max_cache_len: Columns of a mask that was made for a step that may be compiled.
    """

    def __init__(self, layer_idx: int, max_cache_len: int) -> None:
        super().__init__(layer_idx)
        self.max_cache_len = max_cache_len


class TurboQuantStaticLayer(TurboQuantLayer):
    """Compressed full-attention layer with room for a fixed number of tokens.

    Args:
        config: What to build when the first tokens arrive.
        layer_idx: Index of the layer in its model, for messages.
        max_cache_len: Tokens to make room for.
        model_config: Configuration of the text model, which names its attention.
    """

    def __init__(
        self, config: TurboQuantConfig, layer_idx: int, max_cache_len: int, model_config: PreTrainedConfig
    ) -> None:
        self.max_cache_len = max_cache_len
        self._model_config = model_config
        super().__init__(config, layer_idx)
        self.recorder = StaticRecorder(layer_idx, max_cache_len)

    @property
    def store(self) -> StaticStore | None:
        """The tokens, with counts as the device has them."""
        if self._static is not None:
            if self._static.stale:
                self._view = None
            self._static.synchronize()
        return self._static

    @store.setter
    def store(self, store: KVStore | None) -> None:
        assert store is None or isinstance(store, StaticStore)
        self._static = store

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether ``generate()`` may compile a step: the model must use the registered attention."""
        return self.ready and is_registered(self._model_config)

    @property
    def ready(self) -> bool:
        """Whether a step may be compiled as far as this layer goes."""
        store = self._static
        return store is None or store.compileable or not store.allocated

    @property
    def full(self) -> bool:
        """Whether the host knows that there is no room for another token."""
        store = self._static
        return store is not None and not store.stale and store.seq_len >= self.max_cache_len

    def before_step(self) -> None:
        """Raise if a compiled step would find no room."""
        if self._static is not None:
            self._static.before_step()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, registered: bool = True, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens; see :meth:`TurboQuantLayer.update`.

        A step that is being compiled gets back the tensors it gave, and the registered attention finds the store.

        Args:
            key_states: ``(batch, num_kv_heads, new tokens, head_dim)``.
            value_states: The same for values.
            *args: Ignored.
            registered: Whether the registered attention follows. The cache says so once for all layers: what a traced
                step reads of each of them is checked again before every step.
            **kwargs: Ignored.

        Raises:
            CacheStateError: There is no room for them. Nothing was stored.
            UnsupportedModelError: The attention of the layer before did not read what a traced step stored.
        """
        if not torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        store = self._static
        differentiable = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if not registered or store is None or key_states.shape[2] != 1 or differentiable or not store.compileable:
            return _eager_update(self, key_states, value_states)
        if _HANDOVER.store is not None:
            raise UnsupportedModelError(
                f"layer {self.layer_idx}: the attention of the layer before did not read the cache, as a model that "
                "computes attention by itself; pass disable_compile=True to generate(), or leave max_cache_len out"
            )
        assert store.state is not None
        static_append(key_states, value_states, store.state, store.tables, store.spec)
        store.stale = True
        _HANDOVER.store, _HANDOVER.keys, _HANDOVER.values = store, key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the tokens stored; a tensor on the device while a step is being compiled."""
        if torch.compiler.is_compiling() and self._static is not None and self._static.allocated:
            return self.length_on_device  # type: ignore[return-value]
        return super().get_seq_length()

    @property
    def counts_on_device(self) -> bool:
        """Whether the next step may be compiled, and there are tokens."""
        return self._static is not None and self._static.allocated and self.is_compileable

    @property
    def length_on_device(self) -> torch.Tensor:
        """The tokens stored, int32 without dimensions: no need to wait for the device."""
        store = self._static
        assert store is not None
        if not torch.compiler.is_compiling():
            return store.buffers[0][Count.TOKENS]
        assert store.state is not None
        # a graph cannot take a tensor it changes twice, under two dtypes: the bytes of one int32, lowest first
        length, *rest = store.state[4 * Count.TOKENS : 4 * Count.TOKENS + 4].to(torch.int32).unbind()
        for power, byte in enumerate(rest, start=1):
            length = length + byte * 256**power
        return length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys of a mask: of all there is room for, for a step that may be compiled."""
        if query_length == 1 and self._static is not None and self.is_compileable:
            return self.max_cache_len, 0
        return super().get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """Return the tokens there is room for."""
        return self.max_cache_len

    def reorder_rows(self, rows: list[int]) -> None:
        """Let sequence ``i`` continue the old sequence ``rows[i]``."""
        if self.store is not None and rows != list(range(self.store.batch)):
            self._select(torch.tensor(rows))

    def adopt(self, other: TurboQuantLayer) -> None:
        """Take over the tokens of a layer that grows, if it has any. This one must be new."""
        if other.store is None:
            return
        keys, values = other.store.tail_keys, other.store.tail_values
        self.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        assert self._static is not None
        self._static.adopt(other.store)

    def offload(self) -> None:
        """Do nothing: the memory of a compiled step stays where it is."""

    def prefetch(self) -> None:
        """Do nothing: see :meth:`offload`."""

    def _new_store(self, plan: CodecPlan, key_states: torch.Tensor, value_states: torch.Tensor) -> KVStore:
        options = self._store_options(plan, key_states, value_states)
        return StaticStore(**options, sink_tokens=self.config.sink_tokens, max_cache_len=self.max_cache_len)


def is_registered(model_config: PreTrainedConfig) -> bool:
    """Whether a model uses the registered attention."""
    return bool(model_config._attn_implementation == ATTENTION_NAME)


def may_compile(layers: Sequence[Any], model_config: PreTrainedConfig) -> bool:
    """Whether ``generate()`` may compile the next step of a cache of fixed size.

    It asks more than once for every token, so that what is common to all layers is looked up once.

    Args:
        layers: All of the cache.
        model_config: Configuration of the text model.

    Raises:
        CacheStateError: Compiled steps have filled the cache.
    """
    own = [layer for layer in layers if isinstance(layer, TurboQuantStaticLayer)]
    tracing = torch.compiler.is_compiling()
    if own and not tracing:
        own[0].before_step()
        if own[0].full:
            # a step that is not compiled raises before it stores anything; the flag a graph is guarded by stays
            return False
    if own and not is_registered(model_config):
        if not tracing:
            _say_not_enabled()
        return False
    return all(layer.ready if isinstance(layer, TurboQuantStaticLayer) else layer.is_compileable for layer in layers)


@lru_cache(maxsize=1)
def _say_not_enabled() -> None:
    """Log it once in a process."""
    _log.warning(
        "decode steps of a cache with max_cache_len are compiled only while the model uses the registered attention: "
        "call hf_turboquant.enable(model). Steps work all the same, as they do without max_cache_len"
    )


def check_windows(layers: Sequence[Any], operation: str) -> None:
    """Raise if there are sliding windows of fixed size, which an operation would leave wrong or not reach.

    Args:
        layers: All of a cache.
        operation: Its name, for the message; ``crop`` is right until a window has dropped a token.

    Raises:
        CacheStateError: There are. Nothing was changed.
    """
    for index, layer in enumerate(layers):
        if not isinstance(layer, StaticSlidingWindowLayer) or not layer.is_initialized:
            continue
        if operation != "crop" or int(layer.get_seq_length()) > layer.max_cache_len:
            raise CacheStateError(
                f"{operation} must not be used on layer {index}, a sliding window of fixed size ({layer.max_cache_len} "
                "tokens); leave max_cache_len out"
            )


def take_store(key: torch.Tensor, value: torch.Tensor) -> StaticStore | None:
    """Return the store that the ``update`` before this attention appended to in a graph; None when there was none.

    Raises:
        UnsupportedModelError: The model changed keys or values on their way from the cache to the attention.
    """
    store = _HANDOVER.store
    if store is None:
        return None
    untouched = key is _HANDOVER.keys and value is _HANDOVER.values
    _HANDOVER.store = _HANDOVER.keys = _HANDOVER.values = None
    if not untouched:
        raise UnsupportedModelError(
            "a model that changes keys or values between the cache and the attention cannot have its steps compiled; "
            "pass disable_compile=True to generate(), or leave max_cache_len out"
        )
    return store


def attend_store(query: torch.Tensor, store: StaticStore, options: AttendOptions) -> torch.Tensor:
    """Attend over a store in a graph.

    Args:
        query: ``(batch, num_q_heads, 1, head_dim)``.
        store: What :func:`take_store` returned.
        options: Scaling, mask and their kin.

    Returns:
        ``(batch, num_q_heads, 1, value head_dim)``.

    Raises:
        UnsupportedModelError: The mask is not as long as the store.
    """
    if options.mask is not None and options.mask.shape[-1] != store.max_cache_len:
        raise UnsupportedModelError(
            f"a mask of a compiled step must have {store.max_cache_len} columns, one for every token there is room "
            f"for, got {options.mask.shape[-1]}; pass disable_compile=True to generate()"
        )
    assert store.state is not None
    out: torch.Tensor = static_attend(
        query,
        store.state,
        store.tables,
        options.mask,
        options.sink_logits,
        store.spec,
        options.scaling,
        options.softcap,
    )
    return out
