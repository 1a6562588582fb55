"""Reference attention over every codec, against float64 attention on the rebuilt tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.ops import AttendOptions, attend, materialize
from hf_turboquant.quantizers import build_key_codec, build_value_codec
from hf_turboquant.store import KVStore
from tests.helpers import random_kv

CPU = torch.device("cpu")
BATCH, HEADS, GROUP, HEAD_DIM = 2, 2, 3, 32

CODECS: dict[str, TurboQuantConfig] = {
    f"k{bits} {centering}": TurboQuantConfig(
        key_bits=bits, value_bits=bits, key_centering=centering, value_centering=centering
    )
    for bits, centering in itertools.product((1, 2, 3, 4, 8), ("none", "block"))
} | {
    "exact": TurboQuantConfig(key_bits=16, value_bits=16),
    "prod": TurboQuantConfig(key_codec="prod", key_bits=3, value_bits=2, key_centering="none"),
    "prod centred": TurboQuantConfig(key_codec="prod", key_bits=4, value_bits=2),
    "qr unbiased": TurboQuantConfig(rotation="qr", scale="unbiased"),
    "no window": TurboQuantConfig(residual_window=0, sink_tokens=0),
}


def filled_store(config: TurboQuantConfig, tokens: int, head_dim: int = HEAD_DIM) -> KVStore:
    keys, values = random_kv(BATCH, HEADS, tokens, head_dim)
    store = KVStore(
        build_key_codec(config, head_dim, keys.dtype, CPU),
        build_value_codec(config, head_dim, keys.dtype, CPU),
        like_keys=keys,
        like_values=values,
        sink_tokens=config.sink_tokens,
        residual_window=config.residual_window,
    )
    store.append(keys, values)
    return store


def dense_reference(query: torch.Tensor, store: KVStore, options: AttendOptions) -> torch.Tensor:
    """Attend in float64 over rebuilt keys and values, every option written out."""
    view = store.view()
    keys, values = (
        materialize(view, which=which).double().repeat_interleave(GROUP, dim=1) for which in ("keys", "values")
    )
    q_len, seq_len = query.shape[2], keys.shape[2]
    scores = query.double() @ keys.transpose(-1, -2) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.mask is not None:
        additive = options.mask
        if additive.dtype == torch.bool:
            additive = torch.zeros(additive.shape).masked_fill(~additive, -torch.inf)
        scores = scores + additive.double()
    else:
        row = torch.arange(q_len)[:, None] + seq_len - q_len
        column = torch.arange(seq_len)
        if options.is_causal:
            scores = scores.masked_fill(column > row, -torch.inf)
        if options.sliding_window is not None:
            scores = scores.masked_fill(column <= row - options.sliding_window, -torch.inf)
    if options.sink_logits is not None:
        extra = options.sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.nan_to_num() @ values


def compare(config: TurboQuantConfig, tokens: int = 700, q_len: int = 2, crop: int = 0, **options: object) -> None:
    store = filled_store(config, tokens)
    store.crop(crop)
    query = torch.randn(BATCH, HEADS * GROUP, q_len, HEAD_DIM)
    chosen = AttendOptions(scaling=0.2, **options)  # type: ignore[arg-type]
    got = attend(query, store.view(), chosen)
    torch.testing.assert_close(got.double(), dense_reference(query, store, chosen), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("config", CODECS.values(), ids=CODECS.keys())
def test_attend_equals_dense_attention_on_rebuilt_tensors(config: TurboQuantConfig) -> None:
    compare(config, is_causal=True)


def visible(*shape: int) -> torch.Tensor:
    """Return a random bool mask that hides a third of the keys, and all keys of one row."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, 0, 0] = False
    return mask


OPTIONS: dict[str, dict[str, object]] = {
    "bool mask": {"mask": visible(BATCH, 1, 2, 700)},
    "mask per head": {"mask": visible(1, HEADS * GROUP, 2, 700)},
    "mask shared by rows": {"mask": visible(BATCH, 1, 1, 700)},
    "float mask": {"mask": torch.randn(BATCH, 1, 2, 700, generator=torch.Generator().manual_seed(4))},
    "causal": {"is_causal": True},
    "softcap": {"softcap": 5.0, "is_causal": True},
    "sink logits": {"sink_logits": torch.tensor([3.0, -1.0, 0.0, 8.0, 2.0, 1.0])},
    "sliding window": {"is_causal": True, "sliding_window": 300},
    "window and no causality": {"sliding_window": 200},
    "all": {"softcap": 5.0, "is_causal": True, "sliding_window": 450, "sink_logits": torch.arange(6.0)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("centering", ["none", "block"])
def test_options_change_what_they_should(options: dict[str, object], centering: str) -> None:
    compare(TurboQuantConfig(key_bits=3, key_centering=centering, value_centering=centering), **options)


@pytest.mark.parametrize("crop", [100, 200, 500, 697])
def test_cropped_blocks_are_read_as_far_as_they_go(crop: int) -> None:
    compare(TurboQuantConfig(key_bits=4, value_centering="block"), crop=crop, is_causal=True)


def test_centred_scores_are_those_of_keys_with_the_mean_added_back() -> None:
    """The mean enters as one product per block: equal to adding it to every key, written out."""
    config = TurboQuantConfig(key_bits=2, residual_window=0, sink_tokens=0)
    store = filled_store(config, 256)
    codec, tables = store.keys, store.keys.tables
    packed = store.arenas[0].permute(1, 2, 0, 3)[..., : codec.format.nbytes]
    section = codec.format.sections["mean"]
    raw = packed[..., section.offset : section.offset + section.nbytes].contiguous()
    mean = raw.view(torch.bfloat16).float()
    assert tables.rotation is not None
    keys, _ = random_kv(BATCH, HEADS, 256, HEAD_DIM)
    rotated = (keys @ tables.rotation).unflatten(2, (2, 128))
    torch.testing.assert_close(mean, rotated.mean(dim=3), rtol=0.01, atol=0.01)

    query = torch.randn(BATCH, HEADS * GROUP, 1, HEAD_DIM)
    options = AttendOptions(scaling=0.2)
    got = attend(query, store.view(), options)
    keys_back = materialize(store.view(), which="keys")
    residual = keys_back.unflatten(2, (2, 128)) - (mean @ tables.rotation.T)[..., None, :]
    rot_query = (query @ tables.rotation).unflatten(1, (HEADS, GROUP)).squeeze(3)
    by_block = torch.einsum("bhgd,bhnd->bhgn", rot_query, mean)[..., None]
    codes = torch.einsum("bhgd,bhntd->bhgnt", query.unflatten(1, (HEADS, GROUP)).squeeze(3), residual)
    weights = (0.2 * (by_block + codes)).flatten(-2).softmax(dim=-1)
    values = materialize(store.view(), which="values")
    expected = (weights @ values).flatten(1, 2)[:, :, None]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
