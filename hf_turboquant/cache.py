"""The cache a user passes to ``generate()``."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import CacheStateError, ConfigError
from hf_turboquant.layer_choice import compressed_layer, settings_for, static_layers
from hf_turboquant.layers import TurboQuantLayer, select_states
from hf_turboquant.offload import OffloadSchedule
from hf_turboquant.ops import VectorTables
from hf_turboquant.persist import compare_models, describe_model, read_cache, restore_layers, write_cache
from hf_turboquant.presets import resolve_config
from hf_turboquant.report import LayerPath, MemoryReport, PathReport, layer_memory, storage_bytes
from hf_turboquant.static_layers import TurboQuantStaticLayer, check_windows, is_registered, may_compile
from hf_turboquant.step_check import StepCheck


class TurboQuantCache(DynamicCache):
    """A key/value cache that stores tokens compressed with TurboQuant and attends over the compressed store.

    Pass it to ``generate()`` or ``forward`` as ``past_key_values`` (``cache`` in transformers 5.24 and later). It works
    with every attention implementation; sdpa reads the compressed store directly. Layers that hold no keys and
    values, or hold them with an index beside, use transformers' own classes, and so do sliding windows so short that
    compression would not make them smaller.

    Args:
        model_config: Configuration of the model (``model.config``).
        config: Preset name or :class:`TurboQuantConfig`; None for the default preset.
        offloading: Keep packed blocks of full-attention layers in CPU memory while other layers compute. Nothing
            changes on a machine without another device.
        windowed: False keeps every token in every layer, whatever window the model declares: for cross attention, and
            for assisted decoding with a version of transformers that cannot roll a window back.
        max_cache_len: Make room for this many tokens from the start, and let ``generate()`` compile decode steps and
            replay them as CUDA graphs. Needs :func:`hf_turboquant.enable`; without it, steps run as they do without
            ``max_cache_len``. Sliding windows are kept exact, in transformers' static layers. None lets the cache grow.
        **overrides: Fields of :class:`TurboQuantConfig` to change.

    Raises:
        ConfigError: The preset or a field is unknown or not valid, or ``model_config`` is not a model configuration.
    """

    layers: list[Any]

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: TurboQuantConfig | str | None = None,
        *,
        offloading: bool = False,
        windowed: bool = True,
        max_cache_len: int | None = None,
        **overrides: Any,
    ) -> None:
        if offloading and max_cache_len is not None:
            raise ConfigError(
                "offloading must be False with max_cache_len, whose memory stays where it is, got True; leave one out"
            )
        if not isinstance(model_config, PreTrainedConfig):
            raise ConfigError(
                f"model_config must be a transformers configuration, got {type(model_config).__name__}; pass "
                "model.config"
            )
        text_config = model_config.get_text_config(decoder=True)
        self.turboquant_config = settings_for(resolve_config(config, **overrides), text_config)
        super().__init__(config=model_config)
        # of a cache of fixed size, which asks it for the attention of the model
        self._text_config = None if max_cache_len is None else text_config
        if max_cache_len is None:
            self.layers = [
                compressed_layer(layer, self.turboquant_config, index, windowed=windowed)
                for index, layer in enumerate(self.layers)
            ]
        else:
            self.layers = static_layers(
                self.layers, self.turboquant_config, text_config, windowed=windowed, max_cache_len=max_cache_len
            )
        self._model_config = model_config
        self._windowed = windowed
        self._steps = StepCheck(getattr(text_config, "cross_attention_layers", None) or ())
        self._offload: OffloadSchedule | None = None
        if offloading:
            movable = [(index, layer) for index, layer in self._compressed_layers() if not layer.is_sliding]
            self._offload = OffloadSchedule(movable)

    @classmethod
    def encoder_decoder(
        cls, model_config: PreTrainedConfig, config: TurboQuantConfig | str | None = None, **options: Any
    ) -> EncoderDecoderCache:
        """Return what an encoder-decoder model takes: two compressed caches, of self and of cross attention.

        Args:
            model_config: Configuration of the model.
            config: Preset name or configuration of both.
            **options: What else :class:`TurboQuantCache` takes.
        """
        own = cls(model_config, config, **options)
        return EncoderDecoderCache(own, cls(model_config, config, **{**options, "windowed": False}))

    def __repr__(self) -> str:
        """Name the configuration and what is held."""
        config = self.turboquant_config
        tokens = max((layer.get_seq_length() for _, layer in self._compressed_layers()), default=0)
        return (
            f"TurboQuantCache(key_bits={config.key_bits}, value_bits={config.value_bits}, layers={len(self.layers)}, "
            f"tokens={tokens})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TurboQuantCache:
        """Copy the tokens, and share the tables, which never change, and the configuration of the model."""
        for shared in (*self._tables(), self._model_config, self._text_config):
            memo[id(shared)] = shared
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens of one layer; see :meth:`TurboQuantLayer.update`.

        Args:
            key_states: ``(batch, num_kv_heads, new tokens, head_dim)``.
            value_states: The same for values.
            layer_idx: Index of the layer.
            *args: What the version of transformers passes besides.
            **kwargs: Likewise.

        Raises:
            CacheStateError: The cache has no such layer, or an earlier forward stopped halfway through the layers.
            ShapeError: Geometry, dtype or device differ from the tokens already stored.
            ValueRangeError: A block that must be quantized now cannot be.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise CacheStateError(
                f"layer_idx must be below {len(self.layers)}, the layers this cache was made for, got {layer_idx}; "
                "make it from the configuration of the model that uses it"
            )
        if self._text_config is not None and torch.compiler.is_compiling():
            if isinstance(self.layers[layer_idx], TurboQuantStaticLayer):
                kwargs["registered"] = is_registered(self._text_config)
        else:
            self._steps.before_update(self.layers, layer_idx)
        if self._offload is not None:
            self._offload.before_update(layer_idx, key_states.device)
        states: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        return states

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate()`` may compile decode steps.

        It asks before every one of them, which is the moment to say that there is no room for it.

        Raises:
            CacheStateError: Compiled steps have filled the cache.
        """
        if self._text_config is None:
            return bool(super().is_compileable)
        return may_compile(self.layers, self._text_config)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next query, for masks: a tensor where a step may be compiled."""
        layer = self.layers[layer_idx]
        if isinstance(layer, TurboQuantStaticLayer) and layer.counts_on_device:
            return layer.length_on_device  # type: ignore[return-value]
        return int(self.get_seq_length(layer_idx))

    def reset(self) -> None:
        """Forget all tokens; the cache is as new."""
        self._steps.reset()
        super().reset()
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # old versions only zero what they hold, and go on from its length
                layer.keys = layer.values = None
                layer.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens of every layer; see :meth:`TurboQuantLayer.crop`.

        Raises:
            CacheStateError: More tokens than held. Nothing was removed.
        """
        # assisted decoding may pass a tensor, and layers would keep it and count in it
        tokens_to_remove = int(tokens_to_remove)
        independent = self._steps.independent
        own = [layer for index, layer in self._compressed_layers() if layer.store and index not in independent]
        shortest = min((layer.get_seq_length() for layer in own), default=None)
        if shortest is not None and -tokens_to_remove > shortest:
            raise CacheStateError(
                f"crop must remove at most the {shortest} tokens held, got {-tokens_to_remove}; to forget all, call "
                "reset()"
            )
        if tokens_to_remove:
            check_windows(self.layers, "crop")
        for index, layer in enumerate(self.layers):
            if index not in independent:
                layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence ``i`` continue the old sequence ``beam_idx[i]``, in every layer."""
        # one copy to the host for all layers: they look at the rows to leave equal blocks where they are
        beam_idx = beam_idx.cpu()
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times in place: one prefilled prompt for many continuations."""
        check_windows(self.layers, "batch_repeat_interleave")
        for layer in self.layers:
            if hasattr(layer, "batch_repeat_interleave"):
                layer.batch_repeat_interleave(repeats)
            else:
                rows = _states_batch(layer)
                select_states(layer, torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences ``indices``; a boolean mask over the batch is accepted."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        check_windows(self.layers, "batch_select_indices")
        for layer in self.layers:
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(indices)
            else:
                select_states(layer, indices)

    def save(self, path: str | os.PathLike[str], model: PreTrainedModel | None = None) -> None:
        """Write all tokens, compressed as they are, to a safetensors file.

        Args:
            path: The file; one that exists is replaced when the new one is complete.
            model: The model that filled the cache. A digest of its weights then goes with the file, and
                :meth:`load` refuses another model of the same shape.

        Raises:
            CacheStateError: A layer is of a kind of transformers' own that cannot be saved.
        """
        header = {
            "config": self.turboquant_config.to_dict(),
            "model": describe_model(self._model_config if model is None else model),
            "windowed": self._windowed,
            "tokens": self.get_seq_length(),
        }
        write_cache(path, self.layers, header)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel | PreTrainedConfig,
        *,
        device: torch.device | str | Mapping[int, torch.device] = "cpu",
        offloading: bool = False,
        backend: str | None = None,
        max_cache_len: int | None = None,
    ) -> TurboQuantCache:
        """Read a saved cache. What is generated from it is what the saved one would have generated.

        Args:
            path: A file that :meth:`save` wrote.
            model: The model that will use it, or its configuration.
            device: Where the layers shall be: one device, or one for each layer index.
            offloading: As for a new cache.
            backend: Who computes; None for the one saved.
            max_cache_len: As for a new cache. It is not saved: give it again for a cache of fixed size.

        Raises:
            CacheStateError: There are more tokens than ``max_cache_len``.
            CacheFileError: The file is not whole, was altered, is of another version, or was saved for another model.
            FileNotFoundError: There is no file.
        """
        header, tensors = read_cache(path)
        compare_models(header.get("model", {}), describe_model(model))
        config = TurboQuantConfig.from_dict(header.get("config", {}))
        if backend is not None:
            config = config.replace(backend=backend)
        model_config = model if isinstance(model, PreTrainedConfig) else model.config
        windowed = bool(header.get("windowed", True))
        cache = cls(model_config, config, offloading=offloading, windowed=windowed, max_cache_len=max_cache_len)
        places = device if isinstance(device, Mapping) else torch.device(device)
        restore_layers(cache.layers, header, tensors, places)
        return cache

    def memory_report(self) -> MemoryReport:
        """Count the bytes held, from the storages of all tensors, and those a dense cache would hold.

        Returns:
            Bytes per layer and in all. Tables shared by layers are counted once.
        """
        seen: set[int] = set()
        entries = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, TurboQuantLayer):
                store = layer.store
                if store is not None:
                    states = (store.tail_keys, store.tail_values)
                    held = layer_memory(index, layer.visible_tokens, store.tensors(), states, seen, compressed=True)
                    entries.append(held)
            else:
                tensors = [getattr(layer, name, None) for name in ("keys", "values")]
                dense = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
                if dense:
                    entries.append(layer_memory(index, dense[0].shape[-2], dense, dense, seen, compressed=False))
        return MemoryReport(tuple(entries), storage_bytes(self._table_tensors(), seen))

    def path_report(self) -> PathReport:
        """Say how attention read each layer: from the compressed store, or from rebuilt dense tensors and why."""
        entries = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, TurboQuantLayer):
                recorder = layer.recorder
                counts = dict(recorder.materialized_calls)
                entries.append(LayerPath(index, "compressed", recorder.compressed_calls, recorder.dense_calls, counts))
            else:
                entries.append(LayerPath(index, "stock", 0, 0, {}))
        return PathReport(tuple(entries))

    def _compressed_layers(self) -> Iterator[tuple[int, TurboQuantLayer]]:
        for index, layer in enumerate(self.layers):
            if isinstance(layer, TurboQuantLayer):
                yield index, layer

    def _tables(self) -> Iterator[VectorTables]:
        for _, layer in self._compressed_layers():
            if layer.store is not None:
                yield from (layer.store.keys.tables, layer.store.values.tables)

    def _table_tensors(self) -> Iterator[torch.Tensor | None]:
        for tables in self._tables():
            yield from (*tables.centroids, *tables.boundaries, tables.rotation, tables.projection, tables.channel_order)


def _states_batch(layer: Any) -> int:
    states = [state for states in (layer.conv_states, layer.recurrent_states) for state in states.values()]
    return next((int(state.shape[0]) for state in states if state is not None), 0)
