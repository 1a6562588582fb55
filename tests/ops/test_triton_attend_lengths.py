"""The attend kernel at every kind of length: none, one, around block edges, cropped blocks, several arenas."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from hf_turboquant.ops import AttendOptions, KVView
from hf_turboquant.ops.triton import attend_launch
from tests.ops.cases import DEVICE, assert_equals_reference, draw, draw_uniform, make_codec, make_view

pytest.importorskip("triton")
from hf_turboquant.ops import triton as kernels
from hf_turboquant.ops.triton.launch import AttendLaunch, choose_parts, choose_splits, share_splits
from hf_turboquant.ops.triton.traits import traits_of

KEYS, VALUES = make_codec(2, 32, centered=True), make_codec(3, 32, transposed=True)
OPTIONS = AttendOptions(0.2, is_causal=True)


def _query(view: KVView, q_len: int = 1, num_q_heads: int = 2) -> torch.Tensor:
    return draw(view.batch, num_q_heads, q_len, 32)


def _compare(view: KVView, q_len: int = 1, options: AttendOptions = OPTIONS, **extra) -> None:
    query = _query(view, q_len)
    got = kernels.attend_portable(query, view, options, **extra)
    assert_equals_reference(got, query, view, options)


LENGTHS = {
    "nothing": (0, (0,), (0, 8, 0)),
    "one-sink": (1, (0,), (0, 8, 0)),
    "one-tail-token": (0, (0,), (1, 8, 7)),
    "one-block": (0, (1,), (0, 8, 0)),
    "two-blocks-and-one": (4, (2,), (1, 256, 0)),
    "tail-one-short-of-a-block": (4, (1,), (127, 128, 0)),
    "tail-of-a-block": (4, (1,), (128, 128, 100)),
    "tail-wraps": (0, (1,), (200, 256, 250)),
    "many-sinks": (70, (0,), (3, 8, 2)),
    "tail-without-slots": (2, (1,), (0, 0, 0)),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_length(case: str) -> None:
    sinks, arenas, tail = LENGTHS[case]
    _compare(make_view(KEYS, VALUES, sinks=sinks, arenas=arenas, tail=tail))


def test_no_arena_yet() -> None:
    view = replace(make_view(KEYS, VALUES, arenas=(0,)), arenas=())
    _compare(view)


def test_no_tokens_with_sink_logits() -> None:
    view = make_view(KEYS, VALUES, sinks=0, arenas=(0,), tail=(0, 8, 0))
    got = kernels.attend_portable(_query(view), view, AttendOptions(0.2, sink_logits=torch.zeros(2, device=DEVICE)))
    assert (got == 0).all()


def test_unused_capacity_is_not_read() -> None:
    """Blocks beyond ``num_blocks`` hold bytes that mean NaN."""
    _compare(make_view(KEYS, VALUES, arenas=(3,), num_blocks=1))


@pytest.mark.parametrize("counts", [(128, 37), (1, 128), (0, 5)], ids=["last", "first", "empty"])
def test_cropped_blocks(counts: tuple[int, ...]) -> None:
    view = make_view(KEYS, VALUES, arenas=(2,), block_tokens=counts)
    _compare(view, q_len=3)
    mask = draw_uniform(1, 2, 1, view.seq_len) < 0.5
    _compare(view, options=AttendOptions(0.2, mask=mask))
    _compare(view, options=AttendOptions(0.2, sliding_window=20))


def test_several_arenas() -> None:
    view = make_view(KEYS, VALUES, batch=2, arenas=(1, 3, 2), num_blocks=3)
    _compare(view)
    table = kernels.build_block_table(view.arenas, view.num_blocks, view.block_tokens)
    assert table.starts.tolist() == [0, 128, 256]
    _compare(view, block_table=table)


def test_arena_larger_than_needed_takes_no_table() -> None:
    view = make_view(KEYS, VALUES, arenas=(2,), num_blocks=1)
    assert not kernels.needs_block_table(view)
    assert kernels.needs_block_table(make_view(KEYS, VALUES, arenas=(1, 1)))
    assert kernels.needs_block_table(make_view(KEYS, VALUES, block_tokens=(5,)))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_any_number_of_splits(splits: int) -> None:
    """The merge does not depend on where the sequence was cut."""
    view = make_view(KEYS, VALUES, arenas=(3,), tail=(70, 128, 0))
    with mock.patch.object(attend_launch, "choose_splits", lambda count, *rest: min(count, splits)):
        _compare(view, q_len=2)


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_any_number_of_parts_of_a_block(parts: int, splits: int) -> None:
    """Nor on where a block was cut, between splits or inside one."""
    view = make_view(KEYS, make_codec(4, 32, transposed=True), arenas=(2,), block_tokens=(128, 77))
    with (
        mock.patch.object(attend_launch, "choose_parts", return_value=parts),
        mock.patch.object(attend_launch, "choose_splits", lambda count, *rest: min(count, splits)),
    ):
        _compare(view, q_len=2)


SPLITS = {
    "few-blocks": (4, 32, 8, (4, 128, 6)),
    "few-blocks-of-long-steps": (2, 32, 8, (2, 64, 6)),
    "some": (4, 256, 8, (2, 171, 2)),
    "many": (4, 1024, 8, (2, 187, 1)),
    "batch": (4, 256, 64, (1, 22, 1)),
    "more-heads-than-programs": (4, 32, 4096, (1, 1, 1)),
    "no-blocks": (4, 0, 8, (1, 0, 6)),
}


@pytest.mark.parametrize("case", SPLITS)
def test_programs_are_as_many_as_run_at_once(case: str) -> None:
    """Parts of a block, runs of parts, runs of 6 tiles; 132 multiprocessors of 12 programs."""
    bits, blocks, others, expected = SPLITS[case]
    values = traits_of(make_codec(bits, 128, transposed=True).format)
    table = AttendLaunch(8, 32, 32, 1, 1, 12)
    packed, exact = share_splits(blocks, 6, others, table, 132)
    parts = choose_parts(blocks, packed, values, table)
    assert (parts, choose_splits(blocks * parts, packed), choose_splits(6, exact)) == expected
    assert sum(expected[1:]) * others <= 132 * 12 or others > 132 * 12


def test_results_merge() -> None:
    """Old tokens from codes and fresh tokens exact, attended apart and joined, are attention over both."""
    view = make_view(KEYS, VALUES, tail=(20, 32, 0))
    query = _query(view, q_len=20)
    old = replace(view, tail_len=0)
    fresh = replace(
        view, arenas=(), num_blocks=0, sink_keys=view.sink_keys[:, :, :0], sink_values=view.sink_values[:, :, :0]
    )
    joined = kernels.merge_results(
        kernels.attend_with_lse(query, old, AttendOptions(0.2)), kernels.attend_with_lse(query, fresh, OPTIONS)
    )
    assert_equals_reference(joined.out, query, view, OPTIONS)
    whole = kernels.attend_with_lse(query, view, OPTIONS)
    torch.testing.assert_close(joined.lse, whole.lse, rtol=1e-5, atol=1e-5)


def test_merge_with_nothing() -> None:
    view = make_view(KEYS, VALUES)
    empty = make_view(KEYS, VALUES, sinks=0, arenas=(0,), tail=(0, 8, 0))
    query = _query(view)
    some, none = kernels.attend_with_lse(query, view, OPTIONS), kernels.attend_with_lse(query, empty, OPTIONS)
    assert (none.lse == -torch.inf).all()
    torch.testing.assert_close(kernels.merge_results(some, none).out, some.out)
    nothing = kernels.merge_results(none, none)
    assert (nothing.out == 0).all()
    assert (nothing.lse == -torch.inf).all()
