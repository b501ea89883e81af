"""A comparison on a real cell: policies change on one warm cell, and return the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from benchmarks.compare import CompareOptions, run
from benchmarks.compare_outputs import count
from benchmarks.compare_plan import parse_rate
from tests.system.conftest import pass_self_tests, small_demo, with_profile

pytestmark = pytest.mark.system


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_ray")
def test_policies_are_compared_on_one_warm_cell_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    cell = with_profile(small_demo(("prompt-lookup",)), tmp_path / "costs.json")
    pass_self_tests(cell)
    config, path = tmp_path / "cell.yaml", tmp_path / "compare.json"
    config.write_text(yaml.safe_dump(cell.model_dump(mode="json")))
    ray.init(log_to_driver=False)

    def compare(*policies: str) -> dict[str, Any]:
        options = CompareOptions(
            policies=policies,
            config=config,
            rates=(parse_rate("8"),),
            seeds=(0,),
            num_requests=6,
            max_tokens=16,
            temperature=0.7,
            warmups=2,
            baseline_requests=1,
            json_file=path,
        )
        record = run(options)
        assert count(record.runs, record.outputs) == (6 * (len(policies) - 1), 0, 0)
        return dict(json.loads(path.read_text()))

    first = compare("autoregressive", "adaserve", "fixed:fixed_depth=2,batching=fcfs")
    runs = {held["run"]["policy"]: held for held in first["runs"]}
    assert runs["autoregressive"]["report"]["total"]["receipts"]["num_accepted"] == 0
    assert runs["adaserve"]["report"]["total"]["receipts"]["num_verified"] > 0
    for held in runs.values():
        steps = held["steps"]
        assert steps["iterations"] > 0
        assert 0.0 < steps["step_verify_s"] <= steps["step_s"]
        assert held["report"]["total"]["num_errors"] == 0
    assert (runs["autoregressive"]["steps"]["step_draft_s"], first["saturation"]) == (0.0, None)
    # Finished runs are not taken again, and need no cell.
    assert compare("autoregressive", "adaserve", "fixed:fixed_depth=2,batching=fcfs")["runs"] == first["runs"]
