"""AdaServe's figures (EuroSys 2026, and of the first version where so named)."""

from __future__ import annotations

from simulator.reproduction.setting import Setting
from simulator.reproduction.spec import Claim, Figure

SPECS = ("vllm-spec-4", "vllm-spec-6", "vllm-spec-8")
BASELINES = ("vllm", "sarathi", "vllm + priority", *SPECS)
_ALL = {
    "flotilla": {"system": "flotilla"},
    "adaserve": {"system": "adaserve"},
    "vllm": {"system": "vllm"},
    "sarathi": {"system": "sarathi"},
    "vllm + priority": {"system": "autoregressive/priority"},
    **{name: {"system": name} for name in SPECS},
    "oracle": {"system": "oracle"},
}
_MAIN = Setting(profile="llama-70b-a100", traced=True)
# The paper's last rate is 4.8; the simulated machine is faster than the paper's and strained only beyond.
_RATES = (2.6, 3.4, 4.0, 4.8, 6.0, 7.2, 8.4)
_STRAINED = (7.2, 8.4)
_MACHINE = (
    "The profile adds up kernels and is faster than the paper's machine: the paper's rates leave it idle "
    "time, and so few requests are late that ratios of them say little"
)
_PREFILL = (
    "Prompts join the trees here for AdaServe as for all; fixed drafts with chunked prompts come near it, so "
    "the distance to them is smaller than the paper's"
)


def _ours(at: tuple[float, ...] = ()) -> tuple[Claim, ...]:
    """What is asked of our default: never below the paper's system."""
    return (
        Claim("flotilla attains no less than adaserve (1 point)", "ours", "above", "attainment",
              ("flotilla",), ("adaserve",), at, 1.0),
        Claim("flotilla's goodput is no lower (1 %)", "ours", "every ratio", "goodput",
              ("adaserve",), ("flotilla",), at, 0.99, why="By a hundredth; seeds differ by little less"),
    )  # fmt: skip


_fig8 = Figure(
    name="adaserve-8-9",
    title="AdaServe figures 8 and 9: attainment and goodput against the arrival rate",
    axis="requests/s",
    points={rate: {"rate": rate} for rate in _RATES},
    series=_ALL,
    base=_MAIN,
    metrics=("attainment", "goodput"),
    also=("throughput", "TTFT"),
    claims=(
        Claim("adaserve attains more than every baseline (1 point)", "at all rates", "above", "attainment",
              ("adaserve",), BASELINES, limit=1.0, why=_PREFILL),
        Claim("its attainment is up to 2.1 times the best baseline's", "2.1x", "gain", "attainment",
              ("adaserve",), BASELINES, limit=2.1, why=_MACHINE),
        Claim("up to 4.3 times fewer violations", "4.3x", "ratio", "violations",
              ("adaserve",), BASELINES, limit=4.3, why=_MACHINE),
        Claim("goodput up to 1.9 times the best baseline's", "1.9x", "gain", "goodput",
              ("adaserve",), BASELINES, limit=1.9, why=_MACHINE),
        *_ours(),
        Claim("1.3 times fewer violations than adaserve at the two highest of the paper's rates here", "ours",
              "every ratio", "violations", ("flotilla",), ("adaserve",), (4.0, 4.8), 1.3, _MACHINE),
        Claim("the same at the two highest rates here", "ours", "every ratio", "violations",
              ("flotilla",), ("adaserve",), _STRAINED, 1.3,
              "At 8.4 most are late under any policy that must guess which drafts are accepted, and all "
              "share the delay: more are on time only if others wait for them (decision 0056)"),
        Claim("bound: violations of flotilla by those of the oracle", "at least 1", "every ratio",
              "violations", ("oracle",), ("flotilla",), _STRAINED, 1.0),
    ),
    note="Arrivals and lengths of AdaServe's files; above 4.8 requests/s its 4.8 file compressed in time. "
    "SpecInfer is in figure 12.",
)  # fmt: skip

