"""Which workers a cell may take over is told by their names; all ranks must have decided the same."""

from __future__ import annotations

from cluster.rank import RankAgreement
from cluster.takeover import Takeover, group_prefix
from deployments.demo import demo_config


def name(takeover: Takeover) -> str:
    return str(takeover.options("verifier rank 0")["name"])


def test_names_say_system_configuration_and_lineage_and_are_distinct() -> None:
    config = demo_config()
    one, same = Takeover("app", config), Takeover("app", demo_config())
    other = Takeover("app", config.model_copy(update={"pool": config.pool.model_copy(update={"standby": 0})}))
    system, digest, lineage, worker, number = name(one).split(":")
    assert (system, lineage, worker) == ("app", one.lineage, "verifier rank 0")
    assert name(same).split(":")[:2] == [system, digest]
    assert name(other).split(":")[1] != digest
    assert name(Takeover("app2", config)).split(":")[0] == "app2"
    assert name(one).split(":")[4] != number
    assert same.lineage != lineage


def test_groups_carry_the_lineage_that_a_cell_inherits() -> None:
    takeover = Takeover("app", demo_config())
    takeover.lineage = "inherited"
    options = takeover.group_options()
    assert options["name"].startswith(f"{group_prefix('app')}inherited:")
    assert options["lifetime"] == "detached"
    assert takeover.group_options()["name"] != options["name"]


def test_without_a_system_workers_end_with_their_cell() -> None:
    takeover = Takeover("", demo_config())
    assert takeover.orphan_s is None
    assert takeover.options("lookup") == {}
    assert takeover.group_options() == {}


def test_ranks_agree_as_long_as_all_checksums_of_a_call_are_the_same() -> None:
    agreement = RankAgreement()
    for call in range(200):
        assert agreement.holds(call, 7 * call)
        assert agreement.holds(call, 7 * call)
    assert not agreement.holds(199, 0)
