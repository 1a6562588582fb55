"""Channel groups: who gets the bits, what it buys, and that the choice stays with the store."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_turboquant import TurboQuantConfig
from hf_turboquant.errors import ConfigError, ValueRangeError
from hf_turboquant.layout import EXACT_BITS, ChannelGroup
from hf_turboquant.ops import AttendOptions, attend, materialize
from hf_turboquant.quantizers import CodecPlan, build_key_codec
from hf_turboquant.quantizers.split import channel_energy, channel_groups, order_channels
from hf_turboquant.store import KVStore
from tests.helpers import random_kv
from tests.test_quantizers_attend import GROUP, dense_reference

CPU = torch.device("cpu")
EVEN = TurboQuantConfig(key_bits=3, value_bits=3, key_split="even", split_unit="channel", guard="off")
SPLITS = {
    "even 3": EVEN,
    "even 2": EVEN.replace(key_bits=2, value_bits=2),
    "even pairs": EVEN.replace(split_unit="rope_pair"),
    "outlier": EVEN.replace(key_split="outlier"),
    "outlier both": EVEN.replace(key_split="outlier", value_split="outlier", key_bits=2, value_bits=2),
    "even values": EVEN.replace(value_split="even", value_centering="block"),
    "not centred": EVEN.replace(key_centering="none", rotation="qr"),
}


def planned_store(config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, layer_idx: int = 0) -> KVStore:
    plan = CodecPlan(config, layer_idx, keys, values)
    return KVStore(
        plan.initial.keys,
        plan.initial.values,
        like_keys=keys,
        like_values=values,
        sink_tokens=config.sink_tokens,
        residual_window=config.residual_window,
        choose=plan.choose,
    )


def uneven_kv(tokens: int, *, batch: int = 2, heads: int = 2, head_dim: int = 64, seed: int = 0):
    """Return keys whose channels differ by head in a random order, and values likewise."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(head_dim, generator=torch.Generator().manual_seed(h)) for h in range(heads)])
    spread = torch.logspace(-1, 0.6, head_dim)[order][None, :, None]
    keys, values = (torch.randn(batch, heads, tokens, head_dim, generator=generator) * spread for _ in range(2))
    return keys + 3 * spread, values


def filled(config: TurboQuantConfig, tokens: int = 700, *, step: int | None = None, **geometry: int) -> KVStore:
    keys, values = uneven_kv(tokens, **geometry)
    store = planned_store(config, keys, values)
    for start in range(0, tokens, step or tokens):
        store.append(keys[:, :, start : start + (step or tokens)], values[:, :, start : start + (step or tokens)])
    return store


def contents(store: KVStore) -> tuple[torch.Tensor, torch.Tensor]:
    return materialize(store.view(), which="keys"), materialize(store.view(), which="values")


# groups and orders


@pytest.mark.parametrize(
    ("split", "bits", "exact", "expected"),
    [
        ("none", 4, 0, [(0, 128, 4)]),
        ("even", 3, 0, [(0, 64, 4), (64, 64, 2)]),
        ("even", 2, 0, [(0, 64, 3), (64, 64, 1)]),
        ("outlier", 2, 0, [(0, 32, 3), (32, 96, 2)]),
        ("outlier", 3, 0, [(0, 32, 4), (32, 96, 3)]),
        ("none", 4, 8, [(0, 8, EXACT_BITS), (8, 120, 4)]),
        ("even", 3, 8, [(0, 8, EXACT_BITS), (8, 56, 4), (64, 64, 2)]),
    ],
)
def test_groups_of_a_split(split, bits, exact, expected) -> None:
    groups = channel_groups(split, 128, bits, exact_channels=exact)
    assert groups == tuple(ChannelGroup(*entry) for entry in expected)


