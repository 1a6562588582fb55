"""The throughput benchmark runs every cache, keeps what fails, and counts what fits; here on tiny models on the CPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from evals import throughput, throughput_capacity, throughput_models
from evals.speed_log import FAILED, OK, SKIPPED, ResultLog, read_rows
from evals.throughput import CACHES, CONTEXTS, Case, attempt, chosen, grid, parse, run
from evals.throughput_models import MODELS, TokenClock, fill, generate, make_cache, make_model
from hf_turboquant.planner import SHAPES

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def tiny(monkeypatch):
    """Make the models tiny, keeping their names."""
    small = {
        "qwen2.5-7b": Qwen2Config(num_hidden_layers=3, **SIZES),
        "llama-3.1-8b": LlamaConfig(num_hidden_layers=2, **SIZES),
    }
    monkeypatch.setattr(throughput_models, "MODELS", small)
    return lambda name: make_model(name, None, "cpu")


def test_models_have_the_shapes_of_the_planner():
    for name, planner in throughput_capacity.PLANNER_NAMES.items():
        config = MODELS[name]
        shape = SHAPES[planner]
        assert config.num_hidden_layers == len(shape.layers)
        assert config.num_key_value_heads == shape.layers[0].num_kv_heads
        assert config.hidden_size // config.num_attention_heads == shape.layers[0].key_dim
        assert config.max_position_embeddings > max(CONTEXTS) + throughput.SPARE_TOKENS


def test_layers_may_be_fewer(tiny):
    model = make_model("qwen2.5-7b", 1, "cpu")
    assert len(model.model.layers) == 1
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("prompt_tokens", [10_000, 100], ids=["computed", "filled"])
@pytest.mark.parametrize("cache", ["dynamic-flash", "dynamic", "static", "k4v4", "k3v2", "k4v4-static"])
def test_every_cache_is_timed(tiny, cache, prompt_tokens):
    case = Case("llama-3.1-8b", 2, 420, cache)
    row = attempt(tiny(case.model), case, prompt_tokens=prompt_tokens, steps=3)
    assert row["status"] == OK, row
    computed = prompt_tokens == 10_000
    assert row["prompt"] == ("computed" if computed else "filled")
    assert (row["first_token_s"] is not None) == computed
    assert (row["peak_bytes"] is not None) == computed
    assert row["forward_ms"]["p50"] > 0
    # generate() compiles on a GPU only
    assert row["compiled"] is False
    assert 0 < row["ms_per_token"]["p10"] <= row["ms_per_token"]["p50"] <= row["ms_per_token"]["p90"]
    assert row["tokens_per_s"] == pytest.approx(2000 / row["ms_per_token"]["p50"])
    assert row["cache_bytes"] > 0


def test_what_an_earlier_row_left_does_not_count(tiny, monkeypatch):
    graphs = [1000]
    monkeypatch.setattr(torch.compiler, "reset", graphs.clear)
    monkeypatch.setattr(throughput, "allocated", lambda: 5000 + sum(graphs))
    row = attempt(tiny("llama-3.1-8b"), Case("llama-3.1-8b", 1, 64, "k4v4"), prompt_tokens=100, steps=2)
    assert (row["weight_bytes"], row["held_bytes"]) == (5000, 0)


def test_garbage_and_work_areas_do_not_count_as_allocated(monkeypatch):
    class Block:
        """Something of 1000 bytes that only the collector frees."""

        def __init__(self):
            self.itself = self
            blocks.add(self)

    blocks, areas = weakref.WeakSet(), [32]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000 * len(blocks) + sum(areas))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", areas.clear, raising=False)
    kept = Block()
    Block()
    assert throughput_models.allocated() == 1000
    assert kept in blocks


def test_filled_cache_holds_all_tokens_but_the_last(tiny):
    model = tiny("qwen2.5-7b")
    for name in ("dynamic", "static", "k4v4"):
        cache = make_cache(model, name, 400)
        fill(model, cache, 1, 300)
        watch = generate(model, cache, torch.ones(1, 301, dtype=torch.long), 4)
        # one step for the last token of the prompt, and one for each new token but the last
        assert int(cache.get_seq_length()) == 304
        assert len(watch.seconds) == 1 + 4


def test_clock_leaves_out_the_first_intervals():
    watch = TokenClock()
    watch.seconds = [0.0, 5.0, 6.0, 6.5, 6.75, 7.75]
    assert watch.first_token_s() == 5.0
    assert watch.token_ms(skip=1) == [500.0, 250.0, 1000.0]


def test_row_that_fails_says_why(tiny, monkeypatch):
    def fail(*_):
        raise ValueError("no such thing\nand a long explanation")

    monkeypatch.setattr(throughput, "make_cache", fail)
    row = attempt(tiny("llama-3.1-8b"), Case("llama-3.1-8b", 1, 64, "k4v4"), prompt_tokens=100)
    assert (row["status"], row["reason"]) == (FAILED, "ValueError: no such thing")


def test_row_that_does_not_fit_is_skipped(tiny, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(throughput, "make_cache", fail)
    row = attempt(tiny("llama-3.1-8b"), Case("llama-3.1-8b", 1, 64, "k4v4"), prompt_tokens=100)
    assert (row["status"], row["reason"]) == (SKIPPED, "OutOfMemoryError: tried to allocate 9 GiB")


def test_cache_whose_package_is_absent_is_skipped(tiny, monkeypatch):
    monkeypatch.setattr(throughput.baselines, "installed_quantized", list)
    row = attempt(tiny("llama-3.1-8b"), Case("llama-3.1-8b", 1, 64, "quanto4"), prompt_tokens=100)
    assert (row["status"], row["reason"]) == (SKIPPED, "the package behind quanto4 is not installed")


def test_enable_is_undone_after_a_row(tiny):
    model = tiny("llama-3.1-8b")
    before = model.config._attn_implementation
    attempt(model, Case("llama-3.1-8b", 1, 64, "k4v4-static"), prompt_tokens=100, steps=2)
    assert model.config._attn_implementation == before


# runs


def test_first_row_is_the_baseline_at_the_longest_context():
    cases = grid()
    assert cases[0] == Case("qwen2.5-7b", 1, 131072, "dynamic-flash")
    assert len({case.id for case in cases}) == len(cases)
    assert {case.cache for case in cases} == set(CACHES)
    assert {(case.batch, case.context) for case in cases} == {(b, c) for b in (1, 8) for c in CONTEXTS}


def test_arguments_choose_rows():
    options = parse(["--model", "llama-3.1-8b", "--batch", "8", "--context", "4096", "--cache", "k4v4*", "fp8"])
    assert [case.cache for case in chosen(options)] == ["k4v4-static", "k4v4", "fp8"]


def test_long_prompts_are_filled_in_and_static_ones_sooner():
    assert Case("qwen2.5-7b", 1, 131072, "k4v4").computes_prompt(140_000)
    assert not Case("qwen2.5-7b", 8, 32768, "k4v4").computes_prompt(140_000)
    assert not Case("qwen2.5-7b", 1, 131072, "static").computes_prompt(140_000)
    assert Case("qwen2.5-7b", 8, 4096, "k4v4-static").computes_prompt(140_000)


def test_run_goes_on_where_it_stopped_with_one_model_at_a_time(tmp_path):
    cases = [Case(model, 1, 64, cache) for model in MODELS for cache in ("dynamic", "k4v4")]
    built = []

    def row_of(model, case):
        assert model == case.model
        return {"id": case.id, "status": OK}

    path = tmp_path / "rows.jsonl"
    for _ in run(cases[:1], ResultLog(path), lambda name: name, row_of):
        pass
    rows = list(run(cases, ResultLog(path), lambda name: built.append(name) or name, row_of))
    assert [row["id"] for row in rows] == [case.id for case in cases[1:]]
    assert built == list(MODELS)
    assert [row["id"] for row in read_rows(path)] == [case.id for case in cases]


def test_run_starts_no_row_that_would_take_too_long(tmp_path):
    log = ResultLog(tmp_path / "rows.jsonl", budget_s=30, clock=lambda: 0.0)
    cases = [Case("qwen2.5-7b", 1, 64, "static"), Case("qwen2.5-7b", 1, 64, "dynamic")]
    rows = list(run(cases, log, lambda name: name, lambda _, case: {"id": case.id, "status": OK}))
    assert [row["id"] for row in rows] == [cases[1].id]


# what fits


def test_compressed_cache_fits_more_sequences_and_longer_ones():
    shape = SHAPES["qwen2.5-7b"]
    dense = throughput_capacity.capacity(shape, "dynamic", 140 * 2**30)
    ours = throughput_capacity.capacity(shape, "k4v4", 140 * 2**30)
    # the weights and three GiB are put aside, and a prompt holds one of the 28 layers twice
    room = 140 * 2**30 - 15 * 10**9 - 3 * 2**30
    assert dense[0] == int(room / (shape.dense_bytes(32768) * 29 / 28))
    assert 3 < ours[0] / dense[0] < 4
    assert ours[1] > 3 * dense[1]


@pytest.mark.parametrize("cache", ["dynamic", "k4v4"])
def test_store_all_holds_what_was_computed(cache):
    shape = type(SHAPES["smollm2-135m"]).uniform("two layers", 2, 3, 64, 1000)
    held = throughput_capacity.store_all(shape, cache, 2, 1000, "cpu")
    expected = 2 * throughput_capacity.held_bytes(shape, cache, 1000)
    # tables shared by the layers are not counted in the plan
    assert expected <= held <= expected + 200_000


def test_capacity_is_verified_only_where_it_is_stored(monkeypatch):
    shape = type(SHAPES["smollm2-135m"]).uniform("two layers", 2, 3, 64, 1000)
    monkeypatch.setattr(throughput_capacity, "CAPACITY_TOKENS", 512)
    monkeypatch.setattr(throughput_capacity, "SPARE_BYTES", 0)
    computed = throughput_capacity.capacity_row(shape, "k4v4", 2_000_000, None)
    verified = throughput_capacity.capacity_row(shape, "k4v4", 2_000_000, "cpu")
    assert computed["users"] == verified["users"] > 1
    assert (computed["verified"], verified["verified"]) == (False, True)
    assert verified["held_bytes"] >= computed["held_bytes"]


def test_without_a_gpu_nothing_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["throughput", "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit, match="there is none"):
        throughput.main()
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["static", "k4v4-static", "k4v4"])
def test_cache_is_timed_on_the_gpu(tiny, cache):
    model = make_model("llama-3.1-8b", None, "cuda")
    row = attempt(model, Case("llama-3.1-8b", 1, 600, cache), prompt_tokens=1000, steps=4)
    assert row["status"] == OK, row
    assert row["event_ms"]["p50"] > 0
    # tables may be there from an earlier cache, and are no longer counted then
    assert row["peak_bytes"] >= row["held_bytes"] > row["cache_bytes"] / 2 > 0


def test_noted_step_is_the_last_compiled_one_and_undone():
    class Model:
        def get_compiled_call(self, config):
            return lambda **inputs: (config, inputs)

    model = Model()
    with throughput_models.noted_steps(model) as noted:
        assert noted == []
        step = model.get_compiled_call("config")
        assert step(a=1) == ("config", {"a": 1})
        step(a=2)
    assert noted[0]() == ("config", {"a": 2})
    assert "get_compiled_call" not in vars(model)
