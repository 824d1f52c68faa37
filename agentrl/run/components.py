"""From settings to components: model folder, environment, renderer, tasks, engine, runners, trainer. All are checked before any is started."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config import Config, EngineSettings
from agentrl.config.mixture import env_shares
from agentrl.data.task_sets import TaskSets
from agentrl.engine.base import Engine, Generator, SamplingParams
from agentrl.env import Env, check_env_args, make_env_class
from agentrl.errors import ConfigError, EnvFailure
from agentrl.gateway.driver import make_driver
from agentrl.render import Renderer, Tokenizer, make_renderer
from agentrl.render.context_policy import resolve_context_policy
from agentrl.render.images import images_of_model
from agentrl.replay.branch import play_branch
from agentrl.reward import Reward, Scorer, resolve_rewards
from agentrl.rollout.branching import BranchRule, several_roles
from agentrl.rollout.env_instance import EnvInstance, ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.rollout.mixed_runner import MixedRunner, MixedScorer
from agentrl.rollout.process_pool import ProcessPlace, ProcessPool, ThisMachine
from agentrl.rollout.rollout import RolloutLimits
from agentrl.rollout.tool_executor import SaveOutput
from agentrl.run.image_models import check_image_model
from agentrl.run.machines import gpus_of_trainer, make_nodes, ranks_per_node
from agentrl.run.model_folder import context_length, model_folder, router_of
from agentrl.run.players import Players
from agentrl.run.prompt_checks import check_prompts, check_tools
from agentrl.run.runner_settings import RunnerSettings, runner_settings
from agentrl.run.trained_adapters import adapter_form, adapters_of_envs, check_role_adapters, trained_adapters
from agentrl.slime_hooks.modules import arguments, load_function
from agentrl.slime_hooks.rewards import slime_reward
from agentrl.slime_hooks.runner import SlimeRunner
from agentrl.train.restarting import RestartingTrainer

if TYPE_CHECKING:
    from agentrl.engine.local.engine import LocalEngine
    from agentrl.engine.sglang.plan import ServerPlan
    from agentrl.run.evaluation_engine import EvaluationEngine
    from agentrl.train.base import Critic, Trainer
    from agentrl.train.distillation import Teachers
    from agentrl.train.megatron.nodes import Nodes
    from agentrl.train.megatron.trainer import MegatronTrainer
    from agentrl.weight_sync.base import WeightSync


class Components:
    """The components of a run, built once from its settings.

    Args:
        config: all settings.
        trains: the engine shares the machine with a trainer.

    Raises:
        UsageError: a name, a file, a template or an argument cannot work.
    """

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        self.config = config
        self.envs, self.shares, self._env_concurrency = _env_components(config)
        """the components of each of several environments by its label, and their shares; {} if the run has one environment"""
        self.adapters: dict[str, str] = dict(config.lora.lora_adapters) if trains else {}
        """which of several adapters a role plays, or '' for all roles; of several environments, by label; {}: there is one policy"""
        if self.envs:
            if self.adapters:
                self.adapters = adapters_of_envs(self.adapters, env_shares(config), self.envs)
            for label, adapter in self.adapters.items():
                self.envs[label].adapters = {"": adapter}
            config = next(iter(self.envs.values())).config
        self.folder = model_folder(config.model.hf_checkpoint)
        self.env_class = make_env_class(config.env.env)
        check_env_args(self.env_class, config.env.env_args)
        self.make_env: Callable[[], Env] = functools.partial(self.env_class, **config.env.env_args)
        self.tokenizer = Tokenizer.load(self.folder)
        self.renderer: Renderer = make_renderer(
            self.tokenizer,
            config.env.action_format or self.env_class.action_format,
            where=str(self.folder),
            history=config.env.history_policy,
            raw_content=config.env.raw_content,
            surplus=config.env.surplus_calls,
            now=_day(config.run.date),
            images=images_of_model(self.folder, self.tokenizer.added),
            tools_in_prompt=config.env.tools_in_prompt,
            **config.model.template_args,
        )
        self.gives_state_keys: bool = self.env_class.gives_state_keys
        """whether the environment says in which state each turn begins; `require_env` asks an instance"""
        self._pools: ThreadPools | None = None
        self._nodes: Nodes | None = None
        """the machines of the trainer's ranks, once they are started on several"""
        check_prompts(self.env_class, self.renderer, str(self.folder))
        self.tasks = TaskSets(config, self.env_class, self.renderer)
        self.scorer = Scorer(self._rewards(), reward_key=config.env.reward_key)
        self.generate_function = self._slime_function("custom_generate_function_path")
        self.rollout_function = self._slime_function("rollout_function_path")
        self.context_policy = resolve_context_policy(config.env.context_policy, config.env.context_policy_args)
        self.context_length = context_length(self.folder, self.config.rollout.rollout_max_context_len)
        self.tasks.prompts.context_length = self.context_length
        self.trains = trains
        self.router = router_of(self.folder) if self.config.rollout.use_rollout_routing_replay else None
        """what the model's routers choose from, if their choices are recorded"""
        self.servers: ServerPlan | None = None
        config = self.config
        if config.engine.engine == "sglang":
            from agentrl.engine.sglang.plan import plan_servers

            form = adapter_form(config, self.folder) if self.adapters else None
            options: dict[str, Any] = {"router": self.router, "adapters": form}
            self.servers = plan_servers(config, self.folder, self.context_length, trains=trains, **options)
        self.threads = config.engine.threads or os.cpu_count() or 1
        self.players = Players(self.config, self.env_class, self.folder, self._local_engine)
        self.driver = make_driver(config, self.env_class, [c.env_class for c in self.envs.values()])
        if self.driver is not None and config.rollout.branch_at:
            raise ConfigError(
                f"{self.label}: the episodes of an agent that is a separate program cannot be branched; leave out --branch-at"
            )

    async def require_env(self) -> None:
        """Construct the environment and its tools once and close them, so that a wrong argument is refused before anything starts.

        Other failures may be temporary and are ignored here, because episodes are retried.

        Raises:
            UsageError: the environment refuses an argument, is not ready, or has tools that the policy cannot see.
        """
        if self.envs:
            for components in self.envs.values():
                await components.require_env()
            return
        pools = ThreadPools(self.env_class, isolation=self.config.env.env_isolation)
        instance = EnvInstance(self.make_env, self.env_class, pools)
        try:
            with suppress(EnvFailure):
                await instance.construct()
                self.gives_state_keys |= bool(instance.env is not None and instance.env.gives_state_keys)
                await instance.call("check_ready")
                self.tasks.prompts.tools = [tool.schema for tool in instance.tools.values()]
                if instance.env is not None:
                    await self.players.check(tuple(instance.env.roles))
                    check_role_adapters(self.adapters, tuple(instance.env.roles), self.players, self.label)
                    if instance.env.roles and self.config.rollout.branch_at:
                        raise ConfigError(several_roles(self.label))
                check_tools(self.env_class, self.renderer, list(instance.tools), str(self.folder))
        finally:
            await instance.close(read_state=False)
            pools.close()
            pools.end_processes()

    def require_trainable(self) -> None:
        """Refuse a model that the trainer cannot train, and settings that fit neither the model nor the machine.

        Raises:
            UsageError: the model's family or a setting does not fit.
        """
        from agentrl.train.megatron.megatron_settings import check_trainer

        train = self.config.train
        options: dict[str, Any] = {"tree_packing": train.tree_packing, "nodes": train.actor_num_nodes}
        check_trainer(
            self.folder, self.config.megatron, train.actor_num_gpus_per_node, gpus_of_trainer(self.config), **options
        )
        trained_adapters(self.config, self.folder)
        check_image_model(self.config, self.folder)

    def require_critic(self) -> None:
        """Refuse a critic whose model folder cannot be trained.

        Raises:
            UsageError: the folder does not exist, or the settings do not fit it.
        """
        if self.config.train.critic_load is not None:
            from agentrl.train.megatron.megatron_settings import check_trainer

            train, folder = self.config.train, self.critic_folder()
            options: dict[str, Any] = {"tree_packing": train.tree_packing, "critic": True}
            options["nodes"] = train.actor_num_nodes
            check_trainer(
                folder, self.config.megatron, train.actor_num_gpus_per_node, gpus_of_trainer(self.config), **options
            )

    def critic_folder(self) -> Path:
        """The model that the critic starts from."""
        load = self.config.train.critic_load
        return self.folder if load is None else model_folder(load)

    def require_weights(self) -> None:
        """Refuse a model folder without weights for the local engine, and machines for a trainer that is not there.

        Raises:
            DataError: it has none.
            ConfigError: --ray-address has no effect.
        """
        if self.servers is None and self.config.engine.ray_address is not None:
            raise ConfigError("--ray-address has no effect without a trainer and with --engine local; leave it out")
        from agentrl.train.megatron.megatron_settings import weight_files

        if self.servers is None and not any(self.folder.glob("*.bin")):
            weight_files(self.folder)

    def limits(self) -> Limits:
        """The limits of an episode."""
        c = self.config
        return Limits(
            max_turns=c.env.max_turns,
            max_response_tokens=c.rollout.rollout_max_response_len,
            max_tokens_per_turn=c.rollout.max_tokens_per_turn,
            context_length=self.context_length,
            episode_timeout_s=c.rollout.episode_timeout_s,
            max_invalid_actions=c.env.max_invalid_actions,
            max_calls_per_turn=c.env.max_calls_per_turn,
        )

    def rollout_limits(self) -> RolloutLimits:
        """The limits of a rollout."""
        r = self.config.rollout
        return RolloutLimits(
            concurrency=r.concurrency,
            max_retries=r.max_retries,
            min_group_size=r.min_group_size,
            max_failure_share=r.max_failure_share,
        )

    def branching(self, split: str) -> BranchRule | None:
        """Where episodes of a split are branched: those of training by --branch-at, those of evaluations nowhere."""
        r = self.config.rollout
        return BranchRule.of(r.branch_at, r.branch_samples) if split == "train" else None

    def env_limits(self) -> dict[str, int]:
        """The maximum concurrent episodes of environments that have such a limit, by `EpisodeSpec.env`."""
        limits = {env: c.env_class.max_concurrency for env, c in (self.envs or {"": self}).items()}
        limits |= {env: limit for env, limit in self._env_concurrency.items() if limit is not None}
        return {env: limit for env, limit in limits.items() if limit is not None}

    @property
    def label(self) -> str:
        """The environment's label; of several, all."""
        return ", ".join(self.envs) or self.env_class.label()

    @property
    def eval_score(self) -> str:
        """The evaluation score that the report shows."""
        return "reward" if self.envs else self.env_class.eval_score

    def runner_settings(self, split: str, *, policy_version: int = 0, keep: SaveOutput | None = None) -> RunnerSettings:
        """The settings of a split: 'train' or 'eval/NAME'."""
        return runner_settings(self.config, split, policy_version=policy_version, keep=keep)

    def runner(
        self, generator: Generator, settings: RunnerSettings, *, processes: int = 1
    ) -> EpisodeRunner | MixedRunner:
        """A runner of the environments. `processes`: the number of runner processes, which share the limits of tools."""
        if self.envs:
            return MixedRunner({env: c.env_runner(generator, settings, processes) for env, c in self.envs.items()})
        return self.env_runner(generator, settings, processes)

    def env_runner(self, generator: Generator, settings: RunnerSettings, processes: int = 1) -> EpisodeRunner:
        """A runner of the one environment."""
        if self._pools is None:
            self._pools = ThreadPools(self.env_class, settings.keep, processes, self.config.env.env_isolation)
        return EpisodeRunner(
            make_env=self.make_env,
            env_class=self.env_class,
            engine=generator,
            renderer=self.renderer,
            scorer=self.scorer,
            limits=self._limits(settings),
            sampling=settings.sampling,
            seed=settings.seed,
            context_policy=self.context_policy,
            pools=self._pools,
            driver=self.driver,
            play_branch=play_branch,
            players=self.players.evaluation if settings.evaluation else self.players.training,
            adapters=self.adapters,
        )

    def slime_runner(self, generator: Generator, settings: RunnerSettings, function: Callable[..., Any]) -> SlimeRunner:
        """A runner of a generate or rollout function that was written for slime."""
        sampling = settings.sampling
        return SlimeRunner(
            generate=function,
            args=arguments(self.config, self.folder, sampling),
            engine=generator,
            renderer=self.renderer,
            scorer=self.scorer,
            limits=self._limits(settings),
            sampling=sampling,
            seed=settings.seed,
            evaluation=settings.evaluation,
        )

    def _limits(self, settings: RunnerSettings) -> Limits:
        limits = self.limits()
        if settings.max_response_tokens is None:
            return limits
        return replace(limits, max_response_tokens=settings.max_response_tokens)

    def _slime_function(self, name: str) -> Callable[..., Any] | None:
        path = getattr(self.config.env, name)
        return load_function(name.replace("_", "-"), path) if path else None

    def _rewards(self) -> tuple[Reward, ...]:
        """The rewards of --reward, else of the environment, and that of --custom-rm-path."""
        env = self.config.env
        rewards = resolve_rewards(env.reward or (() if env.custom_rm_path else self.env_class.rewards))
        if (function := self._slime_function("custom_rm_path")) is None:
            return rewards
        args = arguments(self.config, self.folder, SamplingParams(1, self.config.rollout.rollout_temperature))
        return (*rewards, slime_reward(function, args, self.tokenizer.decode, group=env.group_rm))

    def runner_processes(self, engine: Engine) -> ProcessPool | None:
        """The processes of `--runner-processes`, attached to the engine's servers; None if episodes run in this process.

        Raises:
            ConfigError: the ray cluster of --ray-address does not reserve room for them.
        """
        from agentrl.engine.sglang.fleet import Fleet

        count, address = self.config.rollout.runner_processes, self.config.engine.ray_address
        if count == 1 or not isinstance(engine, Fleet):
            return None
        model = replace(self.config.model, hf_checkpoint=str(self.folder))
        # they attach to the servers that they are told, and start none
        config = replace(self.config, engine=EngineSettings(), sglang={}, model=model)
        from agentrl.run.runner_maker import runner_maker

        place: ProcessPlace = ThisMachine()
        if address is not None:
            from agentrl.rollout.ray_processes import RayProcesses

            place = RayProcesses(address, count)
        pool = ProcessPool(
            functools.partial(runner_maker, config),
            count,
            MixedScorer({env: c.scorer for env, c in self.envs.items()}) if self.envs else self.scorer,
            servers=lambda: [member.engine.address for member in engine.members],
            on_notice=lambda down: engine.suspect(*down),
            place=place,
        )
        engine.on_moved = pool.servers_moved
        return pool

    def engine(self, run_dir: Path | None = None) -> Engine:
        """The engine of `--engine`, not started. The logs of servers go into `run_dir`."""
        if self.servers is not None:
            from agentrl.engine.sglang.plan import make_fleet

            fleet = make_fleet(self.servers, run_dir)
            if self._keeps_interrupted:
                for member in fleet.members:
                    member.engine.keep_tokens(self.tokenizer.decode)
            return fleet
        if self.adapters:
            from agentrl.engine.local.adapter_engines import AdapterEngines

            names = dict.fromkeys(self.adapters.values())
            return AdapterEngines({name: self._local_engine(self.folder, adapter=name) for name in names})
        return self._local_engine(self.folder)

    def evaluation_engine(self) -> EvaluationEngine | None:
        """The engine of `--eval-engine`, not started; None: evaluations are played on the engine of the rollouts.

        Raises:
            ConfigError: it cannot be used.
        """
        from agentrl.run.evaluation_engine import EvaluationEngine, evaluation_servers

        chosen = self.config.eval.eval_engine
        if not chosen:
            return None
        if self.servers is not None:
            return evaluation_servers(self.config, chosen, self.folder, self.context_length)
        engine = self._local_engine(self.folder)
        return EvaluationEngine(engine, self.weight_sync(engine))

    def _local_engine(self, folder: Path, *, adapter: str | None = None) -> LocalEngine:
        """The local engine of a model folder, not started. `adapter`: the one that it serves."""
        from agentrl.engine.local.engine import LocalEngine

        return LocalEngine(
            folder,
            decode=self.tokenizer.decode,
            max_running=self.config.engine.engine_max_running,
            context_length=self.context_length,
            threads=self.threads,
            keep_interrupted=self._keeps_interrupted,
            single_token_chunks=self.config.train.true_on_policy_mode,
            records_experts=self.router is not None and folder == self.folder,
            adapter=adapter,
        )

    @property
    def _keeps_interrupted(self) -> bool:
        """Whether generations that a weight update interrupts keep their tokens."""
        return self.config.schedule.schedule == "async" and self.config.schedule.partial_rollout

    def weight_sync(self, engine: Engine, versions: Mapping[str, int] | None = None) -> WeightSync:
        """The way the trainer's weights reach `engine`. `versions`: the current version of each adapter, of several."""
        from agentrl.weight_sync.make import make_weight_sync

        return make_weight_sync(self.config.engine, self.servers, engine, self.folder, versions or {})

    def trainer(self, run_dir: Path, *, reference: bool) -> Trainer:
        """Start the trainer; takes seconds, because each rank imports torch and megatron. `reference`: keep a frozen copy of the model."""
        options = {"true_on_policy": self.config.train.true_on_policy_mode, "lora": self.config.lora}
        return self._start_trainer(self.folder, run_dir, reference=reference, **options)

    def critic(self, run_dir: Path) -> Critic:
        """Start the critic: a value model on separate ranks, with the trainer's settings."""
        return self._start_trainer(self.critic_folder(), run_dir, critic=True)

    def _start_trainer(self, model: Path, run_dir: Path, **options: Any) -> MegatronTrainer | RestartingTrainer:
        from agentrl.train.megatron.trainer import MegatronTrainer

        if self._nodes is None:
            self._nodes = make_nodes(self.config, run_dir)
        options |= {"nodes": self._nodes} if self._nodes else {}
        start = functools.partial(MegatronTrainer, model, run_dir=run_dir, **options, **self._trainer_options())
        return RestartingTrainer(start, run_dir / "trainer") if self.config.run.use_fault_tolerance else start()

    def teachers(self) -> Teachers | None:
        """The teachers of `--opd-teacher`; None: there are none."""
        from agentrl.run.teachers import make_teachers

        return make_teachers(self.config.train.opd_teacher, self.folder)

    def _trainer_options(self) -> dict[str, Any]:
        c, minutes = self.config, self.config.run.distributed_timeout_minutes
        return {
            "megatron": c.megatron,
            "world_size": ranks_per_node(c) * c.train.actor_num_nodes,
            "seed": c.run.seed,
            "micro_batch_tokens": c.train.max_tokens_per_gpu,
            "micro_batch_rows": c.train.micro_batch_size,
            "tree_packing": c.train.tree_packing and not c.train.true_on_policy_mode,
            "dtype": c.model.dtype,
            "threads": c.engine.threads,
            "timeout_s": c.run.trainer_timeout_s,
            "collective_timeout_s": None if minutes is None else 60 * minutes,
        }

    async def close_agents(self) -> None:
        """Stop the gateway, and free the models that play roles."""
        for components in self.envs.values():
            await components.players.close()
        await self.players.close()
        if self.driver is not None:
            await self.driver.close()

    def close(self) -> None:
        """Stop the threads of rewards, the processes of user code, and the other machines of the trainer."""
        for components in self.envs.values():
            components.close()
        self.scorer.close()
        if self._nodes is not None:
            self._nodes.close()
        if self._pools is not None:
            self._pools.end_processes()


def _env_components(config: Config) -> tuple[dict[str, Components], dict[str, float], dict[str, int | None]]:
    """The components, shares and limits of several environments by label; empty if the run has one.

    Raises:
        UsageError: the settings of one cannot work, or two have the same label.
    """
    envs: dict[str, Components] = {}
    shares: dict[str, float] = {}
    limits: dict[str, int | None] = {}
    for member in env_shares(config):
        # only the run itself starts an engine
        components = Components(replace(member.config, engine=EngineSettings()), trains=False)
        label = components.env_class.label()
        if label in envs:
            raise ConfigError(f"--env has two environments with the label {label!r}; give one of them another `name`")
        envs[label], shares[label], limits[label] = components, member.share, member.concurrency
    return envs, shares, limits


def _day(text: str | None) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(text) if text else None
    except ValueError as e:
        raise ConfigError(f"--date must be YYYY-MM-DD, found {text!r}") from e
