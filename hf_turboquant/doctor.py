"""Say what would run here and why, and try it: versions, devices, backends, a small self-check on each device."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_turboquant import __version__
from hf_turboquant.bench import Geometry, new_cache
from hf_turboquant.codebook import PACKAGED_BITS, PACKAGED_HEAD_DIMS, load_codebook
from hf_turboquant.errors import CodebookError, ConfigError
from hf_turboquant.handle import KVHandle
from hf_turboquant.ops import Backend, resolve_backend
from hf_turboquant.ops.backend import interpreting
from hf_turboquant.presets import DEFAULT_PRESET

MINIMUM_TRANSFORMERS: Final = (5, 4)
PACKAGES: Final = ("torch", "transformers", "triton", "accelerate", "safetensors")
SECONDS: Final = 600
"""Time a self-check may take; the first one on a GPU compiles kernels."""


@dataclass(frozen=True)
class SelfCheck:
    """What a self-check found.

    Attributes:
        passed: Whether both errors are as small as they must be.
        attention_error: Of attention on the compressed store, against float64 attention on the same keys and values
            read back; relative.
        quantization_error: Of keys read back, relative to the keys.
        seconds: What it took, compilation included.
        error: Why it could not finish; empty if it did.
    """

    passed: bool
    attention_error: float | None = None
    quantization_error: float | None = None
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class DeviceReport:
    """One device.

    Attributes:
        device: As torch names it.
        name: Of the hardware.
        capability: ``sm_90`` and the like; empty for a CPU.
        memory_bytes: Memory of a GPU; None for a CPU.
        backend: What ``auto`` takes there.
        reason: Why.
        check: Self-check on it.
    """

    device: str
    name: str
    capability: str
    memory_bytes: int | None
    backend: str
    reason: str
    check: SelfCheck


@dataclass(frozen=True)
class DoctorReport:
    """All that was found. ``problems`` is what must be mended before the library works here."""

    versions: dict[str, str | None]
    interpreter: bool
    devices: tuple[DeviceReport, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing must be mended."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class CodebookCheck:
    """Whether one packaged codebook is optimal for its density; ``error`` says what is not."""

    head_dim: int
    bits: int
    source: str
    mse: float | None
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.error


def verify_codebooks() -> list[CodebookCheck]:
    """Check every packaged codebook by quadrature."""
    return [_check_codebook(head_dim, bits) for head_dim in PACKAGED_HEAD_DIMS for bits in PACKAGED_BITS]


def _check_codebook(head_dim: int, bits: int) -> CodebookCheck:
    try:
        book = load_codebook(head_dim, bits)
        book.verify()
    except CodebookError as error:
        return CodebookCheck(head_dim, bits, "", None, str(error))
    return CodebookCheck(head_dim, bits, book.source, book.mse)


def doctor(devices: Sequence[str] | None = None) -> DoctorReport:
    """Look at this machine and check each device.

    Args:
        devices: Devices to look at, as torch names them; None for the CPU and every GPU.

    Raises:
        ConfigError: A device is not here.
    """
    found = tuple(_look_at(name) for name in (devices or available_devices()))
    versions = {"hf_turboquant": __version__, "python": platform.python_version()}
    all_versions = {**versions, **{name: _version(name) for name in PACKAGES}}
    problems = [problem for problem in (_transformers_problem(all_versions["transformers"]),) if problem]
    problems += [f"{report.device}: {_check_problem(report.check)}" for report in found if not report.check.passed]
    return DoctorReport(all_versions, interpreting(), found, tuple(problems))


def available_devices() -> list[str]:
    """Return the CPU and every GPU."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def self_check(device: torch.device) -> SelfCheck:
    """Quantize random keys and values on a device, attend over them, and compare with float64.

    The codebook behind them is checked too, by quadrature.
    """
    start = time.perf_counter()
    geometry = Geometry(num_q_heads=4, num_kv_heads=2, head_dim=128, tokens=640)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, geometry.head_dim, generator=generator).to(device, dtype)

    load_codebook(geometry.head_dim, 4).verify()
    keys, values = (random(geometry.num_kv_heads, geometry.tokens) for _ in range(2))
    cache = new_cache(DEFAULT_PRESET, geometry.model_config())
    cache.update(keys[:, :, :-1], values[:, :, :-1], 0)
    lazy_keys, lazy_values = cache.update(keys[:, :, -1:], values[:, :, -1:], 0)
    assert isinstance(lazy_keys, KVHandle)
    assert isinstance(lazy_values, KVHandle)
    query = random(geometry.num_q_heads, 1)
    out = scaled_dot_product_attention(query, lazy_keys, lazy_values, enable_gqa=True)
    read_keys, read_values = (handle.materialize().double() for handle in (lazy_keys, lazy_values))
    expected = scaled_dot_product_attention(query.double(), read_keys, read_values, enable_gqa=True)
    attention = float((out.double() - expected).norm() / expected.norm())
    quantization = float((read_keys - keys.double()).norm() / keys.double().norm())
    # 4-bit codes miss 9.5 % of a Gaussian vector, and 384 of the 640 tokens are packed: a tenth more or less means that
    # another table or another rotation was read back
    expected_error = 0.095 * (384 / 640) ** 0.5
    close = abs(quantization / expected_error - 1) < 0.1
    passed = close and attention < (0.02 if dtype is torch.bfloat16 else 1e-4)
    return SelfCheck(passed, attention, quantization, time.perf_counter() - start)


def _look_at(name: str) -> DeviceReport:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be a device torch knows, such as cpu or cuda:0, got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} is not here; there are {', '.join(available_devices())}")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {name!r}")
    choice = resolve_backend(Backend.AUTO, device)
    if device.type == "cpu":
        return DeviceReport(name, _cpu_name(), "", None, choice.backend.value, choice.reason, self_check(device))
    properties = torch.cuda.get_device_properties(device)
    return DeviceReport(
        name,
        properties.name,
        f"sm_{properties.major}{properties.minor}",
        properties.total_memory,
        choice.backend.value,
        choice.reason,
        _check_apart(name),
    )


def _check_apart(device: str) -> SelfCheck:
    """Run the self-check in a process of its own: what kills it there is reported, and does not kill this one."""
    code = (
        "import json, sys, torch\n"
        "from dataclasses import asdict\n"
        "from hf_turboquant.doctor import self_check\n"
        "print(json.dumps(asdict(self_check(torch.device(sys.argv[1])))))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, device], capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return SelfCheck(False, error=f"the self-check did not end within {SECONDS} seconds")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return SelfCheck(False, error=lines[-1] if lines else f"the self-check died with code {done.returncode}")
    return SelfCheck(**json.loads(done.stdout.splitlines()[-1]))


def _check_problem(check: SelfCheck) -> str:
    if check.error:
        return f"the self-check failed: {check.error}"
    return (
        f"the self-check is off: attention by {check.attention_error:.2g}, keys by {check.quantization_error:.2g} "
        "(relative); try backend='reference' and report it"
    )


def _transformers_problem(version: str | None) -> str:
    wanted = ".".join(map(str, MINIMUM_TRANSFORMERS))
    if version is None:
        return f"transformers is not installed; pip install 'transformers>={wanted}'"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < MINIMUM_TRANSFORMERS:
        return f"transformers is {version} and must be at least {wanted}; pip install --upgrade transformers"
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except FileNotFoundError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
