"""Measure how far the next-token distribution moves when the past is read from a compressed cache.

A window of text is split: the first 1024 tokens are the prompt, the next 512 are decoded teacher-forced, 32 at a time,
so that every scored position reads the cache. (A single forward pass over a text reads no cache at all: it attends to
its own fresh keys and values, and shows no difference even at 2 bits.) The reference is ``DynamicCache`` on the same
tokens. KL is that of the full distribution, in nats.

    python -m evals.quality                                 # every preset and every baseline; updates docs/quality.md
    python -m evals.quality --cache k3v3:key_centering=none --out /tmp/q.jsonl
    python -m evals.quality --ablations                     # one setting at a time, with paired differences
    python -m evals.quality --model DIRECTORY               # another model; docs hold those of quality_report.MODELS

Caches measured before on the same text and protocol are not measured again, unless ``--fresh`` is given.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm
from transformers import Cache

from evals import quality_report
from evals.baselines import BASELINES, held, installed_quantized, make_cache, settings_of
from evals.common import (
    EXCERPT,
    cache_argument,
    environment,
    fill_cache,
    first_tokens,
    load_model,
    prefill,
    read_results,
)
from evals.quality_report import ABLATION_FILE
from hf_turboquant import PRESETS

ABLATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "k4v4": ("key_centering=none,guard=off", "value_centering=block"),
    "k3v3": (
        "key_split=none",
        "key_split=none,key_centering=none,guard=off",
        "split_unit=channel",
        "value_split=even",
        "value_centering=block",
        "sink_tokens=0",
        "residual_window=0",
        "residual_window=256",
        "scale=norm",
        "scale=unbiased",
        "rotation=qr",
        "seed=1",
    ),
    "k2v2": ("key_split=none", "split_unit=channel"),
}
"""By preset, the settings to change."""


@dataclass(frozen=True)
class Protocol:
    """What is scored. Lengths in tokens.

    Attributes:
        prefill: Prompt, given to the cache in one forward pass.
        decode: Tokens decoded after it, all of them scored.
        block: Tokens decoded at a time. A block no longer than the exact window gives what single tokens give, but
            that the cache may quantize a block of the past up to ``block - 1`` tokens earlier.
        windows: Disjoint windows of the text.
    """

    prefill: int = 1024
    decode: int = 512
    block: int = 32
    windows: int = 3


# text


def read_text(path: Path) -> str:
    """Return a text with the line breaks inside paragraphs removed."""
    paragraphs = re.sub(r"[ \t]*\n[ \t]*\n\s*", "\n\n", path.read_text(encoding="utf-8"))
    return re.sub(r"(?<!\n)\n(?!\n)", " ", paragraphs)


def cut_windows(ids: Sequence[int], protocol: Protocol, first: Sequence[int] = ()) -> list[torch.Tensor]:
    """Return disjoint runs ``(1, prefill + decode + 1)``, one at the start of each of ``protocol.windows`` equal parts.

    Args:
        ids: Of the text.
        protocol: Lengths.
        first: What every window begins with, counted in its length: the token some models must see first.

    Raises:
        ValueError: The text is too short.
    """
    part, length = len(ids) // protocol.windows, protocol.prefill + protocol.decode + 1 - len(first)
    if part < length:
        raise ValueError(f"{protocol.windows} windows need {protocol.windows * length} tokens of text, got {len(ids)}")
    return [torch.tensor([[*first, *ids[i * part : i * part + length]]]) for i in range(protocol.windows)]


# scoring


def decode(model: Any, ids: torch.Tensor, cache: Cache, protocol: Protocol) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield first position and log-probabilities ``(tokens, vocabulary)`` of each block decoded after the prompt."""
    for start in range(protocol.prefill, protocol.prefill + protocol.decode, protocol.block):
        stop = min(start + protocol.block, protocol.prefill + protocol.decode)
        logits = model(ids[:, start:stop], **cache_argument(model, cache)).logits[0]
        yield start - protocol.prefill, logits.float().log_softmax(-1)


