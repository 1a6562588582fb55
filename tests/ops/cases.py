"""Codecs, stores and oracles that the kernel tests share."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_turboquant.codebook import load_codebook
from hf_turboquant.layout import BLOCK_TOKENS, ChannelGroup, VectorFormat
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
    """Return a codec with the real codebooks and rotation; bits 16 is ``exact``, ``split`` is ((size, bits), ...)."""
    if bits == 16:
        return VectorCodec(
            VectorFormat("exact", head_dim, exact_dtype=exact_dtype, transposed=transposed), VectorTables()
        )
    groups, start = [], 0
    for size, width in split or ((head_dim, bits),):
        groups.append(ChannelGroup(start, size, width))
        start += size
    fmt = VectorFormat(
        kind, head_dim, tuple(groups), transposed=transposed, centered=centered, scale=scale, norm_dtype=norm_dtype
    )
    books = [load_codebook(group.size, group.bits) for group in groups]
    sizes = tuple(size for size, _ in split) if split else None
    prod = kind == "prod"
    tables = VectorTables(
        tuple(book.centroids.to(device) for book in books),
        tuple(book.boundaries.to(device) for book in books),
        build_rotation("hadamard", head_dim, 0, sizes).to(device),
        build_projection("gaussian", head_dim, 0).to(device) if prod else None,
        projection_scale("gaussian", head_dim) if prod else 0.0,
        None if order is None else order.to(device),
    )
    return VectorCodec(fmt, tables)


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


def assert_twice_eager(out: torch.Tensor, query: torch.Tensor, view: KVView, options: AttendOptions) -> None:
    """Check that the error against float64 is at most twice that of eager attention in the dtype of the query."""
    keys, values = dense_tokens(view, torch.float64)
    truth = eager(query.double(), keys, values, options)
    plain = eager(query, keys.to(query.dtype), values.to(query.dtype), options)
    allowed = 2 * (plain - truth).abs().max() + 2**-22 * truth.abs().max()
    error = (out - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, twice eager is {allowed:.3g}"
