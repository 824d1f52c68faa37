"""`agentrl gateway`: record the episodes of agents that somebody else starts."""

from __future__ import annotations

import asyncio
import logging

from agentrl.config import Config
from agentrl.core.machine_errors import report_machine_errors
from agentrl.errors import ConfigError
from agentrl.gateway.open_gateway import OpenGateway
from agentrl.gateway.server import GatewayServer
from agentrl.run.components import Components
from agentrl.run.rollouts import EpisodeRun
from agentrl.run.run_log import Echo
from agentrl.store.run_folder import settings_fingerprint
from agentrl.types import Trajectory

logger = logging.getLogger(__name__)


async def serve_gateway(config: Config, *, echo: Echo = print) -> None:
    """Listen until the job is cancelled. The run folder holds an episode for each key that made requests.

    Raises:
        ConfigError: the address cannot be used.
        OSError, StoreError: an episode could not be recorded.
    """
    g = config.gateway
    address = GatewayServer(g.gateway_host, g.gateway_port)
    await address.start()  # whether it can be used is known before a run folder is created
    await address.close()
    components = Components(config, trains=False)
    if components.envs:
        raise ConfigError("`agentrl gateway` records one environment; give one --env")
    await components.require_env()
    fingerprint = settings_fingerprint(config)
    async with EpisodeRun(components, echo=echo, plays="recorded") as run:
        await run.start_engine()
        runner = components.env_runner(run.engine, components.runner_settings("train"))

        def record(t: Trajectory) -> None:
            run.folder.episodes.write(t, step=0, split="train", config=fingerprint)
            run.log.echo(
                f"episode {t.episode_id}: {len(t.turns)} turns, {t.sampled_tokens} tokens, {t.stop_reason.value}"
            )

        gateway = OpenGateway(
            runner,
            record,
            host=g.gateway_host,
            port=g.gateway_port,
            idle_s=g.gateway_idle_s,
            most=config.rollout.concurrency,
        )
        report_machine_errors(asyncio.get_running_loop(), logger.warning)
        await gateway.server.start()
        url, models = g.gateway_url or gateway.server.url, ", ".join(getattr(components.env_class, "models", ()))
        run.log.echo(
            f"listening: OPENAI_BASE_URL={url}/v1 ANTHROPIC_BASE_URL={url}, model {models}, any API key; each key is an episode, "
            f"which ends after {g.gateway_idle_s:g} s without a request; recorded in {run.folder.path}"
        )
        try:
            await gateway.failed
        finally:
            await gateway.close()
            runner.close()
