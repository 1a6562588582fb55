"""Attend, the host side: three launches (rotate the query, read the store in parallel runs, merge the runs)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.triton.append_kernel import append
from hf_turboquant.ops.triton.attend_kernel import attend_kernel
from hf_turboquant.ops.triton.block_table import BlockTable, block_table_of
from hf_turboquant.ops.triton.combine_kernel import combine_kernel, rotate_query_kernel
from hf_turboquant.ops.triton.launch import (
    attend_launch,
    can_permute,
    choose_parts,
    choose_splits,
    combine_launch,
    device_limits,
    device_of,
    packed_step,
    product_dtypes,
    rotate_launch,
    share_splits,
)
from hf_turboquant.ops.triton.portable_plan import Pieces, PortablePlan, allocate, split_scratch
from hf_turboquant.ops.triton.replay import Launcher, Recorder, as_is
from hf_turboquant.ops.triton.steps import STEP_NUMBERS, Numbers, Step, fresh_tensors, mask_strides, step_numbers
from hf_turboquant.ops.triton.traits import coded_tables, traits_of
from hf_turboquant.ops.view import AttendOptions, KVView, VectorTables

_LOG2E = 1.4426950408889634


class AttendResult(NamedTuple):
    """Attention over part of a sequence.

    Attributes:
        out: ``(batch, num_q_heads, q_len, value head_dim)``.
        lse: ``(batch, num_q_heads, q_len)`` float32, natural logarithm of the sum of the exponentials; -inf where a
            row may attend to nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor


def merge_results(first: AttendResult, second: AttendResult) -> AttendResult:
    """Join attention over two disjoint sets of tokens of the same sequence.

    ``sink_logits`` belong to one of the two only.
    """
    peak = torch.maximum(first.lse, second.lse)
    base = torch.where(peak == -torch.inf, 0.0, peak)
    weights = [torch.exp(part.lse - base)[..., None] for part in (first, second)]
    total = weights[0] + weights[1]
    out = first.out.float() * weights[0] + second.out.float() * weights[1]
    out = out / torch.where(total == 0, 1.0, total)
    return AttendResult(out.to(first.out.dtype), base + torch.log(total.squeeze(-1)))


