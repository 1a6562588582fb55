"""Launches that are repeated past Triton's binder: the same as bound ones, and only while their tensors stay."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.ops import AttendOptions, NewToken, attend
from hf_turboquant.quantizers.mse import mse_codec
from hf_turboquant.shared_rows import SharedRows
from hf_turboquant.store import KVStore
from hf_turboquant.window_store import WindowStore

triton = pytest.importorskip("triton")
plans = pytest.importorskip("hf_turboquant.ops.triton.fast_plan")
if plans.triton_obstacle():
    pytest.skip(plans.triton_obstacle(), allow_module_level=True)

from hf_turboquant.ops.triton import append_kernel, attend_launch, dispatch, replay  # noqa: E402
from hf_turboquant.ops.triton import fast_attend as fast  # noqa: E402
from tests.ops.cases import make_codec, make_view  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
OPTIONS = AttendOptions(scaling=128**-0.5)


class Binary:
    """A compiled kernel that only notes what it is started with."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, name: str, started: list[tuple[Any, ...]]) -> None:
        self.name, self.started = name, started

    def run(self, *args: Any) -> None:
        """Note grid, stream and kernel arguments."""
        grid, stream, (function, metadata, *hooks), arguments = args[:3], args[3], args[4:9], args[9:]
        assert (function, metadata, hooks) == (7, (4, 1, 0), [None] * 3)
        self.started.append((self.name, grid, stream, list(arguments)))


def parameters(kernel: Any) -> list[Any]:
    """Return what a kernel says of its parameters, which interpreted ones keep as it was given."""
    if hasattr(kernel, "params"):
        return list(kernel.params)
    rules = ("do_not_specialize", "do_not_specialize_on_alignment")
    named = {rule: kernel.kwargs.get(rule) or () for rule in rules}
    return [SimpleNamespace(**{rule: name in named[rule] for rule in rules}) for name in kernel.arg_names]


class Kernel:
    """A kernel that notes its launches as a binary would: all arguments by position, tensors as addresses."""

    def __init__(self, kernel: Any, bound: list[tuple[Any, ...]], started: list[tuple[Any, ...]]) -> None:
        self.arg_names, self.params = list(kernel.arg_names), parameters(kernel)
        self.name, self.bound, self.started = kernel.__name__, bound, started

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Binary]:
        def launch(*args: Any, **kwargs: Any) -> Binary:
            values = [*args, *(kwargs[name] for name in self.arg_names[len(args) :])]
            values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
            self.bound.append((self.name, (*grid, 1, 1)[:3], 0, values))
            return Binary(self.name, self.started)

        return launch


class Driver:
    """Triton's driver for tensors on the CPU."""

    def get_current_device(self) -> None:
        """Return the index that CPU tensors have."""

    def get_current_stream(self, device: int | None) -> int:
        """Return the default stream."""
        return 0


