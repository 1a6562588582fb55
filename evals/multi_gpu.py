"""Two GPUs and more: tensor parallelism, layers on several devices, and an evaluation shared between processes.

    torchrun --nproc-per-node 2 -m evals.multi_gpu
    torchrun --nproc-per-node 2 -m evals.multi_gpu --part speed --layers 8
    torchrun --nproc-per-node 2 -m evals.multi_gpu --device cpu --shape tiny --contexts 512
    python -m evals.multi_gpu --table

Models of random weights are written to a folder once and loaded from there, whole and in parts. What is compared:

* ``tensor_parallel``: ``tp_plan="auto"`` against one device. With 16 bits the tokens must be equal, in float32, where
  the order of a sum decides nothing. With a preset the logits must be no further from those of float32 on one device
  than twice what one device in low precision is. Every process holds its share of the bytes.
* ``device_map``: layers on several devices, in one process. Stores are where their layers are; tokens must be equal.
* ``speed``: a decode step of the whole shape, split over the processes, its cache filled with random keys and values.
* ``needle``: ``evals.niah`` by all processes and by one; the scores must be equal.

Rows go to ``evals/results/multi_gpu.jsonl``; those of GPUs into docs/multi_gpu.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, DynamicCache

from evals import multi_gpu_table
from evals.common import RESULTS, bytes_held, cache_argument, environment
from evals.multi_gpu_ranks import SHAPES, Ranks, load, parallel_options, prompt, shared_folder, write_checkpoint
from hf_turboquant import TurboQuantCache

RESULT_FILE: Final = RESULTS / "multi_gpu.jsonl"

CHECKED_LAYERS: Final = 4
"""Layers of the model that is compared, which stands in memory in float32."""
NEW_TOKENS: Final = 24
PROMPT_TOKENS: Final = 700
FORCED_TOKENS: Final = 32
TIMED_STEPS: Final = 24
WARM_STEPS: Final = 4
FILL_TOKENS: Final = 8192
LOW_PRECISION_FACTOR: Final = 2.0
PARTS: Final = ("tensor_parallel", "device_map", "speed", "needle")


@torch.no_grad()
def answer(model: Any, cache: Any) -> list[int]:
    """Return the tokens that a model generates greedily."""
    ids = prompt(model, PROMPT_TOKENS)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens: list[int] = model.generate(ids, **options, **cache_argument(model, cache))[0, ids.shape[1] :].tolist()
    return tokens


@torch.no_grad()
def forced_logits(model: Any, spec: str) -> torch.Tensor:
    """Return ``(FORCED_TOKENS, vocabulary)`` float32 logits of given tokens, one at a time, behind a prompt."""
    cache = TurboQuantCache(model.config, spec)
    ids = prompt(model, PROMPT_TOKENS + FORCED_TOKENS)
    model(ids[:, :PROMPT_TOKENS], logits_to_keep=1, **cache_argument(model, cache))
    rows = [model(ids[:, [at]], **cache_argument(model, cache)).logits[0] for at in range(PROMPT_TOKENS, ids.shape[1])]
    return torch.cat(rows).float().cpu()


def exact_cache(model: Any) -> TurboQuantCache:
    """Return a cache that keeps 16 bits, and packs a block as soon as it is full."""
    return TurboQuantCache(model.config, key_bits=16, value_bits=16, key_centering="none", residual_window=0)


# parts


def tensor_parallel(ranks: Ranks, checkpoint: str, name: str, presets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compare a model that is split over the processes with one device."""
    parallel = parallel_options(ranks.size)
    alone = {"device_map": {"": str(ranks.device)}}

    def exact_facts(model: Any) -> dict[str, Any]:
        cache = exact_cache(model)
        return {"tokens": answer(model, cache), "bytes": bytes_held(cache)}

    def of_one(dtype: torch.dtype, measure: Callable[[Any], Any]) -> Any:
        return ranks.first(lambda: measure(load(checkpoint, dtype, **alone)))

    one = of_one(torch.float32, exact_facts)
    split = ranks.gather(exact_facts(load(checkpoint, torch.float32, **parallel)))
    share = one["bytes"] // ranks.size
    yield {
        "part": "tensor_parallel", "model": name, "cache": "16-bit", "dtype": "float32",
        "passed": all(facts["tokens"] == one["tokens"] and facts["bytes"] == share for facts in split),
        "tokens": len(one["tokens"]),
        "bytes_one": one["bytes"],
        "bytes_ranks": [facts["bytes"] for facts in split],
    }  # fmt: skip
    low = load(checkpoint, torch.bfloat16, **parallel)
    for preset in presets:
        wanted = of_one(torch.float32, lambda model, preset=preset: forced_logits(model, preset))
        eager = of_one(torch.bfloat16, lambda model, preset=preset: forced_logits(model, preset))
        got = forced_logits(low, preset)
        error, limit = float((got - wanted).norm()), LOW_PRECISION_FACTOR * float((eager - wanted).norm())
        errors = ranks.gather(error)
        yield {
            "part": "tensor_parallel", "model": name, "cache": preset, "dtype": "bfloat16",
            "passed": max(errors) <= limit,
            "error": max(errors), "error_limit": limit, "norm": float(wanted.norm()),
        }  # fmt: skip


