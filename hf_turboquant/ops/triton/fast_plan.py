"""How the fast attend kernel is launched: registers, programs and splits, looked up and never tuned at run time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import triton

from hf_turboquant.ops.triton.traits import VectorTraits, next_power_of_2

MIN_TRITON = (3, 6)
"""First Triton whose Gluon the fast kernel was run with."""

MAX_SPLITS = 256
"""Most partial results of a row."""


@dataclass(frozen=True)
class FastLaunch:
    """How the attend kernel is compiled.

    Attributes:
        tiles: Query tiles of four rows in a program.
        num_warps: Warps in a program.
        per_sm: Programs that a multiprocessor holds at once.
        ahead: Whether keys are loaded one block ahead.
        max_registers: Registers of a thread at most.
    """

    tiles: int
    num_warps: int
    per_sm: int
    ahead: bool
    max_registers: int

    @property
    def exact_tokens(self) -> int:
        """Exact tokens of a tile: eight for each warp."""
        return 8 * self.num_warps


@dataclass(frozen=True)
class FastPlan:
    """Sizes of one call.

    Attributes:
        launch: How the attend kernel is compiled.
        num_rows: Query rows of a KV head.
        row_tiles: Programs that share the rows of a KV head.
        blocks_per_split: Blocks of a packed split.
        packed_splits: Splits that read packed blocks.
        tiles_per_split: Tiles of exact tokens of an exact split.
        exact_splits: Splits that read exact tokens.
        overlap: Whether a kernel may start before the one it depends on has ended, and waits for it inside.
    """

    launch: FastLaunch
    num_rows: int
    row_tiles: int
    blocks_per_split: int
    packed_splits: int
    tiles_per_split: int
    exact_splits: int
    overlap: bool

    @property
    def num_splits(self) -> int:
        """Partial results of a row."""
        return self.packed_splits + self.exact_splits


@dataclass(frozen=True)
class CombineLaunch:
    """How the merge of partial results is launched.

    Attributes:
        splits: Extent of the splits.
        columns: Channels of a program.
        num_warps: Warps in a program.
    """

    splits: int
    columns: int
    num_warps: int


def combine_launch(plan: FastPlan, others: int, head_dim: int) -> CombineLaunch:
    """Look up how results are merged; ``others`` is batch times KV heads."""
    splits = next_power_of_2(plan.num_splits)
    # a program for every 32 channels while there are few rows: latency counts then, not work
    columns = 32 if plan.num_rows * others <= 64 else head_dim
    return CombineLaunch(splits, columns, num_warps=8 if splits * head_dim <= 16384 else 16)


def triton_obstacle() -> str:
    """Say why the fast kernel cannot be imported with the Triton that is installed; empty when it can."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version >= MIN_TRITON:
        return ""
    return f"the fast kernel needs Triton {MIN_TRITON[0]}.{MIN_TRITON[1]} or later, got {triton.__version__}"


def fast_launch(keys: VectorTraits, values: VectorTraits, num_rows: int) -> FastLaunch:
    """Look up the launch: the registers that hold a block without spilling, and the programs they leave room for."""
    tiles = 1 if num_rows <= 4 else 2
    if tiles == 2 or max(keys.head_dim, values.head_dim) > 128:
        return FastLaunch(tiles, num_warps=4, per_sm=2, ahead=False, max_registers=255)
    lean = all(group.bits == 2 for group in (*keys.operand_groups, *values.groups))
    return FastLaunch(tiles, num_warps=4, per_sm=3, ahead=lean, max_registers=168)


@lru_cache(maxsize=4096)
def fast_plan(
    *,
    launch: FastLaunch,
    num_rows: int,
    others: int,
    num_blocks: int,
    num_sinks: int,
    tail_len: int,
    num_sms: int,
    capability: int,
) -> FastPlan:
    """Divide the work: as many programs as the device holds at once, each with an equal share of the blocks.

    Args:
        launch: How the attend kernel is compiled.
        num_rows: Query rows of a KV head.
        others: Batch times KV heads.
        num_blocks: Packed blocks, at least 1.
        num_sinks: Sink tokens.
        tail_len: Tail tokens.
        num_sms: Streaming multiprocessors.
        capability: Compute capability, ``10 * major + minor``.
    """
    row_tiles = -(-num_rows // (4 * launch.tiles))
    exact_tiles = -(-num_sinks // launch.exact_tokens) + -(-tail_len // launch.exact_tokens)
    slots, others = num_sms * launch.per_sm, others * row_tiles
    steps = -(-num_blocks // launch.num_warps)
    # a program of exact tokens for each head must find room beside the others
    per_split = launch.num_warps * _rounds(steps, others, slots - others, num_sms, MAX_SPLITS - exact_tiles)
    packed_splits = -(-num_blocks // per_split)
    # and they get all the room that is left of a whole number of waves
    room = -packed_splits * others % slots // others
    tiles_per_split = -(-exact_tiles // max(room, 1))
    return FastPlan(
        launch,
        num_rows,
        row_tiles,
        blocks_per_split=per_split,
        packed_splits=packed_splits,
        tiles_per_split=tiles_per_split,
        exact_splits=-(-exact_tiles // tiles_per_split) if exact_tiles else 0,
        # with many heads programs of the next kernel get in the way of this one
        overlap=capability >= 90 and others <= 32,
    )


def _rounds(steps: int, others: int, slots: int, num_sms: int, most_splits: int) -> int:
    """Return how many blocks each warp reads, so that the last wave of programs ends first.

    The cost of a wave is in units of one block of each warp: the blocks, one more for the first loads and the last
    stores, and 0.8 for every program of a multiprocessor, which were measured on an H200 at 4 to 128 thousand tokens.
    """
    best, best_cost = steps, float("inf")
    for splits in range(1, min(steps, most_splits) + 1):
        rounds = math.ceil(steps / splits)
        programs = math.ceil(steps / rounds) * others
        cost = math.ceil(programs / max(slots, 1)) * (rounds + 1) + 0.8 * programs / num_sms
        if cost < best_cost:
            best, best_cost = rounds, cost
    return best
