"""EAGLE-3 beside a target: its beams are those of a plain computation, whatever the target read before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.draft_plan import DraftPlan
from engine.eagle_loading import EagleFiles
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.proposals import Proposals
from engine.proposed_growth import grown
from engine.sampling import Row, TokenHistory, perturbed_scores
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from tests.eagle_reference import EagleReference
from tests.verifier.target import MAX_TOKENS, VOCAB, Target, spec_of
from verifier.eagle_drafts import EagleDrafts
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem, VerifyResult
from verifier.verifier import Verifier

TARGET = Target()
PROMPT = [5, 9, 33, 21, 60, 2, 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=40, seed=7, max_tokens=12, presence_penalty=0.5, repetition_penalty=1.2
)
DEPTH, WIDTH = 3, 3
# Scores nearer than this may be ordered either way.
NEAR = 1e-3


def verifier(
    reference: EagleReference,
    directory: Path,
    *,
    kind: str = "lean",
    num_slots: int = 200,
    draft_slots: int = 64,
    overlaps: bool = False,
) -> Verifier:
    target = directory / "target"
    reference.target.config.save_pretrained(target)
    files = EagleFiles.of(reference.write(directory / "eagle"), target)
    runner = TARGET.runner(
        num_slots, lean=kind != "hf", captured=kind == "captured", feature_layers=files.layers
    )
    layer, reading = files.load(runner, draft_slots)
    return Verifier(runner, proposer=EagleDrafts(layer, reading, MAX_TOKENS), overlaps=overlaps)


def beam(
    reference: EagleReference,
    spec: RequestSpec,
    output: Sequence[int],
    depth: int,
    width: int,
    least: float = -math.inf,
) -> tuple[list[dict[tuple[int, ...], float]], bool]:
    """Per layer the paths of the beam after prompt and `output`, and whether no choice in it was near.

    Stop tokens, and tokens of less than `least` given their parents, are leaves.
    """
    committed = [*spec.tokens[: spec.prompt_len], *output]
    history = TokenHistory(committed[: spec.prompt_len], output)
    layers: list[dict[tuple[int, ...], float]] = []
    above: dict[tuple[int, ...], float] = {(): 0.0}
    is_clear, leaves = True, set[tuple[int, ...]]()
    for layer in range(depth):
        row = Row(spec.sampling, len(output) + layer, history)
        paths: dict[tuple[int, ...], float] = {}
        for path, logp in above.items():
            if path in leaves:
                continue
            scores = perturbed_scores(reference.logits(committed, path)[None], [row])[0].log_softmax(-1)
            best = scores.topk(width + 1)
            is_clear = is_clear and float(best.values[-2] - best.values[-1]) > NEAR
            for value, token in list(zip(best.values.tolist(), best.indices.tolist(), strict=True))[:width]:
                paths[*path, token] = logp + value
                is_clear = is_clear and abs(value - least) > NEAR
                if token in spec.sampling.stop_token_ids or value < least:
                    leaves.add((*path, token))
        ranked = sorted(paths.items(), key=lambda item: -item[1])
        is_clear = is_clear and (len(ranked) <= width or ranked[width - 1][1] - ranked[width][1] > NEAR)
        above = dict(ranked[:width])
        layers.append(above)
    return layers, is_clear


def paths_of(proposals: Proposals) -> list[dict[tuple[int, ...], float]]:
    """The same, of what was proposed."""
    assert proposals.parent is not None
    layers: list[dict[tuple[int, ...], float]] = []
    above: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for token, parent, logp in zip(proposals.token, proposals.parent, proposals.logp, strict=True):
        found = [
            ((*above[p][0], int(t)), above[p][1] + float(lp))
            for t, p, lp in zip(token, parent, logp, strict=True)
        ]
        assert len({path for path, _ in found}) == len(found)
        layers.append(dict(found))
        above = found
    return layers


class Checker:
    """Compares every verdict's proposals with the reference; counts those without near choices."""

    def __init__(self, reference: EagleReference) -> None:
        self.reference = reference
        self.num_clear = 0

    def __call__(
        self,
        verdict: Verdict,
        spec: RequestSpec,
        output: Sequence[int],
        depth: int = DEPTH,
        width: int = WIDTH,
        least: float = -math.inf,
    ) -> None:
        proposals = verdict.proposals
        assert proposals is not None
        assert proposals.position == spec.prompt_len + len(output)
        assert proposals.token.shape == proposals.logp.shape == (depth, width)
        expected, is_clear = beam(self.reference, spec, output, depth, width, least)
        if is_clear:
            self.num_clear += 1
            for mine, theirs in zip(paths_of(proposals), expected, strict=True):
                assert mine.keys() == theirs.keys()
                for path, logp in mine.items():
                    assert logp == pytest.approx(theirs[path], abs=NEAR)


