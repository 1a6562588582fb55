"""Counts the binaries that decoding asks Triton for, without a GPU: arguments are bound as ever, nothing is compiled.

``python -m tests.ops.binaries`` prints JSON: for each kernel, the constants of every binary asked for; "padded"
marks those of a batch with a mask.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from typing import Any
from unittest import mock

import torch
import triton
from transformers import LlamaConfig
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_turboquant import TurboQuantCache
from hf_turboquant.ops import AttendOptions, attend, backend
from hf_turboquant.ops.triton import dispatch, fast_attend

TOKENS = 40 * 128 + 300
"""Enough for 40 packed blocks and every length of the exact window."""

SHAPED = 200
"""Steps at the end that are also made with masks and windows: a block is packed among them."""


class NoDevice:
    """A driver for an H100 that is not there. Tensors on the CPU have no device index."""

    def get_current_device(self) -> None:
        """Return no index."""

    def get_current_stream(self, device: int | None) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return compute capability 9.0."""
        return GPUTarget("cuda", 90, 32)


class NoBinary:
    """What a launch gets in place of a compiled kernel."""

    function, packed_metadata = 0, (4, 1, 0)

    def launch_metadata(self, *_: Any) -> None:
        """Return nothing."""

    def run(self, *_: Any) -> None:
        """Launch nothing."""


def shaped_options(seq_len: int) -> list[AttendOptions]:
    """Return options with masks of all layouts, whose strides and alignment follow the length, and a window."""
    masks = [
        torch.ones(1, heads, 1, seq_len + seq_len % 5, dtype=dtype)[..., seq_len % 5 :]
        for heads in (1, 28) for dtype in (torch.bool, torch.bfloat16)
    ]  # fmt: skip
    windowed = AttendOptions(128**-0.5, sliding_window=1000)
    return [AttendOptions(128**-0.5, mask=mask) for mask in masks] + [windowed]


def decode(bits: tuple[int, int], tokens: int) -> None:
    """Append and attend, token by token, in a layer of 4 KV heads and 28 query heads."""
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=28, num_key_value_heads=4, head_dim=128, hidden_size=3584
    )
    cache = TurboQuantCache(
        config, key_bits=bits[0], value_bits=bits[1], residual_window=128, guard="off", backend="triton"
    )
    query = torch.zeros(1, 28, 1, 128, dtype=torch.bfloat16)
    token = torch.zeros(1, 4, 1, 128, dtype=torch.bfloat16)
    prompt = torch.zeros(1, 4, 6, 128, dtype=torch.bfloat16)
    cache.update(prompt, prompt, 0)
    for step in range(tokens):
        keys, _ = cache.update(token, token, 0)
        view = keys.tokens
        attend(query, view, AttendOptions(128**-0.5), backend="triton")
        if step >= tokens - SHAPED:
            for options in shaped_options(view.seq_len):
                attend(query, view, options, backend="triton")


def decode_padded(tokens: int) -> None:
    """Append and attend with a mask that grows, token by token, in a layer of the portable kernel: float32."""
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=28, num_key_value_heads=4, head_dim=128, hidden_size=3584
    )
    cache = TurboQuantCache(config, key_bits=4, value_bits=4, residual_window=128, guard="off", backend="triton")
    query, token = torch.zeros(3, 28, 1, 128), torch.zeros(3, 4, 1, 128)
    prompt = torch.zeros(3, 4, 300, 128)
    cache.update(prompt, prompt, 0)
    for count in range(tokens):
        keys, _ = cache.update(token, token, 0)
        mask = torch.ones(3, 1, 1, 301 + count, dtype=torch.bool)
        attend(query, keys.tokens, AttendOptions(128**-0.5, mask=mask), backend="triton")


def main() -> None:
    """Decode with every launch bound and none made, and print what was asked for."""
    asked: dict[str, list[str]] = defaultdict(list)
    case = ""

    def compile_nothing(
        self: JITFunction, key: str, signature: Any, device: Any, constants: Any, options: Any, *_: Any
    ) -> NoBinary:
        named = {self.arg_names[path[0]]: value for path, value in constants.items()}
        asked[case + self.fn.__name__].append(f"{named} {options.num_warps}")
        self.device_caches[device][0][key] = NoBinary()
        return self.device_caches[device][0][key]

    def serves(query: torch.Tensor, view: Any, options: AttendOptions) -> str:
        return fast_attend.supports(view, query, options, 90)

    triton.runtime.driver.set_active(NoDevice())
    with (
        mock.patch.object(JITFunction, "_do_compile", compile_nothing),
        mock.patch.object(backend, "triton_obstacle", return_value=""),
        mock.patch.object(dispatch, "fast_obstacle", serves),
        mock.patch.object(fast_attend, "device_limits", return_value=(90, 132)),
        # every launch is bound: none is repeated past the binder
        mock.patch("hf_turboquant.ops.view.PreparedCalls.is_due", return_value=False),
    ):
        decode((4, 4), TOKENS)
        case = "padded "
        decode_padded(300)
    sys.stdout.write(json.dumps(asked))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "TRITON_INTERPRET must be unset"
    main()
