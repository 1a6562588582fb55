"""Masks, caps, windows and sinks of the attend kernel, each against the reference; scratch memory starts as NaN."""

from __future__ import annotations

import pytest
import torch

from hf_turboquant.ops import AttendOptions, KVView
from tests.ops.cases import (
    DEVICE,
    assert_equals_reference,
    assert_twice_eager,
    draw,
    draw_uniform,
    make_codec,
    make_view,
)

pytest.importorskip("triton")
from hf_turboquant.ops import triton as kernels

KEYS, VALUES = make_codec(2, 32, centered=True), make_codec(2, 32, transposed=True)


def _compare(view: KVView, options: AttendOptions, *, num_q_heads: int = 4, q_len: int = 1) -> torch.Tensor:
    query = draw(view.batch, num_q_heads, q_len, view.keys.format.head_dim)
    got = kernels.attend_portable(query, view, options)
    assert_equals_reference(got, query, view, options)
    return got


def _mask(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    seen = draw_uniform(*shape) < 0.7
    if kind == "bool":
        return seen
    if kind == "lowest":
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    return torch.where(seen, draw(*shape), -torch.inf)


@pytest.mark.parametrize("kind", ["bool", "float", "lowest"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 1, 2), (2, 4, 1), (1, 4, 2)], ids=["shared", "per-query", "per-head", "per-head-and-query"]
)
def test_mask(kind: str, shape: tuple[int, int, int]) -> None:
    view = make_view(KEYS, VALUES, batch=2, heads=2)
    _compare(view, AttendOptions(0.2, mask=_mask(kind, (*shape, view.seq_len))), q_len=2)


def test_mask_is_a_slice() -> None:
    """A static mask is wider than the sequence; the view passed on has its strides."""
    view = make_view(KEYS, VALUES, heads=2)
    _compare(view, AttendOptions(0.2, mask=_mask("bool", (1, 4, 2, 400))[..., : view.seq_len]), q_len=2)


def test_half_precision_mask() -> None:
    view = make_view(KEYS, VALUES)
    mask = _mask("float", (1, 1, 1, view.seq_len)).half()
    _compare(view, AttendOptions(0.2, mask=mask))


def test_left_padding() -> None:
    view = make_view(KEYS, VALUES, batch=2)
    mask = torch.ones(2, 1, 1, view.seq_len, dtype=torch.bool, device=DEVICE)
    mask[1, ..., :100] = False
    _compare(view, AttendOptions(0.2, mask=mask))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_fully_masked_rows_are_zero(kind: str) -> None:
    view = make_view(KEYS, VALUES)
    mask = torch.zeros(1, 1, 2, view.seq_len, dtype=torch.bool, device=DEVICE)
    mask[:, :, 1, 5] = True
    if kind == "float":
        mask = torch.where(mask, 0.0, -torch.inf)
    got = _compare(view, AttendOptions(0.2, mask=mask), q_len=2)
    assert (got[:, :, 0] == 0).all()
    assert (got[:, :, 1] != 0).any()


def test_row_of_lowest_masks_is_uniform() -> None:
    """The lowest float only discourages: a row of it alone weighs every token alike, as in eager attention."""
    view = make_view(KEYS, VALUES)
    mask = torch.full((1, 1, 1, view.seq_len), torch.finfo(torch.float32).min, device=DEVICE)
    assert (_compare(view, AttendOptions(0.2, mask=mask)) != 0).any()


@pytest.mark.parametrize("q_len", [2, 9], ids=["in-tail", "into-blocks"])
def test_causal(q_len: int) -> None:
    view = make_view(KEYS, VALUES, heads=2, tail=(5, 8, 6))
    _compare(view, AttendOptions(0.2, is_causal=True), q_len=q_len)


def test_causal_long_chunk() -> None:
    """More rows than a program holds: several row tiles, most of the tail behind the first of them."""
    view = make_view(KEYS, VALUES, sinks=0, tail=(44, 48, 40))
    _compare(view, AttendOptions(0.2, is_causal=True), num_q_heads=2, q_len=40)


@pytest.mark.parametrize("window", [1, 4, 60, 133, 200, 10_000])
@pytest.mark.parametrize("causal", [False, True], ids=["one-query", "causal"])
def test_sliding_window(window: int, causal: bool) -> None:
    view = make_view(KEYS, VALUES, arenas=(2,))
    _compare(view, AttendOptions(0.2, sliding_window=window, is_causal=causal), num_q_heads=2, q_len=3 if causal else 1)


def test_softcap() -> None:
    view = make_view(KEYS, VALUES, heads=2)
    mask = _mask("float", (1, 1, 1, view.seq_len))
    _compare(view, AttendOptions(1.0, softcap=3.0))
    _compare(view, AttendOptions(1.0, softcap=30.0, mask=mask))


def test_sink_logits() -> None:
    view = make_view(KEYS, VALUES, batch=2, heads=2)
    logits = torch.tensor([-30.0, 0.0, 2.0, 40.0], device=DEVICE)
    _compare(view, AttendOptions(0.2, sink_logits=logits))
    masked = torch.zeros(1, 1, 1, view.seq_len, dtype=torch.bool, device=DEVICE)
    assert (_compare(view, AttendOptions(0.2, sink_logits=logits, mask=masked)) == 0).all()


@pytest.mark.parametrize("scaling", [1.0, 0.01, 30.0])
def test_scaling(scaling: float) -> None:
    view, options = make_view(KEYS, VALUES), AttendOptions(scaling)
    query = draw(1, 4, 1, 32)
    assert_twice_eager(kernels.attend_portable(query, view, options), query, view, options)


@pytest.mark.parametrize("group_size", [1, 3, 7, 16])
def test_group_size(group_size: int) -> None:
    view = make_view(KEYS, VALUES, heads=2)
    _compare(view, AttendOptions(0.2, is_causal=True), num_q_heads=2 * group_size, q_len=2)


def test_query_strides() -> None:
    view = make_view(KEYS, VALUES, batch=2, heads=2)
    query = draw(2, 3, 4, 32).transpose(1, 2)
    reversed_channels = draw(2, 4, 32, 3).transpose(2, 3)
    options = AttendOptions(0.2, is_causal=True)
    for strided in (query, reversed_channels):
        assert_equals_reference(kernels.attend_portable(strided, view, options), strided, view, options)


def test_inputs_are_not_written() -> None:
    view = make_view(KEYS, VALUES)
    before = [tensor.clone() for tensor in (*view.arenas, view.sink_keys, view.tail_keys)]
    _compare(view, AttendOptions(0.2))
    for old, new in zip(before, (*view.arenas, view.sink_keys, view.tail_keys)):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
