"""Where the blocks of a layer are, for kernels that cannot walk one run of full blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.view import KVView


@dataclass(frozen=True)
class BlockTable:
    """Where the blocks of a layer are, on the device, for stores of several arenas or with cropped blocks.

    Attributes:
        addresses: ``(num_blocks,)`` int64, address of the first record of each block.
        starts: ``(num_blocks,)`` int32, packed tokens before each block.
        counts: ``(num_blocks,)`` int32, valid tokens of each block.
    """

    addresses: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def build_block_table(
    arenas: tuple[torch.Tensor, ...], num_blocks: int, block_tokens: tuple[int, ...] | None
) -> BlockTable:
    """Build the table of the blocks in use. It stays valid while arenas are only written to.

    Args:
        arenas: As in :class:`KVView`.
        num_blocks: Blocks in use.
        block_tokens: Valid tokens of each block, None when all hold 128.
    """
    addresses: list[int] = []
    for arena in arenas:
        used = min(num_blocks - len(addresses), arena.shape[0])
        addresses += [arena.data_ptr() + index * arena.stride(0) for index in range(used)]
    counts = list(block_tokens) if block_tokens is not None else [BLOCK_TOKENS] * num_blocks
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    device = arenas[0].device
    # both rows start on a multiple of 16 bytes, whatever the number of blocks: kernels are compiled for that
    padding = [0] * (-num_blocks % 4)
    small = torch.tensor([starts[:num_blocks] + padding, counts + padding], dtype=torch.int32).to(device)
    table = torch.tensor(addresses, dtype=torch.int64).to(device)
    return BlockTable(table, small[0, :num_blocks], small[1, :num_blocks])


def needs_block_table(view: KVView) -> bool:
    """Whether blocks of a view cannot be addressed as one run of full blocks."""
    return view.num_blocks > 0 and (view.block_tokens is not None or view.num_blocks > view.arenas[0].shape[0])


def block_table_of(view: KVView, given: BlockTable | None) -> BlockTable | None:
    """Return the table given, or one built where a view needs one; None where it does not."""
    if given is not None or not needs_block_table(view):
        return given
    return build_block_table(view.arenas, view.num_blocks, view.block_tokens)