class Launches:
    """What was launched: ``bound`` by the ordinary way, ``started`` past the binder."""

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Let kernels note their launches, and calls take the way they take on an H100."""
    made = Launches()
    for module, name in (
        (append_kernel, "append_kernel"),
        (fast, "quantize_query_kernel"),
        (fast, "fast_attend_kernel"),
        (fast, "fast_combine_kernel"),
    ):
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), made.bound, made.started))
    monkeypatch.setattr(replay, "CompiledKernel", Binary)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(fast, "device_limits", lambda _: (90, 132))
    monkeypatch.setattr(dispatch, "fast_obstacle", lambda query, view, options: fast.supports(view, query, options, 90))
    return made


def make_layer(tail: tuple[int, int, int] = (40, 256, 11), **shape: Any) -> Any:
    """Return a layer that the fast kernel serves; ``tail`` is length, slots and first slot."""
    codecs = (make_codec(4, 128, centered=True, device=CPU), make_codec(4, 128, transposed=True, device=CPU))
    return make_view(*codecs, heads=2, arenas=(5,), tail=tail, dtype=torch.bfloat16, device=CPU, **shape)


def make_query(q_len: int = 1) -> torch.Tensor:
    return torch.randn(1, q_len, 8, 128).bfloat16().transpose(1, 2)


@pytest.mark.parametrize("tail", [(12, 40), (200, 250), (255, 1)], ids=["next", "wrapped", "last-slot"])
@pytest.mark.parametrize("arenas", [(5,), (2, 3)], ids=["one-arena", "table"])
def test_attend_repeats_what_it_would_bind(
    launches: Launches, tail: tuple[int, int], arenas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every argument of a repeated launch is that of an ordinary launch for the same step."""
    view = make_view(
        make_codec(3, 128, device=CPU), make_codec(2, 128, transposed=True, device=CPU), heads=2, arenas=arenas,
        tail=(40, 256, 11), dtype=torch.bfloat16, device=CPU,
    )  # fmt: skip
    for _ in range(2):
        attend(make_query(), view, OPTIONS, backend="triton")
    assert not launches.started
    query, later = make_query(), view.with_tail(*tail)
    allocated: list[torch.Tensor] = []
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocated.append(real_empty(*a, **k)) or allocated[-1])
    out = attend(query, later, OPTIONS, backend="triton")
    assert len(launches.started) == 3
    assert out is allocated[0]
    monkeypatch.undo()

    # a second set of stand-ins: the first went with the patches
    bound: list[tuple[Any, ...]] = []
    for name in ("quantize_query_kernel", "fast_attend_kernel", "fast_combine_kernel"):
        monkeypatch.setattr(fast, name, Kernel(getattr(fast, name), bound, []))
    monkeypatch.setattr(fast, "device_limits", lambda _: (90, 132))
    table = view.memo.get("block_table")
    plan = fast.plan_of(query, later)
    fast._attend(query, later, OPTIONS, table, None, plan, out, allocated[1], replay.as_is)
    assert launches.started == bound


def make_token(view: Any, states: tuple[torch.Tensor, torch.Tensor] | None = None) -> NewToken:
    """Return the last tail token of a view, before it is written."""
    if states is None:
        states = tuple(torch.randn(1, 1, 2, 128).bfloat16().transpose(1, 2) for _ in range(2))
    slots = view.tail_keys.shape[2]
    return NewToken(*states, (view.tail_keys, view.tail_values), (view.tail_start + view.tail_len - 1) % slots)


def step_with_token(view: Any, start: int, length: int, states: Any = None) -> NewToken:
    """Attend over a tail whose last token waits, and return the token."""
    later = view.with_tail(start, length)
    token = make_token(later, states)
    attend(make_query(), view.with_tail(start, length, token), OPTIONS, backend="triton")
    return token


def test_token_is_written_by_the_launches_of_its_step(launches: Launches) -> None:
    """Every argument of a repeated launch is that of an ordinary one, and there is none for the token."""
    view, states = make_layer(), [make_token(make_layer()).states for _ in range(4)]
    for length, pair in enumerate(states[1:3], start=42):
        assert step_with_token(view, 11, length, pair).states is None
    assert [name for name, *_ in launches.started] == [
        "quantize_query_kernel", "fast_attend_kernel", "fast_combine_kernel",
    ]  # fmt: skip
    assert len(launches.bound) == 3
    started = launches.started[0][3]
    later = view.with_tail(11, 43)
    query, later = make_query(), view.with_tail(11, 43, make_token(later, states[2]))
    plan = fast.plan_of(query, later)
    fast._attend(query, later, OPTIONS, None, None, plan, *fast.allocate(query, later, plan), replay.as_is)
    names = fast.quantize_query_kernel.arg_names
    fresh = {"query_ptr", "order_ptr", "query8_ptr", "query16_ptr", "query_scale_ptr"}
    for name, repeated, bound in zip(names, started, launches.bound[3][3], strict=True):
        assert repeated == bound or name in fresh, name
    assert started[names.index("keys_ptr")] == states[2][0].data_ptr()
    assert started[names.index("tail_len")] == 43
    assert started[names.index("APPEND")] is True


