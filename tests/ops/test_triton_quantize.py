"""The quantize kernel against the reference: codes may differ only where a coordinate lies on a boundary."""

from __future__ import annotations

import pytest
import torch

from hf_turboquant.errors import ValueRangeError
from hf_turboquant.layout import EXACT_BITS, VectorFormat
from hf_turboquant.ops import VectorCodec, reference
from hf_turboquant.packing import unpack_codes
from tests.ops.cases import DEVICE, FORMATS, fits, make_codec, make_vectors, reference_records

pytest.importorskip("triton")
from hf_turboquant.ops import triton as kernels

ULP = 2.0**-24
"""Rounding of a coordinate of a unit vector just below 1."""


KINDS = [
    pytest.param(case, transposed, id=f"{'values' if transposed else 'keys'}-{case}")
    for case in FORMATS
    for transposed in (False, True)
    if fits(case, transposed=transposed)
]


@pytest.mark.parametrize(("case", "transposed"), KINDS)
def test_matches_reference(case: str, transposed: bool) -> None:
    bits, head_dim, options = FORMATS[case]
    dtype = torch.float16 if case in ("2-bit", "d128") else torch.float32
    codec = make_codec(bits, head_dim, transposed=transposed, **options)
    other = make_codec(16, 16, exact_dtype=torch.float16)
    vectors = make_vectors(1, 2, 128, head_dim, dtype)
    small = make_vectors(1, 2, 128, 16, torch.float16)
    pair, codecs = ((small, vectors), (other, codec)) if transposed else ((vectors, small), (codec, other))
    record = codec.format.nbytes + other.format.nbytes
    guarded = torch.full((3, 1, 2, record), 0xA5, dtype=torch.uint8, device=DEVICE)
    kernels.quantize(*pair, guarded[1:2], *codecs)
    assert (guarded[::2] == 0xA5).all(), "wrote outside of its records"
    got = guarded[1:2]
    want = reference_records(*pair, *codecs)
    first = codecs[0].format.nbytes
    mine, theirs = (got[..., first:], want[..., first:]) if transposed else (got[..., :first], want[..., :first])
    exact, expected = (got[..., :first], want[..., :first]) if transposed else (got[..., first:], want[..., first:])
    assert torch.equal(exact, expected)
    if codec.format.kind == "group":
        # nothing is summed, so that there is no rounding to differ by
        assert torch.equal(mine, theirs)
        return
    _check_part(mine[0], theirs[0], vectors, codec)


def _section(part: torch.Tensor, fmt: VectorFormat, name: str) -> torch.Tensor:
    section = fmt.sections[name]
    raw = part[..., section.offset : section.offset + section.nbytes].contiguous()
    if section.dtype is not None:
        return raw.view(section.dtype).unflatten(-1, (section.rows, section.count)).double()
    codes = unpack_codes(raw, section.bits, section.rows, section.count).int()
    return codes.transpose(-1, -2) if fmt.transposed and name != "signs" else codes


def _check_part(got: torch.Tensor, want: torch.Tensor, vectors: torch.Tensor, codec: VectorCodec) -> None:
    """Prove every difference to be one of rounding, with the mean that was stored and float64 for the rest."""
    fmt, tables = codec.format, codec.tables
    rotated = vectors.double()
    if tables.channel_order is not None:
        rotated = rotated.gather(-1, tables.channel_order[:, None, :].expand(rotated.shape))
    if tables.rotation is not None:
        rotated = rotated @ tables.rotation.double()
    spread = rotated.abs().amax()
    if fmt.centered:
        mean = _section(got, fmt, "mean")
        assert (mean - rotated.mean(dim=-2, keepdim=True)).abs().max() <= 2.0**-8 * mean.abs().max()
        rotated = rotated - mean
    residual = rotated.clone() if fmt.kind == "qjl" else torch.empty_like(rotated)
    for index, group in enumerate(fmt.groups):
        span = slice(group.start, group.start + group.size)
        part = rotated[..., span]
        if group.bits == EXACT_BITS:
            mine = _section(got, fmt, f"exact{index}")
            step = torch.finfo(fmt.exact_dtype).eps
            assert ((mine - part).abs() <= 0.5 * step * part.abs() + 4 * ULP * spread).all()
            residual[..., span] = 0.0
            continue
        unit = part / part.norm(dim=-1, keepdim=True)
        # what float32 makes of the rotation is off by rounding of the largest intermediate, not of the coordinate
        slack = 8 * ULP * (1 + spread / part.norm(dim=-1, keepdim=True))
        mine, theirs = _section(got, fmt, f"codes{index}"), _section(want, fmt, f"codes{index}")
        differ = mine != theirs
        boundaries = tables.boundaries[index].double()
        on_edge = (unit[..., None] - boundaries).abs().amin(dim=-1) <= slack
        if fmt.centered and not torch.equal(_section(want, fmt, "mean"), mean):
            codes = torch.bucketize(unit, boundaries)
            differ = mine != codes
        assert (on_edge | ~differ).all(), f"{int((differ & ~on_edge).sum())} codes differ away from every boundary"
        assert differ.float().mean() < 1e-3
        stored = _section(got, fmt, "norms")[..., fmt.norm_row(index), :]
        levels = tables.centroids[index].double()[mine]
        ideal = {
            "matched": part.norm(dim=-1) / levels.norm(dim=-1),
            "norm": part.norm(dim=-1),
            "unbiased": part.norm(dim=-1) / (unit * levels).sum(dim=-1),
        }[fmt.scale]
        step = torch.finfo(fmt.norm_dtype).eps
        assert ((stored - ideal).abs() <= (0.5 * step + 2e-6) * ideal).all()
        residual[..., span] = part - levels * stored[..., None]
    if fmt.kind in ("prod", "qjl"):
        projected = residual @ tables.projection.double().T
        signs = _section(got, fmt, "signs") * 2 - 1
        wrong = (signs * projected < 0) & (projected.abs() > 1e-5 * spread)
        assert not wrong.any()
        norms = _section(got, fmt, "norms" if fmt.kind == "qjl" else "residual_norms").squeeze(-2)
        ideal = residual.norm(dim=-1)
        assert ((norms - ideal).abs() <= (torch.finfo(fmt.norm_dtype).eps + 2e-5) * ideal).all()


