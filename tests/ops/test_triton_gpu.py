"""The kernels as compiled: bfloat16, random shapes, long sequences. The other kernel tests run here on the GPU too."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from hf_turboquant.ops import AttendOptions, reference
from tests.ops.cases import DEVICE, assert_twice_eager, draw, make_codec, make_vectors, make_view, reference_records

pytest.importorskip("triton")
from hf_turboquant.ops import triton as kernels

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("round_", range(12))
def test_attend_random_shapes(dtype: torch.dtype, round_: int) -> None:
    choices = random.Random(round_)
    head_dim = choices.choice([64, 80, 96, 112, 128, 192, 256])
    value_dim = choices.choice([head_dim, 128])
    key_bits, value_bits = choices.choice([(1, 1), (2, 2), (3, 2), (3, 3), (4, 4), (8, 8), (16, 16)])
    centered = choices.random() < 0.5
    keys = make_codec(key_bits, head_dim, centered=centered, exact_dtype=dtype)
    values = make_codec(value_bits, value_dim, transposed=True, centered=choices.random() < 0.5, exact_dtype=dtype)
    arenas = choices.choice([(1,), (5,), (2, 3), (40,)])
    heads, group, batch = choices.choice([1, 2, 8]), choices.choice([1, 3, 4, 7, 16]), choices.choice([1, 3])
    view = make_view(
        keys, values, batch=batch, heads=heads, sinks=choices.choice([0, 4]), arenas=arenas,
        tail=(choices.randrange(1, 250), 256, choices.randrange(256)), dtype=dtype,
    )  # fmt: skip
    query = draw(batch, heads * group, choices.choice([1, 2, 5]), head_dim, dtype=dtype)
    options = AttendOptions(scaling=head_dim**-0.5)
    assert_twice_eager(kernels.attend_portable(query, view, options), query, view, options)


GROUP = {"kind": "group"}
OTHER_CODECS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "prod": ({"kind": "prod"}, {}),
    "split": ({"split": ((64, 4), (64, 2))}, {}),
    "exact-group": ({"split": ((8, 16), (120, 4)), "exact_dtype": torch.bfloat16}, {}),
    "exact-group-split": ({"split": ((8, 16), (56, 4), (64, 2)), "exact_dtype": torch.float16}, {}),
    "prod-group": ({"kind": "prod"}, GROUP),
    "qjl-group": ({"kind": "qjl"}, {**GROUP, "norm_dtype": torch.bfloat16}),
}
"""Options of keys and values with codes of another kind than one width for all channels."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OTHER_CODECS)
def test_attend_other_codecs(case: str, dtype: torch.dtype) -> None:
    keys, values = OTHER_CODECS[case]
    view = make_view(
        make_codec(2, 128, centered=True, **keys), make_codec(2, 128, transposed=True, **values),
        heads=2, arenas=(9,), dtype=dtype,
    )  # fmt: skip
    query = draw(1, 8, 1, 128, dtype=dtype)
    options = AttendOptions(scaling=128**-0.5)
    assert_twice_eager(kernels.attend_portable(query, view, options), query, view, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_chunk_with_everything(dtype: torch.dtype) -> None:
    """A chunk of 100 queries under a softcap, a window and sink logits equals the reference."""
    view = make_view(
        make_codec(4, 128, centered=True), make_codec(4, 128, transposed=True), batch=2, heads=2, sinks=4, arenas=(6,),
        tail=(230, 256, 100), dtype=dtype,
    )  # fmt: skip
    query = draw(2, 8, 100, 128, dtype=dtype)
    logits = draw(8)
    options = AttendOptions(128**-0.5, is_causal=True, sliding_window=700, softcap=20.0, sink_logits=logits)
    step = torch.finfo(dtype).eps
    got, want = kernels.attend_portable(query, view, options).float(), reference.attend(query, view, options).float()
    assert (got - want).abs().max() <= (4 * step + 1e-5) * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "head_dim", "keys", "values"),
    [
        pytest.param(2, 128, {}, {}, id="k2v2-d128"),
        pytest.param(4, 256, {}, {}, id="k4v4-d256"),
        pytest.param(3, 80, {}, {}, id="k3v3-d80"),
        pytest.param(2, 128, {"kind": "prod"}, GROUP, id="prod-group-d128"),
        pytest.param(4, 256, {"kind": "qjl"}, GROUP, id="qjl-group-d256"),
        pytest.param(4, 128, {"split": ((8, 16), (120, 4)), "exact_dtype": torch.bfloat16}, {}, id="exact-group-d128"),
    ],
)
def test_quantize(bits: int, head_dim: int, keys: dict, values: dict, dtype: torch.dtype) -> None:
    """Codes agree with the reference but for rounding on boundaries, whatever type the vectors come in."""
    codecs = (make_codec(bits, head_dim, centered=True, **keys), make_codec(bits, head_dim, transposed=True, **values))
    pair = [make_vectors(2, 3, 8 * 128, head_dim, dtype) for _ in range(2)]
    out = torch.full((8, 2, 3, sum(codec.format.nbytes for codec in codecs)), 0xFF, dtype=torch.uint8, device=DEVICE)
    kernels.quantize(*pair, out, *codecs)
    want = reference_records(*pair, *codecs)
    assert (out != want).float().mean() < 2e-3
    split = codecs[0].format.nbytes
    for codec, mine, theirs in (
        (codecs[0], out[..., :split], want[..., :split]),
        (codecs[1], out[..., split:], want[..., split:]),
    ):
        found, expected = kernels.dequantize(mine, codec), reference.dequantize(theirs, codec)
        assert (found - expected).norm() <= 1e-2 * expected.norm()


def test_offsets_beyond_32_bits() -> None:
    """An arena of more than 2**31 bytes is read at its far end."""
    keys, values = make_codec(8, 128, centered=True), make_codec(8, 128, transposed=True)
    record = keys.format.nbytes + values.format.nbytes
    blocks, heads = (2**31 // record + 4096) // 8, 8
    if torch.cuda.mem_get_info()[0] < 3 * blocks * heads * record:
        pytest.skip("needs three times 2**31 bytes of free memory")
    view = make_view(keys, values, heads=heads, arenas=(2,), sinks=0, tail=(0, 8, 0))
    arena = view.arenas[0].new_zeros(blocks, 1, heads, record)
    # zero codes with zero norms and means score 0 and weigh as much as any token
    arena[-2:] = view.arenas[0]
    query, options = draw(1, heads, 1, 128), AttendOptions(128**-0.5)
    far = type(view)(
        keys, values, view.sink_keys, view.sink_values, (arena,), blocks, None, view.tail_keys, view.tail_values, 0, 0
    )
    mask = torch.zeros(1, 1, 1, far.seq_len, dtype=torch.bool, device=DEVICE)
    mask[..., -256:] = True
    got = kernels.attend_portable(query, far, AttendOptions(128**-0.5, mask=mask))
    torch.testing.assert_close(got, kernels.attend_portable(query, view, options), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attend", [kernels.attend_portable, kernels.attend], ids=["portable", "fast"])
def test_launches_per_step(attend: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode step of one layer is three launches."""
    # what the tests fill with NaN is not filled in use
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    view = make_view(
        make_codec(4, 128), make_codec(4, 128, transposed=True), heads=2, arenas=(9,), dtype=torch.bfloat16
    )
    query, options = draw(1, 8, 1, 128, dtype=torch.bfloat16), AttendOptions(128**-0.5)
    attend(query, view, options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend(query, view, options)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 3, launched
