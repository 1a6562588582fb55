"""Switch a model to the registered attention, and back."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from hf_turboquant.attention import NAME, turboquant_attention
from hf_turboquant.errors import UnsupportedModelError
from hf_turboquant.masks import turboquant_mask

_PREVIOUS: Final = "_turboquant_previous_attention"

UNSAFE_MODEL_TYPES: Final[dict[str, str]] = {
    "axk2": "its sparse attention branches on the name",
    "bigbird_pegasus": "it computes attention itself but builds its masks for the name",
    "deepseek_v32": "its sparse attention branches on the name",
    "deepseek_v4": "its sparse attention branches on the name",
    "doge": "it derives masks of its own from those built for the name",
    "git": "it computes attention itself but builds its masks for the name",
    "glm_moe_dsa": "its sparse attention branches on the name",
    "hy_v4": "its sparse attention branches on the name",
    "nllb-moe": "it computes attention itself but builds its masks for the name",
}
"""Model types that give wrong tokens under any registered attention name, and why."""

_UNSAFE_LAYER_TYPES: Final = frozenset(
    {
        "compressed_sparse_attention",
        "deepseek_sparse_attention",
        "heavily_compressed_attention",
        "indexed_attention",
        "minimax_sparse_attention",
        "qwen_sparse_attention",
    }
)


class EnabledAttention:
    """What :func:`enable` returns; as a context manager it switches the model back on exit."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __enter__(self) -> PreTrainedModel:
        """Return the model, already switched."""
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Switch the model back."""
        disable(self.model)


def enable(model: PreTrainedModel) -> EnabledAttention:
    """Let the attention of a model call the fused kernels by name.

    A :class:`TurboQuantCache` works without this through sdpa. Under the registered name, attention with a softcap or
    sink logits reads the compressed store too. Calls without a compressed cache go to sdpa. Vision-language models are
    switched in their text model only.

    Args:
        model: A transformers model. Changed in place.

    Returns:
        A context manager that switches back on exit; ignoring it leaves the model switched until :func:`disable`.

    Raises:
        UnsupportedModelError: The model would give wrong results under a registered name, or takes none. It is
            unchanged, and a compressed cache still works with it as it is.
    """
    obstacle = attention_obstacle(model)
    if obstacle:
        raise UnsupportedModelError(
            f"model of type {model.config.model_type!r} cannot use the registered attention: {obstacle}. Leave the "
            "model as it is: generate(past_key_values=TurboQuantCache(...)) serves it without a registered name"
        )
    AttentionInterface.register(NAME, turboquant_attention)
    AttentionMaskInterface.register(NAME, turboquant_mask)
    if not hasattr(model, _PREVIOUS):
        setattr(model, _PREVIOUS, _implementations(model.config))
    key = _text_key(model.config)
    model.set_attn_implementation(NAME if key is None else {key: NAME})
    return EnabledAttention(model)


def disable(model: PreTrainedModel) -> None:
    """Switch a model back to the attention it had before :func:`enable`; nothing happens to one never enabled."""
    previous = getattr(model, _PREVIOUS, None)
    if previous is None:
        return
    for config, name in previous:
        config._attn_implementation_internal = name
    delattr(model, _PREVIOUS)


def attention_obstacle(model: PreTrainedModel) -> str:
    """Say what keeps a model from the registered attention; empty when nothing does."""
    text = model.config.get_text_config(decoder=True)
    for model_type in (model.config.model_type, text.model_type):
        if model_type in UNSAFE_MODEL_TYPES:
            return UNSAFE_MODEL_TYPES[model_type]
    unsafe = sorted(_UNSAFE_LAYER_TYPES.intersection(getattr(text, "layer_types", None) or ()))
    if unsafe:
        return f"it has layers of type {', '.join(unsafe)}"
    if not (model.is_backend_compatible() or getattr(model, "_supports_sdpa", False)):
        return "its class declares neither sdpa nor registered attention"
    return ""


def _text_key(config: PreTrainedConfig) -> str | None:
    """Return the name of the text configuration inside a composite one; None when it is the configuration itself."""
    text = config.get_text_config(decoder=True)
    for name in config.sub_configs:
        if getattr(config, name, None) is text:
            return str(name)
    return None


def _implementations(config: PreTrainedConfig) -> list[tuple[Any, str | None]]:
    """Return every configuration in a tree with the attention it names."""
    found = [(config, config._attn_implementation)]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            found += _implementations(part)
    return found
