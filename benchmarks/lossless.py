"""`flotilla bench lossless`: what the whole system returns is what the target alone generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from benchmarks import demo, environment, prompts, tables, workload
from benchmarks.engine_under_test import same_text
from benchmarks.load_client import LoadClient, LoadResult, run_load
from benchmarks.near_ties import TOLERANCE, Difference, audit, explain
from benchmarks.receipts import ReceiptSummary, summarise_receipts
from benchmarks.serve import SPECULATION_OFF, find_model
from benchmarks.transformers_engine import Reference
from deployments.structured_outputs import StructuredFields, constraint_of
from engine.quantization import Quantization
from engine.sampling_params import SamplingParams
from zoo.registry import TARGET

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
PENALISED: dict[str, Any] = {
    **SAMPLED,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
}

#: A schema with free and forced parts, arrays and alternatives.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["question", "statement", "code"]},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "length": {"type": "integer", "minimum": 0, "maximum": 1000},
        "is_long": {"type": "boolean"},
    },
    "required": ["title", "kind", "words", "length"],
    "additionalProperties": False,
}
CONSTRAINED: dict[str, Any] = {**SAMPLED, "structured_outputs": {"json": SCHEMA}}


@dataclass(frozen=True, slots=True)
class LosslessOptions:
    """What `flotilla bench lossless` was asked to do; see its help for the meaning of each."""

    url: str
    model: str | None = None
    target: str = f"zoo:{TARGET}"
    quantization: Quantization | None = None
    adapter: str | None = None
    source: str = "zoo"
    num_prompts: int = 200
    concurrency: int = 16
    drafters: tuple[str, ...] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sampling: bool = True
    max_tokens: int | None = None
    tolerance: float | None = None
    dtype: str = "float32"
    seed: int = 0
    api_key: str | None = None


@dataclass(slots=True)
class VariantResult:
    """One way of asking, compared with what was expected."""

    mode: str
    variant: str
    num_outputs: int
    num_tokens: int
    differences: list[Difference]
    receipts: ReceiptSummary | None
    num_preemptions: int

    @property
    def is_speculative(self) -> bool:
        """Whether drafts were allowed."""
        return not self.variant.startswith("off")

    @property
    def num_accepted(self) -> int:
        """Draft tokens that the target accepted, as the receipts say."""
        return self.receipts.num_accepted if self.receipts is not None else 0

    @property
    def num_unproven(self) -> int:
        """Differences that are no near ties."""
        return sum(not difference.proven for difference in self.differences)


@dataclass(slots=True)
class Suite:
    """The requests of a suite run, and the reference they are judged by."""

    options: LosslessOptions
    client: LoadClient
    reference: Reference
    requests: list[workload.BenchRequest]
    encoded: list[list[int]]
    drafters: tuple[str, ...] = ()
    results: list[VariantResult] = field(default_factory=list)

    def params(self, mode: Mapping[str, Any], index: int) -> SamplingParams:
        """The sampling parameters of a request, as the server understands its body."""
        fields = dict(mode)
        asked = {"structured_outputs": fields.pop("structured_outputs", None)}
        found = constraint_of(StructuredFields.model_validate(asked))
        constraint = None if found is None else found[0]
        return SamplingParams(**fields, constraint=constraint, seed=self.options.seed + index)

    async def ask(self, mode: Mapping[str, Any], extra: Mapping[str, Any], title: str) -> LoadResult:
        """Send all requests of a variant; raises on the first that failed."""
        with tables.progress() as bar:
            task = bar.add_task(title, total=len(self.requests))
            result = await run_load(
                self.client,
                self.requests,
                max_concurrency=self.options.concurrency,
                # Every request has its own seed, the same in every variant.
                extra=lambda request: {
                    **mode,
                    **extra,
                    "seed": self.options.seed + request.index,
                    "return_token_ids": True,
                },
                on_done=lambda outcome: bar.advance(task),
            )
        for outcome, tokens in zip(result.outcomes, self.encoded, strict=True):
            where = f"{title}, prompt {outcome.request.index}"
            if not outcome.is_ok:
                raise RuntimeError(f"{where}: {outcome.error}")
            if outcome.num_output_tokens and not outcome.token_ids:
                raise RuntimeError(f"{where}: the server returns no token ids (`return_token_ids`)")
            if outcome.num_prompt_tokens != len(tokens):
                raise RuntimeError(
                    f"{where}: the server counts {outcome.num_prompt_tokens} prompt tokens, "
                    f"the reference {len(tokens)}: they do not tokenize alike"
                )
        return result

    def judge(
        self, name: str, variant: str, mode: Mapping[str, Any], result: LoadResult, expected: list[list[int]]
    ) -> None:
        """Compare a variant's outputs with the expected ones, and explain every difference."""
        differences = []
        for outcome, tokens, wanted in zip(result.outcomes, self.encoded, expected, strict=True):
            if not same_text(wanted, outcome.token_ids, self.reference.end_tokens):
                index = outcome.request.index
                differences.append(
                    explain(
                        self.reference,
                        self.params(mode, index),
                        tokens,
                        wanted,
                        outcome.token_ids,
                        index=index,
                        domain=outcome.request.domain,
                        tolerance=self.options.tolerance,
                    )
                )
        metrics = [outcome.metrics for outcome in result.outcomes if outcome.metrics is not None]
        self.results.append(
            VariantResult(
                mode=name,
                variant=variant,
                num_outputs=len(result.outcomes),
                num_tokens=sum(outcome.num_output_tokens for outcome in result.outcomes),
                differences=differences,
                receipts=summarise_receipts(metrics),
                num_preemptions=sum(int(entry.get("num_preemptions") or 0) for entry in metrics),
            )
        )

    async def greedy(self) -> None:
        """Greedy outputs of every variant against `generate`."""
        expected = []
        with tables.progress() as bar:
            task = bar.add_task("Reference: Transformers generate, float32", total=len(self.requests))
            for request, tokens in zip(self.requests, self.encoded, strict=True):
                expected.append(self.reference.greedy(tokens, request.max_tokens))
                bar.advance(task)
        off = await self.ask(GREEDY, SPECULATION_OFF, "Greedy, speculation off")
        self.judge("greedy", "off", GREEDY, off, expected)
        auto = await self.ask(GREEDY, {}, "Greedy, all drafters")
        self.judge("greedy", "all drafters", GREEDY, auto, expected)
        for name, extra in self.variants().items():
            result = await self.ask(GREEDY, extra, f"Greedy, {name}")
            self.judge("greedy", name, GREEDY, result, expected)

    async def sampled(self, name: str, mode: Mapping[str, Any]) -> None:
        """Seeded sampling of every variant against the same server without speculation, and that
        against the target alone in Transformers."""
        off = await self.ask(mode, SPECULATION_OFF, f"{name}, speculation off")
        expected = [outcome.token_ids for outcome in off.outcomes]
        alone = [
            audit(
                self.reference,
                self.params(mode, outcome.request.index),
                tokens,
                outcome.token_ids,
                max_tokens=outcome.request.max_tokens,
                end_tokens=self.reference.end_tokens,
            )
            for outcome, tokens in zip(off.outcomes, self.encoded, strict=True)
        ]
        self.judge(name, "off, against Transformers", mode, off, alone)
        for variant, extra in {"all drafters": {}, **self.variants()}.items():
            result = await self.ask(mode, extra, f"{name}, {variant}")
            self.judge(name, variant, mode, result, expected)

    def variants(self) -> dict[str, Mapping[str, Any]]:
        """Body fields of every further variant: each drafter alone, and those asked for by name."""
        alone = {f"{name} alone": {"speculation": {"drafters": [name]}} for name in self.drafters}
        return {**alone, **self.options.variants}


