"""The layer of a cache: transformers' contract on one side, the store on the other."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import CacheStateError, ConfigError, ShapeError, ValueRangeError
from hf_turboquant.handle import KVHandle, PathRecorder, handle_pair
from hf_turboquant.offload import OffloadedBlocks
from hf_turboquant.ops import Backend, KVView
from hf_turboquant.quantizers import CodecPlan
from hf_turboquant.shared_rows import SharedRows
from hf_turboquant.store import KVStore


@lru_cache(maxsize=1)
def crops_to_length() -> bool:
    """Whether this transformers calls ``crop`` with the length to keep, as versions before 5.17 do."""
    return "max_length" in inspect.signature(DynamicLayer.crop).parameters


class TurboQuantLayer(CacheLayerMixin):
    """Compressed full-attention layer.

    Args:
        config: What to build when the first tokens arrive.
        layer_idx: Index of the layer in its model, for messages.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = True

    store: KVStore | None
    device: torch.device | None
    dtype: torch.dtype | None
    _view: KVView | None

    def __init__(self, config: TurboQuantConfig, layer_idx: int) -> None:
        self.config = config
        self.layer_idx = layer_idx
        self.backend = Backend(config.backend)
        self.recorder = PathRecorder(layer_idx)
        self.device = self.dtype = None
        self._forget()

    def __repr__(self) -> str:
        """Name the layer and what it holds."""
        return f"{type(self).__name__}(layer_idx={self.layer_idx}, tokens={self.get_seq_length()})"

    @property
    def keys(self) -> KVHandle | None:  # type: ignore[override]
        """All keys as a lazy tensor, or None before the first tokens."""
        return self._stored("keys")

    @property
    def values(self) -> KVHandle | None:  # type: ignore[override]
        """All values as a lazy tensor, or None before the first tokens."""
        return self._stored("values")

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; the attribute is missing before the first tokens, which transformers asks for."""
        if self.store is None:
            raise AttributeError("batch_size")
        return self.store.batch

    @property
    def visible_tokens(self) -> int:
        """Tokens stored that the next query sees."""
        return self.get_seq_length()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Size the store from the first keys and values seen."""
        try:
            plan = CodecPlan(self.config, self.layer_idx, key_states, value_states)
        except ConfigError as error:
            raise ConfigError(f"layer {self.layer_idx}: {error}") from error
        self.store = self._new_store(plan, key_states, value_states)
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens and return all keys and values for the attention of this forward.

        Args:
            key_states: ``(batch, num_kv_heads, new tokens, head_dim)``.
            value_states: The same for values.
            *args: Ignored; transformers passes its own bookkeeping here.
            **kwargs: Ignored, likewise.

        Returns:
            Lazy tensors of full length; at a prompt, the tensors given.

        Raises:
            ShapeError: Geometry, dtype or device differ from the tokens already stored.
            ValueRangeError: A block that must be quantized now holds NaN, infinity, or a norm too large. The
                layer is as it was before the call.
        """
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        held, new = self.get_seq_length(), key_states.shape[-2]
        visible = (self.visible_tokens if self.is_sliding else held) + new
        grows_graph = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        past = self._dense_pair() if grows_graph and held else None
        try:
            view = store.append(key_states, value_states)
        except ShapeError as error:
            raise ShapeError(f"layer {self.layer_idx}: {error}") from error
        except ValueRangeError as error:
            raise ValueRangeError(f"layer {self.layer_idx}: {error}") from error
        self._view = None
        self._count_new(new)
        if not held:
            self.recorder.dense()
            return key_states, value_states
        if past is not None:
            return torch.cat([past[0], key_states], dim=2), torch.cat([past[1], value_states], dim=2)
        return handle_pair(view, self.backend, self.recorder, visible)

    def get_seq_length(self) -> int:
        """Return the tokens stored."""
        return 0 if self.store is None else self.store.seq_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys the next ``query_length`` queries will see."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the layer has no maximum length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return what :meth:`get_max_length` returns; its name in older transformers."""
        return self.get_max_length()

    def reset(self) -> None:
        """Forget all tokens, and their geometry."""
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens; nothing is quantized again.

        In versions of transformers whose own caches take a length here, 0 and above mean the tokens to keep.

        Args:
            tokens_to_remove: 0, or minus the number of tokens to remove.

        Raises:
            CacheStateError: Positive, or more tokens than stored.
        """
        length = self.get_seq_length()
        if tokens_to_remove >= 0 and crops_to_length():
            tokens_to_remove = min(tokens_to_remove - length, 0)
        if tokens_to_remove > 0:
            raise CacheStateError(
                f"crop takes minus the number of tokens to remove, or 0, got {tokens_to_remove}; to keep n tokens pass "
                "n - cache.get_seq_length()"
            )
        if self.store is not None:
            self._remove_newest(-tokens_to_remove)
            self._view = None
            self._shared_rows.limit(self.store.num_blocks)
            self._offloaded.limit(self.store.num_blocks)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence ``i`` continue the old sequence ``beam_idx[i]``."""
        self.reorder_rows(beam_idx.tolist())

    def reorder_rows(self, rows: list[int]) -> None:
        """Let sequence ``i`` continue the old sequence ``rows[i]``; blocks equal in both stay where they are."""
        store = self.store
        if store is None or not self.get_seq_length():
            return
        if len(rows) != store.batch:
            TurboQuantLayer._select(self, torch.tensor(rows))
            return
        self._view = None
        if self._shared_rows.reorder(store, rows) and not self._offloaded.away:
            self._offloaded.limit(0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times in place."""
        if self.store is not None:
            self._select(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences ``indices`` (a boolean mask over the batch is accepted)."""
        if self.store is not None:
            self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Leave the packed blocks on the CPU alone; sinks and exact window stay."""
        if self.store is not None:
            self._view = None
            self._offloaded.send(self.store)

    def prefetch(self) -> None:
        """Bring the packed blocks back to the device of the layer."""
        if self.store is not None and self.device is not None:
            self._view = None
            self._offloaded.fetch(self.store, self.device)

    # what a sliding window changes

    def _new_store(self, plan: CodecPlan, key_states: torch.Tensor, value_states: torch.Tensor) -> KVStore:
        options = self._store_options(plan, key_states, value_states)
        return KVStore(**options, sink_tokens=self.config.sink_tokens)

    def _store_options(self, plan: CodecPlan, key_states: torch.Tensor, value_states: torch.Tensor) -> dict[str, Any]:
        """Return what the stores of all kinds of layers take."""
        return {
            "keys": plan.initial.keys,
            "values": plan.initial.values,
            "like_keys": key_states,
            "like_values": value_states,
            "residual_window": self.config.residual_window,
            "backend": self.config.backend,
            "choose": plan.choose,
        }

    def _count_new(self, tokens: int) -> None:
        """Take note of tokens just stored."""

    def _remove_newest(self, tokens: int) -> None:
        assert self.store is not None
        self.store.crop(tokens)

    # inner helpers

    def _forget(self) -> None:
        self.store = None
        self.is_initialized = False
        self._view = None
        self._shared_rows = SharedRows()
        self._offloaded = OffloadedBlocks()

    def _select(self, indices: torch.Tensor) -> None:
        assert self.store is not None
        self.store.select_batch(indices)
        self._view = None
        self._shared_rows = SharedRows()
        self._offloaded.adopt(self.store)

    def _stored(self, which: str) -> KVHandle | None:
        """Return all stored tokens as a handle; keys and values share one view, so that they can be attended over."""
        if self.store is None:
            return None
        if self._view is None:
            self._view = self.store.view()
        keys, values = handle_pair(self._view, self.backend, self.recorder, self.visible_tokens)
        return keys if which == "keys" else values

    def _dense_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._stored("keys"), self._stored("values")
        assert keys is not None
        assert values is not None
        self.recorder.materialized("autograd")
        return keys.materialize(), values.materialize()


def select_states(layer: Any, indices: torch.Tensor) -> None:
    """Keep, reorder or repeat the sequences of the linear-attention states of a layer of transformers'."""
    for states in (layer.conv_states, layer.recurrent_states):
        for name, state in states.items():
            if state is not None:
                states[name] = state.index_select(0, indices.to(state.device))
