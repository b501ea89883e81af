"""What a directory of decoding heads says of itself: for which target, how many. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

CONFIG, WEIGHTS = "config.json", "heads.safetensors"
KIND = "medusa_heads"


class UnsuitableHeads(ValueError):
    """The heads cannot be used, or not with this target."""


class HeadsDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The `config.json` of a heads directory.

    Attributes:
        kind: always "medusa_heads": tells it from a model's configuration.
        num_heads: head i (from 1) proposes the i-th token after the last one known.
        hidden_size: width of the target's hidden states.
        vocab_size: of the target.
        last_token_scale: what the embedding of the last known token counts for in the heads' input; 0 leaves
            it out.
        target: name of the target they were trained for, for people.
        target_sha256: digest of its weights (`weights_digest`).
    """

    kind: str
    num_heads: int
    hidden_size: int
    vocab_size: int
    last_token_scale: float
    target: str
    target_sha256: str


def read_description(directory: Path) -> HeadsDescription:
    """Read `config.json`.

    Raises:
        UnsuitableHeads: if there is none, or it describes something else.
    """
    try:
        found = msgspec.json.decode((directory / CONFIG).read_bytes())
        fields: dict[str, object] = found if isinstance(found, dict) else {}
        kind = fields.get("kind")
        if kind != KIND:
            what = "of Medusa's repository" if "medusa_num_heads" in fields else f"of kind {kind!r}"
            raise UnsuitableHeads(
                f"no decoding heads in {directory} that can be read: its {CONFIG} is {what}, and only those "
                "made by `flotilla zoo heads` for the very target are; train some, or use another drafter"
            )
        described = msgspec.convert(found, HeadsDescription)
    except (OSError, msgspec.MsgspecError) as error:
        raise UnsuitableHeads(f"no decoding heads in {directory}: {error}") from error
    if described.num_heads < 1:
        raise UnsuitableHeads(f"no decoding heads in {directory}: `num_heads` is {described.num_heads}")
    return described


def weights_digest(model_directory: Path) -> str:
    """SHA-256 over the safetensors files of a model directory, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(model_directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_target(described: HeadsDescription, model_directory: Path) -> None:
    """Refuse heads that were trained for other weights than those in `model_directory`.

    Raises:
        UnsuitableHeads: naming both.
    """
    found = weights_digest(model_directory)
    if found != described.target_sha256:
        raise UnsuitableHeads(
            f"the decoding heads were trained for {described.target} (weights "
            f"{described.target_sha256[:12]}), but the target in {model_directory} has other weights "
            f"({found[:12]}); heads read one model's hidden states and propose nothing sensible on "
            "another's: train them for it (`flotilla zoo heads`), or leave the `heads` drafter out"
        )
