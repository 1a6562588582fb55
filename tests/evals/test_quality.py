"""The quality harness sees what it should: nothing for a dense cache, more damage with fewer bits."""

from __future__ import annotations

import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from evals import quality, quality_report
from evals.baseline_codecs import integer, nvfp4, symmetric_integer
from evals.baselines import BASELINES, installed_quantized, make_cache
from evals.baselines import held as bytes_of
from evals.common import EXCERPT, cache_argument, fill_cache, parse_settings, prefill
from evals.plots import Point, pareto_front, plot_pareto
from evals.quality import Job, Protocol, Window, cut_windows, decode, read_text
from evals.quality_report import by_cache, paired_difference, summarize
from hf_turboquant import TurboQuantCache
from tests.helpers import random_ids, random_kv, tiny_model

PLAIN = "k4v4:key_centering=none,key_split=none,guard=off"
SHORT = Protocol(prefill=516, decode=64, block=32, windows=1)


@pytest.fixture(scope="module")
def window(smollm):
    """Return one short window on the real model: at its end three blocks of 128 tokens are quantized."""
    model, tokenizer = smollm
    ids = tokenizer(read_text(EXCERPT), add_special_tokens=False, verbose=False).input_ids
    (cut,) = cut_windows(ids, SHORT)
    return Window(model, cut, SHORT)


@pytest.fixture(scope="module")
def mean_kl(window):
    """Return a function from a cache to its mean KL, computed once each."""
    known = {}

    def measure(spec):
        if spec not in known:
            known[spec] = float(window.score(make_cache(window.model, spec)).kl.mean())
        return known[spec]

    return measure


# controls


def test_dense_cache_shows_nothing(window):
    scores = window.score(make_cache(window.model, "dynamic"))
    assert scores.kl.abs().max() < 1e-5
    assert abs(float(scores.kl.mean())) < 1e-6
    assert scores.agrees.all()
    assert torch.allclose(scores.nll, scores.reference_nll, atol=1e-3)


def test_exact_codec_shows_nothing(mean_kl):
    assert abs(mean_kl("k4v4:key_bits=16,value_bits=16")) < 1e-6


def test_damage_grows_as_bits_shrink(mean_kl):
    plain = [mean_kl(f"{PLAIN},key_bits={bits},value_bits={bits}") for bits in (8, 4, 2)]
    assert plain == sorted(plain)
    assert plain[-1] > 10 * plain[1]


def test_plain_two_bits_lose_to_the_preset(mean_kl):
    assert mean_kl(f"{PLAIN},key_bits=2,value_bits=2") > 1.5 * mean_kl("k2v2")