def test_token_is_written_once(launches: Launches) -> None:
    """Layers that share keys and values attend twice: by then the token has its place."""
    view = make_layer()
    for length in (41, 42, 43, 44):
        later = view.with_tail(11, length, make_token(view.with_tail(11, length)))
        for _ in range(2):
            attend(make_query(), later, OPTIONS, backend="triton")
    position = fast.quantize_query_kernel.arg_names.index("APPEND")
    queries = [arguments for name, _, _, arguments in launches.started if name == "quantize_query_kernel"]
    assert [arguments[position] for arguments in queries] == [True, True, False, True, False]


def test_keys_and_values_of_one_storage(launches: Launches) -> None:
    """What lay in one storage when it was noted may lie apart later."""
    view = make_layer()
    fused = torch.randn(1, 1, 4, 128).bfloat16().transpose(1, 2)
    step_with_token(view, 11, 42, (fused[:, :2], fused[:, 2:]))
    apart = [torch.randn(1, 1, 2, 256).bfloat16()[..., :128].transpose(1, 2) for _ in range(2)]
    apart = [part.as_strided(fused[:, :2].shape, fused.stride()) for part in apart]
    step_with_token(view, 11, 43, tuple(apart))
    first = fast.quantize_query_kernel.arg_names.index("keys_ptr")
    assert launches.started[0][3][first : first + 2] == [part.data_ptr() for part in apart]


def test_portable_kernel_writes_the_token_first(launches: Launches) -> None:
    view, states = make_layer(), make_token(make_layer()).states
    later = view.with_tail(11, 41, make_token(view.with_tail(11, 41), states))
    attend_launch.write_newest(later)
    attend_launch.write_newest(later)
    assert later.waiting is None
    append_kernel.append(*states, view.tail_keys, view.tail_values, 51)
    assert len(launches.bound) == 2
    assert launches.bound[0] == launches.bound[1]


def test_wider_window_is_not_served(launches: Launches) -> None:
    """A step that was prepared for a narrow window starts at a block too late for a wide one."""
    view = make_layer()
    for window in (64, 64, 60):
        attend(make_query(), view, replace(OPTIONS, sliding_window=window), backend="triton")
    assert len(launches.started) == 3
    attend(make_query(), view, replace(OPTIONS, sliding_window=600), backend="triton")
    assert len(launches.started) == 3


def test_expanded_mask_is_another_form(launches: Launches) -> None:
    """Whether rows share a mask is compiled for."""
    view = make_layer()
    mask = torch.ones(1, 8, 1, view.seq_len, dtype=torch.bool)
    for _ in range(3):
        attend(make_query(), view, replace(OPTIONS, mask=mask[:, :1].expand(mask.shape)), backend="triton")
    assert len(launches.started) == 3
    attend(make_query(), view, replace(OPTIONS, mask=mask), backend="triton")
    assert len(launches.started) == 3


OTHER_CALLS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "heads": lambda query, view: attend(query[:, :4], view, OPTIONS, backend="triton"),
    "scaling": lambda query, view: attend(query, view, AttendOptions(0.5), backend="triton"),
    "strides": lambda query, view: attend(query.contiguous(), view, OPTIONS, backend="triton"),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS.keys())
def test_another_form_is_not_served(launches: Launches, call: Callable[..., Any]) -> None:
    view, query = make_layer(), torch.randn(1, 8, 1, 1152).bfloat16()[..., :128]
    for _ in range(3):
        attend(query, view, OPTIONS, backend="triton")
    assert len(launches.started) == 3
    bound = len(launches.bound)
    call(query, view)
    assert (len(launches.started), len(launches.bound)) == (3, bound + 3)


