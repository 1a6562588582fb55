"""The fast kernel that reads counts on the device: on the CPU through an emulation of its warps, on a GPU as it is."""

from __future__ import annotations

import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.ops.static_spec import exact_view, full_counts
from hf_turboquant.ops.view import AttendOptions
from tests.ops.test_static_ops import Store, make_store

plans = pytest.importorskip("hf_turboquant.ops.triton.fast_plan")
if plans.triton_obstacle():
    pytest.skip(plans.triton_obstacle(), allow_module_level=True)

from hf_turboquant.ops.triton import fast_attend, static_fast  # noqa: E402
from hf_turboquant.ops.triton.launch import device_limits  # noqa: E402
from tests.ops.warp_emulator import EmulatedKernel  # noqa: E402

EMULATED = EmulatedKernel(
    "static_attend_kernel",
    [f"hf_turboquant.ops.triton.{part}" for part in
     ("fast_primitives", "fast_blocks", "fast_masks", "fast_exact", "fast_kernel", "static_kernel")],
)  # fmt: skip

CASES = {
    "no_block": {"sinks": 4, "blocks": 0, "tail": 1},
    "no_sinks": {"sinks": 0, "blocks": 1, "tail": 33, "sink_tokens": 0},
    "wrapped": {"sinks": 4, "blocks": 2, "tail": 200, "start": 128},
    "full": {"sinks": 4, "blocks": 5, "tail": 128},
    "idle_splits": {"sinks": 4, "blocks": 5, "tail": 20, "capacity": 30},
    "no_tail": {"sinks": 4, "blocks": 3, "tail": 0, "window": 0},
}


def error_of(store: Store, group: int = 4, **given: object) -> float:
    """Return the relative error of the fast kernel against the reference."""
    batch, heads, _, head_dim = store.exact_keys.shape
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(batch, group * heads, 1, head_dim, generator=generator).to(store.exact_keys)
    expected = store.attend(query, **given)
    view = exact_view(store.spec, store.codecs, *store.buffers[1:], full_counts(store.spec))
    options = AttendOptions(scaling=0.125, **given)
    assert fast_attend.supports(view, query, options, 90) == ""
    result = static_fast.static_fast_attend(query, view, options, store.lengths)
    assert torch.isfinite(result).all()
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel run on the CPU. Launches do not overlap before sm_90, which the interpreter could not do."""
    monkeypatch.setattr(static_fast, "static_attend_kernel", EMULATED)
    monkeypatch.setattr(fast_attend, "device_limits", lambda _: (80, 2))


CONFIG = TurboQuantConfig(guard="off", key_bits=2, value_bits=2)
PROD = CONFIG.replace(key_codec="prod", key_bits=3)


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels around it run on the GPU")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_emulated_kernel_equals_reference(case):
    assert error_of(make_store(CONFIG, heads=1, dtype=torch.float16, **case)) < 5e-3


def masked_options(kind: str, store: Store) -> dict[str, object]:
    """Return options; masks have a column for all there is room for, and hide padding: all of the last sequence."""
    if kind == "softcap":
        return {"softcap": 5.0}
    batch, heads = store.exact_keys.shape[:2]
    seen = torch.ones(batch, 4 * heads if "head" in kind else 1, 1, store.spec.max_tokens, dtype=torch.bool)
    seen[1, ..., :150] = False
    seen[1, -1:, ..., 200] = False
    seen[2] = False
    if "float" in kind:
        seen = torch.zeros(seen.shape, dtype=torch.float16).masked_fill(~seen, -torch.inf)
    return {"mask": seen.to(store.exact_keys.device)}


KINDS = ["bool", "bool-head", "float", "float-head", "softcap"]
PADDED = {"wrapped": CASES["wrapped"], "idle_splits": CASES["idle_splits"], "no_block": CASES["no_block"]}


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels around it run on the GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", PADDED.values(), ids=PADDED.keys())
def test_emulated_kernel_masks_and_caps(case, kind):
    store = make_store(CONFIG, heads=1, dtype=torch.float16, batch=1 if kind == "softcap" else 3, **case)
    assert error_of(store, **masked_options(kind, store)) < 5e-3


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels around it run on the GPU")
@pytest.mark.parametrize("centering", ["none", "block"])
def test_emulated_kernel_reads_signs(centering):
    config = PROD.replace(key_centering=centering)
    assert error_of(make_store(config, heads=2, dtype=torch.float16, **CASES["wrapped"])) < 5e-3


FORMATS = {
    "k2v2": CONFIG,
    "k3v2": CONFIG.replace(key_bits=3),
    "k4v4": CONFIG.replace(key_bits=4, value_bits=4),
    "prod3v2": PROD,
}


@pytest.mark.gpu
@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_reference_on_gpu(case, group, config):
    if device_limits(torch.device("cuda", 0))[0] < fast_attend.MIN_CAPABILITY:
        pytest.skip("needs compute capability 8.0")
    assert error_of(make_store(config, dtype=torch.bfloat16, head_dim=128, **case), group) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", PADDED.values(), ids=PADDED.keys())
def test_masks_and_caps_on_gpu(case, kind):
    if device_limits(torch.device("cuda", 0))[0] < fast_attend.MIN_CAPABILITY:
        pytest.skip("needs compute capability 8.0")
    store = make_store(CONFIG.replace(key_bits=4, value_bits=4), dtype=torch.bfloat16, head_dim=128, batch=3, **case)
    assert error_of(store, **masked_options(kind, store)) < 1e-2
