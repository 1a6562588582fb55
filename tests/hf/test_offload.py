"""Offloading, with the CPU playing both devices: what moves when, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_turboquant import TurboQuantCache
from hf_turboquant.offload import OffloadSchedule
from tests.helpers import EXACT, random_ids, random_kv, tiny_model

NO_WINDOW = EXACT.replace(residual_window=0)
ELSEWHERE = torch.device("cuda")


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the schedule take the CPU for a device that layers leave."""
    before_update = OffloadSchedule.before_update
    monkeypatch.setattr(OffloadSchedule, "before_update", lambda self, index, _: before_update(self, index, ELSEWHERE))


class Recorder:
    device = torch.device("cpu")

    def __init__(self, log: list[str], index: int) -> None:
        self.log, self.index = log, index

    def offload(self) -> None:
        self.log.append(f"away {self.index}")

    def prefetch(self) -> None:
        self.log.append(f"back {self.index}")


def test_a_layer_leaves_when_the_next_one_updates_and_comes_back_one_ahead() -> None:
    log: list[str] = []
    schedule = OffloadSchedule([(index, Recorder(log, index)) for index in (0, 2, 5)])
    steps = []
    for index in (0, 1, 2, 5, 0):
        log.clear()
        schedule.before_update(index, ELSEWHERE)
        steps.append(list(log))
    assert steps == [
        ["back 0", "back 2"],
        [],
        ["back 2", "away 0", "back 5"],
        ["back 5", "away 2", "back 0"],
        ["back 0", "away 5", "back 2"],
    ]


def test_nothing_moves_on_a_machine_with_a_cpu_alone() -> None:
    cache = TurboQuantCache(tiny_model("llama").config, NO_WINDOW, offloading=True)
    for layer in (0, 1, 0, 1):
        cache.update(*random_kv(1, 2, 300, 16), layer)
    assert not any(layer._offloaded.away for layer in cache.layers)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "prompt-lookup": {"prompt_lookup_num_tokens": 4, "eos_token_id": 98},
    "chunked-prefill": {"prefill_chunk_size": 100},
}


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize("mode", sorted(MODES))
def test_offloaded_layers_give_the_same_tokens(mode: str) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    ids = random_ids(1, 60).repeat(1, 7)
    options = {"max_new_tokens": 14, "do_sample": False, "attention_mask": torch.ones_like(ids), **MODES[mode]}
    cache = TurboQuantCache(model.config, NO_WINDOW, offloading=True)
    with torch.no_grad():
        want = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
        got = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(want, got)
    assert [layer._offloaded.away for layer in cache.layers] == [False, True, False]
    assert cache.path_report().materialized_calls == 0


@pytest.mark.usefixtures("moving")
def test_only_new_blocks_are_copied_to_the_cpu() -> None:
    cache = TurboQuantCache(tiny_model("llama", num_hidden_layers=3).config, NO_WINDOW, offloading=True)
    for layer in (0, 1, 2):
        cache.update(*random_kv(1, 2, 1000, 16), layer)
    middle = cache.layers[1]._offloaded
    assert (middle.away, middle.valid_blocks) == (True, 7)
    copy = middle.copies[0]
    for layer in (0, 1):
        cache.update(*random_kv(1, 2, 1, 16, seed=1), layer)
    assert not middle.away
    copy[0] += 1  # a mark that copying the block again would wipe out
    marked = copy[0].clone()
    cache.update(*random_kv(1, 2, 1, 16, seed=1), 2)
    assert middle.away
    assert middle.copies[0] is copy
    assert torch.equal(copy[0], marked)


@pytest.mark.usefixtures("moving")
def test_blocks_changed_while_away_or_back_are_not_taken_from_an_old_copy() -> None:
    caches = [TurboQuantCache(tiny_model("llama").config, NO_WINDOW, offloading=moves) for moves in (True, False)]
    for cache in caches:
        for layer in (0, 1):
            cache.update(*random_kv(2, 2, 700, 16, seed=layer), layer)
        cache.crop(-200)
        cache.reorder_cache(torch.tensor([1, 0]))
        for step in range(4):
            for layer in (0, 1):
                cache.update(*random_kv(2, 2, 90, 16, seed=step), layer)
            cache.crop(-40)
            cache.batch_select_indices(torch.tensor([1, 0]))
    for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(mine.keys.materialize(), theirs.keys.materialize())
        assert torch.equal(mine.values.materialize(), theirs.values.materialize())


@pytest.mark.gpu
def test_offloaded_blocks_are_in_pinned_cpu_memory() -> None:
    model = tiny_model("llama", num_hidden_layers=4).cuda()
    ids = random_ids(2, 900).cuda()
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 2}
    outputs = []
    for offloading in (False, True):
        cache = TurboQuantCache(model.config, "k4v4", offloading=offloading)
        with torch.no_grad():
            outputs.append(model.generate(ids, past_key_values=cache, **options))
    assert torch.equal(*outputs)
    away = [layer for layer in cache.layers if layer._offloaded.away]
    assert len(away) >= 2
    assert all(arena.is_pinned() and not arena.is_cuda for layer in away for arena in layer.store.arenas)
    cache.batch_select_indices(torch.tensor([0, 3, 2], device="cuda"))
    with torch.no_grad():
        assert torch.isfinite(model(ids[:1].repeat(3, 1)[:, :5], past_key_values=cache).logits).all()
