"""Whether a model has the token ids of recorded episodes, with the same meaning: otherwise it would be trained on other text, silently."""

from __future__ import annotations

import math
from pathlib import Path

from agentrl.config import build_config, read_toml
from agentrl.errors import DataError
from agentrl.render import Tokenizer
from agentrl.run.components import Components
from agentrl.run.image_models import check_recorded_images
from agentrl.run.model_folder import local_folder, model_config
from agentrl.store.run_folder import recorded_config
from agentrl.types import Trajectory


class RecordedIds:
    """Checks the episodes of one source against the model that is to be trained.

    Args:
        components: of the run that trains.
        source: a run folder, a folder of episodes, or a file of them.
    """

    def __init__(self, components: Components, source: Path) -> None:
        self.source, self.folder = source, components.folder
        config = model_config(components.folder)
        self._size = config.get("text_config", config).get(
            "vocab_size", math.inf
        )  # the trainer refuses a config.json without it
        self._tokens = components.tokenizer.backend
        self._images = components.renderer.images
        self._known: set[int] = set()
        recorded = _model_of(source)
        other = recorded is not None and recorded.resolve() != self.folder.resolve()
        self._recorded_with = recorded if other else None
        self._recorded_tokens = Tokenizer.load(recorded).backend if recorded is not None and other else None

    def check(self, trajectory: Trajectory) -> Trajectory:
        """Return the episode.

        Raises:
            DataError: the model does not have one of its ids, or it stands for another text there; or an image does not fit its tokens.
            StoreError: an image cannot be read, or was changed.
        """
        for segment in trajectory.segments:
            if segment.images:
                check_recorded_images(f"{self.source}, episode {trajectory.episode_id}", segment, self._images)
            for token in {*segment.ids} - self._known:
                where = f"{self.source}, episode {trajectory.episode_id}: token id {token}"
                advice = "give --model with the model that the episodes were recorded with"
                if not 0 <= token < self._size:
                    raise DataError(
                        f"{where} is outside the vocabulary of {self.folder} ({self._size} tokens); {advice}"
                    )
                if self._recorded_tokens is not None:
                    before, now = self._recorded_tokens.id_to_token(token), self._tokens.id_to_token(token)
                    if before != now:
                        raise DataError(
                            f"{where} is {before!r} for {self._recorded_with}, with which it was recorded, and {now!r} for "
                            f"{self.folder}; {advice}"
                        )
                self._known.add(token)
        return trajectory


def _model_of(source: Path) -> Path | None:
    """The folder of the model that the episodes were recorded with; None if it is not known, or not on this machine."""
    path = recorded_config(source)
    name = build_config(base=read_toml(path)).model.hf_checkpoint if path is not None else None
    return local_folder(name) if name is not None else None
