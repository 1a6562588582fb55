"""Decode steps whose launches are repeated: what is another tensor, and what another number, in every step.

Calls of one form differ in nothing else while the tensors of their view stay; ``ops.attend`` says what a form is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_turboquant.ops.triton.replay import Replay
from hf_turboquant.ops.view import AttendOptions, KVView, NewToken

STEP_NUMBERS = (
    "slot", "tail_start", "tail_len", "seq_len", "window",
    "mask_stride_batch", "mask_stride_head", "mask_stride_row",
)  # fmt: skip
"""Parameters of kernels whose values :func:`step_numbers` returns. Kernels need not have all of them."""

Numbers = Callable[[torch.Tensor, KVView, AttendOptions], Sequence[int] | None]
"""Returns the numbers of a call; None for a call that needs launches of its own."""


def fresh_tensors(
    query: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, options: AttendOptions, newest: NewToken | None
) -> tuple[torch.Tensor, ...]:
    """Return the tensors that are others in every step."""
    tensors = (query, out, scratch)
    if options.mask is not None:
        tensors += (options.mask,)
    if options.sink_logits is not None:
        tensors += (options.sink_logits,)
    return tensors if newest is None or newest.states is None else (*tensors, *newest.states)


def step_numbers(view: KVView, options: AttendOptions) -> tuple[int, ...] | None:
    """Return the values of :data:`STEP_NUMBERS`; None when the mask does not fit."""
    mask, seq_len, newest = options.mask, view.seq_len, view.newest
    slot = 0 if newest is None else newest.slot
    numbers = (slot, view.tail_start, view.tail_len, seq_len, options.sliding_window or 0)
    if mask is None:
        return *numbers, 0, 0, 0
    return (*numbers, *mask_strides(mask)[:3]) if mask.shape[3] == seq_len else None


def mask_strides(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a mask ``(batch | 1, num_q_heads | 1, q_len | 1, seq_len)``, 0 where it broadcasts."""
    stride_batch, stride_head, stride_row, stride_key = mask.stride()
    batch, heads, rows, _ = mask.shape
    # that of keys is compiled for: it must not depend on how many there are
    return (
        0 if batch == 1 else stride_batch,
        0 if heads == 1 else stride_head,
        0 if rows == 1 else stride_row,
        stride_key,
    )


class Step:
    """Attention of a decode step of one layer, for calls of one form, while the tensors of its view stay.

    Args:
        replay: The launches of the first step; fresh are :func:`fresh_tensors`.
        out_shape: Shape of the output.
        num_bytes: Bytes of scratch.
        numbers: Returns the numbers of a call, in the order the recorder was given their names.
    """

    def __init__(self, replay: Replay, out_shape: torch.Size, num_bytes: int, numbers: Numbers) -> None:
        self._replay = replay
        self._out_shape = out_shape
        self._num_bytes = num_bytes
        self._numbers = numbers

    def attend(self, query: torch.Tensor, view: KVView, options: AttendOptions) -> torch.Tensor | None:
        """Attend as an ordinary call does.

        Args:
            query: As the first, in shape, strides, dtype and device.
            view: As the first, but for ``tail_start`` and ``tail_len``, and the states of a newest token that waits.
            options: As the first, but for the values of sink logits, the length of the window, and the values, length
                and outer strides of the mask.

        Returns:
            ``(batch, num_q_heads, q_len, value head_dim)``; None when this call needs launches of its own.
        """
        numbers = self._numbers(query, view, options)
        if numbers is None:
            return None
        out = torch.empty(self._out_shape, dtype=query.dtype, device=query.device)
        scratch = torch.empty(self._num_bytes, dtype=torch.uint8, device=query.device)
        newest = view.waiting
        if not self._replay.run(fresh_tensors(query, out, scratch, options, newest), numbers):
            return None
        if newest is not None:
            newest.written()
        return out
