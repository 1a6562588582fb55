"""Codecs, stores and oracles that the kernel tests share."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_turboquant.codebook import load_codebook
from hf_turboquant.layout import BLOCK_TOKENS, EXACT_BITS, ChannelGroup, VectorFormat
from hf_turboquant.ops import AttendOptions, KVView, VectorCodec, VectorTables, reference
from hf_turboquant.rotation import build_projection, build_rotation, projection_scale

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the kernels run: on a GPU if there is one, else under the interpreter."""


def channel_orders(heads: int, head_dim: int) -> torch.Tensor:
    """Return a random order of the channels for every head."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(head_dim, generator=generator) for _ in range(heads)])


FORMATS: dict[str, tuple[int, int, dict[str, object]]] = {
    "1-bit": (1, 64, {}),
    "2-bit": (2, 64, {}),
    "3-bit": (3, 64, {}),
    "4-bit": (4, 64, {}),
    "8-bit": (8, 64, {}),
    "centered": (4, 64, {"centered": True}),
    "norm": (2, 64, {"scale": "norm"}),
    "unbiased": (3, 64, {"scale": "unbiased"}),
    "bf16-norms": (2, 64, {"norm_dtype": torch.bfloat16}),
    "fp32-norms": (2, 64, {"norm_dtype": torch.float32}),
    "prod": (2, 64, {"kind": "prod"}),
    "prod-centered": (1, 64, {"kind": "prod", "centered": True}),
    "split": (3, 64, {"split": ((32, 4), (32, 2)), "centered": True}),
    "split-prod": (2, 64, {"split": ((16, 3), (48, 2)), "kind": "prod"}),
    "order": (2, 64, {"split": ((32, 3), (32, 1)), "order": channel_orders(2, 64)}),
    "exact-group": (4, 64, {"split": ((8, 16), (56, 4)), "centered": True, "order": channel_orders(2, 64)}),
    "exact-group-split": (3, 64, {"split": ((8, 16), (24, 4), (32, 2)), "exact_dtype": torch.bfloat16}),
    "group": (2, 64, {"kind": "group"}),
    "group-4-bit": (4, 96, {"kind": "group", "norm_dtype": torch.bfloat16}),
    "qjl": (1, 64, {"kind": "qjl"}),
    "qjl-centered": (1, 80, {"kind": "qjl", "centered": True}),
    "d16": (4, 16, {"centered": True}),
    "d32": (3, 32, {}),
    "d80": (3, 80, {"centered": True}),
    "d96": (2, 96, {}),
    "d112": (4, 112, {}),
    "d128": (2, 128, {"centered": True}),
    "d192": (4, 192, {}),
    "d256": (1, 256, {"kind": "prod"}),
}
"""Bits, head_dim and options of :func:`make_codec`: one of each kind, and every head_dim."""

KEYS_ONLY = ("prod", "qjl")
"""Kinds that values do not have."""

VALUES_ONLY = ("group",)
"""Kinds that keys do not have."""


def fits(case: str, *, transposed: bool) -> bool:
    """Whether keys (or values, transposed) can have a format of :data:`FORMATS`."""
    options = FORMATS[case][2]
    exact = any(bits == EXACT_BITS for _, bits in options.get("split", ()))
    if transposed:
        return options.get("kind") not in KEYS_ONLY and not exact
    return options.get("kind") not in VALUES_ONLY


def make_codec(
    bits: int,
    head_dim: int = 64,
    *,
    kind: str = "mse",
    transposed: bool = False,
    centered: bool = False,
    scale: str = "matched",
    norm_dtype: torch.dtype = torch.float16,
    split: tuple[tuple[int, int], ...] = (),
    order: torch.Tensor | None = None,
    exact_dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
) -> VectorCodec:
    """Return a codec with the real codebooks and rotation; bits 16 is ``exact``, ``split`` is ((size, bits), ...).

    A part of 16 bits, which comes first, is kept in ``exact_dtype``.
    """
    if bits == 16:
        return VectorCodec(
            VectorFormat("exact", head_dim, exact_dtype=exact_dtype, transposed=transposed), VectorTables()
        )
    groups, start = [], 0
    for size, width in split or ((head_dim, bits),):
        groups.append(ChannelGroup(start, size, width))
        start += size
    fmt = VectorFormat(
        kind,
        head_dim,
        () if kind == "qjl" else tuple(groups),
        transposed=transposed,
        centered=centered,
        scale=scale,
        norm_dtype=norm_dtype,
        exact_dtype=exact_dtype if any(group.bits == EXACT_BITS for group in groups) else None,
    )
    signs = kind in ("prod", "qjl")
    tables = VectorTables(
        projection=build_projection("gaussian", head_dim, 0).to(device) if signs else None,
        projection_scale=projection_scale("gaussian", head_dim) if signs else 0.0,
        channel_order=None if order is None else order.to(device),
    )
    if kind in ("group", "qjl"):
        return VectorCodec(fmt, tables)
    tables = _with_books(tables, groups, device)
    if kind == "prod":
        tables = tables.with_projection(tables.projection, tables.projection_scale)
    return VectorCodec(fmt, tables)


def _with_books(tables: VectorTables, groups: list[ChannelGroup], device: torch.device) -> VectorTables:
    """Add codebooks and a rotation, neither for channels of 16 bits."""
    none = torch.empty(0)
    sizes = [group.size for group in groups if group.bits != EXACT_BITS]
    books = [load_codebook(group.size, group.bits) if group.bits != EXACT_BITS else None for group in groups]
    rotation = build_rotation("hadamard", sum(sizes), 0, tuple(sizes) if len(groups) > 1 else None)
    kept = sum(group.size for group in groups) - sum(sizes)
    return replace(
        tables,
        centroids=tuple((book.centroids if book else none).to(device) for book in books),
        boundaries=tuple((book.boundaries if book else none).to(device) for book in books),
        rotation=(torch.block_diag(torch.eye(kept), rotation) if kept else rotation).to(device),
    )


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers, the same on every device."""
    return torch.randn(shape).to(device=DEVICE, dtype=dtype)


