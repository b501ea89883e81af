"""What keeps a configuration from being served, found before anything slow is imported or started."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from cluster.config import FlotillaConfig
from cluster.model_paths import model_directory
from cluster.placement import plan_cell
from cluster.profile_file import ProfileError, load_profile
from deployments.exposure import check_certificate, exposure_warnings
from deployments.key_store import KeyStore
from engine.eagle_config import check_eagle_target, is_eagle, read_eagle_config
from engine.heads_config import UnsuitableHeads, check_target, read_description
from engine.trusted_files import UntrustedModel, check_files
from selector.own_classes import is_own, own_class


class StartError(Exception):
    """The system cannot be started; the message says why and what to do."""


def check(config: FlotillaConfig) -> list[str]:
    """Warnings that do not keep the configuration from being served.

    Raises:
        StartError: for a model that is missing or in a format that is not trusted, keys or certificates that
            cannot be read, decoding heads or an EAGLE layer of another target, a cost profile that is
            missing or of other models, a policy or selector of one's own that cannot be
            imported, placements that contradict each other, or a port that is taken.
    """
    try:
        for name, what in ((config.policy.name, "policy"), (config.selector.name, "selector")):
            if is_own(name):
                own_class(name, what)
        plan_cell(config)
    except ValueError as error:
        raise StartError(str(error)) from None
    paths = [config.target.path, *(drafter.path for drafter in config.drafters if drafter.kind == "model")]
    for path in paths:
        try:
            model_directory(path)
        except (FileNotFoundError, KeyError) as error:
            raise StartError(str(error.args[0])) from None
    if config.target.heads is not None:
        try:
            _check_beside(config)
        except (FileNotFoundError, KeyError, UnsuitableHeads) as error:
            raise StartError(str(error.args[0])) from None
    try:
        for path in paths:
            check_files(model_directory(path), trust_remote_code=_is_trusted(config, path))
        check_certificate(config.http)
        wants_keys = not KeyStore(config.security).is_empty
    except (UntrustedModel, ValueError) as error:
        raise StartError(str(error)) from None
    warnings = exposure_warnings(config, wants_keys=wants_keys)
    if config.security.require_keys and not wants_keys:
        raise StartError(
            "security.require_keys is set and there are no API keys: make one with `flotilla keys create` "
            "and set `security.keys_file`, or set FLOTILLA_API_KEY"
        )
    warnings += _check_profile(config) + _unknown_choices(config)
    _check_ports(config)
    return warnings


def _check_beside(config: FlotillaConfig) -> None:
    """Whether what is to draft beside the target was made for it."""
    assert config.target.heads is not None
    directory, target = model_directory(config.target.heads), model_directory(config.target.path)
    kinds = {drafter.kind for drafter in config.drafters if drafter.runs_beside_target}
    for kind in kinds or {"eagle" if is_eagle(directory) else "heads"}:
        if kind == "eagle":
            check_eagle_target(read_eagle_config(directory), target)
        else:
            check_target(read_description(directory), target)


def _is_trusted(config: FlotillaConfig, path: str) -> bool:
    return path == config.target.path and config.target.trust_remote_code


def _unknown_choices(config: FlotillaConfig) -> list[str]:
    """Not refused: who is named may be added while it serves (`/admin/drafters`)."""
    known = {drafter.name for drafter in config.drafters}
    named = config.selector.drafters if config.selector.name == "fixed" else ()
    unknown = [name for name in named if name not in known and name.rpartition("/")[0] not in known]
    if not unknown:
        return []
    there = ", ".join(sorted(known)) or "none"
    return [
        f"selector.drafters names {', '.join(unknown)}, but the drafters are: {there}; only those named draft"
    ]


def _check_ports(config: FlotillaConfig) -> None:
    wanted = [(config.http.host, config.http.port, "choose another with --port, or 0 for any free one")]
    if config.grpc.enabled:
        wanted.append(
            (config.grpc.host, config.grpc.port, "choose another `grpc.port`, or 0 for any free one")
        )
    if config.metrics.port is not None:
        wanted.append((config.metrics.host, config.metrics.port, "choose another `metrics.port`"))
    with ExitStack() as held:  # until all are looked at: front ends share ports, also with one another
        for host, port, remedy in wanted:
            if port:
                held.enter_context(_listening(host, port, remedy))


def _listening(host: str, port: int, remedy: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port} ({error.strerror}); {remedy}") from None


def _check_profile(config: FlotillaConfig) -> list[str]:
    if config.profile is None:
        return []
    try:
        return load_profile(Path(config.profile), config)[1]
    except ProfileError as error:
        raise StartError(str(error)) from None
