"""The application on a Ray cluster that others use, too: the only one of its name, and it alone is ended."""

from __future__ import annotations

from contextlib import suppress

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.lifecycle import cause
from deployments.names import APP_NAME
from deployments.preflight import StartError


def refuse_second() -> None:
    """See that the cluster has no system yet: a second would take its place, and end it with itself.

    Raises:
        StartError: if it has one.
    """
    if APP_NAME in _applications():
        raise StartError(
            "a Flotilla serves on this Ray cluster already. `flotilla rollout FILE` has it go over to "
            "another configuration; a second one needs a Ray cluster of its own, or none in RAY_ADDRESS. To "
            "begin anew end the `flotilla serve` that began it, or, if that is gone, Ray Serve: `serve "
            "shutdown`"
        )


def begin_application(application: serve.Application) -> None:
    """Hand it to Ray Serve, and do not wait for it: Serve's own wait looks once a second.

    Raises:
        StartError: if another application of the cluster is in its way.
    """
    target = serve.RunTarget(target=application, name=APP_NAME)
    try:
        serve.run_many([target], wait_for_applications_running=False)
    except RayServeException as error:
        raise StartError(f"Ray Serve on this cluster takes no further application: {cause(error)}") from None


def end_application() -> None:
    """End it, and Ray Serve with it unless others have applications there."""
    if _applications() <= {APP_NAME}:
        serve.shutdown()
        return
    with suppress(TimeoutError):  # streams have not ended after a minute: Ray Serve goes on with it
        serve.delete(APP_NAME)


def _applications() -> set[str]:
    """Names of all on the cluster; none while Ray Serve does not run, begins or ends."""
    try:
        return set(serve.status().applications)
    except (RayError, RayServeException, TimeoutError):
        return set()
