"""The action formats by name, the families in the order in which they are tried, and the renderer of a model."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from agentrl.errors import ContractError, TemplateError, UnknownNameError
from agentrl.render.base import ActionFormat, Family, HistoryPolicy
from agentrl.render.formats import deepseek, gemma, glm, gptoss, hermes, kimi, llama, mistral, qwen_coder
from agentrl.render.formats.deepseek import DeepSeekFormat
from agentrl.render.formats.gemma import PythonicFormat
from agentrl.render.formats.glm import GlmFormat
from agentrl.render.formats.gptoss import HarmonyFormat
from agentrl.render.formats.hermes import HermesFormat
from agentrl.render.formats.inline_tags import TagFormat
from agentrl.render.formats.kimi import KimiFormat
from agentrl.render.formats.llama import LlamaFormat
from agentrl.render.formats.mistral import MistralFormat
from agentrl.render.formats.qwen_coder import QwenCoderFormat
from agentrl.render.images import Images
from agentrl.render.renderer import GENERIC, Renderer
from agentrl.render.tokenizer import Tokenizer

_FORMATS: tuple[ActionFormat, ...] = (
    HermesFormat(), TagFormat(), QwenCoderFormat(), LlamaFormat(), GlmFormat(), DeepSeekFormat(), KimiFormat(),
    MistralFormat(), HarmonyFormat(), PythonicFormat(),
)  # fmt: skip
FORMATS: dict[str, ActionFormat] = {f.name: f for f in _FORMATS}
"""Action formats by name."""

FAMILIES: tuple[Family, ...] = (
    gptoss.FAMILY, glm.FAMILY, deepseek.FAMILY, kimi.KIMI_K2_THINKING, kimi.KIMI_K2, llama.FAMILY, gemma.FAMILY,
    qwen_coder.FAMILY, hermes.QWEN3, hermes.CHATML, mistral.FAMILY,
)  # fmt: skip
"""Model families, in the order in which their marks are looked for in a template."""


def family_of(template: str) -> Family:
    """The family of a chat template; the generic one for unknown templates."""
    return next((f for f in FAMILIES if all(mark in template for mark in f.marks)), GENERIC)


def register_format(form: ActionFormat) -> None:
    """Make an action format available by its name, for `--action-format` and `Env.action_format`.

    Args:
        form: the format, such as a `TagFormat` with other tags.

    Raises:
        ContractError: another format has that name.

    Example:
        >>> register_format(TagFormat("retool", calls={"code": ("python", "code")}, result_tag="interpreter"))
        >>> FORMATS["retool"].stop
        ('</code>', '</answer>')
    """
    if FORMATS.setdefault(form.name, form) != form:
        raise ContractError(f"there is another action format with the name {form.name!r}; give it another name")


def make_renderer(
    tokenizer: Tokenizer,
    action_format: str | ActionFormat | None = None,
    *,
    where: str = "the model",
    history: HistoryPolicy = "append",
    raw_content: bool = False,
    surplus: Literal["error", "ignore", "refuse"] = "error",
    now: datetime | None = None,
    images: Images | TemplateError | None = None,
    tools_in_prompt: bool = False,
    **template_args: Any,
) -> Renderer:
    """Build the renderer for a model.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
        action_format: A format, or a name of `FORMATS`. None: the family's own ('hermes' for unknown templates).
        where: The model, for errors.
        history: What to do where the template rewrites history.
        raw_content: Added tokens inside content count as tokens (see `Renderer`).
        surplus: What becomes of calls over the limit.
        now: The template's date. None: now.
        images: The model's image processor (see `Renderer`).
        tools_in_prompt: Write the tools into the system message if the template leaves them out.
        template_args: Variables of the template (enable_thinking=False, …).

    Returns:
        The renderer.

    Raises:
        UnknownNameError: there is no such format.
        TemplateError: the template cannot be used.
    """
    family = family_of(tokenizer.chat_template or "")
    chosen = action_format or family.format
    if isinstance(chosen, str):
        if chosen not in FORMATS:
            raise UnknownNameError.of("action format", chosen, FORMATS)
        chosen = FORMATS[chosen]
    return Renderer(
        tokenizer,
        chosen,
        where=where,
        family=family,
        history=history,
        raw_content=raw_content,
        surplus=surplus,
        now=now,
        images=images,
        tools_in_prompt=tools_in_prompt,
        **template_args,
    )
