"""LongBench through compressed caches: the authors' prompts and metrics, several caches side by side.

The context goes into the cache first; question and answer then read the cache (``--protocol split``). In one pass
(``--protocol oneshot``) the first token of every answer would come from keys and values that were never compressed, and
answers of one token would not see the cache at all. Full precision (``dynamic``) always runs beside the others, and
differences to it are paired by sample, with bootstrap intervals.

    python -m evals.longbench --data mini --cache k4v4 --cache k3v2
    python -m evals.longbench --model Qwen/Qwen2.5-7B-Instruct --tasks en16 --data hub --cache k3v2 --out runs/qwen
    torchrun --nproc_per_node 8 -m evals.longbench --model ./model --tasks e --data ./data.zip --cache k3v2

Rows and prompts are not ours to ship: see ``evals/longbench_data.py`` for where they come from. A run that was
interrupted goes on when started again with the same words; more caches may be named then.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import Cache

from evals import longbench_report
from evals.baselines import held, make_cache
from evals.common import cache_argument, smollm2_dir
from evals.context import REFERENCE, Context, check_specs
from evals.frame import EvalError, RunDirectory, one_line_errors, process_state, rank_device, work
from evals.longbench_data import NO_CHAT, Item, base_task, expand_tasks, load_items
from evals.longbench_metrics import score
from hf_turboquant.loading import load_model, read_config

ROOM: Final = 500
"""Tokens of a model's context left for the chat template and the answer, as the authors leave."""


# prompts


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt.

    Attributes:
        ids: ``(1, tokens)``.
        context_tokens: How many of them go into the cache before the rest is read; 0 for all in one pass.
    """

    ids: torch.Tensor
    context_tokens: int

    @property
    def sha256(self) -> str:
        """Short digest of the ids."""
        return hashlib.sha256(str(self.ids.tolist()).encode()).hexdigest()[:16]


def truncate_middle(tokenizer: Any, text: str, max_length: int) -> str:
    """Return a text of about ``max_length`` tokens: its first and its last half, as the authors' code cuts it."""
    ids = tokenizer(text, verbose=False).input_ids
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))


def build_prompt(tokenizer: Any, item: Item, *, max_length: int, chat: str, protocol: str) -> Prompt:
    """Return the prompt of an item.

    Args:
        tokenizer: Of the model.
        item: Row and template.
        max_length: Most tokens before the chat template.
        chat: ``auto`` wraps all but few-shot and code tasks if there is a chat template; ``never``; ``always``.
        protocol: ``split`` or ``oneshot``.
    """
    text = truncate_middle(tokenizer, item.template.prompt(item.row), max_length)
    ending = item.template.ending(item.row)
    if chat == "always" or (chat == "auto" and base_task(item.task) not in NO_CHAT and tokenizer.chat_template):
        wrapped = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        # templates may strip what they wrap; what follows it belongs to the ending
        ending += wrapped.rpartition(text.strip()[-40:])[2]
        ids = tokenizer(wrapped, add_special_tokens=False, verbose=False).input_ids
    else:
        ids = tokenizer(text, verbose=False).input_ids
    read_later = len(tokenizer(ending, add_special_tokens=False, verbose=False).input_ids)
    split = max(1, len(ids) - max(1, read_later)) if protocol == "split" and len(ids) > 1 else 0
    return Prompt(torch.tensor([ids]), split)


# answers


class Answerer:
    """A model that answers prompts through one cache after another."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    @torch.inference_mode()
    def answer(self, item: Item, prompt: Prompt, specs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each cache with what was generated through it, greedily."""
        ids = prompt.ids.to(self.model.device)
        context = Context(self.model, ids[:, : prompt.context_tokens], caches=len(specs))
        for spec in specs:
            cache = make_cache(self.model, spec)
            context.read_into(cache)
            start = time.perf_counter()
            new = self._generate(ids, cache, item)
            seconds = time.perf_counter() - start
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            yield spec, {"prediction": text, "new_tokens": len(new), "seconds": round(seconds, 3), **_size(cache)}

    def _generate(self, ids: torch.Tensor, cache: Cache, item: Item) -> list[int]:
        options: dict[str, Any] = {}
        if base_task(item.task) == "samsum":
            # few-shot summaries end at the line; without this the model goes on to invent the next dialogue
            ends = self.model.generation_config.eos_token_id
            ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
            options["eos_token_id"] = [*ends, self.tokenizer.encode("\n", add_special_tokens=False)[-1]]
            options["min_new_tokens"] = 1
        pad = self.tokenizer.pad_token_id
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=item.template.max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
            **options,
            **cache_argument(self.model, cache),
        )
        new: list[int] = out[0, ids.shape[1] :].tolist()
        return new


def _size(cache: Cache) -> dict[str, int]:
    holds = held(cache)
    return {"cache_bytes": holds.nbytes, "dense_bytes": holds.dense_nbytes}


# run


