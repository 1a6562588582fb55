"""What the kernels cannot read is refused before they run, with the argument and the remedy; strides are not."""

from __future__ import annotations

import pytest
import torch

from hf_turboquant.errors import BackendUnavailableError, ShapeError
from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import AttendOptions, VectorCodec, VectorTables, attend, choose_backend, dequantize, quantize
from hf_turboquant.ops import backend as backends
from hf_turboquant.ops.backend import Backend, format_obstacle
from tests.ops.cases import DEVICE, assert_equals_reference, draw, make_codec, make_vectors, make_view

pytest.importorskip("triton")

KEYS, VALUES = make_codec(2, 32, centered=True), make_codec(2, 32, transposed=True)
OPTIONS = AttendOptions(0.2)


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose backends as on a machine that has no interpreter switched on."""
    for choice in (backends._resolve, backends._choose):
        choice.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    yield
    for choice in (backends._resolve, backends._choose):
        choice.cache_clear()


@pytest.mark.parametrize("operation", ["attend", "quantize", "dequantize"])
def test_cpu_tensors_need_the_interpreter(operation: str, no_interpreter: None) -> None:
    cpu = torch.device("cpu")
    keys, values = make_codec(2, 32, device=cpu), make_codec(2, 32, transposed=True, device=cpu)
    view = make_view(keys, values, device=cpu)
    calls = {
        "attend": lambda: attend(torch.randn(1, 2, 1, 32), view, OPTIONS, backend="triton"),
        "quantize": lambda: quantize(
            torch.randn(1, 1, 128, 32), torch.randn(1, 1, 128, 32), view.arenas[0], keys, values, backend="triton"
        ),
        "dequantize": lambda: dequantize(view.arenas[0][..., : keys.format.nbytes], keys, backend="triton"),
    }
    with pytest.raises(BackendUnavailableError, match=r"need a cuda device; use backend='reference'"):
        calls[operation]()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param((1, 3, 1, 32), "num_q_heads must be a multiple of num_kv_heads=2, got 3", id="heads"),
        pytest.param((2, 4, 1, 32), r"query must be \(batch=1", id="batch"),
        pytest.param((1, 4, 1, 64), "head_dim=32", id="head_dim"),
    ],
)
def test_query_must_fit(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attend(draw(*shape), make_view(KEYS, VALUES, heads=2), OPTIONS, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_query_must_have_a_type_that_kernels_multiply(dtype: torch.dtype) -> None:
    with pytest.raises(ShapeError, match=f"float16, bfloat16 or float32 for backend='triton', got {dtype}"):
        attend(draw(1, 2, 1, 32, dtype=dtype), make_view(KEYS, VALUES), OPTIONS, backend="triton")


@pytest.mark.gpu
def test_query_must_be_where_the_store_is() -> None:
    with pytest.raises(ShapeError, match="query must be on cuda"):
        attend(torch.randn(1, 2, 1, 32), make_view(KEYS, VALUES), OPTIONS, backend="triton")


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 7), (1, 3, 1, None), (3, 1, 1, None), (1, 1, 2, None), (None,)],
    ids=["keys", "heads", "batch", "queries", "dimensions"],
)
def test_mask_must_fit(shape: tuple[int | None, ...]) -> None:
    view = make_view(KEYS, VALUES, heads=2)
    mask = torch.ones([view.seq_len if size is None else size for size in shape], dtype=torch.bool, device=DEVICE)
    with pytest.raises(ShapeError, match="mask must have shape"):
        attend(draw(1, 4, 3, 32), view, AttendOptions(0.2, mask=mask), backend="triton")


@pytest.mark.parametrize("tokens", [100, 256], ids=["part-of-a-block", "too-many"])
def test_out_must_fit(tokens: int) -> None:
    out = torch.empty(1, 1, 1, KEYS.format.nbytes + VALUES.format.nbytes, dtype=torch.uint8, device=DEVICE)
    vectors = make_vectors(1, 1, tokens, 32, torch.float32)
    with pytest.raises(ShapeError, match=r"a multiple of 128"):
        quantize(vectors, vectors, out, KEYS, VALUES, backend="triton")


def test_packed_must_fit() -> None:
    with pytest.raises(ShapeError, match="packed must hold"):
        dequantize(torch.zeros(1, 16, dtype=torch.uint8, device=DEVICE), KEYS, backend="triton")


def test_views_of_the_rings_may_have_any_strides() -> None:
    """Sinks and rings whose channels or tokens are not adjacent are read as what they are."""
    view = make_view(KEYS, VALUES, batch=2, heads=2)
    query = draw(2, 4, 1, 32)
    for name in ("sink_keys", "sink_values", "tail_keys", "tail_values"):
        tensor = getattr(view, name)
        object.__setattr__(view, name, tensor.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0))
    assert not view.tail_keys.is_contiguous()
    assert_equals_reference(attend(query, view, OPTIONS, backend="triton"), query, view, OPTIONS)


UNREADABLE = {
    "polar": (VectorFormat("polar", 64, (ChannelGroup(0, 32, 4), ChannelGroup(32, 16, 2))), "'polar' codes"),
    "wide": (VectorFormat("exact", 512, exact_dtype=torch.float16), "at most 256 channels"),
    "not-of-8": (VectorFormat("mse", 64, (ChannelGroup(0, 20, 2), ChannelGroup(20, 44, 2))), "multiples of 8"),
    "odd-signs": (VectorFormat("qjl", 36), "multiples of 8"),
    "three-groups": (
        VectorFormat("mse", 64, tuple(ChannelGroup(start, 16, 2) for start in (0, 16, 32, 48))),
        "one or two channel groups",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_formats_without_a_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name they are refused, and ``auto`` takes the reference and says why."""
    fmt, reason = UNREADABLE[case]
    assert reason in format_obstacle(fmt)
    with pytest.raises(BackendUnavailableError, match=reason):
        choose_backend("triton", DEVICE, fmt)
    choice = choose_backend("auto", torch.device("cuda"), fmt)
    assert choice.backend is Backend.REFERENCE
    assert reason in choice.reason


def test_exact_wide_vectors_are_attended_by_auto() -> None:
    """What no kernel holds is not an error unless kernels were asked for by name."""
    codec = VectorCodec(VectorFormat("exact", 512, exact_dtype=torch.float32), VectorTables())
    view = make_view(codec, codec)
    query = draw(1, 2, 1, 512)
    assert torch.isfinite(attend(query, view, OPTIONS)).all()
    with pytest.raises(BackendUnavailableError, match="use backend='auto'"):
        attend(query, view, OPTIONS, backend="triton")
