"""The teachers of on-policy distillation, from `--opd-teacher`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.engine.sglang.teacher import ServedTeacher
from agentrl.errors import ConfigError
from agentrl.run.model_folder import model_config, model_folder, token_ids
from agentrl.train.distillation import Teacher, Teachers


def make_teachers(entries: Sequence[str], policy: Path) -> Teachers | None:
    """The teachers of `--opd-teacher`; None: there are none.

    Raises:
        ConfigError: a folder holds no model, or one with another tokenizer.
    """
    teachers: dict[str, Teacher] = {}
    for number, entry in enumerate(entries):
        head, equals, place = entry.partition("=")
        name, place = (head, place) if equals and head.isidentifier() else (str(number), entry)
        if name in teachers:
            raise ConfigError(f"--opd-teacher has two teachers of the name {name!r}; give each its own name")
        if place.startswith(("http://", "https://")):
            teachers[name] = ServedTeacher(place)
            continue
        from agentrl.engine.local.teacher import LocalTeacher

        folder = model_folder(place)
        if token_ids(folder) != token_ids(policy):
            raise ConfigError(f"--opd-teacher {entry}: its tokenizer is not that of the policy ({policy})")
        teachers[name] = LocalTeacher(folder, int(model_config(policy).get("vocab_size", 0)))
    return Teachers(teachers) if teachers else None
