"""Find a needle: does an answer survive when the text that holds it is read from a compressed cache?

A sentence is hidden at a given depth of a text and asked for behind it. The text alone is the prompt; question and
answer follow in a second pass that reads the cache, as a user's question would (``--protocol split``). Asked in one
pass (``oneshot``), the first token of the answer comes from keys and values that were never compressed.

The answer is teacher-forced, which tells greedy success, every token the most likely one, and beside it the negative
log-likelihood, which moves long before a digit is lost. The sandwich can be served in other words, so for that needle
text is generated and searched; its likelihood is still that of the exact words. At depth 100 the needle lies in the
exact window of most caches.

    python -m evals.niah --cache k4v4 --cache k3v3 --lengths 1024,2048,4096
    python -m evals.niah --model Qwen/Qwen2.5-7B-Instruct --lengths 4096:32768:4096 --depths 0:100:10 --needle uuid
    torchrun --nproc_per_node 8 -m evals.niah --model ./model --haystack ./essays --samples 5 --cache k3v2

Full precision (``dynamic``) always runs beside the others, on the same prompts. A run that was interrupted goes on
when started again with the same words; more caches, lengths, depths and samples may be named then. Without ``--out``,
samples of the default model, needle, haystack and protocol also go into ``evals/results/niah.jsonl``, of which
docs/quality.md is made.
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

from evals import niah_report
from evals.baselines import held, make_cache, settings_of
from evals.common import RESULTS, cache_argument, smollm2_dir
from evals.context import REFERENCE, Context, check_specs
from evals.frame import EvalError, RunDirectory, one_line_errors, process_state, rank_device, work
from evals.needles import NEEDLES, Cell, Sample, haystack_ids, make_sample
from hf_turboquant.loading import load_model

RESULT_FILE: Final = RESULTS / "niah.jsonl"
DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
DEFAULT_CACHES: Final = ("k4v4", "k3v3")
LENGTHS: Final = "1024,2048,4096"
DEPTHS: Final = "0,25,50,75,100"
PUBLISHED: Final = {"model": DEFAULT_MODEL, "needle": "number", "haystack": "austen", "protocol": "split"}
"""What a run must be for its samples to stand in the document."""
GENERATED_TOKENS: Final = 32


# scores


@dataclass(frozen=True)
class Answer:
    """How a cache answered.

    Attributes:
        hit: Whether greedy decoding gives what was hidden.
        nll: Mean negative log-likelihood of the tokens of the answer, nats.
        text: The most likely token at each place of the answer, decoded; or what was generated.
    """

    hit: bool
    nll: float
    text: str


class Asker:
    """Asks one cache after another for what was hidden.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        needle: One of :data:`evals.needles.NEEDLES`.
        protocol: ``split`` or ``oneshot``.
    """

    def __init__(self, model: Any, tokenizer: Any, needle: str, protocol: str) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.expected = NEEDLES[needle].expected
        self.split = protocol == "split"

    def answers(self, sample: Sample, specs: Sequence[str]) -> Iterator[tuple[str, Answer, Cache]]:
        """Yield each cache by its name, what it answered, and the cache itself."""
        ids = torch.tensor([sample.context if self.split else ()], dtype=torch.long)
        context = Context(self.model, ids, caches=len(specs) * (1 if self.expected is None else 2))
        for spec in specs:
            cache = make_cache(self.model, spec)
            context.read_into(cache)
            answer = self._force(sample, cache)
            if self.expected is not None:
                again = make_cache(self.model, spec)
                context.read_into(again)
                text = self._generate(sample, again)
                answer = Answer(self.expected.lower() in text.lower(), answer.nll, text)
            yield spec, answer, cache

    @torch.inference_mode()
    def _force(self, sample: Sample, cache: Cache) -> Answer:
        """Give the question and all but the last token of the answer, and look what each position expects next."""
        answer = torch.tensor(sample.answer, device=self.model.device)
        if self.split:
            logits = self._logits((*sample.question, *sample.answer[:-1]), cache, keep=len(answer))
        else:
            logits = self._logits((*sample.context, *sample.question), cache, keep=1)
            if len(answer) > 1:
                logits = torch.cat((logits, self._logits(sample.answer[:-1], cache, keep=len(answer) - 1)))
        likely = logits.argmax(-1)
        nll = -logits.log_softmax(-1).gather(-1, answer[:, None]).mean()
        return Answer(bool((likely == answer).all()), float(nll), self.tokenizer.decode(likely))

    @torch.inference_mode()
    def _generate(self, sample: Sample, cache: Cache) -> str:
        """Return what follows the question, greedily, up to the end of the line."""
        ids = sample.question if self.split else (*sample.context, *sample.question)
        new: list[int] = []
        while len(new) < GENERATED_TOKENS:
            token = int(self._logits(ids, cache, keep=1).argmax())
            if token == self.tokenizer.eos_token_id:
                break
            new.append(token)
            ids = (token,)
            if "\n" in self.tokenizer.decode(new).lstrip():
                break
        text: str = self.tokenizer.decode(new)
        return text

    def _logits(self, ids: Sequence[int], cache: Cache, *, keep: int) -> torch.Tensor:
        """Return the last ``keep`` rows of logits ``(keep, vocabulary)``, float32."""
        inputs = torch.tensor([ids], device=self.model.device)
        out = self.model(inputs, logits_to_keep=keep, **cache_argument(self.model, cache))
        rows: torch.Tensor = out.logits[0].float()
        return rows


# runs


def run(
    directory: RunDirectory,
    model: Any,
    tokenizer: Any,
    haystack: Sequence[int],
    cells: Sequence[Cell],
    specs: Sequence[str],
    *,
    needle: str = "number",
    protocol: str = "split",
) -> dict[str, Any]:
    """Measure what is missing, and return the summary; the first process also writes it, with table and heat maps.

    Args:
        directory: Where samples are and results go.
        model: A causal language model.
        tokenizer: Its tokenizer.
        haystack: Token ids of the text.
        cells: What to measure, the same in every process.
        specs: Caches, ``dynamic`` among them.
        needle: One of :data:`evals.needles.NEEDLES`.
        protocol: ``split`` or ``oneshot``.
    """
    asker = Asker(model, tokenizer, needle, protocol)

    def missing(name: str, have: set[str]) -> list[str]:
        return [spec for spec in specs if f"{name}/{spec}" not in have]

    def measure(cell: Cell, have: set[str]) -> Iterator[dict[str, Any]]:
        sample = make_sample(tokenizer, haystack, cell, needle)
        start = time.perf_counter()
        for spec, answer, cache in asker.answers(sample, missing(cell.name, have)):
            holds = held(cache)
            yield {
                "id": f"{cell.name}/{spec}",
                "sample": cell.name,
                "cache": spec,
                "length": cell.length,
                "depth": cell.depth,
                "seed": cell.seed,
                "prompt_sha256": _digest((*sample.context, *sample.question)),
                "value": sample.value,
                "hit": answer.hit,
                "nll": answer.nll,
                "text": answer.text,
                "cache_bytes": holds.nbytes,
                "dense_bytes": holds.dense_nbytes,
                "seconds": round(time.perf_counter() - start, 3),
            }
            start = time.perf_counter()

    todo = [(cell.name, cell) for cell in cells]
    records = work(directory, todo, measure, done=lambda name, have: not missing(name, have))
    summary = niah_report.summarize(records, specs)
    if directory.state.is_main_process:
        directory.write("metrics.json", summary)
        directory.write("table.md", niah_report.table(summary))
        title = f"{directory.config.get('model', '')}, needle: {needle}"
        niah_report.plot(records, specs, directory.path / "heatmap.png", title)
    directory.state.wait_for_everyone()
    return summary


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]


# command line


def parse_grid(text: str) -> list[float]:
    """Return ``"0,25,100"``, or ``"0:100:25"`` with both ends, as numbers.

    Raises:
        EvalError: It is neither.
    """
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            if step <= 0:
                raise ValueError(text)
            return [first + i * step for i in range(int((last - first) / step + 1e-9) + 1)]
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise EvalError(f"a grid must be numbers with commas, or first:last:step, got {text!r}") from None


def model_label(name_or_path: str | None) -> str:
    """Return what results call a model: its hub id, or the name of its directory."""
    if name_or_path is None:
        return DEFAULT_MODEL
    path = Path(name_or_path)
    return path.resolve().name if path.is_dir() else name_or_path


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="evals.niah", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help=f"hub id or directory; {DEFAULT_MODEL} without it")
    parser.add_argument("--gguf-file", help="GGUF file in the model directory")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--device", help="cpu, cuda or cuda:N; the GPU if there is one")
    parser.add_argument(
        "--cache", action="append", metavar="SPEC", help="a cache; may be repeated (default: k4v4 and k3v3)"
    )
    parser.add_argument("--needle", choices=tuple(NEEDLES), default="number")
    parser.add_argument(
        "--haystack", default="austen", help="austen, noise, a .txt file, a folder of them, or hub:ID (default: austen)"
    )
    parser.add_argument("--lengths", default=LENGTHS, help=f"tokens: {LENGTHS} or 1024:8192:1024")
    parser.add_argument("--depths", default=DEPTHS, help=f"percent: {DEPTHS} or 0:100:10")
    parser.add_argument("--samples", "--seeds", type=int, default=1, help="samples for each length and depth")
    parser.add_argument("--protocol", choices=("split", "oneshot"), default="split")
    parser.add_argument("--out", type=Path, help="run directory (default: runs/niah-MODEL-NEEDLE)")
    parser.add_argument("--results", type=Path, help="copy the samples of the run into this JSONL file")
    parser.add_argument(
        "--overwrite", "--fresh", action="store_true", help="forget an earlier run in the directory, measure again"
    )
    parser.add_argument("--force", action="store_true", help="load even a model that should not fit in memory")
    return parser.parse_args(arguments)


def evaluate(args: argparse.Namespace) -> Path:
    """Do what the command line says, and return the run directory."""
    specs = list(dict.fromkeys([REFERENCE, *(args.cache or DEFAULT_CACHES)]))
    check_specs(specs)
    lengths, depths = [int(length) for length in parse_grid(args.lengths)], parse_grid(args.depths)
    if args.samples < 1 or not all(0 <= depth <= 100 for depth in depths):
        raise EvalError(
            f"--samples must be at least 1 and --depths from 0 to 100, got {args.samples} and {args.depths}"
        )
    state = process_state(args.device)
    model, tokenizer = load_model(
        args.model or str(smollm2_dir()),
        gguf_file=args.gguf_file,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        device=rank_device(state, args.device),
        tokens=max(lengths),
        cache="dense",
        force=args.force,
    )
    haystack = haystack_ids(tokenizer, args.haystack)
    config = {
        "eval": "niah",
        "model": model_label(args.model),
        "gguf_file": args.gguf_file,
        "dtype": str(model.dtype).removeprefix("torch."),
        "needle": args.needle,
        "haystack": args.haystack,
        "haystack_sha256": _digest(haystack),
        "protocol": args.protocol,
        "lengths": lengths,
        "depths": depths,
        "samples": list(range(args.samples)),
        "caches": {spec: settings_of(make_cache(model, spec)) for spec in specs},
    }
    path = args.out or Path("runs") / f"niah-{Path(config['model']).name}-{args.needle}"
    growing = ("lengths", "depths", "samples", "caches")
    directory = RunDirectory(path, config, growing=growing, state=state, overwrite=args.overwrite)
    cells = [Cell(length, depth, seed) for length in lengths for depth in depths for seed in config["samples"]]
    run(directory, model, tokenizer, haystack, cells, specs, needle=args.needle, protocol=args.protocol)
    standard = args.out is None and all(config[name] == value for name, value in PUBLISHED.items())
    results = args.results or (RESULT_FILE if standard else None)
    if state.is_main_process:
        if results is not None:
            niah_report.publish(directory, results)
        print(f"{(path / 'table.md').read_text(encoding='utf-8')}\n{path}/table.md")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line; what cannot be done is one line on stderr and exit code 2."""
    args = parse_arguments(arguments)
    with one_line_errors():
        evaluate(args)


if __name__ == "__main__":
    main()
