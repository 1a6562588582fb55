"""Reordering packed blocks without copying what is the same in every row.

The beams of one prompt hold the same prompt, and after some steps the same ancestors: most blocks are equal, byte for
byte, in all rows of a group. Moving such rows around changes nothing, so they are left where they are.
"""

from __future__ import annotations

import torch

from hf_turboquant.store import KVStore

CHUNK_BLOCKS = 64
"""Blocks compared at a time."""

Classes = tuple[int, ...]


class SharedRows:
    """Knows which rows of each packed block hold the same bytes.

    A run is ``(blocks, classes)``: rows with equal numbers in ``classes`` are equal in all these blocks.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[int, Classes]] = []

    def limit(self, blocks: int) -> None:
        """Forget what is known of all blocks but the oldest ``blocks``."""
        kept, left = [], blocks
        for count, classes in self._runs:
            if left > 0:
                kept.append((min(count, left), classes))
                left -= count
        self._runs = kept

    def reorder(self, store: KVStore, rows: list[int]) -> int:
        """Let row ``i`` of a store continue its old row ``rows[i]``.

        Args:
            store: Changed in place.
            rows: As many rows as the store has.

        Returns:
            The number of packed blocks that had to be copied.
        """
        if rows == list(range(len(rows))):
            return 0
        index = torch.tensor(rows, device=store.tail_keys.device)
        store.select_exact(index)
        self._classify_new(store)
        runs: list[tuple[int, Classes]] = []
        first = copied = 0
        for count, classes in self._runs:
            after = tuple(classes[row] for row in rows)
            if after != classes:
                _permute(store, first, first + count, index)
                copied += count
            if runs and runs[-1][1] == after:
                runs[-1] = (runs[-1][0] + count, after)
            else:
                runs.append((count, after))
            first += count
        self._runs = runs
        return copied

    def _classify_new(self, store: KVStore) -> None:
        """Compare neighbouring rows of the blocks not seen before."""
        first = 0
        known = sum(count for count, _ in self._runs)
        for arena in store.arenas:
            low, high = max(known - first, 0), min(store.num_blocks - first, arena.shape[0])
            for start in range(low, high, CHUNK_BLOCKS):
                records = arena[start : min(start + CHUNK_BLOCKS, high)]
                equal = (records[:, 1:] == records[:, :-1]).all(dim=-1).all(dim=-1).tolist()
                self._runs += [(1, _classes(same_as_previous)) for same_as_previous in equal]
            first += arena.shape[0]


def _classes(same_as_previous: list[bool]) -> Classes:
    numbers = [0]
    for row, same in enumerate(same_as_previous, start=1):
        numbers.append(numbers[-1] if same else row)
    return tuple(numbers)


def _permute(store: KVStore, low: int, high: int, index: torch.Tensor) -> None:
    """Reorder the rows of blocks ``low`` to ``high``, chunk by chunk."""
    first = 0
    for arena in store.arenas:
        start, stop = max(low - first, 0), min(high - first, arena.shape[0])
        for at in range(start, stop, CHUNK_BLOCKS):
            part = arena[at : min(at + CHUNK_BLOCKS, stop)]
            part.copy_(part.index_select(1, index.to(arena.device)))
        first += arena.shape[0]
