"""The cache a user passes to ``generate()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.layers import TurboQuantLayer
from hf_turboquant.ops import VectorTables
from hf_turboquant.presets import resolve_config
from hf_turboquant.report import LayerMemory, LayerPath, MemoryReport, PathReport, storage_bytes


class TurboQuantCache(DynamicCache):
    """A key/value cache that stores tokens compressed with TurboQuant and attends over the compressed store.

    Pass it to ``generate()`` or ``forward`` as ``past_key_values`` (``cache`` in transformers 5.24 and later). It works
    with every attention implementation; sdpa reads the compressed store directly. Layers other than full
    attention use transformers' own classes.

    Args:
        model_config: Configuration of the model (``model.config``).
        config: Preset name or :class:`TurboQuantConfig`; None for the default preset.
        **overrides: Fields of :class:`TurboQuantConfig` to change.

    Raises:
        ConfigError: The preset or a field is unknown or not valid, or ``model_config`` is not a model configuration.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: TurboQuantConfig | str | None = None,
        **overrides: Any,
    ) -> None:
        if not isinstance(model_config, PreTrainedConfig):
            raise ConfigError(
                f"model_config must be a transformers configuration, got {type(model_config).__name__}; pass model.config"
            )
        self.turboquant_config = resolve_config(config, **overrides)
        super().__init__(config=model_config)
        self.layers = [
            TurboQuantLayer(self.turboquant_config, index) if type(layer) is DynamicLayer else layer
            for index, layer in enumerate(self.layers)
        ]

    def __repr__(self) -> str:
        """Name the configuration and what is held."""
        config = self.turboquant_config
        return (
            f"TurboQuantCache(key_bits={config.key_bits}, value_bits={config.value_bits}, layers={len(self.layers)}, "
            f"tokens={self.get_seq_length()})"
        )

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
                if store is None:
                    continue
                held = storage_bytes(store.tensors(), seen)
                per_token = sum(
                    tensor.shape[0] * tensor.shape[1] * tensor.shape[3] * tensor.element_size()
                    for tensor in (store.tail_keys, store.tail_values)
                )
                entries.append(LayerMemory(index, store.seq_len, held, per_token * store.seq_len, compressed=True))
            else:
                tensors = [getattr(layer, name, None) for name in ("keys", "values")]
                dense = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
                if dense:
                    size = sum(tensor.numel() * tensor.element_size() for tensor in dense)
                    held = storage_bytes(dense, seen)
                    entries.append(LayerMemory(index, dense[0].shape[-2], held, size, compressed=False))
        return MemoryReport(tuple(entries), storage_bytes(self._table_tensors(), seen))

    def path_report(self) -> PathReport:
        """Say how attention read each layer: from the compressed store, or from rebuilt dense tensors and why."""
        entries = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, TurboQuantLayer):
                recorder = layer.recorder
                counts = dict(recorder.materialized_calls)
                entries.append(
                    LayerPath(index, "compressed", recorder.compressed_calls, recorder.dense_calls, counts)
                )
            else:
                entries.append(LayerPath(index, "stock", 0, 0, {}))
        return PathReport(tuple(entries))

    def _table_tensors(self) -> Iterator[torch.Tensor | None]:
        for layer in self.layers:
            if isinstance(layer, TurboQuantLayer) and layer.store is not None:
                for codec in (layer.store.keys, layer.store.values):
                    yield from _tensors_of(codec.tables)


def _tensors_of(tables: VectorTables) -> Iterator[torch.Tensor | None]:
    yield from (*tables.centroids, *tables.boundaries, tables.rotation, tables.projection, tables.channel_order)
