"""Fast attend, the host side: three launches (quantize the query, read the store in parallel runs, merge the runs).

The first of them also writes the newest token to its slot when it waits for that.

The same operation on the same store as ``attend_launch.attend``, for the common cases on NVIDIA GPUs; ``supports`` says
which those are.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import torch

from hf_turboquant.layout import VectorFormat
from hf_turboquant.ops.triton.attend_launch import BlockTable, first_block_of, mask_arguments, matrices_or
from hf_turboquant.ops.triton.fast_combine import fast_combine_kernel
from hf_turboquant.ops.triton.fast_kernel import fast_attend_kernel
from hf_turboquant.ops.triton.fast_levels import LevelTable, level_table, sign_table
from hf_turboquant.ops.triton.fast_plan import MAX_SPLITS, FastPlan, combine_launch, fast_launch, fast_plan
from hf_turboquant.ops.triton.fast_query import quantize_query_kernel
from hf_turboquant.ops.triton.launch import device_limits, device_of
from hf_turboquant.ops.triton.replay import Launcher, Recorder, as_is
from hf_turboquant.ops.triton.steps import STEP_NUMBERS, Numbers, Step, fresh_tensors, step_numbers
from hf_turboquant.ops.triton.traits import MaskTraits, VectorTraits, next_power_of_2, traits_of
from hf_turboquant.ops.view import AttendOptions, KVView, VectorCodec

MAX_ROWS = 64
"""Most query rows of a KV head (``group_size * q_len``); every eight of them read the codes again."""

MIN_CAPABILITY = 80
"""First compute capability whose 8-bit matrix product has 16 x 8 x 32 tiles."""

_HEAD_DIMS = (64, 128, 256)
_NO_TABLE = LevelTable(0, 0, 1.0, 0.0)
_MASK_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)
_LOG2E = 1.4426950408889634

Pieces = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    if options.mask is not None and options.mask.dtype not in _MASK_DTYPES:
        return f"the fast kernel reads masks of {_MASK_DTYPES}, got {options.mask.dtype}"
    if not view.num_blocks:
        return "the fast kernel is for packed blocks and there is none"
    if view.keys.tables.rotation is None or view.values.tables.rotation is None:
        return "the fast kernel is for rotated keys and values"
    if view.keys.format.kind == "prod" and view.keys.tables.query_matrix is None:
        return "the fast kernel needs the query matrix of prod keys, which VectorTables.with_projection makes"
    if num_rows > MAX_ROWS or not num_rows or not batch:
        return f"the fast kernel takes 1 to {MAX_ROWS} query rows for each KV head, got {num_rows}"
    if query.dtype not in (torch.float16, torch.bfloat16) or query.dtype != view.tail_keys.dtype:
        return f"the fast kernel needs float16 or bfloat16 throughout, got {query.dtype} and {view.tail_keys.dtype}"
    if options.mask is None and options.is_causal and q_len > view.tail_len:
        return "the fast kernel hides exact tokens only: queries that are not all in the tail need the portable one"
    room = view.tail_keys.shape[-2]
    if -(-view.num_sinks // 32) + -(-room // 32) > MAX_SPLITS // 4:
        return f"the fast kernel takes room for {8 * MAX_SPLITS} exact tokens at most, got {view.num_sinks + room}"
    return _format_obstacle(view.keys.format, view.values.format)


@lru_cache(maxsize=64)
def _format_obstacle(keys: VectorFormat, values: VectorFormat) -> str:
    """Say what the kernel cannot read in a pair of formats; empty when it can read them."""
    for name, fmt, widths in (("keys", keys, (1, 2, 3, 4)), ("values", values, (2, 3, 4))):
        kinds = ("mse",) if fmt.transposed else ("mse", "prod")
        if fmt.kind not in kinds or any(group.bits not in widths for group in fmt.groups):
            return f"the fast kernel reads {' and '.join(kinds)} codes of {widths} bits as {name}, got others"
        if fmt.head_dim not in _HEAD_DIMS or any(group.size not in (32, *_HEAD_DIMS) for group in fmt.groups):
            return f"the fast kernel needs {name} of {_HEAD_DIMS} channels in equal groups, got {fmt.head_dim}"
        if fmt.norm_dtype != torch.float16:
            return f"the fast kernel needs float16 norms of {name}, got {fmt.norm_dtype}"
    if len(keys.groups) + (keys.kind == "prod") > 2 or len(values.groups) != 1 or values.centered:
        return "the fast kernel needs keys in one or two groups, signs being one, and values in one and without means"
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
        options: Scaling, mask and their kin.
        block_table: Where the blocks are; needed if they are not one run of full blocks in the first arena.
        lse: ``(batch, num_q_heads, q_len)`` float32, filled with the logarithm of the sum of the exponentials.
        plan: Sizes, if not those of :func:`fast_plan`.

    Returns:
        ``(batch, num_q_heads, q_len, value head_dim)``, dtype of ``query``. Rows that may attend to nothing are zero.
    """
    plan = plan or plan_of(query, view, _window_of(query, view, options)[0])
    out, scratch = allocate(query, view, plan)
    _attend(query, view, options, block_table, lse, plan, out, scratch, as_is)
    return out


