"""The calls whose kernels :mod:`evals.compile_matrix` compiles: every format, head_dim and row of the launch tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import AttendOptions, KVView, NewToken, VectorCodec, VectorTables
from hf_turboquant.ops import triton as kernels
from hf_turboquant.ops.triton import fast_attend

Codecs = tuple[VectorCodec, VectorCodec]


def _codec(
    kind: str,
    head_dim: int,
    bits: int,
    *,
    transposed: bool = False,
    centered: bool = False,
    split: tuple[tuple[int, int], ...] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> VectorCodec:
    """Return a codec with tables of the right shapes; ``split`` is ((channels, bits), ...), 16 bits first."""
    if kind == "exact":
        return VectorCodec(VectorFormat("exact", head_dim, exact_dtype=dtype), VectorTables())
    groups, start = [], 0
    for size, width in split or ((head_dim, bits),):
        groups.append(ChannelGroup(start, size, width))
        start += size
    square = torch.zeros(head_dim, head_dim)
    coded = [group.bits if group.bits != 16 else None for group in groups]
    tables = VectorTables(
        centroids=tuple(torch.empty(0) if width is None else torch.linspace(-0.2, 0.2, 1 << width) for width in coded),
        boundaries=tuple(torch.empty(0) if width is None else torch.zeros((1 << width) - 1) for width in coded),
        rotation=square,
    )
    if kind in ("group", "qjl"):
        tables = VectorTables()
    if kind == "qjl":
        tables = replace(tables, projection=square, projection_scale=0.1)
    if kind == "prod":
        tables = tables.with_projection(square, 0.1)
    fmt = VectorFormat(
        kind,
        head_dim,
        () if kind == "qjl" else tuple(groups),
        transposed=transposed,
        centered=centered,
        exact_dtype=dtype if None in coded else None,
    )
    return VectorCodec(fmt, tables)


def _pair(key_bits: int, value_bits: int, head_dim: int, *, values: str = "mse", **keys: Any) -> Codecs:
    """Return key and value codecs; options are those of :func:`_codec` for keys."""
    key_codec = _codec(keys.pop("kind", "mse"), head_dim, key_bits, **{"centered": True, **keys})
    return key_codec, _codec(values, head_dim, value_bits, transposed=True)


def _exact(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Codecs:
    codec = _codec("exact", head_dim, 16, dtype=dtype)
    return codec, codec


def _guarded(head_dim: int, *parts: tuple[int, int], values: int) -> Codecs:
    """Return keys of which 8 channels are exact, as the guard keeps them."""
    return _pair(4, values, head_dim, split=((8, 16), *parts))


def _view(keys: VectorCodec, values: VectorCodec, dtype: torch.dtype) -> KVView:
    heads, blocks, slots = 2, 4, 256
    record = keys.format.nbytes + values.format.nbytes
    dense = [torch.zeros(1, heads, slots, codec.format.head_dim, dtype=dtype) for codec in (keys, values)]
    arena = torch.zeros(blocks, 1, heads, record, dtype=torch.uint8)
    sinks = [tensor[:, :, :4] for tensor in dense]
    return KVView(keys, values, sinks[0], sinks[1], (arena,), blocks, None, dense[0], dense[1], 0, 200)


def _attend(
    keys: VectorCodec,
    values: VectorCodec,
    *,
    rows: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
    waiting: bool = False,
    **options: Any,
) -> None:
    """Attend with ``rows`` query rows for each KV head: heads up to 16, then queries."""
    group_size, q_len = (rows, 1) if rows <= 16 else (4, rows // 4)
    query = torch.zeros(1, 2 * group_size, q_len, keys.format.head_dim, dtype=dtype)
    attend = fast_attend.fast_attend if fast else kernels.attend_portable
    view = _view(keys, values, dtype)
    if waiting:
        rings = (view.tail_keys, view.tail_values)
        states = [torch.zeros_like(ring[:, :, :1]) for ring in rings]
        view = view.with_tail(0, 200, NewToken(states[0], states[1], rings, 199))
    attend(query, view, AttendOptions(scaling=0.1, is_causal=True, **options))


def attend_case(head_dim: int, key_bits: tuple[int, ...], value_bits: int, *, rows: int) -> Callable[[], None]:
    """Return a call of the fast kernel over keys in equal groups of channels, with ``rows`` query rows a KV head."""
    split = tuple((head_dim // len(key_bits), bits) for bits in key_bits)
    codecs = _pair(key_bits[0], value_bits, head_dim, split=split)
    return lambda: _attend(*codecs, rows=rows, fast=True)


def _quantize(keys: VectorCodec, values: VectorCodec) -> None:
    dense = [torch.zeros(1, 2, 256, codec.format.head_dim, dtype=torch.bfloat16) for codec in (keys, values)]
    out = torch.empty(2, 1, 2, keys.format.nbytes + values.format.nbytes, dtype=torch.uint8)
    kernels.quantize(dense[0], dense[1], out, keys, values, check=False)


def _dequantize(codec: VectorCodec) -> None:
    kernels.dequantize(torch.empty(2, codec.format.nbytes, dtype=torch.uint8), codec)


def _append(head_dim: int, tokens: int) -> None:
    fresh, ring = (torch.zeros(1, 2, count, head_dim, dtype=torch.bfloat16) for count in (tokens, 256))
    kernels.append(fresh, fresh, ring, ring, 0)


def build_cases() -> dict[str, Callable[[], None]]:
    """Return every case by name. The names are those of the budget file."""
    cases: dict[str, Callable[[], None]] = {}

    def add(name: str, operation: Callable[..., None], *arguments: Any, **options: Any) -> None:
        cases[name] = lambda: operation(*arguments, **options)

    even = {"split": ((64, 4), (64, 2))}
    _add_attend(add, even)
    for key_bits, head_dim in ((2, 64), (2, 128), (3, 128), (4, 128), (8, 128), (4, 80), (4, 256)):
        pair = _pair(key_bits, key_bits, head_dim)
        add(f"quantize-k{key_bits}v{key_bits}-d{head_dim}", _quantize, *pair)
    for head_dim in (128, 256):
        add(f"quantize-prod3v2-d{head_dim}", _quantize, *_pair(2, 2, head_dim, kind="prod"))
        add(f"quantize-qjl-group2-d{head_dim}", _quantize, *_pair(1, 2, head_dim, kind="qjl", values="group"))
    add("quantize-split3v2-d128", _quantize, *_pair(3, 2, 128, **even))
    add("quantize-exact8-k4v4-d128", _quantize, *_guarded(128, (120, 4), values=4))
    add("quantize-exact8-split3v2-d128", _quantize, *_guarded(128, (56, 4), (64, 2), values=2))
    add("dequantize-k3-d128", _dequantize, _pair(3, 3, 128)[0])
    add("dequantize-v4-d256", _dequantize, _pair(4, 4, 256)[1])
    add("dequantize-prod3-d128", _dequantize, _pair(2, 2, 128, kind="prod")[0])
    add("dequantize-exact8-split3-d128", _dequantize, _guarded(128, (56, 4), (64, 2), values=2)[0])
    add("dequantize-group2-d256", _dequantize, _pair(2, 2, 256, values="group")[1])
    add("dequantize-qjl-d256", _dequantize, _pair(1, 2, 256, kind="qjl")[0])
    for tokens in (1, 64):
        add(f"append-d128-t{tokens}", _append, 128, tokens)
    return cases


def _add_attend(add: Callable[..., None], even: dict[str, Any]) -> None:
    """Add the cases of attend, portable and fast."""
    for key_bits, value_bits in ((1, 1), (2, 2), (3, 2), (3, 3), (4, 4), (8, 8)):
        for head_dim in (64, 128, 256) if key_bits in (2, 4) else (128,):
            add(f"attend-k{key_bits}v{value_bits}-d{head_dim}", _attend, *_pair(key_bits, value_bits, head_dim))
    for head_dim in (80, 96, 112, 192):
        add(f"attend-k4v4-d{head_dim}", _attend, *_pair(4, 4, head_dim))
    add("attend-prod3v2-d128", _attend, *_pair(2, 2, 128, kind="prod"))
    add("attend-split3v2-d128", _attend, *_pair(3, 2, 128, **even))
    add("attend-exact8-k4v4-d128", _attend, *_guarded(128, (120, 4), values=4))
    add("attend-exact8-split3v2-d128", _attend, *_guarded(128, (56, 4), (64, 2), values=2))
    add("attend-prod3-group2-d128", _attend, *_pair(2, 2, 128, kind="prod", values="group"))
    add("attend-qjl-group4-d256", _attend, *_pair(1, 4, 256, kind="qjl", values="group"))
    for head_dim in (128, 256):
        add(f"attend-exact-d{head_dim}", _attend, *_exact(head_dim))
    add("attend-exact-d256-rows64", _attend, *_exact(256), rows=64)
    for name, options in {
        "rows16": {"rows": 16},
        "rows32": {"rows": 32},
        "rows64": {"rows": 64},
        "mask": {"mask": torch.zeros(1, 1, 1, 716)},
        "softcap-window": {"softcap": 30.0, "sliding_window": 300},
        "sink-logits": {"sink_logits": torch.zeros(8)},
        "fp32": {"dtype": torch.float32},
    }.items():
        add(f"attend-k4v4-d128-{name}", _attend, *_pair(4, 4, 128), **options)
    for rows in (32, 64):
        add(f"attend-k4v4-d256-rows{rows}", _attend, *_pair(4, 4, 256), rows=rows)
    full = {"dtype": torch.float32}
    add("attend-k4v4-d256-rows64-fp32", _attend, *_pair(4, 4, 256), rows=64, **full)
    add("attend-exact-d256-rows64-fp32", _attend, *_exact(256, torch.float32), rows=64, **full)
    add("attend-prod3-group2-d256-fp32", _attend, *_pair(2, 2, 256, kind="prod", values="group"), **full)
    for key_bits, value_bits in ((2, 2), (3, 3), (4, 4)):
        add(f"fast-k{key_bits}v{value_bits}-d128", _attend, *_pair(key_bits, value_bits, 128), fast=True)
    add("fast-split3v2-d128", _attend, *_pair(3, 2, 128, **even), fast=True)
    for head_dim in (64, 128, 256):
        add(f"fast-prod3v2-d{head_dim}", _attend, *_pair(2, 2, head_dim, kind="prod"), fast=True)
    add("fast-k4v4-d128-waiting", _attend, *_pair(4, 4, 128), fast=True, waiting=True)
    add("fast-k4v4-d64", _attend, *_pair(4, 4, 64), fast=True)
    add("fast-k4v4-d256", _attend, *_pair(4, 4, 256), fast=True)
    add("fast-k4v4-d128-rows16", _attend, *_pair(4, 4, 128), rows=16, fast=True)
    shaped: dict[str, dict[str, Any]] = {
        "mask": {"mask": torch.ones(1, 1, 1, 716, dtype=torch.bool)},
        "head-mask": {"mask": torch.ones(1, 8, 1, 716, dtype=torch.bool)},
        "float-mask": {"mask": torch.zeros(1, 1, 1, 716)},
        "window": {"sliding_window": 300},
        "softcap": {"softcap": 30.0},
    }
    for name, options in shaped.items():
        add(f"fast-k4v4-d128-{name}", _attend, *_pair(4, 4, 128), fast=True, **options)
    add("fast-k2v2-d128-mask", _attend, *_pair(2, 2, 128), fast=True, **shaped["mask"])