def test_sink_logits_are_those_of_the_call(launches: Launches) -> None:
    view, logits = make_layer(), [torch.randn(8) for _ in range(3)]
    for tensor in logits:
        attend(make_query(), view, replace(OPTIONS, sink_logits=tensor), backend="triton")
    name, _, _, arguments = launches.started[-1]
    position = fast.fast_combine_kernel.arg_names.index("sink_logits_ptr")
    assert (name, arguments[position]) == ("fast_combine_kernel", logits[2].data_ptr())


def test_copied_sink_logits_are_bound(launches: Launches) -> None:
    """What the host copies for a call is not there in the next."""
    view, options = make_layer(), replace(OPTIONS, sink_logits=torch.randn(8, 2)[:, 0])
    for _ in range(4):
        attend(make_query(), view, options, backend="triton")
    assert not launches.started


def test_unaligned_query_is_bound(launches: Launches) -> None:
    view = make_layer()
    storage = torch.randn(8 * 128 + 1).bfloat16()
    aligned, shifted = (storage[start : start + 1024].view(1, 8, 1, 128) for start in (0, 1))
    for _ in range(2):
        attend(aligned, view, OPTIONS, backend="triton")
    attend(shifted, view, OPTIONS, backend="triton")
    assert not launches.started
    assert len(launches.bound) == 9


