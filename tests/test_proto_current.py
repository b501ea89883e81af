"""The checked-in code of the gRPC service is what its .proto gives."""

from __future__ import annotations

from pathlib import Path

from scripts.generate_proto import GENERATED, PROTO, SOURCES, generate


def test_generated_code_is_current(tmp_path: Path) -> None:
    generate(tmp_path)
    for name in GENERATED:
        checked_in = (SOURCES / PROTO).parent / name
        assert (tmp_path / PROTO).parent.joinpath(name).read_text() == checked_in.read_text(), (
            f"{name} is not what {PROTO} gives; run `make proto`"
        )