_fig10 = Figure(
    name="adaserve-10",
    title="AdaServe figure 10: share of urgent requests, 4.0 and 6.0 requests/s",
    axis="urgent share",
    points={
        share: {"shares": {"code": share, "chat": (1 - share) / 2, "summary": (1 - share) / 2}}
        for share in (0.1, 0.3, 0.5, 0.7, 0.9)
    },
    series={
        **{name: {**_ALL[name], "rate": 4.0} for name in ("flotilla", "adaserve", "sarathi", *SPECS)},
        **{f"{name} @6": {**_ALL[name], "rate": 6.0} for name in ("flotilla", "adaserve", "vllm-spec-4")},
    },
    base=Setting(profile="llama-70b-a100", burstiness=0.7, num_output=256),
    metrics=("attainment", "goodput"),
    claims=(
        Claim("adaserve attains more than every baseline (1 point)", "at all shares", "above", "attainment",
              ("adaserve",), ("sarathi", *SPECS), limit=1.0, why=_PREFILL),
        Claim("up to 4.3 times fewer violations", "4.3x", "ratio", "violations",
              ("adaserve",), ("sarathi", *SPECS), limit=4.3, why=_MACHINE),
        Claim("its attainment hardly depends on the share", "stable", "constant", "attainment",
              ("adaserve",), limit=0.1),
        *_ours(),
        Claim("flotilla attains no less at 6.0 (1 point)", "ours", "above", "attainment",
              ("flotilla @6",), ("adaserve @6",), limit=1.0,
              why="not explained"),
    ),
    note="Built-in mix with the gaps' variation of AdaServe's files: the files have one mix.",
)  # fmt: skip

_fig11 = Figure(
    name="adaserve-11",
    title="AdaServe figure 11: SLO scale of urgent requests",
    axis="SLO scale",
    points={scale: {"objectives": {"code": f"{scale}x"}} for scale in (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)},
    series={name: _ALL[name] for name in ("flotilla", "adaserve", "vllm", "sarathi", *SPECS, "oracle")},
    base=_MAIN,
    metrics=("attainment", "goodput"),
    claims=(
        Claim("adaserve attains more than every baseline (1 point)", "at all scales", "above", "attainment",
              ("adaserve",), ("vllm", "sarathi", *SPECS), limit=1.0, why=_PREFILL),
        Claim("up to 4.61 times fewer violations", "4.61x", "ratio", "violations",
              ("adaserve",), ("vllm", "sarathi", *SPECS), limit=4.61, why="not explained"),
        Claim("continuous batching attains under 40 % below scale 1", "< 40 %", "never below", "violations",
              ("vllm", "sarathi"), at=(0.6, 0.8), limit=60.0,
              why="Just above: 40 % of requests are not urgent, and on time"),
        *_ours(),
    ),
    note="4.0 requests/s. Attainment is of all requests, 40 % of which are not urgent. Figure 10 of the "
    "first version (95 % at 0.8, about 60 % at 0.6) is of urgent ones alone, at 1.0 requests/s, and not "
    "run.",
)  # fmt: skip

_fig12 = Figure(
    name="adaserve-12",
    title="AdaServe figure 12: tokens per request and verify step",
    axis="requests/s",
    points={rate: {"rate": rate} for rate in _RATES},
    series={
        **{name: _ALL[name] for name in ("flotilla", "adaserve", *SPECS, "oracle")},
        "specinfer": {"system": "specinfer"},
    },
    base=_MAIN,
    metrics=("tokens per step", "attainment"),
    claims=(
        Claim("adaserve accepts less as the rate grows", "falls", "declines", "tokens per step",
              ("adaserve",), limit=0.05),
        Claim("fixed lengths accept the same at every rate", "constant", "constant", "tokens per step",
              SPECS, limit=0.05),
        Claim("static trees without a budget attain less than adaserve", "at all rates", "above",
              "attainment", ("adaserve",), ("specinfer",)),
    ),
)  # fmt: skip

