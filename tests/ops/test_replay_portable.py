"""Repeated launches of the portable kernel: masks, windows and every format, each argument that of an ordinary call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.errors import ShapeError
from hf_turboquant.ops import AttendOptions, KVView, attend
from hf_turboquant.ops.view import PreparedCalls, dense_view
from hf_turboquant.quantizers.mse import mse_codec
from hf_turboquant.store import KVStore
from hf_turboquant.window_store import WindowStore
from tests.ops.cases import DEVICE, FORMATS, draw, make_codec, make_view

triton = pytest.importorskip("triton")
plans = pytest.importorskip("hf_turboquant.ops.triton.fast_plan")
if plans.triton_obstacle():
    pytest.skip(plans.triton_obstacle(), allow_module_level=True)

from hf_turboquant.ops import triton as kernels  # noqa: E402
from hf_turboquant.ops.triton import append_kernel, attend_launch, replay, steps  # noqa: E402
from tests.ops.test_replay import Binary, Driver, Kernel, Launches, parameters  # noqa: E402

CPU = torch.device("cpu")
KERNELS = (
    (append_kernel, "append_kernel"),
    (attend_launch, "rotate_query_kernel"),
    (attend_launch, "attend_kernel"),
    (attend_launch, "combine_kernel"),
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Let kernels note their launches. On the CPU no call goes to the fast kernel."""
    made = Launches()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), made.bound, made.started))
    monkeypatch.setattr(replay, "CompiledKernel", Binary)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(attend_launch, "device_limits", lambda _: (90, 132))
    return made


def run_step(launches: Launches, query: torch.Tensor, view: KVView, options: AttendOptions) -> bool:
    """Attend, and return whether launches were repeated. If so, they must be those that an ordinary call would bind."""
    allocated: list[torch.Tensor] = []
    launches.bound.clear()
    launches.started.clear()
    token = view.waiting
    states = None if token is None else token.states
    with pytest.MonkeyPatch.context() as patch:
        real_empty = torch.empty
        patch.setattr(torch, "empty", lambda *a, **k: allocated.append(real_empty(*a, **k)) or allocated[-1])
        out = attend(query, view, options, backend="triton")
    if not launches.started:
        assert launches.bound
        return False
    assert not launches.bound
    assert len(allocated) == 2
    assert out is allocated[0]
    assert view.waiting is None
    if states is not None:
        append_kernel.append(*states, view.tail_keys, view.tail_values, token.slot)
    plan = attend_launch._plan(query, view, options)
    table = view.memo.get("block_table")
    attend_launch._attend(query, view, options, table, None, None, plan, *allocated, replay.as_is)
    assert launches.started == launches.bound
    return True


def make_layer(keys: str = "4-bit", values: str = "4-bit", **shape: Any) -> KVView:
    """Return a layer of two sequences and two KV heads."""
    key_bits, head_dim, key_options = FORMATS[keys]
    value_bits, _, value_options = FORMATS[values]
    codecs = (
        make_codec(key_bits, head_dim, **key_options, device=CPU),
        make_codec(value_bits, head_dim, **value_options, transposed=True, device=CPU),
    )
    kind = {"batch": 2, "heads": 2, "arenas": (3,), "tail": (40, 256, 11), "dtype": torch.bfloat16, **shape}
    return make_view(*codecs, **kind, device=CPU)


def make_query(view: KVView, q_len: int = 1) -> torch.Tensor:
    head_dim, dtype = view.tail_keys.shape[3], view.tail_keys.dtype
    return torch.randn(2, q_len, 4, head_dim).to(dtype).transpose(1, 2)


Options = Callable[[int], AttendOptions]


def masked(make: Callable[[int], torch.Tensor], **others: Any) -> Options:
    return lambda seq_len: AttendOptions(0.1, mask=make(seq_len), **others)


CALLS: dict[str, Options] = {
    "plain": lambda _: AttendOptions(0.1),
    "padding": masked(lambda n: torch.rand(2, 1, 1, n) < 0.5),
    "per-head": masked(lambda n: torch.randn(2, 4, 1, n)),
    "shared": masked(lambda n: torch.randn(1, 1, 1, n).half()),
    "expanded": masked(lambda n: (torch.rand(1, 1, 1, n) < 0.5).expand(2, 4, 1, n)),
    "sliced": masked(lambda n: (torch.rand(2, 1, 3, n + 7) < 0.5)[:, :, 1:2, :n]),
    "newest-of-wider": masked(lambda n: torch.randn(2, 1, 1, n + 3)[..., 3:]),
    "window": lambda _: AttendOptions(0.1, sliding_window=150),
    "window-of-all-but-few": lambda n: AttendOptions(0.1, sliding_window=n - 20),
    "softcap": lambda _: AttendOptions(0.1, softcap=20.0),
    "softcap-window-logits": lambda _: AttendOptions(0.1, softcap=20.0, sliding_window=300, sink_logits=torch.randn(4)),
    "padding-logits": masked(lambda n: torch.rand(2, 1, 1, n) < 0.5, softcap=5.0, sink_logits=torch.ones(4)),
}
TAILS = [(12, 41), (13, 42), (200, 250), (255, 1)]


