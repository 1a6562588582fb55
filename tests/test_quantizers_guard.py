"""The guard and layer_bits: layers that need more than the rest, found and reported."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_turboquant import PRESETS, TurboQuantConfig
from hf_turboquant.ops import AttendOptions, attend, materialize
from hf_turboquant.quantizers.guard import NOISE_LIMIT, guard_keys, predicted_noise
from hf_turboquant.quantizers.split import channel_energy
from hf_turboquant.store import KVStore
from tests.test_quantizers_attend import GROUP, dense_reference
from tests.test_quantizers_split import planned_store

HEADS, HEAD_DIM, TOKENS = 2, 64, 700


def turned(vector: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate ``(heads, head_dim)`` by the position embedding: ``(heads, positions, head_dim)``."""
    half = vector.shape[-1] // 2
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    first, second = vector[:, None, :half], vector[:, None, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def keys_with_bias(strength: float, *, pairs: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    """Return keys of norm 8 with a bias on a few fast pairs, turned like the keys themselves."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator)
    bias = torch.zeros(HEADS, HEAD_DIM)
    bias[:, 4 : 4 + pairs] = strength * 8 / pairs**0.5
    return keys + turned(bias, torch.arange(tokens).float())


def store_of(config: TurboQuantConfig, keys: torch.Tensor, layer_idx: int = 3) -> KVStore:
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(6))
    store = planned_store(config, keys, values, layer_idx)
    store.append(keys, values)
    return store


def logit_noise(store: KVStore, keys: torch.Tensor) -> float:
    """Return the rms error of scaled logits of random queries with the rebuilt keys."""
    query = torch.randn(1, HEADS, 64, HEAD_DIM)
    error = (materialize(store.view(), which="keys") - keys)[:, :, 4:500]
    return float((query @ error.transpose(-1, -2) / HEAD_DIM**0.5).square().mean().sqrt())


@pytest.mark.parametrize("preset", ["k4v4", "k4v3", "k3v3", "k3v2", "k2v2"])
def test_plain_keys_break_and_guarded_keys_hold(preset: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_with_bias(15)
    config = PRESETS[preset]
    with caplog.at_level(logging.WARNING, "hf_turboquant"):
        guarded = store_of(config, keys)
    unguarded = store_of(config.replace(guard="off"), keys)
    healthy = store_of(config, keys_with_bias(0))
    assert logit_noise(unguarded, keys) > 3 * logit_noise(healthy, keys_with_bias(0))
    assert logit_noise(guarded, keys) < 1.1 * logit_noise(healthy, keys_with_bias(0))
    assert "8 strongest channels of each head are kept exact" in guarded.guard
    assert not healthy.guard
    assert [record.getMessage() for record in caplog.records] == [f"layer 3: {guarded.guard}"]


def test_bias_on_too_many_channels_gets_8_bits(caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_with_bias(25, pairs=20)
    with caplog.at_level(logging.WARNING, "hf_turboquant"):
        store = store_of(TurboQuantConfig(key_bits=3, key_split="even"), keys)
    assert [group.bits for group in store.keys.format.groups] == [8]
    assert store.guard.startswith("keys are kept in 8 bits: 3-bit codes would move logits by about")
    assert len(caplog.records) == 1
    assert logit_noise(store, keys) < NOISE_LIMIT


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TurboQuantConfig(guard="off"), id="off"),
        pytest.param(TurboQuantConfig(key_bits=8), id="8 bits"),
        pytest.param(TurboQuantConfig(key_bits=16), id="16 bits"),
        pytest.param(TurboQuantConfig(key_codec="prod"), id="prod"),
    ],
)
def test_guard_leaves_alone_what_it_is_not_for(config: TurboQuantConfig) -> None:
    keys = keys_with_bias(15)
    decision = guard_keys(config, channel_energy(keys, centered=True))
    assert (decision.exact_channels, decision.key_bits, decision.reason) == (0, config.key_bits, "")
    assert not store_of(config, keys).guard


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_predicted_noise_is_what_is_measured(bits: int) -> None:
    config = TurboQuantConfig(key_bits=bits, guard="off")
    keys = keys_with_bias(2)
    predicted = predicted_noise(config, channel_energy(keys, centered=True), 0)
    assert predicted == pytest.approx(logit_noise(store_of(config, keys), keys), rel=0.1)


@pytest.mark.parametrize("split", ["none", "even", "outlier"])
@pytest.mark.parametrize("unit", ["channel", "rope_pair"])
def test_attention_over_guarded_keys(split: str, unit: str) -> None:
    config = TurboQuantConfig(key_bits=3, key_split=split, split_unit=unit)  # type: ignore[arg-type]
    keys = keys_with_bias(15)
    store = store_of(config, keys)
    assert store.keys.format.groups[0].bits == 16
    query = torch.randn(1, HEADS * GROUP, 2, HEAD_DIM)
    options = AttendOptions(scaling=0.05, is_causal=True)
    got = attend(query, store.view(), options)
    torch.testing.assert_close(got.double(), dense_reference(query, store, options), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head_dim", [16, 32, 40])
def test_heads_too_small_for_exact_channels_get_8_bits(head_dim: int) -> None:
    keys = torch.randn(1, HEADS, TOKENS, head_dim)
    keys[..., 0] *= 150
    for split in ("none", "outlier"):
        config = TurboQuantConfig(key_bits=3, key_split=split)  # type: ignore[arg-type]
        sizes = [(group.size, group.bits) for group in store_of(config, keys).keys.format.groups]
        small = head_dim == 16 or split == "outlier"
        assert sizes == ([(head_dim, 8)] if small else [(8, 16), (head_dim - 8, 3)])


def test_guarded_store_goes_on_like_any_other() -> None:
    keys = keys_with_bias(15, tokens=1200)
    config = TurboQuantConfig()
    once, pieces = store_of(config, keys), planned_store(config, keys, keys)
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(6))
    for start in range(0, 1200, 70):
        pieces.append(keys[:, :, start : start + 70], values[:, :, start : start + 70])
    assert pieces.guard == once.guard != ""
    assert torch.equal(*(materialize(store.view(), which="keys") for store in (once, pieces)))
    once.reset()
    assert once.guard == ""


def test_layer_bits_change_the_codecs_of_their_layer_only() -> None:
    keys = keys_with_bias(0)
    config = PRESETS["k3v2"].replace(layer_bits={0: (8, 4), 5: (16, 16)})
    formats = [store_of(config, keys, layer).keys.format for layer in (0, 1, 5)]
    assert [[group.bits for group in fmt.groups] for fmt in formats] == [[8], [4, 2], []]
    assert store_of(config, keys, 0).values.format.groups[0].bits == 4
