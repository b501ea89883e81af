"""What is told of a worker's error, which comes through Ray with its traceback."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable

import pytest
from ray.exceptions import RayTaskError

from cluster.lifecycle import cause
from engine.heads_config import UnsuitableHeads
from engine.unsupported_model import UnsupportedModel

TRANSFORMERS = ValueError(
    "Unrecognized configuration class ViTConfig for this kind of AutoModel.\n"
    "Model type should be one of GPT2Config, LlamaConfig, and two hundred more."
)


class Unpicklable(Exception):
    """Cannot travel: its constructor takes what it does not keep, and it holds a function."""

    def __init__(self, wrong: str) -> None:
        super().__init__(f"{wrong} is wrong", lambda: None)


def raised(error: BaseException, by: BaseException | None = None) -> BaseException:
    try:
        raise error from by
    except type(error) as caught:
        return caught


def directly(error: BaseException) -> BaseException:
    return error


def through_ray(error: BaseException) -> BaseException:
    told = "".join(traceback.format_exception(error))
    task = RayTaskError("load", told, error, proctitle="ray::load", pid=1, ip="127.0.0.1")
    came: RayTaskError = pickle.loads(pickle.dumps(task))
    told_here: BaseException = came.as_instanceof_cause()
    return told_here


@pytest.mark.parametrize("way", [directly, through_ray])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UnsupportedModel("cannot load it:\nthis is why"), "cannot load it:\nthis is why"),
        (UnsuitableHeads("heads of\nanother target"), "heads of\nanother target"),
        (ValueError("drafter `d` has another tokenizer"), "drafter `d` has another tokenizer"),
        (raised(UnsupportedModel("it is a vision model"), TRANSFORMERS), "it is a vision model"),
        (TRANSFORMERS, "Unrecognized configuration class ViTConfig for this kind of AutoModel."),
        (KeyError("sillu"), "KeyError: sillu"),
        (KeyError("unknown model `x`"), "unknown model `x`"),
        (FileNotFoundError(2, "No such file or directory", "a"), "No such file or directory: 'a'"),
        (RuntimeError(), "RuntimeError()"),
    ],
)
def test_what_is_wrong_is_told_and_not_the_end_of_its_message(
    way: Callable[[BaseException], BaseException], error: BaseException, told: str
) -> None:
    assert cause(way(error)).removeprefix("[Errno 2] ") == told


def test_of_errors_that_led_to_others_the_first_is_told() -> None:
    first = ValueError("no shard model-2.safetensors")
    assert cause(raised(RuntimeError("Loading failed.\nSee above."), first)) == str(first)
    # One that says less than what was made of it does not.
    assert cause(raised(ValueError("no model type `x` is known"), KeyError("x"))) == (
        "no model type `x` is known"
    )
    # Validators of Transformers' configurations name the field, and say below what is wrong with it.
    told = RuntimeError("Validation error for field 'eps':\n    TypeError: expected float, got str")
    assert cause(raised(told, TypeError("expected float, got str"))) == (
        "Validation error for field 'eps': TypeError: expected float, got str"
    )


def test_an_error_that_cannot_travel_is_told_by_the_end_of_its_traceback() -> None:
    error = raised(Unpicklable("this"))
    told = "".join(traceback.format_exception(error))
    # As Ray says it, wherever pickling fails.
    lost = RuntimeError(f"Exception isn't serializable.\nOriginal exception details:\n{told}")
    assert "Unpicklable" in cause(lost)
    assert "this is wrong" in cause(lost)
