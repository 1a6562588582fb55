"""How kernels are launched: tile sizes, warps and splits, looked up and never tuned at run time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl

from hf_turboquant.errors import ShapeError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.backend import interpreting
from hf_turboquant.ops.triton.traits import DTYPE_NAMES, VectorTraits, next_power_of_2
from hf_turboquant.ops.view import KVView


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels run on the device of a tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def matmul_precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` that keeps float32 products float32."""
    return "tf32x3" if dtype == torch.float32 and not interpreting() else "ieee"


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the operand type of matrix products for tensors of ``dtype``.

    The interpreter multiplies bfloat16 wrongly and float16 slowly, so that it gets float32.

    Raises:
        ShapeError: There is no kernel for tensors of ``dtype``.
    """
    if dtype not in DTYPE_NAMES:
        raise ShapeError(
            f"queries, keys and values must be float16, bfloat16 or float32 for backend='triton', got {dtype}; use "
            "backend='reference' or convert them"
        )
    if interpreting() or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@dataclass(frozen=True)
class ProductDtypes:
    """Operand types of the matrix products of ``attend``.

    Attributes:
        keys: Queries with stored keys.
        values: Weights with stored values.
        exact: Both, for sinks and tail.
        exact_group: Queries with channels kept as they are beside codes.
        codes: What centroids are looked up in.
    """

    keys: tl.dtype
    values: tl.dtype
    exact: tl.dtype
    exact_group: tl.dtype
    codes: tl.dtype


def product_dtypes(view: KVView, query: torch.Tensor) -> ProductDtypes:
    """Return the operand types for a query against the tokens of a view."""
    keys, values = view.keys.format, view.values.format
    # centroids and queries in float16 are eight times as fine as in bfloat16
    codes = product_dtype(torch.float16 if query.dtype == torch.bfloat16 else query.dtype)
    # ranges are not normed: what leaves float16 needs the range of the type the values came in
    as_given = values.kind == "exact" or (values.kind == "group" and values.norm_dtype != torch.float16)
    beside = torch.float32 if keys.exact_dtype is None or query.dtype == torch.float32 else keys.exact_dtype
    return ProductDtypes(
        keys=product_dtype(view.tail_keys.dtype) if keys.kind == "exact" else codes,
        values=product_dtype(view.tail_values.dtype) if as_given else codes,
        exact=product_dtype(view.tail_keys.dtype),
        exact_group=product_dtype(beside),
        codes=codes,
    )


def can_permute(dtype: tl.dtype) -> bool:
    """Whether centroids of ``dtype`` can be looked up with NVIDIA's byte permutation."""
    return dtype == tl.float16 and not interpreting() and torch.version.hip is None


@dataclass(frozen=True)
class QuantizeLaunch:
    """Launch of :func:`quantize`: channels summed at a time, warps, pipeline stages."""

    block_k: int
    num_warps: int
    num_stages: int


def quantize_launch(keys: VectorTraits, values: VectorTraits) -> QuantizeLaunch:
    """Look up the launch of ``quantize``."""
    groups = [group for traits in (keys, values) for group in traits.groups]
    groups += [traits.sign_traits for traits in (keys, values) if traits.signs >= 0]
    columns = max((8 * group.eighth_pad for group in groups), default=128)
    if columns <= 64:
        return QuantizeLaunch(16, 4, 2)
    return QuantizeLaunch(16, 8, 2) if columns <= 128 else QuantizeLaunch(16, 16, 2)


@dataclass(frozen=True)
class AttendLaunch:
    """Launch of ``attend``.

    Attributes:
        rows: Query rows in a program, the narrow side of the matrix products.
        packed_tokens: Most packed tokens scored at a time; a block is walked in steps of this or less.
        exact_tokens: Exact tokens scored at a time.
        num_warps: Warps in a program.
        num_stages: Pipeline stages.
        programs_per_sm: Programs that a streaming multiprocessor should have to hide latency.
        max_registers: Most registers of a thread, so that as many programs fit; None leaves it to the compiler.
    """

    rows: int
    packed_tokens: int
    exact_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    max_registers: int | None = None


