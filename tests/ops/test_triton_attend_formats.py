"""The attend kernel over every format, against float64 of the same codes: at most twice the error of eager."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from hf_turboquant.ops import AttendOptions, VectorCodec, reference
from tests.ops.cases import (
    DEVICE,
    assert_twice_eager,
    channel_orders,
    draw,
    make_codec,
    make_vectors,
    make_view,
)

pytest.importorskip("triton")
from hf_turboquant.ops import triton as kernels
from hf_turboquant.ops.triton import launch, word_tiles


def _pair(
    key_bits: int, value_bits: int, key_dim: int = 64, value_dim: int = 64, **both
) -> tuple[VectorCodec, VectorCodec]:
    return make_codec(key_bits, key_dim, **both), make_codec(value_bits, value_dim, transposed=True, **both)


def _split(*parts: tuple[int, int], transposed: bool = False, **options) -> VectorCodec:
    return make_codec(2, sum(size for size, _ in parts), split=parts, transposed=transposed, **options)


PAIRS = {
    "k1v1": lambda: _pair(1, 1),
    "k2v2": lambda: _pair(2, 2),
    "k3v2": lambda: _pair(3, 2),
    "k3v3": lambda: _pair(3, 3, centered=True),
    "k4v4": lambda: _pair(4, 4, centered=True),
    "k8v8": lambda: _pair(8, 8, centered=True),
    "k16v16": lambda: _pair(16, 16),
    "k16v3": lambda: _pair(16, 3),
    "k4v16": lambda: _pair(4, 16),
    "prod": lambda: (make_codec(2, kind="prod", centered=True), make_codec(2, transposed=True)),
    "split-keys": lambda: (_split((32, 4), (32, 2), centered=True), make_codec(2, transposed=True)),
    "split-values": lambda: (make_codec(2), _split((16, 4), (48, 2), transposed=True, centered=True)),
    "order": lambda: (
        _split((32, 3), (32, 2), order=channel_orders(1, 64)),
        make_codec(2, transposed=True, order=channel_orders(1, 64).flip(0)),
    ),
    "bf16-norms": lambda: _pair(2, 2, norm_dtype=torch.bfloat16, centered=True),
    "fp32-norms": lambda: _pair(4, 4, norm_dtype=torch.float32),
    "exact-group": lambda: (
        _split((8, 16), (56, 4), centered=True, order=channel_orders(1, 64), exact_dtype=torch.bfloat16),
        make_codec(4, transposed=True),
    ),
    "exact-group-split": lambda: (
        _split((8, 16), (24, 4), (32, 2), centered=True, order=channel_orders(1, 64), exact_dtype=torch.float16),
        make_codec(2, transposed=True),
    ),
    "exact-group-odd-size": lambda: (_split((20, 16), (32, 3)), make_codec(2, transposed=True)),
    "group-values": lambda: (make_codec(2), make_codec(2, transposed=True, kind="group")),
    "group-values-4-bit": lambda: (
        make_codec(4, 96),
        make_codec(4, 96, transposed=True, kind="group", norm_dtype=torch.float32),
    ),
    "prod-group": lambda: (make_codec(2, kind="prod"), make_codec(2, transposed=True, kind="group")),
    "qjl": lambda: (make_codec(1, kind="qjl"), make_codec(4, transposed=True)),
    "qjl-centered": lambda: (make_codec(1, 80, kind="qjl", centered=True), make_codec(2, 80, transposed=True)),
    "d32": lambda: _pair(3, 3, 32, 32),
    "d80": lambda: _pair(3, 3, 80, 80),
    "d96": lambda: _pair(2, 2, 96, 96),
    "d112": lambda: _pair(4, 4, 112, 112, centered=True),
    "d128": lambda: _pair(3, 2, 128, 128),
    "d192-d128": lambda: _pair(4, 3, 192, 128),
    "d256": lambda: _pair(4, 4, 256, 256),
}


@pytest.mark.parametrize("case", PAIRS)
def test_twice_eager(case: str) -> None:
    keys, values = PAIRS[case]()
    view = make_view(keys, values)
    query = draw(1, 3, 1, keys.format.head_dim)
    options = AttendOptions(scaling=keys.format.head_dim**-0.5)
    assert_twice_eager(kernels.attend_portable(query, view, options), query, view, options)


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="compiled kernels keep the order of the Triton they are compiled with"
)
@pytest.mark.parametrize("early", [True, False], ids=["triton-3.6", "later"])
@pytest.mark.parametrize("case", ["k1v1", "k3v3", "k4v4", "k8v8", "split-keys", "prod", "d256"])
def test_order_of_each_compiler(case: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the order in which codes are laid out for the products."""
    monkeypatch.setattr(word_tiles, "EARLY", tl.constexpr(early))
    keys, values = PAIRS[case]()
    view = make_view(keys, values)
    query = draw(1, 9, 1, keys.format.head_dim)
    options = AttendOptions(scaling=keys.format.head_dim**-0.5)
    assert_twice_eager(kernels.attend_portable(query, view, options), query, view, options)


HALF_PRECISION = ["k2v2", "k4v4", "k16v16", "exact-group", "exact-group-split", "prod-group", "group-values", "qjl"]


@pytest.mark.parametrize("case", HALF_PRECISION)
def test_twice_eager_float16(case: str) -> None:
    keys, values = PAIRS[case]()
    view = make_view(keys, values, dtype=torch.float16)
    query = draw(1, 4, 2, 64, dtype=torch.float16)
    options = AttendOptions(scaling=0.125)
    out = kernels.attend_portable(query, view, options)
    assert out.dtype == torch.float16
    assert_twice_eager(out, query, view, options)


@pytest.mark.parametrize("case", ["k2v2", "k3v3", "k8v8", "prod", "bf16-norms", "exact-group", "prod-group"])
def test_twice_eager_with_float16_products(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU multiplies in float16 is multiplied in float16 here."""
    monkeypatch.setattr(launch, "product_dtype", lambda dtype: tl.float16)
    keys, values = PAIRS[case]()
    view = make_view(keys, values, dtype=torch.float16)
    query = draw(1, 4, 1, 64, dtype=torch.float16)
    options = AttendOptions(scaling=0.125)
    assert_twice_eager(kernels.attend_portable(query, view, options), query, view, options)


def test_norms_beyond_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights times norms stay in the range of float16 products when the norms themselves do not."""
    monkeypatch.setattr(launch, "product_dtype", lambda dtype: tl.float16)
    keys, values = make_codec(4), make_codec(4, transposed=True, norm_dtype=torch.float32, centered=True)
    view = make_view(keys, values, sinks=0, tail=(0, 8, 0))
    vectors = make_vectors(1, 1, 128, 64, torch.float32)
    view.arenas[0][..., : keys.format.nbytes] = reference.quantize(vectors[None], keys)
    view.arenas[0][..., keys.format.nbytes :] = reference.quantize(vectors[None] * 1e6, values)
    query, options = draw(1, 2, 1, 64), AttendOptions(scaling=0.125)
    out, want = kernels.attend_portable(query, view, options), reference.attend(query, view, options)
    assert (out - want).abs().max() <= 2e-3 * want.abs().max()
