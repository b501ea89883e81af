"""The target writes answers to training prompts; its distributions at each token come along for free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from zoo import clock, models
from zoo.corpus import DOMAINS
from zoo.dataset import Tokens
from zoo.registry import Domain
from zoo.scored import TOP, Scored, ScoredBuilder

#: Share of the generation time each domain gets.
TIME_SHARES: dict[Domain, float] = {"code": 0.4, "chat": 0.35, "summary": 0.25}
TEMPERATURE = 0.8
_MAX_NEW: dict[Domain, int] = {"code": 120, "chat": 96, "summary": 48}
#: A batch ends when fewer than this share of its rows are still writing; those are kept as they are, cut
#: short.
_STRAGGLERS = 0.08


def top_of(logits: Tensor) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]:
    """The ``TOP`` most probable tokens of each row and their log-probabilities in nats."""
    logp = torch.log_softmax(logits.float(), -1)
    values, ids = logp.topk(TOP, -1)
    return ids.to(torch.int16).cpu().numpy(), values.to(torch.float16).cpu().numpy()


class Batcher:
    """Batches of training prompts of equal length, so that no padding is needed; none is given out twice."""

    def __init__(self, tokens: Tokens, rng: np.random.Generator) -> None:
        self._tokens, self._rng = tokens, rng
        lengths = np.diff(tokens.starts)
        answers = np.add.reduceat(tokens.answer.astype(np.int64), tokens.starts[:-1])
        prompt = lengths - answers
        self._groups: dict[tuple[int, int], list[int]] = {}
        for i in rng.permutation(len(tokens)):
            self._groups.setdefault((int(tokens.domain[i]), int(prompt[i])), []).append(int(i))

    def take(self, domain: int, size: int) -> npt.NDArray[np.int64] | None:
        """Up to ``size`` prompts of one length, [prompts, tokens]; lengths come in proportion to their
        prompts.
        """
        keys = [
            key for key, members in self._groups.items() if key[0] == domain and len(members) >= size // 3
        ]
        if not keys:
            return None
        weights = np.array([len(self._groups[key]) for key in keys], float)
        key = keys[self._rng.choice(len(keys), p=weights / weights.sum())]
        members, self._groups[key] = self._groups[key][:size], self._groups[key][size:]
        starts = self._tokens.starts[members]
        ids: npt.NDArray[np.int64] = self._tokens.ids[starts[:, None] + np.arange(key[1])].astype(np.int64)
        return ids


@torch.inference_mode()
def continue_batch(
    model: LlamaForCausalLM,
    prompts: Tensor,
    temperatures: Tensor,
    end: int,
    most: int,
    stragglers: float = 0.0,
) -> list[tuple[list[int], npt.NDArray[np.int16], npt.NDArray[np.float16]]]:
    """Answers to prompts of one length with the distributions they were drawn from.

    ``temperatures`` has one entry a row, 0 for greedy. Rows that have written ``end`` leave the batch.
    """
    count = len(prompts)
    answers: list[list[int]] = [[] for _ in range(count)]
    ids_parts: list[list[npt.NDArray[np.int16]]] = [[] for _ in range(count)]
    logp_parts: list[list[npt.NDArray[np.float16]]] = [[] for _ in range(count)]
    cache = DynamicCache()
    alive = torch.arange(count)
    given = prompts
    for _ in range(most):
        hidden = model.model(given, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logits = model.lm_head(hidden).float()
        top_ids, top_logp = top_of(logits)
        heat = temperatures[alive, None]
        gumbel = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        chosen = (logits + heat * gumbel).argmax(-1)
        for row, (where, token) in enumerate(zip(alive.tolist(), chosen.tolist(), strict=True)):
            answers[where].append(token)
            ids_parts[where].append(top_ids[row])
            logp_parts[where].append(top_logp[row])
        keep = (chosen != end).nonzero().flatten()
        if len(keep) <= stragglers * count:
            break
        if len(keep) < len(alive):
            cache.batch_select_indices(keep)
            alive, chosen = alive[keep], chosen[keep]
        given = chosen[:, None]
    return [
        (answer, np.stack(i), np.stack(p))
        for answer, i, p in zip(answers, ids_parts, logp_parts, strict=True)
    ]


def generate(model_dir: Path, tokens: Tokens, minutes: float, seed: int, batch: int = 128) -> Scored:
    """Answers to random training prompts for a budget of minutes; half of them greedy, half at
    ``TEMPERATURE``.
    """
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # bfloat16 is half again as fast here, and its rounding is far below what a drafter can resolve.
    model = models.load(model_dir).to(torch.bfloat16).to(device)
    end = model.config.eos_token_id
    assert isinstance(end, int)
    batcher = Batcher(tokens, np.random.default_rng(seed))
    builder = ScoredBuilder()
    spent: dict[Domain, float] = dict.fromkeys(DOMAINS, 0.0)
    begun = clock.seconds()
    while clock.seconds() - begun < minutes * 60.0:
        domain = min(DOMAINS, key=lambda d: spent[d] / TIME_SHARES[d])
        at = clock.seconds()
        prompts = batcher.take(DOMAINS.index(domain), batch)
        if prompts is None:
            break
        temperatures = torch.arange(len(prompts), device=device) % 2 * TEMPERATURE
        given = torch.from_numpy(prompts).to(device)
        written = continue_batch(model, given, temperatures, end, _MAX_NEW[domain], _STRAGGLERS)
        for prompt, (answer, top_ids, top_logp) in zip(prompts.tolist(), written, strict=True):
            builder.add(DOMAINS.index(domain), prompt, answer, top_ids, top_logp)
        spent[domain] += clock.seconds() - at
    return builder.build()


def write_answers(part: int, model_dir: Path, data: Path, minutes: float) -> None:
    """One process's answers to the training prompts in ``data``, in a file there; kept if it exists."""
    torch.set_num_threads(1)
    written = data / f"generated-{part}.npz"
    if not written.exists():
        generate(model_dir, Tokens.load(data / "train.npz"), minutes, seed=100 + part).save(written)