_fig14 = Figure(
    name="adaserve-14",
    title="AdaServe figures 13 and 14: categories peak at different times",
    axis="mean requests/s",
    points={rate: {"rate": rate} for rate in (3.0, 4.0, 5.0)},
    series={name: _ALL[name] for name in ("flotilla", "adaserve", "vllm", "sarathi", *SPECS)},
    base=Setting(profile="llama-70b-a100", peaks=True, num_output=256),
    metrics=("attainment", "goodput"),
    claims=(
        Claim("adaserve attains more than every baseline (1 point)", "yes", "above", "attainment",
              ("adaserve",), ("vllm", "sarathi", *SPECS), limit=1.0, why=_PREFILL),
        *_ours(),
    ),
    quick_seconds=120.0,
)  # fmt: skip

_fig16 = Figure(
    name="adaserve-16",
    title="AdaServe figure 16: parts added one after the other",
    axis="requests/s",
    points={rate: {"rate": rate} for rate in (4.8, 6.0, 7.2)},
    series={
        "equal scheduling": {"system": "equal-greedy", "draft_slowdown": 3.0},
        "+ SLO selection": {"system": "adaserve-slo-phase", "draft_slowdown": 3.0},
        "+ throughput selection": {"system": "adaserve", "draft_slowdown": 3.0},
        "+ CUDA graphs": {"system": "adaserve"},
        "flotilla": {"system": "flotilla"},
    },
    base=_MAIN,
    metrics=("attainment",),
    claims=(
        Claim("each part adds attainment", "in this order", "order", "attainment",
              ("equal scheduling", "+ SLO selection", "+ throughput selection", "+ CUDA graphs"), limit=0.0,
              why="Presumably: the SLO phase by itself verifies what a request lacks in expectation, and "
              "nobody gets ahead; whoever is unlucky is late at the end. Equal shares use the whole budget"),
        Claim("throughput selection adds to SLO selection, CUDA graphs to both", "in this order", "order",
              "attainment", ("+ SLO selection", "+ throughput selection", "+ CUDA graphs")),
    ),
    note="Without CUDA graphs the fixed part of a drafter's forward takes three times as long (assumed). "
    "Equal scheduling is `equal-greedy`, which also drafts by the first version's depth and width.",
)  # fmt: skip

_v1_8 = Figure(
    name="adaserve-v1-8",
    title="AdaServe v1 figures 7 and 8: policies without speculation, and selection without SLOs",
    axis="requests/s",
    points={rate: {"rate": rate} for rate in (4.0, 4.8, 6.0, 7.2)},
    series={
        "adaserve-v1": {"system": "adaserve-v1"},
        "equal-greedy": {"system": "equal-greedy"},
        "global-greedy": {"system": "global-greedy"},
        "fcfs": {"system": "autoregressive/fcfs-slo"},
        "stta": {"system": "autoregressive/stta"},
        "sep-pipe": {"system": "autoregressive/sep-pipe"},
    },
    base=_MAIN,
    metrics=("attainment", "goodput"),
    claims=(
        Claim("adaserve attains more than FCFS, STTA and SepPipe (1 point)", "at all rates", "above",
              "attainment", ("adaserve-v1",), ("fcfs", "stta", "sep-pipe"), limit=1.0,
              why="Past saturation only; presumably as in the next row"),
        Claim("and more than EqualGreedy and GlobalGreedy (1 point)", "at all rates", "above", "attainment",
              ("adaserve-v1",), ("equal-greedy", "global-greedy"), limit=1.0,
              why="Serving who needs most first spends a short budget on requests that are late already "
              "(docs/policies.md, `flotilla`)"),
    ),
    note="On the published version's models, workload and objectives; the paper's have Llama-2-70B with a "
    "160M drafter, objectives of 1.0 times the baseline, 60 and 100 ms, and for SepPipe a node per "
    "category.",
)  # fmt: skip

FIGURES = (_fig8, _fig10, _fig11, _fig12, _fig14, _fig16, _v1_8)
