"""One process of the tensor-parallel test: generate, and print the tokens and the bytes this rank holds."""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

from hf_turboquant import TurboQuantCache


def main() -> None:
    parallel = "RANK" in os.environ
    options = {"tp_plan": "auto"} if parallel else {}
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **options).eval()
    ids = torch.arange(600)[None] % 89 + 2
    cache = TurboQuantCache(model.config, "k4v4")
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=8, do_sample=False
        )
    held = [layer.bytes_held for layer in cache.memory_report().layers]
    report = cache.path_report()
    facts = {
        "rank": int(os.environ.get("RANK", 0)),
        "tokens": out[0, 600:].tolist(),
        "bytes": sum(held),
        "rebuilt": report.materialized_calls,
    }
    # one write per process, so that lines do not mix
    os.write(1, (json.dumps(facts) + "\n").encode())


if __name__ == "__main__":
    main()
