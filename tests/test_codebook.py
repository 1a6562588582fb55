"""Lookup, validation and optimality of codebooks."""

import dataclasses
import json
import math
import stat
import warnings
from pathlib import Path

import pytest
import torch

from hf_turboquant import codebook as module
from hf_turboquant.codebook import (
    PACKAGED_BITS,
    PACKAGED_HEAD_DIMS,
    codebook_name,
    load_codebook,
    solve_codebook_json,
    write_codebooks,
)
from hf_turboquant.errors import CodebookError

DIRECTORY = Path(__file__).parent.parent / "codebooks"
FILES = sorted(DIRECTORY.glob("*.json"))
NOT_PACKAGED = 68


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    """Give each test an empty user cache and an empty memory."""
    monkeypatch.setenv("HF_TURBOQUANT_CACHE", str(tmp_path / "cache"))
    module._load_known.cache_clear()
    yield tmp_path / "cache" / "codebooks"
    module._load_known.cache_clear()


# packaged files


def test_every_promised_file_is_there_and_no_other():
    assert [path.name for path in FILES] == sorted(
        codebook_name(d, b) for d in PACKAGED_HEAD_DIMS for b in PACKAGED_BITS
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_packaged_file_is_optimal(path):
    fields = json.loads(path.read_text())
    load_codebook(fields["head_dim"], fields["bits"], path=path).verify()


def test_packaged_files_are_regenerated_byte_for_byte(tmp_path):
    written = write_codebooks(tmp_path / "new")
    assert {path.name: path.read_bytes() for path in written} == {path.name: path.read_bytes() for path in FILES}


def test_distortion_is_that_of_random_unit_vectors():
    vectors = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(0))
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    for bits in (1, 2, 3, 4, 8):
        book = load_codebook(128, bits)
        levels = book.centroids[torch.bucketize(unit, book.boundaries)]
        # 2.5 million coordinates: the mean is good to 0.2 %
        assert float((unit - levels).square().mean()) == pytest.approx(book.mse, rel=0.005)


# tables


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [32, 80, 128, 576])
def test_tables_are_float32_and_antisymmetric(head_dim, bits):
    book = load_codebook(head_dim, bits)
    assert (book.head_dim, book.bits) == (head_dim, bits)
    assert book.centroids.dtype == book.boundaries.dtype == torch.float32
    assert book.centroids.shape == (2**bits,)
    assert book.boundaries.shape == (2**bits - 1,)
    assert torch.equal(book.centroids, -book.centroids.flip(0))
    assert (book.centroids.diff() > 0).all()
    assert book.boundaries[2 ** (bits - 1) - 1] == 0


def test_eight_bit_codes_decode_by_arithmetic():
    book = load_codebook(128, 8)
    assert book.is_uniform
    step = book.centroids[128] - book.centroids[127]
    assert torch.equal(step * (torch.arange(256) - 127.5), book.centroids)


def test_tables_made_under_inference_mode_can_be_used_in_autograd():
    with torch.inference_mode():
        book = load_codebook(64, 2)
    weight = torch.ones(4, requires_grad=True)
    (weight * book.centroids).sum().backward()
    assert torch.equal(weight.grad, book.centroids)


def test_default_device_does_not_move_the_tables():
    with torch.device("meta"):
        book = load_codebook(64, 2)
        book.verify()
    assert book.centroids.device.type == "cpu"


# lookup


def test_memory_comes_first():
    assert load_codebook(128, 4) is load_codebook(128, 4)


def test_packaged_comes_before_solving(cache_dir):
    assert load_codebook(128, 4).source == str(DIRECTORY / "lloyd_max_d128_b4.json")
    assert not cache_dir.exists()


