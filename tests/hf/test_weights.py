"""Models whose weights are not plain floats: from GGUF files and in torchao's integers, with a compressed cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_turboquant import TurboQuantCache, enable
from tests.helpers import EXACT, random_ids, save_byte_model, tiny_model

NO_WINDOW = EXACT.replace(residual_window=0)
BLOCK = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm")
PLACES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def assert_same_tokens(model: PreTrainedModel) -> None:
    """Compare generate() with transformers' cache, on both routes, and run a preset."""
    ids = random_ids(2, 300)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    options["pad_token_id"] = 0
    with torch.inference_mode():
        want = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
        cache = TurboQuantCache(model.config, NO_WINDOW)
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), want)
        assert cache.path_report().compressed_calls > 0
        assert cache.path_report().materialized_calls == 0
        with enable(model):
            named = TurboQuantCache(model.config, NO_WINDOW)
            assert torch.equal(model.generate(ids, past_key_values=named, **options), want)
        preset = TurboQuantCache(model.config, "k4v4")
        assert model.generate(ids, past_key_values=preset, **options).shape == want.shape
    assert len({layer.store.tail_keys.dtype for layer in cache.layers}) == 1


def write_gguf(path: Path, model: PreTrainedModel, kind: Any) -> None:
    """Write a tiny Llama as a GGUF file whose matrices are of one quantized type, norms in float32."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    weights = {"token_embd": model.model.embed_tokens, "output": model.lm_head, "output_norm": model.model.norm}
    for index, layer in enumerate(model.model.layers):
        names = zip(BLOCK, PLACES, strict=True)
        weights |= {f"blk.{index}.{name}": layer.get_submodule(place) for name, place in names}
    for name, module in weights.items():
        data = module.weight.detach().numpy().astype(np.float32)
        if data.ndim == 1:
            writer.add_tensor(f"{name}.weight", data)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_weights_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    source = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", source, gguf.GGMLQuantizationType[kind])
    # in blocks where this transformers has a kernel for the device, else made floats while they are read
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").eval()
    states = torch.randn(5, 64)
    got, want = (m.model.layers[1].self_attn.v_proj(states) for m in (model, source))
    assert 0 < float((got - want).norm() / want.norm()) < 0.15
    assert_same_tokens(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_in_integers_of_torchao(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    scheme = torchao.Int8WeightOnlyConfig()
    if kind == "int4":
        scheme = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32))
    save_byte_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, quantization_config=TorchAoConfig(scheme))
    model.generation_config.eos_token_id = None
    assert "Int" in type(model.model.layers[0].self_attn.k_proj.weight).__name__
    assert_same_tokens(model.eval())