def prefill_item(spec: RequestSpec, chunk: int = 100, *, opens: bool = True) -> PrefillItem:
    return PrefillItem(
        request_id=spec.request_id,
        num_tokens=chunk,
        spec=spec if opens else None,
        num_candidates=WIDTH,
        num_heads=DEPTH,
    )


def prefill(of: Verifier, spec: RequestSpec, chunk: int = 100) -> Verdict:
    opens = True
    while True:
        call = VerifyCall(call_id=1, prefill=[prefill_item(spec, chunk, opens=opens)])
        (progress,) = of.step(call).prefills
        if progress.verdict is not None:
            return progress.verdict
        opens = False


def verify(
    of: Verifier, spec: RequestSpec, tree: TokenTree, depth: int = DEPTH, width: int = WIDTH
) -> Verdict:
    item = VerifyItem(request_id=spec.request_id, tree=tree, num_candidates=width, num_heads=depth)
    (verdict,) = of.step(VerifyCall(call_id=2, verify=[item])).verdicts
    return verdict


def half_right(output: Sequence[int], future: Sequence[int]) -> TokenTree:
    """Right up to its second token, with a wrong sibling before the right one."""
    n = len(output)
    return TokenTree(
        token=np.array(
            [output[-1], (future[n] + 1) % VOCAB, future[n], future[n + 1], (future[n + 2] + 1) % VOCAB]
        ),
        parent=np.array([-1, 0, 0, 2, 3]),
        logp=np.zeros(5, np.float32),
        depth=np.array([0, 1, 1, 2, 3]),
    )


VARIANTS: dict[str, Callable[[], EagleReference]] = {
    "plain": lambda: EagleReference(TARGET.plain),
    "speculators": lambda: EagleReference(
        TARGET.plain, norm_before_residual=True, norm_before_fc=True, norm_output=True, own_embeddings=True
    ),
    "fewer tokens": lambda: EagleReference(
        TARGET.plain, draft_tokens=[*range(3, 40, 2), 44, 60], norm_before_residual=True
    ),
    "narrower": lambda: EagleReference(TARGET.plain, width=24, layers=(0, 1, 1)),
    "normed, target's head": lambda: EagleReference(TARGET.plain, norm_output=True, seed=1),
}


@pytest.mark.parametrize(
    ("variant", "kind"), [*((name, "lean") for name in VARIANTS), ("plain", "hf"), ("plain", "captured")]
)
def test_beams_are_those_of_the_reference(tmp_path: Path, variant: str, kind: str) -> None:
    reference = VARIANTS[variant]()
    serving, check = verifier(reference, tmp_path, kind=kind), Checker(reference)
    for number, params in enumerate((GREEDY, SAMPLED)):
        spec = spec_of(f"r{number}", PROMPT[number:], params)
        future, _ = TARGET.decode(spec)
        verdict = prefill(serving, spec, chunk=4)
        output = list(verdict.tokens)
        check(verdict, spec, output)
        verdict = verify(serving, spec, half_right(output, future))
        assert verdict.num_accepted == 2
        output += verdict.tokens
        assert output == future[:4]
        check(verdict, spec, output)
        verdict = verify(serving, spec, TokenTree.root_only(output[-1]), depth=4, width=1)
        output += verdict.tokens
        check(verdict, spec, output, depth=4, width=1)
    assert check.num_clear > 3


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_who_may_have_none_of_the_tokens_drafted_has_no_drafts(
    tmp_path: Path, width: int, temperature: float
) -> None:
    """Where all are ruled out a log-softmax is no number, which the scheduler could not learn from."""
    serving = verifier(VARIANTS["fewer tokens"](), tmp_path)
    params = SamplingParams(temperature=temperature, max_tokens=9, allowed_token_ids=(4, 6, 50), seed=3)
    spec = spec_of("r", PROMPT, params)
    output, plan = list(prefill(serving, spec).tokens), DraftPlan(depth=DEPTH, width=width)
    while len(output) < params.max_tokens:
        item = VerifyItem(request_id="r", plan=plan, num_candidates=width, num_heads=DEPTH)
        (verdict,) = serving.step(VerifyCall(call_id=2, verify=[item])).verdicts
        output += verdict.tokens
        assert len(grown(output[-1], plan, frozenset(), verdict.proposals)) == 1
    assert output == TARGET.decode(spec)[0]


