"""``flotilla zoo``: train the demo family, evaluate it, write its model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

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

if TYPE_CHECKING:
    from zoo.evaluate import Reading

app = typer.Typer(
    help="The embedded demo family: train, distil, evaluate, write the model card.", no_args_is_help=True
)
console = Console()

#: Stages run under this folder unless told otherwise; git ignores it.
BUILD = Path(__file__).parent / "build"
EVALUATION = WEIGHTS / "evaluation.json"
CARD = Path(__file__).parent / "README.md"
#: Where the checkout keeps the replay of drafters that `evaluate` cannot measure.
REPLAY = Path(__file__).parents[1] / "docs" / "results" / "draft-replay.json"

#: Of training, whose learning rate follows the share of them that is over.
LEAST_MINUTES = 0.001

OutOption = Annotated[
    Path, typer.Option("--out", file_okay=False, help="Folder of the run: data, checkpoints, logs.")
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        file_okay=False,
        help="Folder the finished models are written to; `weights` in --out if unset.",
    ),
]
TeachOption = Annotated[float, typer.Option(min=0.0, help="Minutes in which the target writes answers.")]
ScoreOption = Annotated[float, typer.Option(min=0.0, help="Minutes in which the target reads corpus text.")]
FiguresOption = Annotated[
    Path,
    typer.Option("--json", exists=True, dir_okay=False, help="Figures to which its own are added."),
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
    from zoo.progress import watching

    weights = weights or out / "weights"
    if _has_shipped_target(out):
        raise typer.BadParameter(
            f"{out} has the shipped target, which is not trained again; name another folder",
            param_hint="--out",
        )
    with console.status("reading the corpus"):
        counted = prepare.prepare(out)
    if counted:
        console.print("examples: " + ", ".join(f"{count} {domain}" for domain, count in counted.items()))
    if not (out / TARGET / "model" / "model.safetensors").exists():
        with watching(out, {TARGET: minutes}):
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
    from zoo.progress import watching

    weights = weights or out / "weights"
    every = (*DRAFTERS, *OTHER_VOCABULARY)
    names = tuple(drafter) if drafter else every
    unknown = sorted(set(names) - set(every))
    if unknown:
        raise typer.BadParameter(
            f"no drafter {', '.join(unknown)}; there are {', '.join(every)}", param_hint="--drafter"
        )
    _find_target(out, shipped=shipped)
    budgets = distillation.Minutes(teach_minutes, score_minutes, minutes)
    with watching(out, dict.fromkeys(names, minutes)):
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
    json_file: FiguresOption = EVALUATION,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="Measure the heads there are.")
    ] = False,
) -> None:
    """Train and measure the target's decoding heads, on answers `distill` had it write. Processor time."""
    from zoo import card, heads_evaluate
    from zoo import heads as training

    weights = weights or out / "weights"
    if not evaluate_only:
        try:
            with console.status("training the heads"):
                trained = training.run(out, out / TARGET / "model", out, minutes, read_minutes)
        except FileNotFoundError as error:  # there are no answers
            raise typer.BadParameter(str(error), param_hint="--out") from None
        _publish_beside_target(trained, HEADS, out, weights)
    found = _measured("heads", heads_evaluate.measure, weights, json_file)
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
    json_file: FiguresOption = EVALUATION,
    shipped: Annotated[bool, typer.Option("--shipped", help="For the shipped target.")] = False,
    evaluate_only: Annotated[bool, typer.Option("--evaluate-only", help="Measure the one there is.")] = False,
) -> None:
    """Train and measure the target's EAGLE-3 layer, on answers that it writes. Processor time."""
    from zoo import card, eagle_evaluate
    from zoo import eagle as training
    from zoo.progress import watching

    weights = weights or out / "weights"
    if not evaluate_only:
        _find_target(out, shipped=shipped)
        with watching(out, {EAGLE: minutes}):
            trained = training.run(out, out / TARGET / "model", out, minutes, write_minutes)
        _publish_beside_target(trained, EAGLE, out, weights)
    found = _measured("eagle", eagle_evaluate.measure, weights, json_file)
    console.print(card.eagle_table(found), markup=False, highlight=False)


