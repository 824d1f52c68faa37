"""The text in an answer of an OpenAI-compatible server (Chat Completions)."""

from __future__ import annotations

from typing import Any

from agentrl.errors import shown


def answer_text(answer: Any) -> str:
    """The content of the first message in the JSON of an answer.

    Raises:
        ValueError: there is no message, or its content is not text.

    Example:
        >>> answer_text({"choices": [{"message": {"role": "assistant", "content": "Paris."}}]})
        'Paris.'
    """
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f"not an answer of Chat Completions with a message of text: {shown(answer, 200)}")
    return text
