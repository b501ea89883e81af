"""Counter-based Gumbel noise: the randomness of a request as a function of (seed, output position, token).

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), the generator of
Random123. A counter-based generator has no state, so any worker can compute the noise of any output
position in any order and gets the same bits: that is what makes sampling independent of the drafter
(design, idea 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine import host_noise
from engine.devices import to_device
from engine.host_noise import MULTIPLIERS, ROUNDS, WEYL
from engine.triton_sampling import gumbel_by_triton
from engine.triton_support import runs_triton

_MASK32 = 0xFFFFFFFF


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 of many counters at once.

    Args:
        counter: int64 [4, ...], 32-bit words.
        key: int64 [2, ...], 32-bit words; `counter[0]` and `key[0]` broadcast together.

    Returns:
        int64 [4, ...], 32-bit words in the order of Random123.
    """
    # Torch has no unsigned 32x32->64 product. An int64 product wraps to the right low 64 bits on every
    # device; whatever a right shift then smears over the upper half is masked off once per round.
    even, odd = counter[0::2], counter[1::2]
    shape = torch.broadcast_shapes(even.shape[1:], key.shape[1:])
    even = even.expand(2, *shape)
    odd = odd.expand(2, *shape)
    key = key.clone()
    weyl = to_device(torch.tensor(WEYL), key.device).view(2, *[1] * (key.dim() - 1))
    for _ in range(ROUNDS):
        product = even.new_empty((2, *shape))
        # The rounds cross the halves over: word pair (0, 1) is fed from word 2 and the reverse.
        torch.mul(even[0], MULTIPLIERS[0], out=product[1])
        torch.mul(even[1], MULTIPLIERS[1], out=product[0])
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_MASK32)
        odd = product
        key = (key + weyl) & _MASK32
    return torch.stack((even[0], odd[0], even[1], odd[1])).bitwise_and_(_MASK32)


def uniform_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Uniform numbers strictly inside (0, 1), float64 [n, vocab]: row i belongs to (seeds[i], positions[i]).

    Token id v takes word `v % 4` of counter block `v // 4`, so a row does not depend on the vocabulary's
    size beyond being cut there.

    Args:
        seeds: n keys; taken modulo 2**64, so negative ones are fine.
        positions: n output positions, 0 <= position < 2**32.
        vocab_size: tokens per row.
        device: where the rows are wanted.
    """
    n, device = len(seeds), torch.device(device)
    if device.type == "cpu":
        return to_device(torch.from_numpy(host_noise.uniform(seeds, positions, vocab_size)), device)
    blocks = -(-vocab_size // 4)
    seed_words = [[seed & _MASK32 for seed in seeds], [(seed >> 32) & _MASK32 for seed in seeds]]
    key = to_device(torch.tensor(seed_words, dtype=torch.int64), device).view(2, n, 1)
    counter = torch.zeros((4, n, blocks), dtype=torch.int64, device=device)
    counter[0] = torch.arange(blocks, device=device)
    counter[1] = to_device(torch.tensor(list(positions), dtype=torch.int64), device).view(n, 1)
    words = philox4x32(counter, key).permute(1, 2, 0).reshape(n, blocks * 4)[:, :vocab_size]
    # (word + 1/2) / 2**32 is exact in float64 and can reach neither 0 nor 1.
    return words.double().add_(0.5).mul_(2.0**-32)


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Standard Gumbel noise, float32 [n, vocab]: row i belongs to (seeds[i], positions[i]).

    `argmax(log_probs + noise)` is then a sample of the distribution (Gumbel-max). The logarithms are taken
    in float64: rounded to float32 they agree between devices and batch shapes whatever the last bits of
    a logarithm's implementation.

    Args: as `uniform_noise`.
    """
    device = torch.device(device)
    if runs_triton(device):
        return gumbel_by_triton(seeds, positions, vocab_size, device)
    if device.type == "cpu":
        return to_device(torch.from_numpy(host_noise.gumbel(seeds, positions, vocab_size)), device)
    uniform = uniform_noise(seeds, positions, vocab_size, device=device)
    return uniform.log_().neg_().log_().neg_().float()
