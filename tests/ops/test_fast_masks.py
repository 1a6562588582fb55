"""Masks, sliding windows and softcap of the fast attend kernel, each against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_turboquant.ops import AttendOptions, KVView, reference

plans = pytest.importorskip("hf_turboquant.ops.triton.fast_plan")
if plans.triton_obstacle():
    pytest.skip(plans.triton_obstacle(), allow_module_level=True)

from hf_turboquant.ops.triton import fast_attend as fast  # noqa: E402
from hf_turboquant.ops.triton.attend_launch import BlockTable  # noqa: E402
from tests.ops.test_fast_attend import (  # noqa: E402, F401  the fixture
    EMULATED,
    ROUNDING,
    emulated,
    make_view,
    relative_error,
)


def check(
    view: KVView, *, group: int = 4, q_len: int = 1, table: BlockTable | None = None, **options: object
) -> torch.Tensor:
    """Compare a call with the reference, and return its result."""
    device, head_dim, dtype = view.tail_keys.device, view.tail_keys.shape[-1], view.tail_keys.dtype
    options = {name: item.to(device) if isinstance(item, torch.Tensor) else item for name, item in options.items()}
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(view.batch, view.num_kv_heads * group, q_len, head_dim, generator=generator).to(device, dtype)
    given = AttendOptions(**{"scaling": head_dim**-0.5, "is_causal": True, **options})
    assert fast.supports(view, query, given, 90) == ""
    result = fast.fast_attend(query, view, given, block_table=table)
    expected = reference.attend(query.float(), view, given)
    assert torch.isfinite(result).all()
    assert relative_error(result, expected) < ROUNDING[dtype]
    return result


def draw_mask(kind: str, view: KVView, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return a mask of which some runs and some single tokens are hidden, as a slice of a wider one."""
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand(*shape, view.seq_len + 9, generator=generator) < 0.7
    seen[..., 70:200] &= torch.rand(*shape, 1, generator=generator) < 0.5
    seen[..., view.seq_len - 1] = True
    mask = seen
    if kind != "bool":
        lowest = torch.finfo(torch.float16 if kind == "float16" else torch.float32).min
        bias = torch.randn(seen.shape, generator=generator)
        hidden = torch.where(torch.rand(seen.shape, generator=generator) < 0.5, -torch.inf, lowest)
        dtype = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[kind]
        mask = torch.where(seen, bias, hidden).to(dtype)
    return mask[..., 9:].to(view.tail_keys.device)


SHAPES = {
    "shared": (1, 1, 1),
    "per_sequence": (2, 1, 1),
    "per_head": (1, 8, 1),
    "per_query": (2, 1, 2),
    "per_head_and_query": (2, 8, 2),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mask(kind, shape):
    heads = 2 if kind == "bool" else 1
    view = make_view(2, 4 if shape[1] == 1 else 3, blocks=2, batch=2, heads=heads)
    check(view, q_len=shape[2], mask=draw_mask(kind, view, (shape[0], min(shape[1], 4 * heads), shape[2])))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_mask(kind):
    view = make_view(2, 4)
    check(view, mask=draw_mask(kind, view, (1, 4, 1)))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("value_bits", [2, 4])
@pytest.mark.parametrize("heads", [1, 4], ids=["shared", "per_head"])
def test_mask_of_one_token_shows_its_value(value_bits, heads):
    view = make_view(4, value_bits, blocks=3, sinks=3, tail=9)
    for token in (2, 3 + 33, 3 + 128 + 127):
        mask = torch.zeros(1, heads, 1, view.seq_len, dtype=torch.bool)
        mask[..., token] = True
        check(view, mask=mask)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_left_padding(kind):
    view = make_view(2, 4, blocks=3, batch=3)
    seen = torch.ones(3, 1, 1, view.seq_len, dtype=torch.bool)
    seen[1, ..., :2] = False
    seen[2, ..., :300] = False
    mask = seen if kind == "bool" else torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    check(view, mask=mask)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_row_that_sees_nothing_is_zero(kind):
    view = make_view(2, 2, blocks=2, batch=2)
    mask = torch.zeros(2, 1, 2, view.seq_len, dtype=torch.bool)
    mask[1, :, 1, 200] = True
    if kind == "float":
        mask = torch.where(mask, 0.0, -torch.inf)
    result = check(view, q_len=2, mask=mask)
    assert (result[0] == 0).all()
    assert (result[1, :, 0] == 0).all()
    lse = torch.empty(2, 4, 1)
    query = torch.randn(2, 4, 1, 64).half()
    fast.fast_attend(query, view, AttendOptions(0.1, mask=mask[:, :, :1]), lse=lse)
    assert (lse == -torch.inf).all()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_of_lowest_masks_is_uniform(dtype):
    """The lowest float only discourages: a row of it alone weighs every token alike, as in eager attention."""
    view = make_view(2, 2, blocks=6)
    check(view, mask=torch.full((1, 1, 1, view.seq_len), torch.finfo(dtype).min, dtype=dtype))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("window", [1, 40, 41, 168, 200, 10_000])
@pytest.mark.parametrize("q_len", [1, 3], ids=["one_query", "chunk"])
def test_window(window, q_len):
    """Bounds in the tail, at the edges of blocks, inside them, and behind all tokens; 40 tokens are in the tail."""
    check(make_view(2, 4, blocks=2), q_len=q_len, sliding_window=window)


@pytest.mark.usefixtures("emulated")
def test_blocks_before_the_window_are_not_read(monkeypatch):
    view = make_view(2, 3, blocks=5)
    query, options = torch.randn(1, 4, 1, 64).half(), AttendOptions(0.125, sliding_window=40 + 200)
    check(view, sliding_window=40 + 200)
    whole = fast.fast_attend(query, view, options)
    blocks = []
    monkeypatch.setattr(
        fast, "fast_plan", lambda **sizes: blocks.append(sizes["num_blocks"]) or plans.fast_plan(**sizes)
    )
    # every norm is NaN
    view.arenas[0][:3] = 0xFF
    assert torch.equal(fast.fast_attend(query, view, options), whole)
    assert blocks == [2]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("softcap", "kind"), [(2, "none"), (30.0, "none"), (5.0, "bool"), (5.0, "float"), (5.0, "window")], ids=str
)
def test_softcap(softcap, kind):
    view = make_view(4, 4, blocks=2)
    options = {"softcap": softcap, "scaling": 0.5}
    if kind == "window":
        options["sliding_window"] = 100
    elif kind != "none":
        options["mask"] = draw_mask(kind, view, (1, 4, 1))
    check(view, **options)


