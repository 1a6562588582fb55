"""Find a needle: does an answer survive when the text that holds it is read from a compressed cache?

RULER's single-needle task: a seven-digit number is hidden at a given depth of a text and asked for behind it. The text
alone is the prompt; question and answer follow in a second pass that reads the cache, as a user's question would.
(Asked in one pass, the first token of the answer would come from keys and values that were never compressed.) The
answer is teacher-forced, which tells greedy success, every token the most likely one, and beside it the negative
log-likelihood, which moves long before a digit is lost. At depth 100 the needle lies in the exact window of most
caches.

    python -m evals.niah --cache dynamic --cache k4v4 --cache k3v3 --lengths 1024,2048,4096

Samples there are in the results are not measured again, unless ``--fresh`` is given.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from evals.baselines import make_cache, settings_of
from evals.common import (
    EXCERPT,
    RESULTS,
    cache_argument,
    environment,
    fill_cache,
    load_model,
    prefill,
    read_results,
)

RESULT_FILE: Final = RESULTS / "niah.jsonl"
LENGTHS: Final = (1024, 2048, 4096)
DEPTHS: Final = (0, 25, 50, 75, 100)

# RULER asks for two words joined by a hyphen; any will do that the text does not contain
_FIRST: Final = ("quiet", "amber", "silver", "hollow", "winter", "crimson", "gentle", "copper")
_SECOND: Final = ("river", "stone", "gate", "tree", "bell", "path", "cloud", "lantern")

INTRODUCTION: Final = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n"
)
NEEDLE: Final = " One of the special magic numbers for {key} is: {value}."
QUESTION: Final = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is:"
)


# samples


@dataclass(frozen=True)
class Sample:
    """One hidden number. Token ids are without special tokens.

    Attributes:
        length: Tokens of context, question and answer together, within one sentence of the text.
        depth: Where the needle lies, percent of the text.
        seed: Of key, number and place in the book; also the number of the sample.
        context: Introduction, text and needle.
        question: Question and the beginning of the answer.
        answer: The number.
        key: What the number is for.
        value: The number as text.
    """

    length: int
    depth: float
    seed: int
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    key: str
    value: str

    @property
    def name(self) -> str:
        """Identify the sample."""
        return f"{self.length}-{self.depth:g}-{self.seed}"


def make_sample(tokenizer: Any, haystack: Sequence[int], length: int, depth: float, seed: int) -> Sample:
    """Hide a number in a text.

    The needle is put behind the last sentence that ends before ``depth``. Key, number and the part of the text that is
    used depend on the arguments alone, not on what was made before.

    Args:
        tokenizer: Of the model.
        haystack: Token ids of a text; read from the beginning again where it ends.
        length: Tokens in all.
        depth: 0 to 100.
        seed: Any integer.
    """
    rng = random.Random(f"{seed}/{length}/{depth:g}")
    key, value = f"{rng.choice(_FIRST)}-{rng.choice(_SECOND)}", str(rng.randint(10**6, 10**7 - 1))
    introduction, needle, question, answer = (
        tokenizer(text, add_special_tokens=False).input_ids
        for text in (INTRODUCTION, NEEDLE.format(key=key, value=value), QUESTION.format(key=key), f" {value}")
    )
    size = length - sum(map(len, (introduction, needle, question, answer)))
    start = rng.randrange(len(haystack))
    text = [haystack[(start + i) % len(haystack)] for i in range(size)]
    place = round(size * depth / 100)
    if depth < 100:
        ends = tokenizer.convert_ids_to_tokens(text[:place])
        while place and not ends[place - 1].rstrip("\"'").endswith((".", "!", "?")):
            place -= 1
    context = (*introduction, *text[:place], *needle, *text[place:])
    return Sample(length, depth, seed, context, tuple(question), tuple(answer), key, value)


def make_samples(
    tokenizer: Any, haystack: Sequence[int], lengths: Sequence[int], depths: Sequence[float], seeds: Sequence[int]
) -> Iterator[Sample]:
    """Yield a sample for every length, depth and seed."""
    for length in lengths:
        for depth in depths:
            for seed in seeds:
                yield make_sample(tokenizer, haystack, length, depth, seed)


# scores


@dataclass(frozen=True)
class Answer:
    """How a cache answered.

    Attributes:
        hit: Whether greedy decoding gives the number: each of its tokens is the most likely.
        nll: Mean negative log-likelihood of the tokens of the number, nats.
        text: The most likely token at each place, decoded.
    """

    hit: bool
    nll: float
    text: str


@torch.inference_mode()
def score_sample(model: Any, tokenizer: Any, sample: Sample, cache: Cache, prompt: DynamicCache) -> Answer:
    """Ask for the number with a cache that holds the context.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        sample: What is hidden and asked.
        cache: Empty; filled with ``prompt`` here.
        prompt: Dense cache of the context, from :func:`evals.common.prefill`. One serves every cache.
    """
    fill_cache(cache, prompt)
    ids = torch.tensor([[*sample.question, *sample.answer[:-1]]], device=model.device)
    answer = torch.tensor(sample.answer, device=model.device)
    logits = model(ids, logits_to_keep=len(answer), **cache_argument(model, cache)).logits[0].float()
    likely = logits.argmax(-1)
    nll = -logits.log_softmax(-1).gather(-1, answer[:, None]).mean()
    return Answer(bool((likely == answer).all()), float(nll), tokenizer.decode(likely))


# runs


def haystack_ids(tokenizer: Any, path: Path = EXCERPT) -> list[int]:
    """Return the token ids of a text, its line breaks turned to spaces."""
    text = " ".join(path.read_text(encoding="utf-8").split())
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def run(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    specs: Sequence[str],
    path: Path,
    *,
    model_name: str,
    fresh: bool = False,
) -> None:
    """Score every cache on every sample and append what is missing to ``path``.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        samples: From :func:`make_samples`.
        specs: Caches, as :func:`evals.baselines.make_cache` takes them.
        path: JSONL file.
        model_name: Recorded.
        fresh: Measure ``specs`` again, in place of the records there are.
    """
    settings = {spec: settings_of(make_cache(model, spec)) for spec in specs}
    records = []
    for record in read_results(path) if path.exists() else []:
        ours = record["model"] == model_name and record["cache"] in settings
        # a preset may have come to mean other settings since
        if not ours or not (fresh or record["settings"] != settings[record["cache"]]):
            records.append(record)
    if path.exists():
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    done = {(r["model"], r["cache"], r["sample"]) for r in records}
    where = {"eval": "niah", "model": model_name, "dtype": str(model.dtype)[6:]}
    where_measured = environment()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for sample in (progress := tqdm(samples, unit="sample", disable=None)):
            todo = [spec for spec in specs if (model_name, spec, sample.name) not in done]
            if not todo:
                continue
            progress.set_description(sample.name)
            prompt = prefill(model, torch.tensor([sample.context], device=model.device))
            for spec in todo:
                answer = score_sample(model, tokenizer, sample, make_cache(model, spec), prompt)
                record = {
                    **where,
                    "cache": spec,
                    "settings": settings[spec],
                    "sample": sample.name,
                    "length": sample.length,
                    "depth": sample.depth,
                    "seed": sample.seed,
                    "value": sample.value,
                    "hit": answer.hit,
                    "nll": answer.nll,
                    "text": answer.text,
                    **where_measured,
                }
                file.write(json.dumps(record) + "\n")
                file.flush()


def main() -> None:
    """Measure, write the results, print hits and likelihoods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", action="append", metavar="SPEC", help="measure this cache; may be repeated")
    parser.add_argument("--model", help="hub id or directory; SmolLM2-135M-Instruct without it")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens, comma-separated")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="percent, comma-separated")
    parser.add_argument("--seeds", type=int, default=1, help="samples per length and depth")
    parser.add_argument("--text", type=Path, default=EXCERPT, help="UTF-8 text to hide the needle in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT_FILE)
    parser.add_argument("--fresh", action="store_true", help="measure again what the results hold")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model, dtype=torch.float32, device=args.device)
    lengths, depths = [int(n) for n in args.lengths.split(",")], [float(d) for d in args.depths.split(",")]
    samples = list(make_samples(tokenizer, haystack_ids(tokenizer, args.text), lengths, depths, range(args.seeds)))
    specs = args.cache or ["dynamic", "k4v4", "k3v3"]
    name = args.model or "SmolLM2-135M-Instruct"
    run(model, tokenizer, samples, specs, args.out, model_name=name, fresh=args.fresh)
    for spec in specs:
        records = [r for r in read_results(args.out) if (r["model"], r["cache"]) == (name, spec)]
        for length in lengths:
            cells = [r for r in records if r["length"] == length]
            hits = "".join("X" if r["hit"] else "." for r in sorted(cells, key=lambda r: r["depth"]))
            print(f"{spec:30} {length:6} tokens  {hits}  nll {sum(r['nll'] for r in cells) / len(cells):.4f}")


if __name__ == "__main__":
    main()
