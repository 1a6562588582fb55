"""Codebooks: the tables of the scalar quantizers, found in memory, in the package, or solved once and kept on disk.

A codebook of 1 to 7 bits is the Lloyd-Max quantizer of one coordinate of a uniform unit vector; one of 8 bits is the
best uniform grid, whose codes decode by arithmetic. ``codebooks/`` holds those of common head dimensions as JSON.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch

from hf_turboquant.errors import CodebookError
from hf_turboquant.lloyd_max import MAX_BITS, MIN_HEAD_DIM, solve_lloyd_max, solve_uniform

SCHEMA: Final = "hf_turboquant.codebook/1"
DENSITY: Final = "unit_sphere_coordinate"
GENERATOR: Final = "hf_turboquant.codebook.write_codebooks/1"

MAX_SOLVED_HEAD_DIM: Final = 576
"""Largest ``head_dim`` (channels) for which a codebook is found without a path."""

# fmt: off
PACKAGED_HEAD_DIMS: Final = (
    16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 120, 128, 160, 184, 192, 248, 256, 288, 576,
)
# fmt: on
PACKAGED_BITS: Final = (1, 2, 3, 4, 8)

CACHE_VARIABLE: Final = "HF_TURBOQUANT_CACHE"
"""Environment variable with a directory; solved codebooks are kept in its ``codebooks/``."""

_UNIFORM_BITS: Final = 8
_SIMPSON_INTERVALS: Final = 2048


@dataclass(frozen=True, eq=False)
class Codebook:
    """Table of a scalar quantizer. Shared between callers: its tensors must not be written to.

    Attributes:
        centroids: ``(2**bits,)`` float32 on the CPU, ascending, ``centroids[i] == -centroids[-1 - i]``.
        boundaries: ``(2**bits - 1,)`` float32 on the CPU, midpoints of neighbouring centroids.
        head_dim: Dimension of the unit vectors whose coordinates it quantizes.
        bits: Bits per coordinate.
        mse: Expected squared error of one coordinate of a unit vector; ``head_dim * mse`` is that of the vector.
        source: ``solved``, or the file it was read from.
    """

    centroids: torch.Tensor
    boundaries: torch.Tensor
    head_dim: int
    bits: int
    mse: float
    source: str

    @property
    def is_uniform(self) -> bool:
        """Whether the centroids are a uniform grid, ``step * (i - (2**bits - 1) / 2)``."""
        return self.bits == _UNIFORM_BITS

    def verify(self) -> None:
        """Check that the table is optimal for its density, by quadrature that shares nothing with the solver.

        Boundaries must be midpoints. Centroids must be the conditional means of their cells; for a uniform grid they
        must be equally spaced, and steps of 1 % more or less must not be better. The distortion must equal ``mse``.

        Raises:
            CodebookError: A condition does not hold; the message says which and by how much.
        """
        centroids, boundaries = self.centroids.double(), self.boundaries.double()
        mass, first, _ = _integrate_cells(boundaries, self.head_dim)
        mse = _distortion(centroids, boundaries, self.head_dim)
        # float32 keeps seven digits of a table whose scale is 1 / sqrt(head_dim)
        tolerance = 1e-6 / math.sqrt(self.head_dim)
        midpoints = 0.5 * (centroids[1:] + centroids[:-1])
        self._require("boundaries are midpoints", float((boundaries - midpoints).abs().max()), tolerance)
        if self.is_uniform:
            error = centroids.diff() - centroids.diff().mean()
            self._require("centroids are equally spaced", float(error.abs().max()), tolerance)
            rival = min(_distortion(centroids * s, boundaries * s, self.head_dim) for s in (0.99, 1.01))
            self._require("the step has the least distortion", 1 - rival / mse, 0.0)
        else:
            self._require("centroids are conditional means", float((centroids - first / mass).abs().max()), tolerance)
        self._require("mse is the distortion", abs(self.mse / mse - 1), 1e-5)

    def _require(self, condition: str, error: float, tolerance: float) -> None:
        if not error <= tolerance:
            raise CodebookError(
                f"codebook of head_dim {self.head_dim} and {self.bits} bits from {self.source}: {condition} does not "
                f"hold, off by {error:.3g} with {tolerance:.3g} allowed; delete the file to have it solved anew"
            )


def load_codebook(head_dim: int, bits: int, *, path: str | os.PathLike[str] | None = None) -> Codebook:
    """Return the codebook of ``bits``-bit codes for unit vectors of ``head_dim`` channels.

    Looked for in memory, then among the packaged files, then in the user's cache directory
    (``$HF_TURBOQUANT_CACHE/codebooks``, else ``$XDG_CACHE_HOME/hf_turboquant/codebooks``, else
    ``~/.cache/hf_turboquant/codebooks``); otherwise solved, in milliseconds, and kept in that directory.

    Args:
        head_dim: Channels of the vectors, or of the channel group; 4 to 576 without ``path``.
        bits: Bits per coordinate, 1 to 8.
        path: File to read instead, or a directory that holds it under the name of :func:`codebook_name`. Read at
            every call.

    Raises:
        CodebookError: An argument is out of range, or a file is missing, corrupt, or for other arguments.
    """
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < MIN_HEAD_DIM:
        raise CodebookError(f"head_dim must be an int of at least {MIN_HEAD_DIM} (channels), got {head_dim!r}")
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= MAX_BITS:
        raise CodebookError(f"bits must be an int of 1 to {MAX_BITS} (bits per coordinate), got {bits!r}")
    if path is not None:
        return _load_path(Path(path), head_dim, bits)
    if head_dim > MAX_SOLVED_HEAD_DIM:
        raise CodebookError(
            f"head_dim must be at most {MAX_SOLVED_HEAD_DIM} (channels) without a codebook path, got {head_dim}; "
            "pass the path of a codebook file made for it"
        )
    return _load_known(head_dim, bits)


def codebook_name(head_dim: int, bits: int) -> str:
    """Return the file name of a codebook, such as ``lloyd_max_d128_b4.json``."""
    return f"{'uniform' if bits == _UNIFORM_BITS else 'lloyd_max'}_d{head_dim}_b{bits}.json"


def write_codebooks(
    directory: str | os.PathLike[str],
    head_dims: tuple[int, ...] = PACKAGED_HEAD_DIMS,
    bits: tuple[int, ...] = PACKAGED_BITS,
) -> list[Path]:
    """Solve codebooks and write them as JSON; the same input gives the same bytes.

    Args:
        directory: Made if it does not exist. Files of the same names are replaced.
        head_dims: Dimensions to solve.
        bits: Widths to solve for each.

    Returns:
        The paths written.

    Raises:
        CodebookError: A dimension or width is out of range of the solver.
        OSError: The directory cannot be written.
    """
    paths = []
    for head_dim in head_dims:
        for width in bits:
            path = Path(directory) / codebook_name(head_dim, width)
            _write_atomic(path, solve_codebook_json(head_dim, width))
            paths.append(path)
    return paths


def solve_codebook_json(head_dim: int, bits: int) -> str:
    """Solve a codebook and return the text of its file.

    Numbers are rounded to 13 digits: far below what float32 resolves, far above the noise by which the last bits of
    two platforms differ.

    Raises:
        CodebookError: An argument is out of range of the solver.
    """
    solved = solve_uniform(head_dim, bits) if bits == _UNIFORM_BITS else solve_lloyd_max(head_dim, bits)
    centroids = [_rounded(value) for value in solved.centroids.tolist()]
    fields = {
        "schema": SCHEMA,
        "density": DENSITY,
        "head_dim": head_dim,
        "bits": bits,
        "centroids": centroids,
        "boundaries": [0.5 * (low + high) for low, high in itertools.pairwise(centroids)],
        "mse": _rounded(solved.mse),
        "generator": GENERATOR,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(value: float) -> float:
    return float(f"{value:.12e}")


# lookup


@functools.lru_cache(maxsize=256)
def _load_known(head_dim: int, bits: int) -> Codebook:
    name = codebook_name(head_dim, bits)
    # the first is where an installed wheel has them, the second where a checkout does
    for directory in (files("hf_turboquant") / "_codebooks", Path(__file__).parent.parent / "codebooks"):
        file = directory / name
        if file.is_file():
            return _parse(file.read_bytes(), head_dim, bits, str(file))
    cached = _cache_directory() / name
    try:
        raw = cached.read_bytes()
    except OSError:
        text = solve_codebook_json(head_dim, bits)
        _keep(cached, text)
        return _parse(text.encode(), head_dim, bits, "solved")
    return _parse(raw, head_dim, bits, str(cached))


def _load_path(path: Path, head_dim: int, bits: int) -> Codebook:
    file = path / codebook_name(head_dim, bits) if path.is_dir() else path
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CodebookError(
            f"path must be a codebook file of head_dim {head_dim} and {bits} bits, or a directory with "
            f"{codebook_name(head_dim, bits)}, got {str(path)!r}: {error.strerror}; write_codebooks() makes such files"
        ) from error
    return _parse(raw, head_dim, bits, str(file))


def _cache_directory() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser() / "codebooks"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "hf_turboquant" / "codebooks"


def _keep(path: Path, text: str) -> None:
    """Write a solved codebook to the user's cache; warn where that cannot be done."""
    try:
        _write_atomic(path, text)
    except OSError as error:
        warnings.warn(
            f"solved codebooks cannot be kept in {str(path.parent)!r} ({error.strerror}) and will be solved again by "
            f"every process; set {CACHE_VARIABLE} to a directory that can be written",
            RuntimeWarning,
            stacklevel=2,
        )


