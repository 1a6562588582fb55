"""Statistics, tables and plot of the quality measurements, made from the results alone.

python -m evals.quality --tables-only
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from evals import niah, plots
from evals.baselines import BASELINES
from evals.common import RESULTS, ROOT, read_results, replace_between
from hf_turboquant import PRESETS

RESULT_FILE: Final = RESULTS / "quality.jsonl"
ABLATION_FILE: Final = RESULTS / "quality_ablations.jsonl"
DOCUMENT: Final = ROOT / "docs" / "quality.md"
DEFAULT_PRESET: Final = "k4v4"

MODELS: Final = ("SmolLM2-135M-Instruct", "gemma-3-270m")
"""The models of the document, as the results name them. The first needs no ``--model``; the ablations are its own."""

PAPERS: Final = ("tq", "paper", "polar", "thor")
"""How the names of presets begin that reproduce a paper's settings rather than ours."""

TARGETS: Final = (
    ("default preset", 4.4, 0.003, 0.965),
    ("best of 3 bits", 3.5, 0.008, None),
    ("best of 2 bits", 2.5, 0.04, None),
)
"""What, bits at most, KL at most, top-1 at least."""


# summary


@dataclass(frozen=True)
class Summary:
    """One cache over all windows. ``*_se`` are standard errors of means.

    Positions near one another are not independent, so the error of the KL comes from the means of runs of 32.
    """

    cache: str
    positions: int
    kl: float
    kl_se: float
    kl_p99: float
    top1: float
    top1_se: float
    ppl: float
    ppl_reference: float
    key_bits: float
    value_bits: float
    ratio: float
    bytes_measured: bool

    @property
    def bits(self) -> float:
        """Bits per element of the compressed part."""
        return (self.key_bits + self.value_bits) / 2


RUN: Final = 32
"""Positions averaged before standard errors are taken."""


def summarize(records: Sequence[Mapping[str, Any]]) -> Summary:
    """Join the records of one cache."""
    kl = [value * 1e-6 for record in records for value in record["kl_micronats"]]
    positions = len(kl)
    top1 = 1 - sum(len(record["disagrees_at"]) for record in records) / positions
    nll, reference = (sum(r[name] for r in records) / positions for name in ("nll_sum", "nll_sum_reference"))
    last = records[-1]
    return Summary(
        cache=last["cache"],
        positions=positions,
        kl=statistics.fmean(r["kl_mean"] for r in records),
        kl_se=standard_error(kl),
        kl_p99=float(torch.tensor(kl).quantile(0.99)),
        top1=top1,
        top1_se=(top1 * (1 - top1) / positions) ** 0.5,
        ppl=float(torch.tensor(nll).exp()),
        ppl_reference=float(torch.tensor(reference).exp()),
        key_bits=statistics.fmean(r["key_bits"] for r in records),
        value_bits=statistics.fmean(r["value_bits"] for r in records),
        ratio=sum(r["dense_nbytes"] for r in records) / sum(r["nbytes"] for r in records),
        bytes_measured=last["bytes_measured"],
    )


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of neighbouring values, from the means of runs of them."""
    runs = [statistics.fmean(values[i : i + RUN]) for i in range(0, len(values) - RUN + 1, RUN)]
    return statistics.stdev(runs) / len(runs) ** 0.5 if len(runs) > 1 else float("nan")


def paired_difference(records: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return mean and standard error of the KL of one cache minus that of another, over the windows both have."""
    other_windows = {record["window"]: record["kl_micronats"] for record in others}
    differences = [
        (one - other) * 1e-6
        for record in sorted(records, key=lambda r: r["window"])
        if record["window"] in other_windows
        for one, other in zip(record["kl_micronats"], other_windows[record["window"]], strict=True)
    ]
    return statistics.fmean(differences), standard_error(differences)


def by_cache(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group records by their cache, in the order of first appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["cache"], []).append(record)
    return groups


# tables


def family(name: str) -> str:
    """Return whose a cache is, as the plot and the table order them."""
    if name in PRESETS:
        return "papers' settings" if name.startswith(PAPERS) else "hf_turboquant"
    if name in BASELINES:
        return "KIVI" if name.startswith("kivi") else "floating point" if name == "nvfp4" else "integers per token"
    return "transformers"


