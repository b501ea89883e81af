"""A process's own metrics on a port of its own, for front ends that gather them and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cluster.metric_set import MetricSet

# A loop that does not come round to it for so long is stuck; the scrape fails then.
_REFRESH_TIMEOUT_S = 2.0


class MetricServer:
    """Serves `/metrics` from a thread, on any free port.

    What the process's event loop alone may read is read there; the text is made in the thread.

    Args:
        metrics: what is served.
        host: interface.
        refresh: brings the metrics up to date; called in `loop`.
        loop: of the process; None calls `refresh` in the serving thread.

    Attributes:
        url: where.
    """

    def __init__(
        self,
        metrics: MetricSet,
        host: str,
        refresh: Callable[[], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Refreshed(metrics, refresh, loop))
        self._server, self._thread = start_http_server(0, addr=host, registry=registry)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Refreshed(Collector):
    """Metrics that are brought up to date before they are read."""

    def __init__(
        self, metrics: MetricSet, refresh: Callable[[], None], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._metrics, self._refresh, self._loop = metrics, refresh, loop

    def collect(self) -> Iterable[Family]:
        """See `Collector`."""
        if self._loop is None:
            self._refresh()
        else:
            asyncio.run_coroutine_threadsafe(self._refreshed(), self._loop).result(_REFRESH_TIMEOUT_S)
        yield from self._metrics.registry.collect()

    async def _refreshed(self) -> None:
        self._refresh()
