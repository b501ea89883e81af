"""The API keys of a front end: of a file that may change, of the configuration, of the environment."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.security_config import ALL_PERMISSIONS, KeyConfig, KeysFile, SecurityConfig
from deployments.api_keys import KEY_VARIABLE, hash_key
from deployments.file_stamps import file_stamp

_log = logging.getLogger(__name__)

#: How often a keys file is looked at.
_LOOK_S = 1.0


class KeyStore:
    """The keys as they are now; a file is read again when it changes, and kept as it was while it is wrong.

    Args:
        config: where keys are.
        environment: variables of the process.
        clock: seconds.

    Raises:
        ValueError: if the keys cannot be read at first, or the one of the environment is none.
    """

    def __init__(
        self,
        config: SecurityConfig,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._clock = config.keys_file, clock
        self._own: list[KeyConfig] = []
        if config.key_hash is not None:
            self._own.append(_unlimited("configuration", config.key_hash))
        if key := environment.get(KEY_VARIABLE):
            try:
                self._own.append(_unlimited("environment", hash_key(key)))
            except ValueError as error:
                raise ValueError(f"{KEY_VARIABLE}: {error}") from None
        self._looked_at = clock()
        self._stamp = file_stamp(self._path)
        self._keys = self._own + _read(self._path)

    @property
    def is_empty(self) -> bool:
        """Whether no keys are wanted: a file without any lets nobody in."""
        return self._path is None and not self._own

    def keys(self) -> list[KeyConfig]:
        """All keys."""
        now = self._clock()
        if self._path is not None and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            stamp = file_stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._keys = self._own + _read(self._path)
                    _log.info("%d API keys read from %s", len(self._keys), self._path)
                except ValueError as error:
                    _log.error("the API keys stay as they were: %s", error)
        return self._keys


def _unlimited(name: str, key_hash: str) -> KeyConfig:
    # A name that no key in a file can have.
    return KeyConfig.model_construct(
        name=f"({name})",
        hash=key_hash,
        permissions=ALL_PERMISSIONS,
        tiers=None,
        models=None,
        limits=KeyConfig.model_fields["limits"].default,
        weight=1.0,
    )


def _read(path: Path | None) -> list[KeyConfig]:
    return [] if path is None else list(KeysFile.load(path).keys)
