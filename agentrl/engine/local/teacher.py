"""A frozen model that scores token ids in this process, for distillation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrl.engine.local.model import no_progress_bar
from agentrl.errors import ConfigError

POSITIONS = 256
"""positions whose logits are computed at once"""


class LocalTeacher:
    """A causal language model of transformers.

    Args:
        folder: model folder.
        vocab_size: size of the policy's vocabulary, all of whose ids it must have.

    Raises:
        ConfigError: the folder holds no such model.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            with no_progress_bar():
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if device == "cpu" else "auto")
        except (OSError, ValueError, KeyError) as e:
            raise ConfigError(f"--opd-teacher {folder}: no causal language model could be loaded: {e}") from e
        rows = model.get_output_embeddings().weight.shape[0]
        if rows < vocab_size:
            raise ConfigError(
                f"--opd-teacher {folder}: it has {rows} tokens, the policy {vocab_size}; a teacher needs the policy's tokenizer"
            )
        self._model = model.to(device).eval().requires_grad_(False)
        self._lock = asyncio.Lock()

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probs of ids[1:]; see `Teacher` of train/distillation.py."""
        async with self._lock:
            return await asyncio.to_thread(self._score, list(ids))

    @torch.inference_mode()
    def _score(self, ids: list[int]) -> list[float]:
        tokens = torch.tensor(ids, device=self._model.device)
        hidden = self._model.base_model(input_ids=tokens[None, :-1]).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        scores = []
        for start in range(0, len(hidden), POSITIONS):
            logits = head(hidden[start : start + POSITIONS]).float()
            labels = tokens[1 + start : 1 + start + len(logits), None]
            scores.append(logits.gather(1, labels)[:, 0] - logits.logsumexp(-1))
        return torch.cat(scores).tolist() if scores else []

    async def close(self) -> None:
        """Nothing to free before the process ends."""
