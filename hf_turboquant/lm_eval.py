"""A model for lm-evaluation-harness whose generation reads a compressed cache.

    python -m hf_turboquant.lm_eval --model hf-turboquant \
        --model_args pretrained=./model,cache=k3v2 --tasks gsm8k --batch_size 1

takes every option of ``lm_eval``. A prompt is given to the cache but for its last ``split_tail`` tokens; these, and the
answer, then read the cache. Given whole, a prompt of any length would leave the first token of the answer to keys and
values that were never compressed. Tasks that score likelihoods in one pass would see no compression at all, so they are
refused.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from transformers import DynamicCache

from hf_turboquant.cache import TurboQuantCache
from hf_turboquant.errors import ConfigError
from hf_turboquant.loading import DENSE, cache_argument
from hf_turboquant.presets import resolve_config
from hf_turboquant.report import MemoryReport

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError("hf_turboquant.lm_eval needs the package lm-eval: pip install 'hf_turboquant[eval]'") from error

NAME: Final = "hf-turboquant"


@register_model(NAME)
class TurboQuantLM(HFLM):
    """lm-eval's Hugging Face model with a new cache of ours for every batch.

    Args:
        *args: Passed on.
        cache: Preset, ``dense``, or None for the default preset.
        split_tail: Last tokens of a prompt that read the cache instead of going into it with the rest; 0 gives the
            whole prompt in one pass.
        middle_truncation: Cut prompts that are too long in their middle, as LongBench does, and not at their
            beginning.
        **kwargs: Passed on.

    Attributes:
        last_report: What the cache of the last batch held; None before it, and for ``dense``.

    Raises:
        ConfigError: The preset is unknown or ``split_tail`` is negative.
    """

    def __init__(
        self,
        *args: Any,
        cache: str | None = None,
        split_tail: int = 64,
        middle_truncation: bool = True,
        **kwargs: Any,
    ) -> None:
        self.cache_spec = cache
        if cache != DENSE:
            resolve_config(cache)
        if int(split_tail) < 0:
            raise ConfigError(f"split_tail must be a non-negative int (tokens), got {split_tail!r}")
        self.split_tail, self.middle_truncation = int(split_tail), middle_truncation
        self.last_report: MemoryReport | None = None
        super().__init__(*args, **kwargs)

    def loglikelihood(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse()

    def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse()

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode a batch, cutting what is too long in the middle.

        Args:
            strings: Prompts.
            padding_side: Where short prompts are filled up.
            left_truncate_len: Most tokens of a prompt, by lm-eval's name.
            truncation: Whether the tokenizer may truncate by itself.

        Returns:
            Ids and attention mask, ``(batch, longest)``.
        """
        if not self.middle_truncation:
            encoded: tuple[torch.Tensor, torch.Tensor] = super().tok_batch_encode(
                strings, padding_side, left_truncate_len, truncation
            )
            return encoded
        rows = [self._encode_one(text, padding_side, left_truncate_len, truncation) for text in strings]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            span = slice(longest - len(tokens), longest) if padding_side == "left" else slice(0, len(tokens))
            ids[row, span] = torch.tensor(tokens)
            mask[row, span] = 1
        return ids, mask

    def _encode_one(self, text: str, padding_side: str, limit: int | None, truncation: bool) -> list[int]:
        ids: torch.Tensor = super().tok_batch_encode([text], padding_side, None, truncation)[0]
        return cut_middle(ids[0].tolist(), limit)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        """Generate for a batch: all but the tail of the prompts goes into the cache first."""
        cache = self._new_cache()
        argument = cache_argument(self.model)
        mask = kwargs.get("attention_mask")
        mask = torch.ones_like(context) if mask is None else mask
        first = context.shape[1] - self.split_tail
        if self.split_tail and first > 0:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            with torch.inference_mode():
                self.model(
                    input_ids=context[:, :first],
                    attention_mask=mask[:, :first],
                    position_ids=positions[:, :first],
                    logits_to_keep=1,
                    **{argument: cache},
                )
        out: torch.Tensor = super()._model_generate(context, max_length, stop, **kwargs, **{argument: cache})
        if isinstance(cache, TurboQuantCache):
            self.last_report = cache.memory_report()
        return out

    def _new_cache(self) -> DynamicCache:
        config = self.model.config
        return DynamicCache(config=config) if self.cache_spec == DENSE else TurboQuantCache(config, self.cache_spec)


def cut_middle(tokens: list[int], limit: int | None) -> list[int]:
    """Return at most ``limit`` tokens: the first and the last, half each."""
    if limit is None or len(tokens) <= limit:
        return tokens
    half = limit // 2
    return tokens[:half] + tokens[len(tokens) - (limit - half) :]


def _refuse() -> NoReturn:
    raise ConfigError(
        "this task scores likelihoods in a single forward pass, in which attention uses the fresh keys and values and "
        f"never reads the cache back: every cache would score the same. Take a generative task with --model {NAME}, "
        "or python -m evals.quality for likelihoods decoded through the cache"
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
