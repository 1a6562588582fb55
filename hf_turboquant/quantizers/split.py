"""Channel groups: which channels of a head get more bits, decided from the energies of its first vectors.

``even`` gives half of the channels ``bits + 1`` and half ``bits - 1``; ``outlier`` gives a quarter one bit more, the
split of arXiv:2504.19874, Section 4.3. Each group has its own norm and its own rotation.
"""

from __future__ import annotations

import torch

from hf_turboquant.config import Split, SplitUnit
from hf_turboquant.errors import ConfigError
from hf_turboquant.layout import BLOCK_TOKENS, EXACT_BITS, ChannelGroup

MIN_GROUP = 4
"""Channels of the smallest group a codebook is solved for."""


def channel_groups(
    split: Split, head_dim: int, bits: int, *, exact_channels: int = 0, name: str = "key_split"
) -> tuple[ChannelGroup, ...]:
    """Return the groups of a split, the ones with more energy first.

    Args:
        split: ``none``, ``even`` or ``outlier``.
        head_dim: Channels.
        bits: Bits per coordinate before the split moves some.
        exact_channels: Channels kept as they are, taken from the strongest group.
        name: The setting, for the message of the error.

    Raises:
        ConfigError: ``head_dim`` cannot be cut so.
    """
    parts = {
        "none": ((head_dim, bits),),
        "even": ((head_dim // 2, bits + 1), (head_dim - head_dim // 2, bits - 1)),
        "outlier": ((head_dim // 4, bits + 1), (head_dim - head_dim // 4, bits)),
    }[split]
    # every group must be even to be rotated, and hold whole pairs where pairs are chosen
    divisor = {"none": 1, "even": 4, "outlier": 8}[split]
    if head_dim % divisor or (split != "none" and parts[0][0] - exact_channels < MIN_GROUP):
        raise ConfigError(
            f"head_dim must be a multiple of {divisor} (channels) and its groups hold at least {MIN_GROUP} with "
            f"{name}={split!r}, got {head_dim}; use {name}='none'"
        )
    strongest, *others = parts
    sized = [(exact_channels, EXACT_BITS)] if exact_channels else []
    sized += [(strongest[0] - exact_channels, strongest[1]), *others]
    groups, start = [], 0
    for size, width in sized:
        groups.append(ChannelGroup(start, size, width))
        start += size
    return tuple(groups)


def channel_energy(vectors: torch.Tensor, *, centered: bool) -> torch.Tensor:
    """Measure the mean square of every channel over the first block of tokens.

    One block, however many leave the window at once: the choice made from it then does not depend on how a prompt was
    cut into chunks.

    Args:
        vectors: ``(batch, num_kv_heads, tokens, head_dim)``, at least 128 tokens.
        centered: Whether the mean of the block is taken off first.

    Returns:
        ``(num_kv_heads, head_dim)`` float32 on the device of ``vectors``, the average over the batch.
    """
    block = vectors[:, :, :BLOCK_TOKENS].float()
    if centered:
        block = block - block.mean(dim=2, keepdim=True)
    return block.square().mean(dim=(0, 2))


def order_channels(energy: torch.Tensor, groups: tuple[ChannelGroup, ...], unit: SplitUnit) -> torch.Tensor:
    """Put channels into groups by their energy, strongest first; inside a group they keep their order.

    Args:
        energy: ``(num_kv_heads, head_dim)``.
        groups: Sizes to fill.
        unit: ``rope_pair`` keeps ``j`` and ``j + head_dim / 2`` together.

    Returns:
        ``(num_kv_heads, head_dim)`` int16: the channel at each place.
    """
    half = energy.shape[-1] // 2
    if unit == "rope_pair":
        ranked = (energy[:, :half] + energy[:, half:]).argsort(dim=-1, descending=True, stable=True)
        ranked = torch.stack([ranked, ranked + half], dim=-1).flatten(1)
    else:
        ranked = energy.argsort(dim=-1, descending=True, stable=True)
    parts = ranked.split([group.size for group in groups], dim=-1)
    return torch.cat([part.sort(dim=-1)[0] for part in parts], dim=-1).to(torch.int16)