@pytest.mark.parametrize("arenas", [(3,), (2, 1)], ids=["one-arena", "table"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_calls_repeat_what_they_would_bind(launches: Launches, call: Options, arenas: tuple[int, ...]) -> None:
    view = make_layer(arenas=arenas)
    for tail in ((11, 40), (12, 40)):
        now = view.with_tail(*tail)
        assert not run_step(launches, make_query(view), now, call(now.seq_len))
    for tail in TAILS:
        now = view.with_tail(*tail)
        assert run_step(launches, make_query(view), now, call(now.seq_len))
    assert len(view.prepared._calls) == 1


LAYERS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "fp16": {"dtype": torch.float16},
    "guarded": {"keys": "exact-group"},
    "guarded-two-widths": {"keys": "exact-group-split"},
    "prod": {"keys": "prod"},
    "qjl-and-groups": {"keys": "qjl", "values": "group"},
    "channel-order": {"keys": "order"},
    "80-channels": {"keys": "d80", "values": "d80"},
    "112-channels": {"keys": "d112", "values": "d112"},
    "no-blocks": {"arenas": (0,)},
    "no-sinks": {"sinks": 0},
    "cropped-blocks": {"block_tokens": (128, 5, 128)},
}


@pytest.mark.parametrize("call", ["plain", "padding", "window"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_repeat_what_they_would_bind(launches: Launches, layer: dict[str, Any], call: str) -> None:
    view = make_layer(**layer)
    for count, tail in enumerate([(11, 40), (12, 40), *TAILS]):
        now = view.with_tail(*tail)
        assert run_step(launches, make_query(view), now, CALLS[call](now.seq_len)) == (count > 1)


@pytest.mark.parametrize("masks", [False, True], ids=["causal", "mask"])
def test_several_queries(launches: Launches, masks: bool) -> None:
    view = make_layer()

    def step(length: int) -> bool:
        now = view.with_tail(3, length)
        mask = torch.rand(2, 1, 4, now.seq_len) < 0.5 if masks else None
        return run_step(launches, make_query(view, 4), now, AttendOptions(0.1, mask=mask, is_causal=True))

    assert [step(length) for length in (40, 44, 48, 5, 3)] == [False, False, True, True, True]
    # packed tokens lie behind the first query: that is another binary, which a mask makes needless
    if not masks:
        assert not step(2)


def make_store(window: int | None = None) -> KVStore:
    config = TurboQuantConfig()
    keys, values = (mse_codec(config, 64, 4, CPU, transposed=t, centered=False) for t in (False, True))
    like = torch.zeros(2, 2, 0, 64)
    kind: dict[str, Any] = {"residual_window": 128, "like_keys": like, "like_values": like, "backend": "reference"}
    if window is not None:
        return WindowStore(keys, values, sliding_window=window, **kind)
    return KVStore(keys, values, sink_tokens=4, **kind)


def count_bound(launches: Launches, store: KVStore, options: Callable[[KVView], AttendOptions]) -> tuple[int, int]:
    """Decode 300 tokens, and return the steps that were bound, and over how many sets of tensors."""
    store.append(torch.randn(2, 2, 700, 64), torch.randn(2, 2, 700, 64))
    frames: list[PreparedCalls] = []
    bound = 0
    for _ in range(300):
        keys, values = torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64)
        view = store.append(keys, values)
        frames += [view.prepared] if not frames or frames[-1] is not view.prepared else []
        bound += not run_step(launches, torch.randn(2, 4, 1, 64), view, options(view))
        # kernels that only note their launches write nothing
        slot = (view.tail_start + view.tail_len - 1) % view.tail_keys.shape[2]
        view.tail_keys[:, :, slot], view.tail_values[:, :, slot] = keys[:, :, 0], values[:, :, 0]
    return bound, len(frames)


def test_growing_mask_across_flushes(launches: Launches) -> None:
    """One step is bound for each set of tensors; between flushes the mask grows, and nothing but its numbers does."""
    bound, frames = count_bound(
        launches, make_store(), lambda view: AttendOptions(0.1, mask=torch.rand(2, 1, 1, view.seq_len) < 0.9)
    )
    assert 2 <= frames <= 4
    # and that of a token which had to be written at once, because a block was packed
    assert frames <= bound <= 2 * frames
    names = ["append_kernel", "rotate_query_kernel", "attend_kernel", "combine_kernel"]
    assert [name for name, *_ in launches.started] == names


def test_sliding_store_across_flushes(launches: Launches) -> None:
    """A window moves on in every step; a store drops a block or packs one every 64 tokens."""
    bound, frames = count_bound(
        launches, make_store(600), lambda view: AttendOptions(0.1, sliding_window=min(600, view.seq_len - 1))
    )
    assert 4 <= frames <= 7
    assert frames <= bound <= 2 * frames


def test_misaligned_mask_is_repeated(launches: Launches) -> None:
    """Kernels are not compiled for the alignment of masks, but for that of queries."""
    view = make_layer()
    masks = [torch.rand(2, 1, 1, view.seq_len + shift)[..., shift:] < 2 for shift in (0, 0, 0)]
    bytes_before = torch.ones(view.seq_len * 2 + 1, dtype=torch.bool)
    masks += [bytes_before[1:].view(2, 1, 1, -1)]
    assert masks[3].data_ptr() % 16 == 1
    done = [run_step(launches, make_query(view), view, AttendOptions(0.1, mask=mask)) for mask in masks]
    assert done == [False, False, True, True]
    storage = torch.randn(2 * 4 * 64 + 1).bfloat16()
    shifted = storage[1:].as_strided((2, 4, 1, 64), make_query(view).stride())
    assert not run_step(launches, shifted, view, AttendOptions(0.1, mask=masks[0]))


def test_misaligned_mask_can_be_the_first(launches: Launches) -> None:
    view = make_layer()
    mask = torch.ones(view.seq_len * 2 + 1, dtype=torch.bool)[1:].view(2, 1, 1, -1)
    done = [run_step(launches, make_query(view), view, AttendOptions(0.1, mask=mask)) for _ in range(3)]
    assert done == [False, False, True]


OTHER_CALLS: dict[str, Callable[[torch.Tensor], AttendOptions]] = {
    "no-mask": lambda mask: AttendOptions(0.1),
    "window": lambda mask: AttendOptions(0.1, sliding_window=90),
    "softcap": lambda mask: AttendOptions(0.1, mask=mask, softcap=3.0),
    "float": lambda mask: AttendOptions(0.1, mask=mask.float()),
    "per-head": lambda mask: AttendOptions(0.1, mask=mask.expand(2, 4, 1, -1)),
    "shared": lambda mask: AttendOptions(0.1, mask=mask[:1]),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS.keys())
def test_another_kind_of_mask_is_not_served(launches: Launches, call: Callable[..., AttendOptions]) -> None:
    view = make_layer()
    mask = torch.rand(2, 1, 1, view.seq_len) < 0.5
    for count in range(3):
        assert run_step(launches, make_query(view), view, AttendOptions(0.1, mask=mask)) == (count == 2)
    assert not run_step(launches, make_query(view), view, call(mask))


BOUND_CALLS: dict[str, Callable[[KVView], tuple[torch.Tensor, AttendOptions]]] = {
    "every-other-key": lambda view: (
        make_query(view), AttendOptions(0.1, mask=torch.rand(2, 1, 1, 2 * view.seq_len)[..., ::2]),
    ),
    "one-bias-for-all-keys": lambda view: (
        make_query(view), AttendOptions(0.1, mask=torch.rand(2, 1, 1, 1).expand(2, 1, 1, view.seq_len)),
    ),
    "query-not-in-order": lambda view: (torch.randn(2, 4, 1, 128).bfloat16()[..., ::2], AttendOptions(0.1)),
    "copied-logits": lambda view: (make_query(view), AttendOptions(0.1, sink_logits=torch.randn(4, 2)[:, 0])),
    "chunk": lambda view: (make_query(view, 17), AttendOptions(0.1, is_causal=True)),
}  # fmt: skip


@pytest.mark.parametrize("call", BOUND_CALLS.values(), ids=BOUND_CALLS.keys())
def test_calls_that_are_always_bound(launches: Launches, call: Callable[[KVView], Any]) -> None:
    view = make_layer()
    for _ in range(4):
        query, options = call(view)
        assert not run_step(launches, query, view, options)


def test_query_beside_dense_keys_is_bound(launches: Launches) -> None:
    """Keys of a view without a store may lie in one storage with a query, and stay when that does not."""
    fused = torch.randn(1, 30, 3, 64).bfloat16().transpose(1, 2)
    view = dense_view(fused[:, 1:2], fused[:, 2:])
    for _ in range(3):
        assert not run_step(launches, fused[:, :1, :1], view, AttendOptions(0.1))
    apart = dense_view(fused[:, 1:2].clone(), fused[:, 2:].clone())
    done = [run_step(launches, fused[:, :1, :1], apart, AttendOptions(0.1)) for _ in range(3)]
    assert done == [False, False, True]


@pytest.mark.parametrize("extra", [-1, 1], ids=["short", "long"])
def test_mask_of_another_length_is_refused(launches: Launches, extra: int) -> None:
    view = make_layer()
    for _ in range(3):
        run_step(launches, make_query(view), view, CALLS["padding"](view.seq_len))
    with pytest.raises(ShapeError, match="mask must have shape"):
        attend(make_query(view), view, CALLS["padding"](view.seq_len + extra), backend="triton")


def test_large_numbers_are_refused(launches: Launches) -> None:
    launch, largest = replay.Replay([], [], None, ()), torch.iinfo(torch.int32).max
    assert launch.run([torch.zeros(4)], (3, largest))
    assert not launch.run([torch.zeros(4)], (3, largest + 1))


def test_two_tensors_at_one_address_are_not_noted(launches: Launches) -> None:
    """Keys that are the values this time may be others the next."""
    first, second = torch.zeros(64), torch.zeros(64)
    replays = []
    for fresh in ((first, first), (first, second)):
        recorder = replay.Recorder(fresh, ())
        kernel = attend_launch.combine_kernel
        recorder(kernel)[(1,)](*fresh, *(0 for _ in kernel.arg_names[2:]))
        replays.append(recorder.replay())
    assert [found is None for found in replays] == [True, False]


def test_changing_numbers_choose_no_binary() -> None:
    """Whatever differs between the steps of one form is not compiled for."""
    names = {*steps.STEP_NUMBERS, *attend_launch._BLOCK_NUMBERS}
    found = set()
    for module, kernel_name in KERNELS:
        kernel = getattr(module, kernel_name)
        for name, rules in zip(kernel.arg_names, parameters(kernel), strict=True):
            assert rules.do_not_specialize or name not in names, name
            assert rules.do_not_specialize_on_alignment or name != "mask_ptr"
            found.add(name)
    assert names <= found


def test_forms_are_forgotten() -> None:
    calls = PreparedCalls()
    for form in range(1000):
        calls.is_due(form)
        if calls.is_due(form):
            calls.keep(form, object())
    assert len(calls._calls) <= 32
    assert len(calls._prepared) <= 32
    assert calls.find(999) is not None


def test_empty_splits_change_nothing() -> None:
    """The tail is divided by its room: how much of that is used must not matter. Here the kernels run, interpreted."""
    keys, values = make_codec(2, 32), make_codec(3, 32, transposed=True)
    view = make_view(keys, values, arenas=(2,), tail=(5, 256, 250))
    query = draw(1, 2, 1, 32)
    narrow = replace(
        view, tail_keys=view.tail_keys.roll(6, 2)[:, :, :5], tail_values=view.tail_values.roll(6, 2)[:, :, :5],
        tail_start=0,
    )  # fmt: skip
    options = AttendOptions(0.2, sliding_window=100)
    torch.testing.assert_close(
        kernels.attend_portable(query, view, options), kernels.attend_portable(query, narrow, options)
    )


# on a GPU

GPU_CALLS: dict[str, Callable[[int], AttendOptions]] = {
    "padding": lambda n: AttendOptions(0.1, mask=torch.arange(n, device="cuda").expand(4, 1, 1, n) >= 30),
    "float-mask": lambda n: AttendOptions(0.1, mask=torch.randn(4, 1, 1, n, device="cuda")),
    "window": lambda n: AttendOptions(0.1, sliding_window=min(n, 500), softcap=30.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("call", GPU_CALLS.values(), ids=GPU_CALLS.keys())
def test_repeated_calls_give_the_same_bits(
    call: Callable[[int], AttendOptions], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 300 steps; the binder is asked for two steps of each set of tensors only."""
    config = TurboQuantConfig()
    keys, values = (mse_codec(config, 128, 4, DEVICE, transposed=t, centered=not t) for t in (False, True))
    like = torch.zeros(4, 2, 0, 128, device="cuda", dtype=dtype)
    store = KVStore(keys, values, like_keys=like, like_values=like, sink_tokens=4, residual_window=128)
    store.append(*(draw(4, 2, 700, 128, dtype=dtype) for _ in range(2)))
    asked: list[str] = []
    run = triton.runtime.jit.JITFunction.run

    def count(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(kernel.__name__)
        return run(kernel, *args, **kwargs)

    frames: list[PreparedCalls] = []
    bound = 0
    for _ in range(300):
        view = store.append(*(draw(4, 2, 1, 128, dtype=dtype) for _ in range(2)))
        frames += [view.prepared] if not frames or frames[-1] is not view.prepared else []
        query, options = draw(4, 8, 1, 128, dtype=dtype), call(view.seq_len)
        with monkeypatch.context() as patch:
            patch.setattr(triton.runtime.jit.JITFunction, "run", count)
            out = attend(query, view, options)
        bound += bool(asked)
        asked.clear()
        assert torch.equal(out, kernels.attend(query, view, options))
    assert bound <= 3 * len(frames) <= 12
