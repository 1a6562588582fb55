"""One context, many caches: which there are, and how each comes to hold a prompt that is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from evals.baselines import BASELINES, installed_quantized
from evals.common import cache_argument, fill_cache, prefill
from evals.frame import EvalError
from hf_turboquant import PRESETS

REFERENCE: Final = "dynamic"
"""Full precision, which every cache is compared with."""


def check_specs(specs: Sequence[str]) -> None:
    """Refuse unknown caches.

    Raises:
        EvalError: A name is unknown; the message lists the known.
    """
    known = (REFERENCE, *PRESETS, *BASELINES, *installed_quantized())
    for spec in specs:
        if spec.partition(":")[0] not in known:
            raise EvalError(f"unknown cache {spec!r}; known are {', '.join(known)}")


class Context:
    """A prompt that one cache after another is to hold.

    In the pass over a prompt every cache answers with the very keys and values it is given, so they are the same for
    all and need to be computed once. That holds where every layer keeps nothing but keys and values; a model with
    other layers reads the prompt anew for every cache.

    Args:
        model: A causal language model.
        ids: ``(1, tokens)``; none at all is allowed.
        caches: How many caches will read it.
    """

    def __init__(self, model: Any, ids: torch.Tensor, *, caches: int) -> None:
        self.model, self.ids = model, ids.to(model.device)
        self.dense = prefill(model, self.ids) if ids.shape[1] and caches > 1 and is_shareable(model) else None

    @torch.inference_mode()
    def read_into(self, cache: Cache) -> None:
        """Bring an empty cache to the state after the prompt."""
        if self.dense is not None:
            fill_cache(cache, self.dense)
        elif self.ids.shape[1]:
            self.model(self.ids, logits_to_keep=1, **cache_argument(self.model, cache))


def is_shareable(model: Any) -> bool:
    """Return whether all that a model keeps of a prompt is keys and values of every token."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