def test_solved_codebook_is_kept_and_found_again(cache_dir):
    solved = load_codebook(NOT_PACKAGED, 3)
    assert solved.source == "solved"
    solved.verify()
    assert [path.name for path in cache_dir.iterdir()] == ["lloyd_max_d68_b3.json"]
    module._load_known.cache_clear()
    found = load_codebook(NOT_PACKAGED, 3)
    assert found.source == str(cache_dir / "lloyd_max_d68_b3.json")
    assert torch.equal(found.centroids, solved.centroids)
    assert torch.equal(found.boundaries, solved.boundaries)
    assert found.mse == solved.mse


def test_xdg_directory_is_used_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TURBOQUANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_codebook(NOT_PACKAGED, 1)
    assert (tmp_path / "xdg" / "hf_turboquant" / "codebooks" / "lloyd_max_d68_b1.json").is_file()


def test_directory_that_cannot_be_written_warns_once_and_solves(tmp_path, monkeypatch):
    # a file where the directory should be: no user, not even root, can write below it
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    monkeypatch.setenv("HF_TURBOQUANT_CACHE", str(blocker))
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for bits in (1, 2, 3):
            load_codebook(NOT_PACKAGED, bits).verify()
    messages = [str(warning.message) for warning in caught if "codebooks" in str(warning.message)]
    assert len(messages) == 1
    assert str(blocker) in messages[0]
    assert "HF_TURBOQUANT_CACHE" in messages[0]


def test_kept_file_is_readable_by_others_and_leaves_no_temporary(cache_dir):
    load_codebook(NOT_PACKAGED, 2)
    (file,) = cache_dir.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_path_may_be_a_file_or_a_directory():
    by_directory = load_codebook(128, 4, path=DIRECTORY)
    by_file = load_codebook(128, 4, path=str(DIRECTORY / "lloyd_max_d128_b4.json"))
    assert torch.equal(by_directory.centroids, by_file.centroids)


def test_large_head_dim_needs_a_path(tmp_path):
    with pytest.raises(CodebookError, match=r"head_dim must be at most 576 .* without a codebook path, got 640"):
        load_codebook(640, 2)
    (path,) = write_codebooks(tmp_path, (640,), (2,))
    load_codebook(640, 2, path=path).verify()


@pytest.mark.parametrize(
    ("head_dim", "bits", "match"),
    [
        pytest.param(3, 2, "head_dim", id="head_dim-3"),
        pytest.param(64.0, 2, "head_dim", id="head_dim-float"),
        pytest.param(64, 0, "bits", id="bits-0"),
        pytest.param(64, 9, "bits", id="bits-9"),
        pytest.param(64, True, "bits", id="bits-bool"),
    ],
)
def test_arguments_out_of_range_are_named(head_dim, bits, match):
    with pytest.raises(CodebookError, match=match):
        load_codebook(head_dim, bits)


# corrupt files


def corrupt(**changes):
    fields = json.loads(solve_codebook_json(64, 2))
    fields.update(changes)
    return json.dumps({key: value for key, value in fields.items() if value is not None})


CENTROIDS = json.loads(solve_codebook_json(64, 2))["centroids"]
BOUNDARIES = json.loads(solve_codebook_json(64, 2))["boundaries"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        pytest.param("{", "is not JSON", id="truncated"),
        pytest.param("", "is not JSON", id="empty"),
        pytest.param("[]", "JSON object", id="list"),
        pytest.param(corrupt(schema="other/1"), "schema", id="schema"),
        pytest.param(corrupt(schema=None), "schema", id="schema-missing"),
        pytest.param(corrupt(density="gauss"), "density", id="density"),
        pytest.param(corrupt(head_dim=128), "head_dim", id="head_dim"),
        pytest.param(corrupt(bits=3), "bits", id="bits"),
        pytest.param(corrupt(centroids=CENTROIDS[:3]), "4 centroids", id="centroid-missing"),
        pytest.param(corrupt(centroids=None), "4 centroids", id="no-centroids"),
        pytest.param(corrupt(centroids=CENTROIDS[::-1]), "ascending", id="descending"),
        pytest.param(corrupt(centroids=[-1, -1, 1, 1]), "ascending", id="repeated"),
        pytest.param(corrupt(centroids=[*CENTROIDS[:3], CENTROIDS[3] + 1e-9]), "symmetric", id="asymmetric"),
        pytest.param(corrupt(centroids=[*CENTROIDS[:3], "x"]), "finite numbers", id="text"),
        pytest.param(corrupt(centroids=[*CENTROIDS[:3], math.inf]), "finite numbers", id="infinite"),
        pytest.param(corrupt(boundaries=[BOUNDARIES[0], 1e-9, BOUNDARIES[2]]), "midway", id="not-midpoints"),
        pytest.param(corrupt(boundaries=[0.0]), "3 boundaries", id="boundary-missing"),
        pytest.param(corrupt(mse=None), "mse", id="no-mse"),
        pytest.param(corrupt(mse=-1.0), "mse", id="negative-mse"),
        pytest.param(corrupt(mse=1.0), "mse", id="mse-above-variance"),
    ],
)
def test_corrupt_file_is_named_with_the_remedy(tmp_path, text, match):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(CodebookError, match=match) as caught:
        load_codebook(64, 2, path=path)
    assert str(path) in str(caught.value)
    assert "delete it" in str(caught.value)


