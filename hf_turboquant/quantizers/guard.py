"""The guard: layers whose keys plain codes would blur, found from the keys themselves.

Some models (Qwen2 is the known one) add a bias to their keys that is many times the rest and, rotated by the position
embedding, does not sit still enough for the mean of a block to take it off. A random rotation spreads it over all
channels, and the error of the codes follows its size. Two remedies: the few channels that carry it are kept exact, or
the layer gets 8-bit keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_turboquant.codebook import load_codebook
from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.layout import EXACT_BITS, ChannelGroup
from hf_turboquant.quantizers.split import MIN_GROUP, channel_groups, order_channels

EXACT_CHANNELS = 8
"""Channels of each head kept exact in a hard layer."""

GUARDED_BITS = 4
"""Widest keys the guard looks at; 8 bits are its own last resort."""

MIN_HEAD_DIM = 32
"""Channels of the smallest head of which 8 are few enough to be kept exact."""

NOISE_LIMIT = 0.5
"""Predicted noise of a logit up to which a layer is left as it is."""

NOISE_CEILING = 1.0
"""Predicted noise of a logit that no layer may keep."""


@dataclass(frozen=True)
class GuardDecision:
    """What becomes of the keys of a layer.

    Attributes:
        exact_channels: Channels of each head to keep exact: 0 or 8.
        key_bits: Width of the others.
        reason: What was done and why, in words; empty if nothing was.
    """

    exact_channels: int
    key_bits: int
    reason: str = ""


def is_guarded(config: TurboQuantConfig) -> bool:
    """Whether the guard may change how keys are stored under some settings."""
    return config.guard != "off" and config.key_codec == "mse" and config.key_bits <= GUARDED_BITS


def guard_keys(config: TurboQuantConfig, energy: torch.Tensor) -> GuardDecision:
    """Decide how the keys of a layer are kept.

    Args:
        config: Settings of the layer; ``guard``, codec, width and split matter.
        energy: ``(num_kv_heads, head_dim)``, mean squares of the channels of the first block, centred if the codes are.

    Returns:
        The decision. Nothing changes unless ``guard`` is ``auto`` and keys are ``mse`` of at most 4 bits.
    """
    unchanged = GuardDecision(0, config.key_bits)
    if not is_guarded(config):
        return unchanged
    energy = energy.double().cpu()
    head_dim = energy.shape[-1]
    noise = predicted_noise(config, energy, 0)
    if noise <= NOISE_LIMIT:
        return unchanged
    share = float((energy.topk(min(EXACT_CHANNELS, head_dim))[0].sum(-1) / energy.sum(-1)).max())
    why = (
        f"{config.key_bits}-bit codes would move logits by about {noise:.2f} (limit {NOISE_LIMIT}); the "
        f"{EXACT_CHANNELS} strongest channels hold up to {share:.0%} of the key energy of a head"
    )
    strongest = channel_groups(config.key_split, head_dim, config.key_bits)[0]
    if head_dim >= MIN_HEAD_DIM and strongest.size >= EXACT_CHANNELS + MIN_GROUP:
        left = predicted_noise(config, energy, EXACT_CHANNELS)
        # worth their bytes where they carry at least half of the variance; a wider code would do as much elsewhere
        if left <= min(noise / 2**0.5, NOISE_CEILING):
            done = f"the {EXACT_CHANNELS} strongest channels of each head are kept exact"
            return GuardDecision(EXACT_CHANNELS, config.key_bits, f"{done}: {why}, {left:.2f} without them")
    if noise > NOISE_CEILING:
        return GuardDecision(0, 8, f"keys are kept in 8 bits: {why}")
    return unchanged


def predicted_noise(config: TurboQuantConfig, energy: torch.Tensor, exact_channels: int) -> float:
    """Predict the standard deviation that coding adds to a scaled logit, in the worst head.

    For a query with entries of mean square 1 and the usual scaling ``1 / sqrt(head_dim)``: a rotated group of ``size``
    channels with energy ``E`` and distortion ``D`` per unit of energy adds ``E D / head_dim`` to the variance.

    Args:
        config: Width and split of the keys.
        energy: ``(num_kv_heads, head_dim)``.
        exact_channels: Channels kept exact.
    """
    head_dim = energy.shape[-1]
    groups = channel_groups(config.key_split, head_dim, config.key_bits, exact_channels=exact_channels)
    ordered = energy.gather(-1, order_channels(energy, groups, config.split_unit).long())
    variance = sum(
        ordered[:, group.start : group.start + group.size].sum(-1) * _distortion(group) / head_dim
        for group in groups
        if group.bits != EXACT_BITS
    )
    assert isinstance(variance, torch.Tensor)
    return float(variance.amax().sqrt())


def _distortion(group: ChannelGroup) -> float:
    """Return the expected squared error of a unit vector of a group."""
    return group.size * load_codebook(group.size, group.bits).mse