def test_requests_of_a_batch_are_drafted_for_as_alone(tmp_path: Path) -> None:
    """Of different lengths and kinds, some behind a shared prefix, one that never asked before."""
    reference = EagleReference(TARGET.plain, draft_tokens=range(1, 61))
    serving, check = verifier(reference, tmp_path), Checker(reference)
    long = [(7 * i) % VOCAB for i in range(40)]
    specs = [
        spec_of("a", PROMPT, GREEDY),
        spec_of("b", long, SAMPLED),
        spec_of("c", [*long, 3, 4], GREEDY),
        spec_of("d", PROMPT[::-1], GREEDY),
    ]
    futures = [TARGET.decode(spec)[0] for spec in specs]
    prefill(serving, specs[1])
    silent = PrefillItem(request_id="d", num_tokens=50, spec=specs[3])
    call = VerifyCall(call_id=1, prefill=[prefill_item(specs[0]), prefill_item(specs[2]), silent])
    prefills = serving.step(Decoder[VerifyCall](VerifyCall).decode(encode(call))).prefills
    assert prefills[1].num_cached > 0
    outputs = [future[:1] for future in futures]
    for place, (spec, output) in enumerate(zip((specs[0], specs[2]), (outputs[0], outputs[2]), strict=True)):
        verdict = prefills[place].verdict
        assert verdict is not None
        check(verdict, spec, output)
    assert prefills[2].verdict is not None
    assert prefills[2].verdict.proposals is None
    items = [
        VerifyItem(
            request_id=spec.request_id,
            tree=half_right(output, future),
            num_candidates=WIDTH,
            num_heads=DEPTH - (spec.request_id == "c"),
        )
        for spec, output, future in zip(specs, outputs, futures, strict=True)
    ]
    answer = serving.step(VerifyCall(call_id=2, verify=items))
    result = Decoder[VerifyResult](VerifyResult).decode(encode(answer))
    for spec, output, verdict in zip(specs, outputs, result.verdicts, strict=True):
        check(verdict, spec, [*output, *verdict.tokens], depth=DEPTH - (spec.request_id == "c"))
    assert check.num_clear >= 3


def test_a_request_whose_kv_was_lost_is_drafted_for_again(tmp_path: Path) -> None:
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    spec = spec_of("a", PROMPT, SAMPLED)
    output = list(prefill(serving, spec).tokens)
    output += verify(serving, spec, TokenTree.root_only(output[-1])).tokens
    serving.step(VerifyCall(call_id=3, release=["a"]))
    verdict = prefill(serving, spec_of("a", PROMPT, SAMPLED, output=output))
    check(verdict, spec, [*output, *verdict.tokens])
    assert check.num_clear == 1


def test_drafts_end_where_slots_or_the_context_do(tmp_path: Path) -> None:
    reference = EagleReference(TARGET.plain)
    serving = verifier(reference, tmp_path, draft_slots=WIDTH + 1)
    proposals = prefill(serving, spec_of("a", PROMPT, GREEDY)).proposals
    assert proposals is not None
    # A layer that was read, and one in the slots there are, of which one is nobody's.
    assert proposals.token.shape == (2, WIDTH)
    text = [(11 * i) % VOCAB for i in range(MAX_TOKENS - 1)]
    assert prefill(verifier(reference, tmp_path), spec_of("b", text, GREEDY)).proposals is not None


def test_where_the_host_may_wait_no_vocabulary_is_sorted_for_a_nucleus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path), Checker(reference)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    spec = spec_of("a", PROMPT, SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12))
    opened = PrefillItem(request_id="a", num_tokens=99, spec=spec)
    (progress,) = serving.step(VerifyCall(call_id=1, prefill=[opened])).prefills
    assert progress.verdict is not None
    output = list(progress.verdict.tokens)
    verdict = verify(serving, spec, TokenTree.root_only(output[-1]), width=1)
    monkeypatch.undo()
    check(verdict, spec, [*output, *verdict.tokens], width=1)


def test_drafts_change_no_token(tmp_path: Path) -> None:
    serving = verifier(EagleReference(TARGET.plain), tmp_path)
    for params in (GREEDY, SAMPLED):
        spec = spec_of(f"r{params.temperature}", PROMPT, params)
        output = list(prefill(serving, spec).tokens)
        while len(output) < params.max_tokens:
            output += verify(serving, spec, TokenTree.root_only(output[-1])).tokens
        assert output == TARGET.decode(spec)[0]


def test_a_target_whose_final_norm_drops_a_unit_is_drafted_for(tmp_path: Path) -> None:
    target = Target()
    with torch.no_grad():
        target.plain.model.norm.weight[3] = 0.0
    target.plain.config.save_pretrained(tmp_path / "target")
    files = EagleFiles.of(EagleReference(target.plain).write(tmp_path / "eagle"), tmp_path / "target")
    runner = LlamaRunner(load_llama_weights(target.plain), 200)
    runner.keep_features(files.layers)
    layer, reading = files.load(runner, 64)
    serving = Verifier(runner, proposer=EagleDrafts(layer, reading, MAX_TOKENS))
    proposals = prefill(serving, spec_of("a", PROMPT, GREEDY)).proposals
    assert proposals is not None
    assert np.isfinite(proposals.logp).all()
