"""Decoding heads, or an EAGLE layer, are looked at before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cluster.config import FlotillaConfig
from deployments.preflight import StartError, check
from zoo.registry import EAGLE, HEADS, TARGET, weights_dir


def config(target: str, heads: str, kind: str = "heads") -> FlotillaConfig:
    return FlotillaConfig.model_validate(
        {
            "target": {"path": f"zoo:{target}"},
            "drafters": [{"kind": kind, "path": heads}],
            "http": {"port": 0},
        }
    )


def test_heads_of_the_target_are_served() -> None:
    assert check(config(TARGET, f"zoo:{HEADS}")) == []


def test_heads_of_another_target_or_of_none_are_refused_with_the_reason() -> None:
    with pytest.raises(StartError, match="trained for target-8x384"):
        check(config("drafter-general-2x192", f"zoo:{HEADS}"))
    with pytest.raises(StartError, match="no decoding heads in"):
        check(config(TARGET, f"zoo:{TARGET}"))
    with pytest.raises(StartError, match="unknown model 'nonesuch'"):
        check(config(TARGET, "zoo:nonesuch"))


def test_an_eagle_layer_is_served_for_its_target_only() -> None:
    assert check(config(TARGET, f"zoo:{EAGLE}", "eagle")) == []
    with pytest.raises(StartError, match="made for a target with hidden_size 384"):
        check(config("drafter-general-2x192", f"zoo:{EAGLE}", "eagle"))
    with pytest.raises(StartError, match="no EAGLE-3 drafter in"):
        check(config(TARGET, f"zoo:{HEADS}", "eagle"))
    with pytest.raises(StartError, match="no decoding heads in"):
        check(config(TARGET, f"zoo:{EAGLE}"))


def test_an_eagle_layer_named_as_both_kinds_is_no_heads(tmp_path: Path) -> None:
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 384,
        "vocab_size": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    raw = config(TARGET, str(tmp_path), "eagle").model_dump()
    raw["drafters"] = [{"kind": kind, "path": str(tmp_path)} for kind in ("eagle", "heads")]
    with pytest.raises(StartError, match="no decoding heads in"):
        check(FlotillaConfig.model_validate(raw))


@pytest.mark.parametrize("placement", [{"num_gpus": 1}, {"collocate": "target"}, {"labels": {"role": "a"}}])
def test_a_place_of_their_own_is_refused(placement: dict[str, object]) -> None:
    """Configurations without one, as those written by the program itself, are taken."""
    raw = config(TARGET, f"zoo:{HEADS}").model_dump()
    assert FlotillaConfig.model_validate(raw).drafters[0].kind == "heads"
    raw["drafters"][0]["placement"] |= placement
    with pytest.raises(ValueError, match="`heads` cannot be chosen: it runs in the target's process"):
        FlotillaConfig.model_validate(raw)


def test_weights_of_heads_that_are_not_whole_are_named(tmp_path: Path) -> None:
    heads = Path(shutil.copytree(weights_dir(HEADS), tmp_path / "heads"))
    file = heads / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StartError, match=r"heads\.safetensors has \d+ bytes, and by its header"):
        check(config(TARGET, str(heads)))
