"""What a runner process is started with: it makes the runner of each rollout from the settings of the run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.mixed_runner import MixedRunner
from agentrl.rollout.process_worker import Notify
from agentrl.run.components import Components
from agentrl.run.runner_settings import RunnerSettings


def runner_maker(config: Config) -> Callable[[RunnerSettings, Notify], tuple[EpisodeRunner | MixedRunner, Engine]]:
    """Called in a runner process: makes the runner of each rollout, on a separate fleet that is attached to the controller's servers."""
    # the controller warns and logs
    warnings.filterwarnings("ignore", "SGLang .* was not tested")
    logging.getLogger("agentrl").addHandler(logging.NullHandler())
    components = Components(config, trains=False)

    def make(settings: RunnerSettings, notify: Notify) -> tuple[EpisodeRunner | MixedRunner, Engine]:
        fleet = components.engine()
        assert isinstance(fleet, Fleet), "only servers can be attached to"
        fleet.attach(settings.policy_version)
        fleet.on_down = lambda address, failure: notify((address, failure))
        return components.runner(fleet, settings, processes=config.rollout.runner_processes), fleet

    return make