@dataclass(frozen=True)
class Scores:
    """Results at each decoded position: ``(decode,)``.

    Attributes:
        kl: ``KL(reference || test)`` in nats.
        agrees: Whether the two most likely tokens are the same.
        nll: Negative log-likelihood of the next token of the text, in nats.
        reference_nll: The same for the reference.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    nll: torch.Tensor
    reference_nll: torch.Tensor


class Window:
    """A window of text with the dense cache of its prompt and the log-probabilities of the reference."""

    @torch.inference_mode()
    def __init__(self, model: Any, ids: torch.Tensor, protocol: Protocol) -> None:
        self.model, self.ids, self.protocol = model, ids.to(model.device), protocol
        self.prompt = prefill(model, self.ids[:, : protocol.prefill])
        cache = make_cache(model, "dynamic")
        fill_cache(cache, self.prompt)
        whole = replace(protocol, block=protocol.decode)
        ((_, self.reference),) = decode(model, self.ids, cache, whole)

    @torch.inference_mode()
    def score(self, cache: Cache) -> Scores:
        """Decode the window through an empty cache and compare with the reference."""
        fill_cache(cache, self.prompt)
        labels = self.ids[0, self.protocol.prefill + 1 :]
        parts = []
        for start, test in decode(self.model, self.ids, cache, self.protocol):
            reference, label = self.reference[start : start + len(test)], labels[start : start + len(test), None]
            kl = (reference.exp() * (reference - test)).sum(-1)
            agrees = reference.argmax(-1) == test.argmax(-1)
            parts.append((kl, agrees, -test.gather(-1, label)[:, 0], -reference.gather(-1, label)[:, 0]))
        return Scores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def measure(window: Window, index: int, spec: str) -> dict[str, Any]:
    """Return the record of one cache on one window."""
    cache = make_cache(window.model, spec)
    began = time.process_time()
    scores = window.score(cache)
    seconds = time.process_time() - began
    holds = held(cache)
    return {
        "eval": "quality",
        "cache": spec,
        "settings": settings_of(cache),
        "window": index,
        "positions": len(scores.kl),
        "kl_mean": float(scores.kl.double().mean()),
        "kl_micronats": [round(kl * 1e6) for kl in scores.kl.tolist()],
        "disagrees_at": (~scores.agrees).nonzero().flatten().tolist(),
        "nll_sum": float(scores.nll.double().sum()),
        "nll_sum_reference": float(scores.reference_nll.double().sum()),
        "key_bits": holds.key_bits,
        "value_bits": holds.value_bits,
        "nbytes": holds.nbytes,
        "dense_nbytes": holds.dense_nbytes,
        "bytes_measured": holds.measured,
        "decode_cpu_seconds": round(seconds, 2),
    }


# runs


@dataclass(frozen=True)
class Job:
    """What all records of a run share, and where they go."""

    model_name: str
    dtype: str
    text: str
    text_sha256: str
    protocol: Protocol
    path: Path

    def common(self) -> dict[str, Any]:
        """Return the fields that two records must share to be compared."""
        return {
            "model": self.model_name,
            "dtype": self.dtype,
            "text": self.text,
            "text_sha256": self.text_sha256,
            "protocol": asdict(self.protocol),
        }

    def records(self) -> list[dict[str, Any]]:
        """Return the records there are of this job; other files and protocols are left aside."""
        if not self.path.exists():
            return []
        wanted = self.common()
        return [r for r in read_results(self.path) if all(r.get(name) == value for name, value in wanted.items())]


def run(job: Job, model: Any, windows: Sequence[torch.Tensor], specs: Sequence[str], *, fresh: bool = False) -> None:
    """Measure what is missing of ``specs`` and append it to the file of the job.

    Args:
        job: Shared fields and file.
        model: A causal language model.
        windows: Token ids of each window.
        specs: Caches, as :func:`evals.baselines.make_cache` takes them.
        fresh: Measure all of ``specs`` again, in place of the records there are.
    """
    settings = {spec: settings_of(make_cache(model, spec)) for spec in specs}
    _drop(job, settings, fresh=fresh)
    done = {(r["cache"], r["window"]) for r in job.records()}
    todo = [(i, spec) for i in range(len(windows)) for spec in specs if (spec, i) not in done]
    where = environment()
    job.path.parent.mkdir(parents=True, exist_ok=True)
    window: tuple[int, Window] | None = None
    with job.path.open("a", encoding="utf-8") as file:
        for index, spec in (progress := tqdm(todo, unit="cache", disable=None)):
            progress.set_description(f"window {index} {spec}")
            if window is None or window[0] != index:
                window = None  # frees the reference of the last window first
                window = (index, Window(model, windows[index], job.protocol))
            record = {**measure(window[1], index, spec), **job.common(), **where}
            file.write(json.dumps(record) + "\n")
            file.flush()


def _drop(job: Job, settings: Mapping[str, dict[str, Any] | None], *, fresh: bool) -> None:
    """Remove the records of caches to be measured again: all, or those whose name has come to mean other settings."""
    if not job.path.exists():
        return
    own, kept = job.common(), []
    for record in read_results(job.path):
        ours = record["cache"] in settings and all(record.get(name) == value for name, value in own.items())
        if not ours or not (fresh or record["settings"] != settings[record["cache"]]):
            kept.append(record)
    job.path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def standard_specs(model: Any) -> list[str]:
    """Return dense, every preset, our baselines, and the quantized caches of transformers that run here."""
    return ["dynamic", *PRESETS, *BASELINES, *installed_quantized(model)]


def ablation_specs() -> list[str]:
    """Return presets, each followed by variants of it with a setting or two changed."""
    return [spec for name, changes in ABLATIONS.items() for spec in (name, *(f"{name}:{change}" for change in changes))]


def model_label(name_or_path: str | None) -> str:
    """Return what results call a model: its hub id, or the name of its directory."""
    if name_or_path is None:
        return quality_report.MODELS[0]
    path = Path(name_or_path)
    return path.resolve().name if path.is_dir() else name_or_path


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", action="append", metavar="SPEC", help="measure this cache; may be repeated")
    parser.add_argument("--ablations", action="store_true", help="measure one setting at a time")
    parser.add_argument("--model", help="hub id or directory; SmolLM2-135M-Instruct without it")
    parser.add_argument("--text", type=Path, default=EXCERPT, help="UTF-8 text")
    for name, value in asdict(Protocol()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="results; without it the file under evals/results that the docs read")
    parser.add_argument("--fresh", action="store_true", help="measure again what the results hold")
    parser.add_argument("--tables-only", action="store_true", help="make tables and plot from the results there are")
    return parser.parse_args()


def main() -> None:
    """Measure, write the results, print the table; without ``--out``, update the document and the plot."""
    args = parse_arguments()
    label = model_label(args.model)
    if args.out is None and (label not in quality_report.MODELS[: 1 if args.ablations else None]):
        raise SystemExit(f"the document holds no results of {label}; name a file of your own by --out")
    if not args.tables_only:
        torch.set_num_threads(1)
        protocol = Protocol(args.prefill, args.decode, args.block, args.windows)
        model, tokenizer = load_model(args.model, dtype=torch.float32, device=args.device)
        text = read_text(args.text)
        job = Job(
            model_name=label,
            dtype="float32",
            text=args.text.name,
            text_sha256=hashlib.sha256(text.encode()).hexdigest()[:16],
            protocol=protocol,
            path=args.out or (ABLATION_FILE if args.ablations else quality_report.result_file(label)),
        )
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        specs = args.cache or (ablation_specs() if args.ablations else standard_specs(model))
        windows = cut_windows(ids, protocol, first_tokens(tokenizer))
        run(job, model, windows, specs, fresh=args.fresh)
        print(quality_report.table(job.records()))
    if args.out is None:
        quality_report.update()


if __name__ == "__main__":
    main()
