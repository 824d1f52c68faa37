"""ChatML with Hermes calls: Qwen2, Qwen2.5, Qwen3 and most fine-tunes. Thinking is dropped from history by Qwen3's template only.

Source: the chat templates that ship with these models. `<|endoftext|>` is a stop token of their generation configs.
"""

from agentrl.render.base import Family

FAMILY = Family("chatml", ("<|im_start|>",), "hermes", ends=("<|im_end|>",), other_stops=("<|endoftext|>",))
QWEN3 = Family(
    "qwen3", ("<|im_start|>", "reasoning_content"), "hermes", ends=("<|im_end|>",), other_stops=("<|endoftext|>",)
)
