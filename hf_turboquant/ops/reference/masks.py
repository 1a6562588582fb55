"""What changes the scores of attention: scaling, cap, masks, sink logits."""

from __future__ import annotations

import torch

from hf_turboquant.ops.view import AttendOptions, KVView


class MaskReader:
    """Apply the mask of any kind to a segment of scores."""

    def __init__(self, options: AttendOptions, query_shape: torch.Size, view: KVView) -> None:
        self.softcap = options.softcap
        self.mask = options.mask
        batch, num_q_heads, q_len, _ = query_shape
        heads = view.num_kv_heads
        self.shape = (batch, heads, num_q_heads // heads, q_len)
        self.positions: torch.Tensor | None = None
        self.window = options.sliding_window
        if self.mask is not None and self.mask.shape[1] != 1:
            self.mask = self.mask.unflatten(1, (heads, num_q_heads // heads))
        elif self.mask is not None:
            self.mask = self.mask[:, :, None]
        elif (options.is_causal and q_len > 1) or options.sliding_window is not None:
            self.positions = torch.arange(q_len, device=view.tail_keys.device) + (view.seq_len - q_len)
            self.causal = options.is_causal

    @property
    def by_position(self) -> bool:
        """Whether a score's fate depends on the place of its key."""
        return self.mask is not None or self.positions is not None

    def apply(self, scores: torch.Tensor, column: int) -> torch.Tensor:
        """Return ``(batch, heads, rows, keys)`` scores capped and masked; ``column`` is the first key's index."""
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if not self.by_position:
            return scores
        keys = scores.shape[-1]
        spread = scores.view(*self.shape, keys)
        if self.mask is not None:
            part = self.mask[..., column : column + keys]
            spread = spread.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else spread + part.float()
        else:
            assert self.positions is not None
            index = torch.arange(column, column + keys, device=scores.device)
            visible = torch.ones(len(self.positions), keys, dtype=torch.bool, device=scores.device)
            if self.causal:
                visible &= index <= self.positions[:, None]
            if self.window is not None:
                visible &= index > self.positions[:, None] - self.window
            spread = spread.masked_fill(~visible, -torch.inf)
        return spread.reshape(scores.shape)
