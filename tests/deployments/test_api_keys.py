"""Keys: what is kept of them, files that change, and the command that makes them."""

from __future__ import annotations

import hmac
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.security_config import KeyConfig, KeysFile, SecurityConfig
from deployments.api_keys import (
    MOST_CHARACTERS,
    WeakKey,
    client_headers,
    find_key,
    hash_key,
    new_key,
    with_environment_key,
)
from deployments.cli import app
from deployments.key_store import KeyStore

PRINTABLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=20, max_size=80)


@given(st.lists(PRINTABLE, min_size=1, max_size=5, unique=True), PRINTABLE)
def test_a_key_is_found_by_itself_and_by_nothing_else(keys: list[str], other: str) -> None:
    kept = [KeyConfig(name=f"k{index}", hash=hash_key(key)) for index, key in enumerate(keys)]
    for index, key in enumerate(keys):
        assert find_key(key, kept) is kept[index]
        assert find_key(key[:-1], kept) is None
        assert find_key(key + "x", kept) is None or key + "x" in keys
    assert (find_key(other, kept) is not None) == (other in keys)


def test_what_is_longer_than_any_key_is_not_hashed_at_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is once for every key, of whoever can connect: a thousand keys and a long header took 70 ms."""
    longest = "k" * MOST_CHARACTERS
    keys = [KeyConfig(name="a", hash=hash_key(longest))]
    hashed: list[int] = []
    digest = hmac.digest

    def measured(salt: bytes, key: bytes, kind: Any) -> bytes:
        hashed.append(len(key))
        return digest(salt, key, kind)

    monkeypatch.setattr(hmac, "digest", measured)
    assert find_key(longest, keys) is keys[0]
    assert find_key(longest + "k" * 60_000, keys) is None
    assert max(hashed) == MOST_CHARACTERS + 1


def test_a_hash_tells_nothing_and_differs_each_time() -> None:
    key = new_key()
    first, second = hash_key(key), hash_key(key)
    assert first != second
    assert key not in first
    assert len({new_key() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "weak", ["", "secret", "x" * 19, "x" * 600, "with a space in its middle", "ключ" * 8]
)
def test_what_is_no_key_is_refused(weak: str) -> None:
    with pytest.raises(WeakKey) as caught:
        hash_key(weak)
    assert not weak or weak not in str(caught.value)


def write(path: Path, *names: str) -> dict[str, str]:
    keys = {name: new_key() for name in names}
    entries = [{"name": name, "hash": hash_key(key)} for name, key in keys.items()]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return keys


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "keys.yaml", 0.0
    first = write(path, "one")
    store = KeyStore(SecurityConfig(keys_file=path), {}, lambda: now)
    assert not store.is_empty

    def knows(key: str) -> bool:
        return find_key(key, store.keys()) is not None

    assert knows(first["one"])
    second = write(path, "one", "two")
    assert knows(first["one"]), "looked at too often"
    now = 2.0
    assert knows(second["two"])
    assert not knows(first["one"])
    secret = new_key()
    path.write_text(f"keys: [{{name: one, hash: {secret}}}]")
    now = 4.0
    with caplog.at_level(logging.ERROR):
        assert knows(second["two"])
    assert "keys.0.hash" in caplog.text
    assert secret not in caplog.text
    path.unlink()
    now = 6.0
    assert knows(second["two"])
    # Kubernetes changes a link, and the new file may be of the same size and age.
    beside = tmp_path / "new.yaml"
    third = write(beside, "one", "two")
    path.symlink_to(beside)
    now = 8.0
    assert knows(third["two"])
    path.write_text("keys: []")
    now = 10.0
    assert not knows(third["two"])
    assert not store.is_empty, "a file without keys must not open the door"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: [", "no YAML, line"),
        ("keys:\n- {name: a}\nkeys: []", "a field twice, line 3"),
        ("- 1", "the file"),
        ("keys: [{name: a b, hash: x}]", "keys.0.name"),
        ("keys: [{name: a, hash: x}]", "keys.0.hash"),
        ("kyes: []", "kyes"),
        ("keys: [] # für alle", r"keys.yaml is no YAML: .* UTF-8"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=said):
        KeysFile.load(path)
    with pytest.raises(ValueError, match="No such file"):
        KeysFile.load(tmp_path / "absent.yaml")


def test_names_and_hashes_must_differ(tmp_path: Path) -> None:
    one = {"name": "one", "hash": hash_key(new_key())}
    for other in ({**one, "hash": hash_key(new_key())}, {**one, "name": "two"}):
        with pytest.raises(ValueError, match="keys must differ"):
            KeysFile.model_validate({"keys": [one, other]})


def test_the_environment_may_hold_a_key_that_may_do_everything() -> None:
    key = new_key()
    store = KeyStore(SecurityConfig(), {"FLOTILLA_API_KEY": key})
    found = find_key(key, store.keys())
    assert found is not None
    assert set(found.permissions) == {"api", "metrics", "debug", "admin"}
    passed_on = with_environment_key(SecurityConfig(), {"FLOTILLA_API_KEY": key})
    assert key not in passed_on.model_dump_json()
    assert find_key(key, KeyStore(passed_on, {}).keys()) is not None
    assert client_headers({"FLOTILLA_API_KEY": key}) == {"Authorization": f"Bearer {key}"}
    assert client_headers({}) == {}
    with pytest.raises(ValueError, match="FLOTILLA_API_KEY: the key has 6 characters"):
        KeyStore(SecurityConfig(), {"FLOTILLA_API_KEY": "secret"})
    assert KeyStore(SecurityConfig(), {}).is_empty


def test_the_command_makes_keys_and_keeps_only_their_hashes(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.yaml", CliRunner()
    options = [
        "--tier",
        "fast",
        "--model",
        "terse",
        "--requests-per-minute",
        "60",
        "--permission",
        "api",
        "--permission",
        "debug",
    ]
    keys = {}
    for name, more in (("team-a", options), ("team-b", [])):
        done = runner.invoke(app, ["keys", "create", name, "--file", str(path), *more])
        assert done.exit_code == 0, done.output
        keys[name] = done.stdout.splitlines()[-1]
    assert path.stat().st_mode & 0o077 == 0
    loaded = KeysFile.load(path).keys
    assert [find_key(key, loaded).name for key in keys.values()] == list(keys)  # type: ignore[union-attr]
    assert loaded[0].tiers == ("fast",)
    assert [key.models for key in loaded] == [("terse",), None]
    assert loaded[0].limits.requests_per_minute == 60
    assert set(loaded[0].permissions) == {"api", "debug"}
    listed = runner.invoke(app, ["keys", "list", str(path), "--json"])
    assert [entry["name"] for entry in json.loads(listed.stdout)] == ["team-a", "team-b"]
    table = runner.invoke(app, ["keys", "list", str(path)])
    assert "team-a" in table.stdout
    for text in (path.read_text(), listed.output, table.output):
        assert not any(key in text for key in keys.values())
    assert loaded[0].hash not in listed.output + table.output
    again = runner.invoke(app, ["keys", "create", "team-a", "--file", str(path)])
    assert again.exit_code == 2
    assert "keys must differ by name" in again.output
    assert os.listdir(tmp_path) == ["keys.yaml"]
    wrong = runner.invoke(app, ["keys", "create", "x", "--permission", "root"])
    assert wrong.exit_code == 2
    assert "permissions" in wrong.output


def test_the_command_hashes_a_key_of_ones_own() -> None:
    key = new_key()
    done = CliRunner().invoke(app, ["keys", "hash"], input=f"{key}\n")
    assert done.exit_code == 0
    kept = KeyConfig(name="mine", hash=done.stdout.split()[-1])
    assert find_key(key, [kept]) is kept
    assert CliRunner().invoke(app, ["keys", "hash"], input="short\n").exit_code == 2
