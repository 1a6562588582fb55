"""Tiny vision-language models with one image in their prompt, for the conformance run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from evals.conformance_models import draw_weights

IMAGE = 90
"""Token that stands for a piece of an image."""

TEXT_TOKENS = 300

_TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip

Made = tuple[PreTrainedModel, dict[str, Any]]


def _class(name: str) -> Any:
    return getattr(transformers, name)


def _prompt(before: list[int], pieces: int, after: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 80, (TEXT_TOKENS,), generator=generator).tolist()
    return torch.tensor([[*before, *[IMAGE] * pieces, *after, *text]])


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _made(kind: str, config: Any, ids: torch.Tensor, **inputs: Any) -> Made:
    torch.manual_seed(0)
    model = draw_weights(_class(kind)(config))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def _qwen(prefix: str, vision: dict[str, Any]) -> Made:
    text = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
    tokens = {"video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 2}
    config = _class(f"{prefix}Config")(
        text_config=text, vision_config={"depth": 2, **patches, **vision}, image_token_id=IMAGE, **tokens
    )
    ids = _prompt([5, 6, 92], 4, [93])
    return _made(
        f"{prefix}ForConditionalGeneration", config, ids, pixel_values=_pixels(16, 96),
        image_grid_thw=torch.tensor([[1, 4, 4]]), mm_token_type_ids=(ids == IMAGE).long(),
    )  # fmt: skip


def _qwen2_vl() -> Made:
    return _qwen("Qwen2VL", {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2})


def _qwen2_5_vl() -> Made:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
    return _qwen("Qwen2_5_VL", {**sizes, "window_size": 16, "fullatt_block_indexes": [1]})


def _qwen3_vl() -> Made:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
    return _qwen("Qwen3VL", {**sizes, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]})


def _llava() -> Made:
    config = _class("LlavaConfig")(
        text_config=_class("LlamaConfig")(**_TEXT), vision_config=_class("CLIPVisionConfig")(**_VISION, image_size=8),
        image_token_index=IMAGE, image_token_id=IMAGE, vision_feature_layer=-1,
    )  # fmt: skip
    return _made("LlavaForConditionalGeneration", config, _prompt([5, 6], 4, []), pixel_values=_pixels(1, 3, 8, 8))


def _gemma3() -> Made:
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    windows = {"sliding_window": 390, "layer_types": layers}
    config = _class("Gemma3Config")(
        text_config=_class("Gemma3TextConfig")(**_TEXT, **windows, query_pre_attn_scalar=8),
        vision_config=_class("SiglipVisionConfig")(**_VISION, image_size=16), mm_tokens_per_image=4,
        image_token_index=IMAGE, image_token_id=IMAGE, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    ids = torch.cat([_prompt([5, 6, 91], 4, [92]), _prompt([], 0, [])[:, :120]], dim=1)
    return _made(
        "Gemma3ForConditionalGeneration", config, ids, pixel_values=_pixels(1, 3, 16, 16),
        token_type_ids=(ids == IMAGE).long(),
    )  # fmt: skip


def _paligemma() -> Made:
    config = _class("PaliGemmaConfig")(
        text_config=_class("GemmaConfig")(**_TEXT),
        vision_config=_class("SiglipVisionConfig")(**_VISION, image_size=8, projection_dim=32, vision_use_head=False),
        image_token_index=IMAGE, image_token_id=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    ids = _prompt([], 4, [1])
    return _made(
        "PaliGemmaForConditionalGeneration", config, ids, pixel_values=_pixels(1, 3, 8, 8),
        token_type_ids=torch.zeros_like(ids),
    )  # fmt: skip


def _smolvlm() -> Made:
    config = _class("SmolVLMConfig")(
        text_config=_class("LlamaConfig")(**_TEXT), vision_config={**_VISION, "image_size": 16}, image_token_id=IMAGE,
        scale_factor=2,
    )  # fmt: skip
    ids = _prompt([5, 6], 4, [])
    return _made("SmolVLMForConditionalGeneration", config, ids, pixel_values=_pixels(1, 1, 3, 16, 16))


def _internvl() -> Made:
    vision = {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    config = _class("InternVLConfig")(
        text_config=_class("Qwen2Config")(**_TEXT), vision_config=vision, image_token_id=IMAGE, image_seq_length=4,
        downsample_ratio=0.5, vision_feature_layer=-1,
    )  # fmt: skip
    ids = _prompt([5, 6], 4, [])
    return _made("InternVLForConditionalGeneration", config, ids, pixel_values=_pixels(1, 3, 16, 16))


def _mllama() -> Made:
    text = {name: value for name, value in _TEXT.items() if name not in ("head_dim", "max_position_embeddings")}
    vision = {
        **{name: value for name, value in _VISION.items() if name != "num_attention_heads"}, "attention_heads": 2,
        "num_global_layers": 1, "image_size": 8, "vision_output_dim": 32, "intermediate_layers_indices": [0],
        "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    cross = {"cross_attention_layers": [1, 3]}
    config = _class("MllamaConfig")(
        text_config={**text, **cross, "rope_parameters": _ROPE, "model_type": "mllama_text_model"},
        vision_config={**vision, "model_type": "mllama_vision_model"}, image_token_index=IMAGE,
    )  # fmt: skip
    ids = _prompt([], 1, [])
    return _made(
        "MllamaForConditionalGeneration", config, ids, pixel_values=_pixels(1, 1, 1, 3, 8, 8),
        aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long), aspect_ratio_mask=torch.ones(1, 1, 1, dtype=torch.long),
        cross_attention_mask=torch.ones(1, ids.shape[1], 1, 1, dtype=torch.long),
    )  # fmt: skip


MODELS: dict[str, Callable[[], Made]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "gemma3 (images)": _gemma3,
    "paligemma": _paligemma,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "mllama": _mllama,
}
