"""Rotations and projections: orthogonal, mixing, seeded, unbiased."""

import math

import pytest
import torch

from hf_turboquant.errors import ConfigError
from hf_turboquant.rotation import _build_rotation, build_projection, build_rotation, projection_scale

SEED_ZERO_SIGNS = [0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0]
SEED_ZERO_QR_ROW = [-0.3019662499, -0.8235101700, -0.1151770279, -0.4662420154]
HEAD_DIMS = [2, 4, 6, 16, 26, 40, 64, 80, 96, 112, 128, 184, 192, 256, 576]


def orthogonality_error(matrix: torch.Tensor) -> float:
    matrix = matrix.double()
    identity = torch.eye(len(matrix), dtype=torch.float64)
    return float((matrix @ matrix.T - identity).abs().max())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["qr", "hadamard"])
def test_rotation_is_orthogonal(kind, head_dim):
    rotation = build_rotation(kind, head_dim, seed=3)
    assert rotation.shape == (head_dim, head_dim)
    assert rotation.dtype == torch.float32
    assert rotation.device.type == "cpu"
    assert orthogonality_error(rotation) < 1e-6


@pytest.mark.parametrize("kind", ["qr", "hadamard"])
def test_rotation_keeps_norms_and_inverts_by_its_transpose(kind):
    rotation = build_rotation(kind, 96, seed=0)
    vectors = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    rotated = vectors @ rotation
    assert torch.allclose(rotated.norm(dim=-1), vectors.norm(dim=-1), rtol=1e-5)
    assert torch.allclose(rotated @ rotation.T, vectors, atol=1e-5)


@pytest.mark.parametrize("head_dim", [2, 4, 12, 20, 32, 40, 48, 56, 64, 80, 96, 104, 112, 128, 192, 240, 256, 288, 576])
def test_hadamard_weighs_every_channel_alike(head_dim):
    rotation = build_rotation("hadamard", head_dim, seed=1)
    assert torch.equal(rotation.abs(), torch.full_like(rotation, 1 / math.sqrt(head_dim)))


@pytest.mark.parametrize("head_dim", [6, 10, 26, 52 * 7, 92, 184])
def test_sizes_without_a_hadamard_matrix_still_mix_all_channels(head_dim):
    magnitude = build_rotation("hadamard", head_dim, seed=1).abs() * math.sqrt(head_dim)
    assert magnitude.max() < math.sqrt(2) + 1e-5
    assert magnitude.min() > 1e-3


def test_hadamard_does_not_map_constant_vectors_onto_one_channel():
    constant = torch.full((128,), 1 / math.sqrt(128))
    for seed in range(20):
        assert (constant @ build_rotation("hadamard", 128, seed)).abs().max() < 0.5


@pytest.mark.parametrize("kind", ["qr", "hadamard"])
def test_coordinates_of_a_random_rotation_have_the_sphere_variance(kind):
    vector = torch.randn(64, generator=torch.Generator().manual_seed(5))
    vector /= vector.norm()
    coordinates = torch.stack([vector @ build_rotation(kind, 64, seed) for seed in range(60)])
    # each coordinate, over seeds: mean 0 and variance 1/64; 3840 draws in all
    assert float(coordinates.mean()) == pytest.approx(0, abs=4 / math.sqrt(64 * 3840))
    fourth = float((coordinates * 8).pow(4).mean())
    assert fourth == pytest.approx(3 * 64 / 66, abs=0.5)


def test_qr_has_the_sign_convention_of_haar():
    """With signs fixed, the trace of a Haar matrix has mean 0 and variance 1; LAPACK's own signs give a large one."""
    traces = torch.stack([build_rotation("qr", 16, seed).trace() for seed in range(200)])
    assert abs(float(traces.mean())) < 4 / math.sqrt(200)
    assert float(traces.var()) == pytest.approx(1, abs=0.45)


# seeds


@pytest.mark.parametrize("kind", ["qr", "hadamard"])
def test_seed_fixes_the_rotation(kind):
    first = build_rotation(kind, 48, seed=0).clone()
    _build_rotation.cache_clear()
    torch.manual_seed(99)
    assert torch.equal(build_rotation(kind, 48, seed=0), first)
    assert not torch.equal(build_rotation(kind, 48, seed=1), first)


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    _build_rotation.cache_clear()
    build_rotation("qr", 8, seed=12345)
    build_projection("gaussian", 8, seed=12345)
    assert torch.equal(torch.get_rng_state(), before)


def test_rotation_is_cached():
    assert build_rotation("qr", 32, 0) is build_rotation("qr", 32, 0, group_sizes=[32])


