"""Seeded orthogonal matrices: the rotation before quantization, and the projection of the QJL stage.

Matrices are computed once on the CPU in float64 and rounded to float32, so that a seed means the same matrix on every
device. They are cached and shared: callers must not write to them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import get_args

import torch

from hf_turboquant.config import Projection, RotationKind
from hf_turboquant.errors import ConfigError


def build_rotation(
    kind: RotationKind, head_dim: int, seed: int, group_sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the rotation ``R`` of ``rotated = vectors @ R``.

    ``qr`` is Haar distributed: the Q factor of a Gaussian matrix, its signs fixed by the diagonal of R. ``hadamard`` is
    a diagonal of random signs times a Hadamard matrix of any even order; every output mixes all channels, with equal
    weight where such a matrix is known (every power of two, 80, 96, 112, 192, 576 and more) and nearly equal elsewhere.
    With groups, the matrix is block-diagonal and each group has a rotation of its own.

    Args:
        kind: ``hadamard`` or ``qr``.
        head_dim: Channels; even for ``hadamard``.
        seed: Non-negative integer.
        group_sizes: Channels of each contiguous group; None for one group.

    Returns:
        ``(head_dim, head_dim)`` float32 on the CPU, orthogonal to 1e-6. Shared with other callers: do not write to it.

    Raises:
        ConfigError: ``kind`` is unknown, a size is not positive, is odd for ``hadamard``, or the sizes do not sum to
            ``head_dim``.

    Source: arXiv:2504.19874, Algorithm 1, line 2 (``qr``).
    """
    _check_kind("rotation", kind, RotationKind)
    sizes = (head_dim,) if group_sizes is None else tuple(group_sizes)
    if not sizes or min(sizes) < 1 or sum(sizes) != head_dim:
        raise ConfigError(f"group_sizes must be positive and sum to head_dim {head_dim} (channels), got {sizes}")
    odd = [size for size in sizes if size % 2]
    if kind == "hadamard" and odd:
        raise ConfigError(
            f"rotation='hadamard' needs an even number of channels in every group, got {odd[0]}; use rotation='qr'"
        )
    return _build_rotation(kind, seed, sizes)


def build_projection(kind: Projection, head_dim: int, seed: int) -> torch.Tensor:
    """Return the matrix ``S`` whose signs ``sign(S r)`` the QJL stage stores.

    Its random stream does not depend on that of :func:`build_rotation` with the same seed.

    Args:
        kind: ``gaussian`` (independent standard normal entries) or ``orthogonal`` (Haar, rows of norm 1).
        head_dim: Channels.
        seed: Non-negative integer.

    Returns:
        ``(head_dim, head_dim)`` float32 on the CPU. Shared with other callers: do not write to it.

    Raises:
        ConfigError: ``kind`` is unknown or ``head_dim`` is not positive.

    Source: arXiv:2504.19874, Algorithm 2, line 3 (``gaussian``).
    """
    _check_kind("projection", kind, Projection)
    _check_head_dim(head_dim)
    return _build_projection(kind, head_dim, seed)


def projection_scale(kind: Projection, head_dim: int) -> float:
    """Return the factor that makes ``scale * |r| * S.T @ sign(S r)`` an unbiased estimate of ``r``.

    It is ``1 / (head_dim * E|s . u|)`` for a row ``s`` of ``S`` and a unit vector ``u``. A Gaussian row has
    ``E|s . u| = sqrt(2 / pi)``, so the factor is ``sqrt(pi / 2) / head_dim``. A unit row has
    ``E|s . u| = Gamma(head_dim / 2) / (sqrt(pi) Gamma((head_dim + 1) / 2))``; the factor is then
    ``sqrt(pi / 2 / head_dim)`` but for a relative ``1 / (4 head_dim)``, which is kept.

    Raises:
        ConfigError: ``kind`` is unknown or ``head_dim`` is not positive.
    """
    _check_kind("projection", kind, Projection)
    _check_head_dim(head_dim)
    if kind == "gaussian":
        return math.sqrt(math.pi / 2) / head_dim
    log_ratio = math.lgamma((head_dim + 1) / 2) - math.lgamma(head_dim / 2)
    return math.sqrt(math.pi) * math.exp(log_ratio) / head_dim


def _check_kind(name: str, kind: object, choices: object) -> None:
    if kind not in get_args(choices):
        raise ConfigError(f"{name} must be one of {get_args(choices)}, got {kind!r}")


