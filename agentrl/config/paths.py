"""Make paths in settings absolute, so that a run can be resumed, replayed and viewed from any directory."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config.settings import Config
from agentrl.core.name_syntax import split_envs, split_object, split_slice, split_weight
from agentrl.core.registry import local_file


def anchor(config: Config, *, embedded: Container[str] = ()) -> Config:
    """The same settings with absolute paths, for paths that exist relative to the working directory.

    These are the paths of the model (unless it is the name of an `embedded` one), of adapters, of code, of data and of SGLang's Python.
    Arguments of the environment and settings of Megatron and SGLang are not changed.
    """
    model, env, data, engine, lora = config.model, config.env, config.data, config.engine, config.lora
    group_filter = config.schedule.dynamic_sampling_filter_path
    eval_data = (_data(word) if i % 2 else word for i, word in enumerate(config.eval.eval_prompt_data))
    return replace(
        config,
        model=model
        if model.hf_checkpoint in embedded
        else replace(model, hf_checkpoint=model.hf_checkpoint and _path(model.hf_checkpoint)),
        env=replace(
            env,
            env=env.env and _envs(env.env),
            env_settings={_own_key(key): _own_value(key, value) for key, value in env.env_settings.items()},
            reward=tuple(map(_code, env.reward)),
            context_policy=env.context_policy and _code(env.context_policy),
            custom_generate_function_path=env.custom_generate_function_path
            and _code(env.custom_generate_function_path),
            custom_rm_path=env.custom_rm_path and _code(env.custom_rm_path),
            rollout_function_path=env.rollout_function_path and _code(env.rollout_function_path),
        ),
        lora=replace(
            lora,
            lora_adapter_path=lora.lora_adapter_path and _path(lora.lora_adapter_path),
            lora_adapters={_code(owner): name for owner, name in lora.lora_adapters.items()},
        ),
        schedule=replace(config.schedule, dynamic_sampling_filter_path=group_filter and _code(group_filter)),
        data=replace(
            data,
            prompt_data=data.prompt_data and _data(data.prompt_data),
            data_source_path=data.data_source_path and _code(data.data_source_path),
        ),
        eval=replace(config.eval, eval_prompt_data=tuple(eval_data)),
        engine=replace(
            engine,
            engine_python=engine.engine_python and _path(engine.engine_python),
            engine_pythonpath=engine.engine_pythonpath and _path(engine.engine_pythonpath, ":"),
            update_weight_disk_dir=engine.update_weight_disk_dir and _path(engine.update_weight_disk_dir),
        ),
    )


def _path(text: str, separators: str = "") -> str:
    """The absolute path if it exists and contains none of `separators`; otherwise `text`."""
    absolute = str(Path(text).absolute())
    return absolute if text and Path(text).exists() and not any(c in absolute for c in separators) else text


def _code(text: str) -> str:
    """Make the path in `file.py[:Object][=WEIGHT]` absolute; also that of a module in the working directory."""
    file, attribute = split_object(split_weight(text)[0])
    if attribute and (path := local_file(file)) is not None:
        return f"{path}{text[len(file) :]}"
    return _path(file) + text[len(file) :] if file.endswith(".py") else text


def _envs(text: str) -> str:
    """Make the paths of one environment, or of several with their shares, absolute."""
    if len(split_envs(text)) == 1:
        return _code(text)
    return " ".join(f"{_code(name)}={weight:g}" for name, weight in split_envs(text))


def _own_key(key: str) -> str:
    """Make the path of the environment in `ENV.SETTING` absolute."""
    env, dot, setting = key.rpartition(".")
    return f"{_code(env)}{dot}{setting}"


def _own_value(key: str, value: Any) -> Any:
    """Make the paths in an environment's own setting absolute."""
    setting, many = key.rpartition(".")[2], isinstance(value, (list, tuple))
    if setting == "prompt_data" and isinstance(value, str):
        return _data(value)
    if setting == "eval_prompt_data" and many:
        return [_data(word) if i % 2 else word for i, word in enumerate(value)]
    if setting == "reward":
        return [_code(word) for word in value] if many else _code(value)
    return _code(value) if setting == "context_policy" else value


def _data(text: str) -> str:
    """Make the path in `file[@[a:b]]` absolute."""
    file, part = split_slice(text)
    return _path(file) + part
