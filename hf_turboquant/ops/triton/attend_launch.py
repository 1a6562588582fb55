"""Attend, the host side: three launches (rotate the query, read the store in parallel runs, merge the runs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.triton.append_kernel import append
from hf_turboquant.ops.triton.attend_kernel import attend_kernel
from hf_turboquant.ops.triton.combine_kernel import combine_kernel, rotate_query_kernel
from hf_turboquant.ops.triton.launch import (
    AttendLaunch,
    ProductDtypes,
    attend_launch,
    can_permute,
    choose_splits,
    device_limits,
    device_of,
    product_dtypes,
)
from hf_turboquant.ops.triton.traits import VectorTraits, coded_tables, traits_of
from hf_turboquant.ops.view import AttendOptions, KVView, VectorTables

_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class BlockTable:
    """Where the blocks of a layer are, on the device, for stores of several arenas or with cropped blocks.

    Attributes:
        addresses: ``(num_blocks,)`` int64, address of the first record of each block.
        starts: ``(num_blocks,)`` int32, packed tokens before each block.
        counts: ``(num_blocks,)`` int32, valid tokens of each block.
    """

    addresses: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


class AttendResult(NamedTuple):
    """Attention over part of a sequence.

    Attributes:
        out: ``(batch, num_q_heads, q_len, value head_dim)``.
        lse: ``(batch, num_q_heads, q_len)`` float32, natural logarithm of the sum of the exponentials; -inf where a
            row may attend to nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor


def build_block_table(
    arenas: tuple[torch.Tensor, ...], num_blocks: int, block_tokens: tuple[int, ...] | None
) -> BlockTable:
    """Build the table of the blocks in use. It stays valid while arenas are only written to.

    Args:
        arenas: As in :class:`KVView`.
        num_blocks: Blocks in use.
        block_tokens: Valid tokens of each block, None when all hold 128.
    """
    addresses: list[int] = []
    for arena in arenas:
        used = min(num_blocks - len(addresses), arena.shape[0])
        addresses += [arena.data_ptr() + index * arena.stride(0) for index in range(used)]
    counts = list(block_tokens) if block_tokens is not None else [BLOCK_TOKENS] * num_blocks
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    device = arenas[0].device
    # both rows start on a multiple of 16 bytes, whatever the number of blocks: kernels are compiled for that
    padding = [0] * (-num_blocks % 4)
    small = torch.tensor([starts[:num_blocks] + padding, counts + padding], dtype=torch.int32).to(device)
    table = torch.tensor(addresses, dtype=torch.int64).to(device)
    return BlockTable(table, small[0, :num_blocks], small[1, :num_blocks])


def needs_block_table(view: KVView) -> bool:
    """Whether blocks of a view cannot be addressed as one run of full blocks."""
    return view.num_blocks > 0 and (view.block_tokens is not None or view.num_blocks > view.arenas[0].shape[0])


def block_table_of(view: KVView, given: BlockTable | None) -> BlockTable | None:
    """Return the table given, or one built where a view needs one; None where it does not."""
    if given is not None or not needs_block_table(view):
        return given
    return build_block_table(view.arenas, view.num_blocks, view.block_tokens)


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


@dataclass(frozen=True)
class _Plan:
    """Sizes of one call, so that the functions below agree on them."""

    keys: VectorTraits
    values: VectorTraits
    dtypes: ProductDtypes
    launch: AttendLaunch
    num_rows: int
    first_block: int
    blocks_per_split: int
    packed_splits: int
    tiles_per_split: int
    exact_splits: int

    @property
    def num_splits(self) -> int:
        return self.packed_splits + self.exact_splits


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
    batch, num_q_heads, q_len, _ = query.shape
    out = query.new_empty(batch, num_q_heads, q_len, view.values.format.head_dim)
    if not out.numel():
        return out
    query = rows_in_order(query)
    plan = _plan(query, view, options)
    # one allocation: partial results, then peaks and totals
    rows = batch * view.num_kv_heads * plan.num_splits * plan.num_rows
    head_dim = plan.values.head_dim
    scratch = torch.empty(rows * (head_dim + 2), dtype=torch.float32, device=query.device)
    partial, peak, total = scratch[: rows * head_dim], scratch[rows * head_dim : -rows], scratch[-rows:]
    with device_of(query):
        rotated = _rotate_query(query, view, options, plan)
        _launch_attend(query, rotated, view, options, block_table, plan, (partial, peak, total), lengths)
        _launch_combine(out, lse, view, options, plan, (partial, peak, total))
    return out


