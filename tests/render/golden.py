"""Golden ids per family: `python tests/render/golden.py` writes tests/golden/*.json again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from conversations import NOW, conversation, play
from template_models import BY_NAME, MODELS, renderer

from agentrl.types import Provenance

FOLDER = Path(__file__).parents[1] / "golden"
_SEEDS = (1, 2, 3, 5, 8, 13)


def golden_of(name: str) -> dict[str, Any]:
    """The ids of a few conversations, by provenance, and what the renderer knows about the family."""
    ours = renderer(name, now=NOW)
    talks = []
    for seed in _SEEDS:
        talk = conversation(BY_NAME[name], seed)
        played = play(renderer(name, now=NOW, **talk.options), talk)
        talks.append([[Provenance(kind).name, list(ids)] for kind, ids in played.pieces])
    return {
        "family": ours.family,
        "format": ours.format.name,
        "ends": ours.ends,
        "stop_token_ids": list(ours.stop_token_ids),
        "prefill": ours.prefill,
        "conversations": talks,
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for model in MODELS:
        (FOLDER / f"{model.name}.json").write_text(
            json.dumps(golden_of(model.name), ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
