"""Time one decode step of one layer on a GPU: our kernels against the best dense attention of torch.

python -m evals.decode_bench --context 4096 32768 131072 --pairs 2,2 3,2 4,4
"""

from __future__ import annotations

import argparse
import functools
import json

import torch
import triton.testing
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_turboquant import TurboQuantConfig
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import AttendOptions, KVView
from hf_turboquant.ops import triton as kernels
from hf_turboquant.quantizers.mse import mse_codec


def make_step(
    context: int, bits: tuple[int, int], heads: tuple[int, int] = (32, 8), head_dim: int = 128, batch: int = 1
) -> tuple[torch.Tensor, KVView, AttendOptions]:
    """Return query, store and options of one step over ``context`` random tokens, bfloat16, on the current GPU."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = TurboQuantConfig()
    keys = mse_codec(config, head_dim, bits[0], device, transposed=False, centered=True)
    values = mse_codec(config, head_dim, bits[1], device, transposed=True, centered=False)
    blocks = context // BLOCK_TOKENS - 1
    shape = (batch, heads[1], blocks * BLOCK_TOKENS, head_dim)
    arena = torch.empty(
        blocks, batch, heads[1], keys.format.nbytes + values.format.nbytes, dtype=torch.uint8, device=device
    )
    dense = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    kernels.quantize(dense[0], dense[1], arena, keys, values)
    tail = [torch.randn(batch, heads[1], 256, head_dim, device=device, dtype=dtype) for _ in range(2)]
    view = KVView(
        keys,
        values,
        tail[0][:, :, :4],
        tail[1][:, :, :4],
        (arena,),
        blocks,
        None,
        tail[0],
        tail[1],
        17,
        BLOCK_TOKENS - 4,
    )
    query = torch.randn(batch, heads[0], 1, head_dim, device=device, dtype=dtype)
    return query, view, AttendOptions(head_dim**-0.5)


def time_decode(context: int, pairs: list[tuple[int, int]], **shape: int | tuple[int, int]) -> dict[str, float]:
    """Return median microseconds of one step, L2 flushed between runs, for dense attention and each bit pair."""
    query, view, options = make_step(context, pairs[0], **shape)
    batch, heads, head_dim = view.batch, view.num_kv_heads, query.shape[-1]
    dense = [torch.randn(batch, heads, context, head_dim, device="cuda", dtype=query.dtype) for _ in range(2)]
    found: dict[str, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
            found[f"sdpa_{backend.name.split('_')[0].lower()}"] = _median(functools.partial(attention, query, *dense))
    del dense, attention
    for bits in pairs:
        query, view, options = make_step(context, bits, **shape)
        found[f"k{bits[0]}v{bits[1]}"] = _median(functools.partial(kernels.attend, query, view, options))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.attend(query, view, options)
        found[f"k{bits[0]}v{bits[1]}_graph"] = _median(graph.replay)
    return found


def time_quantize(context: int, bits: tuple[int, int], head_dim: int = 128, heads: int = 8) -> float:
    """Return median microseconds of quantizing ``context`` tokens of one layer."""
    _, view, _ = make_step(context, bits, head_dim=head_dim, heads=(heads, heads))
    shape = (1, heads, view.num_blocks * BLOCK_TOKENS, head_dim)
    dense = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return _median(lambda: kernels.quantize(dense[0], dense[1], view.arenas[0], view.keys, view.values, check=False))


def _median(step) -> float:  # noqa: ANN001
    return 1000 * triton.testing.do_bench(step, warmup=50, rep=200, return_mode="median")


def main() -> None:
    """Print one JSON line for every context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", nargs="+", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--pairs", nargs="+", default=["2,2", "3,2", "4,4"])
    options = parser.parse_args()
    pairs = [(int(pair.split(",")[0]), int(pair.split(",")[1])) for pair in options.pairs]
    for context in options.context:
        times = time_decode(context, pairs)
        times["quantize_k4v4"] = time_quantize(context, (4, 4))
        print(
            json.dumps({"context": context, "microseconds": {name: round(value, 1) for name, value in times.items()}})
        )


if __name__ == "__main__":
    main()
