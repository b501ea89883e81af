"""``flotilla zoo``: train the demo family, evaluate it, write its model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zoo.progress import stage, watching
from zoo.registry import (
    ADAPTER,
    DRAFTERS,
    EAGLE,
    HEADS,
    LARGER_DRAFTER,
    LARGER_TARGET,
    MODELS,
    OTHER_VOCABULARY,
    TARGET,
    WEIGHTS,
)
from zoo.run_folder import (
    FIGURES,
    figures,
    find_target,
    has_shipped_target,
    is_finished,
    made,
    measured,
    missing,
    publish_beside_target,
)

app = typer.Typer(
    help="The embedded demo family: train, distil, evaluate, write the model card.", no_args_is_help=True
)
console = Console()

#: Stages run under this folder unless told otherwise; git ignores it.
BUILD = Path(__file__).parent / "build"
EVALUATION = WEIGHTS / FIGURES
CARD = Path(__file__).parent / "README.md"
#: Where the checkout keeps the replay of drafters that `evaluate` cannot measure.
REPLAY = Path(__file__).parents[1] / "docs" / "results" / "draft-replay.json"

#: Of training, whose learning rate follows the share of them that is over.
LEAST_MINUTES = 0.001


OutOption = Annotated[
    Path,
    typer.Option("--out", file_okay=False, callback=made, help="Folder of the run: data, checkpoints, logs."),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        file_okay=False,
        callback=made,
        help="Folder the finished models are written to; `weights` in --out if unset.",
    ),
]
TeachOption = Annotated[float, typer.Option(min=0.0, help="Minutes in which the target writes answers.")]
ScoreOption = Annotated[float, typer.Option(min=0.0, help="Minutes in which the target reads corpus text.")]
FiguresOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        exists=True,
        dir_okay=False,
        help="Figures to which its own are added; `evaluation.json` in --weights if unset.",
    ),
]


@app.command()
def train(
    minutes: Annotated[
        float, typer.Option(min=LEAST_MINUTES, help="Wall-clock minutes for the target.")
    ] = 65.0,
    drafter_minutes: Annotated[
        float, typer.Option(min=LEAST_MINUTES, help="Minutes of processor time for each drafter.")
    ] = 6.5,
    out: OutOption = BUILD,
    weights: WeightsOption = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Data-parallel processes, one thread each (CPU only).")
    ] = 2,
    target_only: Annotated[
        bool, typer.Option("--target-only", help="Leave the drafters to `distill`.")
    ] = False,
) -> None:
    """Build the corpus, train the target, distil the drafters. A killed run goes on where it was."""
    from zoo import prepare, publish
    from zoo import train as training

    weights = weights or out / "weights"
    if has_shipped_target(out):
        raise typer.BadParameter(
            f"{out} has the shipped target, which is not trained again; name another folder",
            param_hint="--out",
        )
    with stage(console, "reading the corpus"):
        counted = prepare.prepare(out)
    if counted:
        console.print("examples: " + ", ".join(f"{count} {domain}" for domain, count in counted.items()))
    if not is_finished(out, TARGET, console):
        with watching(console, out, {TARGET: minutes}):
            training.run(training.Plan(TARGET, out, out, minutes, ranks=processes))
    publish.copy(TARGET, out, weights)
    shutil.copyfile(out / "prompts.jsonl", weights / "prompts.jsonl")
    if not target_only:
        distill(minutes=drafter_minutes, out=out, weights=weights, processes=processes)


@app.command()
def distill(
    minutes: Annotated[float, typer.Option(min=LEAST_MINUTES, help="Minutes for each drafter.")] = 6.5,
    teach_minutes: TeachOption = 6.5,
    score_minutes: ScoreOption = 1.5,
    out: OutOption = BUILD,
    weights: WeightsOption = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes, one drafter each at a time (CPU only).")
    ] = 2,
    shipped: Annotated[
        bool,
        typer.Option(
            "--shipped", help="Go on from the shipped models: the target teaches, the drafters learn on."
        ),
    ] = False,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Only this drafter; may repeat. All if unset.")
    ] = None,
) -> None:
    """Distil the drafters on the trained target under ``--out``. Minutes are of processor time."""
    from zoo import distill as distillation
    from zoo import publish

    weights = weights or out / "weights"
    every = (*DRAFTERS, *OTHER_VOCABULARY)
    names = tuple(drafter) if drafter else every
    unknown = sorted(set(names) - set(every))
    if unknown:
        raise typer.BadParameter(
            f"no drafter {', '.join(unknown)}; there are {', '.join(every)}", param_hint="--drafter"
        )
    find_target(out, console, shipped=shipped)
    left = {name: minutes for name in names if not is_finished(out, name, console)}
    if not (out / "scored-0.npz").exists():
        console.print(
            f"the target writes answers and reads corpus text: {teach_minutes + score_minutes:g} minutes of "
            "processor time in each process",
            highlight=False,
            soft_wrap=True,
        )
    budgets = distillation.Minutes(teach_minutes, score_minutes, minutes)
    with watching(console, out, left):
        distillation.run(out, out, budgets, processes, names, WEIGHTS if shipped else None)
    for name in names:
        publish.copy(name, out, weights)
    console.print(f"models in {weights}, {publish.total_bytes(weights) / 1e6:.1f} MB")


@app.command()
def heads(
    minutes: Annotated[float, typer.Option(min=LEAST_MINUTES, help="Minutes of training.")] = 7.5,
    read_minutes: Annotated[
        float,
        typer.Option(min=0.0, help="Minutes in which the target reads its answers, for each file of them."),
    ] = 2.0,
    out: OutOption = BUILD,
    weights: WeightsOption = None,
    json_file: FiguresOption = None,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="Measure the heads there are.")
    ] = False,
) -> None:
    """Train and measure the target's decoding heads, on answers `distill` had it write. Processor time."""
    from zoo import card, heads_evaluate
    from zoo import heads as training

    weights = weights or out / "weights"
    json_file = json_file or weights / FIGURES
    figures(json_file)  # what is wrong with them is not to be told after the training
    if not evaluate_only:
        try:
            with stage(console, "the target reads its answers"), watching(console, out, {HEADS: minutes}):
                trained = training.run(out, out / TARGET / "model", out, minutes, read_minutes)
        except FileNotFoundError as error:  # there are no answers
            raise typer.BadParameter(str(error), param_hint="--out") from None
        publish_beside_target(trained, HEADS, out, weights)
    _check_models((TARGET, HEADS), weights)
    found = measured("heads", heads_evaluate.measure, weights, json_file, console)
    console.print(card.heads_tables(found), markup=False, highlight=False)


