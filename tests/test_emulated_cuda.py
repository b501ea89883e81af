"""The emulated CUDA device: what it computes, and what it refuses as a GPU would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.devices import Transfer
from tests.emulated_cuda import IS_NEEDED, Emulation, emulated_cuda
from tests.emulated_tensor import GPU, BrokenRule, DeviceTensor

pytestmark = pytest.mark.skipif(not IS_NEEDED, reason="here is a real one")


@pytest.fixture
def device() -> Iterator[Emulation]:
    with emulated_cuda() as device, torch.inference_mode():
        yield device


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory().to(GPU, non_blocking=True)


def test_tensors_are_there_and_have_the_values_of_torch(device: Emulation) -> None:
    a, b = torch.zeros(2, 3, device="cuda"), on_gpu(1, 2, 3)
    assert (a.device, a.is_cuda, b.device) == (GPU, True, GPU)
    a[1] += b
    a[:, 2:].mul_(2)
    assert device.waits == []
    assert a.tolist() == [[0, 0, 0], [1, 2, 6]]
    assert not isinstance(a.cpu(), DeviceTensor)
    attended = torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 4, device=GPU))
    assert attended.sum().item() == 8
    assert not torch.cuda.graph.__module__.startswith("torch")  # patched, and only within


def test_memory_of_the_device_is_its_own(device: Emulation) -> None:
    host = torch.ones(3)
    there = host.to(GPU)
    host.zero_()
    back = there.cpu()
    there.zero_()
    assert back.tolist() == [1, 1, 1]


def test_a_copy_to_the_host_has_arrived_when_its_event_has(device: Emulation) -> None:
    first, second = Transfer(on_gpu(1, 2)), Transfer(on_gpu(3, 4))
    assert device.waits == []
    assert first._on_host.tolist() == [-7, -7]  # nothing to rely on
    assert first.wait().tolist() == [1, 2]
    assert second._on_host.tolist() == [-7, -7]
    assert second.wait().tolist() == [3, 4]
    assert device.waits == ["an event", "an event"]


@pytest.mark.parametrize(
    "mixes",
    [
        lambda there: there + torch.ones(3),
        lambda there: torch.cat([there, torch.ones(1)]),
        lambda there: there.index_select(0, torch.tensor([1])),
        lambda there: torch.ones(3).add_(there),
        lambda there: torch.nn.functional.linear(there, torch.ones(2, 3)),
    ],
)
def test_operands_lie_on_one_device(mixes: Callable[[torch.Tensor], object], device: Emulation) -> None:
    there = on_gpu(1, 2, 3)
    assert (there * torch.tensor(2.0)).tolist() == [2, 4, 6]  # scalars of the host are taken along
    with pytest.raises(BrokenRule, match="different devices"):
        mixes(there)


@pytest.mark.parametrize(
    "waits",
    [
        lambda there: there.cpu(),
        lambda there: there.tolist(),
        lambda there: there.sum().item(),
        lambda there: bool(there[0] > 0),
        lambda there: there[there > 1],
        lambda there: there.nonzero(),
        lambda there: there[torch.tensor([0])],
        lambda there: there.copy_(torch.ones(3)),
        lambda there: there.copy_(torch.ones(3), non_blocking=True),  # not pinned
        lambda there: torch.tensor([1.0], device=GPU),
        lambda there: torch.cuda.synchronize(),
    ],
)
def test_who_makes_the_host_wait_is_told(waits: Callable[[torch.Tensor], object], device: Emulation) -> None:
    there = on_gpu(1, 2, 3)
    assert device.waits == []
    waits(there)
    assert len(device.waits) == 1
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(BrokenRule, match="makes the host wait"):
        waits(there)


def test_a_replay_runs_the_captured_operations_with_what_lies_there_now(device: Emulation) -> None:
    given, kept = on_gpu(1, 2), on_gpu(0, 0)
    graph, factor = torch.cuda.CUDAGraph(), 3
    with torch.cuda.graph(graph):
        made = (given * factor).view(2, 1)
        kept += made.view(2)
        made = made + 1
    given.copy_(on_gpu(10, 20))
    kept.zero_()
    factor = 100  # numbers of the host are those of the capture
    for _ in range(2):
        graph.replay()
    assert made.tolist() == [[31], [61]]
    assert kept.tolist() == [60, 120]
    assert device.launches.count("replay") == 2


def test_a_capture_neither_waits_nor_hears_from_the_host(device: Emulation) -> None:
    there = on_gpu(1, 2)
    for breaks in (
        lambda: there.sum().item(),
        lambda: there.cpu(),
        lambda: there.copy_(torch.ones(2).pin_memory(), non_blocking=True),
    ):
        with pytest.raises(BrokenRule, match="within a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            breaks()


def test_launches_are_counted_and_views_are_none(device: Emulation) -> None:
    there = torch.empty(4, 2, device=GPU)
    there.t().reshape(2, 2, 2).unbind(0)[0].expand(2, 2, 2)
    assert device.launches == []
    there.t().flatten()  # a copy
    there.view(8)[1:].add_(1)
    assert len(device.launches) == 2
