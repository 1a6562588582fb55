"""The dequantize kernel against the reference, and the formats that no kernel has a tile for."""

from __future__ import annotations

import pytest
import torch

from hf_turboquant.errors import ShapeError
from hf_turboquant.layout import VectorFormat
from hf_turboquant.ops import VectorCodec, VectorTables, reference
from tests.ops.cases import DEVICE, FORMATS, fits, make_codec, make_vectors

pytest.importorskip("triton")
from hf_turboquant.ops import triton as kernels


@pytest.mark.parametrize("sizes", [(20, 44), (16, 16, 32)], ids=["not-of-8", "three-groups"])
def test_refuses_formats_without_a_tile(sizes: tuple[int, ...]) -> None:
    codec = make_codec(2, 64, split=tuple((size, 2) for size in sizes))
    with pytest.raises(ShapeError, match="backend='reference'"):
        kernels.dequantize(torch.zeros(1, codec.format.nbytes, dtype=torch.uint8), codec)


def test_refuses_wide_heads() -> None:
    codec = VectorCodec(VectorFormat("exact", 512, exact_dtype=torch.float16), VectorTables())
    with pytest.raises(ShapeError, match="at most 256 channels, got head_dim 512"):
        kernels.dequantize(torch.zeros(1, codec.format.nbytes, dtype=torch.uint8), codec)


@pytest.mark.parametrize("case", FORMATS)
def test_dequantize_matches_reference(case: str) -> None:
    bits, head_dim, options = FORMATS[case]
    transposed = case in ("d80", "3-bit", "split") or not fits(case, transposed=False)
    codec = make_codec(bits, head_dim, transposed=transposed, **options)
    vectors = make_vectors(1, 2, 128, head_dim, torch.float32)
    packed = reference.quantize(vectors, codec)
    # a slice of wider records, as the key part of an arena is
    wide = torch.zeros(1, 2, codec.format.nbytes + 32, dtype=torch.uint8, device=DEVICE)
    wide[..., : codec.format.nbytes] = packed
    found = kernels.dequantize(wide[..., : codec.format.nbytes], codec)
    want = reference.dequantize(packed, codec)
    # the sums of prod and qjl round by what they sum
    torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6 * max(float(want.abs().max()), 1.0))
