"""Layers on several GPUs: each store where its layer is."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_turboquant import TurboQuantCache
from tests.helpers import EXACT, random_ids, tiny_model


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("offloading", [False, True])
def test_stores_lie_where_their_layers_are(offloading: bool) -> None:
    from accelerate import dispatch_model

    model = tiny_model("llama", num_hidden_layers=4)
    ids = random_ids(2, 420)
    options = {"attention_mask": torch.ones_like(ids).cuda(), "max_new_tokens": 12, "do_sample": False}
    alone = model.cuda()
    want = alone.generate(ids.cuda(), past_key_values=DynamicCache(config=model.config), **options)
    places: dict[str, int] = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": i // 2 for i in range(4)}
    cache = TurboQuantCache(model.config, EXACT.replace(residual_window=0), offloading=offloading)
    spread = dispatch_model(alone.cpu(), places)
    got = spread.generate(ids.cuda(), past_key_values=cache, **options)
    assert torch.equal(got.cpu(), want.cpu())
    assert [layer.store.tail_keys.device.index for layer in cache.layers] == [0, 0, 1, 1]
