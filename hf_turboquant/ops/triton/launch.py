"""How kernels are launched: tile sizes, warps and splits, looked up and never tuned at run time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl

from hf_turboquant.errors import ShapeError
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
    """

    rows: int
    packed_tokens: int
    exact_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


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
        return AttendLaunch(rows, 32, 32, 2 if wide else 1, stages, 12)
    if rows == 32:
        return AttendLaunch(rows, 32, 32, 4 if wide else 2, stages, 8)
    return AttendLaunch(rows, 32, 16 if wide else 32, 8 if wide else 4, stages, 4)


MAX_SPLITS = 256
"""Most partial results that ``combine`` merges for one row."""


@lru_cache(maxsize=16)
def device_limits(device: torch.device) -> tuple[int, int]:
    """Return the compute capability (``10 * major + minor``) and the number of streaming multiprocessors."""
    if device.type != "cuda":
        return 0, 2
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def choose_splits(blocks: int, others: int, launch: AttendLaunch, num_sms: int) -> int:
    """Return into how many runs the packed blocks are cut.

    Args:
        blocks: Blocks to read.
        others: Programs there are for one run: batch times KV heads times row tiles.
        launch: Launch of ``attend``.
        num_sms: Streaming multiprocessors.
    """
    wanted = -(-num_sms * launch.programs_per_sm // others)
    splits = max(1, min(blocks, wanted, MAX_SPLITS))
    # no run may be empty
    return -(-blocks // -(-blocks // splits)) if blocks else 0
