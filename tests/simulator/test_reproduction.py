"""`flotilla reproduce`: specs that refer to what exists, checks of claims, results kept, the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from simulator.reproduction import report
from simulator.reproduction.cache import Store
from simulator.reproduction.claims import CHECKS, Results, verdict
from simulator.reproduction.cli import FIGURES, app, choose
from simulator.reproduction.runner import Point, Scope, points, reproduce
from simulator.reproduction.setting import (
    Setting,
    figures_of,
    profile_of,
    recorded_file,
    requests_of,
    run,
    system_of,
)
from simulator.reproduction.spec import SPEEDUP, Claim, Figure
from simulator.run import Cell, Options

SMALL = Setting(profile="llama-8b-a100", num_output=24, seconds=3.0)
TINY = Figure(
    name="tiny",
    title="A small figure",
    axis="requests/s",
    points={2.0: {"rate": 2.0}, 6.0: {"rate": 6.0}},
    series={"plain": {"system": "sarathi"}, "chains": {"system": "fixed-2"}},
    base=SMALL,
    metrics=("attainment", SPEEDUP),
    claims=(
        Claim("chains are faster", "yes", "never below", SPEEDUP, ("chains",), limit=1.0),
        Claim("bound: a hundred times", "at least 100", "never below", SPEEDUP, ("chains",), limit=100.0),
    ),
    reference="plain",
)
SCOPE = Scope(seeds=(1, 2))


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_every_claim_refers_to_what_the_figure_has(figure: Figure) -> None:
    known = {"attainment", "violations", "goodput", "throughput", "step goodput", "tokens per step", SPEEDUP}
    known |= {"accepted tokens"}
    assert set(figure.metrics) <= known
    assert set(figure.also) <= known | {"TTFT", "latency"}
    assert figure.claims
    assert SPEEDUP not in figure.metrics or figure.reference in figure.series
    for claim in figure.claims:
        assert claim.kind in CHECKS
        assert claim.metric in known
        assert claim.series
        assert set(claim.series) | set(claim.against) <= figure.series.keys()
        assert set(claim.at) <= figure.points.keys()


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_every_series_can_be_run_at_every_point(figure: Figure) -> None:
    for point in points(figure, Scope(seeds=(1,), quick=True)):
        system_of(point.setting)
        assert profile_of(point.setting).drafters
        assert requests_of(msgspec.structs.replace(point.setting, seconds=1.0), profile_of(point.setting), 1)


def test_a_seed_determines_a_run() -> None:
    first, again = (figures_of(run(SMALL, 1)) for _ in range(2))
    assert first == again
    assert first != figures_of(run(SMALL, 2))


def test_accepted_tokens_leave_out_the_targets_own() -> None:
    """Each step but a prompt's brings one token of the target's own beside those that it accepted."""
    plain, drafted = (
        figures_of(run(msgspec.structs.replace(SMALL, system=system), 1))
        for system in ("autoregressive", "fixed-4")
    )
    assert plain["accepted tokens"] == 0.0
    own = drafted["throughput"] / drafted["tokens per step"]
    assert drafted["accepted tokens"] == pytest.approx(drafted["throughput"] - own, rel=0.05)


def test_spins_claims_are_asked_of_its_goodput() -> None:
    """It counts accepted tokens (section VI-B1); by all tokens a drafter that is hardly right looks best."""
    claims = [claim for name, figure in FIGURES.items() if name.startswith("spin") for claim in figure.claims]
    assert {claim.metric for claim in claims if not claim.is_ours} == {"accepted tokens"}


def test_systems_get_the_same_requests() -> None:
    held = [
        requests_of(setting, profile_of(setting), 3)
        for setting in (SMALL, msgspec.structs.replace(SMALL, system="vllm"))
    ]
    assert held[0] == held[1]


def test_a_drafter_says_by_itself_what_it_says_beside_others() -> None:
    """Alone each drew what the first of all draws, so that one and many were not compared on the same."""
    spin, said = msgspec.structs.replace(SMALL, profile="llama-7b-v100"), []
    for drafters in ((), ("616m",)):
        setting = msgspec.structs.replace(spin, drafters=drafters)
        cell = Cell(profile_of(setting), system_of(setting), Options())
        script = cell.scripts.add("r", "chat", 5, 8, 40)
        table = cell.drafters["616m"].table
        start = cell.scripts.row(script, table)
        said.append(table.token[start : start + 40].tolist())
    assert said[0] == said[1]


def test_drafters_are_ordered_by_the_size_of_their_models() -> None:
    """None had a size, so that "greedy by length" took the drafter of 1.1 billion for the smallest."""
    setting = msgspec.structs.replace(SMALL, profile="llama-7b-v100")
    cell = Cell(profile_of(setting), system_of(setting), Options())
    cell.run()
    sizes = {name: drafter.size for name, drafter in cell.core.pool.drafters.items()}
    assert sorted(sizes, key=sizes.__getitem__) == ["68m", "265m", "616m", "1.1b", "1.4b"]
    assert min(sizes.values()) > 10_000_000


def test_a_seed_is_of_what_selectors_draw_too() -> None:
    assert system_of(SMALL, 3).config.selector.seed == 3


def test_an_objective_for_the_first_token_leaves_the_others() -> None:
    """It took the place of the classes' own for the time per token."""
    setting = msgspec.structs.replace(SMALL, ttft_ms=300.0)
    for changed, tpot_ms in (
        (setting, 50.0),
        (msgspec.structs.replace(setting, objectives={"chat": "9"}), 9.0),
    ):
        asked = requests_of(changed, profile_of(changed), 1)
        assert {request.objective.ttft_ms for request in asked} == {300.0}
        assert {request.objective.tpot_ms for request in asked if request.kind == "chat"} == {tpot_ms}
        assert all(request.objective.tpot_ms for request in asked)


