"""Build the modules of FlashInfer that a session on a GPU runs, and put them where it looks for built ones.

    python scripts/flashinfer_modules.py SITE

SITE is a folder with FlashInfer in it, from which kernels of other operations are dropped. nvcc is that of
CUDA_HOME, its architectures those of FLASHINFER_CUDA_ARCH_LIST; no GPU is needed. `scripts/gpu_wheels.sh`
calls this.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

#: Of the 8B shape and larger ones; of the 1B shape and the demo family.
HEAD_DIMS = (128, 64)
#: Folders of other operations' kernels, 45 MB of text, of which a few files are imported with the package.
OTHERS = (
    "cute_dsl",
    "experimental",
    "fused_moe",
    "gdn_kernels",
    "gemm/kernels",
    "kda_kernels",
    "moe_ep",
    "prims_ts",
    "topk_varlen",
)


def specifications() -> list[Any]:
    """Of bfloat16 with `backend="fa2"`, and of masks, which FlashInfer packs on the device.

    FlashInfer is asked for what it would load there, and loads nothing: which of several builds of a kernel
    its wrappers take changes from version to version, and so does what that is called.
    """
    core: Any = importlib.import_module("flashinfer.jit.core")
    attention: Any = importlib.import_module("flashinfer.prefill")
    masks: Any = importlib.import_module("flashinfer.quantization.packbits")
    number = torch.bfloat16
    plain = (0, False, False, False)  # no positions, no window, no cap on logits, sums in float32
    asked: list[Any] = []

    def noted(specification: Any) -> Any:
        asked.append(specification)
        return mock.MagicMock()

    with mock.patch.object(core.JitSpec, "build_and_load", noted):
        for dim in HEAD_DIMS:
            attention.get_batch_prefill_module("fa2", number, number, number, torch.int32, dim, dim, *plain)
        masks.get_quantization_module()
    return asked


def drop_others(package: Path) -> None:
    """Remove files of other operations that importing the package does not need."""
    imported = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    for folder in OTHERS:
        for file in (package / folder).rglob("*"):
            if file.is_file() and str(file) not in imported:
                file.unlink()


def main(site: Path) -> None:
    """Build what is not built, two CPU minutes each, and drop the rest."""
    sys.path.insert(0, str(site))
    for module in specifications():
        if not module.is_aot:
            module.build(verbose=False)
            there = site / "flashinfer" / "data" / "aot" / module.name / f"{module.name}.so"
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(module.jit_library_path, there)
        assert module.is_aot, module.name  # found where a session's FlashInfer looks first
        print(f"{module.name}: {module.get_library_path().stat().st_size:,} bytes", flush=True)
    importlib.import_module("flashinfer")
    drop_others(site / "flashinfer")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
