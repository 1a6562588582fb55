"""Exact tokens of some pages of a serving engine, in tensors that grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FIRST_SLOTS = 4
"""Pages an exact store makes room for at least; a large one grows by a quarter."""


class ExactPages:
    """Exact tokens of some pages, for every layer, in a tensor that grows.

    Args:
        like: Its dtype and device are those of the tokens.
        layers: Layers.
        heads: KV heads.
        tokens: Tokens of a page that are kept.
        head_dim: Channels.
    """

    def __init__(self, like: torch.Tensor, layers: int, heads: int, tokens: int, head_dim: int) -> None:
        self.keys = like.new_empty((0, layers, heads, tokens, head_dim))
        self.values = self.keys.clone()
        self.slots: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, unused room included."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def add(self, page: int) -> None:
        """Make room for a page, unless it has some."""
        if page in self.slots:
            return
        if not self._free:
            old = self.keys.shape[0]
            new = old + max(FIRST_SLOTS, old // 4)
            self.keys, self.values = (
                torch.cat([tensor, tensor.new_empty((new - old, *tensor.shape[1:]))])
                for tensor in (self.keys, self.values)
            )
            self._free = list(range(new - 1, old - 1, -1))
        self.slots[page] = self._free.pop()

    def drop(self, page: int) -> None:
        """Forget a page, if it is there."""
        slot = self.slots.pop(page, None)
        if slot is not None:
            self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """Copy the tokens of a page, if it has any here."""
        self.drop(target)
        if source in self.slots:
            self.add(target)
            for tensor in (self.keys, self.values):
                tensor[self.slots[target]] = tensor[self.slots[source]]

    def index(self, pages: Sequence[int]) -> torch.Tensor:
        """Return where some pages are, for :meth:`read`; it stays so until one of them is dropped."""
        return torch.tensor([self.slots[page] for page in pages], dtype=torch.long, device=self.keys.device)

    def read(self, index: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of some pages one behind another, ``(1, heads, pages * tokens, head_dim)``."""
        keys, values = (tensor[index, layer].transpose(0, 1).flatten(1, 2)[None] for tensor in (self.keys, self.values))
        return keys, values