@app.command()
def adapter(
    minutes: Annotated[float, typer.Option(min=LEAST_MINUTES, help="Minutes of training.")] = 12.0,
    out: OutOption = BUILD,
    weights: WeightsOption = None,
    json_file: FiguresOption = EVALUATION,
    shipped: Annotated[bool, typer.Option("--shipped", help="For the shipped target.")] = False,
    evaluate_only: Annotated[bool, typer.Option("--evaluate-only", help="Measure the one there is.")] = False,
) -> None:
    """Train and measure the target's adapter (LoRA) that answers in one sentence. Processor time."""
    from zoo import adapter as training
    from zoo import adapter_evaluate, card
    from zoo.progress import watching

    weights = weights or out / "weights"
    if not evaluate_only:
        _find_target(out, shipped=shipped)
        with watching(out, {ADAPTER: minutes}):
            trained = training.run(out, out / TARGET / "model", out, minutes)
        _publish_beside_target(trained, ADAPTER, out, weights)
    found = _measured("adapter", adapter_evaluate.measure, weights, json_file)
    console.print(card.adapter_table(found), markup=False, highlight=False)


@app.command(name="prepare")
def prepare_data(out: OutOption = BUILD) -> None:
    """Make the data of `pair`: the corpus in the shipped tokenizer, without what shipped prompts ask for."""
    from zoo import prepare

    with console.status("reading the corpus"):
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
        Path, typer.Option("--json", dir_okay=False, help="Where the figures go.")
    ] = EVALUATION,
) -> None:
    """Measure acceptance, goodput and best choices on the shipped held-out prompts."""
    from zoo import adapter_evaluate, card, eagle_evaluate, heads_evaluate
    from zoo import evaluate as evaluation

    with console.status(f"evaluating {len(MODELS)} models"):
        reading = evaluation.read(weights, limit)
        result = evaluation.evaluate(reading, weights)
        result["heads"] = heads_evaluate.measure(reading, weights)
        result["eagle"] = eagle_evaluate.measure(reading, weights)
        result["adapter"] = adapter_evaluate.measure(reading, weights)
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

    result = json.loads(json_file.read_text(encoding="utf-8"))
    replay = json.loads(replay_file.read_text(encoding="utf-8")) if replay_file.is_file() else None
    card_file.write_text(card.fill(card_file.read_text(encoding="utf-8"), result, replay), encoding="utf-8")
    console.print(f"wrote {card_file}")


def _find_target(out: Path, *, shipped: bool) -> None:
    """Make sure that the run in ``out`` has a trained target; if asked to, the shipped one and the corpus."""
    if shipped:
        from zoo import prepare, tokenizer

        if (out / TARGET / "model").exists() and not _has_shipped_target(out):
            # It would be written over, and its answers, which are kept, would be taken for the other's.
            raise typer.BadParameter(
                f"{out} has a target of its own; name another folder for the shipped one", param_hint="--out"
            )
        with console.status("reading the corpus"):
            prepare.prepare(out, WEIGHTS / TARGET)
        own, taught = (tokenizer.load(folder) for folder in (out / "tokenizer", WEIGHTS / TARGET))
        if own.get_vocab() != taught.get_vocab():
            raise typer.BadParameter(
                f"the data in {out} are in another tokenizer than the shipped target's; name another folder",
                param_hint="--out",
            )
        shutil.copytree(WEIGHTS / TARGET, out / TARGET / "model", dirs_exist_ok=True)
    if not (out / TARGET / "model").exists():
        raise typer.BadParameter(
            f"no trained target in {out}; run `flotilla zoo train` first, or say --shipped",
            param_hint="--out",
        )


def _has_shipped_target(out: Path) -> bool:
    from engine.heads_config import weights_digest

    return weights_digest(out / TARGET / "model") == weights_digest(WEIGHTS / TARGET)


def _publish_beside_target(trained: Path, name: str, out: Path, weights: Path) -> None:
    """Copy what was trained for the target of the run in ``out``, and that target where there is none: the
    one is measured on the other.
    """
    from zoo import publish

    if not (weights / TARGET).exists():
        publish.copy(TARGET, out, weights)
    shutil.copytree(trained, weights / name, dirs_exist_ok=True)


def _measured(
    part: str, measure: Callable[[Reading, Path], dict[str, Any]], weights: Path, json_file: Path
) -> dict[str, Any]:
    """What ``measure`` finds on the held-out prompts, added to the figures in the file as ``part``."""
    from zoo import evaluate as evaluation

    with console.status(f"measuring: {part}"):
        result = json.loads(json_file.read_text(encoding="utf-8"))
        result[part] = measure(evaluation.read(weights, samples=0), weights)
    evaluation.write(result, json_file)
    found: dict[str, Any] = result[part]
    return found


if __name__ == "__main__":
    app()
