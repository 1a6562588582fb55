"""Which implementation computes an operation, and why."""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from hf_turboquant.errors import BackendUnavailableError
from hf_turboquant.layout import EXACT_BITS, VectorFormat

_log = logging.getLogger("hf_turboquant")


class Backend(str, Enum):
    """Who computes the operations.

    ``AUTO`` takes Triton for tensors on a CUDA device and the reference elsewhere. ``REFERENCE`` is plain torch and
    runs anywhere. ``TRITON`` is the fused kernels; asked for by name it never falls back.
    """

    AUTO = "auto"
    REFERENCE = "reference"
    TRITON = "triton"


@dataclass(frozen=True)
class BackendChoice:
    """A resolved backend and the reason it was taken."""

    backend: Backend
    reason: str


def resolve_backend(requested: Backend | str, device: torch.device) -> BackendChoice:
    """Choose the backend for tensors on a device.

    Args:
        requested: ``AUTO`` or the backend to insist on.
        device: Where the tensors live.

    Returns:
        ``REFERENCE`` or ``TRITON``, with the reason.

    Raises:
        BackendUnavailableError: ``TRITON`` was requested and cannot run on ``device``.
    """
    return _resolve(Backend(requested), device.type)


@lru_cache(maxsize=16)
def _resolve(requested: Backend, device_type: str) -> BackendChoice:
    if requested is Backend.REFERENCE:
        return BackendChoice(requested, "asked for by name")
    obstacle = triton_obstacle(device_type)
    if requested is Backend.TRITON:
        if obstacle:
            raise BackendUnavailableError(f"backend='triton' cannot run here: {obstacle}; use backend='reference'")
        return BackendChoice(requested, "asked for by name")
    if obstacle:
        return BackendChoice(Backend.REFERENCE, obstacle)
    if device_type == "cpu":
        return BackendChoice(Backend.REFERENCE, "the tensors are on a cpu device")
    return BackendChoice(Backend.TRITON, f"the tensors are on a {device_type} device and triton is installed")


def choose_backend(requested: Backend | str, device: torch.device, *formats: VectorFormat) -> BackendChoice:
    """Choose the backend for tensors on a device that are stored in some formats.

    Args:
        requested: ``AUTO`` or the backend to insist on.
        device: Where the tensors live.
        *formats: Formats the operation reads or writes.

    Returns:
        As :func:`resolve_backend`; ``AUTO`` takes the reference, and logs it once, for formats the kernels do not read.

    Raises:
        BackendUnavailableError: ``TRITON`` was requested and cannot run on ``device``, or does not read a format.
    """
    return _choose(Backend(requested), device.type, formats)


@lru_cache(maxsize=256)
def _choose(requested: Backend, device_type: str, formats: tuple[VectorFormat, ...]) -> BackendChoice:
    choice = _resolve(requested, device_type)
    if choice.backend is not Backend.TRITON:
        return choice
    obstacle = next((text for text in map(format_obstacle, formats) if text), "")
    if not obstacle:
        return choice
    if requested is Backend.TRITON:
        raise BackendUnavailableError(f"backend='triton' cannot serve this cache: {obstacle}; use backend='auto'")
    _log.warning("attention uses the reference implementation: %s", obstacle)
    return BackendChoice(Backend.REFERENCE, obstacle)


MAX_HEAD_DIM = 256
"""Channels of the widest vectors the kernels hold in registers."""


def format_obstacle(fmt: VectorFormat) -> str:
    """Say why the kernels do not read a format; empty when they do."""
    if fmt.kind == "polar":
        return f"there is no kernel for {fmt.kind!r} codes"
    if fmt.head_dim > MAX_HEAD_DIM:
        return f"the kernels hold at most {MAX_HEAD_DIM} channels, got head_dim {fmt.head_dim}"
    coded = [group.size for group in fmt.groups if group.bits != EXACT_BITS]
    if len(coded) > 2 or len(fmt.groups) - len(coded) > 1:
        return f"the kernels read one or two channel groups with codes and one that is exact, got {fmt.groups}"
    sizes = [*coded, *([fmt.head_dim] if fmt.kind in ("prod", "qjl") else [])]
    if any(size % 8 for size in sizes):
        return f"the kernels read channel groups of multiples of 8 channels, got {sizes}"
    return ""


def triton_obstacle(device_type: str) -> str:
    """Say what keeps Triton from running on a kind of device; empty when nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if device_type == "cuda" or (device_type == "cpu" and interpreting()):
        return ""
    return f"the tensors are on a {device_type} device and the kernels need a cuda device"


def interpreting() -> bool:
    """Whether Triton's interpreter is switched on (``TRITON_INTERPRET=1``), which runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
