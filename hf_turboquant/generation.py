"""Let ``generate()`` of a model use a compressed cache by itself: pipelines and assistants then use it too."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from hf_turboquant.cache import TurboQuantCache
from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError, UnsupportedModelError
from hf_turboquant.presets import resolve_config

_METHOD: Final = "_prepare_cache_for_generation"
_INNER: Final = "turboquant_inner"
_CACHE_NAMES: Final = ("cache", "past_key_values")
_NOT_GIVEN: Final = object()


class PatchedMethod:
    """A method of one model about to be replaced, and what gives it back; a context manager does so on exit.

    Args:
        model: The model.
        name: Of the method.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model = model
        self._name = name
        self._previous = model.__dict__.get(name, _NOT_GIVEN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the change."""
        self.undo()

    def undo(self) -> None:
        """Give the model its method back; a second call does nothing."""
        if self._previous is _NOT_GIVEN:
            self.model.__dict__.pop(self._name, None)
        else:
            self.model.__dict__[self._name] = self._previous


class PatchedGeneration(PatchedMethod):
    """What :func:`patch_generation` returns; as a context manager it undoes the change on exit."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, _METHOD)

    def __enter__(self) -> PreTrainedModel:
        """Return the model, already changed."""
        return self.model


def patch_generation(
    model: PreTrainedModel, config: TurboQuantConfig | str | None = None, **options: Any
) -> PatchedGeneration:
    """Make a compressed cache the default of a model's ``generate()``.

    Whoever passes a cache, or asks for a static or quantized one, gets what was asked for. Nothing outside the model
    is changed.

    Args:
        model: A transformers model that generates. Changed in place.
        config: Preset name or :class:`TurboQuantConfig`; None for the default preset.
        **options: What else :class:`TurboQuantCache` takes; not ``max_cache_len``, which is for one prompt.

    Returns:
        A context manager that undoes the change; or call its ``undo()``.

    Raises:
        ConfigError: The preset or an option is unknown or not valid.
        UnsupportedModelError: The model has no ``generate()`` that makes caches.
    """
    # a second patch replaces the first until it is undone, rather than adding to it
    prepare = getattr(getattr(model, _METHOD, None), _INNER, None) or getattr(model, _METHOD, None)
    if prepare is None:
        raise UnsupportedModelError(
            f"model must be able to generate with a cache, got {type(model).__name__}; load it with a class such as "
            "AutoModelForCausalLM"
        )
    own: dict[str, Any] = {name: options.pop(name) for name in ("offloading", "windowed") if name in options}
    settings = resolve_config(config, **options)
    if not all(isinstance(value, bool) for value in own.values()):
        raise ConfigError(f"offloading and windowed must be True or False, got {own}")
    patched = PatchedGeneration(model)

    def prepare_compressed(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = {name for name in _CACHE_NAMES if model_kwargs.get(name) is not None}
        result = prepare(generation_config, model_kwargs, *args, **kwargs)
        for name in _CACHE_NAMES:
            made = model_kwargs.get(name)
            if name in given or made is None:
                continue
            replacement = _compressed(model, made, generation_config, settings, own)
            if replacement is not None:
                model_kwargs[name] = replacement
        return result

    setattr(prepare_compressed, _INNER, prepare)
    model.__dict__[_METHOD] = prepare_compressed
    return patched


def _compressed(
    model: PreTrainedModel, made: Any, generation_config: Any, config: TurboQuantConfig, own: dict[str, Any]
) -> Any:
    """Return a compressed cache in place of a plain dynamic one that ``generate()`` made; None for any other."""
    parts: tuple[Any, ...] = (made,)
    if isinstance(made, EncoderDecoderCache):
        parts = (made.self_attention_cache, made.cross_attention_cache)
    if any(type(part) is not DynamicCache for part in parts):
        return None
    # this name asks for a cache that can be rolled back past a window
    windowed = generation_config.cache_implementation != "dynamic_full"
    options = {"offloading": bool(getattr(parts[0], "offloading", False)), "windowed": windowed, **own}
    if len(parts) == 2:
        cache: Any = TurboQuantCache.encoder_decoder(model.config, config, **options)
    else:
        cache = TurboQuantCache(model.config, config, **options)
    if getattr(generation_config, "is_assistant", False) and hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    return cache
