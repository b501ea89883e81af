"""Simulated drafters grow the trees a real one would; the simulated target accepts what is right, no more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.linear_cost import LinearCost
from drafters.messages import DraftPlan
from engine.beam import Beam
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from simulator.acceptance import AcceptanceModel, DraftQuality
from simulator.drafting import grow
from simulator.scripts import NUM_ASTRAY, PIECE, DrafterTable, Rows, Script, Scripts
from simulator.workers import SimulatedTarget
from tests.examples import examples
from verifier.messages import PrefillItem, VerifyCall, VerifyItem

VOCAB = 1000
plans = st.builds(
    DraftPlan,
    depth=st.integers(1, 6),
    width=st.just(1),
    stop_logp=st.sampled_from([float("-inf"), -2.0, -0.5]),
    stop_token_logp=st.sampled_from([float("-inf"), -1.0]),
    least_forward_logp=st.sampled_from([float("-inf"), -1.0]),
)


def table_of(scripts: Scripts, *, seed: int = 1, num_output: int = 40) -> tuple[DrafterTable, Script, int]:
    table = scripts.table("d", DraftQuality(rate={"*": 0.7}), 4)
    script = scripts.add("a", "chat", seed, 10, num_output)
    return table, script, scripts.row(script, table)


class _Asked:
    """A stop rule that lets all be drafted, and keeps what it is asked."""

    def __init__(self) -> None:
        self.parents: list[list[float]] = []
        self.layers: list[list[float]] = []

    def begin(self) -> _Asked:
        return self

    def pays(self, parents: Sequence[float]) -> bool:
        self.parents.append(list(parents))
        return True

    def correct(self, layer: Sequence[float]) -> None:
        self.layers.append(list(layer))


def by_beam(
    table: DrafterTable, root: int, token: int, plan: DraftPlan, asked: _Asked | None = None
) -> TokenTree:
    """The tree that `engine.beam` grows over the same table, node by node."""
    beam, rows = Beam(token, plan), [root]
    while beam.frontier and (beam.depth == 0 or beam.deserves_forward):
        frontier, size = [rows[node] for node in beam.frontier], len(beam.token)
        tokens = [table.token[row].tolist() for row in frontier]
        at = dict(zip(beam.frontier, frontier, strict=True))
        beam.grow([table.logp[row].tolist() for row in frontier], tokens)
        for node in range(size, len(beam.token)):
            row = at[beam.parent[node]]
            rows.append(int(table.next[row, table.token[row].tolist().index(beam.token[node])]))
        if asked is not None:
            asked.correct(beam.acceptance(beam.layer))
            if beam.frontier and beam.deserves_forward:
                asked.pays(beam.acceptance(beam.frontier))
    return beam.tree()


@examples(60)
@given(
    held=st.lists(st.tuples(plans, st.integers(0, 30)), min_size=1, max_size=5),
    width=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
)
def test_trees_are_those_of_the_beam(held: list[tuple[DraftPlan, int]], width: int, seed: int) -> None:
    scripts = Scripts(AcceptanceModel(), VOCAB)
    table, _, row = table_of(scripts, seed=seed)
    wanted = [
        DraftPlan(plan.depth, width, plan.stop_logp, plan.stop_token_logp, plan.least_forward_logp)
        for plan, _ in held
    ]
    roots = np.array([row + position for _, position in held])
    grown, forwards = grow(table, roots, np.arange(len(held)), wanted)
    assert forwards[0] == len(held)
    for index, (tree, plan) in enumerate(zip(grown, wanted, strict=True)):
        tree.validate()
        expected = by_beam(table, int(roots[index]), index, plan)
        np.testing.assert_array_equal(tree.token, expected.token)
        np.testing.assert_array_equal(tree.parent, expected.parent)
        np.testing.assert_array_equal(tree.depth, expected.depth)
        np.testing.assert_allclose(tree.logp, expected.logp, rtol=1e-6)


@examples(60)
@given(plan=plans, position=st.integers(0, 30), width=st.integers(1, 4), seed=st.integers(0, 1 << 30))
def test_stop_rules_are_asked_of_the_nodes_that_go_on(
    plan: DraftPlan, position: int, width: int, seed: int
) -> None:
    """They were asked of nodes that are not extended, too."""
    table, _, row = table_of(Scripts(AcceptanceModel(), VOCAB), seed=seed)
    plan = DraftPlan(plan.depth, width, plan.stop_logp, plan.stop_token_logp, plan.least_forward_logp)
    asked, expected = _Asked(), _Asked()
    grow(table, np.array([row + position]), np.array([0]), [plan], asked)
    by_beam(table, row + position, 0, plan, expected)
    for of_nodes, of_beam in ((asked.parents, expected.parents), (asked.layers, expected.layers)):
        assert [len(layer) for layer in of_nodes] == [len(layer) for layer in of_beam]
        for here, there in zip(of_nodes, of_beam, strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_nothing_is_drafted_after_an_end_token(width: int) -> None:
    scripts, num_output = Scripts(AcceptanceModel(), VOCAB), 12
    table = scripts.table("d", DraftQuality(rate={"*": 0.95}), 4)
    num_ended = 0
    for seed in range(40):
        script = scripts.add(str(seed), "chat", seed, 10, num_output, ends_early=True)
        root = scripts.row(script, table) + num_output - 4
        plan = DraftPlan(depth=6, width=width)
        (tree,), _ = grow(table, np.array([root]), np.array([0]), [plan], end_token=scripts.end_token)
        tree.validate()
        ended = np.flatnonzero(tree.token == scripts.end_token)
        num_ended += len(ended)
        assert not np.isin(tree.parent, ended).any()
        if width == 1 and len(ended):
            assert len(tree) == 5
    assert num_ended > 20


def test_right_tokens_are_those_of_the_text_and_only_along_it() -> None:
    scripts = Scripts(AcceptanceModel(), VOCAB)
    table, script, row = table_of(scripts)
    text = scripts.text[script.base : script.base + 40]
    for position in range(40):
        right = table.token[row + position] == text[position]
        assert right.sum() <= 1
        for place in range(4):
            leads_on = table.next[row + position, place] == row + position + 1
            assert leads_on == right[place]
            if not right[place]:
                assert table.next[row + position, place] >= row + 40
    astray = slice(row + 40, row + 40 + NUM_ASTRAY)
    assert (table.token[astray] % 2 == 1).all()
    assert (table.next[astray] >= row + 40).all()


@examples(40)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=20), data=st.data())
def test_rows_are_never_given_twice(sizes: list[int], data: st.DataObject) -> None:
    rows, held = Rows(), {}
    for size in sizes:
        start = rows.take(size)
        assert start % PIECE == 0
        assert start + size <= rows.capacity
        for other, length in held.items():
            assert start + size <= other or other + length <= start
        held[start] = size
        if data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            rows.give(start, held.pop(start))


@pytest.mark.parametrize("num_drafted", [0, 2])
@pytest.mark.parametrize("num_prompt", [0, 7])
def test_drafts_slow_what_decodes_and_no_prompts(num_drafted: int, num_prompt: int) -> None:
    cost = LinearCost(alpha=1e-6, beta=2e-7, gamma=9e-5, delta=2.5e-3)
    took = {}
    for factor in (1.0, 1.5):
        scripts = Scripts(AcceptanceModel(), VOCAB)
        target = SimulatedTarget(scripts, cost, num_slots=1000, after_drafting=factor)
        specs = []
        for seed, name in enumerate("ab"):
            scripts.add(name, "chat", seed, 10, 40)
            tokens = list(range(10))
            specs.append(
                RequestSpec(request_id=name, tokens=tokens, prompt_len=10, sampling=SamplingParams())
            )
        whole = PrefillItem(request_id="a", num_tokens=10, spec=specs[0])
        target.step(VerifyCall(call_id=0, prefill=[whole]))
        tree = TokenTree.root_only(1)
        if num_drafted:
            tree = TokenTree.of([1, 3, 5], [-1, 0, 1], [0.0, -0.1, -0.2], [0, 1, 2])
        part = [PrefillItem(request_id="b", num_tokens=num_prompt, spec=specs[1])] if num_prompt else []
        call = VerifyCall(call_id=1, verify=[VerifyItem(request_id="a", tree=tree)], prefill=part)
        took[factor] = target.step(call).forward_seconds
    rows = 1 + num_drafted
    decoding_s = cost.seconds(1, rows, 11, 11 * rows)
    prompts_s = cost.seconds(2, rows + 7, 11, 11 * rows + 7 * 7 / 2) - decoding_s if num_prompt else 0.0
    assert took[1.0] == pytest.approx(decoding_s + prompts_s)
    assert took[1.5] == pytest.approx((1.5 if num_drafted else 1.0) * decoding_s + prompts_s)
