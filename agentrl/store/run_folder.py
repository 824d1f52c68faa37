"""The run folder: everything that a run writes, and everything that it needs to resume bit-exactly after a crash.

    config.toml      the resolved settings and the version of agentrl
    secrets.toml     the credentials to which config.toml refers, readable by its owner only; most runs have none
    metrics.jsonl    one line per rollout and per evaluation; no timings, so that equal runs have equal files
    timings.jsonl    seconds, per rollout
    run.log          messages and warnings with time and level; a resumed run appends to it
    tensorboard/     the same numbers as events
    episodes/        every episode (see episode_files.py)
    checkpoints/     see checkpoints.py; only a run of `agentrl train` has it
    timeline.json    a Chrome trace of rollouts or engine, trainer and weight sync, once the run has ended
    nodes.json       where trainer ranks on other machines join the run, with its secret; only while it runs
    hf/              the final weights as a Hugging Face folder
    curve.png, summary.json

A run that resumes from a checkpoint first removes everything written after it. It repeats those rollouts, with equal results.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config import Config, GatewaySettings, RunSettings
from agentrl.config.credentials import FILE as SECRETS
from agentrl.config.credentials import read_credentials, write_credentials
from agentrl.core.atomic_write import is_temporary, new_file, new_folder, remove_incomplete, sync
from agentrl.core.file_lock import is_locked
from agentrl.core.name_syntax import split_object
from agentrl.errors import ConfigError
from agentrl.store.checkpoints import SaveTrainer, begin_checkpoint, can_resume, remove_old, set_aside_after
from agentrl.store.episode_files import EpisodeWriter, data_files, truncate
from agentrl.store.json_lines import JsonLines

EXPORTS = ("hf", "adapter")
"""folders of exported weights"""


class RunFolder:
    """An open run folder."""

    def __init__(self, path: Path, config: Config, state: Mapping[str, Any]) -> None:
        """Open a folder, truncated to a checkpoint. `state` is the checkpoint's state; empty for a run that has none."""
        self.path = path
        self.config = config
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.timings = JsonLines(path / "timings.jsonl")
        self.metrics.truncate(state.get("metrics_bytes", 0))
        self.timings.truncate(state.get("timings_bytes", 0))
        truncate(path / "episodes", *state.get("episodes_position", (0, 0)))
        self.episodes = EpisodeWriter(path / "episodes")

    @classmethod
    def create(cls, config: Config, version: str, *, resumable: bool = False) -> RunFolder:
        """Create a folder. `version` is that of agentrl; `resumable`: it is a training run, which `--resume` continues.

        The folder appears with its config.toml, so a run that is killed at any moment of its start can be resumed or started again. A folder
        in which a run ended before it recorded anything is replaced.

        Raises:
            ConfigError: the folder exists (nothing is overwritten), or cannot be created.
        """
        path = Path(config.run.run) if config.run.run else next_free(Path("runs"), config.label)
        try:
            remove_incomplete(path)
            if path.is_dir() and _not_begun(path):
                shutil.rmtree(path)
            if path.exists():
                resume = f", or resume the run: agentrl train --resume {path}" if can_resume(path) else ""
                raise ConfigError(f"the run folder {path} already exists; choose another with --run{resume}")
            with new_folder(path) as folder:
                if resumable:
                    (folder / "checkpoints").mkdir()
                _write_config(folder, config, version)
        except OSError as e:
            raise ConfigError(
                f"the run folder {path} cannot be created: {e.strerror}; choose another with --run"
            ) from e
        run = cls(path, config, {})
        if config.run.save_debug_rollout_data:
            _link(Path(config.run.save_debug_rollout_data), path / "episodes")
        return run

    @classmethod
    def reopen(
        cls, path: Path, config: Config, version: str, state: Mapping[str, Any], checkpoint: Path | None = None
    ) -> RunFolder:
        """Resume a run from the state of a checkpoint. Everything written after the checkpoint is removed.

        `config.toml` is rewritten: it holds the settings and the version of agentrl that the run continues with.

        Raises:
            StoreError: the run is still active.
        """
        folder = cls(path, config, state)
        folder._remove_temporary()
        set_aside_after(path, checkpoint)
        _write_config(path, config, version)
        return folder

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        save_trainer: SaveTrainer,
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write a checkpoint, with `files` in it. It appears complete or not at all, so a crash leaves the previous one."""
        return self.begin_save(step, state, save_trainer, files)()

    def begin_save(
        self,
        step: int,
        state: Mapping[str, Any],
        save_trainer: SaveTrainer,
        files: Mapping[str, bytes] | None = None,
    ) -> Callable[[], Path]:
        """Start a checkpoint of the run as it is now; the function that is returned completes it, and then removes old ones."""
        for part in (self.metrics, self.timings, self.episodes):
            part.sync()
        sync(self.path)
        positions = {
            "metrics_bytes": self.metrics.position(),
            "timings_bytes": self.timings.position(),
            "episodes_position": self.episodes.position(),
        }
        complete = begin_checkpoint(self.path, step, state, positions, save_trainer, files or {})

        def finish() -> Path:
            checkpoint = complete()
            remove_old(self.path, self.config.run.keep_checkpoints)
            return checkpoint

        return finish

    def export(self, write: Callable[[Path], Any], name: str = "hf") -> None:
        """Call `write` with a new folder of weights, then put it in the place of the folder `name`, which this run may have written before."""
        final, new, old = (self.path / name for name in (name, f".{name}-new", f".{name}-old"))
        shutil.rmtree(new, ignore_errors=True)
        write(new)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        new.rename(final)
        sync(self.path)
        shutil.rmtree(old, ignore_errors=True)

    def _remove_temporary(self) -> None:
        """Remove what a run that was killed, or lost power, was writing. Exported weights that were being replaced are put back."""
        for name in EXPORTS:
            final, new, old = (self.path / n for n in (name, f".{name}-new", f".{name}-old"))
            if old.exists() and not final.exists():
                old.rename(final)
            for folder in (new, old):
                shutil.rmtree(folder, ignore_errors=True)
        for path in (p for pattern in (".*", "episodes/*/.*") for p in self.path.glob(pattern) if is_temporary(p.name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        self.metrics.close()
        self.timings.close()
        self.episodes.close()


def _link(link: Path, target: Path) -> None:
    """Make `link` lead to a folder; a link that leads elsewhere is replaced.

    Raises:
        ConfigError: the link cannot be made.
    """
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target.absolute())
    except OSError as e:
        raise ConfigError(
            f"--save-debug-rollout-data {link} cannot be made a link to {target}: {e.strerror}; give a path that does not exist"
        ) from e


def _write_config(path: Path, config: Config, version: str) -> None:
    """Write config.toml; the credentials to which it refers before it, beside those of the config.toml that it replaces."""
    credentials = read_credentials(path / SECRETS)
    text = config.to_toml(credentials=credentials)
    if credentials:
        write_credentials(path / SECRETS, credentials)
    with new_file(path / "config.toml") as file:
        file.write_text(f"# agentrl {version}\n{text}", encoding="utf-8")


_WRITTEN_AT_START = {
    "config.toml", SECRETS, "metrics.jsonl", "timings.jsonl", "run.log", "tensorboard", "episodes", "checkpoints", "trainer"
}  # fmt: skip
"""What a run writes before its first episode."""


def _not_begun(path: Path) -> bool:
    """Whether a folder is what a run leaves that ended before it recorded anything; not if the run is still active."""
    names = {p.name for p in path.iterdir()}
    metrics = path / "metrics.jsonl"
    if not names <= _WRITTEN_AT_START or (names and "config.toml" not in names):
        return False
    if metrics.exists() and (metrics.stat().st_size or is_locked(metrics)):
        return False
    if any(file.stat().st_size for file in data_files(path / "episodes")):
        return False
    return not (path / "checkpoints").exists() or not any((path / "checkpoints").glob("[!.]*"))


_ALWAYS_IN_FINGERPRINT = frozenset(
    """
    seed save_interval keep_checkpoints tensorboard
    dtype template_args env_args reward max_turns max_invalid_actions max_calls_per_turn keep_whole_outputs surplus_calls
    history_policy raw_content truncated_episodes apply_chat_template rollout_shuffle num_rollout rollout_batch_size
    n_samples_per_prompt num_steps_per_rollout rollout_temperature rollout_top_p rollout_top_k allow_truncated_sampling
    rollout_max_response_len concurrency runner_processes episode_timeout_s max_retries min_group_size max_failure_share engine
    colocate update_weight_buffer_size rollout_num_gpus_per_engine rollout_external_engine_addrs engine_max_running
    advantage_estimator eps_clip use_kl_loss kl_loss_coef kl_loss_type entropy_coef calculate_per_token_loss use_tis tis_threshold
    lr lr_warmup_rollouts lr_decay_style max_tokens_per_gpu eval_interval eval_prompt_data n_samples_per_eval_prompt
    eval_temperature eval_limit sft_epochs sft_batch_size
    """.split()
)
"""The settings of the first record format. Those added since are part of the fingerprint only where they are not at their defaults."""


def settings_fingerprint(config: Config) -> str:
    """Return a hash of the settings that affect results, with absolute file paths. It is stored with every episode.

    The run's name, its length, the number of processes and the address of the gateway do not change it.
    """
    by_function = config.env.custom_generate_function_path or config.env.rollout_function_path
    relevant = replace(
        config,
        data=config.data if by_function else replace(config.data, apply_chat_template=True),
        run=RunSettings(seed=config.run.seed),
        rollout=replace(config.rollout, num_rollout=1, runner_processes=1),
        gateway=GatewaySettings(),
    )
    text = relevant.to_toml(defaults=_ALWAYS_IN_FINGERPRINT)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def next_free(parent: Path, name: str) -> Path:
    """Return `parent/NAME-NNN` with the first unused number."""
    where, attribute = split_object(name)
    words = f"{Path(where).stem}-{attribute}" if where.endswith(".py") else name
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")
    number = 1
    while (parent / f"{stem}-{number:03d}").exists():
        number += 1
    return parent / f"{stem}-{number:03d}"


def recorded_config(recorded: Path) -> Path | None:
    """Return the config.toml of the run that a run folder, a folder of episodes or a file of them belongs to; None: there is none."""
    recorded = recorded.resolve()
    folders = (recorded, recorded.parent, recorded.parent.parent)
    runs = (folder for folder in folders if (folder / "config.toml").exists() and (folder / "episodes").exists())
    return next((folder / "config.toml" for folder in runs), None)