@app.command()
def eagle(
    minutes: Annotated[float, typer.Option(min=LEAST_MINUTES, help="Minutes of training.")] = 25.0,
    write_minutes: Annotated[
        float,
        typer.Option(
            min=0.0, help="Minutes in which the target writes answers, in each process, if there are none."
        ),
    ] = 7.0,
    out: OutOption = BUILD,
    weights: WeightsOption = None,
    json_file: FiguresOption = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="For the shipped target.")] = False,
    evaluate_only: Annotated[bool, typer.Option("--evaluate-only", help="Measure the one there is.")] = False,
) -> None:
    """Train and measure the target's EAGLE-3 layer, on answers that it writes. Processor time."""
    from zoo import card, eagle_evaluate
    from zoo import eagle as training

    weights = weights or out / "weights"
    json_file = json_file or weights / FIGURES
    figures(json_file)  # what is wrong with them is not to be told after the training
    if not evaluate_only:
        find_target(out, console, shipped=shipped)
        with watching(console, out, {EAGLE: minutes}):
            trained = training.run(out, out / TARGET / "model", out, minutes, write_minutes)
        publish_beside_target(trained, EAGLE, out, weights)
    _check_models((TARGET, EAGLE), weights)
    found = measured("eagle", eagle_evaluate.measure, weights, json_file, console)
    console.print(card.eagle_table(found), markup=False, highlight=False)


@app.command()
def adapter(
    minutes: Annotated[float, typer.Option(min=LEAST_MINUTES, help="Minutes of training.")] = 12.0,
    out: OutOption = BUILD,
    weights: WeightsOption = None,
    json_file: FiguresOption = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="For the shipped target.")] = False,
    evaluate_only: Annotated[bool, typer.Option("--evaluate-only", help="Measure the one there is.")] = False,
) -> None:
    """Train and measure the target's adapter (LoRA) that answers in one sentence. Processor time."""
    from zoo import adapter as training
    from zoo import adapter_evaluate, card

    weights = weights or out / "weights"
    json_file = json_file or weights / FIGURES
    figures(json_file)  # what is wrong with them is not to be told after the training
    if not evaluate_only:
        find_target(out, console, shipped=shipped)
        with watching(console, out, {ADAPTER: minutes}):
            trained = training.run(out, out / TARGET / "model", out, minutes)
        publish_beside_target(trained, ADAPTER, out, weights)
    _check_models((TARGET, ADAPTER), weights)
    found = measured("adapter", adapter_evaluate.measure, weights, json_file, console)
    console.print(card.adapter_table(found), markup=False, highlight=False)


