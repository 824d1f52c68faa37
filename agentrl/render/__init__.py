"""Messages to token ids, and sampled ids to actions: exact for every model whose chat template can be proven."""

from agentrl.core.summary_request import SummaryRequest
from agentrl.render.base import ActionFormat, Delta, HistoryPolicy
from agentrl.render.context_policy import (
    ContextPolicy,
    ContextView,
    DropOldTurns,
    Summarise,
    SummariseByPolicy,
    TruncateOldResults,
)
from agentrl.render.families import FAMILIES, FORMATS, make_renderer, register_format
from agentrl.render.formats.inline_tags import TagFormat
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizer import Tokenizer

__all__ = [
    "FAMILIES",
    "FORMATS",
    "ActionFormat",
    "ContextPolicy",
    "ContextView",
    "Delta",
    "DropOldTurns",
    "HistoryPolicy",
    "Renderer",
    "Summarise",
    "SummariseByPolicy",
    "SummaryRequest",
    "TagFormat",
    "Tokenizer",
    "TruncateOldResults",
    "make_renderer",
    "register_format",
]
