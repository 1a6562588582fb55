"""A real model on a GPU: the kernels and the reference write the same text, and differ less than bfloat16 does."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch

from hf_turboquant import TurboQuantCache

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPT = 700
"""Tokens of the prompt: four sinks, four packed blocks and a window."""

PRESETS = ["k4v4", "k3v3", "k2v2"]


@lru_cache(maxsize=3)
def _model(dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """Return SmolLM2 on the GPU and ``PROMPT + 32`` tokens of a text."""
    from evals.common import excerpt_ids, load_model

    if dtype != torch.float32:
        model, ids = _model(torch.float32)
        return copy.deepcopy(model).to(dtype), ids
    try:
        model, tokenizer = load_model(dtype=dtype, device="cuda")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return model, torch.tensor([excerpt_ids(tokenizer, PROMPT + 32)], device="cuda")


@torch.no_grad()
def _log_probs(dtype: torch.dtype, preset: str, backend: str) -> torch.Tensor:
    """Return the log probabilities after each of 32 given tokens that read the store, ``(32, vocabulary)`` float32."""
    model, ids = _model(dtype)
    cache = TurboQuantCache(model.config, preset, backend=backend)
    model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
    return model(ids[:, PROMPT:], past_key_values=cache).logits[0].float().log_softmax(-1)


def _divergence(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the mean Kullback-Leibler divergence in nats."""
    return float((want.exp() * (want - got)).sum(-1).mean())


@pytest.mark.parametrize("preset", PRESETS)
def test_same_tokens(preset: str) -> None:
    model, ids = _model(torch.float32)
    texts = []
    for backend in ("triton", "reference"):
        cache = TurboQuantCache(model.config, preset, backend=backend)
        texts.append(
            model.generate(
                ids[:, :PROMPT],
                attention_mask=torch.ones_like(ids[:, :PROMPT]),
                past_key_values=cache,
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
        assert cache.path_report().materialized_calls == 0
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_closer_than_bfloat16_is_to_float32(preset: str, dtype: torch.dtype) -> None:
    """The backends differ by at most twice what running the reference in bfloat16 instead of float32 changes."""
    rounding = _divergence(
        _log_probs(torch.float32, preset, "reference"), _log_probs(torch.bfloat16, preset, "reference")
    )
    difference = _divergence(_log_probs(dtype, preset, "reference"), _log_probs(dtype, preset, "triton"))
    assert difference <= 2 * rounding, f"{difference:.3g} nats between backends, {rounding:.3g} by bfloat16"
