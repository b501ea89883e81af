"""Features of prompts: unit vectors that tell templates apart, cheap, and the same everywhere."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from selector.prompt_features import PromptFeatures
from tests.examples import examples

FEATURES = PromptFeatures()
prompts = st.lists(st.integers(0, 200_000), min_size=1, max_size=300)


@examples()
@given(prompts, st.lists(st.text(max_size=5), max_size=2))
def test_they_are_a_unit_vector_and_a_constant(prompt: list[int], labels: list[str]) -> None:
    x = FEATURES.of(prompt, labels)
    assert x.shape == (FEATURES.size,)
    assert x[-1] == 1.0
    assert np.isclose(np.linalg.norm(x[:-1]), 1.0)


def test_another_process_finds_the_same() -> None:
    script = (
        "from selector.prompt_features import PromptFeatures as P; print(P().of([1, 2, 7], ['a']).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == FEATURES.of([1, 2, 7], ["a"]).tolist()


def test_an_empty_prompt_is_the_constant_alone() -> None:
    assert np.array_equal(FEATURES.of([]), np.eye(FEATURES.size)[-1])


def test_prompts_of_one_template_are_nearer_than_prompts_of_two() -> None:
    rng = np.random.default_rng(0)
    heads, tails = rng.integers(0, 4000, (2, 12)), rng.integers(0, 4000, (2, 4))
    made = [
        [FEATURES.of([*heads[kind], *rng.integers(0, 4000, 30), *tails[kind]])[:-1] for _ in range(20)]
        for kind in range(2)
    ]
    same = np.mean([a @ b for kind in made for i, a in enumerate(kind) for b in kind[:i]])
    other = np.mean([a @ b for a in made[0] for b in made[1]])
    assert same > other + 0.3


def test_a_label_tells_equal_prompts_apart() -> None:
    assert FEATURES.of([1, 2, 3], ["batch"]) @ FEATURES.of([1, 2, 3], ["interactive"]) < 1.9


def test_features_of_a_long_prompt_take_as_few_calls_as_those_of_a_short_one() -> None:
    def num_calls(length: int) -> int:
        prompt = np.random.default_rng(0).integers(0, 100_000, length).tolist()
        called: list[str] = []
        sys.setprofile(lambda frame, event, arg: called.append(event))
        try:
            FEATURES.of(prompt)
        finally:
            sys.setprofile(None)
        return len([event for event in called if event in ("call", "c_call")])

    # 30 microseconds on an idle machine.
    assert 10 < num_calls(10) < 60
    assert num_calls(300) == num_calls(1000) == num_calls(10)
