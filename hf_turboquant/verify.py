"""Check the codecs against the theorems of their papers, by experiment with a statistical criterion.

Unit vectors are quantized to packed bytes and read back through the same operations the cache uses, in blocks of 128,
each block with a rotation and a projection of its own: the theorems average over both. A mean over blocks then has an
honest standard error, and a check passes if it holds to within 4 of them. Bounds and table:
arXiv:2504.19874, Theorems 1 and 2, and the lower bound 4^-bits of Theorem 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from hf_turboquant.codebook import load_codebook
from hf_turboquant.config import Projection, TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import VectorCodec, dequantize, quantize, reference
from hf_turboquant.quantizers import build_key_codec, build_value_codec

HEAD_DIMS: Final = (64, 128, 256)
BITS: Final = (1, 2, 3, 4)
VECTORS: Final = 8192
SIGMAS: Final = 4.0
"""Standard errors allowed: a true statement fails once in 16,000 two-sided checks, and always or never for a seed."""

MSE_TABLE: Final = {1: (0.36, 0.365), 2: (0.117, 0.1175), 3: (0.03, 0.04), 4: (0.009, 0.0095)}
"""By bits: the distortion the paper prints, and the end of the interval its digits stand for (.03 is .0345 cut off)."""

Relation = Literal["equal", "at most", "at least"]


@dataclass(frozen=True)
class VerifyClaim:
    """What the theory says of a quantity.

    Attributes:
        relation: How the quantity must stand to ``target``.
        target: A number.
        source: Where it comes from.
    """

    relation: Relation
    target: float
    source: str

    def __str__(self) -> str:
        """Say it in a few words."""
        sign = {"equal": "=", "at most": "<=", "at least": ">="}[self.relation]
        return f"{sign} {self.target:.5g} ({self.source})"


@dataclass(frozen=True)
class VerifyCheck:
    """One measured quantity and what the theory says of it.

    Attributes:
        name: What was measured.
        head_dim: Channels.
        bits: Bits per coordinate, norms not counted.
        measured: Mean over blocks.
        standard_error: Of the mean; 0 for what is exact.
        claims: All must hold.
    """

    name: str
    head_dim: int
    bits: float
    measured: float
    standard_error: float
    claims: tuple[VerifyClaim, ...]

    def sigmas(self, claim: VerifyClaim) -> float:
        """Return measured minus target in standard errors; infinite where an exact quantity is off."""
        difference = self.measured - claim.target
        if self.standard_error:
            return difference / self.standard_error
        return 0.0 if math.isclose(self.measured, claim.target, rel_tol=1e-9) else math.copysign(math.inf, difference)

    def holds(self, claim: VerifyClaim) -> bool:
        """Say whether a claim is true to within ``SIGMAS`` standard errors."""
        sigmas = self.sigmas(claim)
        if claim.relation == "equal":
            return abs(sigmas) <= SIGMAS
        return sigmas <= SIGMAS if claim.relation == "at most" else sigmas >= -SIGMAS

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(map(self.holds, self.claims))

    def __str__(self) -> str:
        """Say it in one line."""
        claims = ", ".join(f"{'' if self.holds(claim) else 'NOT '}{claim}" for claim in self.claims)
        return (
            f"{'pass' if self.passed else 'FAIL'}  head_dim {self.head_dim:3}  bits {self.bits:<5g} {self.name:32} "
            f"{self.measured:9.6f} ± {self.standard_error:.6f}  {claims}"
        )


@dataclass(frozen=True)
class VerifyReport:
    """All checks of a run."""

    checks: tuple[VerifyCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        """List the checks and count the failures."""
        failed = sum(not check.passed for check in self.checks)
        verdict = f"{len(self.checks)} checks, {failed} failed; criterion: {SIGMAS:g} standard errors"
        return "\n".join([*map(str, self.checks), verdict])


def verify(
    head_dims: Sequence[int] = HEAD_DIMS,
    bits: Sequence[int] = BITS,
    *,
    vectors: int = VECTORS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> VerifyReport:
    """Measure distortion, bias, variance and size of the codecs and hold them against theory.

    Args:
        head_dims: Channels of the vectors, each a multiple of 16.
        bits: Bits per coordinate, 1 to 4. ``prod`` is checked from 2 bits on, where it exists.
        vectors: Unit vectors per setting, a multiple of 128 and at least 1024.
        seed: Of the vectors, rotations and projections.
        device: Where to compute.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        The checks; ``passed`` says whether all hold.

    Raises:
        ConfigError: An argument is out of range.
        BackendUnavailableError: ``backend`` cannot run on ``device``.
    """
    if vectors % BLOCK_TOKENS or vectors < 8 * BLOCK_TOKENS:
        raise ConfigError(
            f"vectors must be a multiple of {BLOCK_TOKENS}, and at least {8 * BLOCK_TOKENS}, got {vectors}"
        )
    if unknown := sorted(set(bits) - set(BITS)):
        raise ConfigError(f"bits must be among {BITS} (bits per coordinate), got {unknown[0]}")
    trial = _Trial(vectors // BLOCK_TOKENS, seed, torch.device(device), backend)
    checks: list[VerifyCheck] = []
    for head_dim in head_dims:
        for width in bits:
            checks += _mse_checks(trial, head_dim, width)
            if width > 1:
                for projection in ("gaussian", "orthogonal"):
                    checks += _prod_checks(trial, head_dim, width, projection)
        checks += _polar_checks(trial, head_dim)
    return VerifyReport(tuple(checks))


# experiments


@dataclass(frozen=True)
class _Trial:
    blocks: int
    seed: int
    device: torch.device
    backend: str

    def codecs(self, head_dim: int, block: int, **fields: Any) -> tuple[VectorCodec, VectorCodec]:
        """Return the codecs of keys and values: the paper's settings with the seed of one block, and ``fields``."""
        config = TurboQuantConfig().replace(
            rotation="qr", scale="norm", key_centering="none", seed=self.seed * 1_000_003 + block, **fields
        )
        return (
            build_key_codec(config, head_dim, torch.float32, self.device),
            build_value_codec(config, head_dim, torch.float32, self.device),
        )

    def unit_vectors(self, head_dim: int, block: int, count: int) -> torch.Tensor:
        """Return ``(count, 128, head_dim)`` independent unit vectors, float32."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + block) * 1009 + head_dim)
        vectors = torch.randn(count, BLOCK_TOKENS, head_dim, generator=generator, dtype=torch.float64)
        unit: torch.Tensor = vectors / vectors.norm(dim=-1, keepdim=True)
        return unit.float().to(self.device)

    def reconstruct(self, vectors: torch.Tensor, key_codec: VectorCodec, value_codec: VectorCodec) -> torch.Tensor:
        """Store ``(128, head_dim)`` vectors as keys and as values; return ``(2, 128, head_dim)`` as read back."""
        given = vectors[None, None]
        split = key_codec.format.nbytes
        records = torch.empty(1, 1, 1, split + value_codec.format.nbytes, dtype=torch.uint8, device=vectors.device)
        quantize(given, given, records, key_codec, value_codec, backend=self.backend)
        read = []
        for codec, packed in ((key_codec, records[0, ..., :split]), (value_codec, records[0, ..., split:])):
            rotated = dequantize(packed.contiguous(), codec, backend=self.backend)
            read.append(reference.unrotate(rotated, codec.tables)[0, 0])
        both: torch.Tensor = torch.stack(read)
        return both


def _mean(samples: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error of independent samples."""
    values = torch.tensor(samples, dtype=torch.float64)
    return float(values.mean()), float(values.std() / len(samples) ** 0.5)