def write_newest(view: KVView) -> None:
    """Write the newest token to its slot if it waits for that."""
    newest = view.waiting
    if newest is not None and newest.states is not None:
        append(*newest.states, view.tail_keys, view.tail_values, newest.slot)
        newest.written()


def _plan(query: torch.Tensor, view: KVView, options: AttendOptions) -> _Plan:
    batch, num_q_heads, q_len, _ = query.shape
    keys, values = traits_of(view.keys.format), traits_of(view.values.format)
    num_rows = num_q_heads // view.num_kv_heads * q_len
    capability, num_sms = device_limits(query.device)
    dtypes = product_dtypes(view, query)
    launch = attend_launch(keys, values, num_rows, dtypes, capability)
    first_block = 0
    if options.sliding_window is not None and options.mask is None and view.block_tokens is None:
        first_seen = view.seq_len - q_len - options.sliding_window + 1
        first_block = min(max(0, (first_seen - view.num_sinks) // BLOCK_TOKENS), view.num_blocks)
    others = batch * view.num_kv_heads * -(-num_rows // launch.rows)
    blocks = view.num_blocks - first_block
    packed_splits = choose_splits(blocks, others, launch, num_sms)
    tiles = -(-view.num_sinks // launch.exact_tokens) + -(-view.tail_len // launch.exact_tokens)
    exact_splits = choose_splits(tiles, others, launch, num_sms)
    return _Plan(
        keys,
        values,
        dtypes,
        launch,
        num_rows,
        first_block,
        -(-blocks // packed_splits) if packed_splits else 0,
        packed_splits,
        -(-tiles // exact_splits) if exact_splits else 0,
        exact_splits,
    )


def rows_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


_TORCH_DTYPES = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}


def _score_scaling(options: AttendOptions) -> float:
    """Return the factor of query-key products: scores are kept in the domain of exp2 except before a softcap."""
    return options.scaling if options.softcap is not None else options.scaling * _LOG2E


def _rotate_query(
    query: torch.Tensor, view: KVView, options: AttendOptions, plan: _Plan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries rotated, projected, and over exact channels, ``(batch, heads, rows, channels)``.

    The query itself stands for what is unused.
    """
    if not plan.packed_splits:
        return query, query, query
    batch, num_q_heads, q_len, head_dim = query.shape
    tables = view.keys.tables
    rot_query = torch.empty(
        batch, num_q_heads, q_len, head_dim, dtype=_TORCH_DTYPES[plan.dtypes.keys], device=query.device
    )
    signs, kept = plan.keys.signs >= 0, plan.keys.exact_group.size
    sign_query = torch.empty_like(rot_query) if signs else rot_query
    exact_query = (
        torch.empty(batch, num_q_heads, q_len, kept, dtype=torch.float32, device=query.device) if kept else rot_query
    )
    columns = plan.keys.head_dim_pad if signs else min(32, plan.keys.head_dim_pad)
    scaling = _score_scaling(options)
    tile_rows = 16
    grid = (-(-plan.num_rows // tile_rows), batch * view.num_kv_heads, -(-head_dim // columns))
    rotate_query_kernel[grid](
        query, *matrices_or(tables, query, "channel_order", "rotation", "projection"),
        rot_query, sign_query, exact_query,
        *query.stride()[:3], view.num_kv_heads, num_q_heads // view.num_kv_heads, q_len,
        scaling, scaling * tables.projection_scale,
        K=plan.keys, ROWS=tile_rows, COLUMNS=columns, BLOCK_K=16, ROTATED=tables.rotation is not None,
        HAS_ORDER=tables.channel_order is not None, PRECISION="ieee", num_warps=4,
    )  # fmt: skip
    return rot_query, sign_query, exact_query


def matrices_or(tables: VectorTables, absent: torch.Tensor, *names: str) -> list[torch.Tensor]:
    """Return the named tables, and ``absent`` where there is none: a kernel wants a pointer it then does not read."""
    found = [getattr(tables, name) for name in names]
    return [absent if matrix is None else matrix for matrix in found]


def _launch_attend(
    query: torch.Tensor,
    rotated: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    view: KVView,
    options: AttendOptions,
    block_table: BlockTable | None,
    plan: _Plan,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: torch.Tensor | None,
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
    mask_kind, mask, mask_strides = _mask_arguments(options, query)
    packed_end = view.num_sinks + view.packed_tokens
    grid = (max(plan.num_splits, 1), batch * heads, -(-plan.num_rows // launch.rows))
    if not plan.num_splits:
        return
    attend_kernel[grid](
        query, *rotated, arena, *table,
        *_centroids(view.keys.tables, query), *_centroids(view.values.tables, query),
        *sinks, *tails, mask, arena if lengths is None else lengths, *partials, *query.stride()[:3],
        *(stride for tensor in (*sinks, *tails) for stride in tensor.stride()[:3]), *mask_strides,
        heads, num_q_heads // heads, q_len, view.seq_len,
        plan.first_block, view.num_blocks, plan.blocks_per_split, plan.packed_splits,
        arena.stride(0), view.num_sinks, view.packed_tokens, view.tail_start, view.tail_len,
        max(view.tail_keys.shape[-2], 1), plan.tiles_per_split,
        _score_scaling(options), options.sliding_window or 0, options.softcap or 1.0,
        K=plan.keys, V=plan.values, KEY_BYTES=view.record.value_offset, RECORD_BYTES=view.record.nbytes,
        ROWS=launch.rows, TOKENS=_packed_step(plan), EXACT_TOKENS=launch.exact_tokens, NUM_STAGES=launch.num_stages,
        KEY_DTYPE=plan.dtypes.keys, VALUE_DTYPE=plan.dtypes.values, EXACT_DTYPE=plan.dtypes.exact,
        EXACT_GROUP_DTYPE=plan.dtypes.exact_group, PRECISION="ieee", PERMUTE=can_permute(plan.dtypes.codes),
        MASK=mask_kind, CAUSAL_BLOCKS=causal and packed_end > view.seq_len - q_len + 1, CAUSAL_EXACT=causal,
        WINDOW=windowed, SOFTCAP=options.softcap is not None, TABLE=block_table is not None, STATIC=lengths is not None,
        num_warps=launch.num_warps,
    )  # fmt: skip


def _table_tensors(table: BlockTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return table.addresses, table.starts, table.counts


def _packed_step(plan: _Plan) -> int:
    """Return how many packed tokens are scored at a time: no more than a part of a byte row of the values holds."""
    return min([plan.launch.packed_tokens, *(group.row_bytes for group in plan.values.groups)])


def _mask_arguments(options: AttendOptions, absent: torch.Tensor) -> tuple[str, torch.Tensor, tuple[int, ...]]:
    """Return the kind of the mask, the mask, and its strides with 0 where it broadcasts."""
    mask = options.mask
    if mask is None:
        return "none", absent, (0, 0, 0, 0)
    kind = "bool" if mask.dtype == torch.bool else "float"
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return kind, mask.view(torch.uint8) if kind == "bool" else mask, strides


def _centroids(tables: VectorTables, absent: torch.Tensor) -> list[torch.Tensor]:
    return [*coded_tables(tables.centroids), absent, absent][:2]


def _launch_combine(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    view: KVView,
    options: AttendOptions,
    plan: _Plan,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    batch, num_q_heads, q_len, head_dim = out.shape
    heads, tables = view.num_kv_heads, view.values.tables
    rotated = tables.rotation is not None
    combine_kernel[(plan.num_rows, batch * heads)](
        *partials, *matrices_or(tables, out, "rotation", "channel_order"),
        out if options.sink_logits is None else options.sink_logits.contiguous(), out, out if lse is None else lse,
        heads, num_q_heads // heads, q_len, plan.packed_splits if rotated else 0, plan.num_splits,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=plan.values.head_dim_pad,
        TILE=16, COLUMNS=min(32, plan.values.head_dim_pad), HAS_ORDER=tables.channel_order is not None,
        SINK_LOGITS=options.sink_logits is not None, LSE=lse is not None, num_warps=4,
    )  # fmt: skip
