"""Ray actors of a cell: one per drafter, one per tensor-parallel rank of the target.

Actor calls are for lifecycle (load, profile, stop). Steps travel over each actor's own TCP port. Actors
are made with `max_restarts=0`: their loss is noticed within a step, and the cell makes new ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_node_ip_address

from cluster.config import TargetConfig
from cluster.core_affinity import CoreClaim, claim_core, is_crowded, usable_cores
from cluster.draft_service import DraftService
from cluster.drafter_config import DrafterConfig
from cluster.events import VerifierReady
from cluster.linear_cost import StepPoint, TargetForwards
from cluster.log_files import log_to_files
from cluster.logs import Fields
from cluster.model_paths import model_directory
from cluster.observability_config import LogConfig
from cluster.process_environment import take_on
from cluster.rank import Rank
from cluster.step_server import StepServer
from cluster.worker_lease import Lease
from drafters.protocol import Capabilities, Drafter
from engine.importing import without_collections
from engine.wire import Decoder, encode
from verifier.messages import VerifyCall, VerifyResult

if TYPE_CHECKING:
    from cluster.target import Target

# Workers import models, and with them torch, when they load: the cell, which only makes them, and
# drafters without a model are spared seconds of start and hundreds of megabytes.

_log = logging.getLogger(__name__)

# What importing torch and Transformers comes with.
_DRAFTER_MODULES = ("drafters.model_drafter", "engine.loading")
_TARGET_MODULES = ("cluster.target",)
# The connection of a cell that died ends this soon, and the step that was computed for it.
TAKE_OVER_S = 2.0
_LOOK_S = 0.25
# What was logged last is given this long to leave the process.
_FAREWELL_S = 0.1
Address = tuple[str, int]
#: Ray's id of a node, and a process id on it.
Whereabouts = tuple[str, int]


class _Worker(ABC):
    """What drafters and ranks have in common: a port for steps, and a cell that they work for.

    Args:
        orphan_s: the process outlives its cell so long, for another to take it over; None if Ray ends it
            together with the cell that made it.
        environment: variables of the process, set before it imports what reads them.
    """

    def __init__(self, orphan_s: float | None = None, environment: Mapping[str, str] | None = None) -> None:
        take_on(environment or {})
        self._server: StepServer | None = None
        self._lease: Lease | None = None
        self._is_taken = False
        self._record: Any = None
        self._log_handler: logging.Handler | None = None
        if orphan_s is not None:
            self._lease = Lease(orphan_s, time.monotonic())
            threading.Thread(target=self._watch_lease, name="lease", daemon=True).start()

    def where(self) -> Whereabouts:
        """The node and the process it runs in; a sign, too, that its cell is there."""
        if self._lease is not None:
            self._lease.heard(time.monotonic())
        return _whereabouts()

    def open(
        self,
        token: bytes,
        heartbeat_s: float,
        log: LogConfig | None = None,
        process: Fields | None = None,
        *,
        busy_polling: bool = False,
    ) -> Address:
        """Listen: signs of life are sent from now on, calls are answered once it is loaded.

        Args:
            token, heartbeat_s, busy_polling: as of `StepServer`.
            log: how it logs from now on; as Ray's workers do if None.
            process: fields of every line, its cell and its own name.
        """
        self._is_taken = False
        if log is not None:
            before, self._log_handler = self._log_handler, log_to_files(log, process or {})
            if before is not None:
                before.close()  # that of the cell before
        self._server = StepServer(
            self._handle,
            token,
            get_node_ip_address(),
            idle=self._idle,
            heartbeat_s=heartbeat_s,
            busy_polling=busy_polling,
        )
        return self._server.address

    def keep_off(self, cores: list[int]) -> None:
        """Answer calls on other processor cores than these, if there are any."""
        assert self._server is not None
        self._server.keep_to(usable_cores() - set(cores) or usable_cores())

    def keep(self, record: Any = None, *, is_kept: bool = True) -> None:
        """Wait for another cell if this one dies, and tell it the record (`cluster.takeover`); or do not."""
        self._record = record
        if self._lease is not None:
            self._lease.is_kept = is_kept

    def waits(self) -> bool:
        """Whether its cell is gone, and it may be taken over; answered at once by one that does."""
        return (
            self._lease is not None
            and self._lease.is_kept
            and not self._is_taken
            and not self._is_connected()
        )

    def take_over(self) -> tuple[Any, Any] | None:
        """Work for the cell that calls, if the one before is gone: what `_renewed` says, and the record.

        None while there is a cell, or another has come first. Who gets an answer opens it at once.
        """
        if self._lease is None or self._server is None or self._is_taken or not self._lease.is_kept:
            return None
        if not _within(TAKE_OVER_S, lambda: not self._is_connected()) or not self._server.close(TAKE_OVER_S):
            return None
        self._is_taken = True
        self._lease.renew(time.monotonic())
        return self._renewed(), self._record

    # For its kind to say

    _idle: Callable[[], bool] | None = None

    @abstractmethod
    def _handle(self, data: bytes) -> bytes:
        """Answer a call of the step transport."""

    @abstractmethod
    def _renewed(self) -> Any:
        """Forget all requests; what a cell must know of it."""

    # Parts

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        if self._lease is None:
            yield
            return
        self._lease.is_busy = True
        try:
            yield
        finally:
            self._lease.is_busy = False

    def _is_connected(self) -> bool:
        return self._server is not None and self._server.is_connected

    def _watch_lease(self) -> None:
        assert self._lease is not None
        while not self._lease.is_over(time.monotonic(), self._is_connected()):
            time.sleep(_LOOK_S)
        _log.warning("its cell is gone, and no other has come for it: this process ends")
        time.sleep(_FAREWELL_S)
        os._exit(0)


class DrafterWorker(_Worker):
    """A drafter in a process of its own."""

    def __init__(self, orphan_s: float | None = None, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(orphan_s, environment)
        self._drafter: Drafter | None = None
        self._service: DraftService | None = None
        self._idle = self._draft_ahead

    def prepare(self) -> Whereabouts:
        """Import what a model drafter needs, in time that nobody else uses, and say where it is."""
        importing = threading.Thread(target=_import_models_in_idle_time)
        with self._busy():
            importing.start()
            importing.join()
        return _whereabouts()

    def import_models(self) -> None:
        """Import what a model drafter needs, while the target is loaded, which says what to load."""
        with self._busy():
            _import(_DRAFTER_MODULES)

    def load(self, config: DrafterConfig, vocab_size: int, max_tokens: int, target_path: str) -> Capabilities:
        """Build the drafter."""
        begun = time.monotonic()
        if config.kind == "model":
            model_directory(config.path)  # who named none is told so at once
            _import(_DRAFTER_MODULES)
        from cluster.pool_drafter import build_pool_drafter

        self._drafter = build_pool_drafter(config, vocab_size, max_tokens, target_path)
        self._service = DraftService(self._drafter)
        gc.freeze()  # models and modules: nothing the collector should walk during a step
        _log.info("loaded, %.1f s", time.monotonic() - begun)
        return self._drafter.capabilities

    def profile(self) -> list[StepPoint]:
        """Measured cost of one draft layer over batch shapes."""
        from drafters.profile import measure_draft_costs

        assert self._drafter is not None
        return [StepPoint(*point) for point in measure_draft_costs(self._drafter)]

    def _renewed(self) -> Capabilities:
        assert self._service is not None
        self._service.forget_all()
        return self._service.drafter.capabilities

    def _handle(self, data: bytes) -> bytes:
        assert self._service is not None
        return self._service.answer(data)

    def _draft_ahead(self) -> bool:
        assert self._drafter is not None
        try:
            return self._drafter.draft_ahead()
        except Exception:
            # Nobody asked for this work, so nobody is told but the log.
            _log.exception("drafting ahead failed")
            return False


class VerifierWorker(_Worker):
    """One tensor-parallel rank of the target in a process of its own."""

    def __init__(self, orphan_s: float | None = None, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(orphan_s, environment)
        self._target: Target | None = None
        self._rank = 0
        self._claim: CoreClaim | None = None
        self._decoder: Decoder[VerifyCall] = Decoder(VerifyCall)
        # The call that waits, as it came and as it was read.
        self._waiting: tuple[bytes, VerifyCall] | None = None

    def rendezvous(self) -> Address:
        """An address on this node where the ranks can meet (asked of rank 0)."""
        with socket.create_server((get_node_ip_address(), 0)) as probe:
            host, port = probe.getsockname()[:2]
            return str(host), int(port)

    def load(self, config: TargetConfig, rank: Rank) -> VerifierReady:
        """Load the model (this rank of it)."""
        begun = time.monotonic()
        _import(_TARGET_MODULES)
        from cluster.target import build_target

        self._rank = rank.rank
        self._target = build_target(config, rank)
        gc.freeze()
        ready = self._target.ready()
        seconds = time.monotonic() - begun
        _log.info(
            "loaded %s on %s, %d KV slots, %.1f s", config.path, self._target.device, ready.num_slots, seconds
        )
        return ready

    def claim_core(self, num_ranks: int, num_drafters: int) -> int | None:
        """Answer calls on a processor core that no other target of this machine has claimed.

        Args:
            num_ranks, num_drafters: of the cell, as many as may be on this machine.

        Returns:
            which one; None if it keeps to none: with an accelerator, with cores enough, with none left.
        """
        assert self._target is not None
        assert self._server is not None
        cores = usable_cores()
        is_for_it = self._target.device.type == "cpu" and is_crowded(len(cores), num_ranks, num_drafters)
        if is_for_it and self._claim is None:
            self._claim = claim_core(cores)
        if self._claim is None:
            return None
        self._server.keep_to({self._claim.core})
        return self._claim.core

    def profile(self) -> TargetForwards:
        """Measured cost of verify forwards; every rank must be asked at the same time."""
        from cluster.target import profile_target

        assert self._target is not None
        return profile_target(self._target)

    def profile_heads(self) -> list[StepPoint]:
        """Measured cost of the decoding heads; every rank must be asked at the same time."""
        from cluster.target import profile_heads

        assert self._target is not None
        return profile_heads(self._target)

    def _renewed(self) -> VerifierReady:
        assert self._target is not None
        self._target.forget_all()
        return self._target.ready()

    def _handle(self, data: bytes) -> bytes:
        assert self._target is not None
        call, self._waiting = self._decoded(data), None
        try:
            result = self._target.calls.answer(call, self._next_call)
        except Exception:
            # The cell rebuilds a rank that is gone; one that lingers in an unknown state it cannot help.
            _log.exception("verify call %d failed", call.call_id)
            time.sleep(0.1)  # lets the log line out
            os._exit(70)
        if self._rank != 0:
            # Rank 0 speaks for all; the others only prove that they decided the same.
            result = VerifyResult(call_id=result.call_id, digest=result.digest)
        return encode(result)

    def _decoded(self, data: bytes) -> VerifyCall:
        if self._waiting is not None and self._waiting[0] is data:
            return self._waiting[1]
        return self._decoder.decode(data)

    def _next_call(self) -> VerifyCall | None:
        assert self._server is not None
        data = self._server.waiting()
        if data is None:
            return None
        self._waiting = data, self._decoded(data)
        return self._waiting[1]


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _import(modules: tuple[str, ...]) -> None:
    with without_collections():
        for name in modules:
            importlib.import_module(name)


def _import_models_in_idle_time() -> None:
    """Import torch, Transformers and the runners at the lowest priority there is.

    Only this thread gets it, and ends with it: what a process gave up of its own priority it may not take
    back without privileges.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _import(_DRAFTER_MODULES)


def _whereabouts() -> Whereabouts:
    return str(ray.get_runtime_context().get_node_id()), os.getpid()