def _mse_checks(trial: _Trial, head_dim: int, bits: int) -> Iterator[VerifyCheck]:
    """Check distortion and size of ``mse``, over its layouts for keys and for values."""
    distortions = []
    for block in range(trial.blocks):
        keys, values = trial.codecs(head_dim, block, key_bits=bits, value_bits=bits)
        (vectors,) = trial.unit_vectors(head_dim, block, 1)
        missed = trial.reconstruct(vectors, keys, values) - vectors
        distortions.append(float(missed.double().square().sum(-1).mean()))
    printed, end = MSE_TABLE[bits]
    claims = (
        VerifyClaim("equal", head_dim * load_codebook(head_dim, bits).mse, "its codebook"),
        VerifyClaim("at most", end, f"table: {printed:g}"),
        VerifyClaim("at most", math.sqrt(3) * math.pi / 2 * 4.0**-bits, "Theorem 1"),
        VerifyClaim("at least", 4.0**-bits, "Theorem 3"),
    )
    yield VerifyCheck("mse: distortion", head_dim, bits, *_mean(distortions), claims)
    yield _size_check("mse: bits per value", head_dim, bits, (keys, values), bits + 16 / head_dim)


def _prod_checks(trial: _Trial, head_dim: int, bits: int, projection: Projection) -> Iterator[VerifyCheck]:
    """Check bias and variance of the inner products of ``prod``.

    The bias is taken at a query equal to the key: there a codec that shrinks vectors shows it most, and ``mse`` would
    fail by its whole distortion. The variance is that at independent unit queries. For Gaussian ``S``, given a residual
    ``r``, it is ``(pi/2 |q|^2 |r|^2 - <q, r>^2) / head_dim``.
    """
    bias, variance = [], []
    for block in range(trial.blocks):
        key_codec, value_codec = trial.codecs(
            head_dim, block, key_codec="prod", projection=projection, key_bits=bits, value_bits=bits
        )
        keys, queries = trial.unit_vectors(head_dim, block, 2)
        missed = (trial.reconstruct(keys, key_codec, value_codec)[0] - keys).double()
        bias.append(float((missed * keys).sum(-1).mean()))
        variance.append(head_dim * float((missed * queries).sum(-1).square().mean()))
    name = f"prod, {projection} S"
    yield VerifyCheck(f"{name}: bias", head_dim, bits, *_mean(bias), (VerifyClaim("equal", 0.0, "Theorem 2"),))
    gaussian = (math.pi / 2 - 1 / head_dim) * head_dim * load_codebook(head_dim, bits - 1).mse
    claims = (
        VerifyClaim("equal" if projection == "gaussian" else "at most", gaussian, "exact for Gaussian S"),
        VerifyClaim("at most", math.sqrt(3) * math.pi**2 * 4.0**-bits, "Theorem 2"),
    )
    yield VerifyCheck(f"{name}: head_dim x variance", head_dim, bits, *_mean(variance), claims)
    if projection == "gaussian":
        yield _size_check("prod: bits per value", head_dim, bits, (key_codec,), bits + 32 / head_dim)


