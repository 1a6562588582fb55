"""Kinds of model whose keys are stored in 8 bits whatever the preset says, unless the guard is off."""

from __future__ import annotations

import logging

import pytest
from transformers import DeepseekV3Config, GptOssConfig

from hf_turboquant import PRESETS, TurboQuantCache
from tests.helpers import TINY_CONFIGS

SINKS = GptOssConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
LATENT = DeepseekV3Config(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4)


@pytest.mark.parametrize(("config", "reason"), [(SINKS, "sink logits"), (LATENT, "latents")], ids=["gpt_oss", "mla"])
@pytest.mark.parametrize("preset", ["k4v4", "k3v2"])
def test_fragile_keys_get_eight_bits_and_the_reason_is_logged(config, reason, preset, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_turboquant"):
        settings = TurboQuantCache(config, preset).turboquant_config
    assert (settings.key_bits, settings.value_bits) == (8, PRESETS[preset].value_bits)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert "guard='off'" in caplog.text


@pytest.mark.parametrize("preset", ["k4v4", "k8v4", "paper-prod3"])
def test_without_the_guard_and_elsewhere_settings_are_kept(preset, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_turboquant"):
        kept = TurboQuantCache(SINKS, preset, guard="off").turboquant_config
        plain = TurboQuantCache(TINY_CONFIGS["llama"], preset).turboquant_config
    assert kept == PRESETS[preset].replace(guard="off")
    assert plain == PRESETS[preset]
    assert not caplog.records
