"""What transformers asks of a cache, one call at a time."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from transformers import DynamicCache

from hf_turboquant import PRESETS, TurboQuantCache, TurboQuantConfig
from hf_turboquant.errors import CacheStateError, ConfigError, ShapeError, ValueRangeError
from hf_turboquant.layers import crops_to_length
from tests.helpers import EXACT, TINY_CONFIGS, dense_attention, random_kv

LLAMA = TINY_CONFIGS["llama"]


def fill(cache: DynamicCache, tokens: int, *, batch: int = 2, seed: int = 0) -> DynamicCache:
    for layer in range(2):
        cache.update(*random_kv(batch, 2, tokens, 16, seed=seed + layer), layer)
    return cache


def test_it_is_a_dynamic_cache() -> None:
    cache = TurboQuantCache(LLAMA)
    assert isinstance(cache, DynamicCache)
    assert cache.turboquant_config == PRESETS["k4v4"]
    assert len(cache) == 2
    assert cache.is_sliding == [False, False]
    assert cache.is_compileable is False


def test_lengths_and_mask_sizes_are_those_of_the_dense_cache() -> None:
    ours, dense = TurboQuantCache(LLAMA), DynamicCache(config=LLAMA)
    for tokens in (300, 1, 1, 200):
        fill(ours, tokens)
        fill(dense, tokens)
        assert ours.get_seq_length() == dense.get_seq_length()
        assert ours.get_mask_sizes(5, 1) == dense.get_mask_sizes(5, 1)


def test_update_accepts_what_any_version_passes() -> None:
    cache = TurboQuantCache(LLAMA)
    keys, values = random_kv(1, 2, 5, 16)
    cache.update(keys, values, 0)
    cache.update(keys, values, 0, {"cache_position": torch.arange(5)})
    cache.update(keys, values, 0, kwargs={"position_ids": None})
    assert cache.get_seq_length() == 15


def test_a_prompt_comes_back_as_it_is() -> None:
    keys, values = random_kv(1, 2, 400, 16)
    back = TurboQuantCache(LLAMA, "k2v2").update(keys, values, 0)
    assert back[0] is keys
    assert back[1] is values


@pytest.mark.parametrize("count", [1, 3, 128, 129, 400])
def test_attention_on_handles_equals_attention_on_the_tensors_they_stand_for(count: int) -> None:
    cache = TurboQuantCache(LLAMA, "k3v2")
    cache.update(*random_kv(2, 2, 500, 16), 0)
    keys, values = cache.update(*random_kv(2, 2, count, 16, seed=4), 0)
    query = torch.randn(2, 4, count, 16)
    mask = torch.ones(count, 500 + count, dtype=torch.bool).tril(500)[None, None]
    got = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    want = dense_attention(query, keys.materialize(), values.materialize(), scaling=0.25, mask=mask)
    torch.testing.assert_close(got, want.float(), rtol=2e-5, atol=2e-5)
    assert cache.path_report().materialized_calls == 0


def test_fresh_tokens_of_a_long_chunk_are_read_exactly() -> None:
    cache = TurboQuantCache(LLAMA, "k2v2")
    cache.update(*random_kv(1, 2, 500, 16), 0)
    fresh = random_kv(1, 2, 300, 16, seed=4)
    keys, values = cache.update(*fresh, 0)
    assert torch.equal(keys.materialize()[:, :, 500:], fresh[0])
    assert torch.equal(values.materialize()[:, :, 500:], fresh[1])


def test_any_other_operation_gets_the_dense_tensor_and_is_counted_and_warned_of_once() -> None:
    cache = TurboQuantCache(LLAMA, EXACT)
    prompt, fresh = random_kv(1, 2, 300, 16), random_kv(1, 2, 1, 16, seed=1)
    cache.update(*prompt, 0)
    keys, _ = cache.update(*fresh, 0)
    with pytest.warns(UserWarning, match="layer 0: dense keys or values were rebuilt for aten"):
        doubled = keys * 2
    assert torch.equal(doubled, 2 * torch.cat([prompt[0], fresh[0]], dim=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(keys + 0, torch.cat([prompt[0], fresh[0]], dim=2))
    assert cache.path_report().materialized_calls == 2
    assert "rebuilt for aten" in str(cache.path_report())


def test_repeating_heads_keeps_the_handle() -> None:
    cache = TurboQuantCache(LLAMA, "k4v4")
    cache.update(*random_kv(2, 2, 300, 16), 0)
    keys, values = cache.update(*random_kv(2, 2, 1, 16, seed=1), 0)
    query = torch.randn(2, 6, 1, 16)
    want = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    wide = [t[:, :, None, :, :].expand(2, 2, 3, 301, 16).reshape(2, 6, 301, 16) for t in (keys, values)]
    assert wide[0].shape == (2, 6, 301, 16)
    got = torch.nn.functional.scaled_dot_product_attention(query, *wide)
    assert torch.equal(got, want)
    assert cache.path_report().materialized_calls == 0
    assert torch.equal(wide[0].materialize(), keys.materialize().repeat_interleave(3, dim=1))


def test_keys_and_values_of_a_layer_are_handles() -> None:
    cache = TurboQuantCache(LLAMA, EXACT)
    prompt = random_kv(1, 2, 300, 16)
    assert cache.layers[0].keys is None
    cache.update(*prompt, 0)
    assert cache.layers[0].keys.shape == prompt[0].shape
    assert torch.equal(cache.layers[0].values.materialize(), prompt[1])


def test_crop_reorder_repeat_and_select_match_the_dense_cache() -> None:
    ours, dense = TurboQuantCache(LLAMA, EXACT), DynamicCache(config=LLAMA)
    for cache in (ours, dense):
        fill(cache, 600)
        cache.crop(-250)
        cache.crop(350 if crops_to_length() else 0)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 2]))
        fill(cache, 200, batch=3, seed=8)
    assert ours.get_seq_length() == dense.get_seq_length() == 550
    for mine, theirs in zip(ours.layers, dense.layers, strict=True):
        assert torch.equal(mine.keys.materialize(), theirs.keys)
        assert torch.equal(mine.values.materialize(), theirs.values)


def test_reset_and_copy() -> None:
    cache = fill(TurboQuantCache(LLAMA), 300)
    twin = copy.deepcopy(cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert twin.get_seq_length() == 300
    fill(cache, 20, batch=5)
    assert cache.get_seq_length() == 20


def test_a_cache_frees_its_memory_with_the_last_reference() -> None:
    cache = fill(TurboQuantCache(LLAMA, "k4v4"), 300)
    keys, values = cache.update(*random_kv(2, 2, 1, 16), 0)
    torch.nn.functional.scaled_dot_product_attention(torch.randn(2, 2, 1, 16), keys, values)
    arena = weakref.ref(cache.layers[0].store.arenas[0])
    gc.disable()
    try:
        del cache, keys, values
        assert arena() is None
    finally:
        gc.enable()


def test_keys_that_carry_gradients_take_the_dense_path() -> None:
    cache = TurboQuantCache(LLAMA, "k4v4")
    cache.update(*random_kv(1, 2, 300, 16), 0)
    keys, values = random_kv(1, 2, 2, 16, seed=1)
    keys.requires_grad_()
    all_keys, _ = cache.update(keys, values, 0)
    all_keys.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))


# memory


def test_memory_is_counted_from_storages_and_follows_the_formula() -> None:
    cache = TurboQuantCache(LLAMA, "k4v3")
    keys, values = random_kv(2, 2, 4 + 128 + 10 * 128, 16, dtype=torch.bfloat16)
    cache.update(keys, values, 0)
    report = cache.memory_report()
    per_block = 2 * 2 * ((128 * 8 + 256 + 32) + (16 * 48 + 256))
    exact = 2 * 2 * (4 + 128) * 2 * 16 * 2
    assert report.layers[0].bytes_held == 10 * per_block + exact
    assert report.layers[0].dense_bytes == 2 * keys.numel() * 2
    assert report.bytes_held == report.layers[0].bytes_held + report.table_bytes
    assert report.tokens == 4 + 128 + 1280
    assert f"{report.ratio:.2f}x smaller" in str(report)


def test_an_empty_cache_reports_nothing() -> None:
    report = TurboQuantCache(LLAMA).memory_report()
    assert (report.tokens, report.bytes_held, report.ratio) == (0, 0, 1.0)


# bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: TurboQuantCache(LLAMA, "k9v9"), "unknown preset 'k9v9'; presets are k8v4, k4v4", id="preset"
        ),
        pytest.param(lambda: TurboQuantCache(LLAMA, 4), "preset name .* or a TurboQuantConfig, got int", id="type"),
        pytest.param(lambda: TurboQuantCache("llama"), "got str; pass model.config", id="model-config"),
        pytest.param(
            lambda: TurboQuantCache(LLAMA, bits=4), "unknown setting bits; TurboQuantConfig has", id="setting"
        ),
        pytest.param(lambda: TurboQuantConfig(key_bits=5), r"key_bits must be one of .*got 5", id="bits"),
        pytest.param(lambda: TurboQuantConfig(value_bits=0), r"value_bits must be one of", id="zero-bits"),
        pytest.param(lambda: TurboQuantConfig(key_bits=True), r"got True", id="bool-bits"),
        pytest.param(
            lambda: TurboQuantConfig(key_codec="prod", key_bits=1), "with key_codec=.prod., got 1", id="prod-one-bit"
        ),
        pytest.param(
            lambda: TurboQuantConfig(residual_window=100), "multiple of 128 .*got 100; use 0 or 128", id="window"
        ),
        pytest.param(lambda: TurboQuantConfig(sink_tokens=-1), "non-negative int .tokens., got -1", id="sinks"),
        pytest.param(lambda: TurboQuantConfig(rotation="dct"), "rotation must be one of", id="rotation"),
        pytest.param(lambda: TurboQuantConfig(norm_dtype="int8"), "norm_dtype must be one of", id="norm-dtype"),
        pytest.param(lambda: TurboQuantConfig(backend="cuda"), "backend must be one of", id="backend"),
    ],
)
def test_bad_settings_are_refused_by_name(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_odd_head_dim_is_refused_with_the_layer() -> None:
    cache = TurboQuantCache(LLAMA)
    with pytest.raises(ConfigError, match="layer 1: head_dim must be even to be rotated, got 15"):
        cache.update(*random_kv(1, 2, 5, 15), 1)
    assert cache.get_seq_length(1) == 0


def test_positive_crop_is_a_length_where_transformers_says_so_and_refused_elsewhere() -> None:
    cache = fill(TurboQuantCache(LLAMA), 10)
    if crops_to_length():
        cache.crop(5)
        assert cache.get_seq_length() == 5
        return
    with pytest.raises(CacheStateError, match="crop takes minus the number of tokens to remove, or 0, got 5"):
        cache.crop(5)


def test_a_bad_block_is_refused_with_the_layer_named() -> None:
    cache = TurboQuantCache(LLAMA)
    keys, values = random_kv(1, 2, 300, 16)
    keys[0, 0, 10, 0] = float("nan")
    with pytest.raises(ValueRangeError, match="layer 1: .*finite"):
        cache.update(keys, values, 1)
    assert cache.get_seq_length(1) == 0


def test_batch_change_is_refused() -> None:
    cache = fill(TurboQuantCache(LLAMA), 10)
    with pytest.raises(ShapeError, match="batch=2"):
        fill(cache, 1, batch=3)
    assert cache.get_seq_length() == 10


def test_settings_survive_a_round_trip() -> None:
    config = TurboQuantConfig(key_bits=3, sink_tokens=8, rotation="qr")
    assert TurboQuantConfig.from_dict(config.to_dict()) == config
