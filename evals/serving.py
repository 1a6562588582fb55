"""Bytes of a token in the pages of continuous batching, packed and transformers' own, and what is generated from them.

    python -m evals.serving --preset k4v4 --preset k3v2

Excerpts of the shipped text are continued greedily, all at once, on the CPU or the GPU. ``same_tokens`` counts, over
all requests, the tokens up to the first that differs from what the stock pages gave. Rows go to
``evals/results/serving.jsonl``. Needs transformers 5.24 or newer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from transformers import ContinuousBatchingConfig, GenerationConfig

from evals.common import RESULTS, excerpt_ids, load_model, write_results
from hf_turboquant.serving import patch_serving

RESULT_FILE: Final = RESULTS / "serving.jsonl"
PROMPTS: Final = (400, 700, 100, 650)
NEW_TOKENS: Final = 16
EXACT: Final = "16-bit"


def serve(model: Any, prompts: Sequence[Sequence[int]], config: str | None) -> tuple[list[list[int]], dict[str, Any]]:
    """Return what is generated for each prompt, and the facts of the run; stock pages without ``config``."""
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = ContinuousBatchingConfig(num_blocks=20, max_batch_tokens=512, auto_switch_to_flash=False)
    exact = {"key_bits": 16, "value_bits": 16, "key_centering": "none"}
    name, overrides = (None, exact) if config == EXACT else (config, {})
    facts: dict[str, Any] = {}
    with patch_serving(model, name, **overrides) if config else nullcontext() as serving:
        outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=engine).values()
    if config:
        report = serving.report()
        facts = {
            "bytes_per_token": report.bytes_per_token,
            "dense_bytes_per_token": report.dense_bytes_per_token,
            "bytes_beside_pages": report.exact_bytes,
            "rebuilt": report.materialized_calls,
        }
    return [output.generated_tokens for output in outputs], facts


def shared_beginning(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two answers have in common before they part."""
    return next((place for place, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--preset", action="append", help="a preset; may be repeated (default: k8v4, k4v4 and k3v2)")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=RESULT_FILE)
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model, device=options.device)
    ids = excerpt_ids(tokenizer, sum(PROMPTS))
    prompts = [ids[sum(PROMPTS[:i]) : sum(PROMPTS[: i + 1])] for i in range(len(PROMPTS))]
    wanted, facts = serve(model, prompts, None)
    common = {"eval": "serving", "model": Path(options.model or "SmolLM2-135M-Instruct").name, "prompts": PROMPTS}
    common |= {"dtype": str(model.dtype).removeprefix("torch."), "new_tokens": NEW_TOKENS}
    rows = [{**common, "pages": "stock", **facts}]
    for name in (EXACT, *(options.preset or ("k8v4", "k4v4", "k3v2"))):
        got, facts = serve(model, prompts, name)
        same = sum(shared_beginning(left, right) for left, right in zip(wanted, got, strict=True))
        rows.append({**common, "pages": name, "same_tokens": same, "of": NEW_TOKENS * len(PROMPTS), **facts})
        print(rows[-1], flush=True)
    write_results(options.out, rows)


if __name__ == "__main__":
    main()
