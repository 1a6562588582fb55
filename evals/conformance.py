"""Which architectures give, with a compressed cache, the tokens they give with transformers' own.

Every architecture is built as a tiny random model (``conformance_models``) and run through the modes of
``generate()``. With 16 bits per coordinate the store keeps vectors as they are, so the tokens must be those of
transformers' cache; everything but the rounding of a codec is tested by that. The default preset is then looked at
for its distance.

    python -m evals.conformance --full            all architectures, both routes, all modes; 20 minutes on one core
    python -m evals.conformance llama gemma2      these only
    python -m evals.conformance --table           write docs/models.md from the results on disk
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from evals import conformance_models, conformance_vision
from hf_turboquant import TurboQuantCache, TurboQuantConfig, TurboQuantError, enable

EXACT = TurboQuantConfig(key_bits=16, value_bits=16, residual_window=0)
"""Every full block is packed at once, and packing loses nothing."""

LOSSY = TurboQuantConfig(residual_window=0)

ROUTES = ("plain", "registered")
NO_OTHER_CACHE = "takes no cache"
"""Result of a mode in which the model cannot use a DynamicCache either when the caller makes it."""

SECONDS = 300
"""An architecture that takes longer is given up."""


@dataclass
class Outcome:
    """What one architecture did.

    Attributes:
        architecture: Model type.
        family: ``causal``, ``encoder-decoder`` or ``vision-language``.
        transformers: Version.
        results: By route and mode: ``ok``, ``differs`` or what was raised.
        paths: By route: ``compressed``, ``materialised``, ``mixed`` or ``stock``.
        reasons: Operations that dense tensors were rebuilt for, over all modes of the plain route.
        distance: Relative distance of the logits of a decode step with the default preset, no window exact; None where
            the heads of the tiny model are too narrow for its codecs.
        note: Why nothing was run.
    """

    architecture: str
    family: str
    transformers: str = transformers.__version__
    results: dict[str, dict[str, str]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    distance: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether every mode that ran gave the right tokens."""
        return all(result in ("ok", NO_OTHER_CACHE) for modes in self.results.values() for result in modes.values())


@dataclass
class Tally:
    """Calls over all caches of one route."""

    compressed: int = 0
    rebuilt: int = 0
    reasons: set[str] = field(default_factory=set)

    def add(self, cache: Any) -> None:
        """Add the counts of a cache, or of the two inside one of an encoder-decoder."""
        for part in _parts(cache):
            report = part.path_report()
            self.compressed += report.compressed_calls
            self.rebuilt += report.materialized_calls
            for layer in report.layers:
                self.reasons.update(layer.materialized_calls)

    @property
    def path(self) -> str:
        """Say which way attention went."""
        if self.compressed and self.rebuilt:
            return "mixed"
        return "compressed" if self.compressed else "materialised" if self.rebuilt else "stock"


Mode = Callable[["Case", Any], torch.Tensor]


class Case:
    """One model with its inputs, and the modes of generate().

    Args:
        model: In eval mode.
        inputs: What generate() takes for one sequence.
    """

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Any]) -> None:
        self.model = model
        self.inputs = inputs
        self.encoder_decoder = bool(model.config.is_encoder_decoder)

    def cache(self, config: TurboQuantConfig, *, rolls_back: bool = False) -> Any:
        """Return a compressed cache; for modes that roll back, one that this transformers can roll back."""
        windowed = not rolls_back or hasattr(DynamicCache, "activate_past_recording")
        if self.encoder_decoder:
            return TurboQuantCache.encoder_decoder(self.model.config, config, windowed=windowed)
        return TurboQuantCache(self.model.config, config, windowed=windowed)

    def dense_cache(self) -> Any:
        """Return transformers' own cache, made by the caller as ours is."""
        if self.encoder_decoder:
            return EncoderDecoderCache(DynamicCache(config=self.model.config), DynamicCache(config=self.model.config))
        return DynamicCache(config=self.model.config)

    def run(self, cache: Any, inputs: dict[str, Any], **options: Any) -> Any:
        """Generate six tokens greedily."""
        settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, **options}
        if cache is not None:
            settings["past_key_values"] = cache
        if self.encoder_decoder:
            settings["decoder_start_token_id"] = 1
        return self.model.generate(**inputs, **settings)


def greedy(case: Case, cache: Any) -> torch.Tensor:
    """Decode one sequence."""
    return case.run(cache, case.inputs)


