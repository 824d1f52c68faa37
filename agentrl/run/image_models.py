"""What a run that trains a model of images must have, and what is refused before it starts."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import Config
from agentrl.errors import ConfigError, DataError, StoreError, TemplateError
from agentrl.render.images import Images
from agentrl.run.model_folder import model_config
from agentrl.types import Segment


def check_image_model(config: Config, folder: Path) -> None:
    """Refuse settings that cannot be used with a model of images.

    Raises:
        ConfigError: --true-on-policy-mode or a teacher.
    """
    from agentrl.train.megatron.megatron_settings import check_vision
    from agentrl.train.megatron.model_config import read_model_config

    model = read_model_config(folder)
    check_vision(folder, model, true_on_policy=config.train.true_on_policy_mode)
    if model.vision is not None and config.train.opd_teacher:
        raise ConfigError(
            f"{folder}: --opd-teacher is not shown images and cannot score a model of images; leave it out"
        )


def check_image_engine(config: Config, folder: Path) -> None:
    """Refuse the local engine for the rollouts of a model of images that is trained.

    Raises:
        ConfigError: it would be used.
    """
    if model_config(folder).get("vision_config") and config.engine.engine == "local":
        raise ConfigError(
            f"{folder}: the local engine runs text models only and takes no images; use --engine sglang, or --train-only with recorded episodes"
        )


def check_recorded_images(where: str, segment: Segment, images: Images | TemplateError | None) -> None:
    """Refuse a recorded segment whose images are not what its tokens stand for.

    Args:
        where: the episode, for messages.
        segment: has images.
        images: of the model that is to be trained.

    Raises:
        DataError: the model takes no images, or another number of tokens for one.
        StoreError: the file of an image cannot be read, or was changed.
    """
    if not isinstance(images, Images):
        raise DataError(
            f"{where} has images, and the model takes none ({images or 'it has no preprocessor_config.json'}); give --model with the model that "
            "the episodes were recorded with"
        )
    ids = segment.ids
    for placed in segment.images:
        try:
            image = placed.image.loaded()
        except StoreError as e:
            raise StoreError(f"{where}: {e}") from e
        own, needed = ids[placed.at : placed.at + placed.tokens].count(images.placeholder_id), images.token_count(image)
        if not own == placed.tokens == needed:
            raise DataError(
                f"{where}: the model reads the image {placed.image.sha256[:12]}… as {needed} placeholders, and {placed.tokens} were recorded, "
                f"{own} of them with its token {images.placeholder_id}; give --model with the model that the episodes were recorded with"
            )
