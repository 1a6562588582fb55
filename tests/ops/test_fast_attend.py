"""The fast attend kernel against the reference, on the CPU through an emulation of its warps, and on a GPU as it is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.codebook import load_codebook
from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import AttendOptions, KVView, NewToken, VectorCodec, materialize, quantize, reference
from hf_turboquant.quantizers.mse import mse_codec, mse_tables
from hf_turboquant.quantizers.prod import prod_codec

plans = pytest.importorskip("hf_turboquant.ops.triton.fast_plan")
if plans.triton_obstacle():
    pytest.skip(plans.triton_obstacle(), allow_module_level=True)

from hf_turboquant.ops.triton import fast_attend as fast  # noqa: E402
from hf_turboquant.ops.triton.fast_levels import level_table  # noqa: E402
from tests.ops.warp_emulator import EmulatedKernel  # noqa: E402

CPU = torch.device("cpu")
EMULATED = EmulatedKernel(
    "fast_attend_kernel",
    [f"hf_turboquant.ops.triton.fast_{part}" for part in ("primitives", "blocks", "masks", "exact", "kernel")],
)


@dataclass(frozen=True)
class Blocks:
    """Where blocks are."""

    addresses: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def make_codec(
    bits: int | tuple[int, int],
    head_dim: int,
    *,
    transposed: bool,
    centered: bool,
    device: torch.device,
    projection: str | None = None,
) -> VectorCodec:
    """Return an ``mse`` codec, or with a projection a ``prod`` codec; two widths split the channels evenly."""
    config = TurboQuantConfig()
    if projection is not None:
        return prod_codec(config.replace(projection=projection), head_dim, bits + 1, device, centered=centered)
    if isinstance(bits, int):
        return mse_codec(config, head_dim, bits, device, transposed=transposed, centered=centered)
    half = head_dim // 2
    groups = tuple(ChannelGroup(start, half, width) for start, width in zip((0, half), bits, strict=True))
    fmt = VectorFormat("mse", head_dim, groups, transposed=transposed, centered=centered)
    return VectorCodec(fmt, mse_tables(config.rotation, groups, config.seed, device))


def snap_tables(codec: VectorCodec) -> VectorCodec:
    """Return a codec whose float centroids are the bytes of the kernel, so that only arithmetic can differ."""
    centroids = []
    for group, table in zip(codec.format.groups, codec.tables.centroids, strict=True):
        levels = level_table(table, group.size)
        raw = levels.low.to_bytes(4, "little", signed=True) + levels.high.to_bytes(4, "little", signed=True)
        entries = [byte - 256 if byte > 127 else byte for byte in raw][: 2 ** min(group.bits, 3)]
        if group.bits == 4:
            negative = sorted((entry + 0.5) * levels.unit for entry in entries)
            values = negative + [-value for value in reversed(negative)]
        else:
            values = sorted(entry * levels.unit for entry in entries)
        centroids.append(torch.tensor(values, dtype=torch.float32, device=table.device))
    return VectorCodec(codec.format, replace(codec.tables, centroids=tuple(centroids)))


def make_view(
    key_bits: int | tuple[int, int],
    value_bits: int,
    *,
    head_dim: int = 64,
    blocks: int = 2,
    sinks: int = 4,
    tail: int = 40,
    batch: int = 1,
    heads: int = 1,
    centered: bool = True,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float16,
    snap: bool = True,
    projection: str | None = None,
) -> KVView:
    """Return a layer of random tokens: channels of uneven strength around a common offset, a wrapped ring."""
    keys = make_codec(key_bits, head_dim, transposed=False, centered=centered, device=device, projection=projection)
    values = make_codec(value_bits, head_dim, transposed=True, centered=False, device=device)
    if snap:
        keys, values = snap_tables(keys), snap_tables(values)
    generator = torch.Generator(device).manual_seed(0)

    def draw(tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, head_dim, generator=generator, device=device)

    spread = torch.logspace(-1, 0.5, head_dim, device=device)
    arena = torch.empty(
        blocks, batch, heads, keys.format.nbytes + values.format.nbytes, dtype=torch.uint8, device=device
    )
    packed_keys, packed_values = draw(blocks * 128) * spread + spread, draw(blocks * 128)
    quantize(packed_keys, packed_values, arena, keys, values, backend="reference")
    slots = max(tail, 1) + 7
    return KVView(
        keys, values, (draw(sinks) * spread).to(dtype), draw(sinks).to(dtype), (arena,), blocks, None,
        (draw(slots) * spread).to(dtype), draw(slots).to(dtype), 11 % slots, tail,
    )  # fmt: skip


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def run(
    view: KVView, group: int = 4, q_len: int = 1, *, block_table: object = None, sink_logits: torch.Tensor | None = None
) -> float:
    """Return the relative error of the fast kernel against the reference, the larger of outputs and lse."""
    device, head_dim = view.tail_keys.device, view.tail_keys.shape[-1]
    query = torch.randn(view.batch, view.num_kv_heads * group, q_len, head_dim, device=device).to(view.tail_keys.dtype)
    return error_of(query, view, block_table=block_table, sink_logits=sink_logits)


def error_of(
    query: torch.Tensor, view: KVView, *, block_table: object = None, sink_logits: torch.Tensor | None = None
) -> float:
    """Return the relative error of the fast kernel against the reference."""
    options = AttendOptions(scaling=query.shape[-1] ** -0.5, is_causal=True, sink_logits=sink_logits)
    assert fast.supports(view, query, options, 90) == ""
    result = fast.fast_attend(query, view, options, block_table=block_table)
    expected = reference.attend(query.float(), view, options)
    assert torch.isfinite(result).all()
    return relative_error(result, expected)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel run on the CPU. Launches do not overlap before sm_90, which the interpreter could not do."""
    monkeypatch.setattr(fast, "fast_attend_kernel", EMULATED)
    monkeypatch.setattr(fast, "device_limits", lambda _: (80, 2))