def _polar_checks(trial: _Trial, head_dim: int) -> Iterator[VerifyCheck]:
    """Check distortion and size of ``polar``, over its layouts for keys and for values."""
    fields = {"key_codec": "polar", "value_codec": "polar", "key_bits": 4, "value_bits": 4}
    distortions = []
    for block in range(trial.blocks):
        codecs = trial.codecs(head_dim, block, **fields)
        (vectors,) = trial.unit_vectors(head_dim, block, 1)
        missed = trial.reconstruct(vectors, *codecs) - vectors
        distortions.append(float(missed.double().square().sum(-1).mean()))
    # four levels of angles, 4 + 2 + 2 + 2 bits, in trees of 16 channels with a float16 radius
    stored = (8 * 4 + 4 * 2 + 2 * 2 + 1 * 2 + 16) / 16
    claims = (
        VerifyClaim("equal", expected_polar_distortion(codecs[0].tables.centroids), "its angles"),
        VerifyClaim("at least", 4.0**-stored, "Theorem 3"),
    )
    yield VerifyCheck("polar: distortion", head_dim, stored, *_mean(distortions), claims)
    yield _size_check("polar: bits per value", head_dim, stored, codecs, stored)


def expected_polar_distortion(centroids: Sequence[torch.Tensor]) -> float:
    """Return the distortion of polar codes whose radii are exact: ``2 - 2 prod_l E cos(angle_l - code_l)``.

    A pair of subtrees ``(r cos(a) u, r sin(a) v)`` keeps its radius, so its error is ``2 - 2 cos`` of an angle; the
    cosine of a tree is ``cos(a) cos(b) <u, u~> + sin(a) sin(b) <v, v~>`` with ``b`` the coded angle. The subtrees are
    independent of ``a`` and alike, so the mean of it is that of a subtree times ``E cos(a - b)``.

    Args:
        centroids: Angles of each level, from the channels up, radians.
    """
    cosine = 1.0
    for level, angles in enumerate(centroids, start=1):
        span = 2 * math.pi if level == 1 else math.pi / 2
        count = 1 << 16
        grid = (torch.arange(count, dtype=torch.float64) + 0.5) * (span / count)
        density = torch.ones_like(grid) if level == 1 else torch.sin(2 * grid) ** (2 ** (level - 1) - 1)
        codes = angles.double().cpu()
        nearest = codes[torch.bucketize(grid, (codes[1:] + codes[:-1]) / 2)]
        cosine *= float((density * torch.cos(grid - nearest)).sum() / density.sum())
    return 2 - 2 * cosine


def _size_check(name: str, head_dim: int, bits: float, codecs: Sequence[VectorCodec], target: float) -> VerifyCheck:
    """Check the bytes of a block against codes and float16 norms, with nothing between."""
    measured = sum(codec.format.bits_per_value for codec in codecs) / len(codecs)
    claim = VerifyClaim("equal", target, f"by count; {16 / measured:.2f}x smaller than 16 bits")
    return VerifyCheck(name, head_dim, bits, measured, 0.0, (claim,))
