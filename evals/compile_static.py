"""The calls of a store of fixed size, for :mod:`evals.compile_matrix`: its kernels and the cases that launch them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from evals.compile_cases import Codecs, _pair, _view
from hf_turboquant.ops import AttendOptions
from hf_turboquant.ops.static_spec import LENGTHS
from hf_turboquant.ops.triton import static_fast

# the package has a function of that name
static_append = import_module("hf_turboquant.ops.triton.static_append")

STATIC_KERNELS = (
    (static_append, "append_token_kernel"),
    (static_append, "pack_block_kernel"),
    (static_fast, "static_attend_kernel"),
    (static_fast, "static_combine_kernel"),
)
"""Where the launchers find their kernels."""


def static_cases() -> dict[str, Callable[[], None]]:
    """Return every case by name."""
    pairs = {
        "k2v2-d128": _pair(2, 2, 128),
        "k3v2-d128": _pair(3, 2, 128),
        "prod3v2-d128": _pair(2, 2, 128, kind="prod"),
        "k4v4-d128": _pair(4, 4, 128),
        "k4v4-d64": _pair(4, 4, 64),
        "k4v4-d256": _pair(4, 4, 256),
    }
    cases: dict[str, Callable[[], None]] = {}
    for name, pair in pairs.items():
        cases[f"static-{name}"] = lambda pair=pair: _attend(pair, rows=4)  # type: ignore[misc]
    cases["static-k4v4-d128-rows7"] = lambda: _attend(pairs["k4v4-d128"], rows=7)
    shaped: dict[str, dict[str, Any]] = {
        "mask": {"mask": torch.ones(1, 1, 1, 1000, dtype=torch.bool)},
        "softcap": {"softcap": 30.0},
    }
    for name, options in shaped.items():
        cases[f"static-k4v4-d128-{name}"] = (  # type: ignore[misc]
            lambda options=options: _attend(pairs["k4v4-d128"], rows=4, **options)
        )
    for name in ("k2v2-d128", "k4v4-d128"):
        cases[f"static-append-{name}"] = lambda pair=pairs[name]: _append(pair)  # type: ignore[misc]
    return cases


def _attend(pair: Codecs, *, rows: int, **options: Any) -> None:
    dtype = torch.bfloat16
    query = torch.zeros(1, 2 * rows, 1, pair[0].format.head_dim, dtype=dtype)
    static_fast.static_fast_attend(query, _view(*pair, dtype), AttendOptions(scaling=0.1, **options), _counts())


def _append(pair: Codecs) -> None:
    keys, values = pair
    dense: list[Any] = [
        torch.zeros(1, 2, tokens, codec.format.head_dim, dtype=torch.bfloat16)
        for tokens in (1, 260)
        for codec in (keys, values)
    ]
    arena = torch.zeros(4, 1, 2, keys.format.nbytes + values.format.nbytes, dtype=torch.uint8)
    static_append.static_append(
        dense[0], dense[1], _counts(), dense[2], dense[3], arena, pair, sink_tokens=4, slots=256, max_tokens=1000
    )


def _counts() -> torch.Tensor:
    return torch.zeros(LENGTHS, dtype=torch.int32)