def test_strides() -> None:
    """Any strides give the bytes of a contiguous copy, and several blocks, batches and heads keep their place."""
    keys_codec = make_codec(2, 32, centered=True)
    values_codec = make_codec(2, 32, transposed=True)
    record = keys_codec.format.nbytes + values_codec.format.nbytes
    # (batch, tokens, heads, channels) as projections give it, and a tensor whose channels are not adjacent
    keys = make_vectors(2, 256, 2, 32, torch.float32).transpose(1, 2)
    values = make_vectors(2, 2, 32, 256, torch.float32).transpose(2, 3)
    out = torch.empty(2, 2, 2, record, dtype=torch.uint8, device=DEVICE)
    same = torch.empty_like(out)
    kernels.quantize(keys, values, out, keys_codec, values_codec)
    kernels.quantize(keys.contiguous(), values.contiguous(), same, keys_codec, values_codec)
    assert torch.equal(out, same)
    assert (out != reference_records(keys, values, keys_codec, values_codec)).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("value", "norm_dtype", "message"),
    [
        (float("nan"), torch.float16, "finite"),
        (float("inf"), torch.float16, "finite"),
        (1.0e6, torch.float16, "float16"),
    ],
    ids=["nan", "inf", "norm"],
)
@pytest.mark.parametrize("where", ["keys", "values"])
def test_refuses_values_out_of_range(value, norm_dtype, message: str, where: str) -> None:
    codecs = [make_codec(2, 32, transposed=t, norm_dtype=norm_dtype) for t in (False, True)]
    tensors = {name: make_vectors(1, 1, 128, 32, torch.float32) for name in ("keys", "values")}
    tensors[where][0, 0, 77, 5] = value
    out = torch.empty(1, 1, 1, sum(codec.format.nbytes for codec in codecs), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueRangeError, match=message):
        kernels.quantize(tensors["keys"], tensors["values"], out, *codecs)
    kernels.quantize(tensors["keys"], tensors["values"], out, *codecs, check=False)


def test_large_norms_fit_bfloat16() -> None:
    codecs = [make_codec(2, 32, transposed=t, norm_dtype=torch.bfloat16) for t in (False, True)]
    vectors = make_vectors(1, 1, 128, 32, torch.float32) * 1e6
    out = torch.empty(1, 1, 1, sum(codec.format.nbytes for codec in codecs), dtype=torch.uint8, device=DEVICE)
    kernels.quantize(vectors, vectors, out, *codecs)
    found = reference.dequantize(out[0, ..., : codecs[0].format.nbytes], codecs[0])
    rotated = reference.rotate(vectors, codecs[0].tables)
    assert (found - rotated).norm() < 0.5 * rotated.norm()


def test_nothing_to_do() -> None:
    codec = make_codec(2, 32)
    empty = torch.empty(1, 1, 0, 32, device=DEVICE)
    out = torch.empty(0, 1, 1, 2 * codec.format.nbytes, dtype=torch.uint8, device=DEVICE)
    kernels.quantize(empty, empty, out, codec, codec)
