"""The store: what it holds after any order of appends, crops and reorders."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_turboquant import PRESETS, TurboQuantConfig
from hf_turboquant.errors import CacheStateError, ShapeError, ValueRangeError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import materialize
from hf_turboquant.quantizers import build_key_codec, build_value_codec
from hf_turboquant.store import KVStore
from tests.helpers import EXACT, random_kv

CPU = torch.device("cpu")


def make_store(config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor) -> KVStore:
    return KVStore(
        build_key_codec(config, keys.shape[-1], keys.dtype, CPU),
        build_value_codec(config, values.shape[-1], values.dtype, CPU),
        like_keys=keys,
        like_values=values,
        sink_tokens=config.sink_tokens,
        residual_window=config.residual_window,
    )


def filled(config: TurboQuantConfig, tokens: int, *, step: int | None = None, batch: int = 2) -> KVStore:
    keys, values = random_kv(batch, 2, tokens, 32)
    store = make_store(config, keys, values)
    for start in range(0, tokens, step or max(tokens, 1)):
        store.append(keys[:, :, start : start + (step or tokens)], values[:, :, start : start + (step or tokens)])
    return store


def contents(store: KVStore) -> tuple[torch.Tensor, torch.Tensor]:
    view = store.view()
    return materialize(view, which="keys"), materialize(view, which="values")


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 127, 131, 132, 259, 260, 261, 388, 700])
@pytest.mark.parametrize("step", [1, 7, 64, 128, 130, 300])
def test_appends_in_pieces_equal_one_append(tokens: int, step: int) -> None:
    once, pieces = filled(PRESETS["k3v2"], tokens), filled(PRESETS["k3v2"], tokens, step=step)
    assert pieces.seq_len == once.seq_len == tokens
    assert pieces.num_blocks == once.num_blocks
    for a, b in zip(contents(once), contents(pieces), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 4, 132, 133, 260, 700])
def test_sixteen_bits_keep_every_token(tokens: int) -> None:
    keys, values = random_kv(2, 2, tokens, 32)
    stored = contents(filled(EXACT, tokens, step=50))
    assert torch.equal(stored[0], keys)
    assert torch.equal(stored[1], values)


def test_tokens_are_quantized_once_when_their_block_leaves_the_window() -> None:
    store = filled(PRESETS["k4v4"], 4 + 255)
    assert store.num_blocks == 0
    keys, values = random_kv(2, 2, 1, 32, seed=1)
    store.append(keys, values)
    assert (store.num_blocks, store.tail_len) == (1, 128)
    record = store.arenas[0][0].clone()
    keys, values = random_kv(2, 2, 300, 32, seed=2)
    store.append(keys, values)
    assert torch.equal(store.arenas[0][0], record)


def test_window_and_sinks_stay_exact() -> None:
    keys, values = random_kv(2, 2, 700, 32)
    stored = contents(filled(PRESETS["k2v2"], 700))
    for got, want in zip(stored, (keys, values), strict=True):
        assert torch.equal(got[:, :, :4], want[:, :, :4])
        assert torch.equal(got[:, :, -128:], want[:, :, -128:])
        assert not torch.equal(got[:, :, 4:132], want[:, :, 4:132])


def test_growth_copies_nothing_and_wastes_at_most_an_eighth() -> None:
    keys, values = random_kv(1, 1, 1, 32)
    store = make_store(PRESETS["k2v2"], keys, values)
    prompt = random_kv(1, 1, 4 + 128 + 32 * BLOCK_TOKENS, 32)
    store.append(*prompt)
    first = store.arenas[0]
    assert store.capacity_blocks == store.num_blocks == 32
    for seed in range(40):
        store.append(*random_kv(1, 1, BLOCK_TOKENS, 32, seed=seed))
        assert store.arenas[0] is first
        assert store.capacity_blocks <= max(store.num_blocks * 9 / 8, store.num_blocks + 1)


def test_no_view_pins_the_prompt() -> None:
    keys, values = random_kv(1, 2, 4096, 32)
    store = make_store(PRESETS["k4v4"], keys, values)
    store.append(keys, values)
    own = {tensor.untyped_storage().data_ptr() for tensor in store.tensors()}
    assert keys.untyped_storage().data_ptr() not in own
    assert sum(tensor.untyped_storage().nbytes() for tensor in store.tensors()) < keys.untyped_storage().nbytes()


@pytest.mark.parametrize("removed", [0, 1, 100, 128, 129, 256, 300, 600, 698, 700])
def test_crop_keeps_the_rest_as_it_is(removed: int) -> None:
    store = filled(PRESETS["k3v3"], 700)
    before = contents(store)
    store.crop(removed)
    assert store.seq_len == 700 - removed
    for got, want in zip(contents(store), before, strict=True):
        assert torch.equal(got, want[:, :, : 700 - removed])


@pytest.mark.parametrize("removed", [1, 200, 300, 697])
def test_appending_after_crop_continues(removed: int) -> None:
    store = filled(PRESETS["k3v3"], 700)
    store.crop(removed)
    kept = contents(store)
    keys, values = random_kv(2, 2, 500, 32, seed=5)
    for start in range(0, 500, 60):
        store.append(keys[:, :, start : start + 60], values[:, :, start : start + 60])
    for got, old, new in zip(contents(store), kept, (keys, values), strict=True):
        assert got.shape[2] == 1200 - removed
        # what was exact and left the window since is coded now; what was coded is untouched
        coded = max(0, 700 - 128 - removed - 128)
        assert torch.equal(got[:, :, :coded], old[:, :, :coded])
        assert torch.equal(got[:, :, -128:], new[:, :, -128:])


def test_crop_of_more_than_held_is_refused_and_changes_nothing() -> None:
    store = filled(PRESETS["k4v4"], 300)
    with pytest.raises(CacheStateError, match="at most the 300 tokens held, got 301"):
        store.crop(301)
    assert store.seq_len == 300


def test_batch_is_reordered_without_quantizing_again() -> None:
    store = filled(PRESETS["k2v2"], 500, batch=3)
    before = contents(store)
    store.select_batch(torch.tensor([2, 2, 0, 1]))
    for got, want in zip(contents(store), before, strict=True):
        assert torch.equal(got, want[[2, 2, 0, 1]])
    store.append(*random_kv(4, 2, 300, 32, seed=3))
    assert store.seq_len == 800


def test_a_copy_is_independent() -> None:
    store = filled(PRESETS["k4v4"], 400)
    twin = copy.deepcopy(store)
    before = contents(store)
    twin.append(*random_kv(2, 2, 300, 32, seed=9))
    assert store.seq_len == 400
    for got, want in zip(contents(store), before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda k, v: (k[:1], v[:1]), "batch=2", id="batch"),
        pytest.param(lambda k, v: (k[:, :1], v[:, :1]), "num_kv_heads=2", id="heads"),
        pytest.param(lambda k, v: (k[..., :16], v), "head_dim=32", id="head_dim"),
        pytest.param(lambda k, v: (k, v[:, :, :5]), "equally many tokens", id="lengths"),
        pytest.param(lambda k, v: (k.half(), v.half()), "torch.float32 on cpu", id="dtype"),
        pytest.param(lambda k, v: (k.to("meta"), v.to("meta")), "on cpu", id="device"),
        pytest.param(lambda k, v: (k[0], v[0]), "must have shape", id="rank"),
    ],
)
def test_misfit_is_refused_and_changes_nothing(change, message: str) -> None:
    store = filled(PRESETS["k4v4"], 300)
    before = contents(store)
    with pytest.raises(ShapeError, match=message):
        store.append(*change(*random_kv(2, 2, 10, 32)))
    for got, want in zip(contents(store), before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_non_finite_tokens_are_kept_in_the_window_and_refused_when_quantized(bad: float, which: int) -> None:
    store = filled(PRESETS["k4v4"], 132)
    poisoned = random_kv(2, 2, 1, 32)
    poisoned[which][0, 0, 0, 0] = bad
    store.append(*poisoned)
    store.append(*random_kv(2, 2, 126, 32))
    before = store.seq_len, store.num_blocks, store.tail_len
    store.append(*random_kv(2, 2, 1, 32))  # the clean block leaves
    assert store.num_blocks == before[1] + 1
    before = store.seq_len, store.num_blocks, store.tail_len
    with pytest.raises(ValueRangeError, match="finite"):
        store.append(*random_kv(2, 2, 130, 32))
    assert (store.seq_len, store.num_blocks, store.tail_len) == before


def test_norm_overflow_is_refused_with_the_remedy() -> None:
    keys, values = random_kv(1, 1, 300, 32)
    store = make_store(PRESETS["k4v4"], keys, values)
    with pytest.raises(ValueRangeError, match=r"exceeds 65504.*norm_dtype='bfloat16'"):
        store.append(keys * 1e5, values)
    assert store.seq_len == 0
    roomy = make_store(PRESETS["k4v4"].replace(norm_dtype="bfloat16"), keys, values)
    roomy.append(keys * 1e5, values)
    assert roomy.seq_len == 300


def test_without_window_blocks_are_packed_as_soon_as_full() -> None:
    store = filled(PRESETS["k4v4"].replace(residual_window=0, sink_tokens=0), 300, step=1)
    assert (store.num_blocks, store.tail_len) == (2, 44)
