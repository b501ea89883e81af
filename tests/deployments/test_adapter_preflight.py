"""Adapters that cannot be served are refused before anything slow starts, and known by what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import FlotillaConfig
from cluster.served_target import served_adapters, served_target, system_fingerprint
from deployments.preflight import StartError, check
from zoo.registry import ADAPTER, TARGET


def configured(*adapters: dict[str, Any], **target: Any) -> FlotillaConfig:
    target = {"path": f"zoo:{TARGET}", "adapters": list(adapters), **target}
    return FlotillaConfig.model_validate({"target": target, "http": {"port": 0}})


def copied(tmp_path: Path, **changes: Any) -> Path:
    """The embedded adapter with other settings."""
    whole = Path(served_adapters(configured({"name": "a", "path": f"zoo:{ADAPTER}"}).target)["a"])
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((whole / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(described | changes))
    return tmp_path


def test_what_can_be_served_passes() -> None:
    assert check(configured({"name": "terse", "path": f"zoo:{ADAPTER}"}), listens=False) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"use_dora": True}, "scales the model's own weights"), ({"peft_type": "IA3"}, "'IA3'")],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = copied(tmp_path, **changes)
    with pytest.raises(StartError, match=f"the adapter in {path} cannot be served: .*{why}"):
        check(configured({"name": "terse", "path": str(path)}), listens=False)


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path, why in (
        (str(tmp_path), "no adapter at .* it has no adapter_config.json"),
        (f"{tmp_path}/nothing", "no such directory on this machine"),
        ("someone/adapter", "if it is one of the Hub's, fetch it with `hf download someone/adapter"),
        ("zoo:nothing", "unknown model 'nothing'"),
    ):
        with pytest.raises(StartError, match=why):
            check(configured({"name": "terse", "path": path}), listens=False)


@pytest.mark.parametrize("names", [("terse", "terse"), (TARGET,), ("served",), ("",), ("a b",), ("x" * 129,)])
def test_names_tell_models_apart(names: tuple[str, ...]) -> None:
    served = {"served_name": "served"} if "served" in names else {}
    with pytest.raises(ValidationError, match=r"a name of its own|target\.adapters"):
        configured(*({"name": name, "path": "/a"} for name in names), **served)


def test_another_adapter_is_another_target() -> None:
    plain, one, other = (
        configured(*adapters).target
        for adapters in ((), ({"name": "a", "path": "/a"},), ({"name": "a", "path": "/b"},))
    )
    assert len({served_target(target) for target in (plain, one, other)}) == 3
    assert len({system_fingerprint(target) for target in (plain, one, other)}) == 3
    assert served_adapters(one) == {"a": "/a"}
