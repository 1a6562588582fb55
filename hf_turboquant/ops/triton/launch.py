"""How kernels are launched: tile sizes, warps and splits, looked up and never tuned at run time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl

from hf_turboquant.ops.backend import interpreting
from hf_turboquant.ops.triton.traits import VectorTraits, next_power_of_2


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels run on the device of a tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def matmul_precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` that keeps float32 products float32."""
    return "tf32x3" if dtype == torch.float32 and not interpreting() else "ieee"


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the operand type of matrix products for tensors of ``dtype``.

    The interpreter multiplies bfloat16 wrongly and float16 slowly, so that it gets float32.
    """
    if interpreting() or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


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
    columns = max((8 * group.eighth_pad for traits in (keys, values) for group in traits.groups), default=128)
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


def attend_launch(keys: VectorTraits, values: VectorTraits, num_rows: int, capability: int) -> AttendLaunch:
    """Look up the launch of ``attend``.

    Args:
        keys: Key format.
        values: Value format.
        num_rows: Query rows of a KV head: ``group_size * q_len``.
        capability: Compute capability, ``10 * major + minor``; 0 under the interpreter.
    """
    wide = max(keys.head_dim, values.head_dim) > 128
    rows = min(max(next_power_of_2(num_rows), 8), 64)
    if rows <= 16:
        return AttendLaunch(rows, 32, 32, 2 if wide else 1, 2, 12)
    if rows == 32:
        return AttendLaunch(rows, 32, 32, 4 if wide else 2, 2, 8)
    return AttendLaunch(rows, 32, 32, 8 if wide else 4, 2, 4)


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
