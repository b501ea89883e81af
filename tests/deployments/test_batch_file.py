"""Files of batches: what is refused before anything is sent, and what a file of answers says is done."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.batch_file import BatchFileError, BatchOutput, answer_line, error_line, read_requests
from tests.examples import examples

CHAT = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}


def line(**changed: Any) -> str:
    return json.dumps({**CHAT, **changed})


def test_requests_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    lines = [
        line(body={"messages": [], "model": "demo", "stream": False}),
        "",
        line(custom_id="ü", url="/v1/completions", body={"prompt": "naïve 🙂"}),
        line(custom_id="c", url="/v1/responses", body={"input": "hi", "model": None}),
    ]
    file.write_text("\n".join(lines), encoding="utf-8-sig")  # as Windows writes it; no end of the last line
    first, second, third = read_requests(file)
    assert [one.custom_id for one in (first, second, third)] == ["a", "ü", "c"]
    assert [one.endpoint for one in (second, third)] == ["/v1/completions", "/v1/responses"]
    assert second.body == {"prompt": "naïve 🙂"}
    assert (first.has_model, second.has_model, third.has_model) == (True, False, False)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("{", "is no JSON"),
        ('{"custom_id": NaN}', "NaN is no number"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "must be an object"),
        (line(custom_id=7), "`custom_id` must be a string"),
        (line(custom_id=""), "`custom_id` must be a string"),
        (line(custom_id="first"), "is that of line 1, too"),
        (line(method="GET"), "`method` must be"),
        (line(url="/v1/embeddings"), "one of /v1/chat/completions, /v1/completions, /v1/responses"),
        (line(url=["/v1/completions"]), "`url` must be one of"),
        (line(body="hi"), "`body` must be an object"),
        (line(body={"stream": True}), "leave out `stream`"),
        (b"\xff\n", "is no JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, wrong: str | bytes, told: str) -> None:
    file = tmp_path / "in.jsonl"
    raw = wrong if isinstance(wrong, bytes) else wrong.encode()
    file.write_bytes(line(custom_id="first").encode() + b"\n\n" + raw + b"\n")
    with pytest.raises(BatchFileError) as caught:
        read_requests(file)
    assert str(caught.value).startswith(f"{file}, line 3: ")
    assert told in str(caught.value)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="cannot read"):
        read_requests(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BatchFileError, match="no requests"):
        read_requests(tmp_path / "empty")


def test_the_last_line_of_a_request_counts(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with BatchOutput(file) as output:
        assert output.answered == frozenset()
        for name, status in [("a", 500), ("b", 200), ("a", 200), ("b", 404), ("c", 200), ("d", 400)]:
            output.append(answer_line(name, status, "", {"text": "half \ud83d" if name == "c" else "ü"}))
        output.append(error_line("c", "invalid_answer", "no JSON"))
    with BatchOutput(file) as output:
        assert output.answered == {"a"}
    lines = [json.loads(one) for one in file.read_bytes().splitlines()]
    assert len({one["id"] for one in lines}) == len(lines) == 7
    assert lines[1]["response"] == {"status_code": 200, "request_id": "", "body": {"text": "ü"}}
    assert (lines[1]["error"], lines[6]["response"]) == (None, None)
    assert lines[4]["response"]["body"]["text"] == "half \ud83d"


@pytest.mark.parametrize(
    "text", ["12", "hello", "{}\n", '{"custom_id": "a"}\n', line(), '{"id": "resp_1', "1\n"]
)
def test_another_file_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes"
    file.write_text(text)
    with pytest.raises(BatchFileError, match=str(file)):
        BatchOutput(file)
    assert file.read_text() == text


def test_a_file_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with BatchOutput(file), pytest.raises(BatchFileError, match="another `flotilla batch`"):
        BatchOutput(file)
    BatchOutput(file).__exit__()
    with pytest.raises(BatchFileError, match="no file"):
        BatchOutput(tmp_path)
    with pytest.raises(BatchFileError, match="cannot write"):
        BatchOutput(tmp_path / "nowhere" / "out.jsonl")


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, room = os.write, 12

    def write(file: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = really(file, data[: min(room, 7)])
        room -= written
        return written

    file = tmp_path / "out.jsonl"
    with BatchOutput(file) as output, monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(BatchFileError, match="No space left"):
            output.append(error_line("a", "b", "c"))
    assert file.stat().st_size == 12
    with BatchOutput(file) as output:
        output.append(answer_line("a", 200, "", {}))
    assert len(file.read_bytes().splitlines()) == 1


@examples(200)
@given(
    names=st.lists(st.text(min_size=1, max_size=3), max_size=4),
    statuses=st.lists(st.sampled_from([200, 400]), min_size=4, max_size=4),
    data=st.data(),
)
def test_a_file_cut_anywhere_keeps_its_whole_lines(
    names: list[str], statuses: list[int], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "out.jsonl")
        with BatchOutput(file) as output:
            for name, status in zip(names, statuses, strict=False):
                output.append(answer_line(name, status, name, {"text": name}))
        whole = file.read_bytes()
        size = data.draw(st.integers(0, len(whole)))
        file.write_bytes(whole[:size])
        lines = whole.splitlines(keepends=True)
        # Of a whole one, the newline alone may be missing.
        num_whole = sum(end - 1 <= size for end in accumulate(map(len, lines)))
        last = dict(zip(names[:num_whole], statuses, strict=False))
        with BatchOutput(file) as output:
            assert output.answered == {name for name, status in last.items() if status == 200}
        assert file.read_bytes() == b"".join(lines[:num_whole])
