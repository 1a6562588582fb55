"""LongBench v2 through compressed caches: questions with four choices, answered in words that read the cache.

Contexts run from 8 thousand to 2 million words: this is for GPUs. Scored by likelihood, as lm-eval has it, a choice
would be read off a single pass that no cache takes part in; here the answer is written, greedily, after the context
went into the cache. The prompt is that of lm-eval up to the answer, with the authors' request for its form.

    python -m evals.longbench_v2 --model Qwen/Qwen2.5-7B-Instruct --cache k3v2 --out runs/v2

Rows are fetched by the package ``datasets``, or read from a JSON file with their list (``--data``).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from evals.context import REFERENCE, check_specs
from evals.frame import EvalError, RunDirectory, bootstrap_interval, one_line_errors, process_state, rank_device, work
from evals.longbench import Answerer, build_prompt, default_max_length
from evals.longbench_data import Item, Template
from hf_turboquant.loading import load_model, read_config

HUB_REPOSITORY: Final = "zai-org/LongBench-v2"
MAX_NEW_TOKENS: Final = 128
TEMPLATE: Final = Template(
    "Please read the following text and answer the question below.\n\n<text>\n",
    "\n</text>\n\nWhat is the correct answer to this question: {input}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".',
    MAX_NEW_TOKENS,
)
FIELDS: Final = ("_id", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context", "difficulty",
                 "length")  # fmt: skip


def extract_choice(text: str) -> str | None:
    """Return the letter an answer names in the form asked for; None if it names none."""
    found = re.search(r"The correct answer is \(?([A-D])\b", text.replace("*", ""))
    return found.group(1) if found else None


def load_items(data: str, *, limit: int | None = None) -> list[Item]:
    """Return the questions.

    Args:
        data: ``hub``, or a JSON file with a list of rows.
        limit: Only so many.

    Raises:
        EvalError: The rows are not there, or are not those of LongBench v2.
    """
    rows = _fetch_rows() if data == "hub" else _read_rows(Path(data))
    items = []
    for row in rows[:limit]:
        if missing := [name for name in FIELDS if name not in row]:
            raise EvalError(f"a row lacks {', '.join(missing)}; rows must be those of {HUB_REPOSITORY}")
        choices = "\n".join(f"({letter}) {str(row[f'choice_{letter}']).strip()}" for letter in "ABCD")
        question = f"{row['question'].strip()}\nChoices:\n{choices}"
        items.append(Item("v2", {**row, "context": row["context"].strip(), "input": question}, TEMPLATE))
    return items


def _read_rows(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        raise EvalError(f"--data must be hub, or a JSON file with the rows of {HUB_REPOSITORY}; there is no {path}")
    rows: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def _fetch_rows() -> list[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        return list(load_dataset(HUB_REPOSITORY, split="train"))
    except (OSError, ValueError) as error:
        raise EvalError(
            f"{HUB_REPOSITORY} could not be fetched ({str(error).splitlines()[0]}); where there is a network, save its "
            "rows as a JSON list, copy the file here and say --data FILE"
        ) from error


def run(
    directory: RunDirectory, model: Any, tokenizer: Any, items: Sequence[Item], specs: Sequence[str], max_length: int
) -> dict[str, Any]:
    """Answer what is missing, and return the summary; the first process also writes it."""
    answerer = Answerer(model, tokenizer)

    def missing(name: str, have: set[str]) -> list[str]:
        return [spec for spec in specs if f"{name}/{spec}" not in have]

    def measure(item: Item, have: set[str]) -> Iterator[dict[str, Any]]:
        prompt = build_prompt(tokenizer, item, max_length=max_length, chat="auto", protocol="split")
        for spec, result in answerer.answer(item, prompt, missing(item.name, have)):
            choice = extract_choice(result["prediction"])
            yield {
                "id": f"{item.name}/{spec}",
                "sample": item.name,
                "cache": spec,
                "difficulty": item.row["difficulty"],
                "length": item.row["length"],
                "prompt_tokens": prompt.ids.shape[1],
                "choice": choice,
                "answer": item.row["answer"],
                "score": float(choice == item.row["answer"]),
                **result,
            }

    todo = [(item.name, item) for item in items]
    records = work(directory, todo, measure, done=lambda name, have: not missing(name, have))
    summary = summarize(records, specs)
    if directory.state.is_main_process:
        directory.write("metrics.json", summary)
        directory.write("table.md", table(summary))
    directory.state.wait_for_everyone()
    return summary


def summarize(records: Sequence[Mapping[str, Any]], specs: Sequence[str]) -> dict[str, Any]:
    """Return accuracy in percent by cache: overall, by difficulty and by length, paired with full precision."""
    reference = {r["sample"]: r["score"] for r in records if r["cache"] == REFERENCE}
    results: dict[str, Any] = {}
    for spec in specs:
        mine = [r for r in records if r["cache"] == spec]
        parts = {"overall": mine}
        parts |= {level: [r for r in mine if r["difficulty"] == level] for level in ("easy", "hard")}
        parts |= {size: [r for r in mine if r["length"] == size] for size in ("short", "medium", "long")}
        results[spec] = {name: _cell(rows, spec, reference) for name, rows in parts.items() if rows}
    return {"caches": list(specs), "results": results}


def _cell(rows: Sequence[Mapping[str, Any]], spec: str, reference: Mapping[str, float]) -> dict[str, Any]:
    cell = {"score": 100 * sum(r["score"] for r in rows) / len(rows), "n": len(rows)}
    cell["unreadable"] = sum(r["choice"] is None for r in rows)
    differences = [100 * (r["score"] - reference[r["sample"]]) for r in rows if r["sample"] in reference]
    if spec != REFERENCE and len(differences) > 1:
        cell["low"], cell["high"] = bootstrap_interval([differences])
        cell["difference"] = sum(differences) / len(differences)
    return cell


def table(summary: Mapping[str, Any]) -> str:
    """Return the table in Markdown."""
    names = ("overall", "easy", "hard", "short", "medium", "long")
    lines = [["cache", "n", *names, "overall - full precision"]]
    for spec, cells in summary["results"].items():
        if not cells:
            continue
        overall = cells["overall"]
        scores = [f"{cells[name]['score']:.1f}" if name in cells else "" for name in names]
        paired = "difference" in overall
        difference = f"{overall['difference']:+.1f} [{overall['low']:+.1f}, {overall['high']:+.1f}]" if paired else ""
        lines.append([spec, str(overall["n"]), *scores, difference])
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(lines[0]), *text[1:]]) + "\n"


def evaluate(args: argparse.Namespace) -> None:
    """Do what the command line says."""
    specs = list(dict.fromkeys([REFERENCE, *(args.cache or ["k4v4"])]))
    check_specs(specs)
    items = load_items(args.data, limit=args.limit)
    state = process_state(args.device)
    max_length = args.max_length or default_max_length(read_config(args.model))
    device = rank_device(state, args.device)
    model, tokenizer = load_model(args.model, device=device, tokens=max_length, cache="dense", force=args.force)
    config = {
        "eval": "longbench_v2",
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "data": args.data,
        "items": len(items),
        "max_length": max_length,
        "caches": specs,
    }
    path = args.out or Path("runs") / f"longbench-v2-{Path(args.model).name}"
    directory = RunDirectory(path, config, growing=("caches",), state=state, overwrite=args.overwrite)
    summary = run(directory, model, tokenizer, items, specs, max_length)
    if state.is_main_process:
        print(f"{table(summary)}\n{path}/table.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line; what cannot be done is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or directory")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; the GPU if there is one")
    parser.add_argument("--cache", action="append", metavar="SPEC", help="a cache; may be repeated (default: k4v4)")
    parser.add_argument("--data", default="hub", help="hub, or a JSON file with the rows (default: hub)")
    parser.add_argument("--max-length", type=int, help="most tokens of a prompt (default: the model's, less 500)")
    parser.add_argument("--limit", type=int, help="only so many questions")
    parser.add_argument("--out", type=Path, help="run directory (default: runs/longbench-v2-MODEL)")
    parser.add_argument("--overwrite", action="store_true", help="forget an earlier run in the directory")
    parser.add_argument("--force", action="store_true", help="load even a model that should not fit in memory")
    args = parser.parse_args(arguments)
    with one_line_errors(), torch.inference_mode():
        evaluate(args)


if __name__ == "__main__":
    main()
