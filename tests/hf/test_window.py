"""Sliding windows: what a compressed layer returns, step by step, against transformers' own sliding layer."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Llama4TextConfig, MistralConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_turboquant import TurboQuantCache, TurboQuantConfig, enable
from hf_turboquant.errors import CacheStateError, ValueRangeError
from hf_turboquant.handle import KVHandle
from hf_turboquant.layers import crops_to_length
from hf_turboquant.window_layers import TurboQuantSlidingLayer
from hf_turboquant.window_store import window_pays
from tests.helpers import _COMMON, EXACT, random_ids, random_kv

NO_WINDOW = EXACT.replace(residual_window=0)
RECORDS_PAST = hasattr(DynamicSlidingWindowLayer, "activate_past_recording")

needs_recording = pytest.mark.skipif(not RECORDS_PAST, reason="this transformers cannot roll a window back")


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.materialize() if isinstance(tensor, KVHandle) else tensor


def pair(window: int, config: TurboQuantConfig) -> tuple[TurboQuantSlidingLayer, DynamicSlidingWindowLayer]:
    return TurboQuantSlidingLayer(config, 0, window), DynamicSlidingWindowLayer(sliding_window=window)


def feed_both(
    ours: TurboQuantSlidingLayer, stock: DynamicSlidingWindowLayer, tokens: int, seed: int, batch: int
) -> None:
    keys, values = random_kv(batch, 2, tokens, 16, seed=seed)
    assert ours.get_mask_sizes(tokens) == stock.get_mask_sizes(tokens)
    for got, want in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
        assert got.shape == want.shape
        assert torch.equal(dense(got), want)
    assert ours.get_seq_length() == stock.get_seq_length()


@pytest.mark.parametrize("residual_window", [0, 128])
@pytest.mark.parametrize("window", [400, 512, 513, 700])
@pytest.mark.parametrize("seed", range(3))
def test_it_returns_what_the_stock_layer_returns(window: int, residual_window: int, seed: int) -> None:
    draw = random.Random(seed)
    ours, stock = pair(window, EXACT.replace(residual_window=residual_window))
    batch = 2
    for step in range(40):
        if draw.random() < 0.1 and step:
            order = torch.tensor([draw.randrange(batch) for _ in range(batch)])
            ours.reorder_cache(order)
            stock.reorder_cache(order)
        feed_both(ours, stock, draw.choice([1, 1, 5, 60, 128, 200, 399, 900]), seed * 100 + step, batch)


@needs_recording
@pytest.mark.parametrize("residual_window", [0, 128])
@pytest.mark.parametrize("seed", range(3))
def test_recorded_tokens_come_back_when_cropped(seed: int, residual_window: int) -> None:
    draw = random.Random(seed)
    ours, stock = pair(512, EXACT.replace(residual_window=residual_window))
    for layer in (ours, stock):
        layer.activate_past_recording()
    for step in range(40):
        tokens = draw.choice([1, 4, 9, 300]) if step else 1000
        feed_both(ours, stock, tokens, seed * 100 + step, 1)
        removed = min(draw.choice([0, 1, 3, tokens - 1]), tokens)
        ours.crop(-removed)
        stock.crop(-removed)
        assert ours.get_seq_length() == stock.get_seq_length()


def test_blocks_that_left_the_window_are_freed_and_the_ring_stops_growing() -> None:
    layer = TurboQuantSlidingLayer(TurboQuantConfig(), 0, 1024)
    for step in range(60):
        layer.update(*random_kv(1, 2, 100, 32, seed=step), 0)
    store = layer.store
    assert 1023 <= store.seq_len < 1023 + 100 + 128
    assert len(store.arenas) == 1
    assert store.arenas[0].shape[0] <= (1024 - 128) // 128 + 2
    ring = store.arenas[0]
    for step in range(40):
        layer.update(*random_kv(1, 2, 100, 32, seed=step), 0)
    assert store.arenas[0] is ring


def test_a_prompt_longer_than_the_window_leaves_no_more_than_the_window() -> None:
    layer = TurboQuantSlidingLayer(TurboQuantConfig(), 0, 512)
    layer.update(*random_kv(1, 2, 3000, 32))
    assert layer.store.seq_len == 511
    assert layer.get_seq_length() == 3000
    layer.update(*random_kv(1, 2, 2000, 32))
    assert layer.store.seq_len == 511


@pytest.mark.parametrize("window", [512, 640, 1024, 4096])
def test_a_window_that_pays_is_smaller_at_every_step(window: int) -> None:
    assert window_pays(window, 128)
    model = sliding_model(window)
    cache = TurboQuantCache(model.config, "k4v4")
    keys, values = random_kv(1, 2, window + 300, 32, dtype=torch.bfloat16)
    cache.update(keys, values, 0)
    sizes = []
    for step in range(260):
        cache.update(*random_kv(1, 2, 1, 32, seed=step, dtype=torch.bfloat16), 0)
        sizes.append(cache.memory_report().layers[0])
    assert all(size.tokens == window - 1 and size.compressed for size in sizes)
    assert all(size.bytes_held < size.dense_bytes for size in sizes)


def test_a_window_too_short_to_pay_stays_exact() -> None:
    assert not window_pays(511, 128)
    cache = TurboQuantCache(sliding_model(128).config)
    assert type(cache.layers[0]) is DynamicSlidingWindowLayer
    assert [layer.route for layer in cache.path_report().layers] == ["stock", "stock"]


def test_unwindowed_layers_keep_every_token() -> None:
    model = sliding_model(400)
    cache = TurboQuantCache(model.config, NO_WINDOW, windowed=False)
    want = DynamicCache()
    for step in range(5):
        keys, values = random_kv(1, 2, 300, 16, seed=step)
        got = cache.update(keys, values, 0)
        assert torch.equal(dense(got[0]), want.update(keys, values, 0)[0])


def test_crop_past_the_window_needs_recording_and_says_so() -> None:
    layer = TurboQuantSlidingLayer(EXACT, 0, 512)
    layer.update(*random_kv(1, 2, 600, 16))
    layer.update(*random_kv(1, 2, 3, 16))
    held = layer.store.seq_len
    with pytest.raises(CacheStateError, match="activate_past_recording"):
        layer.crop(-100)
    assert layer.store.seq_len == held
    assert layer.get_seq_length() == 603


def test_a_bad_block_leaves_the_window_as_it_was() -> None:
    layer = TurboQuantSlidingLayer(TurboQuantConfig(), 0, 512)
    layer.update(*random_kv(1, 2, 700, 32))
    before = layer.keys.materialize()
    keys, values = random_kv(1, 2, 900, 32, seed=1)
    keys[0, 0, 600, 0] = float("nan")
    with pytest.raises(ValueRangeError, match="layer 0: .*finite"):
        layer.update(keys, values)
    assert layer.get_seq_length() == 700
    assert torch.equal(layer.keys.materialize(), before)


def sliding_model(window: int) -> PreTrainedModel:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(MistralConfig(**_COMMON, sliding_window=window)).eval()


def chunked_model() -> PreTrainedModel:
    torch.manual_seed(7)
    config = Llama4TextConfig(
        **{**_COMMON, "num_hidden_layers": 2},
        head_dim=16,
        attention_chunk_size=400,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("route", ["plain", "enabled"])
@pytest.mark.parametrize("make", [lambda: sliding_model(400), chunked_model], ids=["sliding", "chunked"])
@pytest.mark.parametrize("padding", [0, 130], ids=["unpadded", "padded"])
@pytest.mark.parametrize("prompt", [395, 790])
def test_tokens_across_the_edge_of_a_window(make, route: str, padding: int, prompt: int) -> None:
    model = make()
    ids = random_ids(2, prompt)
    mask = torch.ones_like(ids)
    ids[1, :padding], mask[1, :padding] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    with torch.no_grad():
        want = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    cache = TurboQuantCache(model.config, NO_WINDOW)
    with enable(model) if route == "enabled" else torch.no_grad(), torch.no_grad():
        got = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(want, got)
    assert all(layer.route == "compressed" for layer in cache.path_report().layers)
    if route == "enabled":
        assert cache.path_report().materialized_calls == 0


@pytest.mark.parametrize("preset", ["k8v4", "k4v4", "k3v2"])
def test_compressed_windows_are_close(preset: str) -> None:
    model = sliding_model(512)
    ids = random_ids(2, 1200)
    with torch.no_grad():
        want = model(ids).logits[:, 1100:]
        cache = TurboQuantCache(model.config, preset)
        model(ids[:, :1100], past_key_values=cache)
        got = torch.cat([model(ids[:, [at]], past_key_values=cache).logits for at in range(1100, 1200)], dim=1)
    kl = torch.nn.functional.kl_div(got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="none").sum(
        -1
    )
    assert 0 < float(kl.mean()) < 3e-3


def test_old_transformers_crop_to_a_length() -> None:
    if not crops_to_length():
        pytest.skip("this transformers takes the tokens to remove")
    layer = TurboQuantSlidingLayer(EXACT, 0, 512)
    layer.update(*random_kv(1, 2, 300, 16))
    layer.crop(120)
    assert layer.get_seq_length() == 120
