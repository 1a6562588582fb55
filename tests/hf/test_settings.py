"""Around generate(): patched models, pipelines, dtypes, threads, adapters, devices and encoder-decoders."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

import hf_turboquant.generation
from hf_turboquant import TurboQuantCache, enable
from hf_turboquant.errors import ConfigError, UnsupportedModelError
from hf_turboquant.generation import patch_generation
from hf_turboquant.integrate import attention_obstacle
from tests.helpers import EXACT, random_ids, tiny_model

NO_WINDOW = EXACT.replace(residual_window=0)


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **options)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TurboQuantCache]:
    """Collect the caches that a patched model makes."""
    caches: list[TurboQuantCache] = []

    class Spy(TurboQuantCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr(hf_turboquant.generation, "TurboQuantCache", Spy)
    return caches


# patched models


def test_a_patched_model_generates_from_a_compressed_cache_until_it_is_undone(made: list[TurboQuantCache]) -> None:
    model = tiny_model("llama")
    ids = random_ids(1, 300)
    want = generate(model, ids)
    with patch_generation(model, NO_WINDOW) as same:
        assert same is model
        assert torch.equal(generate(model, ids), want)
        assert len(made) == 1
        assert made[0].path_report().compressed_calls > 0
        dense = DynamicCache(config=model.config)
        generate(model, ids, past_key_values=dense)
        assert dense.get_seq_length() == 309
        generate(model, ids, cache_implementation="static")
        generate(model, ids, use_cache=False)
        assert len(made) == 1
    assert torch.equal(generate(model, ids), want)
    assert len(made) == 1
    assert "_prepare_cache_for_generation" not in model.__dict__


def test_patches_nest_and_undo_in_order(made: list[TurboQuantCache]) -> None:
    model = tiny_model("llama")
    outer = patch_generation(model, "k4v4")
    with patch_generation(model, "k2v2"):
        generate(model, random_ids(1, 20))
    generate(model, random_ids(1, 20))
    outer.undo()
    outer.undo()
    generate(model, random_ids(1, 20))
    assert [cache.turboquant_config.key_bits for cache in made] == [2, 4]


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", unk_token="w2")


def test_pipelines_and_assistants_use_it(made: list[TurboQuantCache]) -> None:
    model = tiny_model("llama")
    with patch_generation(model, "k4v4"):
        text = pipeline("text-generation", model=model, tokenizer=word_tokenizer())("w7 w8 w9", max_new_tokens=5)
    assert text[0]["generated_text"].startswith("w7 w8 w9")
    assert len(made) == 1
    main, draft = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    ids = random_ids(1, 300)
    want = generate(main, ids)
    with patch_generation(main, NO_WINDOW), patch_generation(draft, NO_WINDOW):
        assert torch.equal(generate(main, ids, assistant_model=draft), want)
    assert {len(cache) for cache in made[1:]} == {1, 2}


def test_a_patched_encoder_decoder_compresses_both_attentions(made: list[TurboQuantCache]) -> None:
    model = bart()
    ids = random_ids(2, 300)
    want = generate(model, ids)
    with patch_generation(model, NO_WINDOW):
        assert torch.equal(generate(model, ids), want)
    assert len(made) == 2


def test_patching_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="unknown preset"):
        patch_generation(tiny_model("llama"), "k9")
    with pytest.raises(ConfigError, match="unknown setting sinks"):
        patch_generation(tiny_model("llama"), sinks=3)
    with pytest.raises(UnsupportedModelError, match="must be able to generate"):
        patch_generation(AutoModel.from_config(tiny_model("llama").config))


# encoder-decoders

SMALL = {"vocab_size": 97, "d_model": 32, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1}


def bart() -> PreTrainedModel:
    torch.manual_seed(7)
    config = BartConfig(
        **SMALL, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=512, bos_token_id=1, init_std=0.3,
        forced_eos_token_id=None,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def t5() -> PreTrainedModel:
    torch.manual_seed(7)
    config = T5Config(**SMALL, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("make", [bart, t5])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("route", ["plain", "enabled"])
def test_self_and_cross_attention_are_compressed(make: Any, beams: int, route: str) -> None:
    model = make()
    obstacle = attention_obstacle(model)
    if obstacle and route == "enabled":
        pytest.skip(f"in this transformers, {obstacle}")
    ids = random_ids(2, 300)
    mask = torch.ones_like(ids)
    mask[1, 200:] = 0
    options = {"attention_mask": mask, "num_beams": beams}
    want = generate(model, ids, **options)
    cache = TurboQuantCache.encoder_decoder(model.config, NO_WINDOW)
    assert isinstance(cache, EncoderDecoderCache)
    with enable(model) if route == "enabled" else torch.no_grad():
        got = generate(model, ids, past_key_values=cache, **options)
    assert torch.equal(got, want)
    assert cache.cross_attention_cache.layers[0].store.num_blocks > 0
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert (part.path_report().compressed_calls > 0) != bool(obstacle)
        assert (part.path_report().materialized_calls > 0) == bool(obstacle)


# settings of the process


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_any_dtype_under_inference_mode(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    ids = random_ids(2, 420)
    with torch.inference_mode():
        dense = DynamicCache(config=model.config)
        cache = TurboQuantCache(model.config, NO_WINDOW)
        for part in ids.split((400, 13, 1, 1, 1, 1, 1, 1, 1), dim=1):
            want = model(part, past_key_values=dense).logits
            got = model(part, past_key_values=cache).logits
            assert got.dtype == dtype
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
        out = generate(model, ids, past_key_values=TurboQuantCache(model.config, "k4v4"))
    assert out.shape == (2, 430)
    assert cache.layers[0].store.tail_keys.dtype == dtype


def test_threads_share_a_model_but_not_a_cache() -> None:
    model = tiny_model("llama")
    prompts = [random_ids(1, 300 + 40 * index, seed=index) for index in range(3)]
    want = [generate(model, ids, past_key_values=TurboQuantCache(model.config, "k3v2")) for ids in prompts]
    got: list[Any] = [None] * len(prompts)

    def work(index: int) -> None:
        got[index] = generate(model, prompts[index], past_key_values=TurboQuantCache(model.config, "k3v2"))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_layers_that_accelerate_moves_about(tmp_path: Path) -> None:
    from accelerate import dispatch_model

    model = tiny_model("llama")
    ids = random_ids(2, 300)
    want = generate(model, ids, past_key_values=TurboQuantCache(model.config, "k3v2"))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    moved = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    cache = TurboQuantCache(model.config, "k3v2")
    assert torch.equal(generate(moved, ids, past_key_values=cache), want)
    assert cache.path_report().materialized_calls == 0


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    ids = random_ids(1, 300)
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        want = adapted.generate(input_ids=ids, past_key_values=DynamicCache(config=model.config), **options)
        cache = TurboQuantCache(model.config, NO_WINDOW)
        got = adapted.generate(input_ids=ids, past_key_values=cache, **options)
    assert torch.equal(got, want)
    assert cache.path_report().materialized_calls == 0