def test_lost_keys_are_noticed(window):
    class Zeroed(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            values = torch.zeros_like(values)
            return super().update(keys, values, layer_idx, *args, **kwargs)

    scores = window.score(Zeroed())
    assert scores.kl.mean() > 1
    assert scores.agrees.float().mean() < 0.5


def test_one_forward_pass_is_blind():
    """The trap: a pass over prompt and text together never reads the cache, and 2 bits look perfect."""
    model, ids = tiny_model("llama"), torch.randint(2, 97, (1, SHORT.prefill + SHORT.decode + 1))
    with torch.inference_mode():
        dense, coarse = (
            model(ids, logits_to_keep=SHORT.decode, **cache_argument(model, make_cache(model, spec))).logits
            for spec in ("dynamic", "k2v2")
        )
    assert torch.equal(dense, coarse)
    assert Window(model, ids, SHORT).score(make_cache(model, "k2v2")).kl.mean() > 1e-6


def test_filled_cache_is_that_of_a_forward_pass():
    model, ids = tiny_model("llama"), torch.randint(2, 97, (1, SHORT.prefill + SHORT.decode + 1))
    filled, run = make_cache(model, "k2v2"), make_cache(model, "k2v2")
    with torch.inference_mode():
        prompt = prefill(model, ids[:, : SHORT.prefill])
        fill_cache(filled, prompt)
        model(ids[:, : SHORT.prefill], logits_to_keep=1, **cache_argument(model, run))
        (_, one), (_, other) = (next(iter(decode(model, ids, cache, SHORT))) for cache in (filled, run))
    assert torch.equal(one, other)


@pytest.mark.parametrize("spec", ["dynamic", "k2v2", "kivi2"])
def test_filling_leaves_the_prompt_alone(spec):
    model, ids = tiny_model("llama", head_dim=64), torch.randint(2, 97, (1, 360))
    window = Window(model, ids, Protocol(prefill=300, decode=59, block=32))
    before = window.prompt.layers[0].keys.clone()
    window.score(make_cache(model, spec))
    assert torch.equal(window.prompt.layers[0].keys, before)


def test_blocks_give_what_single_tokens_give():
    """516 = 4 sinks + 4 blocks: no block leaves the window between the tokens of a step."""
    model, ids = tiny_model("llama"), torch.randint(2, 97, (1, 581))
    results = []
    for block in (1, 16, 64):
        protocol = Protocol(prefill=516, decode=64, block=block, windows=1)
        results.append(Window(model, ids, protocol).score(make_cache(model, "k2v2")).kl)
    for kl in results[1:]:
        assert torch.allclose(kl, results[0], atol=1e-6)
    assert results[0].mean() > 1e-6


# windows


def test_windows_are_disjoint():
    windows = cut_windows(range(100), Protocol(prefill=10, decode=5, windows=3))
    assert [w.shape for w in windows] == [(1, 16)] * 3
    assert [int(w[0, 0]) for w in windows] == [0, 33, 66]
    assert len({int(i) for w in windows for i in w[0]}) == 48


def test_windows_begin_as_the_model_wants():
    windows = cut_windows(range(100), Protocol(prefill=10, decode=5, windows=3), first=[7])
    assert [w.shape for w in windows] == [(1, 16)] * 3
    assert [w[0, :3].tolist() for w in windows] == [[7, 0, 1], [7, 33, 34], [7, 66, 67]]


@pytest.mark.parametrize(("text", "wanted"), [([2], [2]), ([], []), ([1], []), ([2, 1], [2])], ids=str)
def test_first_tokens_are_the_tokenizers(text, wanted):
    def tokenizer(_):
        return SimpleNamespace(input_ids=text)

    tokenizer.bos_token_id = 2
    assert quality.first_tokens(tokenizer) == wanted


def test_model_is_called_by_its_directory(tmp_path):
    (tmp_path / "gemma").mkdir()
    assert quality.model_label(str(tmp_path / "gemma")) == "gemma"
    assert quality.model_label("org/name") == "org/name"
    assert quality.model_label(None) == quality_report.MODELS[0]


def test_short_text_is_refused():
    with pytest.raises(ValueError, match="3 windows need 48 tokens of text, got 47"):
        cut_windows(range(47), Protocol(prefill=10, decode=5, windows=3))


def test_hard_line_breaks_are_joined(tmp_path):
    path = tmp_path / "text"
    path.write_text("one\ntwo\n\n\nthree\nfour")
    assert read_text(path) == "one two\n\nthree four"


# baselines


def test_integers_keep_what_is_on_their_grid():
    grid = torch.arange(16.0).repeat(4, 2).view(1, 1, 4, 32)
    assert torch.equal(integer(grid, 4, 32, -1), grid)
    assert torch.equal(integer(grid.transpose(-1, -2).contiguous(), 4, 32, -2), grid.transpose(-1, -2))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_integer_error_is_half_a_step(bits):
    vectors = torch.randn(1, 2, 128, 64)
    error = (integer(vectors, bits, 32, -2) - vectors).abs().unflatten(-2, (4, 32)).amax(-2)
    grouped = vectors.unflatten(-2, (4, 32))
    step = (grouped.amax(-2) - grouped.amin(-2)) / (2**bits - 1)
    # scale and offset are rounded to float16
    assert (error <= step * 0.502 + 0.003).all()


def test_channel_groups_serve_uneven_channels():
    keys = torch.randn(1, 1, 128, 64) + 10 * torch.randn(64)
    per_channel, per_token = integer(keys, 3, 32, -2), integer(keys, 3, 32, -1)
    assert (per_channel - keys).norm() < 0.5 * (per_token - keys).norm()


def test_nvfp4_keeps_its_own_levels():
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    vectors = torch.cat([levels, -levels]).repeat(4).view(1, 1, 1, 64)
    assert torch.allclose(nvfp4(vectors), vectors, rtol=1e-5)


def test_int8_is_fine():
    vectors = torch.randn(1, 1, 128, 64)
    assert (symmetric_integer(vectors, 8, 32) - vectors).norm() < 0.01 * vectors.norm()


@pytest.mark.parametrize("name", [*BASELINES, "kivi2:sinks=0,window=0"])
def test_baseline_keeps_sinks_and_window_exact(name):
    model = tiny_model("llama", head_dim=64)
    cache = make_cache(model, name)
    base = cache.baseline
    keys, values = random_kv(1, 2, 640, 64)
    cache.update(keys[:, :, :600], values[:, :, :600], 0)
    got = [cache.update(keys[:, :, i : i + 20], values[:, :, i : i + 20], 0) for i in (600, 620)][-1]
    blocks = (640 - base.sinks - base.window) // 128
    for read, given in zip(got, (keys, values), strict=True):
        changed = (read != given).any(-1).all(1)[0].nonzero().flatten().tolist()
        assert changed == list(range(base.sinks, base.sinks + blocks * 128))


def test_baseline_prompt_is_returned_as_it_came():
    cache = make_cache(tiny_model("llama", head_dim=64), "kivi2")
    keys, values = random_kv(1, 2, 600, 64)
    got = cache.update(keys, values, 0)
    assert torch.equal(got[0], keys)
    assert torch.equal(got[1], values)


def test_baselines_refuse_short_sliding_windows():
    with pytest.raises(ValueError, match="sliding windows of at least 512 tokens, got DynamicSlidingWindowLayer"):
        make_cache(tiny_model("gemma3"), "kivi4")


def sliding_model():
    """Return a tiny Gemma 3 whose windows are long enough to be compressed, and its layers that slide."""
    model = tiny_model("gemma3", sliding_window=512, head_dim=64)
    return model, [i for i, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]


def test_baseline_behind_a_sliding_window():
    """The first block begins where the window of the prompt does; later ones follow. There are no sinks."""
    model, sliding = sliding_model()
    cache = make_cache(model, "kivi2")
    keys, values = random_kv(1, 1, 900, 64)
    assert torch.equal(cache.update(keys[:, :, :800], values[:, :, :800], sliding[0])[0], keys[:, :, :800])
    assert cache.get_mask_sizes(100, sliding[0]) == (511 + 100, 289)
    got = cache.update(keys[:, :, 800:], values[:, :, 800:], sliding[0])
    for read, given in zip(got, (keys, values), strict=True):
        changed = (read != given[:, :, 289:]).any(-1).all(1)[0].nonzero().flatten()
        assert changed.tolist() == list(range(3 * 128))


def test_eight_bits_change_little_behind_sliding_windows():
    """The masks of a baseline's sliding layers are right: with wrong ones, even exact codes would change much."""
    model, _ = sliding_model()
    protocol = Protocol(prefill=700, decode=64, block=32)
    window = Window(model, random_ids(1, 765), protocol)
    dense, fine, coarse = (
        float(window.score(make_cache(model, name)).kl.mean()) for name in ("dynamic", "int8", "kivi2")
    )
    assert abs(dense) < 1e-7
    assert fine < 0.05 * coarse


def test_quantized_caches_of_transformers_are_left_out_where_windows_slide():
    assert installed_quantized(sliding_model()[0]) == []
    assert "fp8" in installed_quantized(tiny_model("llama"))


# bits and bytes


@pytest.mark.parametrize(
    ("spec", "key_bits", "value_bits"),
    [
        pytest.param("dynamic", 16, 16, id="dense"),
        pytest.param("kivi3", 4, 4, id="kivi: scale and offset per 32"),
        pytest.param("kivi4-g128", 4.25, 4.5, id="kivi: long groups"),
        pytest.param("nvfp4", 4.5, 4.5, id="nvfp4"),
        pytest.param("k4v4", 4.375, 4.25, id="norm and mean"),
        pytest.param("k4v4:key_centering=none", 4.25, 4.25, id="norm"),
        pytest.param("paper-prod3", 3.5, 3.25, id="two norms"),
    ],
)
def test_bits_are_counted(spec, key_bits, value_bits):
    cache = make_cache(tiny_model("llama", head_dim=64), spec)
    for layer in range(2):
        cache.update(*random_kv(1, 2, 1000, 64), layer)
    holds = bytes_of(cache)
    assert (holds.key_bits, holds.value_bits) == (key_bits, value_bits)
    assert holds.dense_nbytes == 2 * 2 * 2 * 1000 * 64 * 2


def test_channel_orders_are_counted():
    cache = make_cache(tiny_model("llama", head_dim=64), "k3v3:key_split=even,key_centering=none")
    for layer in range(2):
        cache.update(*random_kv(1, 2, 1000, 64), layer)
    # two norms, and an order per layer and head whose share falls with the tokens
    assert 3.5 < bytes_of(cache).key_bits < 3.6


def test_exact_tokens_count_16_bits():
    """What a float32 model holds exactly is counted as a 16-bit model would hold it."""
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = make_cache(tiny_model("llama", head_dim=64), "k4v4")
        assert isinstance(cache, TurboQuantCache)
        for layer in range(2):
            cache.update(*random_kv(1, 2, 1000, 64, dtype=dtype), layer)
        sizes.append((bytes_of(cache).nbytes, bytes_of(cache).dense_nbytes))
    assert sizes[0] == sizes[1]


def test_computed_bytes_of_a_baseline():
    cache = make_cache(tiny_model("llama", head_dim=64), "kivi4")
    for layer in range(2):
        cache.update(*random_kv(1, 2, 4 + 256 + 128, 64), layer)
    holds = bytes_of(cache)
    assert holds.nbytes == 2 * 2 * 2 * 64 * (256 * 5 // 8 + 132 * 2)
    assert not holds.measured


def test_computed_bytes_behind_a_sliding_window():
    """Of 900 tokens the window holds 511: two blocks and 255 exact ones."""
    model, sliding = sliding_model()
    cache = make_cache(model, "kivi4")
    for layer in range(2):
        cache.update(*random_kv(1, 1, 900, 64), layer)
    assert sliding == [0]
    expected = [(256, 255, 511), (768, 132, 900)]
    assert [layer.counts() for layer in cache.layers] == expected
    row = 2 * 64
    assert bytes_of(cache).nbytes == sum(row * (packed * 5 // 8 + exact * 2) for packed, exact, _ in expected)
    assert bytes_of(cache).dense_nbytes == row * 2 * (511 + 900)


@pytest.mark.parametrize("prompt", [300, 511, 512, 900])
def test_windows_of_ours_and_of_baselines_hold_the_same_tokens(prompt):
    model, sliding = sliding_model()
    keys, values = random_kv(1, 1, prompt + 400, 64)
    ours, theirs = make_cache(model, "k4v4"), make_cache(model, "kivi4")
    # ours drops a block when the next tokens come, hence a last one
    for start, stop in ((0, prompt), *((n, n + 20) for n in range(prompt, prompt + 380, 20)), (-1, None)):
        counts = theirs.layers[sliding[0]].counts() if start else None
        for cache in (ours, theirs):
            cache.update(keys[:, :, start:stop], values[:, :, start:stop], sliding[0])
    store = ours.layers[sliding[0]].store
    packed, exact, _ = counts
    assert (store.packed_tokens, store.seq_len - store.packed_tokens - 1) == (packed, exact)


def test_fp8_is_8_bits(smollm, window):
    cache = make_cache(smollm[0], "fp8")
    fill_cache(cache, window.prompt)
    assert bytes_of(cache).bits == pytest.approx(8, abs=0.01)


def test_settings_of_a_spec():
    assert parse_settings("seed=1,scale=norm,x=0.5") == {"seed": 1, "scale": "norm", "x": 0.5}
    assert parse_settings("") == {}


# statistics


def record(cache="a", window=0, kl=(0.0,), **fields):
    values = {
        "cache": cache,
        "window": window,
        "positions": len(kl),
        "kl_mean": statistics.fmean(kl),
        "kl_micronats": [round(v * 1e6) for v in kl],
        "disagrees_at": [],
        "nll_sum": 2.0 * len(kl),
        "nll_sum_reference": 1.0 * len(kl),
        "key_bits": 4.0,
        "value_bits": 2.0,
        "nbytes": 10,
        "dense_nbytes": 40,
        "bytes_measured": True,
    }
    return {**values, **fields}


def test_summary():
    kl = [0.001] * 32 + [0.003] * 32
    s = summarize([record(kl=kl, disagrees_at=[1, 2]), record(kl=kl, window=1)])
    assert s.positions == 128
    assert s.kl == pytest.approx(0.002)
    # four runs of 32: .001 .003 .001 .003
    assert s.kl_se == pytest.approx(statistics.stdev([1, 3, 1, 3]) * 1e-3 / 2)
    assert s.top1 == 126 / 128
    assert s.bits == 3
    assert s.ratio == 4
    assert s.ppl == pytest.approx(math.e**2)


def test_paired_difference_cancels_what_is_common():
    noise = [0.01 * (i % 37) for i in range(128)]
    one, other = [record(kl=[n + 0.5 for n in noise])], [record(kl=noise)]
    difference, error = paired_difference(one, other)
    assert difference == pytest.approx(0.5)
    assert error == pytest.approx(0, abs=1e-6)


def test_records_are_paired_by_window():
    one = [record(window=0, kl=[1.0] * 64), record(window=1, kl=[2.0] * 64)]
    assert paired_difference(one, one[::-1])[0] == 0
    assert paired_difference(one, one[1:])[0] == 0


# runs


@pytest.fixture
def small(tmp_path):
    """Return a tiny model, two windows of random tokens, and a job."""
    protocol = Protocol(prefill=300, decode=32, block=16, windows=2)
    windows = cut_windows(torch.randint(2, 97, (1000,)).tolist(), protocol)
    return tiny_model("llama"), windows, Job("tiny", "float32", "random", "0", protocol, tmp_path / "q.jsonl")


def test_records_hold_what_they_depend_on(small):
    model, windows, job = small
    quality.run(job, model, windows, ["k4v4:seed=3"])
    first, second = job.records()
    assert (first["window"], second["window"]) == (0, 1)
    assert first["settings"]["seed"] == 3
    assert first["protocol"]["prefill"] == 300
    assert {"commit", "versions", "machine", "date"} <= set(first)
    assert len(first["kl_micronats"]) == first["positions"] == 32


def test_resume_measures_only_what_is_missing(small, monkeypatch):
    model, windows, job = small
    quality.run(job, model, windows, ["dynamic", "k4v4"])
    # an interrupted run: the last record is gone
    job.path.write_text("".join(line + "\n" for line in job.path.read_text().splitlines()[:-1]))
    measured = []
    real = quality.measure
    monkeypatch.setattr(quality, "measure", lambda w, i, spec: measured.append((spec, i)) or real(w, i, spec))
    quality.run(job, model, windows, ["dynamic", "k4v4"])
    assert measured == [("k4v4", 1)]
    quality.run(job, model, windows, ["k4v4"], fresh=True)
    assert measured[1:] == [("k4v4", 0), ("k4v4", 1)]
    assert {name: len(group) for name, group in by_cache(job.records()).items()} == {"dynamic": 2, "k4v4": 2}


def test_a_name_that_means_other_settings_is_measured_again(small):
    model, windows, job = small
    quality.run(job, model, windows, ["k4v4", "k2v2"])
    old = [json.loads(line) for line in job.path.read_text().splitlines()]
    changed = [{**r, "settings": {**r["settings"], "seed": 9}} if r["cache"] == "k4v4" else r for r in old]
    job.path.write_text("".join(json.dumps(r) + "\n" for r in changed))
    quality.run(job, model, windows, ["k4v4", "k2v2"])
    assert {name: len(group) for name, group in by_cache(job.records()).items()} == {"k4v4": 2, "k2v2": 2}
    assert all(record["settings"]["seed"] == 0 for record in job.records())


def test_other_protocols_are_left_alone(small):
    model, windows, job = small
    job.path.write_text(json.dumps({"cache": "dynamic", "window": 0, "settings": None, "model": "another"}) + "\n")
    quality.run(job, model, windows, ["dynamic"])
    assert len(job.records()) == 2
    assert len(job.path.read_text().splitlines()) == 3


def test_same_seed_same_numbers(small):
    model, windows, job = small
    window = Window(model, windows[0], job.protocol)
    one, other = (window.score(make_cache(model, "k2v2")).kl for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, window.score(make_cache(model, "k2v2:seed=1")).kl)


# plot


def test_front_holds_what_no_other_beats():
    points = [Point(name, "KIVI", bits, loss, 0.0) for name, bits, loss in
              (("a", 2, 0.5), ("b", 3, 0.1), ("worse", 4, 0.2), ("c", 5, 0.01), ("same bits", 5, 0.02))]  # fmt: skip
    assert [p.name for p in pareto_front(points)] == ["a", "b", "c"]


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    plot_pareto([Point("k2v2", "hf_turboquant", 2.4, 0.02, 0.001)], tmp_path / "new" / "p.png", "title")
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")


# document


@pytest.mark.parametrize("marker", sorted(quality_report.sections()))
def test_document_is_made_from_the_results(marker):
    made = quality_report.sections()[marker]
    assert made.count("\n") > 3
    assert f"<!-- {marker}:begin -->\n{made}\n<!-- {marker}:end -->" in quality_report.DOCUMENT.read_text(
        encoding="utf-8"
    )


def test_document_holds_every_model():
    markers = quality_report.sections()
    assert {"quality-targets", "quality-ablations"} < set(markers)
    for model in quality_report.MODELS:
        assert f"quality-table{quality_report.suffix(model)}" in markers
        assert f"needle-table{quality_report.suffix(model)}" in markers
        assert quality_report.DOCUMENT.with_name(f"quality{quality_report.suffix(model)}.png").exists()
