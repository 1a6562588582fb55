"""A cache of fixed size: its compiled steps and everything else it can do, against the cache that grows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CompileConfig, PreTrainedModel

from hf_turboquant import TurboQuantCache, disable, enable
from hf_turboquant.errors import CacheStateError, ConfigError, ValueRangeError
from hf_turboquant.layers import crops_to_length
from hf_turboquant.static_layers import _say_not_enabled
from tests.helpers import random_ids, random_kv, tiny_model

SETTINGS: dict[str, Any] = {"residual_window": 0, "guard": "off"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def enabled(name: str, layers: int = 1) -> PreTrainedModel:
    overrides: dict[str, Any] = {"num_hidden_layers": layers}
    if name.startswith("qwen"):
        overrides["layer_types"] = None
    model = tiny_model(name, **overrides)
    enable(model)
    return model


def make(model: PreTrainedModel, length: int | None = None, **settings: Any) -> TurboQuantCache:
    return TurboQuantCache(model.config, max_cache_len=length, **{**SETTINGS, **settings})


@torch.no_grad()
def decode(model: PreTrainedModel, cache: TurboQuantCache, ids: torch.Tensor, steps: int, step: Any = None) -> Any:
    """Return the tokens of ``steps`` greedy steps, the prompt always eager."""
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    tokens = []
    for index in range(steps):
        tokens.append(logits[:, -1:].argmax(-1).clone())
        position = torch.tensor([[ids.shape[1] + index]])
        logits = (step or model)(
            input_ids=tokens[-1], past_key_values=cache, position_ids=position, use_cache=True
        ).logits
    return torch.cat(tokens, dim=1)


def compiled(model: PreTrainedModel, **options: Any) -> Any:
    return torch.compile(model.forward, backend="aot_eager", **{"fullgraph": True, **options})


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# compiled steps


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"residual_window": 0}),
        ("qwen2", {"residual_window": 128}),
        ("qwen3", {"key_codec": "prod", "key_bits": 3, "residual_window": 0}),
        ("mistral", {"key_bits": 2, "value_bits": 2, "sink_tokens": 0, "residual_window": 0}),
        ("llama", {"key_split": "even", "key_bits": 3}),
    ],
    ids=["llama", "qwen2-window", "qwen3-prod", "mistral-no-sinks", "llama-split"],
)
def test_compiled_steps_give_the_tokens_of_the_growing_cache(name, settings):
    model = enabled(name, layers=2 if settings == {"residual_window": 0} else 1)
    # the first block is packed after 4 sinks, the window and 128 tokens, or has been, and the second is
    prompt = 240 if "key_split" in settings else 110 + settings["residual_window"]
    ids, steps = random_ids(2, prompt), 30
    expected = decode(model, make(model, **settings), ids, steps)
    step = compiled(model)
    first = make(model, prompt + steps, **settings)
    assert torch.equal(decode(model, first, ids, steps, step), expected)
    assert first.get_seq_length() == prompt + steps
    assert first.layers[0].store.num_blocks == (2 if "key_split" in settings else 1)
    count = graphs()
    assert torch.equal(decode(model, make(model, prompt + steps, **settings), ids, steps, step), expected)
    assert graphs() == count == 1


def test_sliding_layers_beside_full_ones():
    model = enabled("gemma3", layers=2)
    ids = random_ids(1, 50)
    expected = decode(model, make(model), ids, 25)
    cache = make(model, 150)
    step = compiled(model)
    assert torch.equal(decode(model, cache, ids, 25, step), expected)
    # the stock sliding layer counts on the host, and is compiled anew when that turns dynamic and when it is full
    assert graphs() <= 4


def test_generate_compiles_by_itself():
    model = enabled("llama")
    ids = random_ids(2, 120)
    expected = model.generate(ids, past_key_values=make(model), max_new_tokens=25, do_sample=False)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    cache = make(model, 145)
    assert cache.is_compileable
    out = model.generate(ids, past_key_values=cache, max_new_tokens=25, do_sample=False, compile_config=config)
    assert torch.equal(out, expected)
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_left_padding_is_masked_in_compiled_steps():
    model = enabled("qwen2")
    ids = random_ids(2, 120)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    options = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False}
    expected = model.generate(ids, past_key_values=make(model), **options)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    out = model.generate(ids, past_key_values=make(model, 150), compile_config=config, **options)
    assert torch.equal(out, expected)
    assert graphs() == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bound", "padding"),
    [(torch.float32, 1e-2, 0), (torch.bfloat16, 5e-2, 0), (torch.bfloat16, 5e-2, 11)],
    ids=["portable", "fast", "fast-padded"],
)
def test_generate_replays_cuda_graphs(dtype, bound, padding):
    model = tiny_model("llama", head_dim=64).to("cuda", dtype)
    enable(model)
    ids, steps = random_ids(2 if padding else 1, 100).cuda(), 200
    options = {"max_new_tokens": steps, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if padding:
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :padding] = 0
    expected, result, again = (
        model.generate(ids, past_key_values=make(model, 300), disable_compile=disable_compile, **options)
        for disable_compile in (True, False, False)
    )
    assert torch.equal(again.sequences, result.sequences)
    counters = torch._dynamo.utils.counters
    assert graphs() == 1
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]
    differences = (expected.sequences != result.sequences).any(0).nonzero().flatten().tolist()
    # at a tie the tokens may part, and what follows is another text
    same = min(differences, default=ids.shape[1] + steps) - ids.shape[1] + 1
    # 4 sinks and 96 tokens: step 32 packs the first block
    assert same > 40, "no block was packed by a compiled step"
    for one, other in zip(expected.logits[:same], result.logits[:same], strict=True):
        assert float((one - other).float().norm() / one.float().norm()) < bound


def test_positions_can_be_counted_on_the_device():
    model = enabled("llama")
    ids = random_ids(1, 300)
    outputs = []
    for step, length in ((model, None), (compiled(model), 310)):
        cache = make(model, length)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            outputs.append(step(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits)
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)


def test_without_enable_nothing_is_compiled_and_all_is_right(caplog):
    model = tiny_model("llama")
    ids = random_ids(1, 20)
    expected = decode(model, make(model), ids, 6)
    cache = make(model, 40)
    _say_not_enabled.cache_clear()
    assert not cache.is_compileable
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)[:, 20:], expected)
    assert [record.message.count("enable(model)") for record in caplog.records] == [1]
    # by hand: the graph is left around every update
    out = decode(model, make(model, 40), ids, 6, compiled(model, fullgraph=False))
    assert torch.equal(out, expected)


def test_disable_takes_compiled_steps_back():
    model = enabled("llama")
    cache = make(model, 40)
    assert cache.is_compileable
    disable(model)
    assert not cache.is_compileable


# eager steps


@pytest.mark.parametrize("length", [145, 1000])
def test_eager_generate_gives_the_tokens_of_the_growing_cache(length):
    model = enabled("qwen3")
    ids = random_ids(2, 120)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False}
    expected = model.generate(ids, past_key_values=make(model), **options)
    assert torch.equal(model.generate(ids, past_key_values=make(model, length), **options), expected)


def test_eager_and_compiled_steps_take_turns():
    model = enabled("llama")
    ids = random_ids(1, 120)
    expected = decode(model, make(model), ids, 30)
    step = compiled(model)
    turns = iter(range(1000))
    both = lambda **inputs: (step if next(turns) % 7 < 4 else model)(**inputs)  # noqa: E731
    assert torch.equal(decode(model, make(model, 160), ids, 30, both), expected)


def test_beams_and_chunks_and_drafts():
    model = enabled("llama")
    ids = random_ids(1, 140)
    ways: list[dict[str, Any]] = [{"num_beams": 3}, {"prefill_chunk_size": 50}]
    if not crops_to_length():
        # older transformers refuse drafts for any cache that may be compiled
        ways.append({"prompt_lookup_num_tokens": 3, "eos_token_id": 98})
    for options in ways:
        expected = model.generate(ids, past_key_values=make(model), max_new_tokens=12, do_sample=False, **options)
        out = model.generate(ids, past_key_values=make(model, 170), max_new_tokens=12, do_sample=False, **options)
        assert torch.equal(out, expected), options


# limits


def test_too_many_tokens_raise_before_they_are_stored():
    model = enabled("llama")
    cache = make(model, 25)
    with pytest.raises(CacheStateError, match="max_cache_len must be at least 26"):
        decode(model, cache, random_ids(1, 20), 7)
    assert cache.layers[0].get_seq_length() == 25


def test_generate_raises_when_a_compiled_step_would_be_one_too_many():
    model = enabled("llama")
    cache = make(model, 25)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    ids = random_ids(1, 20)
    with pytest.raises(CacheStateError, match="max_cache_len"):
        model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False, compile_config=config)
    assert cache.get_seq_length() == 25
    assert not cache.is_compileable
    cache.crop(-1)
    assert cache.is_compileable


def test_compiled_steps_beyond_the_end_are_reported():
    model = enabled("llama")
    cache = make(model, 25)
    decode(model, cache, random_ids(1, 20), 7, compiled(model))
    with pytest.raises(CacheStateError, match="left out"):
        cache.get_seq_length()
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_block_that_cannot_be_packed_is_reported():
    model = enabled("llama", layers=2)
    cache = make(model, 200)
    ids = random_ids(1, 120)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    cache.layers[1].store.tail_values[0, 0, 3, 3] = torch.inf
    step = compiled(model)
    with torch.no_grad():
        for index in range(14):
            position = torch.tensor([[120 + index]])
            step(input_ids=ids[:, :1], past_key_values=cache, position_ids=position, use_cache=True)
    with pytest.raises(ValueRangeError, match="block"):
        cache.layers[1].get_seq_length()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_cache_len": 0}, "max_cache_len must be a positive int"),
        ({"max_cache_len": True}, "max_cache_len must be a positive int"),
        ({"max_cache_len": 100, "offloading": True}, "offloading must be False"),
    ],
    ids=["zero", "bool", "offloading"],
)
def test_invalid_settings(options, words):
    with pytest.raises(ConfigError, match=words):
        TurboQuantCache(tiny_model("llama").config, **options)


# the rest of the contract


def filled(tokens: int, length: int | None, batch: int = 2, **settings: Any) -> TurboQuantCache:
    """Return a cache with random tokens, stored in two goes."""
    cache = make(tiny_model("llama"), length, **settings)
    for part in (slice(0, tokens // 2), slice(tokens // 2, None)):
        for layer in range(2):
            keys, values = random_kv(batch, 2, tokens, 16, seed=layer)
            cache.update(keys[:, :, part], values[:, :, part], layer)
    return cache


def same(static: TurboQuantCache, growing: TurboQuantCache) -> None:
    for one, other in zip(static.layers, growing.layers, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        for which in ("keys", "values"):
            assert torch.equal(getattr(one, which).materialize(), getattr(other, which).materialize())


OPERATIONS = {
    "crop_tail": lambda cache: cache.crop(-20),
    "crop_block": lambda cache: cache.crop(-150),
    "crop_all": lambda cache: cache.crop(-300),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_operations_do_what_they_do_to_a_growing_cache(operation):
    static, growing = filled(300, 600), filled(300, None)
    operation(static)
    operation(growing)
    if static.get_seq_length():
        same(static, growing)
    batch = growing.layers[0].store.batch if growing.get_seq_length() else 2
    for layer in range(2):
        keys, values = random_kv(batch, 2, 140, 16, seed=9 + layer)
        for cache in (static, growing):
            cache.update(keys, values, layer)
    same(static, growing)


def test_a_crop_into_a_block_keeps_steps_from_being_compiled():
    model = enabled("llama")
    ids = random_ids(1, 150)
    caches = [make(model, length) for length in (200, None)]
    outputs = []
    for cache, step in zip(caches, (compiled(model, fullgraph=False), model), strict=True):
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache.crop(-60)
            outputs.append(
                step(
                    input_ids=ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[90]]), use_cache=True
                ).logits
            )
    assert not caches[0].is_compileable
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)


def test_copies_are_independent():
    model = enabled("llama")
    cache = make(model, 200)
    expected = decode(model, make(model), random_ids(1, 150), 10)
    with torch.no_grad():
        model(input_ids=random_ids(1, 150), past_key_values=cache, use_cache=True)
    twin = copy.deepcopy(cache)
    cache.crop(-100)
    assert twin.get_seq_length() == 150
    with torch.no_grad():
        logits = compiled(model)(
            input_ids=expected[:, :1], past_key_values=twin, position_ids=torch.tensor([[150]]), use_cache=True
        ).logits
    assert torch.equal(logits[:, -1].argmax(-1), expected[:, 1])
    assert cache.get_seq_length() == 50


def test_memory_is_all_there_from_the_start():
    small, large = filled(100, 600), filled(300, 600)
    assert small.memory_report().bytes_held == large.memory_report().bytes_held


def test_a_saved_cache_is_one_that_grows(tmp_path):
    static = filled(300, 600)
    static.save(tmp_path / "cache.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", tiny_model("llama").config)
    same(loaded, filled(300, None))


def test_the_first_tokens_decide_the_codecs():
    cache = make(tiny_model("llama"), 400, key_bits=3, key_split="even")
    keys, values = random_kv(1, 2, 30, 16)
    cache.update(keys, values, 0)
    order = cache.layers[0].store.keys.tables.channel_order
    assert order is not None
    cache.update(*random_kv(1, 2, 200, 16, seed=3), 0)
    assert cache.layers[0].store.keys.tables.channel_order is order


def test_a_saved_cache_may_become_one_of_fixed_size(tmp_path):
    filled(300, None).save(tmp_path / "cache.safetensors")
    model = tiny_model("llama")
    loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", model.config, max_cache_len=500)
    same(loaded, filled(300, None))
    with pytest.raises(CacheStateError, match="max_cache_len"):
        TurboQuantCache.load(tmp_path / "cache.safetensors", model.config, max_cache_len=200)


# what cannot be served


def test_layers_that_share_keys_are_refused():
    config = tiny_model("llama").config
    config.num_kv_shared_layers = 1
    with pytest.raises(ConfigError, match="share"):
        TurboQuantCache(config, max_cache_len=64)


def test_another_geometry_in_a_compiled_step_is_an_error():
    model = enabled("llama")
    cache = make(model, 150)
    with torch.no_grad():
        model(input_ids=random_ids(2, 20), past_key_values=cache, use_cache=True)
        with pytest.raises(Exception, match=r"like those already stored|batch"):
            compiled(model)(input_ids=random_ids(1, 1), past_key_values=cache, use_cache=True)


def test_keys_read_between_compiled_steps_are_up_to_date():
    model = enabled("llama")
    cache = make(model, 150)
    ids = random_ids(1, 20)
    step = compiled(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        assert cache.layers[0].keys.materialize().shape[2] == 20
        for position in range(20, 23):
            step(input_ids=ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[position]]), use_cache=True)
    assert cache.layers[0].keys.materialize().shape[2] == 23


def test_sliding_windows_of_fixed_size_refuse_what_they_cannot_do():
    model = tiny_model("mistral", sliding_window=16)
    cache = make(model, 64)
    with torch.no_grad():
        model(input_ids=random_ids(1, 20), past_key_values=cache, use_cache=True)
    for change in (
        lambda: cache.crop(-2),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(CacheStateError, match="sliding window"):
            change()


def test_loaded_without_blocks_the_codecs_are_chosen_by_what_it_holds(tmp_path):
    model = tiny_model("llama", head_dim=64)
    cache = TurboQuantCache(model.config, "k3v3", guard="off")
    with torch.no_grad():
        model(input_ids=random_ids(1, 200), past_key_values=cache, use_cache=True)
    assert cache.layers[0].store.num_blocks == 0
    cache.save(tmp_path / "short.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "short.safetensors", model.config, max_cache_len=400)
    assert loaded.layers[0].store.keys.tables.channel_order is not None
