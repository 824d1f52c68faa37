"""What functions written for slime import from it: `Sample`, `GenerateState`, `post`, `run`; and how they are found by their path."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from agentrl.config import SECTIONS, Config
from agentrl.core.registry import Registry
from agentrl.engine.base import SamplingParams
from agentrl.errors import ConfigError
from agentrl.slime_hooks.generations import ENGINE_HOST, ENGINE_PORT, current
from agentrl.slime_hooks.sample import SlimeSample

_ENGINE_URL = f"http://{ENGINE_HOST}:{ENGINE_PORT}/"
_POST_TIMEOUT_S = 600.0
_FURTHER_ARGS: Mapping[str, Any] = {
    "sglang_router_ip": ENGINE_HOST,
    "sglang_router_port": ENGINE_PORT,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "use_slime_router": False,
    "rm_type": None,
}
"""arguments of slime that functions read and that are no settings of agentrl"""


class GenerateState:
    """The model's tokenizer (that of transformers) and the sampling parameters of the run."""

    def __init__(self, args: Namespace) -> None:
        """`args` are those that the function received."""
        self.args = args
        self.tokenizer = _tokenizer(args.model_folder)
        self.sampling_params = sampling_params(args, args.run_sampling)
        self.processor = None


def sampling_params(args: Namespace, sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters as slime passes them to a generate function."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def post(
    url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Send JSON and return the JSON of the answer. A request to the engine's address reaches the engine of the run.

    Args:
        url: `http://{args.sglang_router_ip}:{args.sglang_router_port}/generate`, or any other.
        payload: for the engine: `text` or `input_ids`, and `sampling_params`.
        max_retries: attempts at other addresses; those at the engine are the run's matter.
        headers: for other addresses.
    """
    if url.startswith(_ENGINE_URL):
        generations = current.get()
        home = asyncio.get_running_loop() if LOOP.loop is None else LOOP.loop
        if home is asyncio.get_running_loop():
            return await generations.answer(payload)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(generations.answer(payload), home))
    transport = httpx.AsyncHTTPTransport(retries=min(max_retries, 3))
    async with httpx.AsyncClient(transport=transport, timeout=_POST_TIMEOUT_S) as client:
        response = await client.post(url, json=payload, headers=headers)
        response.raise_for_status()
        return response.json()


class _Loop:
    """The event loop of the run, while a function in another thread runs."""

    loop: asyncio.AbstractEventLoop | None = None


LOOP = _Loop()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine from the thread of a rollout function to its end."""
    return asyncio.run(coroutine)


def arguments(config: Config, folder: Path, sampling: SamplingParams) -> Namespace:
    """The `args` of slime's functions: every setting by its name, Megatron's and SGLang's too."""
    sections = [getattr(config, name) for name in SECTIONS]
    settings = {f.name: getattr(section, f.name) for section in sections for f in fields(section)}
    sglang = {f"sglang_{name}": value for name, value in config.sglang.items()}
    own = {"partial_rollout": False, "hf_checkpoint": str(folder), "model_folder": folder, "run_sampling": sampling}
    return Namespace(**{**_FURTHER_ARGS, **config.megatron, **sglang, **settings, **own})


def load_function(flag: str, path: str) -> Callable[..., Any]:
    """The function of `module.function`, `module:function` or `file.py:function`. Its imports from slime work without slime.

    Raises:
        ConfigError: it cannot be imported or is not a function.
    """
    _provide_slime()
    where, dot, name = path.rpartition(".")
    target = f"{where}:{name}" if dot and ":" not in path and not path.endswith(".py") else path
    function = Registry(flag, {}).resolve(target)
    if not callable(function):
        raise ConfigError(f"--{flag} {path}: expected a function, found {type(function).__name__}")
    found: Callable[..., Any] = function
    return found


def _provide_slime() -> None:
    """Make the imports of slime's functions work where slime is not installed."""
    if "slime" in sys.modules or importlib.util.find_spec("slime") is not None:
        return
    contents: Mapping[str, Mapping[str, Any]] = {
        "slime": {},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
        "slime.utils": {},
        "slime.utils.async_utils": {"run": run},
        "slime.utils.http_utils": {"post": post},
        "slime.utils.types": {"Sample": SlimeSample},
    }
    for name, members in contents.items():
        module = ModuleType(name, "Names of slime, provided by agentrl.")
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


_tokenizers: dict[Path, Any] = {}


def _tokenizer(folder: Path) -> Any:
    if folder not in _tokenizers:
        from transformers import AutoTokenizer

        _tokenizers[folder] = AutoTokenizer.from_pretrained(str(folder))
    return _tokenizers[folder]