def attend_launch(
    keys: VectorTraits, values: VectorTraits, num_rows: int, dtypes: ProductDtypes, capability: int
) -> AttendLaunch:
    """Look up the launch of ``attend``.

    Args:
        keys: Key format.
        values: Value format.
        num_rows: Query rows of a KV head: ``group_size * q_len``.
        dtypes: Operand types of the products.
        capability: Compute capability, ``10 * major + minor``; 0 under the interpreter.
    """
    wide = max(keys.head_dim, values.head_dim) > 128
    rows = min(max(next_power_of_2(num_rows), 8), 64)
    if capability and tl.float32 in (dtypes.keys, dtypes.values, dtypes.exact):
        # float32 operands go through shared memory, of which some GPUs have 99 KiB: neither pipelined nor many
        return AttendLaunch(min(rows, 16), 32, 16, 4 if wide else 2, 1, 8)
    # nor may more than 99 KiB of dense vectors, or of scales and zeros, be on their way
    stages = 1 if values.kind == "group" or (wide and "exact" in (keys.kind, values.kind)) else 2
    if rows <= 16:
        if keys.word_groups and values.has_word_order:
            # nothing waits for another warp, or for shared memory: one warp, and as many programs as have registers
            return (
                AttendLaunch(rows, 32, 32, 1, 1, 12, 168)
                if rows == 8 and not wide
                else AttendLaunch(rows, 32, 32, 1, 1, 8)
            )
        return AttendLaunch(rows, 32, 32, 2 if wide else 1, stages, 12)
    if rows == 32:
        return AttendLaunch(rows, 32, 32, 4 if wide else 2, stages, 8)
    return AttendLaunch(rows, 32, 16 if wide else 32, 8 if wide else 4, stages, 4)


MAX_SPLITS = 256
"""Most partial results that ``combine`` merges for one row."""


def rotate_launch(keys: VectorTraits, num_rows: int) -> tuple[int, int, int, int]:
    """Look up the launch of the kernel that rotates queries.

    Returns:
        Query rows and columns of a program, channels summed at a time, and warps. A projection of the rotated query
        needs all columns.
    """
    rows = min(next_power_of_2(max(num_rows, 4)), 16)
    if keys.signs >= 0:
        return rows, keys.head_dim_pad, min(64 if keys.head_dim_pad <= 128 else 16, keys.head_dim_pad), 8
    return rows, min(32, keys.head_dim_pad), min(128, keys.head_dim_pad), 4


def combine_launch(rotated_splits: int, num_splits: int, channels: int) -> tuple[int, int, int]:
    """Look up the launch of ``combine``.

    Args:
        rotated_splits: Partial results of packed tokens.
        num_splits: Partial results.
        channels: ``head_dim`` of the values as a tile extent.

    Returns:
        Partial results merged at a time, channels written by a program, and warps: a warp for 2048 numbers, 64 in a
        register file lane, that all loads are on their way at once.
    """
    tile = min(max(next_power_of_2(rotated_splits), 16), 32768 // channels)
    return tile, min(channels, 32 if tile < 128 else 64), min(max(tile * channels // 2048, 4), 16)


@lru_cache(maxsize=16)
def device_limits(device: torch.device) -> tuple[int, int]:
    """Return the compute capability (``10 * major + minor``) and the number of streaming multiprocessors."""
    if device.type != "cuda":
        return 0, 2
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def packed_step(values: VectorTraits, launch: AttendLaunch) -> int:
    """Return how many packed tokens are scored at a time.

    Of values that are read by words it is all codes in 16 bytes of a row, of others at most one part of the row.
    """
    if values.has_word_order:
        return 16 * values.first.word_parts
    return min([launch.packed_tokens, *(group.row_bytes for group in values.groups)])


_PART_COST = 0.05
"""What a part of a block costs whatever its length, in blocks."""

_TILE_COST = 0.5
"""What a tile of exact tokens costs, in blocks."""


def choose_splits(count: int, wanted: int) -> int:
    """Return into how many runs blocks, parts or tiles are cut: ``wanted`` or less, and none that is empty."""
    splits = max(1, min(count, wanted, MAX_SPLITS))
    return -(-count // -(-count // splits)) if count else 0


def share_splits(blocks: int, tiles: int, others: int, launch: AttendLaunch, num_sms: int) -> tuple[int, int]:
    """Return how many runs of blocks and of tiles of exact tokens there should be.

    All programs together are as many as run at the same time, and have about as much to do.

    Args:
        blocks: Blocks to read.
        tiles: Tiles of exact tokens.
        others: Programs there are for one run: batch times KV heads times row tiles.
        launch: Launch of ``attend``.
        num_sms: Streaming multiprocessors.
    """
    wanted = max(num_sms * launch.programs_per_sm // others, 1)
    exact_cost = tiles * _TILE_COST
    exact = round(wanted * exact_cost / max(blocks + exact_cost, 1))
    exact = min(max(exact, 1), tiles)
    return max(wanted - exact, 1), exact


def choose_parts(blocks: int, wanted: int, values: VectorTraits, launch: AttendLaunch) -> int:
    """Return into how many parts each block is cut, that ``wanted`` runs of parts are about as long."""
    if not values.has_word_order or not blocks:
        return 1

    def longest(parts: int) -> float:
        return -(-blocks * parts // choose_splits(blocks * parts, wanted)) * (1 / parts + _PART_COST)

    steps = BLOCK_TOKENS // packed_step(values, launch)
    return min((parts for parts in (1, 2, 4) if parts <= steps), key=longest)
