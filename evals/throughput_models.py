"""Models of random weights, their caches, and the time between the tokens that ``generate()`` hands out."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, StaticCache
from transformers.generation.streamers import BaseStreamer

from evals import baselines
from evals.common import cache_argument
from hf_turboquant import TurboQuantCache, enable

FLASH: Final = "dynamic-flash"
"""``DynamicCache`` with torch's flash attention forced."""
WARM_TOKENS: Final = 2
"""First steps not counted."""

CONTEXT_LIMIT: Final = 200_000

MODELS: Final[Mapping[str, PreTrainedConfig]] = MappingProxyType(
    {
        "qwen2.5-7b": Qwen2Config(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=CONTEXT_LIMIT,
        ),
        "llama-3.1-8b": LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=CONTEXT_LIMIT,
        ),
    }
)  # fmt: skip
"""Shapes of models, by name."""


class TokenClock(BaseStreamer):
    """Notes when ``generate()`` begins and when it hands out each token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.events: list[torch.cuda.Event] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time; the first call comes with the prompt."""
        self.seconds.append(time.perf_counter())
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)

    def end(self) -> None:
        """Do nothing: there is no text to flush."""

    def first_token_s(self) -> float:
        """Seconds from the start to the first token."""
        return self.seconds[1] - self.seconds[0]

    def token_ms(self, skip: int) -> list[float]:
        """Milliseconds between tokens, without the first ``skip`` intervals."""
        stamps = self.seconds[1 + skip :]
        return [1000 * (after - before) for before, after in itertools.pairwise(stamps)]

    def event_ms(self, skip: int) -> list[float]:
        """Milliseconds between tokens as the GPU saw them; empty without one."""
        stamps = self.events[1 + skip :]
        return [before.elapsed_time(after) for before, after in itertools.pairwise(stamps)]


def make_model(name: str, layers: int | None, device: str) -> Any:
    """Return a model of random weights, bfloat16, that never ends a text by itself."""
    config = type(MODELS[name]).from_dict({**MODELS[name].to_dict(), "tie_word_embeddings": False})
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_cache(model: Any, name: str, tokens: int) -> Any:
    """Return an empty cache with room for ``tokens`` tokens where it is static."""
    if name == "static":
        return StaticCache(config=model.config, max_cache_len=tokens)
    preset, _, kind = name.partition("-")
    if kind == "static":
        return TurboQuantCache(model.config, preset, max_cache_len=tokens)
    return baselines.make_cache(model, preset)


def attention_of(model: Any, name: str) -> AbstractContextManager[object]:
    """Return the context in which a cache is run: the kernel forced, or the registered attention switched on."""
    if name == FLASH:
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return enable(model) if name.endswith("-static") else contextlib.nullcontext()


def fill(model: Any, cache: Any, batch: int, tokens: int) -> None:
    """Give every layer random keys and values, as a prompt would leave them."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, tokens, head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(keys, values, layer)


def generate(model: Any, cache: Any, ids: torch.Tensor, tokens: int) -> TokenClock:
    """Generate ``tokens`` tokens after ``ids``, all but the last of which the cache may hold; return when they came."""
    watch = TokenClock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        streamer=watch,
        **cache_argument(model, cache),
    )
    return watch


def forward_ms(model: Any, cache: Any, batch: int, steps: int) -> list[float]:
    """Return milliseconds of each of ``steps`` forward passes over one token, the first two left out."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    return step_ms(lambda: model(token, logits_to_keep=1, **cache_argument(model, cache)), steps)


def step_ms(step: Callable[[], object], steps: int) -> list[float]:
    """Return milliseconds of each of ``steps`` calls, the first two left out."""
    seconds = []
    for _ in range(WARM_TOKENS + steps):
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    return [1000 * value for value in seconds[WARM_TOKENS:]]


@contextlib.contextmanager
def noted_steps(model: Any) -> Iterator[list[Callable[[], object]]]:
    """Keep the last compiled decode step of ``generate()``, to be called again; the list stays empty without one."""
    noted: list[Callable[[], object]] = []
    get_compiled_call = model.get_compiled_call

    def get(config: Any) -> Callable[..., object]:
        compiled = get_compiled_call(config)

        def call(**inputs: Any) -> object:
            noted[:] = [partial(compiled, **inputs)]
            return compiled(**inputs)

        return call

    model.get_compiled_call = get
    try:
        yield noted
    finally:
        del model.get_compiled_call


def allocated() -> int:
    """Return the bytes of the GPU that are in use; 0 without one.

    Garbage is collected first, so that the difference of two calls is what came to be in use between them. The work
    areas of cuBLAS, 32 MiB and more, are given back too: a CUDA graph that is recorded drops them, and the next product
    outside of one takes them again.
    """
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def random_ids(model: Any, batch: int, tokens: int) -> torch.Tensor:
    """Return ``(batch, tokens)`` random token ids on the model's device."""
    return torch.randint(1, model.config.vocab_size, (batch, tokens), device=model.device)


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
