"""A compressed cache in a file: safetensors, with a JSON header in its metadata.

Nothing in a file is executed. A file that was cut short, altered, or made for another model or by another version is
refused before any of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from hf_turboquant.errors import CacheFileError, TurboQuantError
from hf_turboquant.layer_state import Facts, Tensors, layer_state, restore_layer

FORMAT: Final = "hf_turboquant.cache"
FORMAT_VERSION: Final = 1

_SAMPLES: Final = 64
"""Elements of each parameter that go into the fingerprint of weights."""

_CONFIG_FIELDS: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "rope_parameters",
)


def write_cache(path: str | os.PathLike[str], layers: Sequence[Any], header: Facts) -> None:
    """Write layers and a header to a file, which appears when it is complete.

    Args:
        path: The file; one that exists is replaced.
        layers: Layers of a cache.
        header: Facts fit for JSON, kept beside those of the layers.

    Raises:
        CacheStateError: A layer is of a kind that cannot be saved.
    """
    facts, tensors = [], {}
    for index, layer in enumerate(layers):
        own_facts, own_tensors = layer_state(layer, index)
        facts.append(own_facts)
        tensors.update({f"layers.{index}.{name}": tensor for name, tensor in own_tensors.items()})
    text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, **header, "layers": facts}, sort_keys=True)
    metadata = {"header": text, "sha256": _checksum(text, tensors)}
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_cache(path: str | os.PathLike[str]) -> tuple[Facts, Tensors]:
    """Read a file and make sure that it is whole.

    Args:
        path: A file that :func:`write_cache` wrote.

    Returns:
        The header with the facts of the layers, and all tensors on the CPU.

    Raises:
        CacheFileError: It is no such file, was cut short or altered, or is of another version.
        FileNotFoundError: There is no file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except SafetensorError as error:
        raise CacheFileError(f"{path} is not a complete safetensors file: {error}") from error
    text = metadata.get("header", "")
    try:
        header = json.loads(text)
    except json.JSONDecodeError as error:
        raise CacheFileError(f"{path} has no readable header, so it holds no saved cache") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CacheFileError(f"{path} holds no saved cache: its format must be {FORMAT!r}")
    if header.get("version") != FORMAT_VERSION:
        raise CacheFileError(
            f"{path} must have format version {FORMAT_VERSION}, got {header.get('version')!r}; save it again with this "
            "version of hf_turboquant"
        )
    if metadata.get("sha256") != _checksum(text, tensors):
        raise CacheFileError(f"{path} was altered since it was saved: its checksum does not match")
    return header, tensors


def restore_layers(
    layers: Sequence[Any], header: Facts, tensors: Tensors, device: torch.device | Mapping[int, torch.device]
) -> None:
    """Put what was read into the layers of a new cache.

    Args:
        layers: Layers of a new cache for the same model and configuration. Changed in place.
        header: What :func:`read_cache` returned.
        tensors: Likewise.
        device: Where the layers shall be: one device, or one for each layer index.

    Raises:
        CacheFileError: The file does not fit the layers, or contradicts itself.
    """
    try:
        saved = header["layers"]
        if len(saved) != len(layers):
            raise CacheFileError(f"the model must have {len(saved)} cache layers like the one saved, got {len(layers)}")
        for index, (layer, facts) in enumerate(zip(layers, saved, strict=True)):
            prefix = f"layers.{index}."
            own = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            place = device[index] if isinstance(device, Mapping) else device
            restore_layer(layer, facts, own, place)
    except TurboQuantError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        # whoever can compute a checksum can still have written nonsense
        raise CacheFileError(f"the header contradicts itself: {type(error).__name__}: {error}") from error


def describe_model(model: PreTrainedModel | PreTrainedConfig) -> Facts:
    """Return what tells one model from another: fields of its configuration and, of a model, a digest of weights."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    fields = config.get_text_config(decoder=True).to_dict()
    facts: Facts = {name: fields[name] for name in _CONFIG_FIELDS if name in fields}
    facts = json.loads(json.dumps(facts, default=str))
    if isinstance(model, PreTrainedModel):
        facts["weights"] = _weights_digest(model)
    return facts


def compare_models(saved: Facts, given: Facts) -> None:
    """Refuse a model that is not the one a cache was saved for.

    Weights are compared when both sides have a digest.

    Raises:
        CacheFileError: A fact differs; the message names it.
    """
    names = sorted((set(saved) & set(given)) - {"transformers_version"})
    different = [
        f"{name} {_short(saved[name])} here {_short(given[name])}" for name in names if saved[name] != given[name]
    ]
    if different:
        raise CacheFileError(f"the cache was saved for another model: {'; '.join(different)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _weights_digest(model: PreTrainedModel) -> str:
    """Digest names, shapes and a few elements of every parameter, as float32: different after any training."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        step = max(flat.numel() // _SAMPLES, 1)
        sample = flat[::step][:_SAMPLES].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def _checksum(text: str, tensors: Tensors) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
