"""Pages of 128 tokens that the requests of a serving engine share: packed once they are full, exact until then.

A page of one layer is the block records of all its KV heads. The engine says which pages a request has, in order, and
which tokens are new; a page is quantized, once, when it is full and no longer among the newest ``residual_window``
tokens. The first ``sink_tokens`` of a request stay exact beside the first page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import CacheStateError, ConfigError, ShapeError
from hf_turboquant.exact_pages import ExactPages
from hf_turboquant.layout import BLOCK_TOKENS, RecordFormat
from hf_turboquant.ops import KVView, quantize
from hf_turboquant.quantizers import CodecPlan, LayerCodecs, build_key_codec, build_value_codec


class Request(NamedTuple):
    """What the engine says of one request in a batch: its pages in order, tokens stored before, tokens new."""

    table: Sequence[int]
    past: int
    new: int


@dataclass(frozen=True, eq=False)
class Segment:
    """New tokens of one request, and the pages behind them.

    Attributes:
        start: Position of its first new token in the batch.
        count: New tokens.
        packed: Pages read from records.
        tail: Pages read exactly, oldest first, those of the new tokens included.
        staged: Tokens of ``tail`` stored before.
        leaving: How many of the first pages of ``tail`` are quantized in this batch.
        first: The first page of the request.
        packed_index: ``packed`` on the device.
        staged_index: Where the pages with tokens stored before are.
        sink_index: Where the sinks are, if ``first`` is packed.
    """

    start: int
    count: int
    packed: tuple[int, ...]
    tail: tuple[int, ...]
    staged: int
    leaving: int
    first: int
    packed_index: torch.Tensor
    staged_index: torch.Tensor
    sink_index: torch.Tensor | None


class PageStore:
    """The pages of all layers of one kind.

    Args:
        records: ``(pages, layers, heads, record bytes)`` uint8, the memory of the engine.
        config: Settings of all layers.
        layer_indices: Index of each layer in the model.
        like: ``(0, head_dim)``; its dtype and device are those of the tokens.

    Raises:
        ConfigError: The codecs cannot serve these channels.
    """

    def __init__(
        self, records: torch.Tensor, config: TurboQuantConfig, layer_indices: Sequence[int], like: torch.Tensor
    ) -> None:
        layers, heads, head_dim = records.shape[1], records.shape[2], like.shape[-1]
        self.records, self.config = records, config
        self.exact = ExactPages(like, layers, heads, BLOCK_TOKENS, head_dim)
        self.sinks = ExactPages(like, layers, heads, config.sink_tokens, head_dim)
        self.segments: list[Segment] = []
        self._plans = [CodecPlan(config, index, like, like) for index in layer_indices]
        self._codecs: list[LayerCodecs | None] = [None] * layers
        self._packed: set[int] = set()
        self._first: set[int] = set()

    def begin(self, requests: Iterable[Request]) -> None:
        """Take note of the new tokens of a batch, before any layer stores them.

        Raises:
            CacheStateError: A request has tokens in a page that holds none.
        """
        self.segments = []
        start = 0
        for table, past, new in requests:
            segment = self._segment(start, table, past, new)
            for page in segment.tail[segment.leaving :]:
                self.exact.add(page)
            self._first.add(segment.first)
            if segment.first in segment.tail[: segment.leaving] and self.config.sink_tokens:
                self.sinks.add(segment.first)
            self.segments.append(segment)
            start += new

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Store the new tokens of the batch in one layer.

        Args:
            layer: Position of the layer among those of this store.
            keys: ``(1, heads, new tokens, head_dim)`` of all segments, one behind another.
            values: The same for values.

        Returns:
            For each segment its exact keys and values, new ones included.

        Raises:
            ShapeError: There are not as many tokens as :meth:`begin` was told.
            ConfigError: The guard wants a layer stored in another way than the pages were made for.
            ValueRangeError: A page that must be quantized now cannot be.
        """
        expected = sum(segment.count for segment in self.segments)
        if keys.shape[2] != expected:
            raise ShapeError(f"keys must hold the {expected} new tokens of the batch, got {keys.shape[2]}")
        tails = []
        for segment in self.segments:
            span = slice(segment.start, segment.start + segment.count)
            tail = self._tail(segment, layer, keys[:, :, span], values[:, :, span])
            size = segment.leaving * BLOCK_TOKENS
            if size:
                self._pack(layer, segment.tail[: segment.leaving], tail[0][:, :, :size], tail[1][:, :, :size])
            self._stage(layer, segment, tail)
            tails.append(tail)
        return tails

    def commit(self) -> None:
        """Take what all layers have quantized for packed."""
        for segment in self.segments:
            for page in segment.tail[: segment.leaving]:
                self._packed.add(page)
                self.exact.drop(page)

    def view(self, segment: Segment, layer: int, tail: tuple[torch.Tensor, torch.Tensor]) -> KVView:
        """Return what attention reads for one segment. Its records are a copy, gathered from the pages."""
        codecs = self._codecs[layer] or self._plans[layer].initial
        sink_keys, sink_values = (tensor[:, :, :0] for tensor in tail)
        counts = None
        if segment.sink_index is not None:
            sink_keys, sink_values = self.sinks.read(segment.sink_index, layer)
            hidden = {segment.first: self.config.sink_tokens}
            counts = tuple(BLOCK_TOKENS - hidden.get(page, 0) for page in segment.packed)
        return KVView(
            keys=codecs.keys,
            values=codecs.values,
            sink_keys=sink_keys,
            sink_values=sink_values,
            arenas=(self.records[segment.packed_index, layer][:, None],) if segment.packed else (),
            num_blocks=len(segment.packed),
            block_tokens=counts,
            tail_keys=tail[0],
            tail_values=tail[1],
            tail_start=0,
            tail_len=tail[0].shape[2],
        )

    def release(self, used: set[int], cached: set[int]) -> None:
        """Forget pages that neither a request nor the engine's prefix cache has any more.

        Args:
            used: Pages of all requests.
            cached: Full pages of no request that the engine keeps for another of the same beginning. They are packed.
        """
        for page in [page for page in self.exact.slots if page not in used]:
            if page in cached:
                index = self.exact.index((page,))
                for layer in range(len(self._plans)):
                    self._pack(layer, (page,), *self.exact.read(index, layer))
                self._packed.add(page)
            self.exact.drop(page)
        for page in (self._first | self._packed) - used - cached:
            self._forget(page)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Follow the engine, which has copied the records of some pages to others."""
        for source, target in zip(sources, targets, strict=True):
            self._forget(target)
            self.exact.copy(source, target)
            self.sinks.copy(source, target)
            for pages in (self._packed, self._first):
                if source in pages:
                    pages.add(target)

    def _segment(self, start: int, table: Sequence[int], past: int, new: int) -> Segment:
        """Sort the pages of a request into packed and exact ones."""
        old = -(-past // BLOCK_TOKENS)
        fresh = table[old : -(-(past + new) // BLOCK_TOKENS)]
        for page in fresh:
            self._forget(page)
        packed = tuple(page for page in table[:old] if page in self._packed)
        staged = tuple(page for page in table[:old] if page not in self._packed)
        missing = [page for page in staged if page not in self.exact.slots]
        if missing:
            raise CacheStateError(f"page {missing[0]} must hold tokens of the request that reads it, but has none")
        kept = self.config.residual_window // BLOCK_TOKENS
        with_sinks = self.config.sink_tokens and table[0] in packed
        return Segment(
            start=start,
            count=new,
            packed=packed,
            tail=(*staged, *fresh),
            staged=past - BLOCK_TOKENS * len(packed),
            leaving=max(0, (past + new) // BLOCK_TOKENS - kept - len(packed)),
            first=table[0],
            packed_index=torch.tensor(packed, dtype=torch.long, device=self.records.device),
            staged_index=self.exact.index(staged),
            sink_index=self.sinks.index((table[0],)) if with_sinks else None,
        )

    def _forget(self, page: int) -> None:
        self._packed.discard(page)
        self._first.discard(page)
        self.exact.drop(page)
        self.sinks.drop(page)

    def _tail(
        self, segment: Segment, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the exact tokens of a segment: those stored before, and the new ones."""
        if not segment.staged:
            return keys, values
        stored = self.exact.read(segment.staged_index, layer)
        tail_keys, tail_values = (
            torch.cat([part[:, :, : segment.staged], new], dim=2)
            for part, new in zip(stored, (keys, values), strict=True)
        )
        return tail_keys, tail_values

    def _stage(self, layer: int, segment: Segment, tail: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep the new tokens of the pages that stay exact."""
        end = tail[0].shape[2]
        for place in range(segment.leaving, len(segment.tail)):
            first = place * BLOCK_TOKENS
            low, high = max(first, segment.staged), min(first + BLOCK_TOKENS, end)
            if low < high:
                slot = self.exact.slots[segment.tail[place]]
                self.exact.keys[slot, layer, :, low - first : high - first] = tail[0][0, :, low:high]
                self.exact.values[slot, layer, :, low - first : high - first] = tail[1][0, :, low:high]

    def _pack(self, layer: int, pages: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize whole pages of one layer."""
        first = pages[0]
        if first in self._first and self.config.sink_tokens:
            self.sinks.add(first)
            slot, sinks = self.sinks.slots[first], self.config.sink_tokens
            self.sinks.keys[slot, layer] = keys[0, :, :sinks]
            self.sinks.values[slot, layer] = values[0, :, :sinks]
            keys, values = _without_sinks(keys, sinks), _without_sinks(values, sinks)
        codecs = self._codecs_for(layer, keys, values)
        shape = (len(pages), 1, *self.records.shape[2:])
        out = torch.empty(shape, dtype=torch.uint8, device=self.records.device)
        quantize(keys, values, out, codecs.keys, codecs.values, backend=self.config.backend)
        self.records[torch.tensor(pages, device=out.device), layer] = out[:, 0]

    def _codecs_for(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerCodecs:
        """Return the codecs of a layer, chosen by the first page it quantizes, whichever request that is of."""
        codecs = self._codecs[layer]
        if codecs is None:
            codecs = self._plans[layer].choose(keys, values)
            nbytes = RecordFormat(codecs.keys.format, codecs.values.format).nbytes
            if nbytes != self.records.shape[3]:
                raise ConfigError(
                    f"layer {self._plans[layer].layer_idx}: {codecs.note}; pages have one size, so choose key_bits=8 "
                    "for all layers, or guard='off' to keep the bits asked for"
                )
            self._codecs[layer] = codecs
        return codecs


def check_pages(config: TurboQuantConfig) -> None:
    """Check that pages can be made with some settings.

    Raises:
        ConfigError: The settings differ between layers, or sinks would fill a page.
    """
    if config.layer_bits:
        raise ConfigError("layer_bits must be empty for serving, whose pages have one size for all layers")
    if config.sink_tokens >= BLOCK_TOKENS:
        raise ConfigError(
            f"sink_tokens must be below {BLOCK_TOKENS} (tokens, one page) for serving, got {config.sink_tokens}"
        )


def page_bytes(config: TurboQuantConfig, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page of one layer: the records of all KV heads.

    Args:
        config: Settings of all layers.
        heads: KV heads.
        head_dim: Channels.
        dtype: Element type of the tokens, which 16 bits keep.

    Raises:
        ConfigError: The codecs cannot serve these channels, or pages cannot be made with these settings.
    """
    check_pages(config)
    device = torch.device("cpu")
    keys = build_key_codec(config, head_dim, dtype, device).format
    values = build_value_codec(config, head_dim, dtype, device).format
    return heads * RecordFormat(keys, values).nbytes


def _without_sinks(vectors: torch.Tensor, sinks: int) -> torch.Tensor:
    """Move sinks out of the first page: the others step up, and their mean, which is never read, fills the end."""
    page, rest = vectors[:, :, sinks:BLOCK_TOKENS], vectors[:, :, BLOCK_TOKENS:]
    filler = page.mean(dim=2, keepdim=True).expand(-1, -1, sinks, -1)
    return torch.cat([page, filler, rest], dim=2)
