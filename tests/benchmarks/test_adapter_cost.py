"""What `benchmarks.adapter_cost` measures, and how vLLM is told of the adapter that it is compared with."""

from __future__ import annotations

from benchmarks.adapter_cost import EACH, ONE, PLAIN, UNASKED, measure, random_adapter
from benchmarks.vllm_peer import ADAPTER_NAME, VllmOptions, vllm_command, with_adapter
from deployments.demo import demo_config
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from tests.engine import tiny_models
from zoo.registry import ADAPTER, weights_dir


def test_every_way_is_measured_at_every_point() -> None:
    model = tiny_models.build("llama_least")
    adapters = [random_adapter(model, f"a{number}", 2, number) for number in range(2)]
    # Of every linear layer but the output projection.
    assert all(len(adapter.modules) == 7 and adapter.rank == 2 for adapter in adapters)
    plain, adapted = (LlamaRunner(load_llama_weights(model, adapters=some), 256) for some in ((), adapters))
    found = measure(plain, adapted, 2, context=8, repeats=3, grid=((1, 1), (3, 2)))
    assert [(one["requests"], one["rows"]) for one in found] == [(1, 1), (3, 2)]
    for one in found:
        assert list(one["ms"]) == [PLAIN, UNASKED, ONE, EACH]
        assert all(milliseconds > 0 for milliseconds in one["ms"].values())


def test_both_servers_are_told_of_the_adapter() -> None:
    plain, adapted = VllmOptions(), VllmOptions(adapter=f"zoo:{ADAPTER}")
    assert with_adapter(plain, demo_config()) == demo_config()
    (served,) = with_adapter(adapted, demo_config()).target.adapters
    assert (served.name, served.path) == (adapted.asked_model, f"zoo:{ADAPTER}")
    commands = [vllm_command(one, "/model", "float32", 64, "base", 1) for one in (plain, adapted)]
    assert commands[1] == [
        *commands[0],
        "--enable-lora",
        "--lora-modules",
        f"{ADAPTER_NAME}={weights_dir(ADAPTER)}",
    ]
    assert plain.asked_model != adapted.asked_model