def allocate(query: torch.Tensor, view: KVView, plan: FastPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the bytes for what passes between the kernels."""
    out = query.new_empty(*query.shape[:3], view.values.format.head_dim)
    return out, torch.empty(_parts(view, plan)[-1], dtype=torch.uint8, device=query.device)


def split_scratch(scratch: torch.Tensor, view: KVView, plan: FastPlan) -> tuple[Pieces, Pieces]:
    """Return the parts of scratch bytes as tensors: partial results, peaks and totals; then the prepared query."""
    pieces = [scratch[low:high] for low, high in itertools.pairwise(_parts(view, plan))]
    partials = (pieces[0].view(torch.float32), pieces[1].view(torch.float32), pieces[2].view(torch.float32))
    return partials, (pieces[3].view(torch.int8), pieces[4].view(torch.bfloat16), pieces[5].view(torch.float32))


def _parts(view: KVView, plan: FastPlan) -> tuple[int, ...]:
    """Return where each part of the scratch bytes starts, and how many there are in all.

    The parts: partial results, peaks and totals; the query as integers, as floats, and its scales. Every start is a
    multiple of 16 bytes, whatever the number of splits: alignment is part of what a kernel is compiled for.
    """
    others = view.batch * view.num_kv_heads
    rows = others * plan.num_splits * plan.num_rows
    query_rows = others * plan.row_tiles * plan.launch.tiles * 4
    keys = traits_of(view.keys.format)
    sizes = (rows * view.values.format.head_dim * 4, rows * 4, rows * 4)
    sizes += (query_rows * keys.operand_channels * 2, query_rows * keys.head_dim * 4, query_rows * 4)
    return tuple(itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0))


def _attend(
    query: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    block_table: BlockTable | None,
    lse: torch.Tensor | None,
    plan: FastPlan,
    out: torch.Tensor,
    scratch: torch.Tensor,
    launcher: Launcher,
) -> None:
    """Launch the three kernels."""
    keys, values = traits_of(view.keys.format), traits_of(view.values.format)
    partials, prepared = split_scratch(scratch, view, plan)
    with device_of(query):
        prepare_query(query, view, options, plan, level_tables(view.keys), prepared, launcher)
        _launch(query, prepared, view, options, block_table, plan, keys, values, partials, launcher)
        _combine(out, lse, view, options, plan, partials, launcher)
    if view.waiting is not None:
        view.waiting.written()


def fast_attend_and_prepare(
    query: torch.Tensor, view: KVView, options: AttendOptions, *, block_table: BlockTable | None = None
) -> tuple[torch.Tensor, Step | None]:
    """Attend as :func:`fast_attend` does, and return what serves later calls of this form; None where nothing can."""
    logits = options.sink_logits
    if logits is not None and not logits.is_contiguous():
        # the kernel reads a copy, which is made anew for every call
        return fast_attend(query, view, options, block_table=block_table), None
    first_block, _ = _window_of(query, view, options)
    plan = plan_of(query, view, first_block)
    out, scratch = allocate(query, view, plan)
    recorder = Recorder(fresh_tensors(query, out, scratch, options, view.waiting), (*STEP_NUMBERS, "first_seen"))
    _attend(query, view, options, block_table, None, plan, out, scratch, recorder)
    replay = recorder.replay()
    return out, None if replay is None else Step(replay, out.shape, scratch.numel(), _numbers_from(first_block))


def _numbers_from(recorded_block: int) -> Numbers:
    """Return what finds the numbers of later calls, which all start at one block.

    Blocks that left a window since are read and hidden. None for older ones, and for queries not all in the tail.
    """

    def numbers(query: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[int, ...] | None:
        found = step_numbers(view, options) if view.tail_len >= query.shape[2] else None
        first_block, first_seen = _window_of(query, view, options)
        return None if found is None or first_block < recorded_block else (*found, first_seen)

    return numbers


def mask_traits(query: torch.Tensor, view: KVView, options: AttendOptions, strides: tuple[int, ...]) -> MaskTraits:
    """Say what a call does to scores; ``strides`` are those of its mask, 0 where it broadcasts."""
    q_len, group = query.shape[2], query.shape[1] // view.num_kv_heads
    windowed = options.mask is None and options.sliding_window is not None
    kind = "none" if options.mask is None else "bool" if options.mask.dtype == torch.bool else "float"
    by_row = q_len > 1 if windowed else (strides[1] != 0 and group > 1) or (strides[2] != 0 and q_len > 1)
    return MaskTraits(kind, windowed, options.softcap is not None, by_row)


def _window_of(query: torch.Tensor, view: KVView, options: AttendOptions) -> tuple[int, int]:
    """Return the first block that a call reads, hidden or not, and the first token that its first query sees.

    Without a window both are 0. Any block before the first would do as well: what is hidden weighs nothing.
    """
    if options.sliding_window is None or options.mask is not None:
        return 0, 0
    q_len = query.shape[2]
    first_block = min(first_block_of(view, q_len, options), view.num_blocks - 1)
    return first_block, view.seq_len - q_len - options.sliding_window + 1


def plan_of(query: torch.Tensor, view: KVView, first_block: int = 0) -> FastPlan:
    """Return the sizes of a call, which stay the same until the next block is packed or leaves the window."""
    num_rows = query.shape[1] // view.num_kv_heads * query.shape[2]
    capability, num_sms = device_limits(query.device)
    launch = fast_launch(traits_of(view.keys.format), traits_of(view.values.format), num_rows)
    return fast_plan(
        launch=launch,
        num_rows=num_rows,
        others=query.shape[0] * view.num_kv_heads,
        num_blocks=view.num_blocks - first_block,
        num_sinks=view.num_sinks,
        # room instead of use
        tail_len=view.tail_keys.shape[-2],
        num_sms=num_sms,
        capability=capability,
    )


def level_tables(codec: VectorCodec) -> list[LevelTable]:
    """Return the byte tables of the groups of :attr:`VectorTraits.operand_groups`. May wait for the device."""
    groups = codec.format.groups
    tables = [level_table(codec.tables.centroids[index], group.size) for index, group in enumerate(groups)]
    return [*tables, sign_table()] if codec.format.kind == "prod" else tables


def _largest_channel(levels: list[LevelTable], keys: VectorTraits) -> float:
    """Return what no channel of a prepared query of norm 1, times its unit, exceeds."""
    if keys.kind != "prod":
        return max(table.unit for table in levels)
    # the norm of a row of the projection, times its scale. A Gaussian row is longer than sqrt(head_dim) + 6 once in 1e8
    # times, an orthogonal one, whose scale is the larger, never
    reach = math.sqrt(math.pi / 2 / keys.head_dim) * (1 + 6 / math.sqrt(keys.head_dim))
    return max(levels[0].unit, levels[1].unit * reach)


def prepare_query(
    query: torch.Tensor,
    view: KVView,
    options: AttendOptions,
    plan: FastPlan,
    levels: list[LevelTable],
    prepared: Pieces,
    launcher: Launcher = as_is,
) -> None:
    """Rotate and quantize the query; ``prepared`` gets its integers, its floats, and its scales.

    A newest token that waits is written to its slot.
    """
    batch, num_q_heads, q_len, head_dim = query.shape
    heads, tables, keys = view.num_kv_heads, view.keys.tables, traits_of(view.keys.format)
    matrix, order = matrices_or(tables, query, "query_matrix" if keys.kind == "prod" else "rotation", "channel_order")
    tails, waiting = (view.tail_keys, view.tail_values), view.waiting
    states = tails if waiting is None or waiting.states is None else waiting.states
    grid = (plan.row_tiles * plan.launch.tiles * 4, batch * heads, keys.operand_channels // 32)
    launcher(quantize_query_kernel)[grid](
        query, order, matrix, *prepared, *query.stride()[:3],
        heads, num_q_heads // heads, q_len, options.scaling * _LOG2E, levels[0].unit,
        levels[1].unit if len(levels) == 2 else 0.0, _largest_channel(levels, keys),
        *states, *tails, view.tail_start, view.tail_len, max(tails[0].shape[2], 1),
        *(stride for tensor in states for stride in tensor.stride()[:2]),
        *(stride for tensor in tails for stride in tensor.stride()[:3]),
        K=keys, COLUMNS=32, HAS_ORDER=tables.channel_order is not None, OVERLAP=plan.overlap,
        APPEND=waiting is not None, VALUE_COLUMNS=32 * view.values.format.head_dim // head_dim, num_warps=4,
    )  # fmt: skip


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
    launcher: Launcher = as_is,
) -> None:
    batch, num_q_heads, q_len, _ = query.shape
    heads = view.num_kv_heads
    arena = view.arenas[0]
    table = (arena, arena) if block_table is None else (block_table.addresses, block_table.counts)
    _, mask, mask_strides = mask_arguments(options, query)
    hides = mask_traits(query, view, options, mask_strides)
    exact = (view.sink_keys, view.sink_values, view.tail_keys, view.tail_values)
    key_levels = [*level_tables(view.keys), _NO_TABLE]
    (value_levels,) = level_tables(view.values)
    overlap = {"launch_pdl": True} if plan.overlap else {}
    launcher(fast_attend_kernel)[(batch * heads, plan.num_splits, plan.row_tiles)](
        query, *prepared, arena, *table, *exact, *partials, *query.stride()[:3],
        *(stride for tensor in exact for stride in tensor.stride()[:3]),
        heads, num_q_heads // heads, q_len, view.num_blocks, plan.blocks_per_split, plan.packed_splits, arena.stride(0),
        view.num_sinks, view.tail_start, view.tail_len, max(view.tail_keys.shape[-2], 1), plan.tiles_per_split,
        options.scaling * _LOG2E,
        key_levels[0].low, key_levels[0].high, key_levels[1].low, key_levels[1].high,
        value_levels.low, value_levels.high, value_levels.unit,
        mask, arena if block_table is None or not hides.hides else block_table.starts, *mask_strides,
        *_window_of(query, view, options), view.num_sinks + view.packed_tokens, float(options.softcap or 1.0),
        K=keys, V=values, H=hides, KEY_BYTES=view.record.value_offset, RECORD_BYTES=view.record.nbytes,
        TILES=plan.launch.tiles, EXACT_TOKENS=plan.launch.exact_tokens,
        CAUSAL=options.mask is None and options.is_causal and q_len > 1, TABLE=block_table is not None,
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
    launcher: Launcher = as_is,
) -> None:
    batch, num_q_heads, q_len, head_dim = out.shape
    heads, tables = view.num_kv_heads, view.values.tables
    launch = combine_launch(plan, batch * heads, head_dim)
    overlap = {"launch_pdl": True} if plan.overlap else {}
    launcher(fast_combine_kernel)[(head_dim // launch.columns, plan.num_rows, batch * heads)](
        *partials, *matrices_or(tables, out, "rotation", "channel_order"),
        out if options.sink_logits is None else options.sink_logits.contiguous(), out, out if lse is None else lse,
        heads, num_q_heads // heads, q_len, plan.packed_splits, plan.num_splits,
        HEAD_DIM=head_dim, SPLITS=launch.splits, EXACT=next_power_of_2(max(plan.exact_splits, 1)),
        COLUMNS=launch.columns, STEP=32, HAS_ORDER=tables.channel_order is not None,
        SINK_LOGITS=options.sink_logits is not None, LSE=lse is not None, OVERLAP=plan.overlap,
        HIDES=options.mask is not None or options.sliding_window is not None, num_warps=launch.num_warps, **overlap,
    )  # fmt: skip
