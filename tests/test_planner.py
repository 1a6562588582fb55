"""The planner: published tables to the digit, and the bytes of the real store."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from hf_turboquant import PRESETS, TurboQuantCache, TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.loading import MemoryEstimate, check_fits, estimate_memory, read_config, weight_bytes
from hf_turboquant.planner import (
    DEVICES,
    SHAPES,
    Budget,
    Device,
    ModelShape,
    find_device,
    gpus_needed,
    longest_context,
    parse_count,
    parse_size,
    plan,
    users,
)

GB = 10**9
GIB = 2**30
MILLION = 10**6
LLAMA_70B = SHAPES["llama-70b"]
THOR = Budget(DEVICES["thor"].memory_bytes, weight_bytes=16 * GIB)


# published tables


@pytest.mark.parametrize(("bits", "gb", "per_gpu"), [(16, 327.68, 10.24), (3.5, 71.68, 2.24), (2.5, 51.20, 1.60)])
def test_llama_70b_at_a_million_tokens(bits, gb, per_gpu):
    size = LLAMA_70B.nominal_bytes(MILLION, bits, bits)
    assert size / GB == pytest.approx(gb, abs=1e-9)
    assert size / 32 / GB == pytest.approx(per_gpu, abs=1e-9)
    if bits == 16:
        assert LLAMA_70B.dense_bytes(MILLION) == size


@pytest.mark.parametrize(("bits", "expected"), [(16, 6), (3.5, 26)])
def test_requests_of_a_million_tokens_on_32_gpus(bits, expected):
    # 140 GB of weights and 2 GB of overhead are 6.38 GB on each of 32; a request takes 0.5 GB of activations
    budget = Budget(80 * GB, gpus=32, weight_bytes=140 * GB, fixed_bytes=2 * GB, request_bytes=0.5 * GB)
    assert (budget.memory_bytes - budget.free_bytes) / GB == pytest.approx(6.375)
    assert users(budget, lambda tokens: LLAMA_70B.nominal_bytes(tokens, bits, bits), MILLION) == expected


@pytest.mark.parametrize(("bits", "expected"), [(16, 6), (3.5, 3)])
def test_gpus_for_a_million_tokens(bits, expected):
    budget = Budget(80 * GB, weight_bytes=140 * GB)
    assert gpus_needed(budget, lambda tokens: LLAMA_70B.nominal_bytes(tokens, bits, bits), MILLION) == expected


def test_thor_in_fp16():
    # 122.8 and 16 are GiB, and the geometry is 32 layers of 8 heads of 128 channels: nothing else gives 875k
    assert round(longest_context(THOR, SHAPES["llama-8b"].dense_bytes), -3) == 875_000


def test_thor_at_three_bit_keys_and_two_bit_values():
    # 116 bytes a token and head: keys 32 of 2-bit codes, 16 of signs, two float16 norms; values 32 of codes, and a
    # float32 scale and offset for each of 4 groups
    key_bits, value_bits = 8 * (32 + 16 + 2 * 2) / 128, 8 * (32 + 4 * 2 * 4) / 128
    tokens = longest_context(THOR, lambda count: SHAPES["llama-8b"].nominal_bytes(count, key_bits, value_bits))
    assert tokens / MILLION == pytest.approx(3.86, abs=0.005)
    assert tokens / longest_context(THOR, SHAPES["llama-8b"].dense_bytes) == pytest.approx(4.4, abs=0.05)


def test_plan_gives_the_true_figures_beside_the_nominal_ones():
    dense, ours = plan(SHAPES["llama-8b"], THOR, 128_000, ["k3v2"])
    assert (dense.bits, dense.bytes_per_token, dense.longest) == (16.0, 131072.0, 874_905)
    assert ours.nominal_bytes == pytest.approx(128_000 * 131072 * 2.5 / 16)
    assert 1.1 < ours.held_bytes / ours.nominal_bytes < 1.25
    assert ours.longest < ours.nominal_longest
    assert ours.users < ours.nominal_users


# the real store


def one_layer(num_kv_heads: int, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=num_kv_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=num_kv_heads * head_dim,
    )


def feed(cache: TurboQuantCache, tokens: int, num_kv_heads: int, head_dim: int) -> int:
    """Add tokens to the one layer and return the bytes held without shared tables."""
    keys, values = torch.randn(2, 1, num_kv_heads, tokens, head_dim, dtype=torch.bfloat16)
    cache.update(keys, values, 0)
    return cache.memory_report().layers[0].bytes_held


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("tokens", [1, 4, 5, 100, 260, 261, 1000, 4096])
def test_held_bytes_are_those_of_the_store_after_a_prompt(preset, tokens):
    config = one_layer(2, 64)
    held = feed(TurboQuantCache(config, preset), tokens, 2, 64)
    assert ModelShape.from_config(config).held_bytes(tokens, preset, grown=False) == held


@pytest.mark.parametrize("settings", [{}, {"residual_window": 0, "sink_tokens": 0}, {"key_bits": 16, "value_bits": 16}],
                         ids=["default", "no exact tokens", "16 bits"])  # fmt: skip
def test_held_bytes_bound_a_store_that_grows(settings):
    config, settings = one_layer(1, 32), TurboQuantConfig(**settings)
    shape, cache = ModelShape.from_config(config), TurboQuantCache(config, settings)
    largest_gap, tokens = 0, 0
    while tokens < 128 * 60:
        tokens += 32
        bound = shape.held_bytes(tokens, settings)
        held = feed(cache, 32, 1, 32)
        assert held <= bound, tokens
        largest_gap = max(largest_gap, (bound - held) / bound if tokens > 1000 else 0)
    assert held > 0
    assert largest_gap < 0.15


@pytest.mark.parametrize("window", [1024, 640, 513])
def test_held_bytes_of_a_sliding_layer(window):
    config = MistralConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=128, sliding_window=window
    )
    shape = ModelShape.from_config(config)
    for tokens in (100, 500, 1000, 3000):
        held = feed(TurboQuantCache(config), tokens, 2, 64)
        assert shape.held_bytes(tokens, grown=False) == held, tokens
    cache = TurboQuantCache(config)
    for step in range(1, 100):
        held = feed(cache, 32, 2, 64)
        assert held <= shape.held_bytes(32 * step), step
    assert held > 0.8 * shape.held_bytes(32 * step)


def test_narrow_windows_are_kept_dense():
    config = MistralConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=128, sliding_window=200
    )
    shape = ModelShape.from_config(config)
    assert shape.held_bytes(5000) == shape.dense_bytes(5000) == 200 * 2 * 2 * 2 * 64


def test_layer_bits_are_counted():
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, hidden_size=128)
    shape = ModelShape.from_config(config)
    plain, wide = shape.held_bytes(4096), shape.held_bytes(4096, TurboQuantConfig(layer_bits={0: (8, 8)}))
    assert wide > plain


# geometry


MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32)),
    "mistral, all sliding": (MistralForCausalLM, MistralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, sliding_window=16)),
    "gemma3, sliding and full": (Gemma3ForCausalLM, Gemma3TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1,
        head_dim=32, vocab_size=32, sliding_window=16)),
    "deepseek, latent": (DeepseekV3ForCausalLM, DeepseekV3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=32, kv_lora_rank=32, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_dense_bytes_are_those_of_a_dense_cache(name):
    model_class, config = MODELS[name]
    model = model_class(config).to(torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        # two steps: a sliding layer returns what it is given first, and cuts at the second
        for ids in (torch.arange(40)[None] % 32, torch.tensor([[1]])):
            cache = model(ids, past_key_values=cache).past_key_values
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    window_layers = [layer for layer in ModelShape.from_config(config).layers if layer.window is not None]
    # transformers keeps one token less than a window between steps, and the whole of it during one
    between_steps = sum(2 * layer.values_per_token for layer in window_layers)
    assert ModelShape.from_config(config).dense_bytes(41) - between_steps == held


def test_sliding_layers_stop_growing():
    shape = ModelShape.from_config(MODELS["mistral, all sliding"][1])
    assert shape.dense_bytes(10**9) == shape.dense_bytes(16)
    assert shape.dense_bytes_per_token == 0
    assert longest_context(Budget(GB), shape.dense_bytes) is None


def test_plain_object_will_do():
    class Described:
        num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 64

    assert ModelShape.from_config(Described()).dense_bytes_per_token == 2 * 2 * 4 * 2 * 16


def test_weights_are_counted_without_loading():
    model_class, config = MODELS["llama"]
    expected = sum(parameter.numel() for parameter in model_class(config).parameters()) * 2
    assert weight_bytes(config, torch.bfloat16) == expected
    estimate = estimate_memory(config, tokens=1000, dtype=torch.float32, cache="dense")
    assert estimate == MemoryEstimate(2 * expected, 2 * ModelShape.from_config(config).dense_bytes(1000))


# what cannot be


def test_what_does_not_fit_is_refused_with_figures():
    with pytest.raises(ConfigError, match=r"'big'.*weights take 10000000\.00 GB.*--force"):
        check_fits("big", MemoryEstimate(10**16, 10), torch.device("cpu"), tokens=5)


def test_a_model_larger_than_memory_serves_nobody():
    budget = Budget(10 * GB, weight_bytes=140 * GB)
    assert users(budget, LLAMA_70B.dense_bytes, 1000) == 0
    assert longest_context(budget, LLAMA_70B.dense_bytes) == 0
    assert gpus_needed(Budget(GB, fixed_bytes=2 * GB), LLAMA_70B.dense_bytes, 1000) is None


@pytest.mark.parametrize(("action", "message"), [
    (lambda: find_device("abacus"), "unknown device 'abacus'.*thor.*--memory"),
    (lambda: parse_size("12 parsecs"), "'12 parsecs' must be a size such as 24GB"),
    (lambda: parse_count("many"), "'many' must be a number such as"),
    (lambda: plan(LLAMA_70B, THOR, 0, []), "tokens must be at least 1, got 0"),
    (lambda: plan(LLAMA_70B, THOR, 1, ["k9v9"]), "unknown preset 'k9v9'.*k4v4"),
    (lambda: Budget(GB, gpus=0), "gpus must be at least 1"),
    (lambda: Budget(-1), "memory_bytes must not be negative"),
    (lambda: ModelShape.uniform("m", 0, 1, 1), "layers must be at least 1"),
    (lambda: ModelShape.from_config(object()), "config must have num_hidden_layers as an int, got None"),
    (lambda: read_config("/no/such/model"), "neither a directory with a config.json nor"),
], ids=["device", "size", "count", "tokens", "preset", "gpus", "memory", "shape", "config", "model"])  # fmt: skip
def test_bad_input_says_the_rule(action, message):
    with pytest.raises(ConfigError, match=message):
        action()


@pytest.mark.parametrize(("text", "size"), [("24GB", 24 * GB), ("122.8 GiB", round(122.8 * GIB)), ("500mb", 5 * 10**8),
                                            ("1_000", 1000)])  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size


def test_counts():
    assert [parse_count(text) for text in ("32768", "128k", "1M", "1.5M")] == [32768, 128_000, MILLION, 1_500_000]
    assert find_device("THOR") == Device("Jetson AGX Thor", round(122.8 * GIB))
