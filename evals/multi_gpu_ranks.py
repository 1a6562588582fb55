"""Processes that share a model, and the models of random weights they load."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

SHAPES: Final = MappingProxyType(
    {
        "llama-8b": LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=200_000, eos_token_id=None,
        ),
        "tiny": LlamaConfig(
            vocab_size=98, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=None,
        ),
    }
)  # fmt: skip
"""Shapes of models, by name."""


class Ranks:
    """The processes of this run.

    Args:
        device_type: ``cuda`` or ``cpu``.
    """

    def __init__(self, device_type: str) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if self.size > 1:
            distributed.init_process_group("nccl" if device_type == "cuda" else "gloo")

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in every process."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value)
        return values

    def first(self, make: Callable[[], Any]) -> Any:
        """Return what the first process makes, in every process."""
        return self.gather(make() if self.rank == 0 else None)[0]

    def synchronize(self) -> None:
        """Wait for the device of this process."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            distributed.destroy_process_group()


@contextmanager
def shared_folder(ranks: Ranks) -> Iterator[Path]:
    """Give all processes one temporary folder, removed when all have left it."""
    kept: AbstractContextManager[str] = tempfile.TemporaryDirectory() if ranks.rank == 0 else nullcontext("")
    with kept as name:
        yield Path(ranks.gather(name)[0])
        ranks.gather(None)


def write_checkpoint(folder: Path, shape: str, layers: int, dtype: torch.dtype, device: torch.device) -> str:
    """Write a model of random weights as a checkpoint, unless it is there, and return its folder."""
    path = folder / f"{shape}-{layers}-{dtype}".replace("torch.", "")
    if not path.exists():
        config = LlamaConfig(**{**SHAPES[shape].to_dict(), "num_hidden_layers": layers})
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.generation_config.pad_token_id = 0
        partial = path.with_name(f"{path.name}.partial")
        model.save_pretrained(partial)
        partial.rename(path)
    return str(path)


def load(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """Load a checkpoint in eval mode."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def parallel_options(processes: int) -> dict[str, Any]:
    """Return what ``from_pretrained`` takes to split a model over so many processes."""
    if processes == 1:
        return {}
    # its place since transformers 5.24, which still takes, and warns of, the other
    if "tp_plan" in getattr(DistributedConfig, "__dataclass_fields__", {}):
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


def prompt(model: Any, tokens: int, seed: int = 0) -> torch.Tensor:
    """Return ``(1, tokens)`` token ids, the same everywhere."""
    ids = torch.randint(2, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return ids.to(model.device)