def device_map(ranks: Ranks, checkpoint: str, name: str) -> Iterator[dict[str, Any]]:
    """Compare a model whose layers lie on several devices with one device. The first process does it."""
    row = ranks.first(lambda: _device_map(ranks, checkpoint, name))
    yield row


def _device_map(ranks: Ranks, checkpoint: str, name: str) -> dict[str, Any]:
    whole = load(checkpoint, torch.float32, device_map={"": str(ranks.device)})
    wanted = answer(whole, DynamicCache(config=whole.config))
    del whole
    devices = [f"cuda:{index}" for index in range(max(ranks.size, 1))] if ranks.device.type == "cuda" else ["cpu"]
    config = AutoConfig.from_pretrained(checkpoint)
    layers = config.num_hidden_layers
    places: dict[str, str] = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0]}
    places |= {f"model.layers.{i}": devices[i * len(devices) // layers] for i in range(layers)}
    # an output matrix that is the embedding's must be where that is
    places |= {"model.norm": devices[-1], "lm_head": devices[0 if config.tie_word_embeddings else -1]}
    model = load(checkpoint, torch.float32, device_map=places)
    cache = exact_cache(model)
    tokens = answer(model, cache)
    stored = [str(layer.store.tail_keys.device) for layer in cache.layers]
    return {
        "part": "device_map", "model": name, "cache": "16-bit", "dtype": "float32", "devices": devices,
        "passed": tokens == wanted and stored == [places[f"model.layers.{i}"] for i in range(layers)],
        "stored": stored, "tokens": len(tokens), "bytes": bytes_held(cache),
    }  # fmt: skip


def speed(
    ranks: Ranks, checkpoint: str, name: str, contexts: Sequence[int], presets: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Time a decode step of a model that is split over the processes."""
    model = load(checkpoint, torch.bfloat16, **parallel_options(ranks.size))
    for context, spec in itertools.product(contexts, ("dynamic", *presets)):
        facts = ranks.gather(_decode(ranks, model, context, spec))
        milliseconds = max(fact["ms"] for fact in facts)
        yield {
            "part": "speed", "model": name, "layers": model.config.num_hidden_layers, "cache": spec, "context": context,
            "dtype": "bfloat16", "passed": all(fact["finite"] for fact in facts),
            "ms_per_token": milliseconds, "tokens_per_s": 1000 / milliseconds,
            "bytes_ranks": [fact["bytes"] for fact in facts], "peak_ranks": [fact["peak"] for fact in facts],
        }  # fmt: skip


@torch.no_grad()
def _decode(ranks: Ranks, model: Any, context: int, spec: str) -> dict[str, Any]:
    cache = DynamicCache(config=model.config) if spec == "dynamic" else TurboQuantCache(model.config, spec)
    config = model.config
    heads, head_dim = config.num_key_value_heads // ranks.size, config.hidden_size // config.num_attention_heads
    for first in range(0, context, FILL_TOKENS):
        shape = (1, heads, min(FILL_TOKENS, context - first), head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(*(torch.randn(shape, device=ranks.device, dtype=model.dtype) for _ in range(2)), layer)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(WARM_STEPS + TIMED_STEPS):
        ids = prompt(model, 1, seed=step)
        ranks.synchronize()
        start = time.perf_counter()
        logits = model(ids, **cache_argument(model, cache)).logits
        ranks.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() if ranks.device.type == "cuda" else None
    finite = bool(torch.isfinite(logits).all())
    return {
        "ms": sorted(times[WARM_STEPS:])[TIMED_STEPS // 2],
        "bytes": bytes_held(cache),
        "peak": peak,
        "finite": finite,
    }


def needle(ranks: Ranks, model: str | None, lengths: str, device_type: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the needle evaluation by one process and by all, from the first process, and compare what they found."""

    def compare() -> dict[str, Any]:
        one = _niah([], model, lengths, device_type, folder / "one")
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks.size}"]
        start = time.perf_counter()
        several = _niah(launch, model, lengths, device_type, folder / "several")
        return {
            "part": "needle", "model": model or "SmolLM2-135M-Instruct", "cache": "k4v4", "processes": ranks.size,
            "passed": bool(one) and one == several, "samples": len(one), "seconds": time.perf_counter() - start,
        }  # fmt: skip

    yield ranks.first(compare)


def _niah(launch: Sequence[str], model: str | None, lengths: str, device_type: str, out: Path) -> dict[str, Any]:
    """Run ``evals.niah``, and return hit and likelihood of each sample, the likelihood to five digits."""
    # the processes of the evaluation are a group of their own
    own = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, *launch, "-m", "evals.niah", "--cache", "k4v4", "--lengths", lengths, "--out", str(out)]
    command += ["--overwrite", "--depths", "0,50,100"]
    command += ["--device", device_type] if device_type == "cpu" else []
    command += ["--model", model] if model else []
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"evals.niah ended with {done.returncode}: {done.stderr[-2000:]}")
    records = [json.loads(line) for file in out.glob("samples.rank*.jsonl") for line in file.read_text().splitlines()]
    return {record["id"]: (record["hit"], round(record["nll"], 5)) for record in records}