def ordered(records: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """Return one summary per cache, by family, and by falling bits in each."""
    summaries = [summarize(group) for group in by_cache(records).values()]
    families = list(plots.STYLES)
    return sorted(summaries, key=lambda s: (families.index(family(s.cache)), -s.bits, s.cache))


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one row per cache."""
    lines = [
        "| cache | bits: keys / values / mean | KL, nats | p99 KL | top-1 agreement | PPL | smaller by |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for s in ordered(records):
        bits = f"{s.key_bits:.4g} / {s.value_bits:.4g} / {s.bits:.4g}"
        kl = f"{max(s.kl, 0.0):.5f} ± {s.kl_se:.5f}"
        lines.append(
            f"| `{s.cache}` | {bits} | {kl} | {s.kl_p99:.4f} | {s.top1:.3f} ± {s.top1_se:.3f} | "
            f"{s.ppl:.3f} ({s.ppl / s.ppl_reference - 1:+.2%}) | {'' if s.bytes_measured else '≈'}{s.ratio:.2f}x |"
        )
    return "\n".join(lines)


def target_table(quality: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return what was aimed at and what was reached, by model."""
    lines = [
        "| model | aim | at most | preset | bits | KL, nats | top-1 | reached |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for model, records in quality.items():
        own = [s for s in ordered(records) if family(s.cache) == "hf_turboquant"]
        for name, bits, kl, top1 in TARGETS:
            fitting = [
                s for s in own if s.bits <= bits and (not name.startswith("default") or s.cache == DEFAULT_PRESET)
            ]
            if not fitting:
                continue
            best = min(fitting, key=lambda s: s.kl)
            aim = f"{bits} bits, KL {kl}" + (f", top-1 at least {top1}" if top1 else "")
            reached = best.kl <= kl and (top1 is None or best.top1 >= top1)
            lines.append(
                f"| {model} | {name} | {aim} | `{best.cache}` | {best.bits:.4g} | {best.kl:.5f} ± {best.kl_se:.5f} | "
                f"{best.top1:.3f} ± {best.top1_se:.3f} | {'yes' if reached else 'no'} |"
            )
    return "\n".join(lines)


def ablation_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one row per changed setting, beside the preset it was changed in."""
    groups = by_cache(records)
    lines = [
        "| preset | change | bits | KL, nats | change of KL | |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in sorted(groups, key=lambda spec: (-summarize(groups[spec.partition(":")[0]]).bits, ":" in spec)):
        base, _, change = name.partition(":")
        s, whole = summarize(groups[name]), summarize(groups[base])
        row = f"| `{base}` | {f'`{change}`' if change else ''} | {s.bits:.4g} | {s.kl:.5f} ± {s.kl_se:.5f} | "
        if change:
            difference, error = paired_difference(groups[name], groups[base])
            row += f"{difference:+.5f} ± {error:.5f} | {difference / whole.kl:+.0%} |"
        else:
            row += "| |"
        lines.append(row)
    return "\n".join(lines)


def needle_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return hits and mean likelihood of the answer by length and cache, and the change of the likelihood."""
    groups = by_cache(records)
    dense = {r["sample"]: r["nll"] for r in groups["dynamic"]}
    lengths = sorted({r["length"] for r in records})
    heads = " | ".join(f"{length} tokens: hits, NLL" for length in lengths)
    lines = [f"| cache | {heads} | NLL minus dense |", "|---|" + "---:|" * (len(lengths) + 1)]
    changed = {name: [r["nll"] - dense[r["sample"]] for r in group] for name, group in groups.items()}
    for name, changes in sorted(changed.items(), key=lambda item: (item[0] != "dynamic", statistics.fmean(item[1]))):
        group, cells = groups[name], []
        for length in lengths:
            rows = [r for r in group if r["length"] == length]
            hits, nll = sum(r["hit"] for r in rows), statistics.fmean(r["nll"] for r in rows)
            cells.append(f"{hits}/{len(rows)}, {nll:.4f}")
        error = statistics.stdev(changes) / len(changes) ** 0.5
        last = f"{statistics.fmean(changes):+.4f} ± {error:.4f}" if name != "dynamic" else ""
        lines.append(f"| `{name}` | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


def points(records: Sequence[Mapping[str, Any]]) -> list[plots.Point]:
    """Return the points of the plot: all caches that compress."""
    return [
        plots.Point(s.cache, family(s.cache), s.bits, s.kl, s.kl_se) for s in ordered(records) if s.cache != "dynamic"
    ]


def suffix(model: str) -> str:
    """Return what the names of a model's results, tables and plot end with: nothing for the first."""
    return "" if model == MODELS[0] else f"-{model}"


def result_file(model: str) -> Path:
    """Return where the results of a model of :data:`MODELS` are."""
    return RESULT_FILE.with_name(f"quality{suffix(model)}.jsonl")


def sections() -> dict[str, str]:
    """Return the generated parts of the document by their markers, as far as there are results."""
    quality = {model: read_results(path) for model in MODELS if (path := result_file(model)).exists()}
    made = {"quality-targets": target_table(quality)} if quality else {}
    for model, records in quality.items():
        made[f"quality-table{suffix(model)}"] = table(records)
    needles = read_results(niah.RESULT_FILE) if niah.RESULT_FILE.exists() else []
    for model in MODELS:
        if records := [record for record in needles if record["model"] == model]:
            made[f"needle-table{suffix(model)}"] = needle_table(records)
    if ABLATION_FILE.exists():
        made["quality-ablations"] = ablation_table(read_results(ABLATION_FILE))
    return made


def update() -> None:
    """Write the tables into the document and draw a plot for each model."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for marker, content in sections().items():
        text = replace_between(text, marker, content)
    DOCUMENT.write_text(text, encoding="utf-8")
    for model in MODELS:
        if result_file(model).exists():
            records = read_results(result_file(model))
            positions = sum(r["positions"] for r in records if r["cache"] == records[0]["cache"])
            plot = DOCUMENT.with_name(f"quality{suffix(model)}.png")
            plots.plot_pareto(points(records), plot, f"{model}, {positions} decoded tokens")
