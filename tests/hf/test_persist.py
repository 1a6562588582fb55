"""A cache in a file: the same afterwards, and refused when it is not whole or not for this model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from hf_turboquant import TurboQuantCache, TurboQuantConfig
from hf_turboquant.errors import CacheFileError
from tests.helpers import _COMMON, random_ids, tiny_model

PROMPT = 560


def sliding_model() -> PreTrainedModel:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(MistralConfig(**_COMMON, sliding_window=520)).eval()


MAKERS = {"llama": lambda: tiny_model("llama"), "gemma3": lambda: tiny_model("gemma3"), "sliding": sliding_model}


def fill(model: PreTrainedModel, config: Any, ids: torch.Tensor) -> TurboQuantCache:
    cache = TurboQuantCache(model.config, config)
    with torch.no_grad():
        for part in ids.split(200, dim=1):
            model(part, past_key_values=cache)
        model(random_ids(ids.shape[0], 40, seed=9), past_key_values=cache)
    return cache


def continued(model: PreTrainedModel, cache: TurboQuantCache) -> list[torch.Tensor]:
    logits = []
    with torch.no_grad():
        for step, seed in zip((1, 1, 60, 1, 40, 1, 60, 1, 1), range(9), strict=True):
            logits.append(model(random_ids(2, step, seed=seed), past_key_values=cache).logits)
    return logits


@pytest.mark.parametrize("preset", ["k4v4", TurboQuantConfig(key_bits=3, value_bits=16, rotation="qr")])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_loaded_cache_continues_as_the_live_one_bit_for_bit(name: str, preset: Any, tmp_path: Path) -> None:
    model = MAKERS[name]()
    cache = fill(model, preset, random_ids(2, PROMPT))
    if name == "llama":
        cache.crop(-200)
    cache.save(tmp_path / "prompt.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "prompt.safetensors", model)
    assert loaded.turboquant_config == cache.turboquant_config
    assert loaded.get_seq_length() == cache.get_seq_length()
    for got, want in zip(continued(model, loaded), continued(model, cache), strict=True):
        assert torch.equal(got, want)


def test_split_and_guarded_layers_keep_their_codecs(tmp_path: Path) -> None:
    model = tiny_model("llama", head_dim=32)
    with torch.no_grad():
        # a few loud channels, as in models that bias their keys
        model.model.layers[1].self_attn.k_proj.weight[:4] *= 200
    for config in (TurboQuantConfig(key_bits=3, key_split="even"), TurboQuantConfig(key_bits=3, guard="auto")):
        cache = fill(model, config, random_ids(2, PROMPT))
        cache.save(tmp_path / "prompt.safetensors")
        loaded = TurboQuantCache.load(tmp_path / "prompt.safetensors", model.config)
        assert cache.layers[1].store.guard or config.key_split == "even"
        for mine, theirs in zip(loaded.layers, cache.layers, strict=True):
            assert mine.store.keys.format == theirs.store.keys.format
            assert mine.store.guard == theirs.store.guard
        for got, want in zip(continued(model, loaded), continued(model, cache), strict=True):
            assert torch.equal(got, want)


def test_an_empty_cache_is_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny_model("llama")
    TurboQuantCache(model.config, "k3v2").save(tmp_path / "empty.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "empty.safetensors", model.config)
    assert loaded.get_seq_length() == 0
    assert loaded.turboquant_config.key_bits == 3


def test_the_file_is_about_as_large_as_the_cache(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = fill(model, "k4v4", random_ids(2, PROMPT))
    cache.save(tmp_path / "prompt.safetensors")
    held = sum(layer.bytes_held for layer in cache.memory_report().layers)
    assert (tmp_path / "prompt.safetensors").stat().st_size < held + 8192
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.safetensors"]


# what is refused


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = tiny_model("llama")
    cache = fill(model, "k4v4", random_ids(2, 300))
    cache.save(tmp_path / "prompt.safetensors", model)
    return tmp_path / "prompt.safetensors"


def load(path: Path, model: Any = None) -> TurboQuantCache:
    return TurboQuantCache.load(path, model or tiny_model("llama"))


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_a_file_cut_short_is_refused(saved: Path, kept: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(kept * len(data) if kept < 1 else kept)])
    with pytest.raises(CacheFileError, match="not a complete safetensors file"):
        load(saved)


@pytest.mark.parametrize("where", [0.5, 0.9, 0.999])
def test_an_altered_byte_is_noticed(saved: Path, where: float) -> None:
    data = bytearray(saved.read_bytes())
    data[int(where * len(data))] ^= 1
    saved.write_bytes(data)
    with pytest.raises(CacheFileError, match="was altered since it was saved"):
        load(saved)


def rewritten(path: Path, change: Any) -> None:
    """Write the file again with its header changed, and a checksum that fits, as only malice would."""
    from hf_turboquant.persist import _checksum

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["header"])
    change(header, tensors)
    text = json.dumps(header, sort_keys=True)
    save_file(tensors, path, metadata={"header": text, "sha256": _checksum(text, tensors)})


def _set(*names: Any, to: Any) -> Any:
    def change(header: Any, tensors: Any) -> None:
        for name in names[:-1]:
            header = header[name]
        header[names[-1]] = to

    return change


STORE = ("layers", 0, "store")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(_set("version", to=2), "format version 1, got 2", id="version"),
        pytest.param(_set("format", to="other"), "holds no saved cache", id="format"),
        pytest.param(_set("layers", to=[]), "2|0 cache layers", id="layers"),
        pytest.param(_set("layers", 0, "kind", to="DynamicLayer"), "must be a TurboQuantLayer", id="kind"),
        pytest.param(_set(*STORE, "num_blocks", to=400), "num_blocks must be at most|arena.0 must be", id="blocks"),
        pytest.param(_set(*STORE, "tail", to=[0, 9999, 10]), "contradict one another", id="tail"),
        pytest.param(_set(*STORE, "block_tokens", to=[900]), "contradict one another", id="block-tokens"),
        pytest.param(_set(*STORE, "batch", to=7), "tail_keys must be", id="batch"),
        pytest.param(_set(*STORE, "dtype", to="torch.load"), "contradicts itself|must be", id="dtype"),
        pytest.param(_set(*STORE, "formats", 0, "groups", to=[[0, 16, 8]]), "must be|not one this", id="groups"),
        pytest.param(_set(*STORE, "formats", 1, "kind", to="prod"), "value format saved is not one", id="codec"),
        pytest.param(_set(*STORE, "capacities", to="no"), "contradicts itself", id="nonsense"),
        pytest.param(lambda h, t: t.pop("layers.0.tail_keys"), "contradicts itself: KeyError", id="missing-tensor"),
    ],
)
def test_a_header_that_contradicts_the_tensors_is_refused(saved: Path, change: Any, message: str) -> None:
    rewritten(saved, change)
    with pytest.raises(CacheFileError, match=message):
        load(saved)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(CacheFileError, match="no readable header"):
        load(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(lambda: tiny_model("llama", num_hidden_layers=3), "num_hidden_layers 2 here 3", id="layers"),
        pytest.param(lambda: tiny_model("qwen2"), "model_type 'llama' here 'qwen2'", id="type"),
        pytest.param(lambda: tiny_model("llama", vocab_size=120).config, "vocab_size 97 here 120", id="vocabulary"),
    ],
)
def test_another_model_is_refused(saved: Path, other: Any, message: str) -> None:
    with pytest.raises(CacheFileError, match=message):
        load(saved, other())


def test_another_set_of_weights_is_refused(saved: Path) -> None:
    model = tiny_model("llama")
    load(saved, model)
    load(saved, model.config)
    with torch.no_grad():
        model.lm_head.weight += 0.01
    with pytest.raises(CacheFileError, match="saved for another model: weights"):
        load(saved, model)
