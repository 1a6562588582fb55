"""Time decoding with packed blocks in CPU memory against blocks on the GPU, and count what lies where.

    python -m evals.offload --out evals/results/offload.jsonl      half a minute on an H200

The model has 8 layers of Qwen2.5-7B's shape and random weights, and caches are filled with random keys and values.
Rows say whether the tokens are those of the same cache on the GPU. ``--tiny`` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

from evals.common import RESULTS, cache_argument, write_results
from evals.speed_log import quantiles
from evals.throughput_models import allocated, fill, make_model, wait
from hf_turboquant import TurboQuantCache

LAYERS: Final = 8
STEPS: Final = 20
WARM_STEPS: Final = 4
TINY: Final = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny_model() -> Any:
    """Return a model that a CPU runs, of random weights."""
    config = Qwen2Config(**TINY, num_hidden_layers=LAYERS, max_position_embeddings=131072)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.inference_mode()
def measure(model: Any, name: str, tokens: int, *, offloading: bool) -> dict[str, Any]:
    """Return the figures of one cache, and the tokens it decoded.

    Args:
        model: Of :func:`make_model` or :func:`tiny_model`.
        name: A preset, or ``dynamic``.
        tokens: In the cache before the first step.
        offloading: Whether layers wait on the CPU.
    """
    weights = allocated()
    plain = name == "dynamic"
    cache: Any = (
        DynamicCache(config=model.config, offloading=offloading)
        if plain
        else TurboQuantCache(model.config, name, offloading=offloading)
    )
    # the same keys and values, whatever the cache
    torch.manual_seed(1)
    fill(model, cache, 1, tokens)
    wait()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    decoded, times = [], []
    for _ in range(WARM_STEPS + STEPS):
        start = time.perf_counter()
        token = model(token, logits_to_keep=1, **cache_argument(model, cache)).logits[:, -1:].argmax(-1)
        wait()
        times.append(1000 * (time.perf_counter() - start))
        decoded.append(int(token))
    peak = torch.cuda.max_memory_allocated() - weights if torch.cuda.is_available() else None
    return {
        "eval": "offload",
        "layers": LAYERS,
        "cache": name,
        "context": tokens,
        "offloading": offloading,
        "ms_per_token": quantiles(times[WARM_STEPS:]),
        "peak_bytes": peak,
        "gpu_bytes": allocated() - weights,
        "held_bytes": None if plain else cache.memory_report().bytes_held,
        "tokens": decoded,
    }


def rows(model: Any, lengths: Sequence[int], caches: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every cache at every length: on the device, then offloaded, and whether the tokens are the same."""
    for name in caches:
        for tokens in lengths:
            here = measure(model, name, tokens, offloading=False)
            gc.collect()
            away = measure(model, name, tokens, offloading=True)
            gc.collect()
            away["same_tokens"] = away.pop("tokens") == here.pop("tokens")
            yield here
            yield away


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 65536], help="tokens in the cache")
    parser.add_argument("--cache", nargs="+", default=["k4v4", "k3v2", "dynamic"], help="presets, or dynamic")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and a CPU will do")
    parser.add_argument("--out", type=Path, default=RESULTS / "offload.jsonl")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit(
            "evals.offload moves blocks between a GPU and the CPU, and there is no GPU; --tiny runs anywhere"
        )
    torch.manual_seed(0)
    model = tiny_model() if options.tiny else make_model("qwen2.5-7b", LAYERS, "cuda")
    # the first forward compiles kernels
    measure(model, options.cache[0], 300, offloading=False)
    write_results(options.out, rows(model, options.lengths, options.cache))


if __name__ == "__main__":
    main()
