"""Training the target on several ranks: what they save, and what a killed run goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.zoo.test_pair import TINY, TOKENIZER, data_of
from zoo import models, train
from zoo.corpus import DOMAINS
from zoo.optimizer import SharedOptimizer
from zoo.registry import load_prompts


def test_ranks_save_at_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfTwo(SharedOptimizer):
        """The other rank is due to save at the first step, and the time is over at the third."""

        steps = 0

        def average(self, extra: Tensor) -> Tensor:
            OfTwo.steps += 1
            return torch.tensor([OfTwo.steps / 3, float(extra[1]), 0.5 * (OfTwo.steps == 1)])

    saved: list[int] = []
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    monkeypatch.setattr(train, "SharedOptimizer", OfTwo)
    monkeypatch.setattr(train, "_save", lambda path, model, optimizer, seconds, step: saved.append(step))
    monkeypatch.setattr(train, "held_out_loss", lambda model, tokens: {})
    data_of([prompt for domain in DOMAINS for prompt in load_prompts(domain)[:2]], tmp_path)
    train.run(train.Plan("tiny", tmp_path, tmp_path / "out", 10.0, ranks=1, rows=1, length=32))
    assert saved == [1, 3]


def test_a_run_killed_between_two_ranks_files_goes_on_with_the_weights_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    for rank, step in ((0, 20), (1, 10)):
        model = models.build("tiny", TOKENIZER, seed=rank)
        optimizer = SharedOptimizer(model, 1e-3, 1e-3)
        train._save(tmp_path / f"checkpoint-{rank}.pt", model, optimizer, 60.0 * step, step)
    for rank in (0, 1):
        model = models.build("tiny", TOKENIZER, seed=7)
        assert train._resume(tmp_path, rank, model, SharedOptimizer(model, 1e-3, 1e-3)) == (1200.0, 20)
        wanted = models.build("tiny", TOKENIZER, seed=0).state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_a_killed_run_goes_on_with_another_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two steps a half of the parameters: what it remembers of them is not one process's own."""
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    model = models.build("tiny", TOKENIZER)
    with monkeypatch.context() as of_two:
        of_two.setattr(dist, "is_initialized", lambda: True)
        of_two.setattr(dist, "get_rank", lambda: 0)
        of_two.setattr(dist, "get_world_size", lambda: 2)
        train._save(tmp_path / "checkpoint-0.pt", model, SharedOptimizer(model, 1e-3, 1e-3), 60.0, 20)
    again = models.build("tiny", TOKENIZER, seed=7)
    assert train._resume(tmp_path, 0, again, SharedOptimizer(again, 1e-3, 1e-3)) == (60.0, 20)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