def draw_uniform(*shape: int) -> torch.Tensor:
    """Return numbers from 0 to 1, the same on every device."""
    return torch.rand(shape).to(DEVICE)


def make_vectors(
    batch: int, heads: int, tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device = DEVICE
) -> torch.Tensor:
    """Return vectors with a common mean, channels of different size and norms from 0.2 to 5."""
    channels = torch.linspace(0.3, 2.0, head_dim)
    norms = torch.exp2(torch.rand(batch, heads, tokens, 1) * 4 - 2)
    vectors = torch.randn(batch, heads, tokens, head_dim) * channels * norms + 0.5 * torch.randn(
        batch, heads, 1, head_dim
    )
    return vectors.to(device=device, dtype=dtype)


def reference_records(
    keys: torch.Tensor, values: torch.Tensor, key_codec: VectorCodec, value_codec: VectorCodec
) -> torch.Tensor:
    """Quantize ``(batch, heads, blocks * 128, head_dim)`` with the reference: ``(blocks, batch, heads, bytes)``."""
    parts = []
    for vectors, codec in ((keys, key_codec), (values, value_codec)):
        blocks = vectors.unflatten(2, (vectors.shape[2] // BLOCK_TOKENS, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4)
        parts.append(reference.quantize(blocks, codec))
    return torch.cat(parts, dim=-1)


def make_view(
    keys: VectorCodec,
    values: VectorCodec,
    *,
    batch: int = 1,
    heads: int = 1,
    sinks: int = 3,
    arenas: tuple[int, ...] = (1,),
    num_blocks: int | None = None,
    block_tokens: tuple[int, ...] | None = None,
    tail: tuple[int, int, int] = (5, 8, 6),
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
) -> KVView:
    """Return a view over random tokens; ``tail`` is (length, slots, start). Unused slots hold NaN, blocks ones."""
    dims = (keys.format.head_dim, values.format.head_dim)
    length, slots, start = tail
    exact = [make_vectors(batch, heads, sinks, dim, dtype, device) for dim in dims]
    rings = [torch.full((batch, heads, slots, dim), float("nan"), dtype=dtype, device=device) for dim in dims]
    used = (torch.arange(length, device=device) + start) % max(slots, 1)
    for ring, dim in zip(rings, dims):
        ring[:, :, used] = make_vectors(batch, heads, length, dim, dtype, device)
    num_blocks = sum(arenas) if num_blocks is None else num_blocks
    tensors, left = [], num_blocks
    for capacity in arenas:
        count = min(left, capacity)
        left -= count
        arena = torch.full((capacity, batch, heads, keys.format.nbytes + values.format.nbytes), 0xFF, dtype=torch.uint8)
        arena = arena.to(device)
        if count:
            dense = [make_vectors(batch, heads, count * BLOCK_TOKENS, dim, torch.float32, device) for dim in dims]
            arena[:count] = reference_records(dense[0], dense[1], keys, values)
        tensors.append(arena)
    return KVView(
        keys, values, exact[0], exact[1], tuple(tensors), num_blocks, block_tokens, rings[0], rings[1], start, length
    )


def dense_tokens(view: KVView, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values that the codes mean, ``(batch, heads, seq_len, head_dim)``, computed in ``dtype``."""
    split = view.record.value_offset
    found = []
    for codec, sinks, ring, keys in (
        (view.keys, view.sink_keys, view.tail_keys, True),
        (view.values, view.sink_values, view.tail_values, False),
    ):
        tables = codec.tables
        if codec.format.kind == "mse":
            tables = replace(tables, centroids=tuple(table.to(dtype) for table in tables.centroids))
        parts, left = [sinks.to(dtype)], view.num_blocks
        for arena in view.arenas:
            records = arena[: min(left, arena.shape[0])].permute(1, 2, 0, 3)
            left -= records.shape[2]
            packed = (records[..., :split] if keys else records[..., split:]).contiguous()
            rotated = reference.dequantize(packed, VectorCodec(codec.format, tables)).flatten(2, 3).to(dtype)
            if tables.rotation is not None:
                rotated = rotated @ tables.rotation.to(dtype).T
                if tables.channel_order is not None:
                    order = tables.channel_order.argsort(dim=-1)[:, None, :].expand(rotated.shape)
                    rotated = rotated.gather(-1, order)
            parts.append(rotated)
        if view.block_tokens is not None:
            kept = [128 * i + t for i, count in enumerate(view.block_tokens) for t in range(count)]
            parts = [parts[0], torch.cat(parts[1:], dim=2)[:, :, kept]]
        parts += [ring[:, :, slots].to(dtype) for slots in view.tail_slices()]
        found.append(torch.cat(parts, dim=2))
    return found[0], found[1]


def eager(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttendOptions) -> torch.Tensor:
    """Attend to dense tokens without any mask, in the dtype of the arguments."""
    group = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(group, 1).transpose(-1, -2) * options.scaling
    return torch.softmax(scores, dim=-1) @ values.repeat_interleave(group, 1)


def score_rounding(query: torch.Tensor, view: KVView, options: AttendOptions) -> float:
    """Return the relative change of a weight when float32 rounds the largest score four times: the floor of each rule.

    A weight is the exponential of a score, so that an absolute error of the score is a relative error of the weight,
    and of the result. Rounding a score ``s`` to float32 moves it by up to ``2**-24 |s|``, and a kernel does it four
    times: the sum of its products, the factor that scales it, the scaled score, and what is left of it after the peak.
    The error of eager attention in one small draw, a maximum of few numbers, is often several times less by luck: that
    of the reference on a CPU was up to five times as large.
    """
    keys, _ = dense_tokens(view, torch.float64)
    group = query.shape[1] // keys.shape[1]
    scores = query.double() @ keys.repeat_interleave(group, 1).transpose(-1, -2) * options.scaling
    largest = float(scores.abs().max()) if scores.numel() else 0.0
    return 4 * 2.0**-24 * (1 + min(largest, options.softcap or largest))


def assert_twice_eager(out: torch.Tensor, query: torch.Tensor, view: KVView, options: AttendOptions) -> None:
    """Check that the error against float64 is at most twice that of eager attention in the dtype of the query.

    To that comes :func:`score_rounding` of the largest output, which only float32 is near to.
    """
    keys, values = dense_tokens(view, torch.float64)
    truth = eager(query.double(), keys, values, options)
    plain = eager(query, keys.to(query.dtype), values.to(query.dtype), options)
    floor = score_rounding(query, view, options) * truth.abs().max()
    allowed = 2 * (plain - truth).abs().max() + floor
    error = (out - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, twice eager is {allowed - floor:.3g} and rounding {floor:.3g}"


def assert_equals_reference(out: torch.Tensor, query: torch.Tensor, view: KVView, options: AttendOptions) -> None:
    """Check a float32 result against the reference in float32: both may be off by :func:`score_rounding`."""
    want = reference.attend(query, view, options)
    assert out.shape == want.shape
    assert out.dtype == want.dtype
    allowed = 2 * score_rounding(query, view, options) * want.abs().max() if want.numel() else 0.0
    error = (out - want).abs().max() if want.numel() else 0.0
    assert error <= allowed, f"differs from the reference by {error:.3g}, rounding explains {allowed:.3g}"