CASES = {
    "k2v2": {"key_bits": 2, "value_bits": 2, "head_dim": 128},
    "k3v3": {"key_bits": 3, "value_bits": 3},
    "k4v4": {"key_bits": 4, "value_bits": 4},
    "k42v2": {"key_bits": (4, 2), "value_bits": 2, "head_dim": 128},
    "k31v2": {"key_bits": (3, 1), "value_bits": 2, "head_dim": 128},
    "k42v3-d64": {"key_bits": (4, 2), "value_bits": 3, "head_dim": 64},
    "k31v2-d64": {"key_bits": (3, 1), "value_bits": 2, "head_dim": 64},
    "k24v4": {"key_bits": (2, 4), "value_bits": 4, "head_dim": 128},
    "prod3v2": {"key_bits": 2, "value_bits": 2, "head_dim": 128, "projection": "gaussian", "centered": False},
    "prod3v2-d64": {"key_bits": 2, "value_bits": 2, "head_dim": 64, "projection": "gaussian", "centered": False},
    "prod3v2-d256": {"key_bits": 2, "value_bits": 2, "head_dim": 256, "projection": "gaussian", "blocks": 1},
    "prod3v3-orthogonal": {"key_bits": 2, "value_bits": 3, "head_dim": 128, "projection": "orthogonal"},
    "prod4v4": {"key_bits": 3, "value_bits": 4, "projection": "gaussian", "blocks": 1, "heads": 2},
    "prod2v2": {"key_bits": 1, "value_bits": 2, "projection": "gaussian", "dtype": torch.bfloat16},
    "not_centered": {"key_bits": 2, "value_bits": 4, "centered": False},
    "head_dim_256": {"key_bits": 3, "value_bits": 2, "head_dim": 256, "blocks": 1},
    "bfloat16": {"key_bits": 2, "value_bits": 3, "dtype": torch.bfloat16, "heads": 2},
    "one_exact_token": {"key_bits": 2, "value_bits": 2, "sinks": 0, "tail": 1},
    "many_rounds": {"key_bits": 2, "value_bits": 2, "blocks": 66, "tail": 3},
}