@app.command(name="prepare")
def prepare_data(out: OutOption = BUILD) -> None:
    """Make the data of `pair`: the corpus in the shipped tokenizer, without what shipped prompts ask for."""
    from zoo import prepare

    with stage(console, "reading the corpus"):
        prepare.prepare(out, WEIGHTS / TARGET)
        dropped = prepare.drop_shipped(out)
    console.print(f"data in {out}; {dropped} examples left out, for they have a shipped prompt's reference")


@app.command()
def pair(
    data: Annotated[Path, typer.Option(file_okay=False, help="Folder that `prepare` made.")] = BUILD,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for models, logs and `pair.json`.")
    ] = BUILD / "pair",
    target: Annotated[str, typer.Option(help="Shape of the target.")] = LARGER_TARGET,
    drafter: Annotated[str, typer.Option(help="Shape of the drafter.")] = LARGER_DRAFTER,
    minutes: Annotated[
        float, typer.Option(min=LEAST_MINUTES, help="Minutes of the target's training.")
    ] = 3.0,
    teach_minutes: TeachOption = 0.9,
    score_minutes: ScoreOption = 0.25,
    drafter_minutes: Annotated[
        float, typer.Option(min=LEAST_MINUTES, help="Minutes of the drafter's training.")
    ] = 0.75,
) -> None:
    """Train a target and its drafter on a GPU in minutes (of wall-clock time; on a CPU of processor time)."""
    from zoo import distill as distillation
    from zoo import models
    from zoo import pair as training

    for option, name, known in (
        ("--target", target, models.SHAPES.keys()),
        ("--drafter", drafter, distillation.DIETS.keys() - set(OTHER_VOCABULARY)),
    ):
        if name not in known:
            raise typer.BadParameter(f"no {name}; there are {', '.join(sorted(known))}", param_hint=option)
    if not (data / "prompts.jsonl").exists():
        raise typer.BadParameter(f"no data in {data}; `flotilla zoo prepare` makes it", param_hint="--data")
    training.run(
        training.Plan(data, out, target, drafter, minutes, teach_minutes, score_minutes, drafter_minutes)
    )
    console.print(f"models and pair.json in {out}")


@app.command()
def evaluate(
    weights: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of the models.")
    ] = WEIGHTS,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per domain (default: all).")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            dir_okay=False,
            help="Where the figures go; `evaluation.json` in --weights if unset.",
        ),
    ] = None,
) -> None:
    """Measure acceptance, goodput and best choices on the shipped held-out prompts; heads, EAGLE's layer and
    the adapter where there are such.
    """
    from zoo import adapter_evaluate, card, eagle_evaluate, heads_evaluate
    from zoo import evaluate as evaluation

    _check_models(MODELS, weights)
    json_file = json_file or weights / FIGURES
    made(json_file.absolute().parent)
    with stage(console, f"evaluating {len(MODELS)} models"):
        reading = evaluation.read(weights, limit)
        result = evaluation.evaluate(reading, weights)
        for part, name, measuring in (
            ("heads", HEADS, heads_evaluate),
            ("eagle", EAGLE, eagle_evaluate),
            ("adapter", ADAPTER, adapter_evaluate),
        ):
            if not missing((name,), weights):
                result[part] = measuring.measure(reading, weights)
    evaluation.write(result, json_file)
    console.print(card.tables(result), markup=False, highlight=False)


@app.command(name="card")
def write_card(
    json_file: Annotated[
        Path, typer.Option("--json", exists=True, dir_okay=False, help="Figures written by `evaluate`.")
    ] = EVALUATION,
    card_file: Annotated[
        Path, typer.Option("--card", exists=True, dir_okay=False, help="The Markdown file.")
    ] = CARD,
    replay_file: Annotated[
        Path,
        typer.Option("--replay", help="Figures of `python -m benchmarks.draft_replay`; none if missing."),
    ] = REPLAY,
) -> None:
    """Fill the measured part of the model card from the figures of evaluation and replay."""
    from zoo import card

    result = figures(json_file)
    replay = json.loads(replay_file.read_text(encoding="utf-8")) if replay_file.is_file() else None
    card_file.write_text(card.fill(card_file.read_text(encoding="utf-8"), result, replay), encoding="utf-8")
    console.print(f"wrote {card_file}")


def _check_models(names: Iterable[str], weights: Path) -> None:
    lacking = missing(names, weights)
    if lacking:
        raise typer.BadParameter(f"no {lacking} in {weights}", param_hint="--weights")


if __name__ == "__main__":
    app()
