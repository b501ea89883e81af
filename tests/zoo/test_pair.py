"""`flotilla zoo pair`: its optimizer, its loop, batches of several lengths, and a tiny run of all of it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.emulated_cuda import IS_NEEDED, emulated_cuda
from zoo import distill, generate, guarded, models, pair, prepare, score
from zoo.agreement import greedy_continuations, prompt_ids
from zoo.corpus import DOMAINS
from zoo.dataset import Tokens
from zoo.muon import StackedMuon
from zoo.prefetch import prefetched
from zoo.registry import LARGER_DRAFTER, LARGER_TARGET, TARGET, Prompt, load_prompts, weights_dir
from zoo.tokenizer import load

TOKENIZER = load(weights_dir(TARGET))
TINY = models.Shape(2, 32, 2, 1, 48)


def data_of(prompts: list[Prompt], folder: Path) -> Tokens:
    """Prompts with their references as examples, written as `prepare` writes them."""
    ids: list[int] = []
    answer: list[int] = []
    starts = [0]
    for prompt in prompts:
        asked = prompt_ids(TOKENIZER, prompt)
        told = TOKENIZER(f"{prompt.reference}<|end|>", add_special_tokens=False)["input_ids"]
        ids += [*asked, *told]
        answer += [0] * len(asked) + [1] * len(told)
        starts.append(len(ids))
    tokens = Tokens(
        np.array(ids, np.int16),
        np.array(answer, np.uint8),
        np.array(starts),
        np.array([DOMAINS.index(prompt.domain) for prompt in prompts], np.uint8),
    )
    for name in ("train", "held_out"):
        tokens.save(folder / f"{name}.npz")
    TOKENIZER.save_pretrained(str(folder / "tokenizer"))
    (folder / "prompts.jsonl").touch()
    return tokens


def test_stacked_matrices_step_as_they_do_one_by_one() -> None:
    torch.manual_seed(0)
    shapes = [(16, 16), (8, 16), (40, 16), (16, 40), (16, 16)]
    first = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    second = [nn.Parameter(p.detach().clone()) for p in first]
    alone = torch.optim.Muon(first, lr=0.02, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    stacked = StackedMuon(second, lr=0.02, momentum=0.95, weight_decay=0.05)
    for _ in range(3):
        for p, q in zip(first, second, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        before = [p.detach().clone() for p in first]
        alone.step()
        stacked.step()
        for p, q, was in zip(first, second, before, strict=True):
            with torch.no_grad():  # bfloat16 sums in another order
                assert float((p - q).norm() / (p - was).norm()) < 0.02
    assert set(alone.state[first[0]]) == set(stacked.state[second[0]])


class Quadratic(nn.Module):
    """A weight, and the distance to 3 as its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))


def guard(minutes: float, folder: Path, bad: range, **factors: float) -> tuple[Quadratic, guarded.Trained]:
    """Train it; losses of the steps in `bad` are not numbers."""
    model, steps = Quadratic(), iter(range(10**9))

    def loss_of(batch: int) -> tuple[Tensor, list[Tensor]]:
        loss = ((model.weight - 3.0) ** 2).mean()
        return loss * (math.nan if batch in bad else 1.0), [loss.detach()]

    trained = guarded.train(
        model,
        lambda progress: (next(steps), 7),
        loss_of,
        guarded.Rates(0.1, 0.1),
        minutes,
        folder / "log.jsonl",
    )
    return model, trained


def test_a_step_without_numbers_is_left_out(tmp_path: Path) -> None:
    model, trained = guard(0.002, tmp_path, range(5, 7))
    assert trained.left_out == 2
    assert trained.returns == 0
    assert bool(torch.isfinite(model.weight).all())
    assert trained.tokens == 7 * trained.steps
    assert math.isfinite(trained.loss)


def test_after_a_divergence_it_goes_on_at_half_the_rates(tmp_path: Path) -> None:
    model, trained = guard(0.004, tmp_path, range(5, 8))
    assert trained.returns == 1
    assert bool(torch.isfinite(model.weight).all())
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["matrix_lr"] for r in records if "returned" in r] == [0.05]
    with pytest.raises(guarded.Diverged):
        guard(0.1, tmp_path, range(5, 10**6))


def test_prefetched_batches_come_in_order_and_failures_too() -> None:
    def numbers() -> Iterator[int]:
        yield from range(20)
        raise ValueError("no more")

    with prefetched(numbers(), depth=2) as made:
        assert [next(made) for _ in range(20)] == list(range(20))
        with pytest.raises(ValueError, match="no more"):
            next(made)
    with prefetched(iter(range(1000)), depth=2) as made:  # its thread ends with the block
        assert next(made) == 0


def test_prompts_of_several_lengths_get_the_answers_they_get_alone(tmp_path: Path) -> None:
    """Greedy, with rows that leave early, and with rows that stay although they have ended."""
    target = models.load(weights_dir("drafter-code-2x128"))
    prompts = load_prompts("chat")[:6]
    encoded = [prompt_ids(TOKENIZER, prompt) for prompt in prompts]
    expected = [greedy_continuations(target, [ids], [24])[0] for ids in encoded]
    assert len(set(map(len, expected))) > 3
    lengths = torch.tensor([len(ids) for ids in encoded])
    assert len(set(lengths.tolist())) > 2
    given = torch.zeros(6, int(lengths.max()), dtype=torch.long)
    for row, ids in enumerate(encoded):
        given[row, : len(ids)] = torch.tensor(ids)
    for share in (0.0, 1.1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generate, "_LEAVE_SHARE", {"cpu": share})
            written = generate.continue_batch(
                target, given, torch.zeros(6), TOKENIZER.eos_token_id, 24, lengths=lengths
            )
        assert [answer for answer, _, _ in written] == expected
        for answer, ids, logp in written:
            assert len(ids) == len(logp) == len(answer)
            assert ids[:, 0].tolist() == answer


