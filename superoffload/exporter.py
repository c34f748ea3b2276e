"""Serves metrics to Prometheus (`superoffload[metrics]`), on this machine only unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superoffload.engine.stats import GAUGES
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.metrics import PER_STEP, PREFIX, TOTALS

DEFAULT_PORT = 9464


class PrometheusExporter:
    """Serves http://ADDRESS:PORT/metrics until `close`. Give it to `Monitor(optimizer, exporter=...)`.

    `port` 0 takes a free one; `self.port` tells which. Every series has the label `rank`.
    """

    def __init__(self, port: int = DEFAULT_PORT, address: str = "127.0.0.1", rank: int = 0) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise ArgumentError(f"port={port!r}: expected a whole number from 0 to 65535")
        try:
            import prometheus_client
        except ImportError as error:
            raise SuperOffloadError(
                "the Prometheus endpoint needs prometheus-client: pip install 'superoffload[metrics]'"
            ) from error
        self._registry = prometheus_client.CollectorRegistry()
        self._rank = str(rank)
        self._seen: dict[str, float] = {}
        self._series: dict[str, Any] = {}
        for name, (unit, text) in {**TOTALS, **PER_STEP}.items():
            counts = name in TOTALS and name not in GAUGES
            kind = prometheus_client.Counter if counts else prometheus_client.Gauge
            self._series[name] = kind(f"superoffload_{name}", f"{text} ({unit})", ["rank"], registry=self._registry)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, self._registry)
        except OSError as error:
            raise ArgumentError(
                f"port={port}, address={address}: cannot listen there ({error.strerror}); choose another port, or 0 "
                f"for a free one"
            ) from error
        self.port = int(self._server.server_port)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Takes what `Monitor.step()` returns."""
        for key, value in metrics.items():
            name = key.removeprefix(PREFIX)
            series = self._series.get(name)
            if series is None:
                continue
            if name in TOTALS and name not in GAUGES:
                grown = value - self._seen.get(name, 0.0)
                self._seen[name] = value
                series.labels(self._rank).inc(max(0.0, grown))
            else:
                series.labels(self._rank).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> PrometheusExporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
