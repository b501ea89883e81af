"""Shapes of models, data sheets of accelerators, and forward times estimated from the two."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.linear_cost import experts_read

BYTES = 2  # bfloat16 or float16


@dataclass(frozen=True)
class Model:
    """Shape of a Llama-like model, or of a mixture of experts.

    Attributes:
        mlp: width of the feed-forward layer, of each expert in a mixture.
        experts, experts_per_token: in each layer, and how many of them a token is sent to; none if 0.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0

    @property
    def expert_share(self) -> float:
        """Of a layer's experts, how many each token is sent to; 0 without any."""
        return self.experts_per_token / self.experts if self.experts else 0.0

    def products(self, ranks: int) -> list[tuple[int, int, int]]:
        """(count, n, k) of the matrix products that all tokens of a forward take part in, on one rank.

        Query, key and value are one.
        """
        kv = max(1, self.kv_heads // ranks)
        heads = max(1, self.heads // ranks)
        attention = [
            (self.layers, (heads + 2 * kv) * self.head_dim, self.hidden),
            (self.layers, self.hidden, heads * self.head_dim),
        ]
        feed_forward = (
            [(self.layers, self.experts, self.hidden)] if self.experts else self.mlp_products(ranks)
        )
        return [*attention, *feed_forward, (1, self.vocab // ranks, self.hidden)]

    def mlp_products(self, ranks: int) -> list[tuple[int, int, int]]:
        """The same of a feed-forward layer, or one expert of each layer."""
        return [
            (self.layers, 2 * self.mlp // ranks, self.hidden),
            (self.layers, self.hidden, self.mlp // ranks),
        ]

    @property
    def kv_bytes(self) -> int:
        """Of one token, over all layers and ranks."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def parameters(self) -> int:
        """Weights, without the embedding that is only looked up."""
        experts = self.experts * sum(count * n * k for count, n, k in self.mlp_products(1))
        return experts + sum(count * n * k for count, n, k in self.products(1))


MODELS = {
    model.name: model
    for model in (
        Model("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
        Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
        Model("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256),
        Model("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064),
        Model("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936),
        Model("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000),
        Model("Llama-2-13B", 40, 5120, 40, 40, 128, 13824, 32000),
        Model("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000),
        Model("LLaMA-30B", 60, 6656, 52, 52, 128, 17920, 32000),
        Model("Vicuna-33B", 60, 6656, 52, 52, 128, 17920, 32000),
        Model("LLaMA-68M", 2, 768, 12, 12, 64, 3072, 32000),
        Model("LLaMA-265M", 12, 1024, 16, 16, 64, 4096, 32000),
        Model("LLaMA-616M", 16, 1536, 24, 24, 64, 6144, 32000),
        Model("LLaMA-1.1B", 22, 2048, 32, 4, 64, 5632, 32000),
        Model("LLaMA-1.4B", 24, 2048, 16, 16, 128, 5504, 32000),
        Model("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, 128, 8),
        Model("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 1536, 151936, 128, 8),
        Model("Mixtral-8x7B", 32, 4096, 32, 8, 128, 14336, 32000, 8, 2),
        Model("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936),
    )
}


@dataclass(frozen=True)
class Accelerator:
    """Data sheet numbers, for rooflines, memory and what tables leave out.

    Attributes:
        bandwidth, flops: bytes and half-precision operations per second.
        memory: bytes.
        efficiency: share of bandwidth and of operations that kernels reach.
        link: bytes per second of all-reduce between ranks.
        kernel_s: seconds a small kernel takes at least; a layer has about four more than its products.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    efficiency: tuple[float, float] = (0.8, 0.65)
    link: float = 200e9
    kernel_s: float = 3e-6


ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        Accelerator("A100-80G", 2.039e12, 312e12, 80e9),
        Accelerator("H100", 3.35e12, 989e12, 80e9, link=350e9),
        Accelerator("H200", 4.8e12, 989e12, 141e9, link=350e9),
        Accelerator("V100", 0.9e12, 112e12, 32e9, efficiency=(0.75, 0.5), link=100e9, kernel_s=5e-6),
    )
}
SMALL_KERNELS = 4


def experts_seconds(model: Model, ranks: int, tokens: int, gpu: Accelerator) -> float:
    """What experts take of a forward, each split over all ranks: the slower of reading and computing.

    Those that some token is sent to are read, and tokens are sent independently.
    """
    bandwidth, flops = gpu.bandwidth * gpu.efficiency[0], gpu.flops * gpu.efficiency[1]
    total = 0.0
    if model.experts:
        read = model.experts * experts_read(float(tokens), model.expert_share)
        for count, n, k in model.mlp_products(ranks):
            moved_s = BYTES * read * n * k / bandwidth
            total += count * max(moved_s, 2 * tokens * model.experts_per_token * n * k / flops, gpu.kernel_s)
    return total


class RooflineTimes:
    """Forward times from data sheets: the slower of reading and computing, kernel by kernel."""

    def __init__(self, gpu: Accelerator) -> None:
        self._gpu = gpu

    def seconds(self, model: Model, ranks: int, batch: int, tokens: int, context: int) -> float:
        """As of `TableTimes`."""
        gpu = self._gpu
        bandwidth, flops = gpu.bandwidth * gpu.efficiency[0], gpu.flops * gpu.efficiency[1]
        total = 0.0
        for count, n, k in model.products(ranks):
            total += count * max(BYTES * n * k / bandwidth, 2 * tokens * n * k / flops, gpu.kernel_s)
        total += experts_seconds(model, ranks, tokens, gpu)
        attended = 4 * tokens * context * model.heads * model.head_dim / ranks / flops
        attention = max(model.kv_bytes / model.layers * batch * context / ranks / bandwidth, attended)
        total += model.layers * (max(attention, gpu.kernel_s) + SMALL_KERNELS * gpu.kernel_s)
        if ranks > 1:
            moved = 2 * (ranks - 1) / ranks * tokens * model.hidden * BYTES / gpu.link
            total += 2 * model.layers * (moved + 8e-6)
        return total
