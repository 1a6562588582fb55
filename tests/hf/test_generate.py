"""generate() with a compressed cache, against transformers' DynamicCache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_turboquant import TurboQuantCache, TurboQuantConfig
from tests.helpers import EXACT, TINY_CONFIGS, random_ids, tiny_model

MODELS = sorted(TINY_CONFIGS)
PROMPT = 420


def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    with torch.no_grad():
        return model.generate(ids, past_key_values=cache, **options)


def both(name: str, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor, TurboQuantCache]:
    model = tiny_model(name)
    torch.manual_seed(3)
    dense = run(model, DynamicCache(config=model.config), ids, **options)
    cache = TurboQuantCache(model.config, EXACT)
    torch.manual_seed(3)
    return dense, run(model, cache, ids, **options), cache


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bits_give_the_same_greedy_tokens(name: str) -> None:
    dense, ours, cache = both(name, random_ids(1, PROMPT))
    assert torch.equal(dense, ours)
    assert cache.get_seq_length() == PROMPT + 11


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bits_give_the_same_sampled_tokens(name: str) -> None:
    dense, ours, _ = both(name, random_ids(2, 300), do_sample=True, temperature=1.3, top_k=20)
    assert torch.equal(dense, ours)


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bits_give_the_same_tokens_in_a_left_padded_batch(name: str) -> None:
    ids = random_ids(3, PROMPT)
    mask = torch.ones_like(ids)
    for row, padding in ((1, 37), (2, 290)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    dense, ours, _ = both(name, ids, attention_mask=mask)
    assert torch.equal(dense, ours)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(300, 5, 40), (20, 290, 200)], ids=["short-turns", "long-turns"])
def test_sixteen_bits_give_the_same_tokens_over_several_turns(name: str, sizes: tuple[int, ...]) -> None:
    model = tiny_model(name)
    outputs = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, EXACT)):
        ids = random_ids(1, 0)
        for turn, size in enumerate(sizes):
            ids = run(model, cache, torch.cat([ids, random_ids(1, size, seed=turn)], dim=1))
        outputs.append(ids)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_any_attention_implementation_gives_the_same_tokens(name: str, attention: str) -> None:
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    ids = random_ids(1, PROMPT)
    dense = run(model, DynamicCache(config=model.config), ids)
    with pytest.warns(UserWarning, match="rebuilt") if attention == "eager" else _nothing():
        ours = run(model, TurboQuantCache(model.config, EXACT), ids)
    assert torch.equal(dense, ours)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_decoding_reads_the_compressed_store_and_never_rebuilds_it(name: str) -> None:
    _, _, cache = both(name, random_ids(1, PROMPT))
    report = cache.path_report()
    assert report.compressed_calls == 2 * 11
    assert report.materialized_calls == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_padded_decoding_reads_the_compressed_store(name: str) -> None:
    ids = random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    ids[1, :50], mask[1, :50] = 0, 0
    _, _, cache = both(name, ids, attention_mask=mask)
    assert cache.path_report().materialized_calls == 0


@pytest.mark.parametrize("preset", ["k8v4", "k4v4", "k3v3", "k3v2", "k2v2"])
@pytest.mark.parametrize("name", MODELS)
def test_presets_give_finite_close_logits_and_compress(name: str, preset: str) -> None:
    model = tiny_model(name)
    ids = random_ids(2, 700)
    with torch.no_grad():
        want = model(ids).logits[:, 600:]
        cache = TurboQuantCache(model.config, preset)
        model(ids[:, :600], past_key_values=cache)
        got = model(ids[:, 600:], past_key_values=cache).logits
    assert torch.isfinite(got).all()
    kl = torch.nn.functional.kl_div(got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="none").sum(
        -1
    )
    assert 0 < float(kl.mean()) < 2e-3
    compressed = [layer for layer in cache.memory_report().layers if layer.compressed]
    assert compressed
    for layer in compressed:
        assert layer.bytes_held < 0.75 * layer.dense_bytes


def test_more_bits_are_closer() -> None:
    model = tiny_model("llama")
    ids = random_ids(2, 700)
    errors = []
    with torch.no_grad():
        want = model(ids).logits[:, 600:]
        for bits in (1, 2, 3, 4, 8, 16):
            cache = TurboQuantCache(model.config, TurboQuantConfig(key_bits=bits, value_bits=bits))
            model(ids[:, :600], past_key_values=cache)
            got = model(ids[:, 600:], past_key_values=cache).logits
            errors.append(float((got - want).norm() / want.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5


def test_prod_keys_generate() -> None:
    model = tiny_model("llama")
    cache = TurboQuantCache(model.config, key_codec="prod", key_bits=3)
    out = run(model, cache, random_ids(1, PROMPT))
    assert out.shape == (1, PROMPT + 12)
    assert cache.path_report().materialized_calls == 0
