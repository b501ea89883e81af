"""How often a token is decided by rounding in bfloat16, and how often another batch decides it otherwise.

python -m benchmarks.bfloat16_ties [--device cuda] [--prompts 240] [--tokens 96] [--json FILE]

Held-out prompts are answered greedily, one request at a time and a row at a time: decoding alone. Then the
lean runner is given the same tokens again within larger batches, eight requests decoding and eight whose
trees are verified, and each position is decided anew. Logits are as the runner gives them: results in the
model's type, widened to float32. All is done in bfloat16 and in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import tables
from benchmarks.environment import describe
from cluster.model_paths import model_directory
from engine.devices import resolve_device, to_device, to_host
from engine.loading import load_runner
from engine.runner import ModelRunner, Segment
from engine.sampling import Row, decide
from engine.sampling_params import SamplingParams
from zoo.agreement import prompt_ids
from zoo.registry import load_prompts, spread
from zoo.tokenizer import load as load_tokenizer

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

TARGET = "zoo:target-8x384"
DTYPES = ("bfloat16", "float32")
#: Requests and rows of each: decoding in batches, and verification of chains.
BATCHES = ((8, 1), (8, 8))
#: Binary digits of bfloat16, the hidden one among them.
_DIGITS = 8
_GREEDY = Row(SamplingParams(temperature=0.0), 0)


class Decided(NamedTuple):
    """Decisions at the positions of an answer.

    Attributes:
        token: int64 [positions], of the highest logit, the lowest where several have it.
        best: float64 [positions], that logit.
        gap: float64 [positions], to the second-best one.
        lag: float64 [positions], to the logit of the token that the answer has there; 0 if it is `token`.
    """

    token: Int64
    best: Float64
    gap: Float64
    lag: Float64


@dataclass(frozen=True, slots=True)
class Batched:
    """What becomes of answers in batches of one kind.

    Attributes:
        requests, rows: of a forward, and of each request in it.
        flips: positions at which another token is decided than alone.
        near_flips: of them, how many with a gap of at most one unit in the last place of bfloat16. The gap is
            that of the two best logits alone, or that of the two tokens in the batch if that is larger.
        largest_gap: of all flips, in logits; 0 without any.
        largest_gap_units: the same in units in the last place of bfloat16.
        largest_shift: most that the logit of a token decided alone differs, in logits.
        same_answers: answers without a flip: those that such batches decode, too, since up to its first flip
            an answer is given the same tokens.
    """

    requests: int
    rows: int
    flips: int
    near_flips: int
    largest_gap: float
    largest_gap_units: float
    largest_shift: float
    same_answers: int


@dataclass(frozen=True, slots=True)
class Ties:
    """Of answers that a model computed in one type.

    Attributes:
        dtype: of weights and activations.
        answers, positions: decided alone.
        ties: positions whose two best logits are equal.
        near_ties: positions where they are at most one unit in the last place of bfloat16 apart, at the size
            of the best one; the ties are among them.
        batches: the same tokens again, in batches.
    """

    dtype: str
    answers: int
    positions: int
    ties: int
    near_ties: int
    batches: list[Batched]


def last_place(values: Float64) -> Float64:
    """The distance of neighbouring numbers of bfloat16 at the size of each of `values` [n], none 0."""
    _, exponents = np.frexp(values)
    distances: Float64 = np.ldexp(1.0, exponents - _DIGITS)
    return distances


def decoded(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], most: int, end_tokens: Sequence[int] = ()
) -> list[Decided]:
    """Greedy answers of up to `most` tokens, decoded in one batch; the prompts are read together, too."""
    texts = [list(prompt) for prompt in prompts]
    found: list[list[Float64]] = [[] for _ in prompts]
    width = max(map(len, texts)) + most
    under_way = list(range(len(texts)))
    while under_way:
        segments = [_segment(texts[i], i * width, len(texts[i]) if not found[i] else 1) for i in under_way]
        last = np.cumsum([len(segment.tokens) for segment in segments]) - 1
        for i, column in zip(
            under_way, _numbers(runner.forward(segments, last.astype(np.int32))).T, strict=True
        ):
            found[i].append(column)
            texts[i].append(int(column[0]))
        under_way = [i for i in under_way if len(found[i]) < most and texts[i][-1] not in end_tokens]
    return [_decided(np.array(columns).T) for columns in found]


def decided_again(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], rows: int
) -> list[Decided]:
    """What is decided along answers that are given, in one batch with so many rows of each at a time.

    Prompts are read together and decide the first tokens; then come the answers' tokens in chains of `rows`.
    """
    texts = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    heard = [0] * len(texts)
    found: list[list[Float64]] = [[] for _ in texts]
    width = max(map(len, texts))
    while under_way := [i for i, text in enumerate(texts) if heard[i] < len(text)]:
        segments: list[Segment] = []
        keep: list[int] = []
        given: list[int] = []
        owners: list[int] = []
        first = 0
        for i in under_way:
            is_prompt = heard[i] == 0
            count = len(prompts[i]) if is_prompt else min(rows, len(texts[i]) - heard[i])
            heard[i] += count
            segments.append(_segment(texts[i][: heard[i]], i * width, count))
            wanted = range(first + count - 1 if is_prompt else first, first + count)
            keep += wanted
            place = heard[i] - len(prompts[i])  # of the token that the last of them decides
            given += answers[i][place + 1 - len(wanted) : place + 1]
            owners += [i] * len(wanted)
            first += count
        numbers = _numbers(runner.forward(segments, np.array(keep, dtype=np.int32)), given)
        for i, column in zip(owners, numbers.T, strict=True):
            found[i].append(column)
    return [_decided(np.array(columns).T) for columns in found]


def _segment(text: Sequence[int], first_slot: int, rows: int) -> Segment:
    """The last `rows` tokens of a text with keys from `first_slot` on; those of the others are there."""
    numbers = np.arange(len(text), dtype=np.int32)
    slots = numbers + np.int32(first_slot)
    past = len(text) - rows
    tokens = np.array(text[past:], dtype=np.int32)
    return Segment(tokens=tokens, positions=numbers[past:], slots=slots[past:], past=slots[:past])


@torch.inference_mode()
def _numbers(logits: torch.Tensor, given: Sequence[int] | None = None) -> Float64:
    """Float64 [4, n], the fields of `Decided`, in one transfer."""
    decision = decide(logits, [_GREEDY] * len(logits))
    asked = decision.tokens if given is None else to_device(torch.tensor(given), logits.device)
    best, other = (logits.gather(1, tokens[:, None])[:, 0] for tokens in (decision.tokens, asked))
    lag = best.double() - other
    # Token ids and float32 are exact in float64.
    stacked = torch.stack((decision.tokens.double(), best.double(), decision.gap.double(), lag))
    found: Float64 = (stacked if stacked.device.type == "cpu" else to_host(stacked)).numpy().copy()
    return found


def _decided(numbers: Float64) -> Decided:
    return Decided(numbers[0].astype(np.int64), numbers[1], numbers[2], numbers[3])


def measure(
    runner: ModelRunner,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    end_tokens: Sequence[int] = (),
    batches: Sequence[tuple[int, int]] = BATCHES,
    advance: Callable[[], object] = lambda: None,
) -> tuple[Ties, list[list[int]]]:
    """Answer all prompts alone, then again in batches; the answers come with it.

    Args:
        runner: of the target, with slots for the largest batch.
        dtype: what it computes in.
        prompts: token ids.
        tokens: of each answer, at most.
        end_tokens: those that end one.
        batches: requests and rows of each.
        advance: called after each answer, and after each batch of one.
    """
    alone: list[Decided] = []
    for prompt in prompts:
        alone += decoded(runner, [prompt], tokens, end_tokens)
        advance()
    answers: list[list[int]] = [one.token.tolist() for one in alone]
    found = []
    for requests, rows in batches:
        again: list[Decided] = []
        for first in range(0, len(prompts), requests):
            members = slice(first, first + requests)
            again += decided_again(runner, prompts[members], answers[members], rows)
            advance()
        found.append(compared(alone, again, requests, rows))
    gaps, units = _joined([one.gap for one in alone]), last_place(_joined([one.best for one in alone]))
    ties = Ties(
        dtype=dtype,
        answers=len(alone),
        positions=len(gaps),
        ties=int((gaps == 0).sum()),
        near_ties=int((gaps <= units).sum()),
        batches=found,
    )
    return ties, answers


def compared(alone: Sequence[Decided], again: Sequence[Decided], requests: int, rows: int) -> Batched:
    """Where decisions along the same answers differ."""
    is_flip = [one.token != other.token for one, other in zip(alone, again, strict=True)]
    flips = _joined(is_flip)
    gaps = np.maximum(_joined([one.gap for one in alone]), _joined([one.lag for one in again]))[flips]
    best = _joined([one.best for one in alone])
    shifts = np.abs(_joined([one.best - one.lag for one in again]) - best)
    in_units = gaps / last_place(best[flips])
    return Batched(
        requests=requests,
        rows=rows,
        flips=int(flips.sum()),
        near_flips=int((in_units <= 1).sum()),
        largest_gap=float(gaps.max(initial=0)),
        largest_gap_units=float(in_units.max(initial=0)),
        largest_shift=float(shifts.max()),
        same_answers=sum(not one.any() for one in is_flip),
    )


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both types, print and save; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", default=TARGET, help=f"model directory (default {TARGET})")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    parser.add_argument("--prompts", type=int, default=240, help="held-out prompts (default 240)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer, at most (default 96)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args(argv)
    device, directory = resolve_device(options.device), model_directory(options.path)
    tokenizer = load_tokenizer(directory)
    prompts = [prompt_ids(tokenizer, prompt) for prompt in spread(load_prompts(), options.prompts)]
    width = max(map(len, prompts)) + options.tokens
    # Kept to the end: see docs/gpu.md of what torch does where captured forwards are dropped.
    runners = {
        dtype: load_runner(
            directory,
            dtype=dtype,
            num_slots=max(requests for requests, _ in BATCHES) * width,
            runner="lean",
            device=device,
            self_test=False,
        )
        for dtype in DTYPES
    }
    batches = sum(-(-len(prompts) // requests) for requests, _ in BATCHES)
    results, answers = [], []
    with tables.progress() as bar:
        task = bar.add_task("answers", total=len(DTYPES) * (len(prompts) + batches))
        for dtype, runner in runners.items():
            ties, found = measure(
                runner,
                dtype,
                prompts,
                tokens=options.tokens,
                end_tokens=(int(tokenizer.eos_token_id),),
                advance=lambda: bar.advance(task),
            )
            results.append(ties)
            answers.append(found)
    title = (
        "Logits within a unit in the last place (u) of bfloat16, and tokens that a batch decides otherwise"
    )
    same = sum(one == other for one, other in zip(*answers, strict=True))
    tables.console.print(tables.plain_table(title, *_table(results)))
    tables.console.print(f"{same} of {len(prompts)} answers are the same in {' and '.join(DTYPES)}.")
    record = {
        "benchmark": "bfloat16_ties",
        "environment": describe(),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "tokens": options.tokens,
        "same_in_both": same,
        "results": [asdict(one) for one in results],
    }
    tables.write_json(options.json, record)
    return 0


def _table(results: Sequence[Ties]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: a line for each type and kind of batch."""
    heads = [
        "computed in",
        "positions",
        "equal",
        "in 1 unit",
        "batch",
        "flips",
        "in 1 unit",
        "largest gap",
        "logits shift by",
        "same answers",
    ]
    rows = [
        [
            ties.dtype,
            f"{ties.positions:,}",
            f"{ties.ties / ties.positions:.2%}",
            f"{ties.near_ties / ties.positions:.2%}",
            f"{one.requests} x {one.rows}",
            f"{one.flips} ({one.flips / ties.positions:.2%})",
            str(one.near_flips),
            f"{one.largest_gap:.2g} ({one.largest_gap_units:.2g} u)",
            f"{one.largest_shift:.2g}",
            f"{one.same_answers} of {ties.answers}",
        ]
        for ties in results
        for one in ties.batches
    ]
    return heads, rows


if __name__ == "__main__":
    sys.exit(main())
