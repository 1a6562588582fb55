"""The lazy tensor of all keys, or all values, that a batch of a serving engine reads: request behind request.

Attention goes through it request by request, so that no query meets tokens of another request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from hf_turboquant.handle import KVHandle, PathRecorder
from hf_turboquant.ops import AttendOptions, Backend, KVView, attend, materialize


@dataclass(frozen=True)
class RequestRead:
    """What one request reads in a layer.

    Attributes:
        count: New tokens, the last of the view.
        view: Its tokens, those included.
    """

    count: int
    view: KVView


class PagedHandle(KVHandle):
    """Keys or values of a batch: ``(1, num_kv_heads, tokens of all requests, head_dim)``."""

    reads: tuple[RequestRead, ...]

    @staticmethod
    def __new__(
        cls: type[PagedHandle],
        reads: tuple[RequestRead, ...],
        which: str,
        backend: Backend,
        recorder: PathRecorder,
        shape: tuple[int, ...] | None = None,
        repeats: int = 1,
    ) -> PagedHandle:
        """Make a handle; without ``shape`` of all tokens of the requests."""
        exact = reads[0].view.tail_keys if which == "keys" else reads[0].view.tail_values
        if shape is None:
            shape = (1, exact.shape[1], sum(read.view.seq_len for read in reads), exact.shape[3])
        handle: PagedHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=exact.dtype, device=exact.device, requires_grad=False
        )
        handle.reads, handle.which, handle.backend, handle.dims = reads, which, backend, shape
        handle.recorder, handle.repeats, handle.hidden = recorder, repeats, 0
        return handle

    def materialize(self) -> torch.Tensor:
        """Rebuild the dense tensor, request behind request."""
        parts = [materialize(read.view, which=self.which, backend=self.backend) for read in self.reads]
        return self.seen(torch.cat(parts, dim=2))

    def like(self, shape: tuple[int, ...], repeats: int) -> PagedHandle:
        """Return a handle on the same tokens, seen in another shape."""
        return PagedHandle(self.reads, self.which, self.backend, self.recorder, shape, repeats)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve attention request by request; leave the rest to the handle of one view."""
        if func is F.scaled_dot_product_attention:
            out = _attend_pair(*args, **(kwargs or {}))
            if out is not None:
                return out
        return super().__torch_function__(func, types, args, kwargs)


def _attend_pair(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Attend over each request; None when the arguments are not those of an engine's causal attention.

    The mask of the engine says which tokens are of the same request and not later; that is what is computed, so it is
    looked at for its shape only.
    """
    if not (type(key) is PagedHandle and type(value) is PagedHandle and key.reads is value.reads):
        return None
    if (key.which, value.which) != ("keys", "values") or key.repeats != value.repeats or len(key.dims) != 4:
        return None
    new_tokens = sum(read.count for read in key.reads)
    q_len = query.shape[2]
    # a single new token may come as one query a head of its group
    if q_len != new_tokens and new_tokens != 1:
        return None
    masks = [(1, 1, rows, key.dims[2]) for rows in (1, new_tokens)]
    if attn_mask is None or tuple(attn_mask.shape) not in masks or is_causal or dropout_p:
        return None
    key.recorder.compressed()
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    outs, start = [], 0
    for read in key.reads:
        rows = q_len if new_tokens == 1 else read.count
        part = query[:, :, start : start + rows]
        options = AttendOptions(scaling=scaling, is_causal=read.count > 1)
        outs.append(_attend(part, read, options, key.backend))
        start += rows
    return torch.cat(outs, dim=2)


def _attend(query: torch.Tensor, read: RequestRead, options: AttendOptions, backend: Backend) -> torch.Tensor:
    """Attend over one request; a prompt, whose tokens are all exact and new, in torch's own way."""
    view = read.view
    if read.count == view.seq_len and query.shape[2] == read.count:
        repeats = query.shape[1] // view.num_kv_heads
        keys, values = (tensor.repeat_interleave(repeats, dim=1) for tensor in (view.tail_keys, view.tail_values))
        return F.scaled_dot_product_attention(query, keys, values, is_causal=options.is_causal, scale=options.scaling)
    return attend(query, view, options, backend=backend)
