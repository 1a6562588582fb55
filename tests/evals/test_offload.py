"""The offload benchmark runs on a tiny model, and its rows say what it found."""

from __future__ import annotations

from evals import offload
from evals.common import read_results


def test_rows_of_a_tiny_model(tmp_path):
    path = tmp_path / "offload.jsonl"
    offload.main(["--tiny", "--lengths", "400", "--cache", "k4v4", "--out", str(path)])
    here, away = read_results(path)
    assert (here["offloading"], away["offloading"]) == (False, True)
    assert away["same_tokens"] is True
    assert here["held_bytes"] == away["held_bytes"] > 0
    assert here["ms_per_token"]["p50"] > 0
