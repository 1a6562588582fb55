"""Fast attend over a store of fixed size, the host side: three launches whose sizes never change."""

from __future__ import annotations

import itertools

import torch

from hf_turboquant.ops.triton.attend_launch import matrices_or, rows_in_order
from hf_turboquant.ops.triton.fast_levels import LevelTable, level_table
from hf_turboquant.ops.triton.fast_plan import FastPlan, fast_launch, fast_plan
from hf_turboquant.ops.triton.fast_query import quantize_query_kernel
from hf_turboquant.ops.triton.launch import device_limits, device_of
from hf_turboquant.ops.triton.static_combine import static_combine_kernel
from hf_turboquant.ops.triton.static_kernel import static_attend_kernel
from hf_turboquant.ops.triton.traits import next_power_of_2, traits_of
from hf_turboquant.ops.view import AttendOptions, KVView, VectorCodec

_LOG2E = 1.4426950408889634
_NO_TABLE = LevelTable(0, 0, 1.0, 0.0)
_LEVELS: dict[object, list[LevelTable]] = {}


def static_fast_attend(
    query: torch.Tensor, view: KVView, options: AttendOptions, lengths: torch.Tensor, *, plan: FastPlan | None = None
) -> torch.Tensor:
    """Attend over all stored tokens. ``fast_attend.supports`` must have said nothing against it.

    Args:
        query: ``(batch, num_q_heads, 1, head_dim)``.
        view: The store with the largest counts there can be, its tail behind its sinks.
        options: Scaling and sink logits.
        lengths: Counts, as ``ops.static_spec`` has them.
        plan: Sizes, if not those of :func:`static_plan`.

    Returns:
        ``(batch, num_q_heads, 1, value head_dim)``, dtype of ``query``.
    """
    query = rows_in_order(query)
    plan = plan or static_plan(query, view)
    out = query.new_empty(*query.shape[:3], view.values.format.head_dim)
    others = view.batch * view.num_kv_heads
    rows = others * plan.num_splits * plan.num_rows
    query_rows = others * plan.row_tiles * plan.launch.tiles * 4
    key_dim = query.shape[3]
    # partial results, peaks and totals; the query as integers, as floats, and its scales
    sizes = (rows * out.shape[3] * 4, rows * 4, rows * 4, query_rows * key_dim * 2, query_rows * key_dim * 4)
    starts = list(itertools.accumulate((-(-size // 16) * 16 for size in (*sizes, query_rows * 4)), initial=0))
    scratch = torch.empty(starts[-1], dtype=torch.uint8, device=query.device)
    kinds = (torch.float32, torch.float32, torch.float32, torch.int8, torch.bfloat16, torch.float32)
    pieces = [scratch[low:high].view(kind) for (low, high), kind in zip(itertools.pairwise(starts), kinds, strict=True)]
    with device_of(query):
        _prepare_query(query, view, options, plan, pieces[3:])
        _launch(query, view, options, plan, pieces, lengths)
        _combine(out, view, options, plan, pieces[:3], lengths)
    return out


def static_plan(query: torch.Tensor, view: KVView) -> FastPlan:
    """Return the sizes for the fullest store, which serve all."""
    num_rows = query.shape[1] // view.num_kv_heads * query.shape[2]
    capability, num_sms = device_limits(query.device)
    return fast_plan(
        launch=fast_launch(traits_of(view.keys.format), traits_of(view.values.format), num_rows),
        num_rows=num_rows,
        others=view.batch * view.num_kv_heads,
        num_blocks=view.num_blocks,
        num_sinks=view.num_sinks,
        tail_len=view.tail_len,
        num_sms=num_sms,
        capability=capability,
    )


def _level_tables(codec: VectorCodec) -> list[LevelTable]:
    """Return the byte tables of a codec. Its format decides them: the device is waited for once for each format."""
    if codec.format not in _LEVELS:
        groups = codec.format.groups
        _LEVELS[codec.format] = [
            level_table(codec.tables.centroids[index], group.size) for index, group in enumerate(groups)
        ]
    return _LEVELS[codec.format]


def _prepare_query(
    query: torch.Tensor, view: KVView, options: AttendOptions, plan: FastPlan, prepared: list[torch.Tensor]
) -> None:
    batch, num_q_heads, q_len, head_dim = query.shape
    heads, tables, keys = view.num_kv_heads, view.keys.tables, traits_of(view.keys.format)
    levels = [*_level_tables(view.keys), _NO_TABLE]
    rotation, order = matrices_or(tables, query, "rotation", "channel_order")
    quantize_query_kernel[(plan.row_tiles * plan.launch.tiles * 4, batch * heads, head_dim // 32)](
        query, order, rotation, *prepared, *query.stride()[:3],
        heads, num_q_heads // heads, q_len, options.scaling * _LOG2E, levels[0].unit,
        levels[1].unit if keys.num_groups == 2 else 0.0,
        K=keys, COLUMNS=32, HAS_ORDER=tables.channel_order is not None, OVERLAP=plan.overlap, num_warps=4,
    )  # fmt: skip


def _launch(
    query: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    plan: FastPlan,
    pieces: list[torch.Tensor],
    lengths: torch.Tensor,
) -> None:
    batch, num_q_heads, q_len, _ = query.shape
    heads, arena, launch = view.num_kv_heads, view.arenas[0], plan.launch
    key_levels = [*_level_tables(view.keys), _NO_TABLE]
    (value_levels,) = _level_tables(view.values)
    overlap = {"launch_pdl": True} if plan.overlap else {}
    tails = (view.tail_keys, view.tail_values)
    # without sinks there is no address of them
    sinks = (view.sink_keys, view.sink_values) if view.num_sinks else tails
    static_attend_kernel[(batch * heads, plan.num_splits, plan.row_tiles)](
        query, *pieces[3:], arena, lengths, *sinks, *tails, *pieces[:3],
        *query.stride()[:3], *view.tail_keys.stride()[:3], *view.tail_values.stride()[:3],
        heads, num_q_heads // heads, q_len, plan.packed_splits, arena.stride(0),
        view.tail_keys.shape[2], options.scaling * _LOG2E,
        key_levels[0].low, key_levels[0].high, key_levels[1].low, key_levels[1].high,
        value_levels.low, value_levels.high, value_levels.unit,
        K=traits_of(view.keys.format), V=traits_of(view.values.format),
        KEY_BYTES=view.record.value_offset, RECORD_BYTES=view.record.nbytes, TILES=launch.tiles,
        EXACT_TOKENS=launch.exact_tokens, AHEAD=launch.ahead, OVERLAP=plan.overlap, W=launch.num_warps,
        num_warps=launch.num_warps, maxnreg=launch.max_registers, **overlap,
    )  # fmt: skip


def _combine(
    out: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    plan: FastPlan,
    partials: list[torch.Tensor],
    lengths: torch.Tensor,
) -> None:
    batch, num_q_heads, q_len, head_dim = out.shape
    heads, tables = view.num_kv_heads, view.values.tables
    splits = next_power_of_2(plan.num_splits)
    # a program for every 32 channels while there are few rows: latency counts then, not work
    columns = 32 if plan.num_rows * batch * heads <= 64 else head_dim
    overlap = {"launch_pdl": True} if plan.overlap else {}
    static_combine_kernel[(head_dim // columns, plan.num_rows, batch * heads)](
        *partials, *matrices_or(tables, out, "rotation", "channel_order"),
        out if options.sink_logits is None else options.sink_logits.contiguous(), out, lengths,
        heads, num_q_heads // heads, q_len, plan.packed_splits, plan.num_splits,
        HEAD_DIM=head_dim, SPLITS=splits, EXACT=next_power_of_2(plan.exact_splits), COLUMNS=columns, STEP=32,
        HAS_ORDER=tables.channel_order is not None, SINK_LOGITS=options.sink_logits is not None, OVERLAP=plan.overlap,
        EXACT_TOKENS=plan.launch.exact_tokens, W=plan.launch.num_warps,
        num_warps=8 if splits * head_dim <= 16384 else 16, **overlap,
    )  # fmt: skip
