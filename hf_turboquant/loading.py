"""Load a model, after making sure that it fits: the estimate comes from its configuration, before a weight is read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_turboquant.errors import ConfigError
from hf_turboquant.presets import PRESETS, resolve_config
from hf_turboquant.shapes import ModelShape

DENSE: Final = "dense"
MARGIN: Final = 1.05
"""Room for activations and the allocator, as a factor on weights and cache."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a model and its caches take.

    Attributes:
        weights: Weights, in the dtype they are loaded in; 0 if unknown.
        cache: Cache of all sequences.
    """

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """Both, with a margin."""
        return int(MARGIN * (self.weights + self.cache))


def default_device() -> str:
    """Return the GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_config(source: str | Path, *, gguf_file: str | None = None) -> Any:
    """Read the configuration of a model.

    Args:
        source: Hub id or directory.
        gguf_file: File in it that holds the model as GGUF.

    Raises:
        ConfigError: There is no such model, or it cannot be fetched.
    """
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoConfig.from_pretrained(source, **options)
    except OSError as error:
        raise ConfigError(
            f"model {str(source)!r} is neither a directory with a config.json nor a model that can be fetched from the "
            "hub (no such model, no network, or no access); fetch it where there is a network with `hf download "
            f"{source}`, and name the directory it prints. Said by transformers: {_first_line(error)}"
        ) from error


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a model's parameters, counted on its skeleton; 0 if it is stored quantized."""
    if getattr(config, "quantization_config", None) is not None:
        return 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def estimate_memory(
    config: Any, *, tokens: int, dtype: torch.dtype, cache: str | None = None, sequences: int = 1
) -> MemoryEstimate:
    """Estimate what a model and its cache take.

    Args:
        config: Of the model.
        tokens: In the cache of each sequence.
        dtype: Of weights and activations.
        cache: Preset, ``dense``, or None for the default preset.
        sequences: In the batch.
    """
    shape = ModelShape.from_config(config)
    one = shape.dense_bytes(tokens) if cache == DENSE else shape.held_bytes(tokens, resolve_config(cache))
    return MemoryEstimate(weight_bytes(config, dtype), sequences * one * dtype.itemsize // 2)


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes free on a device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    fields = dict(line.split(":", 1) for line in info.read_text(encoding="utf-8").splitlines())
    return 1024 * int(fields["MemAvailable"].split()[0])


def check_fits(source: str | Path, estimate: MemoryEstimate, device: torch.device, *, tokens: int) -> None:
    """Refuse what will not fit.

    Raises:
        ConfigError: The estimate exceeds what is free.
    """
    free = available_bytes(device)
    if free is not None and estimate.total > free:
        raise ConfigError(
            f"model {str(source)!r} must fit in the memory free on {device}, which is {_gb(free)}; weights take "
            f"{_gb(estimate.weights)} and the cache of {tokens} tokens {_gb(estimate.cache)}, with 5 % for the rest "
            f"{_gb(estimate.total)}. Take a smaller model, fewer tokens or a smaller preset, or say --force to try"
        )


def load_model(
    source: str | Path,
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    tokens: int = 0,
    cache: str | None = None,
    force: bool = False,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, if they fit.

    Args:
        source: Hub id or directory.
        gguf_file: File in it that holds the model as GGUF.
        dtype: Of the weights; None is bfloat16 on a GPU and float32 elsewhere.
        device: None is the GPU if there is one.
        tokens: Tokens that will be in the cache, for the estimate.
        cache: Preset or ``dense``, for the estimate.
        force: Load without asking whether it fits.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        ConfigError: There is no such model, or it does not fit.
    """
    place = torch.device(device or default_device())
    dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    config = read_config(source, gguf_file=gguf_file)
    if not force:
        check_fits(source, estimate_memory(config, tokens=tokens, dtype=dtype, cache=cache), place, tokens=tokens)
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if gguf_file and hasattr(transformers, "GgufConfig"):
        # newer transformers keeps GGUF weights packed, and dequantizes them at every step, unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    return model.to(place).eval(), tokenizer


def local_gguf(model: str, gguf_file: str | None) -> tuple[str, str | None]:
    """Split a path that names a GGUF file itself into its directory and the file."""
    if gguf_file is None and model.endswith(".gguf") and os.path.isfile(model):
        return os.path.dirname(model) or ".", os.path.basename(model)
    return model, gguf_file


def cache_argument(model: Any) -> str:
    """Return the name this release of transformers gives the cache of a model (renamed in 5.24)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def check_presets(names: Sequence[str]) -> None:
    """Refuse names that are not presets.

    Raises:
        ConfigError: One is not; the message lists the known.
    """
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"unknown preset {name!r}; presets are {', '.join(PRESETS)}; without compression: dense")


def check_dtype(name: str | None) -> torch.dtype | None:
    """Return a dtype by name; None stays None.

    Raises:
        ConfigError: It is not one that weights may have.
    """
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name is None:
        return None
    if name not in known:
        raise ConfigError(f"dtype must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def check_device(name: str | None) -> str | None:
    """Return the name of a device that is here; None stays None.

    Raises:
        ConfigError: It is not a device, or not here.
    """
    if name is None:
        return None
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} is not here: torch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    return name


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