def test_launch_hooks_hear_everything(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_layer()
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    for _ in range(3):
        attend(make_query(), view, OPTIONS, backend="triton")
    assert not launches.started
    assert len(launches.bound) == 9


def test_unknown_triton_binds_every_launch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_layer()
    monkeypatch.setattr(replay, "_known_triton", lambda: False)
    for _ in range(3):
        attend(make_query(), view, OPTIONS, backend="triton")
    assert not launches.started


def test_queries_outside_the_tail_are_refused(launches: Launches) -> None:
    """Causal queries that are not all in the tail go to the portable kernel, whatever was prepared."""
    view, query, options = make_layer(), make_query(4), AttendOptions(128**-0.5, is_causal=True)
    for _ in range(2):
        attend(query, view, options, backend="triton")
    step = view.prepared._prepared.popitem()[1]
    assert step.attend(query, view.with_tail(0, 4), options) is not None
    assert step.attend(query, view.with_tail(0, 3), options) is None


# a token that waits for the attention of its step

READERS: dict[str, Callable[[KVStore], Any]] = {
    "view": lambda store: store.view(),
    "crop": lambda store: store.crop(0),
    "next": lambda store: add(store),
    "chunk": lambda store: add(store, 3),
    "copy": lambda store: copy.deepcopy(store),
    "tensors": lambda store: list(store.tensors()),
    "reorder": lambda store: SharedRows().reorder(store, [1, 0]),
    "select": lambda store: store.select_batch(torch.tensor([0, 1])),
    "ring": lambda store: store.tail_keys,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("window", [None, 700], ids=["full", "window"])
def test_who_reads_the_store_finds_the_token(read: Callable[[KVStore], Any], window: int | None) -> None:
    store = make_store(window)
    add(store, 500)
    add(store)
    keys, values = torch.randn(2, 1, 1, 64), torch.randn(2, 1, 1, 64)
    view = store.append(keys, values)
    assert view.waiting is not None
    read(store)
    assert view.waiting is None
    slot = (view.tail_start + view.tail_len - 1) % view.tail_keys.shape[2]
    assert torch.equal(view.tail_keys[:, :, slot], keys[:, :, 0])
    assert torch.equal(view.tail_values[:, :, slot], values[:, :, 0])


def test_copy_keeps_the_token() -> None:
    store = make_store()
    add(store, 20)
    keys = torch.randn(2, 1, 1, 64)
    store.append(keys, keys)
    assert torch.equal(copy.deepcopy(store).tail_keys[:, :, 16], keys[:, :, 0])


def test_token_of_inference_mode_survives_it() -> None:
    """Outside of inference mode its tensors may only be read, and the token that waits must not be lost."""
    with torch.inference_mode():
        store = make_store()
        add(store, 20)
        keys = torch.randn(2, 1, 1, 64)
        store.append(keys, keys)
    for _ in range(2):
        assert torch.equal(store.tail_keys[:, :, 16], keys[:, :, 0])


def test_old_view_does_not_write_again() -> None:
    """After a crop the slot belongs to another token, which a view of before must not overwrite."""
    store, query = make_store(), torch.randn(2, 1, 1, 64)
    add(store, 20)
    old = add(store)
    store.crop(1)
    keys = torch.randn(2, 1, 1, 64)
    store.append(keys, keys)
    attend(query, old, OPTIONS, backend="reference")
    assert torch.equal(store.tail_keys[:, :, 16], keys[:, :, 0])


def test_token_of_a_graph_is_kept_without_it() -> None:
    store = make_store()
    add(store, 20)
    keys = torch.randn(2, 1, 64, 1, requires_grad=True).transpose(2, 3)
    token = store.append(keys, keys).waiting
    assert token is not None
    assert all(state.stride(-1) == 1 and not state.requires_grad for state in token.states or ())


# what a store keeps, and when it lets go


def make_store(window: int | None = None) -> KVStore:
    keys, values = (mse_codec(TurboQuantConfig(), 64, 2, CPU, transposed=t, centered=False) for t in (False, True))
    like = torch.zeros(2, 1, 0, 64)
    kind: dict[str, Any] = {"residual_window": 128, "like_keys": like, "like_values": like, "backend": "reference"}
    if window is not None:
        return WindowStore(keys, values, sliding_window=window, **kind)
    return KVStore(keys, values, sink_tokens=4, **kind)


def add(store: KVStore, count: int = 1) -> Any:
    return store.append(torch.randn(2, 1, count, 64), torch.randn(2, 1, count, 64))


CHANGES: dict[str, Callable[[KVStore], Any]] = {
    "flush": lambda store: [add(store) for _ in range(128)],
    "chunk": lambda store: add(store, 200),
    "crop-blocks": lambda store: store.crop(store.tail_len + 1),
    "select": lambda store: store.select_batch(torch.tensor([1])),
    "reorder": lambda store: SharedRows().reorder(store, [1, 0]),
    "offload": lambda store: store.replace_arenas([arena.clone() for arena in store.arenas]),
    "reset": lambda store: store.reset(),
    "copy": lambda store: copy.deepcopy(store).view(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("window", [None, 1000], ids=["full", "window"])
def test_prepared_calls_end_with_their_tensors(change: Callable[[KVStore], Any], window: int | None) -> None:
    store = make_store(window)
    # a full ring with room for the next tokens, and packed blocks
    add(store, 500)
    view = add(store)
    assert add(store).prepared is view.prepared
    store.crop(1)
    assert store.view().prepared is view.prepared
    changed = change(store)
    after = changed if hasattr(changed, "prepared") and change is CHANGES["copy"] else store.view()
    assert after.prepared is not view.prepared


def test_copied_view_forgets_addresses(launches: Launches) -> None:
    view = make_layer()
    for _ in range(2):
        attend(make_query(), view, OPTIONS, backend="triton")
    assert view.prepared._prepared
    view.memo["block_table"] = "addresses"
    for twin in (copy.deepcopy(view), copy.copy(view), replace(view, tail_len=9)):
        assert not twin.prepared._prepared
    assert not copy.deepcopy(view).memo


def test_growing_ring_ends_prepared_calls() -> None:
    store = make_store()
    add(store, 10)
    views = [add(store) for _ in range(60)]
    kinds = {id(view.prepared): view.tail_keys.shape[2] for view in views}
    assert sorted(kinds.values()) == [32, 64, 128]


@pytest.mark.parametrize("window", [None, 700], ids=["full", "window"])
def test_view_shows_the_present(window: int | None) -> None:
    """The view of every step is what a store without memory of the last one returns."""
    store = make_store(window)
    add(store, 300)
    for step in range(400):
        view = add(store)
        fresh = copy.deepcopy(store).view()
        facts = ("num_blocks", "block_tokens", "tail_start", "tail_len", "packed_tokens", "seq_len", "num_sinks")
        assert [getattr(view, name) for name in facts] == [getattr(fresh, name) for name in facts]
        if step % 97 == 0:
            for mine, theirs in zip((*view.arenas, view.tail_keys), (*fresh.arenas, fresh.tail_keys), strict=True):
                assert mine.shape == theirs.shape
            store.crop(3)


def test_refused_shapes_after_an_accepted_one() -> None:
    store = make_store()
    add(store, 10)
    add(store)
    for keys, values in (
        (torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64)),
        (torch.zeros(2, 1, 1, 64).half(), torch.zeros(2, 1, 1, 64)),
        (torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 2, 64)),
    ):
        with pytest.raises(ValueError, match="must"):
            store.append(keys, values)
    store.select_batch(torch.tensor([0]))
    with pytest.raises(ValueError, match="batch=1"):
        add(store)


# binaries


def test_lengths_do_not_choose_binaries() -> None:
    """Over every length of the window and 40 packed blocks, a kernel has one binary for each set of constants."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.binaries"], cwd=ROOT, capture_output=True, text=True, check=False,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    asked = json.loads(done.stdout)
    assert all(len(constants) == len(set(constants)) for constants in asked.values())
    counts = {name: len(constants) for name, constants in asked.items()}
    # with and without a table of blocks, two kinds of mask for one head and for all, a window; a prompt and a token; a
    # query with and without a token that waits; results merged 16 and 32 at a time, and of rows that may see nothing
    assert counts == {
        "append_kernel": 2, "attend_kernel": 1, "combine_kernel": 1, "quantize_kernel": 1,
        "quantize_query_kernel": 2, "fast_attend_kernel": 7, "fast_combine_kernel": 4,
        "padded append_kernel": 2, "padded rotate_query_kernel": 1, "padded attend_kernel": 2,
        "padded combine_kernel": 1, "padded quantize_kernel": 1,
    }  # fmt: skip


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_repeated_launches_give_the_same_bits(dtype: torch.dtype) -> None:
    view = make_view(make_codec(4, 128, centered=True), make_codec(3, 128, transposed=True), heads=2, arenas=(9,),
                     tail=(150, 256, 200), dtype=dtype)  # fmt: skip
    for length in range(131, 150):
        query, later = torch.randn(1, 8, 1, 128, device="cuda").to(dtype), view.with_tail(200, length)
        out = attend(query, later, OPTIONS)
        assert out.isfinite().all()
        assert torch.equal(out, fast.fast_attend(query, later, OPTIONS))
    assert any(view.prepared._prepared.values())


@pytest.mark.gpu
def test_launches_of_a_decode_step() -> None:
    """A decode step of a layer appends and attends in three launches."""
    keys, values = (mse_codec(TurboQuantConfig(), 128, 4, torch.device("cuda"), transposed=t, centered=False)
                    for t in (False, True))  # fmt: skip
    like = torch.zeros(1, 2, 0, 128, device="cuda", dtype=torch.bfloat16)
    store = KVStore(keys, values, like_keys=like, like_values=like, sink_tokens=4, residual_window=128)

    def step(count: int = 1) -> torch.Tensor:
        fresh = torch.randn(1, 2, count, 128, device="cuda").bfloat16()
        view = store.append(fresh, fresh)
        return attend(torch.randn(1, 8, 1, 128, device="cuda").bfloat16(), view, OPTIONS)

    for count in (600, 1, 1, 1):
        step(count)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ours = [name for name in names if any(part in name for part in ("append", "query", "attend", "combine"))]
    assert len(ours) == 3, names
