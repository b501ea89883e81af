"""Which target a system serves, so that cells of another one are told apart."""

from __future__ import annotations

import hashlib
import json

from cluster.config import TargetConfig

#: Settings of a target by which clients and requests under way know it. Other weights at the same path are
#: not noticed.
FIELDS = ("path", "dtype", "quantization", "served_name")


def served_target(config: TargetConfig) -> str:
    """A short name of the target's text, the same for all whose texts can be gone on with."""
    described = json.dumps([getattr(config, field) for field in FIELDS])
    return hashlib.sha256(described.encode()).hexdigest()[:12]
