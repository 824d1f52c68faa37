"""Spans and metrics of a run for OpenTelemetry, sent by OTLP over HTTP (`--otlp-endpoint`, or the standard OTEL_EXPORTER_OTLP_… variables).

    run                         one trace: rollouts, train steps, weight syncs, evaluations
    episode                     one trace each, linked to the run
      └── turn
            ├── generate, environment
            └── tool …          one for each call

The SDK sends in threads of its own; a receiver that is down costs nothing but a warning. Nothing is imported while this is off.
Names follow OpenTelemetry's rules: metric `eval/test/pass@2` is the gauge `agentrl.eval/test/pass_at_2`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.types import Trajectory, Turn

VARIABLES = tuple(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT" for kind in ("", "TRACES_", "METRICS_"))
EXPORT_S = 10
"""seconds between exports of metrics, unless OTEL_METRIC_EXPORT_INTERVAL says otherwise"""
QUEUE = 1 << 16
"""spans that wait to be sent; the episodes of a rollout end at once. Further ones are dropped with a warning of the SDK"""
SKIPPED_LANES = ("engine",)
"""lanes of the timeline that repeat the turns of episodes"""


def is_on(config: Config, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a run has a receiver of spans and metrics."""
    given = config.run.otlp_endpoint is not None or any(environment.get(name) for name in VARIABLES)
    return given and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"


def require_telemetry(config: Config) -> None:
    """Refuse a receiver if what sends to it is not installed.

    Raises:
        ConfigError: it is missing.
    """
    if not is_on(config):
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    except ImportError as e:
        given = "--otlp-endpoint" if config.run.otlp_endpoint else next(n for n in VARIABLES if os.environ.get(n))
        raise ConfigError(f"{given} needs OpenTelemetry's SDK; run pip install agentrl[otel]") from e


class Telemetry:
    """A `Tracker` whose metrics are gauges, and which makes spans of the timeline and of episodes.

    Args:
        name: of the run.
        spans: an exporter of spans.
        metrics: a reader of metrics.
    """

    def __init__(self, name: str, spans: Any, metrics: Any) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import Link, set_span_in_context

        resource = Resource.create({"service.name": "agentrl", "agentrl.run": name})
        self._tracers = TracerProvider(resource=resource)
        self._tracers.add_span_processor(BatchSpanProcessor(spans, max_queue_size=QUEUE, schedule_delay_millis=1000))
        self._meters = MeterProvider(resource=resource, metric_readers=[metrics])
        self._tracer, self._meter = self._tracers.get_tracer("agentrl"), self._meters.get_meter("agentrl")
        self._gauges: dict[str, Any] = {}
        self._run = self._tracer.start_span(f"run {name}")
        self._in_context, self._link = set_span_in_context, Link(self._run.get_span_context())

    # -- metrics: see `Tracker` ----------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`. The step is the gauge `agentrl.rollout`."""
        for name, value in {**metrics, "rollout": step}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge("agentrl." + name.replace("@", "_at_"))
            self._gauges[name].set(value)

    def close(self) -> None:
        """End the run's span and send what is left; half a minute at most for each of spans and metrics."""
        self._run.end()
        self._tracers.shutdown()
        self._meters.shutdown()

    # -- spans ---------------------------------------------------------------------------------------------------------

    def span(self, lane: str, name: str, start: float, end: float) -> None:
        """A span of the timeline, a child of the run's; times in seconds since 1970."""
        if lane not in SKIPPED_LANES:
            attributes = {"agentrl.lane": lane}
            self._span(f"{lane}: {name}", start, end, attributes, parent=self._run).end(_ns(end))

    def episodes(self, episodes: Sequence[Trajectory], step: int, split: str) -> None:
        """Spans of episodes, of their turns and tool calls. Those that were played elsewhere without a clock are left out."""
        for t in episodes:
            if "ended_at" in t.timings:
                self._episode(t, step, split)

    def _episode(self, t: Trajectory, step: int, split: str) -> None:
        end = t.timings["ended_at"]
        start = end - t.timings["episode_s"]
        attributes = {
            "agentrl.episode": t.episode_id,
            "agentrl.task": t.task.id,
            "agentrl.split": split,
            "agentrl.rollout": step + 1,
            "agentrl.stop_reason": t.stop_reason.value,
            "agentrl.sampled_tokens": t.sampled_tokens,
            "agentrl.turns": len(t.turns),
        }
        episode = self._span("episode", start, end, attributes, links=[self._link])
        for turn in t.turns:
            if "start_s" in turn.timings:
                self._turn(turn, start + turn.timings["start_s"], episode)
        episode.end(_ns(end))

    def _turn(self, turn: Turn, start: float, episode: Any) -> None:
        generated = start + turn.timings["generate_s"]
        used = generated + turn.timings.get("tools_s", 0.0)
        end = used + turn.timings.get("env_s", 0.0)
        attributes = {"agentrl.turn": turn.index, "agentrl.agent": turn.agent_id}
        span = self._span("turn", start, end, attributes, parent=episode)
        self._span("generate", start, generated, {}, parent=span).end(_ns(generated))
        for result in turn.action.results:
            ended = min(generated + result.duration_s, used)
            attributes = {"agentrl.tool": result.name, "agentrl.error": result.is_error}
            self._span(f"tool {result.name}", generated, ended, attributes, parent=span).end(_ns(ended))
        if "env_s" in turn.timings:
            self._span("environment", used, end, {}, parent=span).end(_ns(end))
        span.end(_ns(end))

    def _span(
        self, name: str, start: float, end: float, attributes: Mapping[str, Any], *, parent: Any = None, links: Any = ()
    ) -> Any:
        context = None if parent is None else self._in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, links=links, start_time=_ns(start))


def open_telemetry(folder: Path, config: Config) -> Telemetry | None:
    """What sends a run's spans and metrics; None: nobody receives them."""
    if not is_on(config):
        return None
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    base = config.run.otlp_endpoint
    at = (
        {"traces": None, "metrics": None}
        if base is None
        else {k: f"{base.rstrip('/')}/v1/{k}" for k in ("traces", "metrics")}
    )
    interval = None if "OTEL_METRIC_EXPORT_INTERVAL" in os.environ else 1000.0 * EXPORT_S
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=at["metrics"]), export_interval_millis=interval)
    return Telemetry(folder.name, OTLPSpanExporter(endpoint=at["traces"]), reader)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
