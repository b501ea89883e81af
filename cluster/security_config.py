"""Configuration of who may use the API, and how much: keys, what they allow, and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from cluster.config_errors import wrong_fields
from cluster.placement_config import StrictModel
from cluster.strict_yaml import DoubleField, load_yaml

#: Kinds of endpoints a key may open: `api` is everything under /v1, tokens and gRPC.
Permission = Literal["api", "metrics", "debug", "admin"]
ALL_PERMISSIONS: tuple[Permission, ...] = ("api", "metrics", "debug", "admin")

#: `hmac-sha256:SALT:DIGEST`, in hexadecimal digits; see `deployments.api_keys`.
HASH_PATTERN = r"^hmac-sha256:[0-9a-f]{32}:[0-9a-f]{64}$"
Hash = Annotated[str, Field(pattern=HASH_PATTERN)]


class KeyLimits(StrictModel):
    """How much one key may ask for, of all front ends together; unlimited if unset."""

    requests_per_minute: int | None = Field(default=None, ge=1, description="Requests for text or tokens.")
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompts and outputs. A request takes its prompt and all of its `max_tokens` "
        "on arrival, and gets back what it did not use; 4,096 are assumed of a chat that names no bound.",
    )
    max_concurrent: int | None = Field(default=None, ge=1, description="Requests open at once.")


class KeyConfig(StrictModel):
    """One API key. The key itself is kept nowhere."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="For people; must differ among keys."
    )
    hash: Hash = Field(description="What `flotilla keys create` printed.")
    permissions: tuple[Permission, ...] = Field(
        default=("api",), description="Endpoints it opens: `api`, `metrics`, `debug`, `admin`."
    )
    tiers: tuple[str, ...] | None = Field(
        default=None, description="Service tiers its requests may ask for; all if unset."
    )
    models: tuple[str, ...] | None = Field(
        default=None, description="Ids of the target and of adapters that it sees and may ask; all if unset."
    )
    limits: KeyLimits = Field(default=KeyLimits(), description="How much it may ask for.")
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="Its share of a cell that cannot serve all keys at once, relative to the others'.",
    )


class KeysFile(StrictModel):
    """What `security.keys_file` holds."""

    keys: tuple[KeyConfig, ...] = Field(max_length=1000, description="All keys.")

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        for kind in ("name", "hash"):
            values = [getattr(key, kind) for key in keys]
            double = sorted({key.name for key in keys if values.count(getattr(key, kind)) > 1})
            if double:
                raise ValueError(f"keys must differ by {kind}: {', '.join(double)}")
        return keys

    @classmethod
    def load(cls, path: Path) -> KeysFile:
        """Read YAML or JSON.

        Raises:
            ValueError: naming the file and the field that is wrong, but no hash.
        """
        try:
            return cls.model_validate(load_yaml(path.read_text()) or {})
        except OSError as error:
            raise ValueError(f"cannot read the keys in {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no YAML: it is not UTF-8") from None
        except yaml.YAMLError as error:
            where = getattr(error, "problem_mark", None)
            line = "" if where is None else f", line {where.line + 1}"
            wrong = "has a field twice" if isinstance(error, DoubleField) else "is no YAML"
            raise ValueError(f"{path} {wrong}{line}") from None
        except ValidationError as error:
            # Of the values nothing is shown: somebody may have put a key where its hash belongs.
            lines = wrong_fields(error, model=cls)
            raise ValueError(f"the keys in {path} are wrong: {'; '.join(lines)}") from None


class SecurityConfig(StrictModel):
    """Who may use the API (docs/security.md); everybody who can connect while there are no keys."""

    keys_file: Path | None = Field(
        default=None,
        description="YAML or JSON of [keys](security.md#the-keys-file) by their hashes; read again when it "
        "changes.",
    )
    key_hash: Hash | None = Field(
        default=None,
        description="Hash of one more key that may do everything; that of the environment variable "
        "`FLOTILLA_API_KEY` if it is set where `flotilla serve` or a front end runs.",
    )
    require_keys: bool = Field(
        default=False, description="Refuse to start without keys, rather than warn where others can connect."
    )

    @field_validator("keys_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        # Ray's workers have another working directory than who wrote the configuration.
        return None if path is None else path.absolute()
