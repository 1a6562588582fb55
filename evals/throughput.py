"""Time ``generate()`` end to end on a GPU, with transformers' caches and with compressed ones.

    python -m evals.throughput --budget-s 300 --out evals/results/throughput.jsonl
    python -m evals.throughput --model qwen2.5-7b --context 32768 --batch 1 --cache 'k4v4*' dynamic-flash

Models have the shape of the named ones and random bfloat16 weights. Up to ``--prompt-tokens`` tokens (static caches:
fewer) the prompt is computed, and the row has the time to the first token and the peak of memory; longer contexts are
filled with random keys and values, and only decoding is timed. ``ms_per_token`` is the time between two tokens that
``generate()`` hands out, the first ones, which compile and warm up, left out; ``event_ms`` the same by CUDA events, and
``forward_ms`` that of a plain loop of forward passes on the same cache. Static caches are compiled by ``generate()``
itself, with CUDA graphs; their loop calls the step it compiled.

Rows come in order of importance, and a row that fails says why. Bytes are those allocated beside the weights, graphs of
a compiled step included; ``cache_bytes`` are those of the storages of the cache alone.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import torch
from triton import TritonError

from evals import baselines
from evals.common import RESULTS, PeakMemory, bytes_held, cache_argument
from evals.speed_log import FAILED, OK, SKIPPED, ResultLog, quantiles
from evals.throughput_capacity import capacity_rows
from evals.throughput_models import (
    FLASH,
    MODELS,
    WARM_TOKENS,
    allocated,
    attention_of,
    fill,
    forward_ms,
    generate,
    make_cache,
    make_model,
    noted_steps,
    random_ids,
    step_ms,
)

RESULT_FILE = RESULTS / "throughput.jsonl"
STEPS: Final = 24
"""Tokens timed."""
COMPILED_WARM_TOKENS: Final = 6
"""First tokens not counted: where a step is compiled, the second and third still record graphs."""
SPARE_TOKENS: Final = 64
"""Room of a static cache beyond the context, for all tokens that are generated."""
STATIC_PROMPT_TOKENS: Final = 40_000
"""Longest prompt computed with a static cache, over the batch: its mask has a row for every token."""
CACHES: Final = (
    FLASH, "k4v4-static", "k4v4", "dynamic", "static", "k3v2-static", "k3v2", "quanto4", "hqq4", "fp8",
)  # fmt: skip
"""Caches, the most important first."""
QUANTIZED: Final = CACHES[-3:]
"""Those of transformers that need a package besides."""
CONTEXTS: Final = (131072, 32768, 8192, 4096)
BATCHES: Final = (1, 8)

# what a model, a cache or the compiler may raise where it does not serve a row; after an error that takes the GPU away,
# cleaning up raises too
ROW_ERRORS: Final = (
    RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ImportError, KeyError, IndexError,
    AssertionError, TritonError,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row of results.

    Attributes:
        model: A name of :data:`MODELS`.
        batch: Sequences.
        context: Tokens before the first one generated.
        cache: A name of :data:`CACHES`.
    """

    model: str
    batch: int
    context: int
    cache: str

    @property
    def id(self) -> str:
        """Name of the row, unique."""
        return f"{self.model}/b{self.batch}/{self.context}/{self.cache}"

    @property
    def is_static(self) -> bool:
        """Whether ``generate()`` compiles decoding."""
        return self.cache.rpartition("-")[2] == "static"

    @property
    def expected_s(self) -> float:
        """Rough time of the row; it is not started with less left."""
        return 75.0 if self.is_static else 25.0

    def computes_prompt(self, limit: int) -> bool:
        """Whether the prompt is computed rather than filled in, for a limit of tokens over the batch."""
        return self.batch * self.context <= (min(limit, STATIC_PROMPT_TOKENS) if self.is_static else limit)


def warm_up(model: Any, case: Case) -> None:
    """Compile and load what a prompt needs, and for caches that grow a step too, on a short prompt."""
    tokens = min(case.context, 4096)
    cache = make_cache(model, case.cache, tokens + SPARE_TOKENS)
    model(random_ids(model, case.batch, tokens), logits_to_keep=1, **cache_argument(model, cache))
    if not case.is_static:
        forward_ms(model, cache, case.batch, 0)


@torch.no_grad()
def measure(model: Any, case: Case, *, prompt_tokens: int, steps: int = STEPS) -> dict[str, Any]:
    """Return the figures of a case that runs."""
    computed = case.computes_prompt(prompt_tokens)
    skip = COMPILED_WARM_TOKENS if case.is_static else WARM_TOKENS
    # what an earlier row left, graphs above all, would be freed while this one runs, and count as less held
    _clean()
    weights = allocated()
    with attention_of(model, case.cache):
        if computed:
            warm_up(model, case)
        gc.collect()
        with PeakMemory() as peak:
            cache = make_cache(model, case.cache, case.context + SPARE_TOKENS)
            if not computed:
                fill(model, cache, case.batch, case.context - 1)
            with noted_steps(model) as compiled:
                watch = generate(model, cache, random_ids(model, case.batch, case.context), steps + skip + 1)
        held = allocated() - weights
        plain = step_ms(compiled[0], steps) if compiled else forward_ms(model, cache, case.batch, steps)
    times = quantiles(watch.token_ms(skip))
    events = watch.event_ms(skip)
    return {
        "prompt": "computed" if computed else "filled",
        "first_token_s": watch.first_token_s() if computed else None,
        "ms_per_token": times,
        "event_ms": quantiles(events) if events else None,
        "forward_ms": quantiles(plain),
        "compiled": bool(compiled),
        "tokens_per_s": 1000 * case.batch / times["p50"],
        "peak_bytes": peak.nbytes - weights if computed else None,
        "held_bytes": held,
        "cache_bytes": None if case.cache in QUANTIZED else bytes_held(cache),
        "weight_bytes": weights,
        "steps": steps,
    }


