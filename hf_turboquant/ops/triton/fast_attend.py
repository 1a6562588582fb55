"""Fast attend, the host side: three launches (quantize the query, read the store in parallel runs, merge the runs).

The same operation on the same store as ``attend_launch.attend``, for the common cases on NVIDIA GPUs; ``supports`` says
which those are.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_turboquant.layout import VectorFormat
from hf_turboquant.ops.triton.attend_launch import BlockTable, matrices_or
from hf_turboquant.ops.triton.fast_combine import fast_combine_kernel
from hf_turboquant.ops.triton.fast_kernel import fast_attend_kernel
from hf_turboquant.ops.triton.fast_levels import LevelTable, level_table
from hf_turboquant.ops.triton.fast_plan import MAX_SPLITS, FastPlan, fast_launch, fast_plan
from hf_turboquant.ops.triton.fast_query import quantize_query_kernel
from hf_turboquant.ops.triton.launch import device_limits, device_of
from hf_turboquant.ops.triton.traits import VectorTraits, next_power_of_2, traits_of
from hf_turboquant.ops.view import AttendOptions, KVView, VectorCodec

MAX_ROWS = 64
"""Most query rows of a KV head (``group_size * q_len``); every eight of them read the codes again."""

MIN_CAPABILITY = 80
"""First compute capability whose 8-bit matrix product has 16 x 8 x 32 tiles."""

_HEAD_DIMS = (64, 128, 256)
_NO_TABLE = LevelTable(0, 0, 1.0, 0.0)
_LOG2E = 1.4426950408889634


def supports(view: KVView, query: torch.Tensor, options: AttendOptions, capability: int) -> str:
    """Say what keeps the fast kernel from a call; empty when nothing does.

    Args:
        view: Stored tokens.
        query: ``(batch, num_q_heads, q_len, head_dim)``.
        options: Scaling, mask and their kin.
        capability: Compute capability of the device, ``10 * major + minor``.
    """
    batch, num_q_heads, q_len, _ = query.shape
    num_rows = num_q_heads // max(view.num_kv_heads, 1) * q_len
    if torch.version.hip is not None or capability < MIN_CAPABILITY:
        return f"the fast kernel needs an NVIDIA GPU of compute capability 8.0 or later, got {capability / 10}"
    if options.mask is not None or options.softcap is not None or options.sliding_window is not None:
        return "the fast kernel has no mask, softcap or sliding window"
    if not view.num_blocks:
        return "the fast kernel is for packed blocks and there is none"
    if view.keys.tables.rotation is None or view.values.tables.rotation is None:
        return "the fast kernel is for rotated keys and values"
    if num_rows > MAX_ROWS or not num_rows or not batch:
        return f"the fast kernel takes 1 to {MAX_ROWS} query rows for each KV head, got {num_rows}"
    if query.dtype not in (torch.float16, torch.bfloat16) or query.dtype != view.tail_keys.dtype:
        return f"the fast kernel needs float16 or bfloat16 throughout, got {query.dtype} and {view.tail_keys.dtype}"
    if options.is_causal and q_len > view.tail_len:
        return "the fast kernel hides exact tokens only: queries that are not all in the tail need the portable one"
    if -(-view.num_sinks // 32) + -(-view.tail_len // 32) > MAX_SPLITS // 4:
        return f"the fast kernel takes {8 * MAX_SPLITS} exact tokens at most, got {view.num_sinks + view.tail_len}"
    return _format_obstacle(view.keys.format, view.values.format)


@lru_cache(maxsize=64)
def _format_obstacle(keys: VectorFormat, values: VectorFormat) -> str:
    """Say what the kernel cannot read in a pair of formats; empty when it can read them."""
    for name, fmt, widths in (("keys", keys, (1, 2, 3, 4)), ("values", values, (2, 3, 4))):
        if fmt.kind != "mse" or any(group.bits not in widths for group in fmt.groups):
            return f"the fast kernel reads mse codes of {widths} bits as {name}, got others"
        if fmt.head_dim not in _HEAD_DIMS or any(group.size % 64 for group in fmt.groups):
            return f"the fast kernel needs {name} of {_HEAD_DIMS} channels in groups of whole 64s, got {fmt.head_dim}"
        if fmt.norm_dtype != torch.float16:
            return f"the fast kernel needs float16 norms of {name}, got {fmt.norm_dtype}"
    if len(keys.groups) > 2 or len(values.groups) != 1 or values.centered:
        return "the fast kernel needs keys in one or two channel groups, and values in one and without block means"
    return ""


def fast_attend(
    query: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    *,
    block_table: BlockTable | None = None,
    lse: torch.Tensor | None = None,
    plan: FastPlan | None = None,
) -> torch.Tensor:
    """Attend over the stored tokens of one layer. :func:`supports` must have said nothing against it.

    Args:
        query: ``(batch, num_q_heads, q_len, head_dim)``, last dimension contiguous.
        view: Stored tokens.
        options: Scaling and its kin.
        block_table: Where the blocks are; needed if they are not one run of full blocks in the first arena.
        lse: ``(batch, num_q_heads, q_len)`` float32, filled with the logarithm of the sum of the exponentials.
        plan: Sizes, if not those of :func:`fast_plan`.

    Returns:
        ``(batch, num_q_heads, q_len, value head_dim)``, dtype of ``query``.
    """
    batch, num_q_heads, q_len, _ = query.shape
    keys, values = traits_of(view.keys.format), traits_of(view.values.format)
    heads = view.num_kv_heads
    if plan is None:
        plan = _plan_of(query, view)
    out = query.new_empty(batch, num_q_heads, q_len, values.head_dim)
    rows = batch * heads * plan.num_splits * plan.num_rows
    query_rows = batch * heads * plan.row_tiles * plan.launch.tiles * 4
    # one allocation each: partial results, peaks and totals; query as integers, as floats, and scales
    scratch = torch.empty(rows * (values.head_dim + 2), dtype=torch.float32, device=query.device)
    partials = (scratch[: rows * values.head_dim], scratch[rows * values.head_dim : -rows], scratch[-rows:])
    row_bytes = keys.head_dim * 6 + 4
    prepared = torch.empty(query_rows * row_bytes, dtype=torch.uint8, device=query.device)
    with device_of(query):
        prepared_parts = _prepare_query(query, view, options, plan, keys, prepared, query_rows)
        _launch(query, prepared_parts, view, options, block_table, plan, keys, values, partials)
        _combine(out, lse, view, options, plan, partials)
    return out


def _plan_of(query: torch.Tensor, view: KVView) -> FastPlan:
    num_rows = query.shape[1] // view.num_kv_heads * query.shape[2]
    capability, num_sms = device_limits(query.device)
    return fast_plan(
        launch=fast_launch(traits_of(view.keys.format), traits_of(view.values.format), num_rows),
        num_rows=num_rows,
        others=query.shape[0] * view.num_kv_heads,
        num_blocks=view.num_blocks,
        num_sinks=view.num_sinks,
        tail_len=view.tail_len,
        num_sms=num_sms,
        capability=capability,
    )


def _level_tables(codec: VectorCodec) -> list[LevelTable]:
    groups = codec.format.groups
    return [level_table(codec.tables.centroids[index], group.size) for index, group in enumerate(groups)]


def _prepare_query(
    query: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    plan: FastPlan,
    keys: VectorTraits,
    prepared: torch.Tensor,
    query_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate and quantize the query; return its integers, its floats, and its scales."""
    batch, num_q_heads, q_len, head_dim = query.shape
    heads, tables = view.num_kv_heads, view.keys.tables
    levels = [*_level_tables(view.keys), _NO_TABLE]
    split = query_rows * 2 * head_dim
    query8 = prepared[:split].view(torch.int8)
    query16 = prepared[split : 3 * split].view(torch.bfloat16)
    scales = prepared[3 * split :].view(torch.float32)
    rotation, order = matrices_or(tables, query, "rotation", "channel_order")
    quantize_query_kernel[(plan.row_tiles * plan.launch.tiles * 4, batch * heads, head_dim // 32)](
        query, order, rotation, query8, query16, scales, *query.stride()[:3],
        heads, num_q_heads // heads, q_len, options.scaling * _LOG2E, levels[0].unit,
        levels[1].unit if keys.num_groups == 2 else 0.0,
        K=keys, COLUMNS=32, HAS_ORDER=tables.channel_order is not None, OVERLAP=plan.overlap, num_warps=4,
    )  # fmt: skip
    return query8, query16, scales


def _launch(
    query: torch.Tensor,
    prepared: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    view: KVView,
    options: AttendOptions,
    block_table: BlockTable | None,
    plan: FastPlan,
    keys: VectorTraits,
    values: VectorTraits,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    batch, num_q_heads, q_len, _ = query.shape
    heads = view.num_kv_heads
    arena = view.arenas[0]
    table = (arena, arena) if block_table is None else (block_table.addresses, block_table.counts)
    exact = (view.sink_keys, view.sink_values, view.tail_keys, view.tail_values)
    key_levels = [*_level_tables(view.keys), _NO_TABLE]
    (value_levels,) = _level_tables(view.values)
    overlap = {"launch_pdl": True} if plan.overlap else {}
    fast_attend_kernel[(batch * heads, plan.num_splits, plan.row_tiles)](
        query, *prepared, arena, *table, *exact, *partials, *query.stride()[:3],
        *(stride for tensor in exact for stride in tensor.stride()[:3]),
        heads, num_q_heads // heads, q_len, view.num_blocks, plan.blocks_per_split, plan.packed_splits, arena.stride(0),
        view.num_sinks, view.tail_start, view.tail_len, max(view.tail_keys.shape[-2], 1), plan.tiles_per_split,
        options.scaling * _LOG2E,
        key_levels[0].low, key_levels[0].high, key_levels[1].low, key_levels[1].high,
        value_levels.low, value_levels.high, value_levels.unit,
        K=keys, V=values, KEY_BYTES=view.record.value_offset, RECORD_BYTES=view.record.nbytes, TILES=plan.launch.tiles,
        EXACT_TOKENS=plan.launch.exact_tokens, CAUSAL=options.is_causal and q_len > 1, TABLE=block_table is not None,
        AHEAD=plan.launch.ahead, OVERLAP=plan.overlap, W=plan.launch.num_warps, num_warps=plan.launch.num_warps,
        maxnreg=plan.launch.max_registers, **overlap,
    )  # fmt: skip


def _combine(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    view: KVView,
    options: AttendOptions,
    plan: FastPlan,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    batch, num_q_heads, q_len, head_dim = out.shape
    heads, tables = view.num_kv_heads, view.values.tables
    splits = next_power_of_2(plan.num_splits)
    # a program for every 32 channels while there are few rows: latency counts then, not work
    columns = 32 if plan.num_rows * batch * heads <= 64 else head_dim
    overlap = {"launch_pdl": True} if plan.overlap else {}
    fast_combine_kernel[(head_dim // columns, plan.num_rows, batch * heads)](
        *partials, *matrices_or(tables, out, "rotation", "channel_order"),
        out if options.sink_logits is None else options.sink_logits.contiguous(), out, out if lse is None else lse,
        heads, num_q_heads // heads, q_len, plan.packed_splits, plan.num_splits,
        HEAD_DIM=head_dim, SPLITS=splits, EXACT=next_power_of_2(max(plan.exact_splits, 1)),
        COLUMNS=columns, STEP=32, HAS_ORDER=tables.channel_order is not None,
        SINK_LOGITS=options.sink_logits is not None, LSE=lse is not None, OVERLAP=plan.overlap,
        num_warps=8 if splits * head_dim <= 16384 else 16, **overlap,
    )  # fmt: skip
