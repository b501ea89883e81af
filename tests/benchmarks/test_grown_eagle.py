"""An EAGLE drafter that was grown with its target drafts what it drafted before."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import grown_checkpoint, grown_eagle
from benchmarks.forward_floor import SHAPES, Sizes
from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.model_paths import model_directory
from engine.eagle_config import UnsuitableEagle, read_eagle_config
from tests.cluster.demo_requests import of_every_domain
from zoo.registry import EAGLE, TARGET

LARGE = Sizes(layers=10, hidden=576, heads=9, kv_heads=3, head_dim=128, units=1152, vocab=0)
SMALL = model_directory(f"zoo:{TARGET}"), model_directory(f"zoo:{EAGLE}")


def served(target: Path, eagle: Path) -> tuple[list[list[int]], int, int]:
    """Tokens of each request, and how many were drafted and accepted in all."""
    engine = LocalEngine(
        FlotillaConfig.model_validate(
            {
                "target": {"path": str(target), "num_slots": 2048, "dtype": "float32"},
                "policy": {"name": "fixed", "fixed_depth": 4, "max_width": 3},
                "drafters": [{"kind": "eagle", "path": str(eagle)}],
            }
        )
    )
    done = engine.generate(of_every_domain()[::4])  # each domain and each mode once
    totals = engine.core.totals
    return [done[name].tokens for name in sorted(done)], totals.drafted_tokens, totals.accepted_tokens


@pytest.mark.thorough
def test_it_drafts_what_it_drafted_and_is_right_as_often(tmp_path: Path) -> None:
    target, eagle = tmp_path / "target", tmp_path / "eagle"
    grown_checkpoint.write(target, SMALL[0], LARGE, dtype="float32", device="cpu")
    num_bytes = grown_eagle.write(eagle, SMALL[1], SMALL[0], LARGE, dtype="float32", device="cpu")
    assert num_bytes > 3 * SMALL[1].joinpath("model.safetensors").stat().st_size
    tokens, drafted, accepted = served(*SMALL)
    assert served(target, eagle) == (tokens, drafted, accepted)
    assert accepted > 0.4 * sum(map(len, tokens))


def test_the_command_writes_what_a_target_of_the_shape_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "8b", LARGE)
    options = [
        "--eagle",
        str(SMALL[1]),
        "--target",
        str(SMALL[0]),
        "--device",
        "cpu",
        str(tmp_path / "eagle"),
    ]
    grown_eagle.main(options)
    assert "beside 8b" in capsys.readouterr().out
    described = read_eagle_config(tmp_path / "eagle")
    assert described.target_hidden_size == LARGE.hidden
    assert described.feature_layers == (2, 4, 5)  # of eight layers, not of ten
    with pytest.raises(UnsuitableEagle, match="no EAGLE-3 drafter"):
        grown_eagle.write(tmp_path / "other", SMALL[0], SMALL[0], LARGE)
