"""`agentrl help`: explain one flag or command."""

from __future__ import annotations

import textwrap

from agentrl.cli.common import Commands, print_now, require_no_more
from agentrl.cli.flag_advice import advice, flag_tables, our_name, why_without_effect
from agentrl.cli.flags import metavar
from agentrl.cli.foreign_flags import not_a_flag
from agentrl.config import FIELDS
from agentrl.config.describe import default_text, describe_bounds, describe_type, flag_names, setting
from agentrl.errors import ConfigError, suggest


def add_parser(commands: Commands) -> None:
    about = "explain one flag, of agentrl, Megatron, SGLang, slime, TRL or verl, or one command: agentrl help lr"
    parser = commands.add("help", lambda args, rest: run_help(commands, rest), about, settings=False)
    parser.usage = "agentrl help FLAG"


def run_help(commands: Commands, words: list[str]) -> int:
    if not words:
        raise ConfigError("name a flag or a command, such as `agentrl help lr` or `agentrl help train`")
    require_no_more(words[1:])
    if words[0] in commands.parsers:
        commands.parsers[words[0]].print_help()
        return 0
    print_now(explain(words[0].lstrip("-").partition("=")[0].replace("_", "-"), commands))
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
    if (ours_called := our_name(name)) != name:
        return f"--{name} means --{ours_called} here\n\n{explain(ours_called, commands)}"
    tables = flag_tables()
    if words := tables.words.get(name):
        return f"--{name} means {' '.join(words)} here"
    if variable := tables.environment.get(name):
        return f"--{name} VALUE sets the environment variable {variable}"
    if why := why_without_effect(name, ()):
        return f"--{name} is accepted without effect, since {why}"
    if instead := advice(name):
        return f"--{name} is not accepted: {instead}"
    if name.startswith("sglang-"):
        return _explain_sglang(name.removeprefix("sglang-"))
    return _explain_option(name, commands) or _explain_megatron(name, commands)


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


def _explain_option(name: str, commands: Commands) -> str:
    """The help of a flag that is not a setting, once for each meaning that it has in the commands; empty if there is none."""
    users: dict[tuple[str, str], list[str]] = {}
    for command, parser in commands.parsers.items():
        for action in parser._actions:
            if f"--{name}" in action.option_strings:
                flag = " ".join([", ".join(action.option_strings), *([str(action.metavar)] if action.metavar else [])])
                text = (action.help or "") % {"default": action.default}
                users.setdefault((flag, text), []).append(f"agentrl {command}")
    return "\n\n".join(_page(flag, text, {"command": ", ".join(used)}) for (flag, text), used in users.items())


def _explain_megatron(name: str, commands: Commands) -> str:
    from agentrl.train.megatron.megatron_flags import megatron_flags, why_not_settable

    if reason := why_not_settable(name):
        return f"--{name} is a setting of Megatron that cannot be set: {reason}"
    specs = megatron_flags()
    if name not in specs:
        actions = (action for parser in commands.parsers.values() for action in parser._actions)
        ours = (option.removeprefix("--") for action in actions for option in action.option_strings)
        raise not_a_flag(name, [*specs, *ours, *flag_tables().refused, *flag_tables().same])
    spec = specs[name]
    value = "" if spec.fixed is not None else " VALUE" + (" ..." if spec.many else "")
    facts = {
        "type": f"none; sets {spec.field} = {spec.fixed}" if spec.fixed is not None else describe_type(spec.type),
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
