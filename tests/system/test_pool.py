"""The drafter pool as people and failures change it, on real cells: no request notices but by its speed.

The target has two tensor-parallel ranks, verifies chains in two micro-batches, and is behind keys and TLS:
neither ranks nor keys take a server of their own so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.lossless import LosslessOptions, run
from cluster.config import FlotillaConfig
from cluster.placement import rank_name
from deployments.demo import demo_config
from tests.own_processes import own_processes
from tests.system.conftest import Server, pass_self_tests, small_demo, start, with_profile
from tests.system.keys_and_tls import Secured, check_keys_and_tls, check_renewal, secured_in
from tests.system.scraping import value

pytestmark = pytest.mark.system

PROMPTS = [f"def function_{number}(value):\n    " for number in range(3)]
TOKENS = 32
TARGET = rank_name(0)
# Bytes of a process that has imported torch: more than this, and of one that has not, less.
WITH_TORCH = 250 << 20


def pool_config(**changes: object) -> FlotillaConfig:
    """The demo's first model drafter, and two instances of prompt lookup; drafting in every step."""
    lookup = {"kind": "prompt_lookup", "name": "lookup", "replicas": 2}
    return small_demo(
        target__tensor_parallel=2,
        drafters=[demo_config().drafters[0].model_dump() | {"name": "small"}, lookup],
        http__admin=True,
        # Whom a request may choose drafts for it, whether or not that pays.
        policy__name="adaserve",
        policy__max_width=1,
        selector__name="fixed",
        scheduler__micro_batches=2,
        scheduler__draft_timeout_ms=500,
        pool__hang_timeouts=3,
        health__heartbeat_s=0.2,
        health__silent_s=2.0,
        **changes,
    )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return secured_in(tmp_path_factory.mktemp("secured"))