def beam(case: Case, cache: Any) -> torch.Tensor:
    """Search with three beams."""
    return case.run(cache, case.inputs, num_beams=3)


def padded(case: Case, cache: Any) -> torch.Tensor:
    """Decode a batch of three, two of them padded on the left."""
    return case.run(cache, _padded_inputs(case, 3))


def padded_beam(case: Case, cache: Any) -> torch.Tensor:
    """Search with two beams for two sequences, one of them padded on the left."""
    return case.run(cache, _padded_inputs(case, 2), num_beams=2)


def prompt_lookup(case: Case, cache: Any) -> torch.Tensor:
    """Guess tokens from the prompt, and take back those that were wrong."""
    return case.run(cache, case.inputs, prompt_lookup_num_tokens=3, eos_token_id=conformance_models.VOCAB + 1)


def chunked_prefill(case: Case, cache: Any) -> torch.Tensor:
    """Read the prompt in chunks."""
    return case.run(cache, case.inputs, prefill_chunk_size=150)


def multi_turn(case: Case, cache: Any) -> torch.Tensor:
    """Answer, read on, and answer again with the same cache."""
    if cache is None:
        cache = DynamicCache(config=case.model.config)
    answer = case.run(cache, case.inputs)
    ids = torch.cat([answer, case.inputs["input_ids"][:, :7]], dim=1)
    return case.run(cache, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


CAUSAL_MODES: dict[str, Mode] = {
    mode.__name__: mode for mode in (greedy, padded, beam, padded_beam, prompt_lookup, chunked_prefill, multi_turn)
}
OTHER_MODES: dict[str, Mode] = {mode.__name__: mode for mode in (greedy, beam)}


def _padded_inputs(case: Case, batch: int) -> dict[str, Any]:
    ids = case.inputs["input_ids"].repeat(batch, 1)
    mask = torch.ones_like(ids)
    for row, padding in ((1, 21), (2, 200)):
        if row < batch:
            ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def check(case: Case, outcome: Outcome, modes: dict[str, Mode], routes: tuple[str, ...] = ROUTES) -> Outcome:
    """Run modes on both routes and write what happened into the outcome."""
    wanted = {name: _attempt(mode, case, None) for name, mode in modes.items()}
    for route in routes:
        tally = Tally()
        results: dict[str, str] = {}
        try:
            context: AbstractContextManager[Any] = enable(case.model) if route == "registered" else nullcontext()
        except TurboQuantError as error:
            outcome.paths[route] = "refused: " + str(error).split("attention: ", 1)[-1].split(". Leave", 1)[0]
            continue
        with context:
            for name, mode in modes.items():
                if isinstance(wanted[name], torch.Tensor):
                    results[name] = _compare(mode, case, wanted[name], tally, rolls_back=mode is prompt_lookup)
        outcome.results[route], outcome.paths[route] = results, tally.path
        if route == "plain":
            outcome.reasons = sorted(tally.reasons)
    if outcome.results.get("plain", {}).get("greedy") == "ok":
        outcome.distance = lossy_distance(case)
    return outcome


def _compare(mode: Mode, case: Case, wanted: torch.Tensor, tally: Tally, *, rolls_back: bool) -> str:
    cache = case.cache(EXACT, rolls_back=rolls_back)
    got = _attempt(mode, case, cache)
    tally.add(cache)
    if isinstance(got, str):
        return NO_OTHER_CACHE if isinstance(_attempt(mode, case, case.dense_cache()), str) else got
    return "ok" if torch.equal(got, wanted) else "differs"


def _attempt(mode: Mode, case: Case, cache: Any) -> torch.Tensor | str:
    """Run a mode; what a model raises is a result here, whatever it is."""
    try:
        with torch.no_grad():
            return mode(case, cache)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001  a model may fail in any way, with any cache
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"


def lossy_distance(case: Case) -> float | None:
    """Return the relative distance of the logits of the second token with the default codecs; NaN if not finite."""
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    with torch.no_grad():
        want = case.run(None, case.inputs, **options).logits[1].float()
        try:
            got = case.run(case.cache(LOSSY), case.inputs, **options).logits[1].float()
        except TurboQuantError:  # heads too narrow for a codec
            return None
    return float((got - want).norm() / want.norm())


def causal_case(model_type: str, class_name: Any) -> Case:
    """Return a causal language model with a prompt of 410 tokens, three blocks and more."""
    model = conformance_models.tiny_model(model_type, class_name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, conformance_models.VOCAB, (1, 59), generator=generator).repeat(1, 7)[:, :410]
    return Case(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def encoder_decoder_case(model_type: str, class_name: Any) -> Case:
    """Return an encoder-decoder with an input of two sequences, one padded, of more than two blocks where it can."""
    model = conformance_models.tiny_model(model_type, class_name)
    generator = torch.Generator().manual_seed(0)
    if model_type == "whisper":
        return Case(model, {"input_features": torch.randn(2, 8, 32, generator=generator)})
    if model_type == "moonshine":
        return Case(model, {"input_values": torch.randn(2, 4000, generator=generator)})
    ids = torch.randint(3, conformance_models.VOCAB, (2, 300), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 200:] = 0
    return Case(model, {"input_ids": ids, "attention_mask": mask})


Builder = Callable[[], Case]


def builders() -> Iterator[tuple[str, str, Builder]]:
    """Yield family, architecture and how to build it, of all that are known."""
    for name, kind in conformance_models.causal_architectures().items():
        yield "causal", name, lambda name=name, kind=kind: causal_case(name, kind)
    for name, kind in conformance_models.encoder_decoder_architectures().items():
        yield "encoder-decoder", name, lambda name=name, kind=kind: encoder_decoder_case(name, kind)
    for name, make in conformance_vision.MODELS.items():
        yield "vision-language", name, lambda make=make: Case(*make())


def run(
    family: str, name: str, build: Builder, modes: list[str] | None = None, routes: tuple[str, ...] = ROUTES
) -> Outcome:
    """Build an architecture and check it; one that cannot be built, or takes too long, says so in its note."""
    outcome = Outcome(name, family)
    known = CAUSAL_MODES if family == "causal" else OTHER_MODES
    chosen = {name: mode for name, mode in known.items() if modes is None or name in modes}
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(SECONDS)
    try:
        return check(build(), outcome, chosen, routes)
    except TimeoutError:
        outcome.note = f"took more than {SECONDS} seconds"
    except Exception as error:  # noqa: BLE001  a configuration may refuse to be tiny in any way
        outcome.note = f"not built: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    finally:
        signal.alarm(0)
    return outcome


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _parts(cache: Any) -> tuple[Any, ...]:
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return (cache,)


def main() -> int:
    """Run what the command line asks for; 1 if an architecture gave wrong tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="model types; all with --full")
    parser.add_argument("--full", action="store_true", help="every architecture")
    parser.add_argument(
        "--shard", default="0/1", help="i/n: every n-th architecture from the i-th on, added to the results"
    )
    parser.add_argument("--table", action="store_true", help="write docs/models.md from the results")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failed = 0
    if arguments.full or arguments.architectures:
        path = arguments.out / f"conformance_{transformers.__version__}.jsonl"
        arguments.out.mkdir(parents=True, exist_ok=True)
        shard, shards = (int(part) for part in arguments.shard.split("/"))
        with path.open("w" if arguments.full and shards == 1 else "a") as file:
            for index, (family, name, build) in enumerate(builders()):
                if index % shards != shard or not (arguments.full or name in arguments.architectures):
                    continue
                start = time.monotonic()
                outcome = run(family, name, build)
                failed += not outcome.passed
                file.write(json.dumps(asdict(outcome)) + "\n")
                file.flush()
                print(f"{time.monotonic() - start:5.1f} s  {_summary(outcome)}", flush=True)
    if arguments.table:
        from evals.conformance_table import write_table

        print(write_table(arguments.out))
    return 1 if failed else 0


def _summary(outcome: Outcome) -> str:
    if outcome.note:
        return f"{outcome.architecture}: {outcome.note}"
    parts = []
    for route, path in outcome.paths.items():
        modes = outcome.results.get(route, {})
        good = sum(result == "ok" for result in modes.values())
        bad = "; ".join(f"{name} {result}" for name, result in modes.items() if result not in ("ok", NO_OTHER_CACHE))
        parts.append(f"{route} {good}/{len(modes)} {path}" + (f" [{bad}]" if bad else ""))
    distance = "" if outcome.distance is None else f", default preset {outcome.distance:.3f}"
    return f"{outcome.architecture}: " + ", ".join(parts) + distance


if __name__ == "__main__":
    sys.exit(main())
