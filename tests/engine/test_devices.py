"""Which device a model is put on, what fits there, and that nothing is made beside it."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.devices import (
    DeviceUnavailable,
    Memory,
    memory_of,
    overwrite,
    resolve_device,
    seconds_of,
    see_only_gpu,
)
from engine.experts import FeedForward, SeparateExperts
from engine.gpu_sharing import why_by_turns
from engine.kv_budget import KVBudget, NotEnoughMemory
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.loading import UnsupportedModel, load_runner
from engine.mixture import TopRouter
from tests.engine import tiny_models
from tests.engine.test_static_forwards import batch

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("meta").type == "meta"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(DeviceUnavailable, match=r"`cuda` is not there.*device: cpu.*num_gpus"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceUnavailable, match=r"`cuda:2` is not there: this process sees 2"):
        resolve_device("cuda:2")


def test_ranks_outside_ray_see_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    see_only_gpu(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    see_only_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_processes_on_one_gpu_take_turns_without_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert f"does not listen in {tmp_path}: start `nvidia-cuda-mps-control -d`" in (why_by_turns() or "")
    os.mkfifo(tmp_path / "control")
    assert why_by_turns() is None
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "")
    monkeypatch.setattr("engine.gpu_sharing.DEFAULT_PIPES", str(tmp_path / "other"))
    assert str(tmp_path / "other") in (why_by_turns() or "")


def test_time_and_memory_of_a_cpu() -> None:
    wall, device = seconds_of(lambda: torch.ones(10).sum(), torch.device("cpu"))
    assert wall == device > 0
    memory = memory_of(torch.device("cpu"))
    assert 0 < memory.free < memory.total
    tensor = torch.zeros(2, 3)
    overwrite(tensor, np.arange(6, dtype=np.float64))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_slots_are_what_the_weights_leave_of_the_budget() -> None:
    slot = 131072
    # 0.9 of 140 GiB are 126, less 16 GiB of weights.
    whole = KVBudget("cuda:0", Memory(140 * GIB, 120 * GIB, 16 * GIB), 0.9)
    assert whole.slots(slot) == int(140 * GIB * 0.9 - 16 * GIB) * 1 // slot - (110 * GIB - 108 * GIB) // slot
    # A quarter of the device: others' memory is not counted, nor taken.
    share = KVBudget("cuda:0", Memory(140 * GIB, 100 * GIB, 2 * GIB), 0.8, share=0.25)
    assert share.slots(slot) == 26 * GIB // slot
    # Somebody else took more than their share: what is free is the bound.
    crowded = KVBudget("cuda:0", Memory(140 * GIB, 4 * GIB, 2 * GIB), 0.5)
    assert crowded.slots(slot) == 2 * GIB // slot


def test_too_little_memory_says_what_is_needed_and_what_is_free() -> None:
    full = KVBudget("cuda:0", Memory(16 * GIB, GIB // 2, 15 * GIB), 0.9)
    with pytest.raises(
        NotEnoughMemory, match=r"64 KV slots need 8\.0 MiB on cuda:0 .*0\.5 GiB are free and 15\.0 GiB"
    ):
        full.slots(131072)
    with pytest.raises(NotEnoughMemory, match=r"8192 KV slots need 1\.0 GiB.*num_slots of at most 4096"):
        full.check(8192, 131072)
    full.check(4096, 131072)
    with pytest.raises(NotEnoughMemory, match=r"a share of 0\.1 leaves 0\.0 MiB"):
        KVBudget("cuda:0", Memory(80 * GIB, 40 * GIB, 20 * GIB), 0.9, share=0.1).slots(131072)


def test_weights_go_to_the_device_named_and_the_model_stays() -> None:
    """`meta` stands in for a GPU: every tensor of a rank's share must be on it, and none of the model's."""
    meta = torch.device("meta")
    for name in ("llama_bias", "qwen3", "qwen2_moe"):
        model = tiny_models.build(name)
        weights = load_llama_weights(model, device=meta)
        linears = [weights.head, *(getattr(layer, n) for layer in weights.layers for n in ("qkv", "out"))]
        tensors = [weights.embedding, weights.head_scale, weights.rotation, weights.norm_floor]
        networks: list[FeedForward] = []
        for layer in weights.layers:
            if isinstance(layer.mlp, FeedForward):
                networks.append(layer.mlp)
                continue
            assert isinstance(layer.mlp.experts, SeparateExperts)
            assert isinstance(layer.mlp.router, TopRouter)
            assert layer.mlp.shared is not None
            networks += [*layer.mlp.experts._experts, layer.mlp.shared.expert]
            tensors += [layer.mlp.router.weight, layer.mlp.shared.gate, layer.mlp.gain]
        linears += [getattr(network, n) for network in networks for n in ("gate_up", "down")]
        tensors += [layer.head_norms for layer in weights.layers]
        tensors += [
            getattr(linear, part) for linear in linears for part in ("_bias", "_packed", "_transposed")
        ]
        assert {tensor.device.type for tensor in tensors if tensor is not None} == {"meta"}
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}


def test_a_forward_stays_on_its_device() -> None:
    """On `meta`, an operation that mixes devices raises; so does one that reads a value on the host."""
    weights = load_llama_weights(tiny_models.build("qwen3"), device=torch.device("meta"))
    runner = LlamaRunner(weights, 200, "padded")
    rng = np.random.default_rng(0)
    segments = batch(
        rng, [(10, 3, "tree"), (40, 1, "causal"), (0, 20, "causal")], rng.permutation(200).astype(np.int32)
    )
    logits = runner.forward(segments, np.array([0, 5], dtype=np.int32))
    assert (logits.device.type, tuple(logits.shape)) == ("meta", (2, tiny_models.VOCABULARY))
    assert runner.last_hidden(np.zeros(1, dtype=np.int32)).device.type == "meta"


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_quantized_checkpoints_say_what_they_need(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    directory = tiny_models.write("llama", tmp_path)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(
        UnsupportedModel,
        match=r"none of its weights is in a format that is read here; so its"
        if method == "fp8"
        else r"quantized by `gptq`, and none of its weights is",
    ):
        load_runner(directory, num_slots=64)


def test_automatic_slots_on_a_cpu_are_the_default(tmp_path: Path) -> None:
    assert load_runner(tiny_models.write("llama", tmp_path), num_slots="auto").num_slots == 32768


# -- every tensor made in these packages is made on somebody's device ----------------------------------

MAKERS = {"tensor", "empty", "zeros", "ones", "full", "arange", "eye", "rand", "randn", "from_numpy"}
# Why these need none.
EXCEPTIONS = {
    "engine/devices.py": "moves what it makes",
    "engine/linear.py": "tries a kernel of CPUs",
    "engine/token_masks.py": "the branch for CPUs",
}


def makers_without_device(path: Path) -> list[str]:
    """Calls of torch that make a tensor, and neither name a device nor are handed to what does."""
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS
        ):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        if any(keyword.arg == "device" for keyword in node.keywords):
            continue
        above: ast.AST = node
        moved = False
        while isinstance(above, ast.expr) and not moved:
            above = parents[above]
            name = (
                getattr(above.func, "attr", getattr(above.func, "id", ""))
                if isinstance(above, ast.Call)
                else ""
            )
            moved = name in {"to", "to_device"}
        if not moved and not _is_moved_later(node, parents):
            found.append(f"{path.name}:{node.lineno} torch.{node.func.attr}")
    return found


def _is_moved_later(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether the statement assigns to a name, or fills a list, that the same function hands to `to`."""
    while not isinstance(node, ast.stmt):
        node = parents[node]
    if not isinstance(node, ast.Assign):
        return False
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    function = node
    while not isinstance(function, ast.FunctionDef):
        function = parents[function]
    moved = [
        call
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and getattr(call.func, "attr", getattr(call.func, "id", "")) in {"to", "to_device"}
    ]
    used = {name.id for call in moved for name in ast.walk(call) if isinstance(name, ast.Name)}
    loops = [part for part in ast.walk(function) if isinstance(part, ast.comprehension)]
    used |= {p.iter.id for p in loops if isinstance(p.iter, ast.Name) and getattr(p.target, "id", "") in used}
    return bool(names & used)


@pytest.mark.parametrize("package", ["engine", "drafters", "verifier"])
def test_every_tensor_is_made_on_a_device(package: str) -> None:
    found = []
    for path in sorted((ROOT / package).glob("*.py")):
        if str(path.relative_to(ROOT)) not in EXCEPTIONS:
            found += makers_without_device(path)
    assert found == []


def test_the_scan_finds_what_has_no_device(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "def f(device, a):\n"
        "    b = torch.zeros(3)\n"
        "    c = torch.from_numpy(a)\n"
        "    d = torch.ones(2, device=device)\n"
        "    return b + c.to(device) + d + torch.tensor(a).to(device)\n"
    )
    assert makers_without_device(file) == ["some.py:2 torch.zeros"]
