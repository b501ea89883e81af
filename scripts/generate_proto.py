"""Write the Python code of the gRPC service from its .proto, into a directory or over what is checked in."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "deployments" / "proto"
PROTO = "flotilla/v1/generation.proto"
GENERATED = ("generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py")


def generate(target: Path) -> list[Path]:
    """Write the code below `target`; returns its files. Raises RuntimeError if the .proto is wrong."""
    status = protoc.main(
        [
            "protoc",
            f"-I{SOURCES}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            PROTO,
        ]
    )
    if status:
        raise RuntimeError(f"protoc cannot compile {SOURCES / PROTO}; what is wrong stands above")
    files = [target / Path(PROTO).parent / name for name in GENERATED]
    # The code calls itself by the .proto's path, which is not where our package lies; messages could neither
    # be imported nor pickled.
    for file in files:
        code = file.read_text()
        code = code.replace("from flotilla.v1 import", "from deployments.proto.flotilla.v1 import")
        file.write_text(
            code.replace("'flotilla.v1.generation_pb2'", "'deployments.proto.flotilla.v1.generation_pb2'")
        )
    return files


if __name__ == "__main__":
    for file in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES):
        print(f"wrote {file}")