CROPPED = (128, 100, 128, 1, 60)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("kind", "heads"), [("bool", 1), ("bool", 4), ("float", 1), ("float", 4), ("window", 1), ("softcap", 1)], ids=str
)
def test_cropped_blocks_in_two_arenas(kind, heads, monkeypatch):
    view = make_view(2, 3, blocks=5)
    arenas = (view.arenas[0][:2].clone(), view.arenas[0][2:].clone())
    view = replace(view, arenas=arenas, block_tokens=CROPPED)
    starts = torch.tensor([0, *CROPPED[:-1]]).cumsum(0).int()
    addresses = torch.tensor([record.data_ptr() for arena in arenas for record in arena])
    monkeypatch.setattr(EMULATED, "reachable", arenas)
    options = {"window": {"sliding_window": 250}, "softcap": {"softcap": 5.0}}.get(kind)
    if options is None:
        options = {"mask": draw_mask(kind, view, (1, heads, 1))}
    check(view, table=BlockTable(addresses, starts, torch.tensor(CROPPED, dtype=torch.int32)), **options)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", ["k2v2", "k42v2", "d128", "d256", "bfloat16"])
def test_formats(case):
    kinds = {
        "k2v2": {"key_bits": 2, "value_bits": 2},
        "k42v2": {"key_bits": (4, 2), "value_bits": 2, "head_dim": 128},
        "d128": {"key_bits": 4, "value_bits": 4, "head_dim": 128},
        "d256": {"key_bits": 4, "value_bits": 4, "head_dim": 256, "blocks": 1},
        "bfloat16": {"key_bits": 4, "value_bits": 3, "dtype": torch.bfloat16, "heads": 2},
    }
    view = make_view(**kinds[case])
    check(view, mask=draw_mask("bool", view, (1, 1, 1)))
    check(view, mask=draw_mask("float", view, (1, 1, 1)), softcap=10.0)


@pytest.mark.usefixtures("emulated")
def test_sink_logits_with_mask_and_many_rounds():
    view = make_view(2, 2, blocks=66, tail=3)
    logits = torch.tensor([5.0, -1.0, 0.0, 2.0])
    check(view, mask=draw_mask("bool", view, (1, 1, 1)), sink_logits=logits)


# on a GPU


ON_GPU = {
    "k4v4": {"key_bits": 4, "value_bits": 4, "head_dim": 128},
    "k2v2": {"key_bits": 2, "value_bits": 2, "head_dim": 64},
    "k42v3": {"key_bits": (4, 2), "value_bits": 3, "head_dim": 128},
    "d256": {"key_bits": 4, "value_bits": 4, "head_dim": 256},
    "bfloat16": {"key_bits": 4, "value_bits": 4, "head_dim": 128, "dtype": torch.bfloat16},
}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(4, 1), (8, 1), (4, 3)], ids=["rows4", "rows8", "rows12"])
@pytest.mark.parametrize("kind", ["bool", "float", "per_head", "per_query", "window", "softcap"])
@pytest.mark.parametrize("case", ON_GPU.values(), ids=ON_GPU.keys())
def test_kernel_equals_reference_on_gpu(case, kind, rows):
    device = torch.device("cuda")
    if fast.device_limits(torch.device("cuda", 0))[0] < fast.MIN_CAPABILITY:
        pytest.skip("needs compute capability 8.0")
    group, q_len = rows
    view = make_view(**case, blocks=21, batch=2, heads=2, device=device)
    shapes = {"per_head": (1, 2 * group, 1), "per_query": (2, 1, q_len)}
    if kind in ("window", "softcap"):
        options = {"window": {"sliding_window": 1500}, "softcap": {"softcap": 5.0}}[kind]
    else:
        options = {"mask": draw_mask("float" if kind == "float" else "bool", view, shapes.get(kind, (2, 1, 1)))}
    check(view, group=group, q_len=q_len, **options)


@pytest.mark.gpu
def test_rows_that_see_nothing_are_zero_on_gpu():
    view = make_view(4, 4, head_dim=128, blocks=9, batch=2, device=torch.device("cuda"))
    mask = torch.ones(2, 1, 1, view.seq_len, dtype=torch.bool)
    mask[1] = False
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        result = check(view, mask=given)
        assert (result[1] == 0).all()
        assert (result[0] != 0).any()
