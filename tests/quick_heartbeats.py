"""Imported where runner processes are forked in tests: they send heartbeats more often, so that a blocked one is found sooner."""

from agentrl.rollout import process_worker

process_worker.HEARTBEAT_S = 0.2
