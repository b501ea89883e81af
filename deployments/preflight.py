"""What keeps a configuration from being served, found before anything slow is imported or started."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack, suppress
from itertools import combinations
from pathlib import Path

from cluster.config import FlotillaConfig
from cluster.model_paths import adapter_directory, model_directory
from cluster.placement import plan_cell
from cluster.policies.own import own_policy
from cluster.profile_file import ProfileError, load_profile
from cluster.tier_config import DEFAULT_TIER
from deployments.certificates import certificate_warnings, check_certificate
from deployments.chat_template_files import check_chat_templates
from deployments.exposure import exposure_warnings
from deployments.key_store import KeyStore
from deployments.listening import shared_listener
from deployments.tokenizer_files import check_tokenizer, check_tokenizer_files
from engine.adapter_config import UnsuitableAdapter, read_adapter_config
from engine.eagle_config import check_eagle_target, is_eagle, read_eagle_config
from engine.end_tokens import end_tokens_of_model
from engine.heads_config import UnsuitableHeads, check_target, read_description
from engine.model_files import check_model_files, check_ranks, check_weights
from engine.own_classes import find_own, is_own
from engine.quantization_check import check_quantization
from engine.quantized_files import UnsuitableWeights
from engine.trusted_files import UntrustedModel, check_files
from selector.acceptance import AcceptanceEstimates
from selector.own import own_selector

# Addresses that stand for every one of the machine, and one at which it can be asked.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class StartError(Exception):
    """The system cannot be started; the message says why and what to do."""


def check(config: FlotillaConfig, *, listens: bool = True) -> list[str]:
    """Warnings that do not keep the configuration from being served.

    Args:
        config: what is to be served.
        listens: whether on ports that are not in use yet.

    Raises:
        StartError: for a model that is missing, without a tokenizer, with files that are cut off, or in a
            format that is not trusted or quantized in a way that is not read, more ranks than divide its
            heads, keys or certificates that cannot be read, decoding heads or an EAGLE layer of another
            target, an adapter that cannot be served, a cost profile that is missing or of other models, a
            policy, selector or drafter of one's own that cannot be found or made, placements that contradict
            each other, a log that cannot be written, a port that is taken, or a file or directory that the
            operating system does not let this user look at.
    """
    try:
        return _checked(config, listens=listens)
    except OSError as error:  # a directory of another user's, a disk that fails, a name that is too long
        told = str(error) if error.filename is None else f"cannot read {error.filename}: {error.strerror}"
        raise StartError(told) from None


def _checked(config: FlotillaConfig, *, listens: bool) -> list[str]:
    try:
        if is_own(config.policy.name):
            own_policy(config.policy)
        if is_own(config.selector.name):
            own_selector(config.selector.name, AcceptanceEstimates())
        for drafter in config.drafters:
            if drafter.kind == "own":
                find_own(drafter.import_path, "drafter")
        plan_cell(config)
    except ValueError as error:
        raise StartError(str(error)) from None
    paths = [config.target.path, *(drafter.path for drafter in config.drafters if drafter.kind == "model")]
    for path in paths:
        try:
            model_directory(path)
        except (FileNotFoundError, KeyError) as error:
            raise StartError(str(error.args[0])) from None
    try:
        if config.target.heads is not None:
            _check_beside(config)
        for adapter in config.target.adapters:
            read_adapter_config(adapter_directory(adapter.path))
    except (FileNotFoundError, KeyError, UnsuitableHeads, UnsuitableAdapter) as error:
        raise StartError(str(error.args[0])) from None
    try:
        for path in paths:
            directory = model_directory(path)
            check_files(directory, trust_remote_code=_is_trusted(config, path))
            check_model_files(directory)
            check_tokenizer_files(directory)
            _check_weights(path)
        target = config.target
        check_ranks(model_directory(target.path), target.tensor_parallel)
        if target.heads is not None:
            for file in model_directory(target.heads).glob("*.safetensors"):
                check_weights(file)
        end_tokens_of_model(model_directory(target.path))  # which says if they are none
        check_chat_templates(model_directory(target.path))
        check_tokenizer(model_directory(target.path), trust_remote_code=target.trust_remote_code)
        check_certificate(config.http, for_grpc=config.grpc.enabled)
        store = KeyStore(config.security)
        wants_keys = not store.is_empty
    except (UntrustedModel, ValueError) as error:
        raise StartError(str(error)) from None
    warnings = exposure_warnings(config, wants_keys=wants_keys) + certificate_warnings(config.http)
    if config.security.require_keys and not wants_keys:
        raise StartError(
            "security.require_keys is set and there are no API keys: make one with `flotilla keys create` "
            "and set `security.keys_file`, or set FLOTILLA_API_KEY"
        )
    warnings += _check_profile(config) + _unknown_choices(config) + _unknown_tiers(config, store)
    warnings += _unwritable(config)
    _check_log(config)
    if listens:
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


def _check_weights(path: str) -> None:
    directory = model_directory(path)
    try:
        check_quantization(directory)
    except UnsuitableWeights as error:
        raise StartError(f"cannot run the model in {directory}: {error}") from None


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


def _unknown_tiers(config: FlotillaConfig, store: KeyStore) -> list[str]:
    """Not refused: keys come and go while it serves, and one that is wrong is no reason to end."""
    known, keys = {DEFAULT_TIER, *config.tiers}, store.keys()
    return [
        f"API key {key.name} may use {', '.join(unknown)}, and the tiers are: {', '.join(sorted(known))}"
        for key in keys
        if (unknown := sorted(set(key.tiers or ()) - known))
    ]


def _unwritable(config: FlotillaConfig) -> list[str]:
    """Not refused: the cell that writes may run on another machine, and serves without."""
    file = config.debug.decisions_file
    if file is None:
        return []
    place = file if os.path.lexists(file) else file.absolute().parent
    if not (os.path.isdir(file) or _denied(place)):
        return []
    return [
        f"debug.decisions_file: {file} cannot be written on this machine (is its directory there?); "
        "if it cannot where the cell runs, no decisions are recorded in it"
    ]


def _check_log(config: FlotillaConfig) -> None:
    """Refused on this machine: no process starts that cannot log, which Ray Serve tells minutes later."""
    file = config.log.file
    if file is None or "RAY_ADDRESS" in os.environ:  # on a cluster they may run on other machines
        return
    place = next(path for path in (file.absolute(), *file.absolute().parents) if os.path.lexists(path))
    is_file = place == file.absolute()
    if os.path.isdir(place) == is_file or _denied(place):  # directories that are missing are made
        reason = "it is a directory" if is_file and os.path.isdir(place) else f"{place} cannot be written to"
        raise StartError(f"log.file: cannot write {file}: {reason}; name another file, or none")


def _denied(path: Path) -> bool:
    return not os.access(path, os.W_OK)


def _check_ports(config: FlotillaConfig) -> None:
    wanted = [("http.port", config.http.host, config.http.port, "another with --port, or 0 for any free one")]
    if config.grpc.enabled:
        wanted.append(
            ("grpc.port", config.grpc.host, config.grpc.port, "another `grpc.port`, or 0 for any free one")
        )
    if config.metrics.port is not None:
        wanted.append(("metrics.port", config.metrics.host, config.metrics.port, "another `metrics.port`"))
    for (one, host, port, _), (other, beside, same, remedy) in combinations(wanted, 2):
        if port == same != 0 and (host == beside or {host, beside} & set(_EVERY)):
            raise StartError(f"{one} and {other} are both {port}; choose {remedy}")
    with ExitStack() as held:  # until all are looked at: front ends share ports, also with one another
        for _, host, port, remedy in wanted:
            if port:
                held.enter_context(_listening(host, port, remedy))


def _listening(host: str, port: int, remedy: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error
    if reason.errno == errno.EADDRINUSE and not _answers(host, port):
        # What is left of a server's connections keeps the port for a minute from who does not share it.
        with suppress(OSError):
            return shared_listener(host, port)
    # Python's own text names the address once more. Names that are not found have numbers below zero.
    has_number = reason.errno is not None and reason.errno > 0
    why = os.strerror(reason.errno or 0) if has_number else (reason.strerror or "").partition(" (while")[0]
    raise StartError(f"cannot listen on {host}:{port} ({why}); choose {remedy}") from None


def _answers(host: str, port: int) -> bool:
    """Whether somebody takes connections there."""
    address = _EVERY.get(host, host)
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:  # it may be there, and slow
        return True


def _check_profile(config: FlotillaConfig) -> list[str]:
    if config.profile is None:
        return []
    try:
        return load_profile(Path(config.profile), config)[1]
    except ProfileError as error:
        raise StartError(str(error)) from None