def _write_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# parsing


def _parse(raw: bytes, head_dim: int, bits: int, source: str) -> Codebook:
    """Build a codebook from the bytes of its file, checking all that can be checked without integrals."""
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise _corrupt(source, f"is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise _corrupt(source, f"must hold a JSON object, got {type(data).__name__}")
    for field, expected in (("schema", SCHEMA), ("density", DENSITY), ("head_dim", head_dim), ("bits", bits)):
        if data.get(field) != expected:
            raise _corrupt(source, f"must have {field} {expected!r}, got {data.get(field)!r}")
    centroids = _read_numbers(data, "centroids", 2**bits, source)
    boundaries = _read_numbers(data, "boundaries", 2**bits - 1, source)
    mse = _read_number(data.get("mse"), "mse", source)
    steps = list(itertools.pairwise(centroids))
    if not all(low < high for low, high in steps):
        raise _corrupt(source, "must have ascending centroids")
    if any(value != -mirrored for value, mirrored in zip(centroids, reversed(centroids), strict=True)):
        raise _corrupt(source, "must have centroids symmetric about zero")
    tolerance = 1e-12 * centroids[-1]
    if any(abs(edge - 0.5 * (low + high)) > tolerance for edge, (low, high) in zip(boundaries, steps, strict=True)):
        raise _corrupt(source, "must have boundaries midway between centroids")
    if not 0 < mse < 1 / head_dim:
        raise _corrupt(source, f"must have an mse between 0 and 1 / head_dim, got {mse!r}")
    # a codebook made under inference mode could not take part in autograd later
    with torch.inference_mode(False):
        return Codebook(_to_float32(centroids), _to_float32(boundaries), head_dim, bits, mse, source)


def _to_float32(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _read_numbers(data: dict[str, Any], field: str, count: int, source: str) -> list[float]:
    values = data.get(field)
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, list) else repr(values)
        raise _corrupt(source, f"must have a list of {count} {field}, got {got}")
    return [_read_number(value, field, source) for value in values]


def _read_number(value: object, field: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _corrupt(source, f"must have finite numbers in {field}, got {value!r}")
    return float(value)


def _corrupt(source: str, problem: str) -> CodebookError:
    return CodebookError(
        f"codebook file {source!r} {problem}; delete it to have it solved anew, or write it with write_codebooks()"
    )


# verification


def _distortion(centroids: torch.Tensor, boundaries: torch.Tensor, head_dim: int) -> float:
    """Return the expected squared error of one coordinate, from float64 tables."""
    mass, first, second = _integrate_cells(boundaries, head_dim)
    return float((second - 2 * centroids * first + centroids.square() * mass).sum())


def _integrate_cells(boundaries: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integrate 1, x and x^2 over the cells between ``boundaries`` with Simpson's rule in ``x = sin(angle)``.

    Returns:
        Three ``(len(boundaries) + 1,)`` float64 tensors, normalised so that the mass sums to 1.
    """
    end = min(0.5 * math.pi, 12 / math.sqrt(head_dim))
    limit = torch.tensor([end], dtype=torch.float64, device="cpu")
    edges = torch.cat((-limit, torch.asin(boundaries), limit))
    fractions = torch.linspace(0, 1, _SIMPSON_INTERVALS + 1, dtype=torch.float64, device="cpu")
    weights = torch.full_like(fractions, 2.0)
    weights[1::2] = 4.0
    weights[0] = weights[-1] = 1.0
    width = edges.diff()[:, None]
    angles = edges[:-1, None] + width * fractions
    density = weights * width * angles.cos().clamp_min(0).pow(head_dim - 2)
    density = density / density.sum()
    x = angles.sin()
    return density.sum(dim=1), (density * x).sum(dim=1), (density * x * x).sum(dim=1)
