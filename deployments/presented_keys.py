"""Keys that clients presented lately: each is searched for once, however many there are."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Sequence

from cluster.security_config import KeyConfig
from deployments.api_keys import MOST_CHARACTERS, find_key

#: Valid keys that are remembered; the one longest not presented goes first.
MOST_KEPT = 4096


class PresentedKeys:
    """Finds keys as `find_key` does, whose time grows with their number: it hashes once for each.

    Remembered is a hash under a secret of this process, so that neither memory nor time tells of a key. Who
    presents none that is valid is searched for each time. Any thread may ask.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._keys: Sequence[KeyConfig] = ()
        self._found: dict[bytes, KeyConfig] = {}

    def find(self, presented: str, keys: Sequence[KeyConfig]) -> KeyConfig | None:
        """The key that was presented, None if there is no such key.

        Args:
            presented: by a client.
            keys: all there are; the same object for as long as none of them changes.
        """
        text = presented[: MOST_CHARACTERS + 1].encode("utf-8", "surrogateescape")
        name = hmac.digest(self._secret, text, hashlib.sha256)
        with self._lock:
            if keys is not self._keys:
                self._keys, self._found = keys, {}
            known = self._found.pop(name, None)
            if known is not None:
                self._found[name] = known
                return known
        found = find_key(presented, keys)
        with self._lock:
            if found is not None and keys is self._keys:
                while len(self._found) >= MOST_KEPT:
                    del self._found[next(iter(self._found))]
                self._found[name] = found
        return found
