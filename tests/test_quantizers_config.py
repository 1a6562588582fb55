"""Settings of codecs: what contradicts itself is refused before anything is stored; presets say what they are."""

from __future__ import annotations

import json

import pytest
import torch

from hf_turboquant import PRESETS, TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.layout import SECTION_ALIGNMENT
from hf_turboquant.presets import DEFAULT_PRESET, PRESET_NOTES, resolve_config
from hf_turboquant.quantizers import CodecPlan
from tests.helpers import random_kv


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_split": "even"}, r"key_bits must be one of \(2, 3\).*key_split='even'.*bits \+ 1 and bits - 1, got 4"),
        ({"key_split": "even", "key_bits": 1}, "got 1"),
        ({"key_split": "even", "key_bits": 8}, "got 8"),
        ({"key_split": "outlier", "key_bits": 4}, r"one of \(1, 2, 3\).*got 4"),
        ({"key_split": "outlier", "key_bits": 16}, "got 16"),
        ({"value_split": "even"}, "value_bits must be one of .*value_split='even'"),
        ({"key_split": "even", "key_bits": 3, "key_codec": "prod"}, "key_split must be 'none' with key_codec='prod'"),
        ({"key_split": "outlier", "key_bits": 1, "key_codec": "qjl"}, "key_split must be 'none' with key_codec='qjl'"),
        ({"value_split": "even", "value_bits": 2, "value_codec": "group"}, "value_split must be 'none'.*'group'"),
        ({"key_codec": "prod", "key_bits": 8}, r"key_bits must be one of \(2, 3, 4\).*key_codec='prod', got 8"),
        ({"key_codec": "qjl"}, r"key_bits must be one of \(1,\).*key_codec='qjl', got 4"),
        ({"key_codec": "polar", "key_bits": 3}, r"key_bits must be one of \(4,\).*key_codec='polar', got 3"),
        ({"value_codec": "polar", "value_bits": 2}, "value_codec='polar', got 2"),
        ({"value_codec": "group", "value_bits": 1}, r"value_bits must be one of \(2, 4\).*'group', got 1"),
        ({"value_codec": "group", "value_bits": 3}, "got 3"),
        ({"value_codec": "group", "value_bits": 8}, "got 8"),
        ({"value_codec": "group", "value_bits": 16}, "got 16"),
        (
            {"value_codec": "group", "value_centering": "block"},
            "value_centering must be 'none' with value_codec='group'",
        ),
        ({"value_codec": "prod"}, "value_codec must be one of"),
        ({"key_codec": "group"}, "key_codec must be one of"),
        ({"key_split": "half"}, "key_split must be one of"),
        ({"split_unit": "head"}, "split_unit must be one of"),
        ({"guard": True}, "guard must be one of"),
        ({"layer_bits": 3}, "layer_bits must map layer indices"),
        ({"layer_bits": "0"}, "layer_bits must map layer indices"),
        ({"layer_bits": {0: 4}}, r"got an entry \(0, 4\)"),
        ({"layer_bits": {0: (4, 4, 4)}}, "got an entry"),
        ({"layer_bits": {0: (5, 4)}}, "key_bits of layer 0 in layer_bits must be one of"),
        ({"layer_bits": {0: (4, 0)}}, "value_bits of layer 0 in layer_bits must be one of"),
        ({"layer_bits": {-1: (4, 4)}}, "a layer index of layer_bits must be a non-negative int.*got -1"),
        ({"layer_bits": {"first": (4, 4)}}, "a layer index of layer_bits.*got 'first'"),
        ({"layer_bits": [(1, (4, 4)), ("1", (8, 4))]}, "got layer 1 twice"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TurboQuantConfig(**settings)


def test_layer_bits_are_hashable_and_survive_json() -> None:
    config = TurboQuantConfig(layer_bits={27: (8, 4), 0: [16, 16]})
    assert config.layer_bits == ((0, (16, 16)), (27, (8, 4)))
    assert hash(config) == hash(TurboQuantConfig(layer_bits=((0, (16, 16)), (27, (8, 4)))))
    assert TurboQuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["layer_bits"] == {"0": [16, 16], "27": [8, 4]}


def test_layer_bits_are_copied() -> None:
    given = {0: (8, 8)}
    config = TurboQuantConfig(layer_bits=given)
    given[0] = (1, 1)
    assert config.for_layer(0).key_bits == 8


@pytest.mark.parametrize(
    ("settings", "layer", "expected"),
    [
        pytest.param({"key_split": "even", "key_bits": 3}, (2, 4), {"key_bits": 2, "key_split": "even"}, id="stays"),
        pytest.param({"key_split": "even", "key_bits": 3}, (8, 4), {"key_bits": 8, "key_split": "none"}, id="split"),
        pytest.param({"key_codec": "prod"}, (16, 4), {"key_codec": "mse"}, id="prod"),
        pytest.param({"value_codec": "group"}, (4, 8), {"value_codec": "mse", "value_bits": 8}, id="group"),
        pytest.param({"value_split": "outlier", "value_bits": 2}, (4, 4), {"value_split": "none"}, id="value split"),
    ],
)
def test_layer_of_other_width_drops_what_has_no_such_width(settings, layer, expected) -> None:
    config = TurboQuantConfig(**settings, layer_bits={1: layer})
    own = config.for_layer(1)
    assert {name: getattr(own, name) for name in expected} == expected
    assert (own.key_bits, own.value_bits) == layer
    assert own.layer_bits == ()
    assert config.for_layer(0) == TurboQuantConfig(**settings)


def test_every_preset_has_a_note_of_one_line() -> None:
    assert list(PRESET_NOTES) == list(PRESETS)
    assert DEFAULT_PRESET in PRESETS
    for note in PRESET_NOTES.values():
        assert note.endswith(".")
        assert len(note) < 120
        assert "\n" not in note


@pytest.mark.parametrize(
    ("preset", "key_bits", "value_bits"),
    [
        # head_dim 128: a norm a group is 16 bits of 128 channels, a mean a block 16 bits of 128 tokens
        ("k8v4", 8.125, 4.125),
        ("k4v4", 4.25, 4.125),
        ("k4v3", 4.25, 3.125),
        ("k3v3", 3.375, 3.125),
        ("k3v2", 3.375, 2.125),
        ("k2v2", 2.375, 2.125),
        ("tq3.5", 3.5, 3.5),
        ("tq2.5", 2.5, 2.5),
        ("paper-mse3", 3.125, 3.125),
        ("paper-prod3", 3.25, 3.125),
        ("polar", 3.875, 3.875),
        ("thor-k3v2", 3.25, 3.0),
    ],
)
def test_preset_costs_what_its_parts_do(preset: str, key_bits: float, value_bits: float) -> None:
    keys, values = random_kv(1, 1, 1, 128, dtype=torch.bfloat16)
    codecs = CodecPlan(PRESETS[preset], 0, keys, values).initial
    assert (codecs.keys.format.bits_per_value, codecs.values.format.bits_per_value) == (key_bits, value_bits)


@pytest.mark.parametrize("preset", ["tq2.5", "tq3.5", "paper-mse3", "paper-prod3", "polar"])
def test_presets_of_papers_keep_nothing_exact(preset: str) -> None:
    config = resolve_config(preset)
    assert (config.sink_tokens, config.residual_window, config.guard) == (0, 0, "off")
    assert (config.key_centering, config.scale, config.rotation, config.projection) == (
        "none",
        "norm",
        "qr",
        "gaussian",
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_sections_of_a_record_are_aligned_and_do_not_overlap(preset: str, head_dim: int) -> None:
    keys, values = random_kv(1, 1, 1, head_dim)
    codecs = CodecPlan(PRESETS[preset], 0, keys, values).initial
    for fmt in (codecs.keys.format, codecs.values.format):
        end = 0
        for section in fmt.sections.values():
            assert section.offset % SECTION_ALIGNMENT == 0
            assert section.offset >= end
            end = section.offset + section.nbytes
        assert end <= fmt.nbytes < end + SECTION_ALIGNMENT
