"""Time one decode step on the CPU with a dense and with compressed caches.

SmolLM2 in float32 on one thread. Every cache is prefilled with the same text; then each step feeds the next token of
the text to every cache in turn, so that whatever else the machine does falls on all alike. Medians over the steps, of
the time on the clock and of the processor's time; on a quiet machine they are the same.

    python -m evals.cpu_speed --context 2048 --steps 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from evals.common import RESULTS, bytes_held, cache_argument, excerpt_ids, load_model, make_cache, write_results

RESULT_FILE = RESULTS / "cpu_speed.jsonl"
BASELINE = "dynamic"


@torch.inference_mode()
def time_decode(
    model: Any, ids: torch.Tensor, specs: list[str], context: int, warmup: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """Return (clock seconds, processor seconds) of each step after the first ``warmup``, and bytes held, by cache.

    Args:
        model: On the CPU.
        ids: ``(1, context + warmup + steps)``, the text.
        specs: Caches, as :func:`evals.common.make_cache` takes them.
        context: Tokens of prefill.
        warmup: First steps not counted.
    """
    caches = {spec: make_cache(model, spec) for spec in specs}
    for cache in caches.values():
        model(ids[:, :context], logits_to_keep=1, **cache_argument(model, cache))
    seconds: dict[str, list[tuple[float, float]]] = {spec: [] for spec in specs}
    for step in range(context, ids.shape[1]):
        for spec, cache in caches.items():
            clock, processor = time.perf_counter(), time.process_time()
            model(ids[:, step : step + 1], logits_to_keep=1, **cache_argument(model, cache))
            seconds[spec].append((time.perf_counter() - clock, time.process_time() - processor))
    return {spec: times[warmup:] for spec, times in seconds.items()}, {s: bytes_held(c) for s, c in caches.items()}


def main() -> None:
    """Measure, write the results, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens before the first timed step")
    parser.add_argument("--steps", type=int, default=64, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--presets", default="k4v4,k3v3,k2v2", help="comma-separated")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model, tokenizer = load_model(dtype=torch.float32, device="cpu")
    ids = torch.tensor([excerpt_ids(tokenizer, args.context + args.warmup + args.steps)])
    specs = [BASELINE, *args.presets.split(",")]
    seconds, held = time_decode(model, ids, specs, args.context, args.warmup)

    baseline_clock, baseline_cpu = (statistics.median(column) for column in zip(*seconds[BASELINE]))
    records = []
    for spec, pairs in seconds.items():
        clock, cpu = zip(*pairs)
        p20, p50, p80 = (statistics.quantiles(clock, n=10)[i] * 1e3 for i in (1, 4, 7))
        cpu_p50 = statistics.median(cpu) * 1e3
        against, against_cpu = p50 / 1e3 / baseline_clock, cpu_p50 / 1e3 / baseline_cpu
        print(
            f"{spec:10} p20 {p20:7.2f}  median {p50:7.2f}  p80 {p80:7.2f} ms/token, {against:.2f} x {BASELINE}; "
            f"processor {cpu_p50:7.2f} ms/token, {against_cpu:.2f} x"
        )
        records.append(
            {
                "eval": "cpu_speed",
                "model": "SmolLM2-135M-Instruct",
                "dtype": "float32",
                "cache": spec,
                "context": args.context,
                "steps": args.steps,
                "ms_per_token_p20": p20,
                "ms_per_token_p50": p50,
                "ms_per_token_p80": p80,
                "cpu_ms_per_token_p50": cpu_p50,
                "times_dynamic": against,
                "cpu_times_dynamic": against_cpu,
                "bytes_held": held[spec],
            }
        )
    write_results(RESULT_FILE, records)


if __name__ == "__main__":
    main()
