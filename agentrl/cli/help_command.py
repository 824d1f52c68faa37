"""`agentrl help`: explain one flag or command."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable

from agentrl.cli.common import Commands, require_no_more
from agentrl.cli.flags import default_text, flag_names, metavar, setting
from agentrl.cli.foreign_flags import REFUSED, unknown_flag
from agentrl.config import FIELDS
from agentrl.config.describe import describe_bounds, describe_type
from agentrl.errors import ConfigError, suggest


def add_parser(commands: Commands) -> None:
    about = "explain one flag, of agentrl, Megatron, SGLang or slime, or one command: agentrl help lr"
    parser = commands.add("help", lambda args, rest: run_help(commands, rest), about, settings=False)
    parser.usage = "agentrl help FLAG"


def run_help(commands: Commands, words: list[str]) -> int:
    if not words:
        raise ConfigError("name a flag or a command, such as `agentrl help lr` or `agentrl help train`")
    require_no_more(words[1:])
    if words[0] in commands.parsers:
        commands.parsers[words[0]].print_help()
        return 0
    print(explain(words[0].lstrip("-").partition("=")[0].replace("_", "-"), commands))
    return 0


def explain(name: str, commands: Commands) -> str:
    """The help of a flag, named without the dashes before it.

    Raises:
        ConfigError: The flag is unknown.
    """
    ours = {flag[2:]: field for field in FIELDS for flag in flag_names(field)}
    ours |= {field.replace("_", "-"): field for field in FIELDS}
    if name in ours:
        return _explain_setting(ours[name])
    if name in REFUSED:
        return f"--{name} is a flag of slime that is not accepted: {REFUSED[name]}"
    if name.startswith("sglang-"):
        return _explain_sglang(name.removeprefix("sglang-"))
    options = _own_options(commands)
    if f"--{name}" in options:
        return _explain_option(*options[f"--{name}"])
    return _explain_megatron(name, [*ours, *REFUSED, *(option[2:] for option in options)])


def _explain_setting(name: str) -> str:
    info = setting(name)
    value = metavar(info)
    flag = " ".join([", ".join(flag_names(name)), *([value] if isinstance(value, str) else value)])
    facts = {
        "type": describe_type(info.annotation),
        "bounds": describe_bounds(info),
        "default": default_text(info),
        "TOML": f"[{FIELDS[name]}] {name}",
    }
    return _page(flag, info.description or "", facts)


def _own_options(commands: Commands) -> dict[str, tuple[argparse.Action, str]]:
    """The flags of commands that are not settings, each with its first command."""
    return {
        option: (action, command)
        for command, parser in reversed(commands.parsers.items())
        for action in parser._actions
        for option in action.option_strings
        if action.dest not in FIELDS
    }


def _explain_option(action: argparse.Action, command: str) -> str:
    flag = " ".join([", ".join(action.option_strings), *([str(action.metavar)] if action.metavar else [])])
    return _page(flag, (action.help or "") % {"default": action.default}, {"command": f"agentrl {command}"})


def _explain_megatron(name: str, others: Iterable[str]) -> str:
    from agentrl.train.megatron.megatron_flags import OURS, megatron_flags

    if decides := OURS.get(name.replace("-", "_")):
        return f"--{name} is a setting of Megatron that cannot be set; what decides it: {decides}"
    specs = megatron_flags()
    if name not in specs:
        raise unknown_flag(name, [*specs, *others])
    spec = specs[name]
    value = "" if spec.fixed is not None else " VALUE" + (" ..." if spec.many else "")
    facts = {
        "type": f"none; sets {spec.field} = {spec.fixed}" if spec.fixed is not None else spec.type.__name__,
        "choices": ", ".join(spec.choices),
        "default": "megatron-core's" if spec.default is None else str(spec.default),
        "TOML": f"[megatron] {spec.field}",
        "owner": ", ".join(f"megatron-core's {owner}" for owner in spec.owners),
    }
    return _page(f"--{name}{value}", spec.help, facts)


def _explain_sglang(name: str) -> str:
    from agentrl.engine.sglang.installation import find_installation
    from agentrl.engine.sglang.server_flags import REFUSED as REFUSED_BY_US
    from agentrl.engine.sglang.server_flags import server_flags

    if name in REFUSED_BY_US:
        return f"--sglang-{name} is a flag of SGLang that is not accepted: {REFUSED_BY_US[name]}"
    installation = find_installation()
    flags = server_flags(installation)
    if name not in flags:
        raise ConfigError(f"SGLang {installation.version} has no flag --{name}{suggest(name, flags)}")
    flag = flags[name]
    facts = {
        "type": flag["type"],
        "choices": ", ".join(map(str, flag["choices"] or ())),
        "default": str(flag["default"]),
        "TOML": f"[sglang] {name.replace('-', '_')}",
        "owner": f"SGLang {installation.version}",
    }
    return _page(f"--sglang-{name}", flag["help"] or "", facts)


def _page(flag: str, text: str, facts: dict[str, str]) -> str:
    paragraphs = [textwrap.fill(" ".join(p.split()), 98, break_on_hyphens=False) for p in text.split("\n\n") if p]
    table = "\n".join(f"{name + ':':<10}{value}" for name, value in facts.items() if value)
    return "\n\n".join([flag, *(textwrap.indent(block, "  ") for block in [*paragraphs, table])])