def test_batches_of_prompts_are_near_in_length_and_none_comes_twice(tmp_path: Path) -> None:
    tokens = data_of(load_prompts("summary")[:80], tmp_path)
    batcher = generate.Batcher(tokens, np.random.default_rng(0))
    seen: list[tuple[int, ...]] = []
    while (taken := batcher.take(2, 16)) is not None:
        assert len(taken.lengths) <= 16
        assert taken.lengths.max() - taken.lengths.min() <= 16
        seen += [tuple(ids[:n]) for ids, n in zip(taken.ids.tolist(), taken.lengths, strict=True)]
    asked = [tuple(prompt_ids(TOKENIZER, prompt)) for prompt in load_prompts("summary")[:80]]
    assert sorted(seen) == sorted(asked)
    assert batcher.take(0, 16) is None


def moved(tensor: Tensor) -> Tensor:
    """To the GPU."""
    there = tensor.detach().to("cuda")
    return nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there


def test_on_a_gpu_writing_mixes_no_devices(tmp_path: Path) -> None:
    patch = pytest.MonkeyPatch()
    patch.setitem(models.SHAPES, "tiny", TINY)
    tokens = data_of([*load_prompts("code")[:4], *load_prompts("chat")[:4]], tmp_path)
    model = models.build("tiny", TOKENIZER).eval()
    patch.undo()
    with contextlib.ExitStack() as stack, torch.inference_mode():
        within = stack.enter_context(pytest.MonkeyPatch.context())
        within.setattr(generate, "_MAX_NEW", dict.fromkeys(DOMAINS, 24))
        device = stack.enter_context(emulated_cuda()) if IS_NEEDED else None
        model = model.to(torch.bfloat16)
        for module in model.modules():  # `to` asks for more of a tensor than the emulation has
            for held in (module._parameters, module._buffers):
                held.update({name: moved(t) for name, t in held.items() if t is not None})
        written = generate.write(model, tokens, 0.0, seed=1, batch=4)
        assert len(written.top_ids) == written.tokens.answer.sum() > 0
        # A wait a step for the number that is left; what was written is fetched at the end.
        assert device is None or device.num_transfers < 2 * len(written.top_ids)
        found = score.read(model, tokens, 0.0, 0, 1, 4)
        assert len(found.top_ids) == found.tokens.answer.sum() > 0


def test_what_holds_a_shipped_reference_is_not_trained_on(tmp_path: Path) -> None:
    own = Prompt("chat", "completion", "An answer that is nobody's reference.", 9, prompt="def nothing():")
    tokens = data_of([own, load_prompts("code")[0], own], tmp_path)
    assert prepare.drop_shipped(tmp_path) == 1
    left = Tokens.load(tmp_path / "train.npz")
    assert len(left) == 2
    assert left.ids[: left.starts[1]].tolist() == tokens.ids[: tokens.starts[1]].tolist()
    assert left.starts[-1] == len(left.ids) == len(left.answer)
    assert prepare.drop_shipped(tmp_path) == 0


def test_larger_shapes_are_what_their_names_say() -> None:
    with torch.device("meta"):
        target, drafter = (models.build(name, TOKENIZER) for name in (LARGER_TARGET, LARGER_DRAFTER))
    count = sum(p.numel() for p in target.parameters())
    assert 0.34e9 < count < 0.38e9
    assert (target.config.head_dim, drafter.config.head_dim) == (128, 64)
    assert LARGER_DRAFTER in distill.DIETS
    with pytest.raises(KeyError):
        weights_dir(LARGER_TARGET)


def test_a_pair_is_trained_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    monkeypatch.setitem(models.SHAPES, "drafter-general-2x192", models.Shape(1, 16, 2, 1, 32))
    monkeypatch.setattr(pair, "_CHECK_MINUTES", 0.0)
    monkeypatch.setitem(pair._SIZES, "cpu", pair.Sizes(2, 2, 6, 6))
    monkeypatch.setattr(pair, "held_out_loss", lambda model, tokens: {})
    monkeypatch.setattr(generate, "_MAX_NEW", dict.fromkeys(DOMAINS, 12))
    data_of([prompt for domain in DOMAINS for prompt in load_prompts(domain)[:8]], tmp_path)
    plan = pair.Plan(
        tmp_path, tmp_path / "out", "tiny", "drafter-general-2x192", 0.004, 0.0, 0.0, 0.003, length=64
    )
    record = pair.run(plan)
    assert json.loads((plan.out / "pair.json").read_text()) == json.loads(json.dumps(record))
    assert record["target"]["returns"] == 0
    assert all(0.0 <= share <= 1.0 for share in record["agreement"].values())
    assert record["written_tokens"] > 0
    for name in (plan.target, plan.drafter):
        loaded = models.load(plan.out / name)
        assert loaded.config.vocab_size == len(TOKENIZER)
        assert all(bool(torch.isfinite(p).all()) for p in loaded.parameters())