def run(
    directory: RunDirectory,
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    specs: Sequence[str],
    *,
    max_length: int,
    chat: str,
    protocol: str,
    paper_rows: bool = False,
) -> dict[str, Any]:
    """Answer what is missing, and return the summary; the first process also writes it.

    Args:
        directory: Where samples are and results go.
        model: A causal language model.
        tokenizer: Its tokenizer.
        items: What to answer, the same in every process.
        specs: Caches, ``dynamic`` among them.
        max_length: Most tokens of a prompt.
        chat: See :func:`build_prompt`.
        protocol: ``split`` or ``oneshot``.
        paper_rows: Whether the table is to have the rows of the paper.
    """
    answerer = Answerer(model, tokenizer)

    def missing(name: str, have: set[str]) -> list[str]:
        return [spec for spec in specs if f"{name}/{spec}" not in have]

    def measure(item: Item, have: set[str]) -> Iterator[dict[str, Any]]:
        prompt = build_prompt(tokenizer, item, max_length=max_length, chat=chat, protocol=protocol)
        for spec, result in answerer.answer(item, prompt, missing(item.name, have)):
            yield {
                "id": f"{item.name}/{spec}",
                "task": item.task,
                "sample": item.name,
                "cache": spec,
                "length": item.row["length"],
                "bucket": item.bucket,
                "prompt_sha256": prompt.sha256,
                "prompt_tokens": prompt.ids.shape[1],
                "context_tokens": prompt.context_tokens,
                "score": score(item.task, result["prediction"], item.row["answers"], item.row["all_classes"]),
                "answers": item.row["answers"],
                **result,
            }

    todo = [(item.name, item) for item in items]
    records = work(directory, todo, measure, done=lambda name, have: not missing(name, have))
    summary = longbench_report.summarize(records, specs)
    if directory.state.is_main_process:
        directory.write("metrics.json", summary)
        directory.write("table.md", longbench_report.tables(summary, paper_rows=paper_rows))
        longbench_report.plot(summary, directory.path / "differences.png")
    directory.state.wait_for_everyone()
    return summary


def default_max_length(config: Any) -> int:
    """Return the most tokens of a prompt for a model: its context less room for template and answer."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None:
        raise EvalError("the model does not say how long its context is; say --max-length TOKENS")
    if positions < 2 * ROOM:
        raise EvalError(
            f"the context of the model is {positions} tokens, too short for LongBench; say --max-length TOKENS"
        )
    return int(positions) - ROOM


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="evals.longbench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="hub id or directory; SmolLM2-135M-Instruct without it")
    parser.add_argument("--gguf-file", help="GGUF file in the model directory")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--device", help="cpu, cuda or cuda:N; the GPU if there is one")
    parser.add_argument("--cache", action="append", metavar="SPEC", help="a cache; may be repeated (default: k4v4)")
    parser.add_argument("--tasks", default="en16", help="en16, all, e, or names with commas (default: en16)")
    parser.add_argument("--data", default="hub", help="hub, mini, the archive data.zip, or a folder (default: hub)")
    parser.add_argument("--max-length", type=int, help="most tokens of a prompt (default: the model's, less 500)")
    parser.add_argument("--chat-template", choices=("auto", "never", "always"), default="auto")
    parser.add_argument("--protocol", choices=("split", "oneshot"), default="split")
    parser.add_argument("--limit", type=int, help="only so many rows of each task")
    parser.add_argument("--paper-rows", action="store_true", help="lay the rows of the TurboQuant paper beside yours")
    parser.add_argument("--out", type=Path, help="run directory (default: runs/longbench-MODEL-TASKS)")
    parser.add_argument("--overwrite", action="store_true", help="forget an earlier run in the directory")
    parser.add_argument("--force", action="store_true", help="load even a model that should not fit in memory")
    return parser.parse_args(arguments)


def evaluate(args: argparse.Namespace) -> Path:
    """Do what the command line says, and return the run directory."""
    specs = list(dict.fromkeys([REFERENCE, *(args.cache or ["k4v4"])]))
    check_specs(specs)
    tasks = expand_tasks(args.tasks, args.data)
    items = load_items(tasks, args.data, limit=args.limit)
    state = process_state(args.device)
    source = args.model or str(smollm2_dir())
    max_length = args.max_length or default_max_length(read_config(source, gguf_file=args.gguf_file))
    model, tokenizer = load_model(
        source,
        gguf_file=args.gguf_file,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        device=rank_device(state, args.device),
        tokens=max_length,
        cache="dense",
        force=args.force,
    )
    name = Path(args.model).name if args.model else "SmolLM2-135M-Instruct"
    config = {
        "eval": "longbench",
        "model": args.model or name,
        "gguf_file": args.gguf_file,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tasks": list(tasks),
        "data": args.data,
        "items_sha256": _digest(items),
        "max_length": max_length,
        "chat_template": args.chat_template,
        "protocol": args.protocol,
        "caches": specs,
    }
    path = args.out or Path("runs") / f"longbench-{name}-{args.tasks.replace(',', '+')}"
    directory = RunDirectory(path, config, growing=("caches",), state=state, overwrite=args.overwrite)
    run(
        directory,
        model,
        tokenizer,
        items,
        specs,
        max_length=max_length,
        chat=args.chat_template,
        protocol=args.protocol,
        paper_rows=args.paper_rows,
    )
    if state.is_main_process:
        print(f"{(path / 'table.md').read_text(encoding='utf-8')}\n{path}/table.md")
    return path


def _digest(items: Sequence[Item]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.name, item.template, item.row["answers"], len(item.row["context"]))).encode())
    return digest.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line; what cannot be done is one line on stderr and exit code 2."""
    args = parse_arguments(arguments)
    with one_line_errors():
        evaluate(args)


if __name__ == "__main__":
    main()
