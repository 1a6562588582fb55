"""Appending to the rings: the kernel against indexing."""

from __future__ import annotations

import pytest
import torch

from hf_turboquant.ops.triton.append_kernel import append


@pytest.mark.parametrize(
    ("count", "slot", "slots"),
    [(1, 0, 256), (1, 255, 256), (5, 254, 256), (20, 120, 128), (128, 100, 128)],
    ids=["first", "last", "around", "two-tiles", "whole-ring"],
)
@pytest.mark.parametrize("dims", [(64, 64), (80, 48)], ids=["D64", "D80-48"])
@pytest.mark.parametrize("layout", ["contiguous", "tokens-first", "strided-channels"])
def test_append_writes_every_slot_and_no_other(
    count: int, slot: int, slots: int, dims: tuple[int, int], layout: str, device: torch.device
) -> None:
    fresh, rings, expected = [], [], []
    for dim in dims:
        new = torch.randn(2, 3, count, dim, device=device)
        if layout == "tokens-first":
            new = new.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "strided-channels":
            new = new.transpose(2, 3).contiguous().transpose(2, 3)
        ring = torch.randn(2, 3, slots, dim, device=device)
        want = ring.clone()
        want[:, :, (slot + torch.arange(count)) % slots] = new
        fresh.append(new)
        rings.append(ring)
        expected.append(want)
    append(*fresh, *rings, slot)
    for ring, want in zip(rings, expected, strict=True):
        assert torch.equal(ring, want)
