"""The demo family on the machine it was measured on: what any policy could reach there."""

from __future__ import annotations

from simulator.reproduction.setting import Setting
from simulator.reproduction.spec import Claim, Figure

_OTHERS = ("autoregressive", "fixed-3", "adaserve", "smartspec", "specserve")

_load = Figure(
    name="demo-load",
    title="The demo family on two cores: policies against load, and what knowing all outcomes would bring",
    axis="requests/s",
    points={rate: {"rate": rate} for rate in (1.0, 2.0, 3.0, 4.0, 5.5, 7.0, 9.0)},
    series={name: {"system": name} for name in ("flotilla", *_OTHERS, "oracle")},
    base=Setting(
        profile="demo-2-cores",
        seconds=120.0,
        shares={"code": 0.6, "chat": 0.2, "summary": 0.2},
        lengths={"code": (50, 52), "chat": (25, 27), "summary": (72, 12)},
        max_tokens=128,
        # 1.2, 1.5 and 4.5 times what the cell measured for one request alone that day: 8.5 ms a token,
        # less than the same forwards take beside others.
        objectives={"code": "10.22", "chat": "12.78", "summary": "38.34"},
        max_running=64,
    ),
    metrics=("attainment", "goodput"),
    claims=(
        Claim("flotilla attains no less than any other (2 points)", "ours", "above", "attainment",
              ("flotilla",), _OTHERS, limit=2.0),
        Claim("its goodput is never below autoregressive", "ours", "above", "goodput",
              ("flotilla",), ("autoregressive",)),
        Claim("twice fewer violations than the best other at some rate", "ours", "ratio", "violations",
              ("flotilla",), _OTHERS, limit=2.0,
              why="It takes knowing what is accepted, as the oracle does; past 5.5 even that is not enough"),
        Claim("bound: and the oracle, which knows what will be accepted", "at least 2", "ratio",
              "violations", ("oracle",), _OTHERS, limit=2.0),
    ),
    quick_seconds=30.0,
    also=("throughput", "tokens per step", "TTFT"),
    note="The setting of `flotilla bench compare`, with forwards, messages and the machine's phases as "
    "`bench fidelity` measured them. Lengths vary less than those of the demo's prompts.",
)  # fmt: skip

FIGURES = (_load,)
