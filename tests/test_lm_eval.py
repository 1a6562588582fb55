"""The model for lm-evaluation-harness: answers read the compressed cache, likelihoods are refused."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_turboquant import TurboQuantCache
from hf_turboquant.errors import ConfigError

PROMPT = "the quick brown fox jumps over the lazy dog. " * 12


def test_without_lm_eval_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    monkeypatch.delitem(sys.modules, "hf_turboquant.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hf_turboquant\[eval\]'"):
        import hf_turboquant.lm_eval  # noqa: F401


@pytest.fixture(scope="module")
def adapter():
    """Return the module, where lm-eval is installed with all it needs."""
    pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError)
    import hf_turboquant.lm_eval

    return hf_turboquant.lm_eval


def build(adapter, model: str, **options):
    return adapter.TurboQuantLM(pretrained=model, device="cpu", dtype="float32", batch_size=1, **options)


def requests(kind: str, *contexts: str, **options):
    from lm_eval.api.instance import Instance

    arguments = {"until": [], "max_gen_toks": 12, "do_sample": False, **options}
    return [Instance(kind, {}, (text, arguments), index) for index, text in enumerate(contexts)]


def test_dense_answer_is_that_of_generate(adapter, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    lm = build(adapter, tiny_model, cache="dense")
    ids = lm.tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    (answer,) = lm.generate_until(requests("generate_until", PROMPT), True)
    assert answer == lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_cache_is_compressed_and_read(adapter, tiny_model, monkeypatch):
    caches = []
    original = TurboQuantCache.__init__

    def remember(cache, *args, **options):
        original(cache, *args, **options)
        caches.append(cache)

    monkeypatch.setattr(TurboQuantCache, "__init__", remember)
    lm = build(adapter, tiny_model, cache="k2v2", split_tail=16)
    lm.generate_until(requests("generate_until", PROMPT, PROMPT[:300]), True)
    assert len(caches) == 2
    # 11 tokens after the first, and the tail of 16 in one step, in each of 2 layers
    assert caches[0].path_report().compressed_calls == 2 * 12
    assert lm.last_report is not None


def test_batch_of_unequal_prompts_answers_like_single_ones(adapter, tiny_model):
    contexts = (PROMPT, PROMPT[:401], "short one")
    single = build(adapter, tiny_model, cache="dense").generate_until(requests("generate_until", *contexts), True)
    lm = adapter.TurboQuantLM(pretrained=tiny_model, device="cpu", dtype="float32", batch_size=3, cache="dense")
    assert lm.generate_until(requests("generate_until", *contexts), True) == single


def test_long_prompts_lose_their_middle(adapter, tiny_model):
    lm = build(adapter, tiny_model)
    ids, mask = lm.tok_batch_encode(["a" * 50 + "b" * 50, "cc"], left_truncate_len=20)
    assert lm.tokenizer.decode(ids[0]) == "a" * 10 + "b" * 10
    assert mask.sum(-1).tolist() == [20, 2]
    beginning_cut = build(adapter, tiny_model, middle_truncation=False)
    assert (
        beginning_cut.tokenizer.decode(beginning_cut.tok_batch_encode(["ab" * 50], left_truncate_len=4)[0][0]) == "abab"
    )


def test_likelihoods_are_refused_with_the_reason(adapter, tiny_model):
    lm = build(adapter, tiny_model)
    for method in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(ConfigError, match="never reads the cache back"):
            method([])


@pytest.mark.parametrize(
    ("options", "message"), [({"cache": "k9v9"}, "unknown preset"), ({"split_tail": -1}, "split_tail")]
)
def test_bad_input_is_refused_before_loading(adapter, options, message):
    with pytest.raises(ConfigError, match=message):
        adapter.TurboQuantLM(pretrained="/no/such/model", **options)


def test_model_is_registered(adapter):
    from lm_eval.api.registry import get_model

    assert get_model("hf-turboquant") is adapter.TurboQuantLM
