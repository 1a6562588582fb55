"""Notices that a forward stopped halfway, before the tokens it left behind do harm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hf_turboquant.errors import CacheStateError


class StepCheck:
    """Compares the lengths of the layers of a cache as a forward goes through them.

    Masks are built from one layer for all. A forward that failed between two layers leaves some with tokens that the
    others lack, and every later mask would be wrong for one or the other.

    Args:
        independent: Indices of layers whose length is their own, such as cross attention to an image.
    """

    def __init__(self, independent: Iterable[int] = ()) -> None:
        self.independent = frozenset(independent)
        self._leader: int | None = None
        self._length_before = 0
        self._updated: set[int] = set()

    def reset(self) -> None:
        """Forget which layers belong together."""
        self._leader = None
        self._updated.clear()

    def before_update(self, layers: Sequence[Any], layer_idx: int) -> None:
        """Check a layer that is about to store tokens.

        Raises:
            CacheStateError: Its length, or that of another layer, shows that an earlier forward was not completed.
        """
        if layer_idx in self.independent:
            return
        # an int, not a tensor that grows in place, which layers of transformers may return
        length = int(layers[layer_idx].get_seq_length())
        if self._leader is None:
            self._leader = layer_idx
        if layer_idx == self._leader:
            self._length_before = length
            for other in self._updated:
                _compare(int(layers[other].get_seq_length()), length, other, layer_idx)
        else:
            _compare(length, self._length_before, layer_idx, self._leader)
            self._updated.add(layer_idx)


def _compare(length: int, expected: int, layer_idx: int, leader: int) -> None:
    if length != expected:
        raise CacheStateError(
            f"layer {layer_idx} holds {length} tokens where layer {leader} holds {expected}: an earlier forward "
            "stopped between them, and masks would be wrong. Call cache.reset() and start again, or continue from a "
            "copy"
        )
