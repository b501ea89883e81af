"""Which files of a model directory may be loaded: weights that cannot run code, and no code.

PyTorch's `.bin` and `.pt` are Python pickles, which run whatever code they name when they are read;
safetensors are nothing but numbers. Python files in a directory run with all rights of the server.
"""

from __future__ import annotations

import json
from pathlib import Path

SAFE_SUFFIX = ".safetensors"
#: Formats of weights that are not read; most of them are pickles.
REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".npz", ".gguf")
# llama.cpp's, which runs no code, and which Transformers converts only if it is told the file.
_GGUF = ".gguf"
_CONFIGS = ("config.json", "tokenizer_config.json")


class UntrustedModel(ValueError):
    """A model directory whose weights may not be loaded, or that asks for its own code to be run."""


def check_files(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a directory before anything in it is loaded.

    Args:
        directory: of a model.
        trust_remote_code: whether Python code in it may run.

    Raises:
        UntrustedModel: naming the file, and what to do.
    """
    if not any(directory.glob(f"*{SAFE_SUFFIX}")):
        refused = sorted(path for path in directory.iterdir() if path.suffix in REFUSED_SUFFIXES)
        if refused and refused[0].suffix == _GGUF:
            raise UntrustedModel(
                f"{refused[0]} is not read: only safetensors weights are. Take those of the model that it "
                "was made from, or convert it: `AutoModelForCausalLM.from_pretrained(DIRECTORY, "
                f'gguf_file="{refused[0].name}", quantization_config=GgufConfig(dequantize=True))'
                ".save_pretrained(NEW_DIRECTORY)`, and its tokenizer in the same way"
            )
        if refused:
            raise UntrustedModel(
                f"{refused[0]} is not loaded: only safetensors weights are, because other formats may run "
                "code when they are read. Convert it on a machine that may be lost: "
                "`AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY)`, or take "
                "the safetensors files that most models also come with"
            )
    if trust_remote_code:
        return
    for name in _CONFIGS:
        if _needs_code(directory / name):
            raise UntrustedModel(
                f"{directory / name} names Python code that comes with the model (`auto_map`), which is not "
                "run, and Transformers has none of its own for it. Read that code; if you trust it as your "
                "own, set `target.trust_remote_code: true`. A drafter's is never run"
            )


def _needs_code(path: Path) -> bool:
    """Whether code that comes with the model is all there is for it."""
    try:
        config = json.loads(path.read_text())
        if not config.get("auto_map"):
            return False
        own = str(config.get("model_type" if path.name == "config.json" else "tokenizer_class"))
    except (OSError, ValueError, AttributeError):
        return False  # who reads it for what it is will say what is wrong
    # Many models name the code of the time before Transformers had it. The tables import torch.
    if path.name == "config.json":
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return own not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return tokenizer_class_from_name(own) is None
