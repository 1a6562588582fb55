"""A sample of the conformance run: every kind of model in every mode, the long tail in one mode each.

``python -m evals.conformance --full`` runs all of it.
"""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from evals import conformance, conformance_models, conformance_table, conformance_vision
from evals.common import RESULTS
from evals.conformance import CAUSAL_MODES, EXACT, Outcome

REPRESENTATIVES = {
    "llama": "compressed",
    "gemma2": "materialised",
    "gemma3_text": "compressed",
    "gpt_oss": "materialised",
    "gpt_bigcode": "compressed",
    "deepseek_v3": "materialised",
    "falcon_h1": "compressed",
    "qwen3_next": "compressed",
    "llama4_text": "compressed",
    "bloom": "materialised",
}
"""One of each kind: plain, softcapped, windowed, with sinks, multi-query, MLA, hybrids, chunked, its own attention."""

HYBRIDS = {"falcon_h1", "qwen3_next"}
ENCODER_DECODERS = ("bart", "t5", "whisper")
VISION = ("qwen2_vl", "gemma3 (images)", "mllama")


def known(name: str) -> bool:
    """Say whether this transformers has an architecture in a form that takes a cache made by the caller."""
    has_shared_cache = hasattr(transformers.cache_utils, "LinearAttentionLayer")
    return name in conformance_models.causal_architectures() and (name not in HYBRIDS or has_shared_cache)


def outcome(
    family: str, name: str, modes: list[str] | None = None, routes: tuple[str, ...] = conformance.ROUTES
) -> Outcome:
    build = next(make for kind, known_name, make in conformance.builders() if (kind, known_name) == (family, name))
    return conformance.run(family, name, build, modes, routes)


def assert_right(result: Outcome) -> None:
    assert not result.note
    assert result.results["plain"]
    wrong = {
        (route, mode): what for route, modes in result.results.items() for mode, what in modes.items() if what != "ok"
    }
    assert not wrong
    assert result.distance is not None
    assert math.isfinite(result.distance)
    assert result.distance < 0.5


CASES = [("causal", name, path) for name, path in REPRESENTATIVES.items() if known(name)]
CASES += [("encoder-decoder", name, "compressed") for name in ENCODER_DECODERS]
CASES += [("vision-language", name, "compressed") for name in VISION]


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name", "path"), CASES, ids=[name for _, name, _ in CASES])
def test_every_kind_of_model_in_every_mode(family: str, name: str, path: str) -> None:
    result = outcome(family, name)
    assert_right(result)
    assert result.paths["plain"] == path


SAMPLED = (
    "apertus", "bert", "codegen", "cohere2", "ctrl", "diffllama", "doge", "electra", "ernie4_5", "exaone4", "falcon",
    "gemma3n_text", "glm4", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "helium", "jetmoe", "lfm2", "mistral",
    "mixtral", "modernbert-decoder", "nemotron", "olmo2", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "recurrent_gemma", "smollm3", "stablelm", "starcoder2", "xglm",
)  # fmt: skip


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("index", "name"), [(i, name) for i, name in enumerate(SAMPLED) if known(name)], ids=str)
def test_the_long_tail_in_a_mode_each(index: int, name: str) -> None:
    modes = list(CAUSAL_MODES)
    result = outcome("causal", name, ["greedy", modes[1 + index % (len(modes) - 1)]], ("plain",))
    assert result.results["plain"]["greedy"] == "ok"
    assert set(result.results["plain"].values()) == {"ok"}


def test_the_comparison_notices_a_wrong_token() -> None:
    case = conformance.causal_case("llama", conformance_models.causal_architectures()["llama"])
    wanted = conformance.greedy(case, None).clone()
    tally = conformance.Tally()
    assert conformance._compare(conformance.greedy, case, wanted, tally, rolls_back=False) == "ok"
    wanted[0, -1] += 1
    assert conformance._compare(conformance.greedy, case, wanted, tally, rolls_back=False) == "differs"
    assert tally.path == "compressed"


def test_prompts_are_long_enough_to_be_in_codes_and_to_leave_a_window() -> None:
    case = conformance.causal_case("llama", conformance_models.causal_architectures()["llama"])
    cache = case.cache(EXACT)
    with torch.no_grad():
        conformance.greedy(case, cache)
    assert cache.layers[0].store.num_blocks == 3
    assert case.inputs["input_ids"].shape[1] > conformance_models.WINDOW


def test_every_vision_language_model_has_an_image_in_its_prompt() -> None:
    for name in VISION:
        _, inputs = conformance_vision.MODELS[name]()
        assert (inputs["input_ids"] == conformance_vision.IMAGE).any()


def test_the_page_says_what_the_results_say(tmp_path, monkeypatch) -> None:
    page = conformance_table.TARGET.read_text(encoding="utf-8")
    monkeypatch.setattr(conformance_table, "TARGET", tmp_path / "models.md")
    conformance_table.write_table(RESULTS)
    assert (tmp_path / "models.md").read_text(encoding="utf-8") == page
