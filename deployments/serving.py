"""Starting and stopping the whole system on Ray Serve."""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import Any

# Ray reads these when it is imported or when it makes processes, so they come first.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from rich.console import Console
from rich.markup import escape

from cluster.config import FlotillaConfig
from cluster.grpc_config import GrpcConfig
from cluster.http_config import HttpConfig
from cluster.log_files import session_directory, shown_logs
from cluster.mirrored_log import ShownLog
from cluster.placement import lacks, plan_cell, reserved_cpus
from deployments import preflight
from deployments.api_keys import with_environment_key
from deployments.application import APP_NAME, CELL_NAME, build_app, why_failed
from deployments.grpc_start import await_certificate, await_grpc, grpc_options, shown_address
from deployments.hangups import Hangups
from deployments.preflight import StartError
from deployments.ray_start import start_ray
from deployments.reached import Places
from deployments.reloading import roll_out
from deployments.reserved_ports import ReservedPorts
from deployments.rollout import Progress
from deployments.sole_application import begin_application, end_application, refuse_second
from deployments.startup import Startup
from deployments.welcome import print_welcome

__all__ = ["StartError", "build_app", "run", "running"]

psutil: Any = importlib.import_module("psutil")  # it comes without types

_POLL_S = 0.2

#: How the cell names its stages, and how they are shown.
_STAGES = {
    "starting": "Cell",
    "loading the target": "Target model",
    "loading drafters": "Drafters",
    "measuring costs": "Cost profile",
    "ready": "Cost profile",
}


#: Of the one system that a process can start: its ports, what shows its log on the console, and its end.
_ports = ReservedPorts()
_shown = ExitStack()
_begun = ExitStack()


class _Interrupted(BaseException):
    """A signal asked to stop; raised wherever the main thread is, so that a start can be interrupted too."""


def run(
    config: FlotillaConfig,
    block: bool = True,
    console: Console | None = None,
    reload: Callable[[], FlotillaConfig] | None = None,
) -> str:
    """Serve until interrupted (without `block`: until `stop` or the end of the process); returns the URL.

    While it blocks, SIGHUP rolls out what `reload` returns then (`deployments.rollout`); one that comes
    during the start waits for its end (`deployments.hangups`: not the one of a terminal that is closed).
    """
    console = console or Console(stderr=True)
    if not block:
        return _start(config, console)
    # From now on: while models load SIGHUP would be the end, with Ray left behind.
    hangups = None if reload is None else Hangups()
    former: Iterator[Progress] = iter(())
    try:
        with running(config, console, on_ray=_stop_on_signal) as url:
            print_welcome(console, config, url, _describe())
            while True:
                time.sleep(_POLL_S)
                if reload is not None and hangups is not None and hangups.number:
                    hangups.number = 0
                    former = roll_out(lambda: _fitting(reload()), console, lambda: hangups.number > 0, former)
    except _Interrupted:
        return ""
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        return ""  # Ray took the signal, while it began


def _fitting(config: FlotillaConfig) -> FlotillaConfig:
    """The configuration, if Ray can hold it.

    Raises:
        StartError: if it has too little, and is this process's own, which never grows: cells would wait.
    """
    if "RAY_ADDRESS" in os.environ:
        return config
    node = ray.nodes()[0]
    missing, has = lacks(plan_cell(config), node), float(node["Resources"].get("CPU", 0.0))
    needed = reserved_cpus(config) / 2  # once nobody is left who is replaced
    if not missing and needed > has:
        missing = f"{needed:g} CPU (it has {has:g}) for all cells and front ends"
    if missing:
        raise StartError(
            f"the Ray that began with the former configuration lacks {missing}, so nothing is changed: ask "
            "for less in `placement` or `scaling`, or start `flotilla serve` anew"
        )
    return config


