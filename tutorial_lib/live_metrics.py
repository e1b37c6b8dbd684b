"""What an open `LLM` is doing, as Prometheus reads it: text on http://127.0.0.1:<port>/metrics.

Names and meanings are vLLM's with `workbook:` in the place of `vllm:`, so that its dashboards need one change. Counters
grow as rounds are read, histograms get a value per request, gauges are read from the engine when somebody asks. The
registry is this object's own, the address is loopback and nothing else: whoever wants it elsewhere puts a proxy there.
"""

from __future__ import annotations

import errno
from typing import Any

from .errors import OptionError
from .results import Generation

HOST = "127.0.0.1"
PREFIX = "workbook:"
TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TPOT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class LiveMetrics:
    """Answers from its making on. port: 0 takes a free one, see `url`. Raises `OptionError` for a port that is taken
    and for the missing library."""

    def __init__(self, port: int, model_name: str) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
            raise OptionError(f"metrics_port is {port!r}", "a port from 1 to 65535, or 0 for a free one")
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise OptionError(
                "metrics_port is set and prometheus-client is missing", "that package", "install the extra `metrics`"
            ) from None
        self.registry = prometheus.CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry, "labelnames": ("model_name",)}

        def counter(name: str, what: str) -> Any:
            return prometheus.Counter(PREFIX + name, what, **common).labels(model_name)

        self._drafts = counter("spec_decode_num_drafts", "Rounds that drafted something.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens proposed.")
        self._accepted = counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted, bonus tokens not among them."
        )
        self._accepted_at = prometheus.Counter(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted a draft token at this position, counted from 0.",
            registry=self.registry,
            labelnames=("model_name", "position"),
        )
        self._tokens = counter("generation_tokens", "Output tokens.")
        self._preemptions = counter("num_preemptions", "Requests that lost their slot again and were read anew.")
        self._ttft = prometheus.Histogram(
            PREFIX + "time_to_first_token_seconds", "Request start to its first token.", buckets=TTFT_S, **common
        ).labels(model_name)
        self._tpot = prometheus.Histogram(
            PREFIX + "time_per_output_token_seconds",
            "(Latency - time to first token) / (output tokens - 1), of every finished request.",
            buckets=TPOT_S,
            **common,
        ).labels(model_name)
        self._model_name, self._gauge, self._common = model_name, prometheus.Gauge, common
        try:
            self._server, self._thread = prometheus.start_http_server(port, addr=HOST, registry=self.registry)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            why = "is taken" if is_taken else f"cannot be opened ({error.strerror})"
            raise OptionError(
                f"metrics_port {port} on {HOST} {why}", "a free port", "choose another, or 0 for any free one"
            ) from error
        self.url = f"http://{HOST}:{self._server.server_port}/metrics"

    def watch(self, engine: Any) -> None:
        """Read the gauges from this engine's scheduler and cache. One that runs in another process or library shows
        neither here, and there are no gauges then."""
        if not (hasattr(engine, "scheduler") and hasattr(engine, "cache")):
            return
        scheduler, pool = engine.scheduler, engine.cache.pool
        for name, what, value in (
            ("num_requests_running", "Requests with a slot.", lambda: len(scheduler.running)),
            ("num_requests_waiting", "Requests in line.", lambda: len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold, 0 to 1.",
             lambda: pool.held / len(pool.blocks)),
        ):  # fmt: skip
            self._gauge(PREFIX + name, what, **self._common).labels(self._model_name).set_function(value)

    def observe(self, now: Generation, before: Generation | None = None) -> None:
        """Count what a request has done since it was `before`; None: since its start."""
        seen = len(before.rounds) if before else 0
        for r in now.rounds[seen:]:
            if r.drafted:
                self._drafts.inc()
                self._drafted.inc(len(r.drafted))
                self._accepted.inc(r.accepted)
                for position in range(r.accepted):
                    self._accepted_at.labels(self._model_name, str(position)).inc()
        self._tokens.inc(len(now.token_ids) - (len(before.token_ids) if before else 0))
        self._preemptions.inc(now.preemptions - (before.preemptions if before else 0))
        if now.token_ids and not (before and before.token_ids):
            self._ttft.observe(now.ttft_s)
        if now.finish_reason and not (before and before.finish_reason) and len(now.token_ids) > 1:
            self._tpot.observe((now.latency_s - now.ttft_s) / (len(now.token_ids) - 1))

    def close(self) -> None:
        """Stop answering and give the port back. Calling it again does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