def _print(results: Sequence[VariantResult], reference: Reference) -> None:
    rows = []
    for result in results:
        receipts = result.receipts
        rows.append(
            [
                f"{result.mode}: {result.variant}",
                f"{result.num_outputs - len(result.differences)}/{result.num_outputs}",
                str(len(result.differences) - result.num_unproven),
                str(result.num_unproven),
                f"{result.num_tokens:,}",
                f"{receipts.num_verified:,}" if receipts else "-",
                f"{receipts.num_accepted:,}" if receipts else "-",
                tables.number(receipts.mean_acceptance_length if receipts else None, 2),
                str(result.num_preemptions),
            ]
        )
    heads = ["variant", "identical", "near ties", "unproven", "tokens", "verified", "accepted"]
    heads += ["tok/step", "preempted"]
    tables.console.print(tables.plain_table("Losslessness", heads, rows))
    listed = [(result, difference) for result in results for difference in result.differences]
    if listed:
        rows = [
            [
                f"{result.mode}: {result.variant}",
                f"{difference.domain} {difference.prompt}",
                str(difference.position),
                repr(reference.decode([difference.expected]) if difference.expected >= 0 else "(end)"),
                repr(reference.decode([difference.found]) if difference.found >= 0 else "(end)"),
                f"{difference.gap:.1e}" + (" edge" if difference.at_edge else ""),
                "near tie" if difference.proven else "UNPROVEN",
            ]
            for result, difference in listed
        ]
        heads = ["variant", "prompt", "position", "expected", "found", "gap", "verdict"]
        tables.console.print(tables.plain_table("Every difference", heads, rows))


