"""The page allocator of transformers' continuous batching, over packed pages. Needs transformers 5.24 or newer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import CacheStateError
from hf_turboquant.handle import PathRecorder
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import Backend
from hf_turboquant.paged_handle import PagedHandle, RequestRead
from hf_turboquant.paged_store import PageStore, Request, page_bytes


class PageStatistics:
    """What is kept of an allocator when the engine has gone.

    Attributes:
        layers: Layers with packed pages.
        bytes_per_token: Bytes of a token in packed pages, over these layers.
        dense_bytes_per_token: Bytes of the same token in the dtype of the model.
        exact_bytes: The most bytes held beside the pages for exact tokens.
        recorders: How attention read each layer, by index of the layer.
    """

    def __init__(self) -> None:
        self.layers = 0
        self.bytes_per_token = self.dense_bytes_per_token = 0.0
        self.exact_bytes = 0
        self.recorders: dict[int, PathRecorder] = {}


class PackedAllocator(FullAttentionCacheAllocator):
    """Pages of full-attention layers, packed.

    Takes the arguments of the class it extends.

    Args:
        settings: Settings of all layers.
        statistics: Filled in as pages are used.
        **arguments: What the engine passes.
    """

    supports_block_table = False

    def __init__(self, *, settings: TurboQuantConfig, statistics: PageStatistics, **arguments: Any) -> None:
        self.settings, self.statistics = settings, statistics
        super().__init__(**arguments)
        if self.tokens_per_page != BLOCK_TOKENS:
            raise CacheStateError(f"page_size must be {BLOCK_TOKENS} (tokens), got {self.tokens_per_page}")
        dense = self.bytes_per_page
        self.bytes_per_page = page_bytes(settings, self.num_key_value_heads, self.head_dim, self.cache_dtype)
        self.bytes_per_block = self.bytes_per_page * self.pages_per_block
        layers = statistics.layers = self.pages_per_block
        statistics.bytes_per_token = layers * self.bytes_per_page / BLOCK_TOKENS
        statistics.dense_bytes_per_token = layers * dense / BLOCK_TOKENS
        self._requests: list[Request] = []
        self._consumed = False

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """Take the memory of the engine: ``(blocks, layers, KV heads, record bytes)``."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        records = self._copy_view.unflatten(1, (self.pages_per_block, self.num_key_value_heads, -1))
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        like = torch.empty(0, self.head_dim, dtype=self.cache_dtype, device=cache_tensor.device)
        self.store = PageStore(records, self.settings, self.layer_indices, like)
        self.statistics.recorders = {index: PathRecorder(index) for index in self.layer_indices}

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Take note of the new tokens of a request; the engine asks once for each request of a batch, in order."""
        if self._consumed:
            self._requests, self._consumed = [], False
        self._requests.append(Request(tuple(self.block_table[request_id]), past_length, query_length))
        indices: list[int] = super().get_write_indices(request_id, past_length, query_length)
        return indices

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        read_index: torch.Tensor,
        write_index: torch.Tensor,
    ) -> tuple[Any, Any]:
        """Store the new tokens of a batch in one layer.

        Args:
            key_states: ``(new tokens, num_kv_heads, head_dim)``.
            value_states: The same for values.
            layer_idx: Index of the layer in the model.
            read_index: Empty when no request has tokens stored before.
            write_index: Not used: the pages of each request are known.

        Returns:
            What the engine turns into lazy tensors of all tokens of the batch; the tensors given, where ``read_index``
            is empty.
        """
        layer = self.layer_indices.index(layer_idx)
        if layer == 0:
            self.store.begin(self._requests)
            self._consumed = True
        keys, values = (states.transpose(0, 1)[None] for states in (key_states, value_states))
        tails = self.store.update(layer, keys, values)
        recorder = self.statistics.recorders[layer_idx]
        result: tuple[Any, Any] = (key_states, value_states)
        if read_index.numel():
            reads = tuple(
                RequestRead(segment.count, self.store.view(segment, layer, tail))
                for segment, tail in zip(self.store.segments, tails, strict=True)
            )
            backend = Backend(self.settings.backend)
            keys_handle, values_handle = (PagedHandle(reads, which, backend, recorder) for which in ("keys", "values"))
            result = (_AsTokens(keys_handle), _AsTokens(values_handle))
        else:
            recorder.dense()
        if layer == self.pages_per_block - 1:
            self.store.commit()
            held = self.store.exact.nbytes + self.store.sinks.nbytes
            self.statistics.exact_bytes = max(self.statistics.exact_bytes, held)
        return result

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Forget a request; full pages that the engine keeps for others of the same beginning are packed."""
        super().free_blocks(request_id, no_cache)
        used = {page for table in self.block_table.values() for page in table}
        self.store.release(used, set(self.ledger.cached_blocks))

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copy whole blocks for a request that branches, exact tokens included."""
        super().copy_blocks(source_block_ids, dest_block_ids)
        self.store.copy(source_block_ids, dest_block_ids)

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: kernels that read dense pages cannot read packed ones.

        Raises:
            CacheStateError: Always.
        """
        raise CacheStateError("packed pages cannot be read through a block table; use the sdpa attention")


class _AsTokens:
    """A handle for an engine that turns ``(tokens, heads, channels)`` into ``(1, heads, tokens, channels)``.

    The handle has the second shape from the start.
    """

    def __init__(self, handle: PagedHandle) -> None:
        self._handle = handle

    def transpose(self, first: int, second: int) -> _AsTokens:
        """Exchange tokens and heads."""
        assert (first, second) == (0, 1)
        return self

    def unsqueeze(self, dim: int) -> PagedHandle:
        """Add the batch dimension."""
        assert dim == 0
        return self._handle
