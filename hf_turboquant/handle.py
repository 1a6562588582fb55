"""The lazy tensor a compressed layer hands to the model in place of its keys or values.

It has the full shape and no storage. ``F.scaled_dot_product_attention`` on a pair of handles reads the store directly;
views that change nothing return a handle again; any other operation gets the dense tensor, rebuilt for it, and is
counted with its name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hf_turboquant.ops import AttendOptions, Backend, KVView, attend, materialize

_EVERYTHING = slice(None)


class KVHandle(torch.Tensor):
    """Keys or values of one layer as the model sees them: ``(batch, num_kv_heads, seq_len, head_dim)``.

    ``repeats`` is 1, or how often each KV head is repeated along the head dimension (what ``repeat_kv`` asks for).
    ``hidden`` is the count of oldest stored tokens that are no part of the tensor: those of a packed block that a
    sliding window has left in part.
    """

    tokens: KVView
    which: str
    dims: tuple[int, ...]
    backend: Backend
    recorder: PathRecorder
    repeats: int
    hidden: int

    @staticmethod
    def __new__(
        cls: type[KVHandle],
        view: KVView,
        which: str,
        backend: Backend,
        recorder: PathRecorder,
        shape: tuple[int, ...],
        repeats: int = 1,
        hidden: int = 0,
    ) -> KVHandle:
        """Make a handle of ``shape``; 5-dimensional shapes are the steps inside ``repeat_kv``."""
        exact = view.tail_keys if which == "keys" else view.tail_values
        handle: KVHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=exact.dtype, device=exact.device, requires_grad=False
        )
        # one update for seven attributes: a decode step makes two handles for each layer
        handle.__dict__.update(
            tokens=view, which=which, backend=backend, recorder=recorder, dims=shape, repeats=repeats, hidden=hidden
        )
        return handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe without rebuilding the tensor."""
        return f"KVHandle({self.which}, shape={self.dims}, dtype={self.dtype})"

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape, without the detour through ``__torch_function__``: attention asks four times a layer."""
        return torch.Size(self.dims)

    def materialize(self) -> torch.Tensor:
        """Rebuild the dense tensor, in the dtype and shape of the handle."""
        return self.seen(materialize(self.tokens, which=self.which, backend=self.backend)[:, :, self.hidden :])

    def seen(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the dense tensor of all KV heads in the shape of the handle."""
        if len(self.dims) == 5:
            return dense[:, :, None].expand(self.dims)
        return dense if self.repeats == 1 else dense.repeat_interleave(self.repeats, dim=1)

    def like(self, shape: tuple[int, ...], repeats: int) -> KVHandle:
        """Return a handle on the same tokens, seen in another shape."""
        return KVHandle(self.tokens, self.which, self.backend, self.recorder, shape, repeats, self.hidden)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve attention and no-op views from the store; leave the rest to dispatch."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out = _attend_pair(*args, **kwargs)
            if out is not None:
                return out
        elif func in _VIEWS and isinstance(args[0], KVHandle):
            handle = _VIEWS[func](*args, **kwargs)
            if handle is not None:
                return handle
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Give any other operation the dense tensors."""

        def dense(value: Any) -> Any:
            if isinstance(value, KVHandle):
                value.recorder.materialized(str(func))
                return value.materialize()
            return value

        args, kwargs = tree_map(dense, (args, kwargs or {}))
        return func(*args, **kwargs)


class PathRecorder:
    """Counts how often a layer's keys and values were read from the store, and how often rebuilt, and for what.

    Args:
        layer_idx: Index of the layer, for the warning at the first rebuild.
    """

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx
        self.compressed_calls = 0
        self.dense_calls = 0
        self.materialized_calls: dict[str, int] = {}

    def compressed(self) -> None:
        """Count one attention that read the store."""
        self.compressed_calls += 1

    def dense(self) -> None:
        """Count one attention over fresh tokens alone, which needs no store."""
        self.dense_calls += 1

    def materialized(self, reason: str) -> None:
        """Count one rebuild of a dense tensor for an operation named ``reason``."""
        if not self.materialized_calls:
            warnings.warn(
                f"layer {self.layer_idx}: dense keys or values were rebuilt for {reason}; the result is right, but "
                "slower and larger than attention on the compressed store. See cache.path_report()",
                stacklevel=2,
            )
        self.materialized_calls[reason] = self.materialized_calls.get(reason, 0) + 1


def handle_pair(view: KVView, backend: Backend, recorder: PathRecorder, visible: int) -> tuple[KVHandle, KVHandle]:
    """Return the keys and the values of a view as handles of one layer.

    Args:
        view: Stored tokens.
        backend: Who computes.
        recorder: Counter of the layer.
        visible: Newest tokens that the handles show; the others are hidden.
    """
    batch, num_kv_heads, _, key_dim = view.tail_keys.shape
    hidden = view.seq_len - visible
    keys = KVHandle(view, "keys", backend, recorder, (batch, num_kv_heads, visible, key_dim), 1, hidden)
    value_shape = (batch, num_kv_heads, visible, view.tail_values.shape[3])
    return keys, KVHandle(view, "values", backend, recorder, value_shape, 1, hidden)


def paired_view(key: object, value: object) -> KVView | None:
    """Return the tokens behind a key and a value that are handles of one layer; None when they are not."""
    if not (type(key) is KVHandle and type(value) is KVHandle and key.tokens is value.tokens):
        return None
    if (key.which, value.which) != ("keys", "values") or len(key.dims) != 4 or key.repeats != value.repeats:
        return None
    return key.tokens


def attend_handle(query: torch.Tensor, key: KVHandle, options: AttendOptions) -> torch.Tensor:
    """Attend over the tokens of a handle, and count it.

    Args:
        query: ``(batch, num_q_heads, q_len, head_dim)``.
        key: Handle of the keys, of a pair that :func:`paired_view` accepts.
        options: As for a dense tensor of the shape of the handle.

    Returns:
        ``(batch, num_q_heads, q_len, value head_dim)``.
    """
    key.recorder.compressed()
    if key.hidden:
        options = _hide_oldest(options, query, key)
    return attend(query, key.tokens, options, backend=key.backend)


def _hide_oldest(options: AttendOptions, query: torch.Tensor, key: KVHandle) -> AttendOptions:
    """Return options that leave the hidden tokens of a handle out."""
    mask, q_len, seq_len = options.mask, query.shape[2], key.tokens.seq_len
    if mask is not None:
        nothing = False if mask.dtype == torch.bool else -torch.inf
        return replace(options, mask=F.pad(mask, (key.hidden, 0), value=nothing))
    if q_len == 1:
        return replace(options, sliding_window=seq_len - key.hidden)
    mask = torch.ones(q_len, seq_len, dtype=torch.bool, device=query.device)
    if options.is_causal:
        mask = mask.tril(seq_len - q_len)
    mask[:, : key.hidden] = False
    return replace(options, mask=mask[None, None], is_causal=False)


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
    """Attend over the store when the arguments are a matching pair of handles; None when they are not."""
    view = paired_view(key, value)
    if view is None:
        return None
    # a single KV head is broadcast whether or not grouping is asked for
    if key.dims[1] not in (query.shape[1], 1) and not enable_gqa:
        return None
    # torch aligns a causal mask to the first key, the store to the last: the same only without older tokens
    if is_causal and query.shape[2] != 1 and query.shape[2] != key.dims[2]:
        return None
    if dropout_p or (query.requires_grad and torch.is_grad_enabled()) or query.shape[0] != key.dims[0]:
        return None
    if attn_mask is not None and attn_mask.ndim < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None:
        return attend_handle(query, key, _plain_options(scaling, is_causal))
    return attend_handle(query, key, AttendOptions(scaling=scaling, mask=attn_mask, is_causal=is_causal))


@lru_cache(maxsize=64)
def _plain_options(scaling: float, is_causal: bool) -> AttendOptions:
    return AttendOptions(scaling=scaling, is_causal=is_causal)


def _same(handle: KVHandle) -> KVHandle:
    """Return the handle: the operation would copy nothing that is not already so."""
    return handle


def _to(handle: KVHandle, *args: Any, **kwargs: Any) -> KVHandle | None:
    """Serve ``to`` when dtype and device stay what they are."""
    unchanged = {handle.dtype, handle.device, str(handle.device)}
    wanted = [*args, *(kwargs[name] for name in ("dtype", "device") if name in kwargs)]
    return handle if wanted and all(isinstance(item, bool) or item in unchanged for item in wanted) else None


def _getitem(handle: KVHandle, index: Any) -> KVHandle | None:
    """Serve ``[:, :, None, :, :]``, the first step of ``repeat_kv``."""
    if len(handle.dims) != 4 or handle.repeats != 1 or not isinstance(index, tuple) or len(index) != 5:
        return None
    if index[2] is None and all(isinstance(i, slice) and i == _EVERYTHING for i in (*index[:2], *index[3:])):
        return handle.like((*handle.dims[:2], 1, *handle.dims[2:]), 1)
    return None


def _expand(handle: KVHandle, *sizes: Any) -> KVHandle | None:
    """Serve the second step of ``repeat_kv``: repeat along the new dimension."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if len(handle.dims) != 5 or len(sizes) != 5 or sizes[:2] + sizes[3:] != handle.dims[:2] + handle.dims[3:]:
        return None
    return handle.like(sizes, sizes[2])


