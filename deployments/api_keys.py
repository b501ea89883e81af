"""API keys and their hashes.

A key made here has 256 random bits, so that guessing it from its hash is hopeless however fast hashing is.
Slow hashes (scrypt, argon2) make up for the little entropy of passwords, and would cost every request
milliseconds. A salted HMAC-SHA256 costs a microsecond; the salt keeps equal keys of two systems from being
recognized.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Commands that only send a key need not wait for pydantic.
    from cluster.security_config import KeyConfig, SecurityConfig

#: Environment variable with a key: the server's only one, or the one that `flotilla` commands send.
KEY_VARIABLE = "FLOTILLA_API_KEY"

_SCHEME = "hmac-sha256"
_PREFIX = "flotilla-"
_RANDOM_BYTES = 32
_SALT_BYTES = 16

#: Shorter ones could be guessed from their hash.
LEAST_CHARACTERS = 20
MOST_CHARACTERS = 512


class WeakKey(ValueError):
    """A key that a person chose and that is no key."""


def new_key() -> str:
    """A new random key, of letters, digits, `-` and `_`."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def hash_key(key: str, salt: bytes | None = None) -> str:
    """What is kept of a key: `hmac-sha256:SALT:DIGEST`.

    Raises:
        WeakKey: if it is too short, too long, or cannot be sent in a header.
    """
    if not LEAST_CHARACTERS <= len(key) <= MOST_CHARACTERS:
        raise WeakKey(
            f"the key has {len(key)} characters; it must have {LEAST_CHARACTERS} to {MOST_CHARACTERS}, "
            "random ones: `flotilla keys create` makes one"
        )
    if not all("!" <= character <= "~" for character in key):
        raise WeakKey("the key has spaces or characters beyond ASCII, which a header cannot carry")
    salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
    return f"{_SCHEME}:{salt.hex()}:{_digest(salt, key).hex()}"


def with_environment_key(
    config: SecurityConfig, environment: Mapping[str, str] = os.environ
) -> SecurityConfig:
    """The configuration with the key of the environment, hashed, for front ends on other machines.

    Raises:
        WeakKey: if it is none.
    """
    key = environment.get(KEY_VARIABLE)
    if not key or config.key_hash is not None:
        return config
    return config.model_copy(update={"key_hash": hash_key(key)})


def wants_keys(config: SecurityConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether requests need a key."""
    return any((config.keys_file, config.key_hash, environment.get(KEY_VARIABLE)))


#: Where a command is told that its key is not valid.
KEY_SENT = f"(The key that is sent is that of {KEY_VARIABLE}.)"


def client_headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What `flotilla` commands send to a server: the key of the environment, if there is one."""
    key = environment.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def find_key(presented: str, keys: Sequence[KeyConfig]) -> KeyConfig | None:
    """The key that was presented, None if there is no such key.

    All candidates are compared, each in constant time: the time taken does not say how nearly right it was.
    """
    # No key is longer, and headers of strangers are not to be hashed once for every key at full length.
    presented = presented[: MOST_CHARACTERS + 1]
    found: KeyConfig | None = None
    for key in keys:
        _, salt, digest = key.hash.split(":")
        if hmac.compare_digest(_digest(bytes.fromhex(salt), presented), bytes.fromhex(digest)):
            found = key
    return found


def _digest(salt: bytes, key: str) -> bytes:
    return hmac.digest(salt, key.encode("utf-8", "surrogateescape"), hashlib.sha256)