def _near(options: LosslessOptions) -> str:
    if options.tolerance is None and options.dtype != "float32":
        return f"two units in the last place of {options.dtype}"
    return f"gap up to {TOLERANCE if options.tolerance is None else options.tolerance:g}"


async def run(options: LosslessOptions) -> dict[str, Any]:
    """Run the suite, print its tables and return its JSON record."""
    adapter = None if options.adapter is None else demo.adapter(options.adapter)
    reference = Reference(demo.directory(options.target), options.dtype, options.quantization, adapter)
    loaded = prompts.load(options.source)
    equal = dict.fromkeys(sorted({prompt.domain for prompt in loaded}), 1.0)
    shares = {domain: 1.0 / len(equal) for domain in equal}
    requests = workload.build(
        loaded, count=options.num_prompts, shares=shares, max_tokens=options.max_tokens, seed=options.seed
    )
    encoded = [reference.encode(request.prompt) for request in requests]
    client = LoadClient(options.url, options.model or "", send_slo=False, api_key=options.api_key)
    async with client:
        client.model = await find_model(client, options.model)
        drafters = options.drafters
        if drafters is None:
            served = next((entry for entry in await client.models() if entry["id"] == client.model), {})
            drafters = tuple(served.get("drafters") or ())
        suite = Suite(options, client, reference, requests, encoded, drafters)
        await suite.greedy()
        if options.sampling:
            await suite.sampled("sampled", SAMPLED)
            await suite.sampled("penalties", PENALISED)
            await suite.sampled("JSON schema", CONSTRAINED)
    _print(suite.results, reference)
    unproven = sum(result.num_unproven for result in suite.results)
    outputs = sum(result.num_outputs for result in suite.results)
    differing = sum(len(result.differences) for result in suite.results)
    tables.console.print(
        f"{outputs - differing} of {outputs} outputs are identical, {differing - unproven} differ at a near "
        f"tie ({_near(options)}), {unproven} differ without proof."
    )
    idle = [result for result in suite.results if result.is_speculative and not result.num_accepted]
    if idle:
        names = ", ".join(f"{result.mode}: {result.variant}" for result in idle)
        tables.console.print(
            f"[yellow]No draft token was accepted in {names}: that shows nothing about speculation. A policy "
            "that drafts only where it pays can be replaced for the test (`flotilla serve --policy fixed`)."
            "[/yellow]"
        )
    modes = {"sampled": SAMPLED, "penalties": PENALISED, "JSON schema": CONSTRAINED}
    return {
        "benchmark": "lossless",
        "environment": environment.describe(),
        "options": asdict(options) | {"api_key": None},
        "num_unproven": unproven,
        "without_accepted_drafts": [f"{result.mode}: {result.variant}" for result in idle],
        "results": [asdict(result) for result in suite.results],
        "modes": msgspec.to_builtins(modes),
    }
