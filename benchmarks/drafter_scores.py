"""How often each drafter of the demo family is right on each held-out prompt's greedy answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.demo import load_config
from benchmarks.local_engine import with_concurrency
from benchmarks.tables import progress
from cluster.cost_model import DEFAULT_PROFILE, CostProfile
from cluster.linear_cost import StepPoint
from cluster.local import LocalEngine
from cluster.profile_fit import fit_cost
from cluster.stream_messages import Submit
from cluster.target import profile_target
from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.profile import measure_draft_costs
from drafters.protocol import Capabilities, Drafter
from engine.sampling_params import RequestSpec, SamplingParams
from zoo.agreement import prompt_ids
from zoo.registry import TARGET, load_prompts, weights_dir
from zoo.tokenizer import load as load_tokenizer

CONCURRENCY = 32


class ScoredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, the target's greedy answer, and what drafters made of it.

    Attributes:
        domain: of the prompt.
        prompt, answer: token ids.
        scored, agreed: per drafter, tokens of the answer it was judged on, and those it would have drafted.
    """

    domain: str
    prompt: list[int]
    answer: list[int]
    scored: dict[str, int]
    agreed: dict[str, int]

    def rate(self, drafter: str) -> float:
        """Share of the answer that is the drafter's first choice."""
        return self.agreed[drafter] / max(1, self.scored[drafter])


class DrafterScores(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a replay of drafter choices needs.

    Attributes:
        prompts: in the order of the zoo's file.
        drafters: capabilities by name.
        profile: forward times on the machine that measured.
    """

    prompts: list[ScoredPrompt]
    drafters: dict[str, Capabilities]
    profile: CostProfile


def measure() -> DrafterScores:
    """Let the target answer all held-out prompts and every drafter read the answers; under a minute."""
    torch.set_num_threads(1)
    config = load_config(None)
    policy = config.policy.model_copy(update={"name": "autoregressive"})
    engine = LocalEngine(with_concurrency(config.model_copy(update={"policy": policy}), CONCURRENCY))
    target = profile_target(engine.target)
    profile = CostProfile(
        target=fit_cost(target.points, target.expert_share),
        drafters={
            # Processor time, and often: two drafters of one size must not differ by what else runs.
            name: fit_cost(
                [StepPoint(*point) for point in measure_draft_costs(drafter, repeats=15, cpu_time=True)]
            )
            for name, drafter in engine.drafters.items()
        },
        overhead_s=DEFAULT_PROFILE.overhead_s,
    )
    tokenizer = load_tokenizer(weights_dir(TARGET))
    requests = []
    domains = []
    for number, held in enumerate(load_prompts()):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=held.max_tokens, stop_token_ids=(tokenizer.eos_token_id,)
        )
        requests.append(Submit(request_id=str(number), prompt=prompt_ids(tokenizer, held), sampling=sampling))
        domains.append(held.domain)
    prompts = []
    with progress() as bar:
        task = bar.add_task("Answering and scoring", total=len(requests))
        for first in range(0, len(requests), CONCURRENCY):
            batch = requests[first : first + CONCURRENCY]
            answers = engine.generate(batch)
            for request, domain in zip(batch, domains[first:], strict=False):
                answer = answers[request.request_id].tokens
                counts = {name: score(drafter, request, answer) for name, drafter in engine.drafters.items()}
                prompts.append(
                    ScoredPrompt(
                        domain=domain,
                        prompt=request.prompt,
                        answer=answer,
                        scored={name: scored for name, (scored, _) in counts.items()},
                        agreed={name: agreed for name, (_, agreed) in counts.items()},
                    )
                )
                bar.advance(task)
    capabilities = {name: drafter.capabilities for name, drafter in engine.drafters.items()}
    return DrafterScores(prompts=prompts, drafters=capabilities, profile=profile)


def score(drafter: Drafter, request: Submit, answer: list[int]) -> tuple[int, int]:
    """Tokens of the answer that the drafter was judged on, and those it would have drafted."""
    spec = RequestSpec(
        request_id=request.request_id,
        tokens=request.prompt + answer,
        prompt_len=len(request.prompt),
        sampling=request.sampling,
    )
    item = DraftItem(
        request_id=request.request_id,
        start=0,
        tokens=np.zeros(0, dtype=np.int32),
        plan=DraftPlan(depth=0),
        spec=spec,
    )
    draft = drafter.draft(DraftCall(call_id=0, items=[item])).drafts[0]
    drafter.draft(DraftCall(call_id=1, items=[], release=[request.request_id]))
    return draft.num_scored, draft.num_agreed


def load_or_measure(path: Path | None) -> DrafterScores:
    """The scores in a file; measured, and written there, if it does not exist."""
    if path is not None and path.exists():
        return msgspec.json.decode(path.read_bytes(), type=DrafterScores)
    scores = measure()
    if path is not None:
        path.write_bytes(msgspec.json.encode(scores))
    return scores
