"""Generation for the command line: one prompt, or a chat whose cache is carried from turn to turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.console import Console
from transformers import DynamicCache, TextStreamer

from hf_turboquant.cache import TurboQuantCache
from hf_turboquant.errors import ConfigError
from hf_turboquant.loading import (
    DENSE,
    cache_argument,
    check_device,
    check_dtype,
    check_presets,
    load_model,
    local_gguf,
)
from hf_turboquant.presets import resolve_config

MIB: Final = 2**20
Writer = Callable[[str], None]


@dataclass(frozen=True)
class Turn:
    """One answer and what it took.

    Attributes:
        text: The answer.
        prompt_tokens: Tokens before it.
        reused_tokens: Of those, tokens that were in the cache already.
        new_tokens: Tokens of the answer.
        prefill_seconds: Until the first token.
        tokens_per_second: Of the tokens after the first.
        cache: Preset, or ``dense``.
        cache_bytes: Bytes of the cache at the end.
        dense_bytes: Bytes of a dense cache.
    """

    text: str
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    prefill_seconds: float
    tokens_per_second: float | None
    cache: str
    cache_bytes: int
    dense_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return asdict(self)


class _Streamer(TextStreamer):
    """Hands on text as it comes and notes the time of each token; the first note is the start of prefill."""

    def __init__(self, tokenizer: Any, write: Writer) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one token at a time."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hand on what is certain to stay as it is."""
        self.write(text)


class Session:
    """A model with a cache that lives as long as the conversation.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        cache: Preset, ``dense``, or None for the default preset.
        max_new_tokens: Longest answer.
        sampling: What ``generate`` is to be told besides: ``temperature`` and the like; empty is greedy.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        cache: str | None,
        max_new_tokens: int,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.spec, self.max_new_tokens, self.sampling = cache, max_new_tokens, sampling or {}
        if cache != DENSE:
            resolve_config(cache)
        self.messages: list[dict[str, str]] = []
        self._cache: DynamicCache | None = None
        self._cached_ids: list[int] = []

    def complete(self, prompt: str, write: Writer) -> Turn:
        """Continue a text."""
        return self._run(self.tokenizer(prompt).input_ids, write)

    def say(self, message: str, write: Writer, *, system: str | None = None) -> Turn:
        """Answer a message of the conversation; what the cache holds of it is not read again."""
        if system and not self.messages:
            self.messages.append({"role": "system", "content": system})
        self.messages.append({"role": "user", "content": message})
        text = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        turn = self._run(self.tokenizer(text, add_special_tokens=False).input_ids, write)
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    def _run(self, ids: list[int], write: Writer) -> Turn:
        cache, reused = self._cache_for(ids)
        prompt = torch.tensor([ids], device=self.model.device)
        streamer = _Streamer(self.tokenizer, write)
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.max_new_tokens,
            pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
            streamer=streamer,
            **{cache_argument(self.model): cache},
            **({"do_sample": True, **self.sampling} if self.sampling else greedy),
        )
        new = out[0, len(ids) :].tolist()
        # the last token was never given to the model, so the cache does not hold it
        self._cache, self._cached_ids = cache, [*ids, *new][: cache.get_seq_length()]
        start, first, *_ = streamer.times if len(streamer.times) > 1 else (0.0, 0.0)
        rate = (len(new) - 1) / (streamer.times[-1] - first) if len(new) > 1 else None
        held, dense = _bytes_of(cache)
        return Turn(
            text=self.tokenizer.decode(new, skip_special_tokens=True),
            prompt_tokens=len(ids),
            reused_tokens=reused,
            new_tokens=len(new),
            prefill_seconds=first - start,
            tokens_per_second=rate,
            cache=self.spec or "default",
            cache_bytes=held,
            dense_bytes=dense,
        )

    def _cache_for(self, ids: list[int]) -> tuple[DynamicCache, int]:
        """Return a cache that holds a beginning of ``ids``, and the length of it."""
        cache = self._cache
        # the last token is left for the model to read, else there is nothing to predict from
        common = min(_common_prefix(self._cached_ids, ids), len(ids) - 1)
        if cache is not None and common:
            surplus = len(self._cached_ids) - common
            if not surplus:
                return cache, common
            if getattr(cache, "is_croppable", True):
                cache.crop(-surplus)
                return cache, common
        if self.spec == DENSE:
            return DynamicCache(config=self.model.config), 0
        return TurboQuantCache(self.model.config, self.spec), 0


def _common_prefix(left: Iterable[int], right: Iterable[int]) -> int:
    count = 0
    for one, other in zip(left, right):
        if one != other:
            break
        count += 1
    return count


def _bytes_of(cache: DynamicCache) -> tuple[int, int]:
    """Return the bytes held, and those of a dense cache."""
    if isinstance(cache, TurboQuantCache):
        report = cache.memory_report()
        return report.bytes_held, report.dense_bytes
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))
    return size, size


def run_generate(
    console: Console,
    *,
    model: str,
    prompt: str | None,
    cache: str | None,
    gguf_file: str | None,
    chat: bool,
    raw: bool,
    system: str | None,
    max_new_tokens: int,
    sampling: dict[str, Any],
    seed: int,
    device: str | None,
    dtype: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Generate from a prompt, or talk until an empty line."""
    if cache != DENSE:
        check_presets([cache] if cache else [])
    if prompt is None and not chat:
        raise ConfigError("prompt must be given, as an argument or as - for stdin; or say --chat")
    if chat and raw:
        raise ConfigError("--chat needs the chat template that --raw leaves out; say one of them")
    source, gguf_file = local_gguf(model, gguf_file)
    text = sys.stdin.read() if prompt == "-" else prompt
    # a token is seldom less than two letters
    expected = len(text or "") // 2 + max_new_tokens
    torch.manual_seed(seed)
    loaded, tokenizer = load_model(
        source,
        gguf_file=gguf_file,
        dtype=check_dtype(dtype),
        device=check_device(device),
        tokens=expected,
        cache=cache,
        force=force,
    )
    session = Session(loaded, tokenizer, cache=cache, max_new_tokens=max_new_tokens, sampling=sampling)
    templated = not raw and tokenizer.chat_template is not None
    if chat and not templated:
        raise ConfigError(f"model {model!r} has no chat template; leave out --chat")

    def write(piece: str) -> None:
        if not as_json:
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    if text is not None:
        turn = session.say(text, write, system=system) if templated else session.complete(text, write)
        _show_turn(console, turn, as_json=as_json)
    if chat:
        _talk(console, session, write, system, as_json=as_json)


def _talk(console: Console, session: Session, write: Any, system: str | None, *, as_json: bool) -> None:
    """Answer lines of stdin until an empty one, or its end."""
    while True:
        if not as_json and sys.stdin.isatty():
            console.print("> ", end="", markup=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        _show_turn(console, session.say(line, write, system=system), as_json=as_json)


def _show_turn(console: Console, turn: Turn, *, as_json: bool) -> None:
    if as_json:
        _print(console, json.dumps(turn.to_dict(), ensure_ascii=False))
        return
    rate = "" if turn.tokens_per_second is None else f", {turn.tokens_per_second:.1f} tokens/s"
    _print(
        console,
        f"\n[{turn.prompt_tokens} prompt tokens, {turn.reused_tokens} of them from the cache; {turn.new_tokens} new in "
        f"{turn.prefill_seconds:.2f} s to the first{rate}; cache {turn.cache} {turn.cache_bytes / MIB:.2f} MiB, "
        f"dense {turn.dense_bytes / MIB:.2f} MiB]",
    )


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