# command line


def rows(ranks: Ranks, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the parts asked for, in every process."""
    chosen, shape = options.part or PARTS, options.shape
    layers = options.layers or SHAPES[shape].num_hidden_layers

    def checkpoint(count: int, dtype: torch.dtype) -> str:
        path: str = ranks.first(lambda: write_checkpoint(folder, shape, count, dtype, ranks.device))
        return path

    checked = min(CHECKED_LAYERS, layers)
    models = [(f"{shape}, {checked} layers", lambda: checkpoint(checked, torch.float32))]
    models += [(Path(options.model).name, lambda: options.model)] if options.model else []
    for name, path in models:
        if "tensor_parallel" in chosen:
            yield from tensor_parallel(ranks, path(), name, options.preset)
        if "device_map" in chosen:
            yield from device_map(ranks, path(), name)
    if "speed" in chosen:
        contexts = [int(context) for context in options.contexts.split(",")]
        yield from speed(ranks, checkpoint(layers, torch.bfloat16), shape, contexts, options.preset)
    if "needle" in chosen:
        yield from needle(ranks, options.needle_model, options.needle_lengths, ranks.device.type, folder)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="evals.multi_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="a part; may be repeated (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu runs all of it between processes on the CPU")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="layers of the model that is timed, if not all")
    parser.add_argument("--model", help="a checkpoint besides, whose KV heads divide by the processes")
    parser.add_argument("--preset", action="append", help="a preset; may be repeated (default: k4v4 and k3v2)")
    parser.add_argument("--contexts", default="32768,131072", help="tokens in the cache when a step is timed")
    parser.add_argument("--needle-model", help="checkpoint with a tokenizer (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--needle-lengths", default="1024")
    parser.add_argument("--checkpoints", type=Path, help="folder for the models of random weights (default: temporary)")
    parser.add_argument("--out", type=Path, default=RESULT_FILE)
    parser.add_argument("--table", action="store_true", help="only write docs/multi_gpu.md from the results")
    options = parser.parse_args(arguments)
    options.preset = options.preset or ["k4v4", "k3v2"]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 if a comparison failed."""
    options = parse_arguments(arguments)
    if options.table:
        multi_gpu_table.write(options.out)
        return 0
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cpu":
        # transformers puts the parts of a split model on the accelerator it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ranks = Ranks(device_type)
    failed = 0
    with nullcontext(options.checkpoints) if options.checkpoints else shared_folder(ranks) as folder:
        for row in rows(ranks, options, folder):
            failed += not row["passed"]
            if ranks.rank == 0:
                full = {"eval": "multi_gpu", "device": device_type, "processes": ranks.size, **row, **environment()}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(full) + "\n")
                print(json.dumps(row), flush=True)
    ranks.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