@pytest.mark.thorough
def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    whole = reproduce([TINY], SCOPE, Store(tmp_path / "whole"))["tiny"].runs
    ended: list[Point] = []
    told: list[tuple[int, int]] = []

    def stop_after_three(point: Point) -> None:
        ended.append(point)
        if len(ended) == 3:
            raise KeyboardInterrupt

    store = Store(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        reproduce([TINY], SCOPE, store, done=stop_after_three)
    rest = reproduce([TINY], SCOPE, store, started=lambda *counts: told.append(counts), done=ended.append)
    assert told == [(8, 3)]
    assert len(ended) == 8
    assert rest["tiny"].runs == whole


def test_what_the_result_depends_on_is_in_the_key(tmp_path: Path) -> None:
    store, recorded = Store(tmp_path), Store(tmp_path, tmp_path)
    traced = msgspec.structs.replace(SMALL, traced=True)
    keys = {
        store.key(SMALL, 1),
        store.key(SMALL, 2),
        store.key(msgspec.structs.replace(SMALL, rate=9.0), 1),
        store.key(traced, 1),
        recorded.key(traced, 1),
    }
    assert len(keys) == 5
    assert recorded.key(SMALL, 1) == store.key(SMALL, 1)


def test_other_recorded_data_are_run_again(tmp_path: Path) -> None:
    """Results of one folder were reported for any other."""
    traced, keys = msgspec.structs.replace(SMALL, traced=True), set()
    for number, text in enumerate(("[]", "[1]", "[1]")):
        file = recorded_file(traced, tmp_path / str(number))
        file.parent.mkdir(parents=True)
        file.write_text(text)
        keys.add(Store(tmp_path, tmp_path / str(number)).key(traced, 1))
    assert len(keys) == 2, "the same data elsewhere are the same"


def test_a_broken_file_is_run_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("k", {"attainment": 1.0})
    assert store.get("k") == {"attainment": 1.0}
    (tmp_path / "k.json").write_text('{"attain')
    assert store.get("k") is None


def test_the_report_of_a_small_figure(tmp_path: Path) -> None:
    results = reproduce([TINY], SCOPE, Store(tmp_path / "cache"), processes=2)
    path = report.write(results, SCOPE, "flotilla reproduce tiny", tmp_path / "report")
    text = path.read_text()
    assert "| chains are faster | yes | yes | least" in text
    assert "Of the papers' claims 1 of 1 hold, of those asked of this system 0 of 1." in text
    assert "(tiny.png)" in text
    assert "| plain | 1.00 ± 0.00 | 1.00 ± 0.00 |" in text  # its speedup over itself
    assert 2_000 < (tmp_path / "report" / "tiny.png").stat().st_size < 100_000


def _of(kind: str, limit: float = 0.0, **values: list[float]) -> bool | None:
    """Whether a claim about a, against the others, holds for values at 1, 2, ... of the axis."""
    count = len(values["a"])
    figure = _figure(values.keys(), count)
    runs = {
        (label, float(at)): [{"attainment": held[at]}]
        for label, held in values.items()
        for at in range(count)
    }
    against = tuple(label for label in values if label != "a")
    series = tuple(values) if kind == "order" else ("a",)
    claim = Claim("", "", kind, "attainment", series, against, limit=limit)
    return verdict(Results(figure, runs), claim).holds


def _figure(labels: Iterable[str], count: int) -> Figure:
    return Figure(
        name="f",
        title="f",
        axis="x",
        points={float(at): {} for at in range(count)},
        series={label: {} for label in labels},
        base=SMALL,
        metrics=("attainment",),
    )


def test_checks_of_claims() -> None:
    assert _of("above", a=[5, 5], b=[4, 5], c=[1, 1])
    assert not _of("above", a=[5, 5], b=[4, 6], c=[1, 1])
    assert _of("above", 1.0, a=[5, 5], b=[4, 6], c=[1, 1])
    assert _of("within", 0.05, a=[0.5, 2], b=[0.52, 2], c=[0.1, 0.1])
    assert not _of("within", 0.05, a=[0.5, 2], b=[0.54, 2], c=[0.1, 0.1])
    assert not _of("within", a=[0.5, 2], b=[0.51, 2])
    assert _of("ratio", 2.0, a=[4, 1], b=[4, 3], c=[8, 2])
    assert not _of("ratio", 2.1, a=[4, 1], b=[4, 3], c=[8, 2])
    assert not _of("every ratio", 2.0, a=[4, 1], b=[4, 3])
    assert _of("every ratio", 1.0, a=[4, 0.1], b=[4, 0.2])  # too few to compare
    assert _of("every ratio", 2.0, a=[2, 0.1], b=[4, 0.0]) is True
    assert _of("ratio", 1.0, a=[0.5], b=[0.9]) is None
    assert _of("gain", 2.0, a=[3, 8], b=[3, 4], c=[1, 2])
    assert _of("falls below", 1.0, a=[1.2, 1.1, 0.9])
    assert not _of("falls below", 1.0, a=[0.9, 0.8])
    assert not _of("falls below", 1.0, a=[1.3, 1.1])
    assert _of("never below", 1.0, a=[1.0, 2.0])
    assert _of("declines", 0.1, a=[10.0, 20.0, 8.0])
    assert not _of("declines", 0.1, a=[10.0, 9.5])
    assert _of("constant", 0.1, a=[10.0, 9.1])
    assert not _of("constant", 0.1, a=[10.0, 8.9])
    assert _of("single peak", a=[1, 3, 2, 1])
    assert not _of("single peak", a=[1, 3, 1, 2])
    assert _of("single peak", a=[3, 2, 1])
    assert _of("inner peak", 1.5, a=[1, 2, 1])
    assert not _of("inner peak", 1.5, a=[1, 2, 3])
    assert _of("order", a=[1], b=[2], c=[2])
    assert not _of("order", a=[1], b=[3], c=[2])


def test_a_claim_about_points_that_were_not_run_is_left_open() -> None:
    results = Results(TINY, {("plain", 2.0): [{"latency": 5.0}]})
    assert verdict(results, TINY.claims[0]).holds is None


def test_the_oracle_drafts_what_is_accepted_and_no_more() -> None:
    held = run(msgspec.structs.replace(SMALL, system="oracle"), 1)
    assert held.all.acceptance == 1.0
    assert held.all.accepted_per_step > 1.5


def test_figures_are_chosen_by_the_beginning_of_their_names() -> None:
    assert [figure.name for figure in choose(["spin"])] == ["spin-10", "spin-11", "spin-13"]
    assert choose(["all"]) == list(FIGURES.values())
    with pytest.raises(ValueError, match=r"no figure 'fig7'.*adaserve-8-9"):
        choose(["fig7"])


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["spin", "--seeds", "one"], "--seeds one: different whole numbers"),
        (["spin", "--seeds", "1,1"], "--seeds 1,1: different whole numbers"),
        (["spin", "--seeds", "-1"], "--seeds -1: different whole numbers"),
        (["spin-10", "--values", "8b"], "8b is on no axis"),
        (["adaserve-8", "--values", "2.6", "--quick"], "fig8_9_emission_rps2.6_ol256.json.gz"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, arguments: list[str], wrong: str) -> None:
    """A value on no axis gave a report in which nothing was run, and a file that is not there a traceback."""
    (tmp_path / "workloads" / "adaserve").mkdir(parents=True)
    options = ["--data", str(tmp_path), "--cache", str(tmp_path / "cache"), "--jobs", "1"]
    told = CliRunner().invoke(app, [*arguments, *options])
    assert (told.exit_code, wrong in told.output) == (2, True), told.output