@contextmanager
def running(
    config: FlotillaConfig, console: Console | None = None, on_ray: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """The system's URL, while it runs; `on_ray` is called once Ray is up."""
    console = console or Console(stderr=True)
    try:
        yield _start(config, console, on_ray)
    except StartError:
        if ray.is_initialized():
            console.print(f"logs: {shown_logs(config.log)}", markup=False, highlight=False, soft_wrap=True)
        raise
    finally:
        console.print("[dim]stopping ...[/]")
        stop()


def stop() -> None:
    """Stop the application and the Ray instance this process started or joined."""
    _ports.release()
    _shown.close()  # what is said of the end is no news
    if not ray.is_initialized():
        return
    # Ray's and Serve's farewells, logged and printed, are errors about processes that are meant to go.
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            _begun.close()
            ray.shutdown()
    finally:
        logging.disable(logging.NOTSET)


def _start(config: FlotillaConfig, console: Console, on_ray: Callable[[], None] = lambda: None) -> str:
    for warning in preflight.check(config):
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    host, port = config.http.host, _port(config.http, held=config.http.direct)
    grpc_port = _port(config.grpc, held=config.grpc.enabled and config.grpc.direct)
    if config.metrics.port is not None:
        _reserve(config.metrics.host, config.metrics.port)
    config = config.model_copy(
        update={
            "security": with_environment_key(config.security),
            "http": config.http.model_copy(update={"port": port}),
            "grpc": config.grpc.model_copy(update={"port": grpc_port}),
        }
    )
    with Startup(console).running() as startup:
        startup.enter("Ray")
        start_ray(config, console)
        on_ray()
        if (session := session_directory()) is not None:
            with suppress(OSError):  # of a Ray of somebody else's, or with a path too long for sockets
                _shown.enter_context(closing(ShownLog(console, session, shown_logs(config.log))))
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        refuse_second()
        _begun.callback(end_application)
        proxied_grpc = config.grpc.enabled and not config.grpc.direct
        # "HeadOnly": one proxy, on the node the user talks to; none where front ends listen themselves.
        serve.start(
            proxy_location="Disabled" if config.http.direct and not proxied_grpc else "HeadOnly",
            http_options=_proxied_http(config),
            grpc_options=grpc_options(config.grpc) if proxied_grpc else None,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        startup.enter("Cell")
        begin_application(build_app(config))
        _await_application()
        _await_cell(startup)
        startup.enter("HTTP")
        places = Places.now()
        shown = places.reached_at("http", host, is_direct=config.http.direct)
        url = f"{config.http.scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}"
        if config.http.tls_client_ca is None:
            _await_http(url)
        else:  # this has no certificate to be let in with
            await_certificate(f"{shown}:{port}", "HTTPS")
        if config.grpc.enabled:
            startup.enter("gRPC")
            address = shown_address(
                places.reached_at("grpc", config.grpc.host, is_direct=config.grpc.direct), grpc_port
            )
            await_grpc(address, has_tls=config.http.tls_certificate is not None)
            console.print(f"gRPC on [bold]{escape(address)}[/]", highlight=False)
    console.print(f"[dim]ready after {startup.seconds:.0f} s[/]")
    return url


def _port(listens: HttpConfig | GrpcConfig, *, held: bool) -> int:
    """The port where clients connect; `held` is for those on which front ends listen, who share them."""
    if held:
        return _reserve(listens.host, listens.port)
    return listens.port or _free_port(listens.host)


def _reserve(host: str, port: int) -> int:
    try:
        return _ports.reserve(host, port)
    except OSError as error:  # somebody took it since `preflight` looked
        raise StartError(error.strerror) from None


def _await_application() -> None:
    while True:
        application = serve.status().applications[APP_NAME]
        if application.status == ApplicationStatus.RUNNING:
            return
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            reason = why_failed(application) or application.message
            raise StartError(f"Ray Serve could not start the application: {reason}")
        time.sleep(_POLL_S)


def _proxied_http(config: FlotillaConfig) -> dict[str, Any]:
    """Serve's HTTP proxy; it always runs beside its gRPC proxy, out of the way if nobody is to use it."""
    http = config.http
    if http.direct:
        return {"host": "127.0.0.1", "port": _free_port("127.0.0.1"), "request_timeout_s": None}
    tls = {"ssl_certfile": http.tls_certificate, "ssl_keyfile": http.tls_key}
    return {
        "host": http.host,
        "port": http.port,
        "request_timeout_s": None,
        **{name: str(path) for name, path in tls.items() if path is not None},
    }


def _describe() -> dict[str, Any]:
    handle = serve.get_deployment_handle(CELL_NAME, APP_NAME)
    description: dict[str, Any] = handle.describe.remote().result(timeout_s=30)
    return description


def _await_cell(startup: Startup) -> None:
    while True:
        description = _describe()
        if description.get("failure"):
            raise StartError(str(description["failure"]))
        stage = str(description.get("stage", ""))
        startup.enter(_STAGES.get(stage, stage))
        if description["ready"]:
            return
        time.sleep(_POLL_S)


def _await_http(url: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10, context=_unverified()):
                return
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > deadline:
                raise StartError(f"{url}/ready does not answer: {error}") from error
            time.sleep(_POLL_S)


def _unverified() -> ssl.SSLContext:
    """Takes any certificate: this asks our own server, by an address that its certificate need not name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])


def _stop_on_signal() -> None:
    """The first signal stops in order, a second one at once. After `ray.init`, which takes SIGTERM itself."""
    stopping = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            os._exit(128 + number)
        stopping = True
        raise _Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
