"""The published ladder of decode steps over a compressed cache, rebuilt: what each rung costs on the machine at hand.

``v1`` dequantizes every key, back to the original basis, and multiplies; ``v4`` dequantizes and calls torch's fused
attention; ``v6`` is one Triton launch over codes and recent tokens that gathers a centroid for every code. The codes
are those of the preset ``thor-k3v2``: 2 bits and a sign for keys (TurboQuant_prod), 2 bits between least and largest of
32 channels for values, no sinks, the newest tokens exact. ``v6-split`` is the same inner loop, shared by all
multiprocessors and merged in a second launch. The rungs between (v2, v3, v5) changed which launches there are, not what
is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from evals.speed_kernels import gather_attend, multiprocessors
from hf_turboquant.layout import VectorFormat
from hf_turboquant.ops import KVView
from hf_turboquant.ops.reference.sections import read_codes, read_plain
from hf_turboquant.packing import fold_codes, pack_codes, unpack_codes

FORMAT: Final = "thor-k3v2"
SPLITS_PER_MULTIPROCESSOR: Final = 8
BYTES_PER_ELEMENT: Final = 28
"""Bytes at a time for each element of the keys while ``v1`` or ``v4`` dequantizes: codes, levels, signs, products."""


@dataclass(frozen=True)
class LadderStore:
    """One layer as the ladder keeps it, token by token.

    Attributes:
        key_codes: ``(batch, num_kv_heads, tokens, head_dim / 4)`` uint8, four codes a byte.
        key_signs: ``(..., head_dim / 8)`` uint8.
        norms: ``(batch, num_kv_heads, tokens)`` float16.
        sign_norms: The same: norm of what the codes miss.
        value_codes: ``(..., head_dim / 4)`` uint8.
        value_bytes: ``(..., head_dim)`` uint8: the codes unpacked once, when the value was stored.
        value_scales: ``(..., head_dim / 32)`` float16.
        value_zeros: The same.
        recent_keys: ``(batch, num_kv_heads, recent, head_dim)``.
        recent_values: The same.
        centroids: ``(4,)`` float32, ascending.
        packed_levels: ``(4,)`` float32, centroid of each pair of bits as it lies in a byte.
        sign_levels: ``(2,)`` float32.
        rotation: ``(head_dim, head_dim)`` float32.
        projection: The same.
        query_map: ``(head_dim, 2 * head_dim)`` float32: a query times this is rotated, and projected beside.
        sign_scale: Factor of the sign term.
    """

    key_codes: torch.Tensor
    key_signs: torch.Tensor
    norms: torch.Tensor
    sign_norms: torch.Tensor
    value_codes: torch.Tensor
    value_bytes: torch.Tensor
    value_scales: torch.Tensor
    value_zeros: torch.Tensor
    recent_keys: torch.Tensor
    recent_values: torch.Tensor
    centroids: torch.Tensor
    packed_levels: torch.Tensor
    sign_levels: torch.Tensor
    rotation: torch.Tensor
    projection: torch.Tensor
    query_map: torch.Tensor
    sign_scale: float

    def repeat(self, tokens: int) -> LadderStore:
        """Return a store of ``tokens`` compressed tokens: these again and again."""
        index = torch.arange(tokens, device=self.norms.device) % self.norms.shape[2]
        names = [field.name for field in fields(self)[:8]]
        return replace(self, **{name: getattr(self, name)[:, :, index].contiguous() for name in names})

    def bytes_read(self, rung: str) -> int:
        """Bytes of the store that one step of a rung reads."""
        values = self.value_bytes if rung.startswith("v6") else self.value_codes
        parts = (
            self.key_codes, self.key_signs, self.norms, self.sign_norms, values, self.value_scales, self.value_zeros,
            self.recent_keys, self.recent_values,
        )  # fmt: skip
        return sum(part.numel() * part.element_size() for part in parts)


def ladder_store(view: KVView) -> LadderStore:
    """Take a layer that the preset ``thor-k3v2`` stored apart, token by token."""
    packed = view.arenas[0][: view.num_blocks].permute(1, 2, 0, 3)
    keys, values = packed[..., : view.record.value_offset], packed[..., view.record.value_offset :]
    key_format, value_format, tables = view.keys.format, view.values.format, view.keys.tables
    assert tables.rotation is not None
    assert tables.projection is not None
    signs = read_codes(keys, key_format.sections["signs"]).to(torch.uint8).flatten(2, 3)
    every_code = torch.arange(4, dtype=torch.uint8, device=packed.device)
    value_codes = _token_codes(values, value_format)
    ring = view.tail_slices()
    recent = [torch.cat([tail[:, :, part] for part in ring], dim=2) for tail in (view.tail_keys, view.tail_values)]
    return LadderStore(
        key_codes=_pack_rows(_token_codes(keys, key_format), 2),
        key_signs=_pack_rows(signs, 1),
        norms=_token_floats(keys, key_format, "norms").squeeze(-1),
        sign_norms=_token_floats(keys, key_format, "residual_norms").squeeze(-1),
        value_codes=_pack_rows(value_codes, 2),
        value_bytes=value_codes,
        value_scales=_token_floats(values, value_format, "scales"),
        value_zeros=_token_floats(values, value_format, "zeros"),
        recent_keys=recent[0].contiguous(),
        recent_values=recent[1].contiguous(),
        centroids=tables.centroids[0],
        packed_levels=tables.centroids[0][fold_codes(every_code, 2).long()],
        sign_levels=torch.tensor([-1.0, 1.0], device=packed.device),
        rotation=tables.rotation,
        projection=tables.projection,
        query_map=torch.cat([tables.rotation, tables.rotation @ tables.projection.T], dim=1),
        sign_scale=tables.projection_scale,
    )


def _token_codes(packed: torch.Tensor, fmt: VectorFormat) -> torch.Tensor:
    codes = read_codes(packed, fmt.sections["codes0"], transposed=fmt.transposed)
    return codes.to(torch.uint8).flatten(2, 3).contiguous()


def _token_floats(packed: torch.Tensor, fmt: VectorFormat, name: str) -> torch.Tensor:
    """Return a section of ``(rows, 128)`` as ``(batch, num_kv_heads, tokens, rows)``."""
    return read_plain(packed, fmt.sections[name]).transpose(-1, -2).flatten(2, 3).contiguous()


def _pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return pack_codes(codes.unsqueeze(-2), bits)


# the rungs


def dequantize_keys(store: LadderStore) -> torch.Tensor:
    """Return the compressed keys in the original basis, float32 ``(batch, num_kv_heads, tokens, head_dim)``."""
    head_dim = store.rotation.shape[0]
    codes = unpack_codes(store.key_codes, 2, 1, head_dim).squeeze(-2)
    signs = unpack_codes(store.key_signs, 1, 1, head_dim).squeeze(-2).float() * 2 - 1
    rotated = store.centroids[codes.int()] * store.norms.float()[..., None]
    rotated += (signs @ store.projection) * (store.sign_scale * store.sign_norms.float())[..., None]
    return rotated @ store.rotation.T


def dequantize_values(store: LadderStore) -> torch.Tensor:
    """Return the compressed values, float32 ``(batch, num_kv_heads, tokens, head_dim)``."""
    codes = unpack_codes(store.value_codes, 2, 1, store.rotation.shape[0]).squeeze(-2)
    grouped = codes.unflatten(-1, (store.value_scales.shape[-1], -1)).float()
    return (grouped * store.value_scales.float()[..., None] + store.value_zeros.float()[..., None]).flatten(-2)


def _dense(store: LadderStore, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.cat([dequantize_keys(store).to(dtype), store.recent_keys], dim=2)
    return keys, torch.cat([dequantize_values(store).to(dtype), store.recent_values], dim=2)


def dequantize_then_matmul(query: torch.Tensor, store: LadderStore) -> torch.Tensor:
    """v1: dequantize all, then one product for the scores, a softmax, and one product for the result."""
    keys, values = _dense(store, query.dtype)
    grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    scores = grouped @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ values).flatten(1, 2).unsqueeze(2)


def dequantize_then_sdpa(query: torch.Tensor, store: LadderStore) -> torch.Tensor:
    """v4: dequantize all, then torch's fused attention."""
    keys, values = _dense(store, query.dtype)
    return scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def gather(query: torch.Tensor, store: LadderStore, *, splits: int = 1) -> torch.Tensor:
    """v6: one product for the query, then one launch (two with ``splits``) over codes and recent tokens."""
    return gather_attend(
        query,
        query.float() @ store.query_map,
        (store.key_codes, store.key_signs, store.norms, store.sign_norms),
        (store.value_bytes, store.value_scales, store.value_zeros),
        (store.packed_levels, store.sign_levels),
        (store.recent_keys, store.recent_values),
        sign_scale=store.sign_scale,
        splits=splits,
    )


def gather_everywhere(query: torch.Tensor, store: LadderStore) -> torch.Tensor:
    """v6-split: as many programs as keep every multiprocessor busy."""
    programs = SPLITS_PER_MULTIPROCESSOR * multiprocessors(query.device)
    return gather(query, store, splits=max(programs // (query.shape[0] * query.shape[1]), 1))


RUNGS: Final[Mapping[str, Callable[[torch.Tensor, LadderStore], torch.Tensor]]] = MappingProxyType(
    {
        "v1": dequantize_then_matmul,
        "v4": dequantize_then_sdpa,
        "v6": gather,
        "v6-split": gather_everywhere,
    }
)
"""A decode step by rung: query ``(batch, num_q_heads, 1, head_dim)`` and store to the result in the query's dtype."""
