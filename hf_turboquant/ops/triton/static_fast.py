"""Fast attend over a store of fixed size, the host side: three launches whose sizes never change."""

from __future__ import annotations

import torch

from hf_turboquant.ops.triton import fast_attend
from hf_turboquant.ops.triton.attend_launch import mask_arguments, matrices_or, rows_in_order
from hf_turboquant.ops.triton.fast_levels import LevelTable
from hf_turboquant.ops.triton.fast_plan import FastPlan, combine_launch
from hf_turboquant.ops.triton.launch import device_of
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
        options: Scaling, mask with a column for every token there is room for, softcap and sink logits.
        lengths: Counts, as ``ops.static_spec`` has them.
        plan: Sizes, if not those for the fullest store, which serve all.

    Returns:
        ``(batch, num_q_heads, 1, value head_dim)``, dtype of ``query``.
    """
    query = rows_in_order(query)
    plan = plan or fast_attend.plan_of(query, view)
    out, scratch = fast_attend.allocate(query, view, plan)
    partials, prepared = fast_attend.split_scratch(scratch, view, plan)
    with device_of(query):
        fast_attend.prepare_query(query, view, options, plan, _level_tables(view.keys), prepared)
        _launch(query, prepared, view, options, plan, partials, lengths)
        _combine(out, view, options, plan, partials, lengths)
    return out


def _level_tables(codec: VectorCodec) -> list[LevelTable]:
    """Return the byte tables of a codec. Its format decides them: the device is waited for once for each format."""
    if codec.format not in _LEVELS:
        _LEVELS[codec.format] = fast_attend.level_tables(codec)
    return _LEVELS[codec.format]


def _launch(
    query: torch.Tensor,
    prepared: fast_attend.Pieces,
    view: KVView,
    options: AttendOptions,
    plan: FastPlan,
    partials: fast_attend.Pieces,
    lengths: torch.Tensor,
) -> None:
    batch, num_q_heads, q_len, _ = query.shape
    heads, arena, launch = view.num_kv_heads, view.arenas[0], plan.launch
    key_levels = [*_level_tables(view.keys), _NO_TABLE]
    (value_levels,) = _level_tables(view.values)
    overlap = {"launch_pdl": True} if plan.overlap else {}
    _, mask, mask_strides = mask_arguments(options, query)
    tails = (view.tail_keys, view.tail_values)
    # without sinks there is no address of them
    sinks = (view.sink_keys, view.sink_values) if view.num_sinks else tails
    static_attend_kernel[(batch * heads, plan.num_splits, plan.row_tiles)](
        query, *prepared, arena, lengths, *sinks, *tails, *partials,
        *query.stride()[:3], *view.tail_keys.stride()[:3], *view.tail_values.stride()[:3],
        heads, num_q_heads // heads, q_len, plan.packed_splits, arena.stride(0),
        view.tail_keys.shape[2], options.scaling * _LOG2E,
        key_levels[0].low, key_levels[0].high, key_levels[1].low, key_levels[1].high,
        value_levels.low, value_levels.high, value_levels.unit,
        mask, *mask_strides, float(options.softcap or 1.0),
        K=traits_of(view.keys.format), V=traits_of(view.values.format),
        H=fast_attend.mask_traits(query, view, options, mask_strides),
        KEY_BYTES=view.record.value_offset, RECORD_BYTES=view.record.nbytes, TILES=launch.tiles,
        EXACT_TOKENS=launch.exact_tokens, AHEAD=launch.ahead, OVERLAP=plan.overlap, W=launch.num_warps,
        num_warps=launch.num_warps, maxnreg=launch.max_registers, **overlap,
    )  # fmt: skip


def _combine(
    out: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    plan: FastPlan,
    partials: fast_attend.Pieces,
    lengths: torch.Tensor,
) -> None:
    batch, num_q_heads, q_len, head_dim = out.shape
    heads, tables = view.num_kv_heads, view.values.tables
    launch = combine_launch(plan, batch * heads, head_dim)
    overlap = {"launch_pdl": True} if plan.overlap else {}
    static_combine_kernel[(head_dim // launch.columns, plan.num_rows, batch * heads)](
        *partials, *matrices_or(tables, out, "rotation", "channel_order"),
        out if options.sink_logits is None else options.sink_logits.contiguous(), out, lengths,
        heads, num_q_heads // heads, q_len, plan.packed_splits, plan.num_splits,
        HEAD_DIM=head_dim, SPLITS=launch.splits, EXACT=next_power_of_2(plan.exact_splits),
        COLUMNS=launch.columns, STEP=32, HAS_ORDER=tables.channel_order is not None,
        SINK_LOGITS=options.sink_logits is not None, OVERLAP=plan.overlap, HIDES=options.mask is not None,
        EXACT_TOKENS=plan.launch.exact_tokens, W=plan.launch.num_warps,
        num_warps=launch.num_warps, **overlap,
    )  # fmt: skip
