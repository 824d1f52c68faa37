"""How the segments of an episode follow from each other: the agent of each, the turn from which it branches, and why it opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def segment_forest(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each segment of an episode: agent, its turns, the turn and the segment from which it branches (None: from none), and the reason."""
    turns = record["turns"]
    forest = []
    for number, segment in enumerate(record["segments"]):
        own = [i for i, t in enumerate(turns) if t["segment"] == number]
        parent, reason = _opening(turns, own[0]) if own else (None, None)
        before = turns[parent]["segment"] if parent is not None and parent < len(turns) else None
        forest.append(
            {
                "agent": str(segment["agent_id"]),
                "turns": own,
                "parent_turn": parent,
                "parent_segment": before if before is not None and before < number else None,
                "reason": None if reason is None else str(reason),
            }
        )
    return forest


def _opening(turns: list[Any], first: int) -> tuple[int | None, Any]:
    """The turn that the first turn of a segment continues, and why a segment opened. The native runner notes the reason in the turn before."""
    request = turns[first]["info"].get("request")
    if isinstance(request, Mapping) and "parent" in request:
        parent = request["parent"]
        return parent if isinstance(parent, int) and parent >= 0 else None, turns[first]["info"].get("new_segment")
    return None, turns[first - 1]["info"].get("new_segment") if first else None


def origin_text(node: Mapping[str, Any]) -> str:
    """Return the agent, the turn and the reason in one line; "" where nothing is known."""
    parts = [node["agent"]] if node["agent"] != "policy" else []
    parts += [f"continues turn {node['parent_turn']}"] if node["parent_turn"] is not None else []
    return "; ".join(parts + ([node["reason"]] if node["reason"] else []))
