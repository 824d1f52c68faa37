"""Paths in settings made absolute, so that a run folder can be resumed, replayed and viewed from anywhere."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from agentrl.config.settings import Config
from agentrl.core.name_syntax import split_object, split_slice, split_weight


def anchor(config: Config, *, embedded: Container[str] = ()) -> Config:
    """The same settings, with paths that exist, seen from here, made absolute: of the model (unless it is an `embedded` one's name), of code,
    data and SGLang's Python. What environments, Megatron and SGLang's servers are given stays as it is.
    """
    model, env, data, engine = config.model, config.env, config.data, config.engine
    sets = [_data(x) if i % 2 else x for i, x in enumerate(config.eval.eval_prompt_data)]
    return replace(
        config,
        model=model if model.hf_checkpoint in embedded else replace(model, hf_checkpoint=_path(model.hf_checkpoint)),
        env=replace(
            env,
            env=_code(env.env),
            reward=tuple(map(_code, env.reward)),
            context_policy=env.context_policy and _code(env.context_policy),
        ),
        data=replace(data, prompt_data=data.prompt_data and _data(data.prompt_data)),
        eval=replace(config.eval, eval_prompt_data=tuple(sets)),
        engine=replace(
            engine,
            engine_python=engine.engine_python and _path(engine.engine_python),
            engine_pythonpath=engine.engine_pythonpath and _path(engine.engine_pythonpath, ":"),
            update_weight_disk_dir=engine.update_weight_disk_dir and _path(engine.update_weight_disk_dir),
        ),
    )


def _path(text: str, apart: str = "") -> str:
    """`text`, unless the path would hold a character that would set it apart from something."""
    whole = str(Path(text).absolute())
    return whole if text and Path(text).exists() and not any(c in whole for c in apart) else text


def _code(text: str) -> str:
    """`file.py`, and what is in it and its weight."""
    file, _ = split_object(split_weight(text)[0])
    return _path(file) + text[len(file) :] if file.endswith(".py") else text


def _data(text: str) -> str:
    """`file`, and which part of it."""
    file, part = split_slice(text)
    return _path(file) + part