def test_file_that_is_not_text_is_corrupt(tmp_path):
    path = tmp_path / "broken.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(CodebookError, match="is not JSON"):
        load_codebook(64, 2, path=path)


def test_corrupt_file_of_the_user_cache_is_not_passed_over(cache_dir):
    load_codebook(NOT_PACKAGED, 2)
    module._load_known.cache_clear()
    (file,) = cache_dir.iterdir()
    file.write_text(file.read_text()[:100])
    with pytest.raises(CodebookError, match="is not JSON") as caught:
        load_codebook(NOT_PACKAGED, 2)
    assert str(file) in str(caught.value)


def test_missing_path_says_how_to_make_one(tmp_path):
    with pytest.raises(CodebookError, match=r"write_codebooks\(\)"):
        load_codebook(64, 2, path=tmp_path / "none.json")
    with pytest.raises(CodebookError, match=r"lloyd_max_d64_b2\.json"):
        load_codebook(64, 2, path=tmp_path)


# verify


@pytest.mark.parametrize(
    ("bits", "factor", "match"),
    [
        pytest.param(3, 1.0001, "conditional means", id="scaled-1e-4"),
        pytest.param(8, 1.02, "least distortion", id="uniform-step-2-percent-wide"),
        pytest.param(8, 0.98, "least distortion", id="uniform-step-2-percent-narrow"),
    ],
)
def test_verify_finds_a_table_that_is_not_optimal(bits, factor, match):
    book = load_codebook(64, bits)
    scaled = dataclasses.replace(book, centroids=book.centroids * factor, boundaries=book.boundaries * factor)
    with pytest.raises(CodebookError, match=match):
        scaled.verify()


def test_verify_finds_the_codebook_of_another_head_dim():
    with pytest.raises(CodebookError, match="conditional means"):
        dataclasses.replace(load_codebook(64, 2), head_dim=65).verify()


def test_verify_finds_moved_boundaries_and_wrong_distortion():
    book = load_codebook(64, 2)
    with pytest.raises(CodebookError, match="midpoints"):
        dataclasses.replace(book, boundaries=book.boundaries + 1e-5).verify()
    with pytest.raises(CodebookError, match="mse is the distortion"):
        dataclasses.replace(book, mse=book.mse * 1.001).verify()
    # a NaN is never within tolerance
    with pytest.raises(CodebookError, match="midpoints"):
        dataclasses.replace(book, centroids=book.centroids * math.nan).verify()


def test_verify_finds_a_grid_that_is_not_uniform():
    book = load_codebook(64, 8)
    bent = book.centroids * (1 + 0.01 * book.centroids.abs())
    with pytest.raises(CodebookError, match="equally spaced"):
        dataclasses.replace(book, centroids=bent, boundaries=(bent[1:] + bent[:-1]) / 2).verify()