@pytest.fixture(scope="module")
def server(shared_ray: None, secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = pool_config(**secured.changes)
    pass_self_tests(config.model_copy(update={"drafters": (*config.drafters, demo_config().drafters[1])}))
    key = secured.keys["environment"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOTILLA_API_KEY", key)
        patch.setenv("SSL_CERT_FILE", str(secured.authority_file))
        yield from start(with_profile(config, tmp_path_factory.mktemp("pool") / "costs.json"), key)


@pytest.fixture(scope="module")
def texts(server: Server) -> list[str]:
    """What the prompts are continued with, undisturbed."""
    return [complete(server, prompt) for prompt in PROMPTS]


def complete(server: Server, prompt: str, drafter: str | None = None) -> str:
    """The text; drafted by one drafter only if one is named."""
    fields: dict[str, Any] = {} if drafter is None else {"speculation": {"drafters": [drafter]}}
    return str(server.complete(prompt, max_tokens=TOKENS, **fields)["choices"][0]["text"])


def drafters(server: Server) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/admin/drafters", headers=server.headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["data"]}


def eventually(condition: Callable[[], bool], within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def verified_by_small(server: Server) -> float:
    return value(server, "flotilla_drafter_tokens_total", drafter="small", outcome="verified")


@contextmanager
def load(server: Server, expected: list[str], drafter: str | None = None) -> Iterator[list[float]]:
    """Requests all the time, each of which must succeed with its undisturbed text; yields their ends."""
    ends: list[float] = []
    wrong: list[object] = []
    stop = threading.Event()

    def ask(number: int) -> None:
        try:
            while not stop.is_set():
                text = complete(server, PROMPTS[number], drafter)
                if text != expected[number]:
                    wrong.append((number, text))
                ends.append(time.monotonic())
                stop.wait(0.1)  # processes are made meanwhile, on the same cores
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    assert not wrong
    assert len(ends) >= len(PROMPTS)


def test_a_drafter_that_hangs_is_left_behind_and_replaced(server: Server, texts: list[str]) -> None:
    """First, with the next one: meanwhile a process is made in reserve."""
    with load(server, texts, "lookup/1") as ends:
        eventually(lambda: drafters(server)["lookup/1"]["load"] > 0)
        before = drafters(server)["lookup/1"]
        os.kill(before["pid"], signal.SIGSTOP)
        stopped = time.monotonic()
        eventually(lambda: drafters(server)["lookup/1"]["restarts"] > before["restarts"])
        noticed = time.monotonic()
        eventually(lambda: drafters(server)["lookup/1"]["state"] == "ready")
    meanwhile = sum(stopped + 0.7 < end < noticed for end in ends)
    print(f"a stopped drafter was given up after {noticed - stopped:.1f} s, while {meanwhile} requests ended")
    print(f"and ready again {drafters(server)['lookup/1']['recovery_s']:.2f} s later")
    assert meanwhile > 0, "requests waited for it"
    # Ray ends a process that does not react after five seconds.
    eventually(lambda: not psutil.pid_exists(before["pid"]))


def workers(server: Server) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/debug/workers", headers=server.headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return {one["process"]: one for one in answer.json()["data"]}


def test_an_idle_drafter_that_is_stopped_is_found_by_its_silence(server: Server) -> None:
    before = workers(server)["lookup/0"]
    assert before["state"] == "ready"
    assert before["call_s"] is None, "it owes no answer, by which it could be found"
    stalls = value(server, "flotilla_worker_stalls_total", kind="drafter", reason="silent")
    os.kill(before["pid"], signal.SIGSTOP)
    eventually(lambda: workers(server)["lookup/0"]["stalls"] > before["stalls"])
    eventually(lambda: workers(server)["lookup/0"]["state"] == "ready")
    assert not is_running(before["pid"])
    assert value(server, "flotilla_worker_stalls_total", kind="drafter", reason="silent") == stalls + 1


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def processes_in_reserve(server: Server) -> list[int]:
    """Workers for drafters that are no drafter, have nothing to do and have imported torch, by process id."""
    serving = {one["pid"] for one in drafters(server).values()}
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            is_idle = child.pid not in serving and "".join(child.cmdline()).strip() == "ray::DrafterWorker"
            if is_idle and child.memory_info().rss > WITH_TORCH:
                found.append(child.pid)
    return found


def test_a_killed_drafter_costs_no_request_and_a_process_in_reserve_becomes_it(
    server: Server, texts: list[str]
) -> None:
    # They are made in time that nobody else uses, of which a busy machine has little.
    eventually(lambda: len(processes_in_reserve(server)) == 1, within_s=120.0)
    (reserve,) = processes_in_reserve(server)
    with load(server, texts, "small"):
        eventually(lambda: drafters(server)["small"]["load"] > 0)
        before = drafters(server)["small"]
        os.kill(before["pid"], signal.SIGKILL)
        eventually(lambda: drafters(server)["small"]["restarts"] > before["restarts"])
        eventually(lambda: drafters(server)["small"]["state"] == "ready")
        after = drafters(server)["small"]
        verified = verified_by_small(server)
        eventually(lambda: verified_by_small(server) > verified)
    assert after["pid"] != before["pid"]
    assert after["pid"] == reserve
    assert 0.0 < after["recovery_s"] < 30.0
    print(f"a killed drafter was ready again after {after['recovery_s']:.2f} s")
    assert value(server, "flotilla_worker_restarts_total", worker="small") == after["restarts"]


def test_a_stopped_target_is_replaced_and_every_request_ends_with_its_text(
    server: Server, texts: list[str]
) -> None:
    with load(server, texts) as ends:
        eventually(lambda: workers(server)[TARGET]["state"] == "busy")
        before = workers(server)[TARGET]
        os.kill(before["pid"], signal.SIGSTOP)
        stopped = time.monotonic()
        eventually(lambda: workers(server)[TARGET]["state"] == "lost")
        noticed = time.monotonic()
        eventually(lambda: workers(server)[TARGET]["state"] in ("ready", "busy"))
        served = len(ends)
        eventually(lambda: len(ends) >= served + len(PROMPTS))
    after = workers(server)[TARGET]
    assert after["stalls"] == before["stalls"] + 1
    assert after["pid"] != before["pid"]
    assert not is_running(before["pid"])
    assert noticed - stopped < 10.0, "silent for 2 s, and two looks a quarter of a second apart"
    print(f"a stopped target was given up after {noticed - stopped:.1f} s")
    print(f"and ready again {after['recovery_s']:.2f} s later")


def test_drafters_are_added_scaled_drained_and_removed_while_serving(
    server: Server, texts: list[str]
) -> None:
    lookup = {"kind": "prompt_lookup", "name": "long-lookup", "min_ngram": 3, "max_ngram": 6}
    admin = f"{server.url}/admin/drafters"
    with load(server, texts), httpx.Client(headers=server.headers, timeout=60) as client:
        added = client.post(admin, json=lookup)
        assert added.status_code == 201, added.text
        assert [one["state"] for one in added.json()["data"]] == ["ready"]
        assert added.json()["data"][0]["costs"].startswith("estimated")
        assert client.post(admin, json=lookup).status_code == 409
        only = {"speculation": {"drafters": ["long-lookup"]}}
        answer = server.complete(PROMPTS[0], max_tokens=TOKENS, **only)
        assert answer["choices"][0]["text"] == texts[0]
        assert set(answer["metrics"]["drafters"]) <= {"long-lookup"}
        scaled = client.patch(f"{admin}/lookup", json={"replicas": 3})
        assert scaled.status_code == 200, scaled.text
        assert [one["name"] for one in scaled.json()["data"]] == ["lookup/2"]
        assert complete(server, PROMPTS[1], "lookup/2") == texts[1]
        drained = client.delete(f"{admin}/lookup/0", params={"drain": "true"})
        assert drained.status_code == 202, drained.text
        eventually(lambda: "lookup/0" not in drafters(server))
        assert client.delete(f"{admin}/long-lookup").status_code == 200
        assert "long-lookup" not in drafters(server)
        assert client.patch(f"{admin}/lookup", json={"replicas": 1}).status_code == 200
        eventually(lambda: len(drafters(server)) == 2)
    # And once more when nobody asks for anything: then the costs of a new drafter can be measured.
    with httpx.Client(headers=server.headers, timeout=60) as client:
        other = lookup | {"name": "short-lookup", "min_ngram": 2}
        assert client.post(admin, json=other).json()["data"][0]["costs"] == "measured"
        assert client.patch(f"{admin}/lookup", json={"replicas": 2}).status_code == 200
        assert client.delete(f"{admin}/short-lookup").status_code == 200


def test_another_process_is_in_reserve_once_one_was_used(server: Server) -> None:
    """Some time after one was, so that it is made while other tests run."""
    assert drafters(server)["small"]["restarts"] > 0, "none was used"
    eventually(lambda: len(processes_in_reserve(server)) == 1, within_s=120.0)


def cell_pid() -> int:
    (pid,) = own_processes("ServeReplica:flotilla:Cell")
    return pid


@pytest.mark.thorough
def test_a_killed_scheduler_leaves_its_workers_to_the_next(server: Server, texts: list[str]) -> None:
    """Nobody is refused meanwhile, nothing is loaded again, and what was added at run time is still there."""
    added = {"kind": "prompt_lookup", "name": "added", "min_ngram": 2}
    with httpx.Client(headers=server.headers, timeout=60) as client:
        assert client.post(f"{server.url}/admin/drafters", json=added).status_code == 201
        before = {name: one["pid"] for name, one in workers(server).items()}
        time.sleep(0.5)  # a change is noted within a quarter of a second
        with load(server, texts) as ends:
            eventually(lambda: len(ends) > 3)
            killed = cell_pid()
            os.kill(killed, signal.SIGKILL)
            served, at = len(ends), time.monotonic()
            eventually(lambda: len(ends) >= served + 2 * len(PROMPTS))
            print(f"after the scheduler was killed two requests each took {time.monotonic() - at:.1f} s")
        assert cell_pid() != killed
        assert {name: one["pid"] for name, one in workers(server).items()} == before
        assert complete(server, PROMPTS[2], "added") == texts[2]
        assert client.delete(f"{server.url}/admin/drafters/added").status_code == 200


def test_what_cannot_be_done_is_said(server: Server) -> None:
    admin = f"{server.url}/admin/drafters"
    with httpx.Client(headers=server.headers, timeout=60) as client:
        unknown = client.delete(f"{admin}/nobody")
        assert unknown.status_code == 404
        assert "small" in unknown.json()["error"]["message"]
        assert client.patch(f"{admin}/nobody", json={"replicas": 2}).status_code == 404
        assert client.patch(f"{admin}/lookup", json={"replicas": 0}).status_code == 400
        missing = client.post(admin, json={"kind": "model", "name": "absent", "path": "/no/such/model"})
        assert missing.status_code == 400
        assert "/no/such/model" in missing.json()["error"]["message"]
        assert "absent" not in drafters(server)
        # A page of a rebound name has no key; tests/deployments/test_admin_api.py has a server without any.
        assert client.get(admin, headers={"Host": "evil.example"}).status_code == 200
        assert client.post(admin, content=b"{}").status_code == 415


def test_two_ranks_return_the_targets_own_text(server: Server) -> None:
    """After targets and drafters were lost and replaced."""
    options = LosslessOptions(
        server.url, server.model, num_prompts=2, max_tokens=20, drafters=(), api_key=server.key
    )
    report = asyncio.run(run(options))
    assert report["num_unproven"] == 0
    assert any(result["receipts"]["num_verified"] > 0 for result in report["results"])


def test_keys_and_tls_work_and_nothing_secret_is_kept(server: Server, secured: Secured) -> None:
    check_keys_and_tls(server, secured)


def test_a_renewed_certificate_is_served(server: Server, secured: Secured) -> None:
    check_renewal(server, secured)


@pytest.mark.thorough
def test_a_drafters_weights_are_replaced_while_it_drafts(server: Server, texts: list[str]) -> None:
    """Last, as the drafter is another one then.

    The new instance is loaded first; who cannot be loaded, or is of another kind, changes nothing.
    """
    small, other = (drafter.model_dump(mode="json") for drafter in demo_config().drafters[:2])
    small["name"] = "small"
    assert small["path"] != other["path"]
    before = drafters(server)["small"]

    def replace(**changes: object) -> httpx.Response:
        body = small | changes
        url = f"{server.url}/admin/drafters/{body['name']}"
        return httpx.put(url, json=body, headers=server.headers, timeout=120)

    with load(server, texts, "small"):
        eventually(lambda: drafters(server)["small"]["load"] > 0)
        answer = replace(path=other["path"])
        assert answer.status_code == 200, answer.text
        new = next(one for one in answer.json()["data"] if one["state"] == "ready")
        eventually(lambda: [name for name in drafters(server) if name.startswith("small")] == [new["name"]])
        verified = verified_by_small(server)
        eventually(lambda: verified_by_small(server) > verified)
        missing = replace(path="/no/such/model")
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "drafter_failed")
        assert drafters(server)[new["name"]]["state"] == "ready"
    lookup = {"kind": "prompt_lookup", "name": "small"}
    url = f"{server.url}/admin/drafters/small"
    changed = httpx.put(url, json=lookup, headers=server.headers, timeout=30)
    assert (changed.status_code, changed.json()["error"]["code"]) == (409, "pool_conflict")
    assert replace(name="nobody").status_code == 404
    assert new["pid"] != before["pid"]
