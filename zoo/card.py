"""The measured part of the model card: tables and samples as Markdown, from the evaluation's figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zoo.registry import DOMAINS

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_GROUPS = (*DOMAINS, "all")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(result: dict[str, Any]) -> str:
    """Losses, costs, acceptance, tokens per step, goodput and best-choice shares."""
    head = ["", *_GROUPS]
    parts = [
        "Target's loss on the held-out references (nats per response token): "
        + ", ".join(f"{domain} {loss:.2f}" for domain, loss in result["held_out_loss"].items())
        + ". Mean greedy answer in tokens: "
        + ", ".join(f"{domain} {result['answer_tokens'][domain]:.0f}" for domain in DOMAINS)
        + "; answers ended by the end token within the bound: "
        + ", ".join(f"{domain} {result['finished'][domain]:.0%}" for domain in DOMAINS)
        + ".",
        "CPU cost of one forward (ms, float32, Transformers, one thread, context 128): "
        + ", ".join(f"{name} {value:.2f}" for name, value in result["costs_ms"].items())
        + ".",
    ]
    kinds = (
        (
            "acceptance",
            "Acceptance (share of the target's greedy tokens that are the drafter's first choice)",
            "{:.3f}",
        ),
        ("tokens_per_step", f"Tokens per verify step, chains of {result['chain']}", "{:.2f}"),
        ("goodput", f"Goodput, tokens per CPU second (target alone: {result['plain_goodput']})", "{:.1f}"),
    )
    for key, title, form in kinds:
        rows = [[name, *(form.format(by[g][key]) for g in _GROUPS)] for name, by in result["table"].items()]
        parts.append(f"**{title}**\n\n{_table(head, rows)}")
    rows = [[name, *(f"{result['best'][g][name]:.0%}" for g in _GROUPS)] for name in result["table"]]
    parts.append(f"**Best choice by goodput, share of held-out prompts**\n\n{_table(head, rows)}")
    if "heads" in result:
        parts.append(heads_tables(result["heads"]))
    if "eagle" in result:
        parts.append(eagle_table(result["eagle"]))
    if "adapter" in result:
        parts.append(adapter_table(result["adapter"]))
    return "\n\n".join(parts)


def heads_tables(result: dict[str, Any]) -> str:
    """Accuracy of each decoding head, and tokens per verify step by how many candidates are verified."""
    name, accuracy, steps = result["name"], result["accuracy"], result["tokens_per_step"]
    rows = [
        [f"head {i + 1}", *("{top1:.3f} / {top3:.3f}".format(**accuracy[g][i]) for g in _GROUPS)]
        for i in range(len(accuracy["all"]))
    ]
    seen = f"**`{name}`: the target's greedy token is a head's first choice / among its first three**"
    shapes = [
        [shape.replace("x", ", "), *(f"{steps[g][shape]:.2f}" for g in _GROUPS)] for shape in steps["all"]
    ]
    verified = f"**`{name}`: tokens per verify step, by candidates of each head that are verified**"
    header = ["", *_GROUPS]
    return f"{seen}\n\n{_table(header, rows)}\n\n{verified}\n\n{_table(header, shapes)}"


def eagle_table(result: dict[str, Any]) -> str:
    """Accuracy of each layer of EAGLE's chains, and tokens per verify step."""
    name, accuracy, steps = result["name"], result["accuracy"], result["tokens_per_step"]
    depth = len(accuracy["all"])
    rows = [[f"layer {i + 1}", *(f"{accuracy[g][i]:.3f}" for g in _GROUPS)] for i in range(depth)]
    rows.append(["tokens per verify step", *(f"{steps[g]:.2f}" for g in _GROUPS)])
    title = f"**`{name}`: a layer's token is the target's if those above it are; chains of {depth}**"
    return f"{title}\n\n{_table(['', *_GROUPS], rows)}"


def adapter_table(result: dict[str, Any]) -> str:
    """Losses and lengths of the target's answers without its adapter and with it."""
    both = (result["without"], result["with"])
    rows = [
        ["loss of chat references' first sentences", *(f"{figures['terse_loss']:.2f}" for figures in both)],
        ["chat answers of one sentence", *(f"{figures['one_sentence']:.0%}" for figures in both)],
    ]
    for key, title, form in (
        ("answer_tokens", "mean greedy answer in tokens", "{:.1f}"),
        ("held_out_loss", "loss of whole references", "{:.2f}"),
    ):
        rows += [
            [f"{title}: {domain}", *(form.format(figures[key][domain]) for figures in both)]
            for domain in DOMAINS
        ]
    title = f"**`{result['name']}`: the target's answers without it and with it** (losses in nats per token)"
    return f"{title}\n\n{_table(['', 'without', 'with'], rows)}"


def replay_table(replay: dict[str, Any], names: Iterable[str]) -> str:
    """Drafters that no teacher-forced pass can measure, from a replay of the target's greedy answers.

    Args:
        replay: figures of `python -m benchmarks.draft_replay`.
        names: drafters that have their row elsewhere.
    """
    rows = [
        [name, *("{acceptance:.3f}, {tokens_per_step:.2f}".format(**by[domain]) for domain in DOMAINS)]
        for name, by in replay["drafters"].items()
        if name not in set(names)
    ]
    title = (
        "**By retokenization, and suffix automata: acceptance, tokens per verify step** (chains of "
        f"{replay['depth']}, replayed on\n{replay['prompts']} prompts of each domain)"
    )
    return f"{title}\n\n{_table(['', *DOMAINS], rows)}"


def _fence(text: str) -> str:
    mark = "````"
    return f"{mark}text\n{text.strip(chr(10))}\n{mark}"


def samples(result: dict[str, Any]) -> str:
    """Prompts with the greedy and the sampled answer, unedited."""
    parts: list[str] = []
    for sample in result["samples"]:
        parts.append(
            f"*{sample['domain']}*, prompt:\n\n{_fence(sample['prompt'])}\n\n"
            f"greedy:\n\n{_fence(sample['greedy'])}\n\n"
            f"temperature 0.8:\n\n{_fence(sample['sampled'])}"
        )
    return "\n\n".join(parts)


def fill(text: str, result: dict[str, Any], replay: dict[str, Any] | None = None) -> str:
    """``text`` with everything between the two marks replaced by tables and samples.

    Args:
        text: of the card.
        result: figures of `flotilla zoo evaluate`.
        replay: as of `replay_table`; left out without it.

    Raises:
        ValueError: without the marks.
    """
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the card has no part between {BEGIN} and {END}")
    measured = [tables(result)]
    if replay is not None:
        measured.append(replay_table(replay, result["table"]))
    tables_text = "\n\n".join(measured)  # no backslash in the braces of an f-string before Python 3.12
    return (
        f"{before}{BEGIN}\n\n{tables_text}\n\n## Samples\n\n"
        "The first prompts of each domain, unedited.\n\n"
        f"{samples(result)}\n\n{END}{after}"
    )