ROUNDING = {torch.float16: 8e-4, torch.bfloat16: 5e-3}
"""Relative error allowed: of the type of output and exact weights, with a little for 16-bit queries and weights."""


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_emulated_kernel_equals_reference(case):
    assert run(make_view(**case)) < ROUNDING[case.get("dtype", torch.float16)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("projection", [None, "gaussian"], ids=["mse", "prod"])
@pytest.mark.parametrize(("group", "q_len"), [(1, 1), (8, 1), (3, 3), (16, 1)], ids=lambda n: str(n))
def test_query_rows(group, q_len, projection):
    assert run(make_view(2, 2, blocks=2, projection=projection), group, q_len) < ROUNDING[torch.float16]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("projection", ["gaussian", "orthogonal"])
def test_query_along_a_row_of_the_projection(projection):
    """No other query has a channel as large: its integers fit in two bytes too."""
    view = make_view(1, 2, blocks=1, batch=2, projection=projection)
    tables = view.keys.tables
    longest = int(tables.projection.norm(dim=1).argmax())
    row = tables.rotation @ tables.projection[longest]
    query = torch.stack([row, -row])[:, None, None].half()
    assert error_of(query, view) < ROUNDING[torch.float16]


@pytest.mark.usefixtures("emulated")
def test_sink_logits():
    logits = torch.tensor([5.0, -1.0, 0.0, 2.0])
    assert run(make_view(2, 2, blocks=1), 4, sink_logits=logits) < ROUNDING[torch.float16]


@pytest.mark.usefixtures("emulated")
def test_cropped_blocks_in_two_arenas(monkeypatch):
    view = make_view(2, 3, blocks=5)
    arenas = (view.arenas[0][:2].clone(), view.arenas[0][2:].clone())
    counts = (128, 100, 128, 1, 60)
    view = replace(view, arenas=arenas, block_tokens=counts)
    table = Blocks(
        torch.tensor([record.data_ptr() for arena in arenas for record in arena]),
        torch.tensor([0, *itertools.accumulate(counts[:-1])], dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    )
    monkeypatch.setattr(EMULATED, "reachable", arenas)
    assert run(view, block_table=table) < ROUNDING[torch.float16]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("tail", [1, 33, 40], ids=lambda n: f"tail{n}")
def test_room_behind_the_tail_is_not_read(tail):
    """The work is divided for a full ring: programs without tokens, and slots never written, change nothing."""
    view = make_view(2, 2, blocks=2, tail=40)
    rings = [torch.full((1, 1, 256, 64), torch.nan, dtype=torch.float16) for _ in range(2)]
    slots = torch.arange(11, 11 + 40) % 47
    for ring, old in zip(rings, (view.tail_keys, view.tail_values), strict=True):
        ring[:, :, 100 + torch.arange(40)] = old[:, :, slots]
    view = replace(view, tail_keys=rings[0], tail_values=rings[1], tail_start=100).with_tail(100, tail)
    assert fast.plan_of(torch.zeros(1, 4, 1, 64), view).exact_splits > 1
    assert run(view) < ROUNDING[torch.float16]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("head_dim", "group", "dtype"), [(64, 4, torch.float16), (128, 1, torch.bfloat16)], ids=str)
def test_newest_token_is_written_and_read(head_dim, group, dtype):
    """The slot of the token holds NaN until the launches of the step that attends over it."""
    view = make_view(2, 2, head_dim=head_dim, heads=2, batch=2, dtype=dtype)
    slot = (view.tail_start + view.tail_len - 1) % view.tail_keys.shape[2]
    rings = [view.tail_keys, view.tail_values]
    wanted = [ring.clone() for ring in rings]
    # as a model hands them over: heads behind tokens
    states = [ring[:, :, slot : slot + 1].transpose(1, 2).contiguous().transpose(1, 2) for ring in rings]
    for ring in rings:
        ring[:, :, slot] = torch.nan
    waiting = view.with_tail(view.tail_start, view.tail_len, NewToken(*states, tuple(rings), slot))
    query = torch.randn(2, 2 * group, 1, head_dim).to(dtype)
    options = AttendOptions(scaling=head_dim**-0.5)
    result = fast.fast_attend(query, waiting, options)
    assert waiting.waiting is None
    assert all(torch.equal(ring, kept) for ring, kept in zip(rings, wanted, strict=True))
    assert relative_error(result, reference.attend(query.float(), view, options)) < ROUNDING[dtype]


@pytest.mark.usefixtures("emulated")
def test_lse_is_that_of_all_tokens():
    view = make_view(2, 2, blocks=2, sinks=2, tail=5)
    query = torch.randn(1, 4, 1, 64).half()
    options = AttendOptions(scaling=0.125)
    lse = torch.empty(1, 4, 1)
    fast.fast_attend(query, view, options, lse=lse)
    keys = materialize(view, which="keys").double()
    expected = (query.double() @ keys.transpose(-1, -2) * 0.125).logsumexp(-1)
    assert torch.allclose(lse.double(), expected, atol=2e-3)


LEVEL_CASES = [(64, 2), (64, 3), (64, 4), (128, 2), (128, 3), (128, 4), (256, 2), (256, 4)]


@pytest.mark.parametrize(("size", "bits"), LEVEL_CASES, ids=lambda n: str(n))
def test_level_tables_cost_little(size, bits):
    book = load_codebook(size, bits)
    levels = level_table(book.centroids, size)
    snapped = snap_tables(make_codec(bits, size, transposed=False, centered=False, device=CPU)).tables.centroids[0]
    unit = torch.nn.functional.normalize(torch.randn(2000, size), dim=-1)
    codes = torch.bucketize(unit, book.boundaries)
    errors = [float((unit - table[codes]).square().mean()) for table in (book.centroids, snapped)]
    assert levels.excess < 2e-3
    assert errors[1] / errors[0] - 1 == pytest.approx(levels.excess, abs=1e-3)


REASONS = {
    "old_gpu": ({}, {}, 75, "8.0"),
    "mask_dtype": ({}, {"mask": torch.ones(1, 1, 1, 300, dtype=torch.float64)}, 90, "float64"),
    "one_bit": ({"value_bits": 1}, {}, 90, "values"),
    "float32": ({"dtype": torch.float32}, {}, 90, "float16"),
    "head_dim": ({"head_dim": 96}, {}, 90, "channels"),
    "wide_prod": ({"head_dim": 96, "projection": "gaussian"}, {}, 90, "channels"),
}


@pytest.mark.parametrize(("view", "options", "capability", "word"), REASONS.values(), ids=REASONS.keys())
def test_supports_says_why_not(view, options, capability, word):
    made = make_view(**{"key_bits": 2, "value_bits": 2, "blocks": 1, **view}, snap=False)
    query = torch.zeros(1, 4, 1, made.tail_keys.shape[-1], dtype=made.tail_keys.dtype)
    assert word in fast.supports(made, query, AttendOptions(scaling=1.0, **options), capability)


def test_prod_keys_that_are_not_served():
    """Signs are the second group of channels; without the matrix that projects a query there is no factor for them."""
    view, query = make_view(2, 2, blocks=1, projection="gaussian"), torch.zeros(1, 4, 1, 64, dtype=torch.float16)
    fmt, tables = view.keys.format, view.keys.tables
    split = replace(fmt, groups=(ChannelGroup(0, 32, 3), ChannelGroup(32, 32, 1)))
    for codec, word in (
        (VectorCodec(split, tables), "groups"),
        (VectorCodec(fmt, replace(tables, query_matrix=None)), "query matrix"),
    ):
        assert word in fast.supports(replace(view, keys=codec), query, AttendOptions(scaling=1.0), 90)


@pytest.mark.parametrize("num_blocks", [1, 31, 255, 1023, 4095])
@pytest.mark.parametrize(("others", "num_sms"), [(1, 132), (8, 132), (64, 132), (8, 20), (1000, 132)])
def test_plan_covers_every_block_once(num_blocks, others, num_sms):
    launch = plans.FastLaunch(1, num_warps=4, per_sm=3, ahead=False, max_registers=168)
    plan = plans.fast_plan(
        launch=launch, num_rows=4, others=others, num_blocks=num_blocks, num_sinks=4, tail_len=200, num_sms=num_sms,
        capability=90,
    )  # fmt: skip
    assert (plan.packed_splits - 1) * plan.blocks_per_split < num_blocks <= plan.packed_splits * plan.blocks_per_split
    assert (plan.exact_splits - 1) * plan.tiles_per_split < 8 <= plan.exact_splits * plan.tiles_per_split
    assert plan.num_splits <= plans.MAX_SPLITS


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_reference_on_gpu(case, group):
    if fast.device_limits(torch.device("cuda", 0))[0] < fast.MIN_CAPABILITY:
        pytest.skip("needs compute capability 8.0")
    assert run(make_view(**case, device=torch.device("cuda")), group) < ROUNDING[case.get("dtype", torch.float16)]