def test_known_signs_of_seed_zero():
    """Codes saved by one version must be read by the next: the stream of a seed may not change."""
    signs = (build_rotation("hadamard", 16, seed=0)[:, 0] > 0).int().tolist()
    assert signs == SEED_ZERO_SIGNS
    assert build_rotation("qr", 4, seed=0)[0].tolist() == pytest.approx(SEED_ZERO_QR_ROW, abs=1e-6)


def test_context_of_the_caller_does_not_matter():
    expected = build_rotation("qr", 24, seed=8).clone()
    _build_rotation.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        rotation = build_rotation("qr", 24, seed=8)
    assert torch.equal(rotation, expected)
    assert not rotation.is_inference()


# groups


@pytest.mark.parametrize("kind", ["qr", "hadamard"])
def test_groups_are_rotated_apart_and_independently(kind):
    rotation = build_rotation(kind, 128, seed=0, group_sizes=(64, 64))
    first, second = rotation[:64, :64], rotation[64:, 64:]
    assert orthogonality_error(first) < 1e-6
    assert orthogonality_error(second) < 1e-6
    assert not torch.equal(first, second)
    assert not rotation[:64, 64:].any()
    assert not rotation[64:, :64].any()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        pytest.param(lambda: build_rotation("dct", 64, 0), "rotation must be one of", id="unknown-rotation"),
        pytest.param(lambda: build_rotation("hadamard", 33, 0), "even number of channels.*33", id="odd-head_dim"),
        pytest.param(lambda: build_rotation("hadamard", 64, 0, (31, 33)), "even number", id="odd-group"),
        pytest.param(lambda: build_rotation("qr", 64, 0, (32, 31)), "sum to head_dim 64", id="sum"),
        pytest.param(lambda: build_rotation("qr", 64, 0, ()), "sum to head_dim 64", id="no-groups"),
        pytest.param(lambda: build_rotation("qr", 64, 0, (64, 0)), "must be positive", id="empty-group"),
        pytest.param(lambda: build_projection("haar", 64, 0), "projection must be one of", id="unknown-projection"),
        pytest.param(lambda: build_projection("gaussian", 0, 0), "head_dim must be positive", id="projection-size"),
        pytest.param(lambda: projection_scale("haar", 64), "projection must be one of", id="unknown-scale"),
    ],
)
def test_arguments_out_of_range_are_named(call, match):
    with pytest.raises(ConfigError, match=match):
        call()


def test_qr_serves_odd_sizes():
    assert orthogonality_error(build_rotation("qr", 33, 0)) < 1e-6


# projection


def test_gaussian_projection_is_standard_normal_and_apart_from_the_rotation():
    projection = build_projection("gaussian", 128, seed=0)
    assert projection.dtype == torch.float32
    assert float(projection.mean()) == pytest.approx(0, abs=4 / 128)
    assert float(projection.var()) == pytest.approx(1, abs=4 * math.sqrt(2) / 128)
    # a rotation drawn from the same numbers would have R = Q^T S upper triangular
    assert (build_rotation("qr", 128, seed=0).T @ projection).tril(-1).abs().max() > 1


def test_orthogonal_projection_has_unit_rows_and_its_own_stream():
    projection = build_projection("orthogonal", 64, seed=0)
    assert orthogonality_error(projection) < 1e-6
    assert not torch.equal(projection, build_rotation("qr", 64, seed=0))


def test_scales_have_the_known_values():
    assert projection_scale("gaussian", 128) == pytest.approx(math.sqrt(math.pi / 2) / 128, rel=1e-12)
    for head_dim in (16, 128, 576):
        asymptotic = math.sqrt(math.pi / 2 / head_dim)
        assert projection_scale("orthogonal", head_dim) == pytest.approx(
            asymptotic * (1 - 1 / (4 * head_dim)), rel=1e-3
        )


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
def test_sign_projection_is_unbiased(kind, head_dim):
    """Over projections, the mean of scale * S.T sign(S u) along u is 1; for d=8 the asymptotic constant fails this."""
    count = {8: 4000, 64: 1000}[head_dim]
    unit = torch.nn.functional.normalize(torch.randn(head_dim, generator=torch.Generator().manual_seed(2)), dim=0)
    samples = []
    for seed in range(count):
        projection = build_projection(kind, head_dim, seed)
        samples.append(projection_scale(kind, head_dim) * (torch.sign(projection @ unit) @ projection))
    estimates = torch.stack(samples)
    slopes = estimates @ unit
    assert float(slopes.mean()) == pytest.approx(1, abs=4 * float(slopes.std()) / math.sqrt(count))
    across = estimates.mean(dim=0) - slopes.mean() * unit
    spread = float((estimates - slopes[:, None] * unit).square().sum(dim=-1).mean()) / count
    assert float(across.norm()) < 2 * math.sqrt(spread)