def attend_portable(
    query: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    *,
    block_table: BlockTable | None = None,
    lse: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over the stored tokens of one layer with the kernel that runs everywhere and serves every option.

    Args:
        query: ``(batch, num_q_heads, q_len, head_dim)``, any strides; the query heads of a KV head are adjacent.
        view: Stored tokens.
        options: Scaling, mask and their kin.
        block_table: Table of the view's blocks if the caller keeps one; built here where it is needed and not given.
        lse: ``(batch, num_q_heads, q_len)`` float32, filled with the logarithm of the sum of the exponentials.
        lengths: Counts on the device that stand for those of the view, which are then the largest they can be.

    Returns:
        ``(batch, num_q_heads, q_len, value head_dim)``, dtype of ``query``. Rows that may attend to nothing are zero.
    """
    write_newest(view)
    shape = (*query.shape[:3], view.values.format.head_dim)
    if 0 in shape:
        return query.new_empty(shape)
    query = rows_in_order(query)
    plan = _plan(query, view, options)
    out, scratch = allocate(query, view, plan)
    _attend(query, view, options, block_table, lse, lengths, plan, out, scratch, as_is)
    return out


def write_newest(view: KVView, launcher: Launcher = as_is) -> None:
    """Write the newest token to its slot if it waits for that."""
    newest = view.waiting
    if newest is not None and newest.states is not None:
        append(*newest.states, view.tail_keys, view.tail_values, newest.slot, launcher=launcher)
        newest.written()


def attend_portable_and_prepare(
    query: torch.Tensor, view: KVView, options: AttendOptions, *, block_table: BlockTable | None = None
) -> tuple[torch.Tensor, Step | None]:
    """Attend as :func:`attend_portable` does, and return what serves later calls of this form; None where nothing can.

    Args:
        query: ``(batch, num_q_heads, q_len, head_dim)``.
        view: Stored tokens.
        options: Scaling, mask and their kin.
        block_table: As for :func:`attend_portable`.
    """
    if not query.numel() or not _can_prepare(query, view, options):
        return attend_portable(query, view, options, block_table=block_table), None
    plan = _plan(query, view, options)
    out, scratch = allocate(query, view, plan)
    fresh = fresh_tensors(query, out, scratch, options, view.waiting)
    recorder = Recorder(fresh, (*STEP_NUMBERS, *_BLOCK_NUMBERS))
    write_newest(view, recorder)
    _attend(query, view, options, block_table, None, None, plan, out, scratch, recorder)
    replay = recorder.replay()
    return out, None if replay is None else Step(replay, out.shape, scratch.numel(), _numbers_of(query, view, plan))


def _can_prepare(query: torch.Tensor, view: KVView, options: AttendOptions) -> bool:
    """Whether the tensors that kernels read are those of the call and of its view."""
    stored = (view.sink_keys, view.sink_values, view.tail_keys, view.tail_values)
    logits, storage = options.sink_logits, query.untyped_storage().data_ptr()
    if logits is not None and not logits.is_contiguous():
        return False
    # no copies, which are made anew for every call; and no keys beside the query, which would be taken for part of it
    in_order = all(rows_in_order(tensor) is tensor for tensor in (query, *stored))
    return in_order and all(tensor.untyped_storage().data_ptr() != storage for tensor in stored)


_BLOCK_NUMBERS = ("first_block", "parts_per_split")


def _numbers_of(query: torch.Tensor, view: KVView, plan: PortablePlan) -> Numbers:
    """Return what finds the numbers of later calls."""
    hidden_blocks = _hides_blocks(query, view)

    def numbers(query: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[int, ...] | None:
        found = step_numbers(view, options)
        # another binary
        if found is None or (options.is_causal and _hides_blocks(query, view) != hidden_blocks):
            return None
        return *found, *_block_numbers(query, view, options, plan)

    return numbers


def _hides_blocks(query: torch.Tensor, view: KVView) -> bool:
    """Whether packed tokens may lie behind a query."""
    return view.tail_len < query.shape[2] - 1


def _plan(query: torch.Tensor, view: KVView, options: AttendOptions) -> PortablePlan:
    """Return the sizes of a call, which stay the same until the next block is packed."""
    batch, num_q_heads, q_len, _ = query.shape
    keys, values = traits_of(view.keys.format), traits_of(view.values.format)
    num_rows = num_q_heads // view.num_kv_heads * q_len
    capability, num_sms = device_limits(query.device)
    dtypes = product_dtypes(view, query)
    launch = attend_launch(keys, values, num_rows, dtypes, capability)
    others = batch * view.num_kv_heads * -(-num_rows // launch.rows)
    blocks = view.num_blocks
    window = _window_of_blocks(view, options)
    if window is not None:
        # it starts in one block and ends in another
        blocks = min(blocks, (window + q_len) // BLOCK_TOKENS + 2)
    # room instead of use
    room = view.tail_keys.shape[-2]
    tiles = -(-view.num_sinks // launch.exact_tokens) + -(-room // launch.exact_tokens)
    packed_wanted, exact_wanted = share_splits(blocks, tiles, others, launch, num_sms)
    parts = choose_parts(blocks, packed_wanted, values, launch)
    packed_splits = choose_splits(blocks * parts, packed_wanted)
    exact_splits = choose_splits(tiles, exact_wanted)
    tiles_per_split = -(-tiles // exact_splits) if exact_splits else 0
    return PortablePlan(keys, values, dtypes, launch, num_rows, parts, packed_splits, tiles_per_split, exact_splits)


def _window_of_blocks(view: KVView, options: AttendOptions) -> int | None:
    """Return the window if blocks it has left are not read; None if all blocks are."""
    return options.sliding_window if options.mask is None and view.block_tokens is None else None


def _block_numbers(query: torch.Tensor, view: KVView, options: AttendOptions, plan: PortablePlan) -> tuple[int, int]:
    """Return the first block to read, and how many parts of blocks each split reads."""
    first_block = first_block_of(view, query.shape[2], options)
    return first_block, -(-(view.num_blocks - first_block) * plan.block_parts // max(plan.packed_splits, 1))


def first_block_of(view: KVView, q_len: int, options: AttendOptions) -> int:
    """Return how many of the oldest blocks are wholly before the window of every query."""
    window = _window_of_blocks(view, options)
    if window is None:
        return 0
    first_seen = view.seq_len - q_len - window + 1
    return min(max(0, (first_seen - view.num_sinks) // BLOCK_TOKENS), view.num_blocks)


def rows_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


def _score_scaling(options: AttendOptions) -> float:
    """Return the factor of query-key products: scores are kept in the domain of exp2 except before a softcap."""
    return options.scaling if options.softcap is not None else options.scaling * _LOG2E


def _attend(
    query: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    block_table: BlockTable | None,
    lse: torch.Tensor | None,
    lengths: torch.Tensor | None,
    plan: PortablePlan,
    out: torch.Tensor,
    scratch: torch.Tensor,
    launcher: Launcher,
) -> None:
    partials, rotated = split_scratch(scratch, view, plan)
    with device_of(query):
        if plan.packed_splits:
            _rotate_query(query, rotated, view, options, plan, launcher)
        else:
            # nothing is read; the query stands for what is not there
            rotated = (query, query, query)
        _launch_attend(query, rotated, view, options, block_table, plan, partials, lengths, launcher)
        _launch_combine(out, lse, view, options, plan, partials, launcher)


def _rotate_query(
    query: torch.Tensor, rotated: Pieces, view: KVView, options: AttendOptions, plan: PortablePlan, launcher: Launcher
) -> None:
    """Rotate the query, project it, and take its exact channels, as the keys need it."""
    batch, num_q_heads, q_len, head_dim = query.shape
    tables = view.keys.tables
    tile_rows, columns, block_k, num_warps = rotate_launch(plan.keys, plan.num_rows)
    scaling = _score_scaling(options)
    grid = (-(-plan.num_rows // tile_rows), batch * view.num_kv_heads, -(-head_dim // columns))
    launcher(rotate_query_kernel)[grid](
        query, *matrices_or(tables, query, "channel_order", "rotation", "projection"), *rotated,
        *query.stride()[:3], view.num_kv_heads, num_q_heads // view.num_kv_heads, q_len,
        scaling, scaling * tables.projection_scale,
        K=plan.keys, ROWS=tile_rows, COLUMNS=columns, BLOCK_K=block_k, ROTATED=tables.rotation is not None,
        HAS_ORDER=tables.channel_order is not None, PRECISION="ieee", num_warps=num_warps,
    )  # fmt: skip


def matrices_or(tables: VectorTables, absent: torch.Tensor, *names: str) -> list[torch.Tensor]:
    """Return the named tables, and ``absent`` where there is none: a kernel wants a pointer it then does not read."""
    found = [getattr(tables, name) for name in names]
    return [absent if matrix is None else matrix for matrix in found]


def _launch_attend(
    query: torch.Tensor,
    rotated: Pieces,
    view: KVView,
    options: AttendOptions,
    block_table: BlockTable | None,
    plan: PortablePlan,
    partials: Pieces,
    lengths: torch.Tensor | None,
    launcher: Launcher,
) -> None:
    batch, num_q_heads, q_len, _ = query.shape
    heads, launch = view.num_kv_heads, plan.launch
    block_table = block_table_of(view, block_table)
    # without blocks nothing is read, but what would read is compiled for bytes all the same
    arena = view.arenas[0] if view.arenas else query.view(torch.uint8)
    table = (arena, arena, arena) if block_table is None else _table_tensors(block_table)
    sinks = [rows_in_order(tensor) for tensor in (view.sink_keys, view.sink_values)]
    tails = [rows_in_order(tensor) for tensor in (view.tail_keys, view.tail_values)]
    causal = options.mask is None and options.is_causal and q_len > 1
    windowed = options.mask is None and options.sliding_window is not None
    mask_kind, mask, strides = mask_arguments(options, query)
    if not plan.num_splits:
        return
    first_block, parts_per_split = _block_numbers(query, view, options, plan)
    grid = (plan.num_splits, batch * heads, -(-plan.num_rows // launch.rows))
    launcher(attend_kernel)[grid](
        query, *rotated, arena, *table,
        *_centroids(view.keys.tables, query), *_centroids(view.values.tables, query),
        *sinks, *tails, mask, arena if lengths is None else lengths, *partials, *query.stride()[:3],
        *(stride for tensor in (*sinks, *tails) for stride in tensor.stride()[:3]), *strides,
        heads, num_q_heads // heads, q_len, view.seq_len,
        first_block, view.num_blocks, plan.block_parts, parts_per_split, plan.packed_splits,
        arena.stride(0), view.num_sinks, view.packed_tokens, view.tail_start, view.tail_len,
        max(view.tail_keys.shape[-2], 1), plan.tiles_per_split,
        _score_scaling(options), options.sliding_window or 0, options.softcap or 1.0,
        K=plan.keys, V=plan.values, KEY_BYTES=view.record.value_offset, RECORD_BYTES=view.record.nbytes,
        ROWS=launch.rows, TOKENS=packed_step(plan.values, launch), EXACT_TOKENS=launch.exact_tokens,
        NUM_STAGES=launch.num_stages,
        KEY_DTYPE=plan.dtypes.keys, VALUE_DTYPE=plan.dtypes.values, EXACT_DTYPE=plan.dtypes.exact,
        EXACT_GROUP_DTYPE=plan.dtypes.exact_group, PRECISION="ieee", PERMUTE=can_permute(plan.dtypes.codes),
        MASK=mask_kind, CAUSAL_BLOCKS=causal and _hides_blocks(query, view), CAUSAL_EXACT=causal,
        WINDOW=windowed, SOFTCAP=options.softcap is not None, TABLE=block_table is not None, STATIC=lengths is not None,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip


def _table_tensors(table: BlockTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return table.addresses, table.starts, table.counts


def mask_arguments(options: AttendOptions, absent: torch.Tensor) -> tuple[str, torch.Tensor, tuple[int, ...]]:
    """Return the kind of the mask, the mask, and its strides with 0 where it broadcasts."""
    mask = options.mask
    if mask is None:
        return "none", absent, (0, 0, 0, 0)
    kind = "bool" if mask.dtype == torch.bool else "float"
    return kind, mask.view(torch.uint8) if kind == "bool" else mask, mask_strides(mask)


def _centroids(tables: VectorTables, absent: torch.Tensor) -> list[torch.Tensor]:
    return [*coded_tables(tables.centroids), absent, absent][:2]


def _launch_combine(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    view: KVView,
    options: AttendOptions,
    plan: PortablePlan,
    partials: Pieces,
    launcher: Launcher,
) -> None:
    batch, num_q_heads, q_len, head_dim = out.shape
    heads, tables = view.num_kv_heads, view.values.tables
    rotated = tables.rotation is not None
    tile, columns, num_warps = combine_launch(plan.packed_splits, plan.num_splits, plan.values.head_dim_pad)
    launcher(combine_kernel)[(plan.num_rows, batch * heads, -(-head_dim // columns))](
        *partials, *matrices_or(tables, out, "rotation", "channel_order"),
        out if options.sink_logits is None else options.sink_logits.contiguous(), out, out if lse is None else lse,
        heads, num_q_heads // heads, q_len, plan.packed_splits if rotated else 0, plan.num_splits,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=plan.values.head_dim_pad,
        TILE=tile, COLUMNS=columns, HAS_ORDER=tables.channel_order is not None,
        SINK_LOGITS=options.sink_logits is not None, LSE=lse is not None, num_warps=num_warps,
    )  # fmt: skip
