"""A store of fixed size: the kernels that read its counts on the device, against the reference that reads them here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.ops import AttendOptions, VectorCodec, quantize, reference
from hf_turboquant.ops.static_ops import static_append, static_attend
from hf_turboquant.ops.static_spec import (
    CodecSpec,
    Count,
    StaticSpec,
    codec_tensors,
    exact_view,
    register_spec,
    register_tables,
)
from hf_turboquant.quantizers import build_key_codec, build_value_codec
from tests.helpers import random_kv
from tests.ops.cases import DEVICE

pytest.importorskip("triton")

FORMATS = {
    "k4v4": TurboQuantConfig(guard="off"),
    "k2v2": TurboQuantConfig(guard="off", key_bits=2, value_bits=2, key_centering="none"),
    "prod": TurboQuantConfig(guard="off", key_codec="prod", key_bits=3),
    "exact": TurboQuantConfig(key_bits=16, value_bits=16),
}


@dataclass
class Store:
    """The arguments of the ops, with random tokens in every place."""

    spec: StaticSpec
    state: torch.Tensor
    tables: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.buffers = self.spec.views(self.state)
        self.lengths, self.exact_keys, self.exact_values, self.arena = self.buffers

    @property
    def codecs(self) -> tuple[VectorCodec, VectorCodec]:
        return self.spec.codecs(self.tables, self.state.device)

    def clone(self, backend: str) -> Store:
        """Return the same store for another backend."""
        return Store(replace(self.spec, backend=backend), self.state.clone(), self.tables)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        static_append(keys, values, self.state, self.tables, register_spec(self.spec))

    def attend(self, query: torch.Tensor, **options: object) -> torch.Tensor:
        given = {"mask": None, "sink_logits": None, "softcap": None, **options}
        return static_attend(
            query, self.state, self.tables, given["mask"], given["sink_logits"], register_spec(self.spec), 0.125,
            given["softcap"],
        )  # fmt: skip


def make_store(
    config: TurboQuantConfig,
    *,
    sinks: int,
    blocks: int,
    tail: int,
    start: int = 0,
    sink_tokens: int = 4,
    window: int = 128,
    capacity: int = 5,
    head_dim: int = 64,
    heads: int = 2,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    named: bool = False,
) -> Store:
    """Return a store with these counts, for the reference."""
    codecs = build_key_codec(config, head_dim, dtype, DEVICE), build_value_codec(config, head_dim, dtype, DEVICE)
    tables = [*codec_tensors(codecs[0]), *codec_tensors(codecs[1])]
    spec = StaticSpec(
        CodecSpec.of(codecs[0]), CodecSpec.of(codecs[1]), sink_tokens, window, sink_tokens + window + 128 * capacity,
        batch, heads, (dtype, dtype), "reference", register_tables(tables, torch.device(DEVICE)) if named else "",
    )  # fmt: skip
    state = torch.zeros(spec.state_bytes, dtype=torch.uint8, device=DEVICE)
    store = Store(spec, state, [] if named else tables)
    for exact, states in zip(store.buffers[1:3], random_kv(batch, heads, sink_tokens + spec.slots, head_dim, seed=1)):
        exact.copy_(states)
    packed = (t.to(DEVICE, dtype) for t in random_kv(batch, heads, 128 * capacity, head_dim, seed=2))
    quantize(*packed, store.arena, *codecs, backend="reference")
    store.lengths[:5] = torch.tensor([sinks, blocks, start, tail, sinks + 128 * blocks + tail])
    return store


STATES = {
    "empty": {"sinks": 0, "blocks": 0, "tail": 0},
    "sinks_not_full": {"sinks": 2, "blocks": 0, "tail": 0},
    "first_after_sinks": {"sinks": 4, "blocks": 0, "tail": 0},
    "no_block": {"sinks": 4, "blocks": 0, "tail": 200},
    "before_first_block": {"sinks": 4, "blocks": 0, "tail": 254},
    "first_block": {"sinks": 4, "blocks": 0, "tail": 255},
    "one_block": {"sinks": 4, "blocks": 1, "tail": 128, "start": 128},
    "wrapped": {"sinks": 4, "blocks": 3, "tail": 255, "start": 128},
    "last_block": {"sinks": 4, "blocks": 4, "tail": 255},
    "no_window": {"sinks": 4, "blocks": 2, "tail": 127, "window": 0},
    "no_sinks": {"sinks": 0, "blocks": 2, "tail": 40, "sink_tokens": 0},
    "idle_splits": {"sinks": 4, "blocks": 1, "tail": 20, "capacity": 12},
    "tables_by_name": {"sinks": 4, "blocks": 1, "tail": 255, "named": True},
}


def check_step(store: Store, **options: object) -> None:
    """Let a token come and be attended to by both backends, and compare all that changes."""
    shape = store.exact_keys.shape
    dtype = store.exact_keys.dtype
    keys, values = (t.to(DEVICE) for t in random_kv(shape[0], shape[1], 1, shape[3], seed=5, dtype=dtype))
    query = torch.randn(shape[0], 2 * shape[1], 1, shape[3], generator=torch.Generator().manual_seed(6))
    query = query.to(DEVICE, dtype)
    fused = store.clone("triton")
    store.append(keys, values)
    fused.append(keys, values)
    assert fused.lengths[:7].tolist() == store.lengths[:7].tolist()
    assert torch.equal(fused.exact_keys, store.exact_keys)
    assert torch.equal(fused.exact_values, store.exact_values)
    codecs = store.codecs
    blocks = int(store.lengths[Count.BLOCKS])
    split = codecs[0].format.nbytes
    for codec, part in zip(codecs, (slice(0, split), slice(split, None)), strict=True):
        rebuilt = [reference.dequantize(each.arena[:blocks, ..., part], codec) for each in (fused, store)]
        assert blocks == 0 or float((rebuilt[0] - rebuilt[1]).norm() / rebuilt[1].norm()) < 1e-2
    expected = store.attend(query, **options)
    result = fused.attend(query, **options)
    assert torch.isfinite(result).all()
    assert float((result - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_step_equals_reference(state):
    check_step(make_store(FORMATS["k4v4"], **state))


@pytest.mark.parametrize("name", ["k2v2", "prod", "exact"])
def test_formats(name):
    check_step(make_store(FORMATS[name], sinks=4, blocks=2, tail=255))


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"sink_logits": torch.tensor([1.0, -1.0, 0.5, 2.0])}], ids=str)
def test_options(options):
    options = {name: item.to(DEVICE) if isinstance(item, torch.Tensor) else item for name, item in options.items()}
    check_step(make_store(FORMATS["k4v4"], sinks=4, blocks=2, tail=7), **options)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_of_all_there_is_room_for(kind):
    store = make_store(FORMATS["k4v4"], sinks=4, blocks=1, tail=30, batch=2)
    mask = torch.ones(2, 1, 1, store.spec.max_tokens, dtype=torch.bool, device=DEVICE)
    mask[1, ..., :70] = False
    mask[..., 4 + 128 + 31 :] = False
    if kind == "float":
        mask = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -torch.inf)
    check_step(store, mask=mask)


def test_equal_tables_have_one_name():
    codec = build_key_codec(FORMATS["k4v4"], 64, torch.float32, DEVICE)
    tables, device = codec_tensors(codec), torch.device(DEVICE)
    name = register_tables(tables, device)
    assert register_tables([tensor.clone() for tensor in tables], device) == name
    assert register_tables([tensor * 2 for tensor in tables], device) != name


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_full_store_takes_no_token(backend):
    store = make_store(FORMATS["k4v4"], sinks=4, blocks=5, tail=128).clone(backend)
    before = [tensor.clone() for tensor in store.buffers[1:]]
    keys, values = (t.to(DEVICE) for t in random_kv(1, 2, 1, 64, seed=5))
    store.append(keys, values)
    assert store.lengths[: Count.OVERFLOW + 1].tolist() == [4, 5, 0, 128, store.spec.max_tokens, 1]
    assert all(torch.equal(old, new) for old, new in zip(before, store.buffers[1:], strict=True))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_values_that_cannot_be_packed_leave_a_fault(backend):
    store = make_store(FORMATS["k4v4"], sinks=4, blocks=0, tail=255).clone(backend)
    keys, values = (t.to(DEVICE) for t in random_kv(1, 2, 1, 64, seed=5))
    store.exact_keys[0, 1, 40, 3] = torch.nan
    store.append(keys, values)
    assert int(store.lengths[Count.FAULT]) != 0
    assert int(store.lengths[Count.BLOCKS]) == 1


def test_many_steps_count_like_the_growing_store():
    """From nothing through two blocks: counts, and attention over the same tokens."""
    store = make_store(FORMATS["exact"], sinks=0, blocks=0, tail=0, window=0, capacity=3)
    keys, values = (t.to(DEVICE) for t in random_kv(1, 2, 300, 64, seed=8))
    for token in range(300):
        store.append(keys[:, :, token : token + 1], values[:, :, token : token + 1])
    assert store.lengths[:5].tolist() == [4, 2, 0, 40, 300]
    query = torch.randn(1, 4, 1, 64, device=DEVICE)
    view = exact_view(store.spec, store.codecs, *store.buffers[1:], store.lengths.tolist())
    scores = query.double() @ keys.repeat_interleave(2, 1).double().mT * 0.125
    expected = scores.softmax(-1) @ values.repeat_interleave(2, 1).double()
    assert torch.allclose(store.attend(query).double(), expected, atol=1e-5)
    assert torch.allclose(reference.attend(query, view, AttendOptions(scaling=0.125)).double(), expected, atol=1e-5)