def _check_head_dim(head_dim: int) -> None:
    if head_dim < 1:
        raise ConfigError(f"head_dim must be positive (channels), got {head_dim!r}")


@functools.lru_cache(maxsize=64)
def _build_rotation(kind: RotationKind, seed: int, sizes: tuple[int, ...]) -> torch.Tensor:
    # a cached matrix made under inference mode could not take part in autograd later
    with torch.inference_mode(False), torch.no_grad():
        generator = _generator("rotation", seed)
        build = _random_hadamard if kind == "hadamard" else _haar
        rotation: torch.Tensor = torch.block_diag(*(build(size, generator) for size in sizes))
        return rotation.float()


@functools.lru_cache(maxsize=64)
def _build_projection(kind: Projection, head_dim: int, seed: int) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        generator = _generator("projection", seed)
        build = _gaussian if kind == "gaussian" else _haar
        return build(head_dim, generator).float()


def _generator(stream: str, seed: int) -> torch.Generator:
    """Return a CPU generator for one named stream of a seed."""
    digest = hashlib.sha256(f"{stream}:{seed}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "little"))


def _gaussian(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")


def _haar(size: int, generator: torch.Generator) -> torch.Tensor:
    q: torch.Tensor
    r: torch.Tensor
    q, r = torch.linalg.qr(_gaussian(size, generator))
    # without this the distribution depends on the sign convention of the QR routine
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def _random_hadamard(size: int, generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, (size,), generator=generator, device="cpu").double() * 2 - 1
    return signs[:, None] * _hadamard(size)


def _hadamard(size: int) -> torch.Tensor:
    """Return an orthogonal matrix of even size whose entries have one magnitude, or nearly so.

    A Hadamard matrix of order ``odd * 2**j`` by Paley's constructions, where there is one, gives exactly one magnitude:
    it covers 12, 20, 28, 36 and so 40, 48, 56, 80, 96, 112, 192, 288 and 576. Other sizes take a Hartley matrix of the
    odd factor. Either is multiplied up to ``size`` by Sylvester's doubling.
    """
    odd = size // (size & -size)
    order, core = odd, _hartley(odd)
    for candidate in (odd << j for j in range(2, size.bit_length()) if odd > 1 and size % (odd << j) == 0):
        paley = _paley_hadamard(candidate)
        if paley is not None:
            order, core = candidate, paley
            break
    while order < size:
        core = torch.kron(core, _matrix((1, 1), (1, -1)))
        order *= 2
    # scaled once, in float64: the entries are the correctly rounded 1 / sqrt(size) where there is one magnitude
    return core / math.sqrt(size)


def _paley_hadamard(order: int) -> torch.Tensor | None:
    """Return a Hadamard matrix (entries 1 and -1) of ``order``, a multiple of 4, or None if no prime gives it."""
    if _is_prime(order - 1):
        return torch.eye(order, dtype=torch.float64, device="cpu") + _conference(order - 1)
    prime = order // 2 - 1
    if prime % 4 == 1 and _is_prime(prime):
        identity = torch.eye(order // 2, dtype=torch.float64, device="cpu")
        doubled = torch.kron(_conference(prime), _matrix((1, 1), (1, -1)))
        return doubled + torch.kron(identity, _matrix((1, -1), (-1, -1)))
    return None


def _conference(prime: int) -> torch.Tensor:
    """Return ``C`` of order ``prime + 1``: zero diagonal, 1 and -1 elsewhere, ``C @ C.T = prime * I``.

    Its core is the Legendre symbol of row - column. Skew where ``prime % 4 == 3``, else symmetric.
    """
    symbols = torch.full((prime,), -1.0, dtype=torch.float64, device="cpu")
    symbols[torch.tensor([i * i % prime for i in range(prime)], device="cpu")] = 1.0
    symbols[0] = 0.0
    index = torch.arange(prime, device="cpu")
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float64, device="cpu")
    matrix[1:, 1:] = symbols[(index[:, None] - index) % prime]
    matrix[1:, 0] = -1.0 if prime % 4 == 3 else 1.0
    matrix[0, 0] = 0.0
    return matrix


def _hartley(size: int) -> torch.Tensor:
    """Return the discrete Hartley matrix, ``cos + sin`` of ``2 pi row column / size``; ``M @ M.T = size * I``."""
    index = torch.arange(size, device="cpu")
    angle = (index[:, None] * index % size).double() * (2 * math.pi / size)
    return torch.cos(angle) + torch.sin(angle)


def _matrix(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))
