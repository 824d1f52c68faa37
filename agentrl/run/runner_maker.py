"""What a runner process is started with: it makes the runner of each rollout from the settings of the run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

from agentrl.config import Config
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.plan import ServerPlan, make_fleet, patience_of
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.mixed_runner import MixedRunner
from agentrl.rollout.process_worker import Notify
from agentrl.run.components import Components
from agentrl.run.runner_settings import RunnerSettings


def runner_maker(
    config: Config,
) -> Callable[[RunnerSettings, Sequence[str], Notify], tuple[EpisodeRunner | MixedRunner, Fleet]]:
    """Called in a runner process: makes the runner of each rollout, on a separate fleet that is attached to the controller's servers."""
    # the controller warns and logs
    warnings.filterwarnings("ignore", "SGLang .* was not tested")
    logging.getLogger("agentrl").addHandler(logging.NullHandler())
    components = Components(config, trains=False)

    def make(
        settings: RunnerSettings, servers: Sequence[str], notify: Notify
    ) -> tuple[EpisodeRunner | MixedRunner, Fleet]:
        plan = ServerPlan(
            model=components.folder,
            context_length=components.context_length,
            addresses=tuple(servers),
            router=components.router,
            patience_s=patience_of(config),
        )
        fleet = make_fleet(plan, None)
        fleet.attach(settings.policy_version)
        fleet.on_down = lambda address, failure: notify((address, failure))
        return components.runner(fleet, settings, processes=config.rollout.runner_processes), fleet

    return make
