"""Messages to token ids and sampled text to actions, exactly: one small file per family over one shared mechanism."""

from agentrl.render.base import ActionFormat, Delta
from agentrl.render.families import FORMATS, make_renderer
from agentrl.render.template import Renderer
from agentrl.render.tokenizer import Tokenizer

__all__ = ["FORMATS", "ActionFormat", "Delta", "Renderer", "Tokenizer", "make_renderer"]