def _reshape(handle: KVHandle, *sizes: Any) -> KVHandle | None:
    """Serve the last step of ``repeat_kv``: fold the repeats into the heads."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if len(handle.dims) != 5:
        return None
    batch, heads, repeats, tokens, head_dim = handle.dims
    merged = (batch, heads * repeats, tokens, head_dim)
    return handle.like(merged, repeats) if sizes == merged else None


def _repeat_interleave(handle: KVHandle, repeats: Any, dim: int | None = None, **_: Any) -> KVHandle | None:
    """Serve ``repeat_interleave`` along the heads."""
    if not isinstance(repeats, int) or dim != 1 or len(handle.dims) != 4 or handle.repeats != 1:
        return None
    return handle.like((handle.dims[0], handle.dims[1] * repeats, *handle.dims[2:]), repeats)


_VIEWS: Mapping[Any, Callable[..., KVHandle | None]] = MappingProxyType(
    {
        torch.Tensor.contiguous: _same,
        torch.Tensor.detach: _same,
        torch.Tensor.to: _to,
        torch.Tensor.__getitem__: _getitem,
        torch.Tensor.expand: _expand,
        torch.Tensor.reshape: _reshape,
        torch.Tensor.repeat_interleave: _repeat_interleave,
        torch.repeat_interleave: _repeat_interleave,
    }
)
"""Operations that may amount to another handle; each returns None when this call does not."""
