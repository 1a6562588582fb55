"""Continuous batching from packed pages: the tokens of transformers' own pages, fewer bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_turboquant import TurboQuantCache, TurboQuantConfig, enable
from hf_turboquant.errors import BackendUnavailableError, CacheStateError, ConfigError, UnsupportedModelError
from hf_turboquant.serving import patch_serving
from tests.helpers import EXACT, dense_attention, random_ids, random_kv, tiny_model

try:
    from transformers import ContinuousBatchingConfig

    from hf_turboquant import paged_allocator
except ImportError:
    paged_allocator = None

needs_pages = pytest.mark.skipif(paged_allocator is None, reason="this transformers has no page allocators")
NO_WINDOW = EXACT.replace(residual_window=0)
LENGTHS = (5, 127, 128, 300, 520)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [random_ids(1, length, seed=length)[0].tolist() for length in lengths]


def serve(model: PreTrainedModel, inputs: list[list[int]], **options: Any) -> list[Any]:
    """Return the outputs of continuous batching, by default with chunks of prompts and a pool that holds all."""
    settings = {"num_blocks": 40, "max_batch_tokens": 256, "max_memory_percent": 0.2}
    engine = {
        name: options.pop(name) for name in list(options) if name in ContinuousBatchingConfig.__dataclass_fields__
    }
    generation = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    results = model.generate_batch(
        inputs,
        generation_config=GenerationConfig(**generation),
        continuous_batching_config=ContinuousBatchingConfig(**{**settings, **engine}),
    )
    return list(results.values())


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.generated_tokens for output in outputs]


def alone(model: PreTrainedModel, inputs: list[list[int]]) -> list[list[int]]:
    """Return what generate() says to each prompt by itself."""
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in inputs]


# engines


@needs_pages
@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("llama", EXACT, id="window"),
        pytest.param("qwen3", NO_WINDOW, id="no-window"),
        pytest.param("gemma3", EXACT.replace(sink_tokens=0), id="sliding-layers-no-sinks"),
    ],
)
def test_sixteen_bits_serve_the_same_tokens(name: str, config: TurboQuantConfig) -> None:
    model = tiny_model(name)
    want = tokens(serve(model, prompts()))
    with patch_serving(model, config) as serving:
        assert tokens(serve(model, prompts())) == want
    report = serving.report()
    assert report.compressed_calls > 0
    assert report.materialized_calls == 0
    assert report.layers == (1 if name == "gemma3" else 2)


@needs_pages
def test_what_is_served_is_what_generate_says() -> None:
    model = tiny_model("llama")
    want = alone(model, prompts())
    with patch_serving(model, NO_WINDOW):
        assert tokens(serve(model, prompts())) == want


@needs_pages
def test_prompts_that_begin_alike_share_pages() -> None:
    model = tiny_model("llama")
    common = prompts((400,))[0]
    inputs = [common + tail for tail in prompts((3, 40, 130))] + [common[:300], common]
    want = alone(model, inputs)
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = ContinuousBatchingConfig(num_blocks=40, max_batch_tokens=256, max_memory_percent=0.2)
    with (
        patch_serving(model, EXACT),
        model.continuous_batching_context_manager(settings, continuous_batching_config=engine) as manager,
    ):
        # one after another, so that the pages of those before are found; the second time they are all there
        for ids, answer in [*zip(inputs, want, strict=True)] * 2:
            name = manager.add_request(ids, max_new_tokens=12)
            result = manager.get_result(request_id=name, timeout=60)
            assert result.generated_tokens == answer


@needs_pages
def test_several_answers_branch_from_one_prompt() -> None:
    model = tiny_model("llama")
    inputs = prompts((200, 300))
    want = alone(model, inputs)
    with patch_serving(model, NO_WINDOW):
        got = tokens(serve(model, inputs, num_return_sequences=3, do_sample=True, top_k=1))
    assert len(got) == 6
    assert [got.count(answer) for answer in want] == [3, 3]


@needs_pages
def test_a_pool_too_small_for_all_serves_all() -> None:
    model = tiny_model("llama")
    inputs = prompts(range(150, 400, 25))
    want = alone(model, inputs)
    with patch_serving(model, EXACT) as serving:
        got = tokens(serve(model, inputs, num_blocks=4))
    assert got == want
    assert serving.report().compressed_calls > 0


@needs_pages
@pytest.mark.parametrize(("preset", "tolerance"), [("k8v4", 0.01), ("k4v4", 0.03), ("k3v2", 0.1)])
def test_presets_serve_close_likelihoods_from_fewer_bytes(preset: str, tolerance: float) -> None:
    model = tiny_model("llama")
    inputs = prompts((300, 520, 700))
    dense = serve(model, inputs, return_logprobs=True)
    with patch_serving(model, preset, residual_window=0) as serving:
        packed = serve(model, inputs, return_logprobs=True)
    compared = 0
    for one, other in zip(dense, packed, strict=True):
        for left, right, a, b in zip(
            one.generated_tokens, other.generated_tokens, one.logprobs, other.logprobs, strict=True
        ):
            if left != right:
                break
            assert abs(a - b) < tolerance
            compared += 1
    assert compared > 12
    report = serving.report()
    assert report.dense_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert report.ratio > 4
    assert f"{report.ratio:.2f}x smaller" in str(report)


@needs_pages
def test_eager_attention_gets_dense_tensors_and_they_are_counted() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    want = alone(model, prompts((300, 40)))
    with patch_serving(model, NO_WINDOW) as serving:
        assert tokens(serve(model, prompts((300, 40)))) == want
    assert serving.report().materialized_calls > 0


@needs_pages
def test_only_the_patched_model_is_changed_and_it_is_changed_back() -> None:
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

    before = dict(ATTN_TYPE_TO_ALLOCATOR)
    model, other = tiny_model("llama"), tiny_model("llama")
    with patch_serving(model, "k4v4") as serving:
        serve(other, prompts((20,)))
        assert serving.report().layers == 0
        assert str(serving.report()).startswith("0 layers")
        with patch_serving(model, "k2v2") as inner:
            serve(model, prompts((20,)))
        assert (len(serving.engines), len(inner.engines)) == (0, 1)
        serve(model, prompts((20,)))
        assert len(serving.engines) == 1
    assert before == ATTN_TYPE_TO_ALLOCATOR
    serving.undo()
    assert "init_continuous_batching" not in model.__dict__


@pytest.mark.gpu
@needs_pages
def test_a_gpu_serves_the_same_tokens_with_the_kernels() -> None:
    model = tiny_model("llama", head_dim=64).cuda()
    want = tokens(serve(model, prompts()))
    with patch_serving(model, NO_WINDOW) as serving:
        assert tokens(serve(model, prompts())) == want
    with patch_serving(model, "k4v4", residual_window=0) as compressed:
        got = tokens(serve(model, prompts()))
    assert [len(answer) for answer in got] == [12] * len(LENGTHS)
    for report in (serving.report(), compressed.report()):
        assert report.compressed_calls > 0
        assert report.materialized_calls == 0


# what is refused


def test_a_transformers_without_page_allocators_is_refused() -> None:
    if paged_allocator is not None:
        pytest.skip("this transformers has them")
    with pytest.raises(BackendUnavailableError, match=r"needs transformers 5\.24 or newer"):
        patch_serving(tiny_model("llama"))


@needs_pages
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"use_cuda_graph": True}, "use_cuda_graph must not be set", id="graphs"),
        pytest.param({"use_async_batching": True}, "use_async_batching must not be set", id="async"),
        pytest.param({"default_compile_level": 1}, "default_compile_level must not be set", id="compile"),
        pytest.param({"cpu_offload_space": 1.0}, "cpu_offload_space must not be set", id="offload"),
    ],
)
def test_engines_that_cannot_read_packed_pages_are_refused(options: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    with patch_serving(model), pytest.raises(ConfigError, match=message):
        serve(model, prompts((5,)), **options)


@needs_pages
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"layer_bits": {0: (8, 8)}}, "layer_bits must be empty", id="layer-bits"),
        pytest.param({"sink_tokens": 128}, "sink_tokens must be below 128", id="sinks"),
    ],
)
def test_settings_that_pages_cannot_have_are_refused(settings: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=message):
        patch_serving(model, **settings)


@needs_pages
def test_models_that_cannot_be_served_are_refused() -> None:
    model = tiny_model("llama")
    with enable(model), pytest.raises(UnsupportedModelError, match=r"got 'turboquant'; call .*disable"):
        patch_serving(model)
    with pytest.raises(UnsupportedModelError, match="must have full-attention layers"):
        patch_serving(tiny_model("mistral", sliding_window=32))
    with pytest.raises(ConfigError, match="unknown preset"):
        patch_serving(model, "k9")
    assert "init_continuous_batching" not in model.__dict__


# pages, without an engine


def page_store(config: TurboQuantConfig, pages: int = 12, heads: int = 2, head_dim: int = 16) -> Any:
    from hf_turboquant.paged_store import PageStore, page_bytes

    like = torch.empty(0, head_dim)
    nbytes = page_bytes(config, heads, head_dim, like.dtype)
    records = torch.zeros(pages, 1, heads, nbytes // heads, dtype=torch.uint8)
    return PageStore(records, config, [0], like)


def feed(store: Any, *requests: tuple[list[int], int, int], seed: int = 0) -> list[Any]:
    """Store new tokens of some requests as one batch, and return the views that attention would read."""
    from hf_turboquant.paged_store import Request

    store.begin(Request(*request) for request in requests)
    keys, values = random_kv(1, 2, sum(request[2] for request in requests), 16, seed=seed)
    tails = store.update(0, keys, values)
    views = [store.view(segment, 0, tail) for segment, tail in zip(store.segments, tails, strict=True)]
    store.commit()
    return views


@pytest.mark.parametrize("preset", ["k4v4", "k3v2"])
def test_pages_hold_what_the_cache_of_one_model_holds(preset: str) -> None:
    config = TurboQuantConfig() if preset == "k4v4" else TurboQuantConfig(key_bits=3, value_bits=2, key_split="even")
    config = config.replace(guard="off", sink_tokens=0)
    store = page_store(config)
    feed(store, ([3, 7, 1, 5], 0, 400))
    (view,) = feed(store, ([3, 7, 1, 5], 400, 1), seed=1)
    cache = TurboQuantCache(tiny_model("llama").config, config)
    cache.update(*random_kv(1, 2, 400, 16), 0)
    handle, _ = cache.update(*random_kv(1, 2, 1, 16, seed=1), 0)
    assert view.seq_len == 401
    assert torch.equal(view.arenas[0], handle.tokens.arenas[0][: view.num_blocks])


def test_sinks_stay_exact_beside_the_first_page() -> None:
    from hf_turboquant.ops import AttendOptions, attend, materialize

    store = page_store(TurboQuantConfig(residual_window=0))
    feed(store, ([2, 4, 6], 0, 300))
    (view,) = feed(store, ([2, 4, 6], 300, 1), seed=1)
    keys, _ = random_kv(1, 2, 300, 16)
    assert view.block_tokens == (124, 128)
    assert torch.equal(view.sink_keys, keys[:, :, :4])
    dense = [materialize(view, which=which) for which in ("keys", "values")]
    assert dense[0].shape[2] == 301
    query = torch.randn(1, 4, 1, 16)
    got = attend(query, view, AttendOptions(scaling=0.25))
    torch.testing.assert_close(got, dense_attention(query, *dense, scaling=0.25).float(), rtol=2e-5, atol=2e-5)


def test_requests_that_share_pages_read_the_same_bytes() -> None:
    store = page_store(NO_WINDOW)
    feed(store, ([1, 2, 3], 0, 300))
    one, two = feed(store, ([1, 2, 3], 300, 2), ([1, 2, 9], 256, 5), seed=1)
    assert (one.seq_len, two.seq_len) == (302, 261)
    assert torch.equal(one.arenas[0], two.arenas[0])
    store.release({1, 2, 9}, set())
    assert set(store.exact.slots) == {9}


def test_full_pages_of_a_request_that_left_are_packed_for_the_next() -> None:
    store = page_store(EXACT)
    feed(store, ([1, 2, 3], 0, 300))
    assert set(store.exact.slots) == {2, 3}
    store.release(set(), {1, 2})
    assert not store.exact.slots
    (view,) = feed(store, ([1, 2, 5], 256, 1), seed=1)
    keys, _ = random_kv(1, 2, 300, 16)
    from hf_turboquant.ops import materialize

    rebuilt = materialize(view, which="keys")[:, :, :256]
    assert torch.equal(rebuilt.sort(dim=2).values, keys[:, :, :256].sort(dim=2).values)


def test_a_page_given_to_another_request_forgets_its_tokens() -> None:
    store = page_store(NO_WINDOW)
    feed(store, ([1, 2], 0, 200))
    store.release(set(), set())
    (view,) = feed(store, ([2, 1], 0, 40), seed=3)
    assert (view.seq_len, view.num_blocks) == (40, 0)
    assert set(store.exact.slots) == {2}
    with pytest.raises(CacheStateError, match="page 1 must hold tokens"):
        feed(store, ([1, 2], 128, 1))


def test_a_batch_that_failed_leaves_nothing_half_packed() -> None:
    from hf_turboquant.errors import ValueRangeError
    from hf_turboquant.paged_store import Request

    store = page_store(TurboQuantConfig(residual_window=0))
    feed(store, ([1, 2], 0, 100))
    store.begin([Request([1, 2], 100, 60)])
    keys, values = random_kv(1, 2, 60, 16)
    keys[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueRangeError):
        store.update(0, keys, values)
    (view,) = feed(store, ([1, 2], 100, 60), seed=5)
    assert torch.isfinite(view.tail_keys).all()
    assert view.seq_len == 160


def test_the_guard_asks_for_a_size_that_pages_can_have() -> None:
    store = page_store(TurboQuantConfig(residual_window=0, key_bits=2, key_centering="none", guard="auto"))
    with pytest.raises(ConfigError, match="layer 0: .*pages have one size, so choose key_bits=8"):
        feed(store, ([1, 2], 0, 200))
