"""The theorem checks hold, and would not if the codecs were wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hf_turboquant import verify as module
from hf_turboquant.errors import ConfigError
from hf_turboquant.verify import VerifyCheck, VerifyClaim, VerifyReport, expected_polar_distortion, verify


def check(measured: float, error: float, relation: str, target: float) -> VerifyCheck:
    return VerifyCheck("x", 64, 4, measured, error, (VerifyClaim(relation, target, "nobody"),))


def named(report: VerifyReport, name: str) -> VerifyCheck:
    (found,) = [check for check in report.checks if check.name == name]
    return found


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_theorems_hold(head_dim, bits):
    report = verify(head_dims=(head_dim,), bits=(bits,), vectors=1024)
    assert report.passed, str(report)
    assert len(report.checks) == (4 if bits == 1 else 9)


def test_many_vectors_measure_finely():
    (distortion, *_) = verify(head_dims=(64,), bits=(3,), vectors=4096).checks
    assert distortion.passed
    assert distortion.standard_error < 0.005 * distortion.measured


@pytest.mark.parametrize(
    ("measured", "error", "relation", "target", "passes"),
    [
        pytest.param(1.0, 0.1, "equal", 1.39, True, id="equal within 4 errors"),
        pytest.param(1.0, 0.1, "equal", 1.41, False, id="equal, 4.1 errors below"),
        pytest.param(1.0, 0.1, "equal", 0.59, False, id="equal, 4.1 errors above"),
        pytest.param(1.0, 0.1, "at most", 0.61, True, id="at most, within 4 errors"),
        pytest.param(1.0, 0.1, "at most", 0.59, False, id="at most, 4.1 errors above"),
        pytest.param(1.0, 0.1, "at least", 9.0, False, id="at least, far below"),
        pytest.param(1.0, 0.1, "at least", 0.5, True, id="at least, above"),
        pytest.param(4.25, 0.0, "equal", 4.25, True, id="exact and equal"),
        pytest.param(4.25, 0.0, "equal", 4.26, False, id="exact and off"),
        pytest.param(4.25, 0.0, "at most", 4.26, True, id="exact and below"),
    ],
)
def test_criterion(measured, error, relation, target, passes):
    assert check(measured, error, relation, target).passed is passes


def test_one_failure_fails_the_report():
    good, bad = check(1.0, 0.1, "equal", 1.0), check(1.0, 0.1, "equal", 2.0)
    assert VerifyReport((good, good)).passed
    report = VerifyReport((good, bad))
    assert not report.passed
    assert "FAIL" in str(report)
    assert "2 checks, 1 failed" in str(report)


def break_codecs(monkeypatch, **changes):
    """Let the experiments on mse and prod run with other settings than those that are claimed."""

    def broken(build):
        def wrapped(config, *args):
            return build(config if config.key_codec == "polar" else config.replace(**changes), *args)

        return wrapped

    for name in ("build_key_codec", "build_value_codec"):
        monkeypatch.setattr(module, name, broken(getattr(module, name)))


def test_mse_keys_do_not_pass_for_unbiased(monkeypatch):
    break_codecs(monkeypatch, key_codec="mse")
    report = verify(head_dims=(64,), bits=(2,), vectors=1024)
    bias = named(report, "prod, gaussian S: bias")
    assert not bias.passed
    # what mse loses of <x, x> is its distortion
    assert bias.measured == pytest.approx(-0.1145, rel=0.03)


def test_one_projection_does_not_pass_for_the_other(monkeypatch):
    break_codecs(monkeypatch, projection="orthogonal")
    report = verify(head_dims=(64,), bits=(3,), vectors=1024)
    assert not named(report, "prod, gaussian S: head_dim x variance").passed


def test_a_bit_less_does_not_pass(monkeypatch):
    break_codecs(monkeypatch, value_bits=2)
    report = verify(head_dims=(64,), bits=(3,), vectors=1024)
    distortion, size = named(report, "mse: distortion"), named(report, "mse: bits per value")
    assert [claim.source for claim in distortion.claims if not distortion.holds(claim)] == [
        "its codebook",
        "table: 0.03",
        "Theorem 1",
    ]
    assert not size.passed


def test_another_codebook_does_not_pass(monkeypatch):
    load = module.load_codebook
    monkeypatch.setattr(
        module, "load_codebook", lambda *args: dataclasses.replace(load(*args), mse=load(*args).mse * 1.03)
    )
    report = verify(head_dims=(64,), bits=(2,), vectors=8192)
    assert not named(report, "mse: distortion").passed


def test_polar_distortion_of_one_level_is_that_of_a_circle():
    codes = (torch.arange(16) + 0.5) * (2 * math.pi / 16)
    half_cell = math.pi / 16
    expected = 2 - 2 * math.sin(half_cell) / half_cell
    assert expected_polar_distortion([codes]) == pytest.approx(expected, rel=1e-6)


def test_seeds_draw_different_vectors():
    first, second = (verify(head_dims=(64,), bits=(1,), vectors=1024, seed=seed).checks[0] for seed in (0, 1))
    assert first.passed
    assert second.passed
    assert first.measured != second.measured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"vectors": 1000}, "vectors must be a multiple of 128, .*got 1000", id="odd count"),
        pytest.param({"vectors": 128}, "at least 1024, got 128", id="few vectors"),
        pytest.param({"bits": (5,)}, r"bits must be among \(1, 2, 3, 4\).*got 5", id="bits"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        verify(head_dims=(64,), **arguments)


@pytest.mark.gpu
def test_theorems_hold_on_the_gpu():
    report = verify(head_dims=(64, 128), vectors=4096, device="cuda")
    assert report.passed, str(report)
