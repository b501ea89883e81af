"""The Ray Serve application: cells, their front ends, and the directory by which they find each other."""

# No `from __future__ import annotations`: Serve reads the class in `build_app`'s signature to validate a
# YAML's `args`, and would find a string.

from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatus

from cluster.config import FlotillaConfig
from cluster.placement_config import ReplicaPlacementConfig
from deployments.autoscaling import cell_autoscaling, front_end_autoscaling
from deployments.cell_replica import CellReplica
from deployments.directory import DIRECTORY_NAME, Directory
from deployments.front_end import FrontEnd
from deployments.names import APP_NAME as APP_NAME

CELL_NAME = "Cell"

#: Of a custom resource: enough to be where it is, without using it up.
TOKEN_AMOUNT = 0.001

# Requests are bounded by the cell's own queue, which answers 429; Serve's limits must not come first.
_UNBOUNDED = 100_000
# Replaced, replicas are started before those they replace are stopped.
_SURGE_PERCENT = 100
# Ray Serve replaces whoever has left three checks in a row unanswered for so long.
_CHECK_TIMEOUT_S = 10
# Beyond the time in which requests may end, what a replica needs to say that it leaves.
_FAREWELL_S = 4.0


def build_app(args: FlotillaConfig) -> serve.Application:
    """The application, also for a Serve YAML (`import_path: deployments.serving:build_app`)."""
    scaling = args.scaling
    cells: dict[str, Any] = {"autoscaling_config": cell_autoscaling(scaling.cells)}
    if scaling.cells.is_fixed:
        cells = {"num_replicas": scaling.cells.min}
    front_ends: dict[str, Any] = {"num_replicas": args.http.front_ends}
    if scaling.front_ends.max is not None:
        front_ends = {"autoscaling_config": front_end_autoscaling(args.http.front_ends, scaling.front_ends)}
    of_front_end = scaling.front_ends.placement
    token = {name: min(amount, TOKEN_AMOUNT) for name, amount in of_front_end.resources.items()}
    directory = (
        serve.deployment(Directory)
        .options(
            name=DIRECTORY_NAME,
            num_replicas=1,
            max_ongoing_requests=_UNBOUNDED,
            ray_actor_options=_actor(ReplicaPlacementConfig(resources=token)),
            health_check_period_s=2,
            health_check_timeout_s=_CHECK_TIMEOUT_S,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=1,
            # It is called several times a second.
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        .bind(
            end_after_s=args.health.member_silent_s,
            # Its own workers free what a cell reserved when they have waited in vain.
            free_after_s=2 * args.health.orphan_s,
        )
    )
    cell = serve.deployment(CellReplica).options(
        name=CELL_NAME,
        **cells,
        max_ongoing_requests=_UNBOUNDED,
        ray_actor_options=_actor(scaling.cells.placement),
        health_check_period_s=2,
        max_surge_percent=_SURGE_PERCENT,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=scaling.cells.drain_timeout_s + _FAREWELL_S,
    )
    front_end = serve.deployment(FrontEnd).options(
        name="FrontEnd",
        **front_ends,
        max_ongoing_requests=_UNBOUNDED,
        ray_actor_options=_actor(of_front_end),
        # Serve's own 10 s is how long the place of a dead one would stay empty.
        health_check_period_s=2,
        max_surge_percent=_SURGE_PERCENT,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=scaling.front_ends.drain_timeout_s + _FAREWELL_S,
    )
    application: serve.Application = front_end.bind(
        args.model_dump(mode="json"), cell.bind(args, directory), directory
    )
    return application


def why_failed(application: ApplicationStatusOverview) -> str:
    """The errors of deployments that failed, without Ray Serve's account of where in the code they arose."""
    failed = (DeploymentStatus.DEPLOY_FAILED, DeploymentStatus.UNHEALTHY)
    told = {
        name: deployment.message.strip().splitlines()
        for name, deployment in application.deployments.items()
        if deployment.status in failed
    }
    return "; ".join(f"{name}: {lines[-1]}" for name, lines in told.items() if lines)


def _actor(placement: ReplicaPlacementConfig) -> dict[str, Any]:
    """Serve's options for the actor of a replica."""
    return {
        "num_cpus": placement.num_cpus,
        "resources": dict(placement.resources),
    }
