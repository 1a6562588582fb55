"""Set-up of every test process: Triton's interpreter without a GPU, no network, one thread, fixed seeds."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

# Triton reads the switch when a kernel is decorated, so it must stand before the project is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    """Fill what ``torch.empty`` returns with NaN, so that a store forgotten by the code shows as one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and what needs the hub unless ``-m`` asks for it."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_hub = pytest.mark.skip(reason="needs the Hugging Face hub; ask for it with -m hub and HF_HUB_OFFLINE=0")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("hub") and "hub" not in config.getoption("markexpr"):
            item.add_marker(no_hub)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  what is not ours may still draw from it
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def smollm():
    """Return SmolLM2-135M-Instruct on the CPU in float32, and its tokenizer."""
    from evals.common import load_model

    return load_model(dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Save a random model of bytes and its tokenizer, and return the directory, which tests only read."""
    from tests.helpers import save_byte_model

    path = tmp_path_factory.mktemp("model")
    save_byte_model(path)
    return str(path)