def test_strongest_channels_come_first_and_keep_their_order() -> None:
    energy = torch.tensor([[1.0, 9, 2, 8, 3, 7, 4, 6], [8.0, 7, 6, 5, 4, 3, 2, 1]])
    order = order_channels(energy, channel_groups("even", 8, 3), "channel")
    assert order.dtype == torch.int16
    assert order.tolist() == [[1, 3, 5, 7, 0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_pairs_of_the_position_embedding_stay_together() -> None:
    # channel j turns with j + 4
    energy = torch.tensor([[0.0, 5, 1, 0, 9, 0, 1, 3]])
    assert order_channels(energy, channel_groups("even", 8, 3), "rope_pair").tolist() == [[0, 1, 4, 5, 2, 3, 6, 7]]


def test_energy_is_that_of_the_first_block_without_its_mean() -> None:
    keys, _ = uneven_kv(300)
    block = keys[:, :, :128]
    expected = block.var(dim=2, unbiased=False).mean(dim=0)
    torch.testing.assert_close(channel_energy(keys, centered=True), expected)
    torch.testing.assert_close(channel_energy(keys, centered=False), block.square().mean(dim=(0, 2)))


@pytest.mark.parametrize(
    ("config", "head_dim", "message"),
    [
        pytest.param(EVEN, 66, "multiple of 4.*key_split='even'.*got 66.*key_split='none'", id="even"),
        pytest.param(EVEN.replace(key_split="outlier"), 20, "multiple of 8.*key_split='outlier'", id="outlier"),
        pytest.param(EVEN.replace(value_split="outlier"), 20, "value_split='outlier'", id="values"),
        pytest.param(EVEN, 4, "at least 4.*got 4", id="small"),
        pytest.param(EVEN.replace(value_codec="group", value_bits=2), 48, "multiple of 32.*got 48", id="group"),
        pytest.param(TurboQuantConfig(key_codec="polar"), 72, "multiple of 16.*got 72", id="polar"),
        pytest.param(TurboQuantConfig(value_codec="polar"), 72, "multiple of 16.*got 72", id="polar values"),
        pytest.param(TurboQuantConfig(), 33, "even", id="odd"),
    ],
)
def test_head_dim_that_cannot_be_served_is_refused_at_once(config, head_dim: int, message: str) -> None:
    keys, values = random_kv(1, 1, 1, head_dim)
    with pytest.raises(ConfigError, match=message):
        CodecPlan(config, 0, keys, values)


# what it buys


def test_the_split_follows_the_energies_of_each_head() -> None:
    store = filled(EVEN)
    order = store.keys.tables.channel_order
    assert order is not None
    keys, _ = uneven_kv(700)
    energy = channel_energy(keys[:, :, 4:], centered=True)
    for head in range(2):
        strong = energy[head, order[head, :32].long()]
        weak = energy[head, order[head, 32:].long()]
        assert strong.min() >= weak.max()


@pytest.mark.parametrize(
    ("split", "gain"), [pytest.param("even", 2.5, id="even"), pytest.param("outlier", 1.5, id="outlier")]
)
def test_uneven_channels_are_coded_better_in_groups(split, gain: float) -> None:
    plain, grouped = filled(EVEN.replace(key_split="none")), filled(EVEN.replace(key_split=split))
    keys, _ = uneven_kv(700)
    errors = [(contents(store)[0] - keys).square().sum() for store in (plain, grouped)]
    assert errors[0] > gain * errors[1]


@pytest.mark.parametrize("config", SPLITS.values(), ids=SPLITS.keys())
def test_attend_equals_dense_attention_on_rebuilt_tensors(config: TurboQuantConfig) -> None:
    store = filled(config, 600, head_dim=32)
    query = torch.randn(2, 2 * GROUP, 2, 32)
    options = AttendOptions(scaling=0.2, is_causal=True)
    got = attend(query, store.view(), options)
    torch.testing.assert_close(got.double(), dense_reference(query, store, options), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "key_bits", "value_bits"),
    [
        # codes, a norm a group, a mean
        pytest.param(EVEN, 3 + 32 / 128 + 16 / 128, 3 + 16 / 128, id="even"),
        pytest.param(SPLITS["outlier both"].replace(key_centering="none"), 2.5, 2.5, id="the paper's 2.5 bits"),
        pytest.param(
            SPLITS["outlier both"].replace(key_centering="none", key_bits=3, value_bits=3), 3.5, 3.5, id="3.5 bits"
        ),
    ],
)
def test_bits_of_a_split(config: TurboQuantConfig, key_bits: float, value_bits: float) -> None:
    keys, values = random_kv(1, 1, 1, 128)
    codecs = CodecPlan(config, 0, keys, values).initial
    assert (codecs.keys.format.bits_per_value, codecs.values.format.bits_per_value) == (key_bits, value_bits)


# the choice stays


@pytest.mark.parametrize("step", [1, 64, 130, 300])
def test_the_choice_does_not_depend_on_how_a_prompt_is_cut(step: int) -> None:
    once, pieces = filled(EVEN), filled(EVEN, step=step)
    for a, b in zip(contents(once), contents(pieces), strict=True):
        assert torch.equal(a, b)


def test_choice_survives_crop_batch_operations_and_copies() -> None:
    store = filled(SPLITS["outlier both"])
    order = store.keys.tables.channel_order
    before = contents(store)
    twin = copy.deepcopy(store)
    store.select_batch(torch.tensor([1, 0, 1]))
    for got, want in zip(contents(store), before, strict=True):
        assert torch.equal(got, want[[1, 0, 1]])
    store.crop(store.seq_len)
    keys, values = random_kv(3, 2, 400, 64)
    store.append(keys, values)
    assert store.keys.tables.channel_order is order
    for got, want in zip(contents(twin), before, strict=True):
        assert torch.equal(got, want)


def test_reset_forgets_the_choice() -> None:
    store = filled(EVEN)
    order = store.keys.tables.channel_order
    store.reset()
    assert store.keys.tables.channel_order is None
    keys, values = random_kv(2, 2, 400, 64)
    store.append(keys, values)
    assert not torch.equal(store.keys.tables.channel_order, order)


def test_order_is_counted_as_bytes_of_the_store() -> None:
    store = filled(SPLITS["outlier both"])
    sizes = [tensor.numel() * tensor.element_size() for tensor in store.tensors() if tensor.dtype == torch.int16]
    assert sizes == [2 * 64 * 2] * 2


def test_tables_but_the_order_are_shared_between_layers() -> None:
    keys, values = uneven_kv(400)
    first, second = (planned_store(EVEN, keys, values, layer_idx=index) for index in range(2))
    first.append(keys, values)
    second.append(keys.flip(-1), values)
    assert first.keys.tables.rotation is second.keys.tables.rotation
    assert first.keys.tables.byte_tables is second.keys.tables.byte_tables
    assert not torch.equal(first.keys.tables.channel_order, second.keys.tables.channel_order)


@pytest.mark.parametrize("which", [0, 1])
def test_a_first_block_that_cannot_be_quantized_decides_nothing(which: int) -> None:
    config = EVEN.replace(value_split="even", residual_window=0, sink_tokens=0)
    pair = uneven_kv(128)
    store = planned_store(config, *pair)
    poisoned = [tensor.clone() for tensor in pair]
    poisoned[which][0, 0, 5, 5] = torch.nan
    with pytest.raises(ValueRangeError, match="finite"):
        store.append(*poisoned)
    assert (store.seq_len, store.num_blocks, store.keys.tables.channel_order) == (0, 0, None)
    store.append(*pair)
    assert store.num_blocks == 1


def test_norm_overflow_in_the_first_block_decides_nothing() -> None:
    store = planned_store(EVEN, *uneven_kv(1))
    keys, values = uneven_kv(300)
    with pytest.raises(ValueRangeError, match="65504"):
        store.append(keys * 1e6, values)
    assert store.keys.tables.channel_order is None
    assert not store.arenas
    store.append(keys, values)
    assert store.keys.tables.channel_order is not None


def test_plain_codecs_need_no_choice() -> None:
    config = TurboQuantConfig(guard="off")
    store = filled(config)
    assert store.keys.tables is build_key_codec(config, 64, torch.float32, CPU).tables
