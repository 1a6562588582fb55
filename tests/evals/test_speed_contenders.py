"""What the speed benchmark times is what it says: every contender attends like the reference."""

from __future__ import annotations

import pytest
import torch

from evals import speed_kernels, speed_ladder
from evals.speed_contenders import (
    ALL,
    SHAPES,
    Case,
    UnsuitableError,
    grid,
    prepare,
    settings,
    stored_view,
)
from hf_turboquant.ops import AttendOptions, reference
from tests.helpers import dense_attention, random_kv

CPU = torch.device("cpu")
SMALL = "smollm2-135m"


@pytest.fixture
def ladder_input(monkeypatch):
    """Return a query, the ladder's store, and what the reference makes of the same layer."""
    monkeypatch.setattr("evals.speed_contenders.SHAPES", {"tiny": (4, 2, 64)})
    view = stored_view(Case("tiny", 2, 3 * 128 + 40, "v6"), speed_ladder.FORMAT, CPU, torch.float32)
    query = torch.randn(2, 4, 1, 64)
    expected = reference.attend(query, view, AttendOptions(query.shape[-1] ** -0.5))
    return query, speed_ladder.ladder_store(view), expected


@pytest.mark.parametrize("rung", speed_ladder.RUNGS)
def test_rung_of_the_ladder_attends_like_the_reference(rung, ladder_input):
    query, store, expected = ladder_input
    torch.testing.assert_close(speed_ladder.RUNGS[rung](query, store), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [2, 3])
def test_gather_may_split_the_tokens_anywhere(splits, ladder_input):
    query, store, expected = ladder_input
    torch.testing.assert_close(speed_ladder.gather(query, store, splits=splits), expected, atol=1e-4, rtol=1e-4)


def test_ladder_keeps_two_bits_and_a_sign_for_keys_and_two_bits_for_values(ladder_input):
    _, store, _ = ladder_input
    heads, tokens, dim = 2 * 2, 2 * 128, 64
    keys = dim // 4 + dim // 8 + 4
    values = dim // 4 + dim // 32 * 4
    exact = 2 * heads * store.recent_keys.shape[2] * dim * 4
    assert store.bytes_read("v1") == heads * tokens * (keys + values) + exact
    assert store.bytes_read("v6") - store.bytes_read("v4") == heads * tokens * (dim - dim // 4)


def test_repeated_ladder_store_means_the_same_tokens_again(ladder_input):
    _, store, _ = ladder_input
    tokens = store.norms.shape[2]
    twice = store.repeat(2 * tokens + 5)
    once, again = speed_ladder.dequantize_keys(store), speed_ladder.dequantize_keys(twice)
    torch.testing.assert_close(again, torch.cat([once, once, once[:, :, :5]], dim=2))
    assert speed_ladder.dequantize_values(twice).shape == again.shape


@pytest.mark.parametrize(("group", "tokens"), [(3, 64), (1, 70), (4, 500)], ids=["whole", "odd", "splits"])
def test_split_kv_attends_like_the_definition(group, tokens):
    keys, values = random_kv(2, 2, tokens, 32)
    query = torch.randn(2, 2 * group, 1, 32)
    expected = dense_attention(query, keys, values, scaling=32**-0.5)
    torch.testing.assert_close(speed_kernels.split_kv(query, keys, values).double(), expected, atol=1e-4, rtol=1e-4)


# cases


def test_first_rows_are_llama_at_batch_one_with_every_contender():
    cases = grid()
    first = cases[: 3 * len(ALL)]
    assert {(case.shape, case.batch) for case in first} == {("llama-3.1-8b", 1)}
    assert [case.context for case in first[:: len(ALL)]] == [4096, 32768, 131072]
    assert tuple(case.contender for case in first[: len(ALL)]) == ALL


def test_rows_have_names_of_their_own_and_cover_the_grid():
    cases = grid()
    assert len({case.id for case in cases}) == len(cases)
    assert {case.shape for case in cases} == set(SHAPES)
    assert {case.batch for case in cases} == {1, 8, 32}
    assert {min(case.context for case in cases), max(case.context for case in cases)} == {1024, 524288}


@pytest.mark.parametrize("spec", ["k4v4", "k3v2", "k2v2:key_split=none", "thor-k3v2"])
def test_stored_view_has_the_tokens_of_a_prompt(spec):
    case = Case(SMALL, 1, 3000, f"portable/{spec}")
    view = stored_view(case, spec, CPU, torch.bfloat16)
    config = settings(spec)
    assert view.seq_len == 3000
    assert view.num_sinks == config.sink_tokens
    assert 0 <= view.tail_len - config.residual_window < 128
    assert view.arenas[0].shape[0] == view.num_blocks
    # the blocks differ, and come again
    assert not torch.equal(view.arenas[0][0], view.arenas[0][1])
    assert torch.equal(view.arenas[0][0], view.arenas[0][8])


@pytest.mark.parametrize("spec", ["k4v4", "thor-k3v2"])
def test_own_portable_step_attends_like_the_reference(spec):
    case = Case(SMALL, 1, 400, f"portable/{spec}")
    torch.manual_seed(3)
    out = prepare(case, CPU, torch.float32).run()
    torch.manual_seed(3)
    query = torch.randn(1, SHAPES[SMALL][0], 1, SHAPES[SMALL][2])
    view = stored_view(case, spec, CPU, torch.float32)
    expected = reference.attend(query, view, AttendOptions(query.shape[-1] ** -0.5))
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("contender", ["split_kv", "v1", "v4", "v6", "v6-split", "portable/k4v4"])
def test_step_reads_no_more_than_it_is_allowed_for(contender):
    case = Case(SMALL, 1, 2048, contender)
    assert 0 < prepare(case, CPU).nbytes <= case.bytes_needed


def test_bytes_of_a_compressed_step_are_those_of_codes_and_exact_tokens():
    case = Case(SMALL, 1, 4 + 128 + 5 * 128, "portable/k4v4")
    view = stored_view(case, "k4v4", CPU, torch.bfloat16)
    exact = 2 * 3 * (4 + 128) * 64 * 2
    assert prepare(case, CPU).nbytes == 5 * 3 * view.record.nbytes + exact


def test_case_the_kernel_does_not_serve_says_why():
    with pytest.raises(UnsuitableError, match="cuda"):
        prepare(Case(SMALL, 1, 1024, "fast/k4v4"), CPU)


def test_context_without_a_block_has_nothing_to_quantize():
    with pytest.raises(UnsuitableError, match="no whole block"):
        prepare(Case(SMALL, 1, 100, "quantize/k4v4"), CPU)
