"""One schedule of the fault search: what happens to a cell, and that everybody is served in the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.chaos_cell import TARGET, ChaosCell, MakeCore
from benchmarks.chaos_clients import Connection
from benchmarks.chaos_schedule import (
    CORRUPTION_NAMES,
    COUNTS,
    DEFECTS,
    NUM_CLIENTS,
    Operation,
    Schedule,
    choices,
    request,
)
from benchmarks.chaos_workers import (
    KINDS,
    require,
)
from cluster.batching.registry import BATCHING_RULES
from cluster.core import SchedulerCore
from cluster.events import (
    Cancelled,
    CellDraining,
    ClientLost,
    DrafterDraining,
    RequestArrived,
    Tick,
)
from cluster.invariants import check_at_rest
from cluster.policies.registry import POLICIES
from cluster.succession import take_over
from deployments.pending_requests import Pending
from selector.registry import SELECTORS

TICK_S = 0.25
# Steps of the target that repairs may take per token still to prefill or to decode, and besides.
STEPS_PER_TOKEN, STEPS_BESIDES = 1.0, 60


class ChaosWorld(ChaosCell):
    """Applies operations to a cell."""

    @classmethod
    def run(cls, schedule: Schedule, make: MakeCore = SchedulerCore) -> Counter[str]:
        """Run a schedule to its end; what happened in it.

        Raises:
            AssertionError: for what must always hold and did not; others come from the core itself.
        """
        world = cls(schedule.settings, make)
        for operation in schedule.operations:
            world.apply(operation)
        world.finish()
        return world.counts

    def apply(self, operation: Operation) -> None:
        """One operation; one for which there is nothing does nothing."""
        getattr(self, f"_do_{operation[0]}")(*operation[1:])
        self._give_up()

    # Operations: requests

    def place(self, pending: Pending, connection: Connection) -> None:
        """Send a request, or send it again."""
        message = self.clients.send(pending, connection)
        if message is None:
            return
        self.handle(RequestArrived(message, connection.name))
        if pending.is_cancelled and pending.cell:
            self.clients.lives[message.request_id].may_be_cancelled = True
            self.handle(Cancelled(message.request_id))

    def _give_up(self) -> None:
        """Tell the cell of choices whose answer has failed."""
        while self.clients.given_up:
            self.counts["choices given up"] += 1
            self.handle(Cancelled(self.clients.given_up.pop().wire_id))

    def _place_homeless(self) -> None:
        homeless, self.clients.homeless = self.clients.homeless, []
        for pending in homeless:
            if pending.request.request_id in self.clients.pending and not pending.cell:
                self.place(pending, self.rng.choice(self.clients.connections))

    def _do_submit(self, draw: int) -> None:
        pending = self.clients.begin(request(len(self.clients.callers), draw))
        self.place(pending, self._connection(draw))

    def _do_burst(self, draw: int) -> None:
        for number in range(6):
            self._do_submit(draw + number)

    def _do_choices(self, draw: int) -> None:
        """Several choices of one answer; none is answered before all are sent."""
        connection = self._connection(draw)
        was_slow, connection.is_slow = connection.is_slow, True
        for pending in self.clients.begin_choices(choices(len(self.clients.callers), draw)):
            self.place(pending, connection)
            self.counts["choices of several"] += 1
        connection.is_slow = was_slow
        if not was_slow:
            self.clients.receive(connection)

    def _do_bad_request(self, draw: int) -> None:
        defect, changes = list(DEFECTS.items())[draw % len(DEFECTS)]
        sound = request(len(self.clients.callers), draw)
        fields = {name: getattr(sound, name) for name in ("request_id", "prompt", "sampling")} | changes
        pending = self.clients.begin(type(sound)(**fields), defect)
        self.place(pending, self._connection(draw))

    def _do_duplicate(self, draw: int) -> None:
        live = sorted(self.core.requests)
        if live:
            name = live[draw % len(live)]
            connection = self._connection(draw)
            self.clients.duplicates.append((connection.name, name))
            self.handle(RequestArrived(self.core.requests[name].submit, connection.name))

    def _do_cancel(self, draw: int) -> None:
        live = sorted(self.core.requests)
        if live:
            name = live[draw % len(live)]
            life = self.clients.lives[name]
            life.may_be_cancelled = life.pending.is_cancelled = True
            self.handle(Cancelled(name))

    def _do_cancel_unknown(self, draw: int) -> None:
        ended = [name for name, life in self.clients.lives.items() if life.has_ended]
        self.handle(Cancelled(ended[draw % len(ended)] if ended else "nobody"))

    def _connection(self, draw: int) -> Connection:
        return self.clients.connections[draw % NUM_CLIENTS]

    def _do_slow_client(self, draw: int) -> None:
        connection = self._connection(draw)
        connection.is_slow = not connection.is_slow
        if not connection.is_slow:
            self.clients.receive(connection)

    def _do_break_client(self, draw: int, *, for_good: bool = False) -> None:
        connection = self._connection(draw)
        self.clients.broken(connection, for_good=for_good)
        self.handle(ClientLost(connection.name))
        self._place_homeless()

    def _do_leave_client(self, draw: int) -> None:
        self._do_break_client(draw, for_good=True)

    # Operations: answers and time

    def _deliverable(self) -> list[str]:
        return sorted(w for w, q in self._answers.items() if q and not (w == TARGET and self._is_stalled))

    def _wake(self) -> None:
        """What was held back is due."""
        due = self.core.sending_ahead.held_until
        if due is not None:
            self.counts["calls held back"] += 1
            self.now = max(self.now, due)
            self.handle(Tick())

    def _do_answer(self, draw: int) -> None:
        if draw % 2:  # else the answer comes sooner than it was expected
            self._wake()
        workers = self._deliverable()
        if workers:
            answer = self._answers[workers[draw % len(workers)]].popleft()
            if draw % 7 == 0:
                self._stale.append(answer)
            self.handle(answer)

    def _do_answers(self, draw: int) -> None:
        rng = random.Random(draw)
        for _ in range(10):
            self._do_answer(rng.randrange(1 << 20))

    def _do_stale(self, draw: int) -> None:
        if self._stale:
            self.handle(self._stale[draw % len(self._stale)])

    def _do_drop(self, draw: int) -> None:
        workers = [worker for worker in self._deliverable() if worker != TARGET or draw % 3 == 0]
        if workers:
            worker = workers[draw % len(workers)]
            if worker == TARGET:
                self._is_stalled = True  # it hangs
            else:
                self._stale.append(self._answers[worker].popleft())
            self.counts["dropped answers"] += 1

    def _do_corrupt(self, draw: int) -> None:
        """The next draft is wrong in some way."""
        self._corruptions.append(CORRUPTION_NAMES[draw % len(CORRUPTION_NAMES)])

    def _do_advance(self, draw: int) -> None:
        self.now += draw % 300 / 1e3

    def _do_forward(self, draw: int) -> None:
        self.now += draw % 100
        self._do_tick(draw)

    def _do_backward(self, draw: int) -> None:
        self.now -= draw % 50
        self._do_tick(draw)

    def _do_tick(self, draw: int) -> None:
        self.handle(Tick())
        self._place_homeless()

    # Operations: workers and the cell

    def _do_lose_drafter(self, draw: int) -> None:
        names = sorted(self.drafters)
        if names:
            self.counts["drafters lost"] += 1
            self._lose(names[draw % len(names)])

    def _do_no_slots(self, draw: int) -> None:
        """The target's next call finds less room than was told, as when prefixes cannot be evicted.

        Every second time, about as much as the end of a prompt takes.
        """
        if self.target is not None:
            num_left = draw // 2 % 13
            tight = max(0, self.target.free - num_left)
            self.target.num_withheld = tight if draw % 2 else draw % self.settings.num_slots

    def _do_forget(self, draw: int) -> None:
        """The target no longer holds a request."""
        if self.target is not None and self.target.held:
            self.target.forget(sorted(self.target.held)[draw % len(self.target.held)])

    def _do_evict(self, draw: int) -> None:
        """A drafter no longer holds a request."""
        holders = [drafter for _, drafter in sorted(self.drafters.items()) if drafter.held]
        if holders:
            drafter = holders[draw % len(holders)]
            del drafter.held[sorted(drafter.held)[draw % len(drafter.held)]]

    def _do_lose_target(self, draw: int) -> None:
        if self.target is not None:
            self.counts["targets lost"] += 1
            self._lose(TARGET)

    def _do_return_worker(self, draw: int) -> None:
        if self._dead:
            self._return(self._dead[draw % len(self._dead)])

    def _do_add_drafter(self, draw: int) -> None:
        if len(self.drafters) < 6:
            self._add_drafter(sorted(KINDS)[draw % len(KINDS)])

    def _do_drain_drafter(self, draw: int) -> None:
        names = sorted(self.drafters.keys() - self._draining)
        if names:
            name = names[draw % len(names)]
            self._draining.add(name)
            self.handle(DrafterDraining(name))

    def _do_change_policy(self, draw: int) -> None:
        """As soon as the cell is idle; settings used before go on with what they had learnt."""
        for _ in range(400):
            if not self._deliverable():
                break
            self._do_answer(draw)
        core = self.core
        if not core.is_idle or core.pool.is_waiting or core.verifier is None:
            return
        rng = random.Random(draw)
        settings = replace(
            self.settings,
            policy=rng.choice(sorted(POLICIES)),
            batching=rng.choice(sorted(BATCHING_RULES)),
            selector=rng.choice(SELECTORS),
            micro_batches=rng.choice(COUNTS),
        )
        if rng.random() < 0.3:
            settings = self.settings
        before, self.core = core, self._cores.get(settings) or self._core_of(settings)
        take_over(self.core, before, self.now)
        self._cores |= {self._used: before, settings: self.core}
        self._used = settings
        self.counts["policy changes"] += 1
        self._check()

    def _do_restart_scheduler(self, draw: int) -> None:
        """The cell's process dies, and with it its workers; front ends resubmit what they had."""
        self.counts["schedulers lost"] += 1
        self.clients.cell_lost()
        self._start_cell()
        self._place_homeless()

    def _do_drain_cell(self, draw: int) -> None:
        """First nobody is taken any more; the second time all are given back, and another cell serves."""
        if not self._is_draining:
            self._is_draining = True
            self.handle(CellDraining())
            return
        self.handle(CellDraining(with_running=True))
        require(not self.core.requests, "a drained cell keeps requests")
        self.counts["cells drained"] += 1
        for connection in self.clients.connections:
            self.clients.receive(connection)
        self._start_cell()
        self._place_homeless()

    # The end

    def finish(self) -> None:
        """Everything is repaired; then every request must end within so many steps, and leave nothing."""
        for connection in self.clients.connections:
            connection.is_slow = False
            self.clients.receive(connection)
        if self._is_draining:
            self._do_drain_cell(0)
        if self._is_stalled and self.target is not None:
            self._lose(TARGET)
        for name in list(self._dead):
            self._return(name)
        self._give_up()
        self._serve_all()
        self.clients.check_ends()
        check_at_rest(self.core)
        if self.target is not None:
            left = self.target.held.keys() - set(self.core.verify_calls._release)
            require(not left, "KV slots are held by nobody's requests")
        self.counts["requests"] += len(self.clients.callers)
        self.counts["tokens"] += sum(len(caller.tokens) for caller in self.clients.callers.values())
        self.counts["resubmissions"] += self.clients.num_resubmitted
        self.counts["preemptions"] += self.core.totals.preemptions
        self.counts["draft timeouts"] += self.core.totals.draft_timeouts

    def _work(self) -> int:
        """Tokens that are still to be prefilled and decoded, at most."""
        requests = [pending.request for pending in self.clients.pending.values()]
        return sum(len(one.prompt) + 2 * one.sampling.max_tokens for one in requests)

    def _serve_all(self) -> None:
        limit = STEPS_BESIDES + STEPS_PER_TOKEN * self._work()
        steps = idle = 0
        turn = 0
        while self.clients.pending or self._deliverable():
            turn += 1
            workers = self._deliverable()
            if workers:
                worker = workers[turn % len(workers)]
                steps += worker == TARGET
                idle = 0
                self.handle(self._answers[worker].popleft())
                self._give_up()
            else:
                idle += 1
                self.now += TICK_S
                self._do_tick(0)
            if turn % 16 == 0:
                self._do_tick(0)
            require(idle < 400, "nobody works, and requests wait")
            require(steps <= limit, f"not served within {limit:.0f} steps: {sorted(self.clients.pending)}")
        self.counts["steps to the end"] += steps
        self.counts["steps allowed"] += int(limit)


def summed(counts: Sequence[Counter[str]]) -> Counter[str]:
    """What happened in several schedules."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total
