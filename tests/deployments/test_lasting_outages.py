"""Systems without a cell for long, and certificates that there are not."""

from __future__ import annotations

from pathlib import Path

from tests.deployments.promtool_cases import (
    Phases,
    Series,
    expect,
    firing,
    gauge,
    listed,
    needs_promtool,
    run_promtool,
)

pytestmark = needs_promtool

NO_CELL = "FlotillaNoCellReady"


def front_end(steps: int) -> Series:
    """One that is there, and serves without TLS."""
    labels = 'job="f", front_end="x"'
    return {
        f"flotilla_http_requests_open{{{labels}}}": gauge([(steps, 3)]),
        f"flotilla_tls_certificate_expiry_timestamp_seconds{{{labels}}}": gauge([(steps, 0)]),
    }


def cell(phases: Phases) -> Series:
    return {'flotilla_ready{job="f", cell="a"}': gauge(phases)}


def check(tmp_path: Path, series: Series, expected: list[dict[str, object]], step: int = 1) -> None:
    test = {"input_series": listed(series), "promql_expr_test": expected}
    run_promtool(tmp_path, test, step, is_about_slo=False)


def test_an_installation_that_never_has_a_cell_is_missed_after_an_hour(tmp_path: Path) -> None:
    """As where no node has what it asks for: there is not even one that says it is not ready."""
    check(tmp_path, front_end(90), [expect(firing(), 59, 0), expect(firing(NO_CELL), 63, 1)])


def test_an_outage_of_more_than_a_day_is_told_of_until_it_is_over(tmp_path: Path) -> None:
    series = {**front_end(120), **cell([(4, 1), (90, 0), (26, 1)])}
    expected = [expect(firing(NO_CELL), 30 * at, fires) for at, fires in ((3, 0), (8, 1), (90, 1), (96, 0))]
    check(tmp_path, series, expected, step=30)


def test_who_serves_without_tls_has_no_certificate_that_expires(tmp_path: Path) -> None:
    check(tmp_path, {**front_end(90), **cell([(90, 1)])}, [expect(firing(), 80, 0)])