def attempt(model: Any, case: Case, *, prompt_tokens: int, steps: int = STEPS) -> dict[str, Any]:
    """Return the row of a case, whatever becomes of it."""
    row = {
        "id": case.id,
        "eval": "throughput",
        "kind": "decode",
        "model": case.model,
        "layers": model.config.num_hidden_layers,
        "batch": case.batch,
        "context": case.context,
        "cache": case.cache,
    }
    if case.cache in QUANTIZED and case.cache not in baselines.installed_quantized():
        return {**row, "status": SKIPPED, "reason": f"the package behind {case.cache} is not installed"}
    try:
        return {**row, "status": OK, **measure(model, case, prompt_tokens=prompt_tokens, steps=steps)}
    except ROW_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        # too large is an answer, not a fault
        status = SKIPPED if isinstance(error, torch.OutOfMemoryError) else FAILED
        return {**row, "status": status, "reason": reason}


# command line


def grid() -> list[Case]:
    """Return all rows, the most important first; models alternate as little as the order allows."""
    return [
        Case(model, batch, context, cache)
        for batch in BATCHES
        for model in MODELS
        for context in CONTEXTS
        for cache in CACHES
        if cache != "k3v2-static" or context == max(CONTEXTS)
    ]


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the rows that the arguments ask for, in the order of the grid."""
    return [
        case
        for case in grid()
        if (options.model is None or case.model in options.model)
        and (options.batch is None or case.batch in options.batch)
        and (options.context is None or case.context in options.context)
        and (options.cache is None or any(fnmatch(case.cache, pattern) for pattern in options.cache))
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT_FILE, help="JSON lines to go on with")
    parser.add_argument("--budget-s", type=float, help="seconds after which no row is started")
    parser.add_argument("--model", nargs="+", choices=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int)
    parser.add_argument("--context", nargs="+", type=int)
    parser.add_argument("--cache", nargs="+", help="names or patterns")
    parser.add_argument("--layers", type=int, help="of the model; all by default")
    parser.add_argument("--steps", type=int, default=STEPS, help="tokens timed")
    parser.add_argument("--prompt-tokens", type=int, default=140_000, help="longest prompt computed, over the batch")
    parser.add_argument("--no-capacity", action="store_true", help="leave out what fits into the memory")
    parser.add_argument("--commit", help="where the checkout cannot say it")
    parser.add_argument("--retry", action="store_true", help="measure again what failed or was skipped")
    return parser.parse_args(arguments)


def run(
    cases: Sequence[Case], log: ResultLog, build: Callable[[str], Any], row_of: Callable[[Any, Case], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Measure the missing rows while there is time, with one model at a time; yield them once they are on disk.

    Args:
        cases: In order.
        log: Takes the rows.
        build: Returns the model of a name.
        row_of: Returns the row of a case.
    """
    model, name = None, ""
    for case in cases:
        if case.id in log.done or not log.has_time(case.expected_s):
            continue
        if case.model != name:
            model = None
            _clean()
            model, name = build(case.model), case.model
        row = row_of(model, case)
        log.write(row)
        yield row
        _clean()


def _clean() -> None:
    """Give back what the last row took. A GPU that an error took away raises here, and the run ends."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def summary(row: Mapping[str, Any]) -> str:
    """Say a row in one line."""
    if row["status"] != OK:
        return f"{row['id']}: {row['status']}: {row['reason']}"
    if row["kind"] == "capacity":
        return f"{row['id']}: {row['users']} sequences, {row['longest']:,} tokens, {row['held_bytes'] / 2**30:.1f} GiB"
    first = "" if row["first_token_s"] is None else f", first token {row['first_token_s']:.2f} s"
    return f"{row['id']}: {row['ms_per_token']['p50']:.2f} ms/token{first}, {row['held_bytes'] / 2**30:.2f} GiB"


def main() -> None:
    """Measure what is missing."""
    options = parse()
    if not torch.cuda.is_available():
        raise SystemExit("evals.throughput times models on a GPU, and there is none")
    torch.manual_seed(0)
    cases = chosen(options)
    log = ResultLog(options.out, budget_s=options.budget_s, commit=options.commit, retry=options.retry)

    def build(name: str) -> Any:
        return make_model(name, options.layers, "cuda")

    def row_of(model: Any, case: Case) -> dict[str, Any]:
        return attempt(model, case, prompt_tokens=options.prompt_tokens, steps=options.steps)

    for row in run(cases, log, build, row_of):
        print(f"{log.elapsed_s:4.0f} s  {summary(row)}", flush=True)
    if not options.no_capacity:
        for row in capacity_rows(log):
            print(f"{log.elapsed_s:4.0f} s  {summary(row)}", flush=True)
    print(f"{len(log.missing(case.id for case in cases))} of {len(cases)} rows left after {log.elapsed_s:.0f} s")


if __name__ == "__main__":
    main()
