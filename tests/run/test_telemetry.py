"""OpenTelemetry receives spans and metrics: by the SDK's memory, and over HTTP as OTLP."""

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from test_async_training import play  # noqa: F401  a fixture

from agentrl.config import build_config
from agentrl.errors import ConfigError
from agentrl.run import telemetry
from agentrl.run.telemetry import VARIABLES, Telemetry, is_on, require_telemetry
from agentrl.run.timeline import Timeline

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (*VARIABLES, "OTEL_SDK_DISABLED", "OTEL_METRIC_EXPORT_INTERVAL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def memory(monkeypatch):
    """Exporters in memory, in place of those that send."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    made = SimpleNamespace(spans=spans, reader=reader, metrics={})
    sender = Telemetry("run-1", spans, reader)
    shut = sender.close

    def close():
        data = reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                made.metrics |= {m.name: [p.value for p in m.data.data_points] for m in scope.metrics}
        shut()

    monkeypatch.setattr(sender, "close", close)
    made.sender = sender
    yield made
    spans.shutdown()


def by_name(spans):
    found = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    return found


# -- when it is on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environment", "on"),
    [
        ({}, {}, False),
        ({"otlp_endpoint": "http://h:4318"}, {}, True),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318"}, True),
        ({"otlp_endpoint": "http://h:4318"}, {"OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_when_it_is_on(given, environment, on):
    assert is_on(build_config({"env": "search_r1"}, given), environment) is on


def test_a_receiver_without_the_package_is_refused_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    require_telemetry(build_config({"env": "search_r1"}))
    with pytest.raises(
        ConfigError, match=r"^--otlp-endpoint needs OpenTelemetry's SDK; run pip install agentrl\[otel\]$"
    ):
        require_telemetry(build_config({"env": "search_r1", "otlp_endpoint": "http://h:4318"}))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4318")
    with pytest.raises(ConfigError, match=r"^OTEL_EXPORTER_OTLP_ENDPOINT needs"):
        require_telemetry(build_config({"env": "search_r1"}))


@pytest.mark.parametrize("address", ["h:4318", "ftp://h", "http://"])
def test_an_address_that_is_not_http_is_refused(address):
    with pytest.raises(ConfigError, match=r"otlp[_-]endpoint.*must be an address that begins with http"):
        build_config({"env": "search_r1", "otlp_endpoint": address})


# -- what is sent --------------------------------------------------------------------------------------------------------


def test_spans_of_the_timeline_are_children_of_the_runs_except_generations(memory):
    timeline = Timeline(memory.sender.span)
    before = time.time()
    with timeline.span("trainer", "rollout 1"), timeline.span("engine", "episode 0"):
        pass
    memory.sender.close()
    spans = by_name(memory.spans.get_finished_spans())
    assert spans.keys() == {"trainer: rollout 1", "run run-1"}
    (step,), (run,) = spans["trainer: rollout 1"], spans["run run-1"]
    assert step.parent.span_id == run.context.span_id
    assert before - 1 <= step.start_time / 1e9 <= step.end_time / 1e9 <= time.time() + 1
    assert run.resource.attributes["agentrl.run"] == "run-1"


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_run_sends_its_rollouts_episodes_turns_tools_steps_and_metrics(play, memory, monkeypatch, schedule):  # noqa: F811
    monkeypatch.setattr("agentrl.run.report.open_telemetry", lambda folder, config: memory.sender)
    sync = {"schedule": "sync", "async_buffer_size": None, "consumption_window": None, "use_tis": False}
    started = time.time()
    play(**(sync if schedule == "sync" else {}))
    spans = memory.spans.get_finished_spans()
    names = by_name(spans)
    assert {f"trainer: rollout {n}" for n in range(1, 7)} <= names.keys()
    assert len([n for n in names if n.startswith("weight sync: version ")]) == 6
    assert ("rollout: rollout 1" in names) == (schedule == "sync")
    trained = [s for s in names["episode"] if s.attributes["agentrl.split"] == "train"]
    assert len(trained) == 36
    assert {s.attributes["agentrl.rollout"] for s in trained} == set(range(1, 7))
    parents = {s.context.span_id: s for s in spans}
    (run,) = [s for s in spans if s.name.startswith("run ")]
    for episode in trained:
        assert episode.parent is None
        assert episode.links[0].context.span_id == run.context.span_id
        assert started - 1e6 < episode.start_time / 1e9 <= episode.end_time / 1e9
    for child, parent in (("turn", "episode"), ("generate", "turn"), ("environment", "turn")):
        assert names[child]
        for span in names[child]:
            above = parents[span.parent.span_id]
            assert above.name == parent
            assert above.start_time <= span.start_time <= span.end_time
    turns = {s.attributes["agentrl.episode"]: s.attributes["agentrl.turns"] for s in names["episode"]}
    assert len(names["turn"]) == sum(turns.values())
    assert memory.metrics["agentrl.rollout"] == [5], "of the last, counted from 0 as in the files"
    assert "agentrl.reward" in memory.metrics


def test_tool_calls_are_spans_of_their_turns(memory, trajectory_with_tools):
    memory.sender.episodes([trajectory_with_tools], 4, "train")
    memory.sender.close()
    spans = by_name(memory.spans.get_finished_spans())
    (tool,), (turn,) = spans["tool search"], spans["turn"]
    assert tool.parent.span_id == turn.context.span_id
    assert (tool.start_time, tool.end_time) == (1002 * 10**9, 1003 * 10**9)
    assert (turn.start_time, turn.end_time) == (1001 * 10**9, 1004 * 10**9)
    (episode,) = spans["episode"]
    assert (episode.start_time, episode.end_time) == (1000 * 10**9, 1010 * 10**9)
    assert tool.attributes["agentrl.error"] is True


@pytest.fixture
def trajectory_with_tools():
    from agentrl.types import Action, ToolResult

    action = Action("x", results=(ToolResult("c", "search", "failed", is_error=True, duration_s=1.0),))
    turn = SimpleNamespace(
        index=0,
        agent_id="policy",
        action=action,
        timings={"start_s": 1.0, "generate_s": 1.0, "tools_s": 1.5, "env_s": 0.5},
    )
    old = SimpleNamespace(timings={})  # of a runner that has no clock
    return SimpleNamespace(
        timings={"episode_s": 10.0, "ended_at": 1010.0},
        turns=(turn, old),
        episode_id="0-0",
        task=SimpleNamespace(id="t"),
        stop_reason=SimpleNamespace(value="terminated"),
        sampled_tokens=3,
    )


def test_names_of_gauges_follow_the_rules(memory):
    memory.sender.log(2, {"eval/test/pass@2": 0.5})
    memory.sender.log(3, {"eval/test/pass@2": 0.75})
    memory.sender.close()
    assert memory.metrics == {"agentrl.eval/test/pass_at_2": [0.75], "agentrl.rollout": [3]}


# -- over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver():
    """What an OTLP receiver gets, by path."""
    got = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.setdefault(self.path, []).append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_): ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_receiver_gets_spans_and_metrics_over_http(tmp_path, monkeypatch, receiver, by):
    monkeypatch.setattr(OTLPSpanExporter, "_compression", None, raising=False)
    address, got = receiver
    given = {"otlp_endpoint": address + "/"} if by == "flag" else {}
    if by == "variable":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    sender = telemetry.open_telemetry(tmp_path / "run-7", build_config({"env": "search_r1"}, given))
    sender.span("trainer", "rollout 1", 10.0, 11.0)
    sender.log(1, {"reward": 0.5})
    sender.close()
    traces = [ExportTraceServiceRequest.FromString(body) for body in got["/v1/traces"]]
    names = {s.name for t in traces for r in t.resource_spans for scope in r.scope_spans for s in scope.spans}
    assert names == {"run run-7", "trainer: rollout 1"}
    metrics = [ExportMetricsServiceRequest.FromString(body) for body in got["/v1/metrics"]]
    gauges = {m.name for t in metrics for r in t.resource_metrics for scope in r.scope_metrics for m in scope.metrics}
    assert gauges == {"agentrl.reward", "agentrl.rollout"}


def test_nobody_receives_anything_without_an_address(tmp_path):
    assert telemetry.open_telemetry(tmp_path, build_config({"env": "search_r1"})) is None
