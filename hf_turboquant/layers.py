"""The layer of a cache: transformers' contract on one side, the store on the other."""

from __future__ import annotations

import inspect
import warnings
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import CacheStateError, ConfigError, ValueRangeError
from hf_turboquant.handle import KVHandle, PathRecorder
from hf_turboquant.ops import Backend, KVView
from hf_turboquant.quantizers import build_key_codec, build_value_codec
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

    def __init__(self, config: TurboQuantConfig, layer_idx: int) -> None:
        self.config = config
        self.layer_idx = layer_idx
        self.backend = Backend(config.backend)
        self.store: KVStore | None = None
        self.recorder = PathRecorder(self._warn_materialized)
        self.is_initialized = False
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        """Name the layer and what it holds."""
        return f"TurboQuantLayer(layer_idx={self.layer_idx}, tokens={self.get_seq_length()})"

    @property
    def keys(self) -> KVHandle | None:
        """All keys as a lazy tensor, or None before the first tokens."""
        return self._handle("keys")

    @property
    def values(self) -> KVHandle | None:
        """All values as a lazy tensor, or None before the first tokens."""
        return self._handle("values")

    @property
    def batch_size(self) -> int:
        """Sequences in the batch, -1 before the first tokens."""
        return -1 if self.store is None else self.store.batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Size the store from the first keys and values seen."""
        config, device = self.config, key_states.device
        try:
            keys = build_key_codec(config, key_states.shape[-1], key_states.dtype, device)
            values = build_value_codec(config, value_states.shape[-1], value_states.dtype, device)
        except ConfigError as error:
            raise ConfigError(f"layer {self.layer_idx}: {error}") from error
        self.store = KVStore(
            keys,
            values,
            like_keys=key_states,
            like_values=value_states,
            sink_tokens=config.sink_tokens,
            residual_window=config.residual_window,
            backend=config.backend,
        )
        self.device, self.dtype = device, key_states.dtype
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
        grows_graph = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        past = self._dense_pair() if grows_graph and store.seq_len else None
        empty = store.seq_len == 0
        try:
            view = store.append(key_states, value_states)
        except ValueRangeError as error:
            raise ValueRangeError(f"layer {self.layer_idx}: {error}") from error
        if empty:
            self.recorder.dense()
            return key_states, value_states
        if past is not None:
            return torch.cat([past[0], key_states], dim=2), torch.cat([past[1], value_states], dim=2)
        return self._handle_of(view, "keys"), self._handle_of(view, "values")

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
        """Return -1; the name of :meth:`get_max_length` in older transformers."""
        return -1

    def reset(self) -> None:
        """Forget all tokens, and their geometry."""
        self.store = None
        self.is_initialized = False

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
            self.store.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence ``i`` continue the old sequence ``beam_idx[i]``."""
        if self.store is not None:
            self.store.select_batch(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times in place."""
        if self.store is not None:
            rows = torch.arange(self.store.batch, device=self.device)
            self.store.select_batch(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences ``indices`` (a boolean mask over the batch is accepted)."""
        if self.store is not None:
            if indices.dtype == torch.bool:
                indices = indices.nonzero().flatten()
            self.store.select_batch(indices)

    def offload(self) -> None:
        """Move the stored tokens to the CPU."""
        if self.store is not None:
            self.store.to(torch.device("cpu"), non_blocking=True)

    def prefetch(self) -> None:
        """Move the stored tokens back to the device of the layer."""
        if self.store is not None and self.device is not None:
            self.store.to(self.device, non_blocking=True)

    def _handle(self, which: str) -> KVHandle | None:
        return None if self.store is None else self._handle_of(self.store.view(), which)

    def _handle_of(self, view: KVView, which: str) -> KVHandle:
        exact = view.tail_keys if which == "keys" else view.tail_values
        shape = (exact.shape[0], exact.shape[1], view.seq_len, exact.shape[3])
        return KVHandle(view, which, self.backend, self.recorder, shape)

    def _dense_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._handle("keys"), self._handle("values")
        assert keys is not None and values is not None
        self.recorder.materialized("autograd")
        return keys.materialize(), values.materialize()

    def _warn_materialized(self, reason: str) -> None:
        warnings.warn(
            f"layer {self.layer_idx}: dense keys or values were rebuilt for {reason}; the result is right, but slower "
            "and larger than attention on the compressed store. See cache.path_report()",
            stacklevel=2,
        )
