"""A vision-language model with a compressed cache: the tokens of the image are in it like those of the text.

Without ``--model`` a tiny model with RANDOM weights shows that the path works; its text means nothing. With a real one:

    python examples/vlm.py --model Qwen/Qwen2.5-VL-3B-Instruct --image photo.jpg --question "What is in the picture?"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache

# run from a checkout: what lies beside this folder is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.common import cache_argument
from evals.conformance_vision import MODELS
from hf_turboquant import PRESETS, TurboQuantCache


def load(name: str, image: Path, question: str) -> tuple[Any, Any, Any]:
    """Return a model of the hub, its inputs for an image and a question, and its processor."""
    cuda = torch.cuda.is_available()
    processor = AutoProcessor.from_pretrained(name)
    model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.bfloat16 if cuda else torch.float32)
    content = [{"type": "image", "path": str(image)}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = model.to("cuda" if cuda else "cpu").eval()
    return model, inputs.to(model.device, model.dtype), processor


def main() -> None:
    """Generate from a dense and from a compressed cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory (default: a tiny random Qwen2.5-VL)")
    parser.add_argument("--image", type=Path, help="picture for --model")
    parser.add_argument("--question", default="Describe this picture.", help="about the picture")
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens to generate")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: the default of the library")
    args = parser.parse_args()
    if (args.model is None) != (args.image is None):
        parser.error("--model and --image go together")

    if args.model:
        model, inputs, processor = load(args.model, args.image, args.question)
    else:
        print("tiny random model: the tokens mean nothing, only that both caches serve it; see --model")
        model, inputs = MODELS["qwen2_5_vl"]()
    compressed = TurboQuantCache(model.config, args.preset)
    for cache in (DynamicCache(config=model.config), compressed):
        out = model.generate(
            **inputs,
            max_new_tokens=args.new_tokens,
            do_sample=False,
            **cache_argument(model, cache),
        )
        new = out[0, inputs["input_ids"].shape[1] :]
        print(
            f"{type(cache).__name__}: {processor.decode(new, skip_special_tokens=True) if args.model else new.tolist()}"
        )
    print(compressed.memory_report())
    print(compressed.path_report())


if __name__ == "__main__":
    main()
