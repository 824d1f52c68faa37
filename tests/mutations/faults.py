"""Faults of the joints between settings, episodes, steps, trainer, weight sync and store, each with the test that must notice it.

A fault is a replacement of text in one source file. The text must occur exactly once, so that a fault whose place is gone is reported and not
passed over. Add the fault that a review finds here, with the test that it led to.
"""

from __future__ import annotations

from dataclasses import dataclass

JOINTS = "run/test_joints.py::test_a_setting_reaches_what_it_is_for"
_OLD = "run/test_joints.py::test_old_log_probs_are_the_trainers_own_before_the_first_step_and_reference_ones_the_references"
_SYNC = "weight_sync/test_verify_joint.py"
_STORE = "store/test_checkpoints.py"
_HOSTILE = "store/test_hostile_records.py"
_ANSWERS = "engine/test_answers.py::test_a_wrong_answer_is_an_engine_failure_with_its_cause"
_POWER = "store/test_power_loss.py"


@dataclass(frozen=True, slots=True)
class Fault:
    """One replacement in the source."""

    what: str
    file: str
    """below agentrl/"""
    before: str
    after: str
    test: str
    """below tests/; a node id of pytest, also of several cases"""
    quick: bool = False


FAULTS = (
    # settings -> loss, rows, sampling
    Fault(
        "old log-probs are the engine's",
        "train/steps.py",
        'if s.proximal_log_probs == "rollout" or s.true_on_policy_mode:',
        "if True:",
        _OLD,
    ),
    Fault(
        "reference log-probs are the current model's",
        "train/steps.py",
        "partial(trainer.log_probs, reference=True, trained_only=True)",
        "partial(trainer.log_probs, trained_only=True)",
        _OLD,
    ),
    Fault(
        "eps_clip_high is lost",
        "train/steps.py",
        "eps_clip_high=settings.eps_clip_high",
        "eps_clip_high=None",
        f"{JOINTS}[eps_clip_high-0.4]",
    ),
    Fault(
        "eps_clip_c is lost",
        "train/steps.py",
        "eps_clip_c=settings.eps_clip_c",
        "eps_clip_c=None",
        f"{JOINTS}[eps_clip_c-3.0]",
    ),
    Fault(
        "use_tis is lost", "train/steps.py", "use_tis=settings.use_tis,", "use_tis=False,", f"{JOINTS}[use_tis-True]"
    ),
    Fault(
        "tis_threshold is lost",
        "train/steps.py",
        "tis_threshold=settings.tis_threshold",
        "tis_threshold=2.0",
        f"{JOINTS}[tis_threshold-3.0]",
    ),
    Fault(
        "kl_loss_type is lost",
        "train/steps.py",
        "kl_loss_type=settings.kl_loss_type,",
        'kl_loss_type="k3",',
        f"{JOINTS}[kl_loss_type-k2]",
    ),
    Fault(
        "entropy_coef is lost",
        "train/steps.py",
        "entropy_coef=settings.entropy_coef",
        "entropy_coef=0.0",
        f"{JOINTS}[entropy_coef-0.1_0]",
    ),
    Fault(
        "calculate_per_token_loss is ignored",
        "train/steps.py",
        'by_setting = "token" if settings.calculate_per_token_loss else "sequence"',
        'by_setting = "sequence"',
        f"{JOINTS}[calculate_per_token_loss-True]",
    ),
    Fault(
        "advantage_estimator is ignored",
        "train/steps.py",
        "self.estimator = find_estimator(self.settings.advantage_estimator)",
        'self.estimator = find_estimator("grpo")',
        f"{JOINTS}[advantage_estimator-rloo]",
    ),
    Fault(
        "truncated_episodes is ignored",
        "train/steps.py",
        "compare(groups, config.env.truncated_episodes, overlong(config))",
        'compare(groups, "train", overlong(config))',
        f"{JOINTS}[truncated_episodes-drop]",
    ),
    Fault(
        "the learning rate is fixed",
        "run/training.py",
        "lr, loss = rollout_learning_rate(self.config, step), loss_config(settings)",
        "lr, loss = 1e-6, loss_config(settings)",
        f"{JOINTS}[lr-0.125]",
    ),
    Fault(
        "the temperature is ignored",
        "run/runner_settings.py",
        "temperature=r.rollout_temperature,",
        "temperature=1.0,",
        f"{JOINTS}[rollout_temperature-1.5_0]",
    ),
    Fault("top-p is ignored", "run/runner_settings.py", "        top_p=top_p,\n", "", f"{JOINTS}[rollout_top_p-0.9]"),
    Fault("top-k is ignored", "run/runner_settings.py", "        top_k=top_k,\n", "", f"{JOINTS}[rollout_top_k-5]"),
    Fault(
        "eval_limit is ignored for files",
        "data/task_sets.py",
        "        used = tasks[:limit]\n",
        "        used = tasks\n",
        f"{JOINTS}[eval_limit-2_1]",
    ),
    Fault(
        "the critic's learning rate is the policy's",
        "run/training.py",
        "rollout_learning_rate(self.config, step, settings.critic_lr)",
        "rollout_learning_rate(self.config, step)",
        f"{JOINTS}[critic_lr-0.5]",
    ),
    Fault(
        "Megatron's settings do not reach the trainer",
        "run/components.py",
        '"megatron": c.megatron,',
        '"megatron": {},',
        f"{JOINTS}[megatron-{{'weight_decay': 0.5]",
    ),
    # rows and advantages
    Fault(
        "dr_grpo weighs by length",
        "train/rows.py",
        '"constant": len(tokens) * constant}',
        '"constant": None}',
        "train/test_estimators.py::test_dr_grpo_weighs_the_tokens_of_a_long_and_a_short_answer_equally",
        quick=True,
    ),
    Fault(
        "a sampled token of log-prob 0 is left out of the difference",
        "train/megatron/loss.py",
        "sampled = trained if data.sampled is None else trained & data.sampled",
        "sampled = trained & (data.rollout_log_probs != 0)",
        "train/test_loss.py::test_a_sampled_token_of_log_prob_0_counts_in_the_difference",
        quick=True,
    ),
    Fault(
        "recorded experts are used for the token after theirs",
        "train/megatron/routing.py",
        "        layout[place] = own[: len(place)]\n",
        "        layout[place[1:]] = own[: len(place) - 1]\n",
        "train/test_router_replay.py::test_tokens_without_recorded_experts_and_padding_are_routed_by_the_router",
    ),
    Fault(
        "rows share a prefix whatever experts were recorded",
        "train/batch_plan.py",
        "if all(row.routed_experts is None for row in rows):",
        "if True:",
        "train/test_router_replay.py::test_rows_share_a_prefix_only_where_the_same_experts_were_recorded",
    ),
    Fault(
        "a masked sample counts in the denominator",
        "train/rows.py",
        "used = [s for s in samples if s.episode_id in advantages and s.trained_tokens]",
        "used = [s for s in samples if s.episode_id in advantages]",
        "train/test_rows.py::test_a_fully_masked_sample_changes_nothing",
    ),
    Fault(
        "a group that the run dropped is trained on by --train-only",
        "run/train_only.py",
        "if left and len(left) >= min(min_size, len({t.index for t in members})):",
        "if left:",
        "run/test_train_only.py::test_a_group_that_the_run_dropped_is_not_trained_on",
    ),
    Fault(
        "a score beyond float32 is trained on",
        "train/advantage.py",
        "if not abs(score) <= _MAX_SCORE:",
        "if score != score:",
        "train/test_advantage.py::test_a_score_beyond_float32_is_one_sentence",
    ),
    # weight sync
    Fault(
        "weights by disk are not verified",
        "weight_sync/disk.py",
        "return failed | await self.verify(healthy(engines, failed), expected)",
        "return failed",
        f"{_SYNC}::test_one_altered_tensor_is_refused",
    ),
    Fault(
        "weights by shared memory are not verified",
        "weight_sync/colocated.py",
        "return failed | await self.verify(healthy(engines, failed), expected)",
        "return failed",
        f"{_SYNC}::test_one_altered_tensor_is_refused",
    ),
    Fault(
        "weights by broadcast are not verified",
        "weight_sync/broadcast.py",
        "return failed | await self.verify(healthy(engines, failed), expected)",
        "return failed",
        f"{_SYNC}::test_one_altered_tensor_is_refused",
    ),
    Fault(
        "checksums that differ pass",
        "weight_sync/verify.py",
        "if not trainers or engines is None or engines == trainers:",
        "if True:",
        f"{_SYNC}::test_one_altered_tensor_is_refused",
    ),
    Fault(
        "log-probs that differ pass",
        "weight_sync/verify.py",
        "if not differences.mean() <= expected.limit:",
        "if differences.mean() < 0:",
        f"{_SYNC}::test_every_tensor_counts",
    ),
    Fault(
        "the weights of a server that comes back are not verified",
        "weight_sync/base.py",
        "        if failed:\n            raise failed[engine.address]\n",
        "",
        f"{_SYNC}::test_a_server_that_comes_back_is_verified_too",
    ),
    Fault(
        "the folder of weights is not verified",
        "engine/weight_files.py",
        "if computed != weights.fingerprint:",
        "if not computed:",
        f"{_SYNC}::test_a_folder_altered_on_the_way_never_reaches_a_server",
    ),
    Fault(
        "a dead server keeps its sessions",
        "engine/sglang/fleet.py",
        "        member.sessions.clear()\n        if self.on_down",
        "        if self.on_down",
        f"{_SYNC}::test_a_dead_servers_sessions_are_dropped",
    ),
    Fault(
        "runner processes are not told that a server moved",
        "rollout/process_pool.py",
        "            process.send_servers()\n",
        "            pass\n",
        "rollout/test_process_pool.py::test_the_processes_follow_a_server_that_starts_at_another_address",
    ),
    Fault(
        "a late server takes the room of the trainer's ranks",
        "engine/sglang/fleet.py",
        "(self.grows or not member.late)",
        "True",
        "engine/test_fleet.py::test_a_late_server_is_not_waited_for_and_joins_once_training_has_begun",
    ),
    Fault(
        "files of a controller that lives are removed",
        "engine/sglang/shared_memory.py",
        "and not is_locked(journal)",
        "",
        "engine/test_sglang_launch.py::test_the_files_of_a_controller_that_was_killed_are_removed_and_no_others",
    ),
    # what leaves for the engine, and what it answers
    Fault(
        "the record's checksum is of the record",
        "rollout/episode.py",
        "crc = self.recorder.crc(role) if generation.context_crc is None else generation.context_crc",
        "crc = self.recorder.crc(role)",
        "engine/test_exactness.py::test_a_token_less_to_the_engine_is_a_violation",
        quick=True,
    ),
    Fault(
        "over HTTP the checksum is not of the request",
        "engine/sglang/engine.py",
        'crc = context_checksum(body["input_ids"], self.vocab_size)',
        "crc = context_checksum(context, self.vocab_size)",
        "engine/test_exactness.py::test_over_http_too_the_checksum_is_of_the_ids_in_the_request",
    ),
    Fault(
        "a server that read other ids is believed",
        "engine/sglang/protocol.py",
        "if length == len(ids) and (prompt_ids is None or prompt_ids == ids):",
        "if prompt_ids is None or prompt_ids == ids:",
        "engine/test_exactness.py::test_a_server_that_read_a_token_less_is_found_out",
    ),
    Fault(
        "ids outside the vocabulary are trained on",
        "engine/sglang/protocol.py",
        "if ids and not 0 <= min(ids) <= max(ids) < (1 << 31 if vocab_size is None else vocab_size):",
        "if ids and min(ids) < 0:",
        _ANSWERS,
    ),
    Fault(
        "a wrong count of tokens is believed",
        "engine/sglang/protocol.py",
        "if type(count) is not int or count != len(ids):",
        "if type(count) is not int:",
        _ANSWERS,
    ),
    Fault(
        "log-probs that are not finite are believed",
        "engine/sglang/protocol.py",
        "if log_probs and not (math.isfinite(sum(log_probs)) and max(log_probs) <= MAX_LOG_PROB):",
        "if log_probs and max(log_probs) > MAX_LOG_PROB:",
        _ANSWERS,
    ),
    Fault(
        "old weights after a restart are believed",
        "engine/sglang/engine.py",
        "if generation.policy_version not in (self.policy_version, flight.version):",
        "if generation.policy_version is None:",
        "engine/test_sglang_http.py::test_a_response_of_other_weights_is_a_failure",
    ),
    # user code
    Fault(
        "a group reward may return a set or a dict",
        "reward.py",
        "        not ordered\n        or isinstance(returned",
        "        isinstance(returned",
        "test_reward.py::test_a_group_reward_must_return_values_in_the_order_of_the_members",
    ),
    Fault(
        "an environment changes the task of its group",
        "rollout/episode.py",
        'self.instance.call("reset", self.spec.task.copy(), **seeds)',
        'self.instance.call("reset", self.spec.task, **seeds)',
        "rollout/test_episode_seeds.py::test_what_an_environment_changes_in_its_task_reaches_nobody",
    ),
    Fault(
        "a value that cannot be recorded costs the record",
        "store/json_values.py",
        "    except Exception as e:  # noqa: BLE001  the value's own code raised: its iteration, its repr or its conversion\n",
        "    except KeyError as e:\n",
        "store/test_episode_store.py::test_one_odd_value_costs_itself_and_never_the_record",
    ),
    Fault(
        "text under a key named role is structure at any depth",
        "render/message_shape.py",
        "_walk(v, k, structure if isinstance(v, str) else (), texts, contents)",
        '_walk(v, k, ("role", "type"), texts, contents)',
        "render/test_assistant_turn.py::test_text_under_keys_like_those_of_messages_is_no_part_of_the_shape",
    ),
    # store
    Fault(
        "files of a checkpoint are not verified",
        "store/checkpoints.py",
        "    if expected == actual:\n        return\n",
        "    if expected.keys() == actual.keys():\n        return\n",
        f"{_STORE}::test_a_damaged_checkpoint_is_not_used_and_the_next_save_works",
    ),
    Fault(
        "a damaged state is read",
        "store/checkpoints.py",
        'if "checksum" in state and state["checksum"] != _state_checksum(state):',
        'if "checksum" in state and not state["checksum"]:',
        f"{_STORE}::test_no_flipped_byte_of_a_state_is_read",
    ),
    Fault(
        "metrics that are too short are padded",
        "store/checkpoints.py",
        "        if _size(file) < size:\n",
        "        if _size(file) < 0:\n",
        f"{_STORE}::test_metrics_shorter_than_the_last_checkpoint_says",
    ),
    Fault(
        "missing episode files are not noticed",
        "store/checkpoints.py",
        "if actual < expected and (expected or n < number):",
        "if actual < -1:",
        f"{_STORE}::test_missing_episode_files_are_refused",
    ),
    Fault(
        "records are not synced before the state",
        "store/run_folder.py",
        "            part.sync()\n",
        "            part.position()\n",
        f"{_STORE}::test_files_are_synced_before_the_rename",
    ),
    Fault(
        "a file is renamed before it is synced",
        "core/atomic_write.py",
        "            sync(temporary)\n",
        "            pass\n",
        f"{_POWER}::test_a_run_continues_equal_after_a_power_loss_at_any_moment",
    ),
    Fault(
        "the folder above a new folder of runs is not synced",
        "core/atomic_write.py",
        "        sync(created.parent)\n",
        "        pass\n",
        f"{_POWER}::test_what_was_synced_outlasts_a_power_loss",
        quick=True,
    ),
    Fault(
        "old weights are removed before the new ones have their name",
        "store/run_folder.py",
        "        new.rename(final)\n        sync(self.path)\n",
        "        new.rename(final)\n",
        f"{_POWER}::test_what_was_synced_outlasts_a_power_loss",
    ),
    Fault(
        "an image that a power loss damaged is kept",
        "store/blobs.py",
        "if not path.exists() or path.read_bytes() != content:",
        "if not path.exists():",
        f"{_POWER}::test_a_run_continues_equal_after_a_power_loss_at_any_moment",
    ),
    Fault(
        "a truncated file of episodes is not synced",
        "store/episode_files.py",
        "            sync(file)  #",
        "            pass  #",
        f"{_POWER}::test_dropped_episodes_do_not_return",
    ),
    Fault(
        "a temporary file of an earlier process with the same id is an error",
        "core/atomic_write.py",
        "    temporary.unlink(missing_ok=True)  # of",
        "    # of",
        f"{_POWER}::test_a_temporary_file_of_an_earlier_process_with_the_same_id_is_replaced",
    ),
    Fault(
        "a child of user code keeps the lock",
        "core/file_lock.py",
        "os.register_at_fork(after_in_child=_give_up_locks)",
        "os.register_at_fork(after_in_child=_locked.clear)",
        "store/test_run_folder.py::test_a_forked_child_of_a_killed_run_does_not_keep_its_lock",
    ),
    Fault(
        "the folder of a run that was killed at its start blocks the same command",
        "store/run_folder.py",
        "            if path.is_dir() and _not_begun(path):\n                shutil.rmtree(path)\n",
        "",
        "store/test_run_folder.py::test_a_run_killed_while_it_starts_can_be_resumed_or_started_again",
    ),
    Fault(
        "an index that contradicts the records is believed",
        "store/recording.py",
        "if index_entry(record, entry.offset, entry.length, entry.file) != entry:",
        "if not record:",
        "fuzz/test_fuzz_run_folders.py",
    ),
    Fault(
        "a small record may become gigabytes",
        "store/zstd.py",
        "if self._size > max(ALWAYS_ALLOWED, MAX_RATIO * self._consumed):",
        "if self._size < 0:",
        f"{_HOSTILE}::test_a_tool_output_that_becomes_gigabytes_is_an_error",
    ),
    Fault(
        "an image is written wherever its name says",
        "store/blobs.py",
        "                if not is_hash(image.sha256):\n",
        "                if not image.sha256:\n",
        f"{_HOSTILE}::test_an_image_is_never_written_outside_its_folder",
    ),
    Fault(
        "links in a run folder are followed",
        "core/plain_files.py",
        " | os.O_NOFOLLOW",
        "",
        f"{_HOSTILE}::test_a_linked_output_is_not_followed",
        quick=True,
    ),
    Fault(
        "a checkpoint's pickle runs code",
        "train/megatron/checkpoint.py",
        "    require_safe(path)\n",
        "",
        "train/test_checkpoint_pickles.py::test_the_trainer_reads_no_checkpoint_before_its_pickles_are_checked",
    ),
    # schedules, players, curricula, restarts, experts
    Fault(
        "the weight of the load-balancing loss is ignored",
        "train/megatron/experts.py",
        'coefficient = self.get_aux_loss_coeff("aux_loss")',
        "coefficient = 0.0",
        "train/test_model_families.py::test_the_load_balancing_loss_has_its_gradient_and_counts_shared_tokens_once",
    ),
    Fault(
        "over-sampling starts no further groups",
        "schedule/pace.py",
        "started = schedule.over_sampling_batch_size or batch",
        "started = batch",
        f"{JOINTS}[over_sampling_batch_size-3]",
    ),
    Fault(
        "the buffer filter is ignored",
        "run/windowed_training.py",
        "list(outcomes), finished, resolve_buffer_filter(self.run.config.schedule.buffer_filter_path)",
        "list(outcomes), finished, None",
        f"{JOINTS}[buffer_filter_path-ENV:nothing]",
    ),
    Fault(
        "branch_at is ignored",
        "run/components.py",
        'return BranchRule.of(r.branch_at, r.branch_samples) if split == "train" else None',
        "return None",
        f"{JOINTS}[branch_at-['1']]",
    ),
    Fault(
        "branch_samples is ignored",
        "run/components.py",
        "BranchRule.of(r.branch_at, r.branch_samples)",
        "BranchRule.of(r.branch_at, 1)",
        f"{JOINTS}[branch_samples-2]",
    ),
    Fault(
        "true_on_policy_mode does not reach the engine",
        "run/components.py",
        "single_token_chunks=self.config.train.true_on_policy_mode",
        "single_token_chunks=False",
        f"{JOINTS}[true_on_policy_mode-True0]",
    ),
    Fault(
        "true_on_policy_mode does not reach the trainer",
        "run/components.py",
        'options = {"true_on_policy": self.config.train.true_on_policy_mode,',
        'options = {"true_on_policy": False,',
        f"{JOINTS}[true_on_policy_mode-True1]",
    ),
    Fault(
        "true_on_policy_mode packs trees",
        "run/components.py",
        "c.train.tree_packing and not c.train.true_on_policy_mode",
        "c.train.tree_packing",
        f"{JOINTS}[true_on_policy_mode-True2]",
    ),
    Fault(
        "evaluations take the engine of the rollouts",
        "run/training.py",
        "        if self.evaluation_engine is None:\n            return await super()",
        "        if True:\n            return await super()",
        f"{JOINTS}[eval_engine-['separate']]",
    ),
    Fault(
        "players are ignored",
        "run/players.py",
        "training = {**env_class.players, **config.env.players}",
        "training = {**env_class.players}",
        "run/test_players.py::test_the_settings_override_the_environments_players",
    ),
    Fault(
        "players of evaluations are those of training",
        "run/players.py",
        "{**training, **config.eval.eval_players}",
        "training",
        "run/test_players.py::test_the_settings_override_the_environments_players",
    ),
    Fault(
        "a data source does not learn the results",
        "run/rollouts.py",
        "        self.source.add_results(episodes.groups)\n",
        "",
        f"{JOINTS}[data_source_path-ENV:Noting]",
    ),
    Fault(
        "the first solve rate of a task stays",
        "data/curriculum.py",
        "self.rates[group.task.id] = solved if before is None else NEWEST * solved + (1 - NEWEST) * before",
        "self.rates.setdefault(group.task.id, solved)",
        "data/test_curriculum.py::test_a_new_result_counts_half",
    ),
    Fault(
        "solved tasks come as often as others",
        "data/curriculum.py",
        "return max(rate * (1 - rate), LEAST)",
        "return 1.0",
        "data/test_curriculum.py::test_tasks_that_are_solved_half_of_the_time_come_most_often",
    ),
    Fault(
        "a trainer whose ranks die is not started again",
        "run/components.py",
        'return RestartingTrainer(start, run_dir / "trainer") if self.config.run.use_fault_tolerance else start()',
        "return start()",
        "run/test_fault_tolerance.py::test_the_setting_decides_whether_dead_ranks_are_started_again",
    ),
    Fault(
        "optimizer steps since the checkpoint are not repeated",
        "train/restarting.py",
        "enumerate(self._journal, 1)",
        "enumerate((), 1)",
        "train/test_restarting.py::test_the_weights_are_those_of_a_run_without_failures",
    ),
    Fault(
        "optimizer steps before the checkpoint are repeated",
        "train/restarting.py",
        "            self._checkpoint = checkpoint\n            self._journal.clear()\n",
        "            self._checkpoint = checkpoint\n",
        "train/test_restarting.py::test_steps_before_a_checkpoint_are_not_repeated",
    ),
    Fault(
        "distributed_timeout_minutes is ignored",
        "run/components.py",
        '"collective_timeout_s": None if minutes is None else 60 * minutes',
        '"collective_timeout_s": None',
        f"{JOINTS}[distributed_timeout_minutes-0.5]",
    ),
    Fault(
        "megatron's groups wait for ten minutes",
        "train/megatron/rank_process.py",
        "distributed_timeout_minutes=setup.timeout_s / 60,",
        "distributed_timeout_minutes=10,",
        "train/test_rank_process.py::test_the_time_limit_of_collective_operations_holds_in_every_process_group",
    ),
    # messages, credentials, settings
    Fault(
        "control characters reach the terminal",
        "core/terminal_text.py",
        "return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], redact(str(text), environment=True))",
        "return redact(str(text), environment=True)",
        "cli/test_terminal.py",
    ),
    Fault(
        "credentials reach the terminal and logs",
        "core/terminal_text.py",
        "redact(str(text), environment=True))",
        "str(text))",
        "run/test_credentials.py",
    ),
    Fault(
        "credentials are written to config.toml",
        "config/settings/__init__.py",
        "values = separate(_plain(self, defaults), {} if credentials is None else credentials)",
        "values = _plain(self, defaults)",
        "run/test_credentials.py",
    ),
    Fault(
        "the file of credentials is readable by everyone",
        "config/credentials.py",
        "os.O_EXCL, 0o600)",
        "os.O_EXCL, 0o666)",
        "run/test_credentials.py::test_a_run_keeps_credentials_in_a_file_of_its_owner_and_resumes_with_them",
    ),
    Fault(
        "tis_threshold without use_tis is accepted",
        "config/rules.py",
        "if not train.use_tis and _changed(train, name):",
        "if not train.use_tis and name == 'tis_mode' and _changed(train, name):",
        "config/test_config.py::test_a_setting_without_effect_is_refused_where_it_was_given",
    ),
    Fault(
        "kl_loss_type without a KL term is accepted",
        "config/rules.py",
        'if not train.kl_coef and _changed(train, "kl_loss_type"):',
        "if False:",
        "config/test_config.py::test_a_setting_without_effect_is_refused_where_it_was_given",
    ),
    Fault(
        "servers' settings on the local engine are accepted",
        "config/rules.py",
        "given = [_flag(name) for name in _SGLANG_ONLY if name not in read and _changed(engine, name)]",
        "given = []",
        "config/test_config.py::test_a_setting_without_effect_is_refused_where_it_was_given",
    ),
)
