"""What users may rely on: the names, and an import that does nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hf_turboquant
from evals.common import ROOT

PUBLIC_NAMES = [
    "PRESETS",
    "MemoryReport",
    "PathReport",
    "TurboQuantCache",
    "TurboQuantConfig",
    "TurboQuantError",
    "__version__",
    "disable",
    "enable",
    "patch_generation",
]

BLOCK_TRITON = "import sys; sys.modules['triton'] = None"

GENERATE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    bos_token_id=1, eos_token_id=None, pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
cache = hf_turboquant.TurboQuantCache(config)
ids = torch.arange(600)[None] % 31
out = model.generate(
    ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3, min_new_tokens=3, do_sample=False
)
print(out.shape[1], cache.path_report().compressed_calls > 0)
"""


def run_fresh(code: str) -> str:
    """Run code in a new interpreter and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_frozen():
    assert hf_turboquant.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_exists(name):
    assert getattr(hf_turboquant, name) is not None


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        hf_turboquant.PRESETS["mine"] = hf_turboquant.TurboQuantConfig()


def test_import_leaves_out_what_it_does_not_need():
    # torch and transformers may load a module by themselves; only what the package adds counts
    code = (
        "import sys, torch, transformers.cache_utils, transformers.modeling_utils\n"
        "from transformers import DynamicCache, PreTrainedConfig\n"
        "before = set(sys.modules)\n"
        "import hf_turboquant\n"
        "assert not [name for name in set(sys.modules) - before if name.startswith('hf_turboquant.')]\n"
        "hf_turboquant.TurboQuantCache\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    added = run_fresh(code).split()
    assert "hf_turboquant.cache" in added
    assert {name for name in added if name.partition(".")[0] in ("triton", "scipy", "typer", "rich")} == set()
    assert not [name for name in added if name.startswith("hf_turboquant.ops.triton")]


def test_import_registers_nothing_and_prints_nothing():
    code = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
        "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks\n"
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "before = dict(functions), dict(masks)\n"
        "import hf_turboquant, torch\n"
        "assert (dict(functions), dict(masks)) == before\n"
        "assert torch.nn.functional.scaled_dot_product_attention is sdpa"
    )
    assert run_fresh(code) == ""


def test_import_without_triton():
    assert run_fresh(f"{BLOCK_TRITON}\nimport hf_turboquant\nprint(hf_turboquant.__version__)")


def test_generate_without_triton():
    # a machine that is not Linux has none: the reference must serve the whole of generate()
    assert run_fresh(f"{BLOCK_TRITON}\nimport hf_turboquant\n{GENERATE}") == "603 True"
