"""The report of a run, its metrics, and the learning rate."""

from collections import Counter
from dataclasses import replace

import orjson
import pytest
from doubles import OBSERVATION, PROMPT, SAMPLED, group_of, span, trajectory
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.config import Config, build_config
from agentrl.rollout.failures import CauseTable
from agentrl.run.metrics import eval_metrics, mean_over_steps, rollout_metrics
from agentrl.run.report import LEGEND, Report
from agentrl.train.sample import to_samples
from agentrl.train.schedule import learning_rate
from agentrl.types import Action, Group, StopReason, Task, Turn

CONFIG = build_config({"env": "search_r1", "hf_checkpoint": "search_r1_3m", "seed": 3})
SECONDS = {"rollout_s": 2.0, "train_s": 1.5, "sync_s": 0.25}


def table_of(*groups, retried=0, dropped=0, extra=()):
    table = CauseTable(Counter(), retried, dropped)
    for t in [*(t for g in groups for t in g.trajectories), *extra]:
        table.add(t)
    return table


def rolled(report, step, *groups, violations=0, **more):
    """Add a rollout to the report, as the loop does."""
    table = table_of(*groups, **more)
    row = rollout_metrics(groups, table, violations) | {"train/rows": 4, "train/steps": 2, "train/grad_norm": 0.5}
    report.add_episodes(groups, table, violations)
    report.add_step(step, row, SECONDS)
    return row


def evaluated(report, step, *groups, name="test"):
    report.add_episodes(groups, table_of(*groups), 0)
    report.add_evaluation(step, name, eval_metrics(name, groups), 0.5)


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_of_a_rollout_cover_the_complete_groups():
    flat, mixed = group_of(1.0, 1.0), group_of(0.0, 1.0, index=1, reasons=[StopReason.TERMINATED, StopReason.MAX_TURNS])
    failed = trajectory(reason=StopReason.TOOL_FAILURE, cause="InfraError")
    row = rollout_metrics([flat, mixed], table_of(flat, mixed, retried=1, dropped=2, extra=[failed]), 7)
    assert row | {"turns": 0} == {
        "episodes": 4,
        "failures": 1,
        "retried": 1,
        "dropped_groups": 2,
        "exactness_violations": 7,
        "stop/terminated": 3,
        "stop/max_turns": 1,
        "stop/tool_failure": 1,
        "reward": 0.75,
        "turns": 0,
        "sampled_tokens": 2.0,
        "total_tokens": 4.0,
        "truncated_share": 0.25,
        "flat_groups": 0.5,
        "invalid_turns": 0.0,
        "reward/r": 0.75,
    }


def test_speculative_decoding_is_counted_over_the_rollout_and_in_samples():
    spans = [span(PROMPT, (1, 2), -1), span(SAMPLED, (3, 4, 5, 6)), span(OBSERVATION, (7,)), span(SAMPLED, (8, 9), 1)]
    counts = {"spec_verify_steps": 2, "spec_accepted": 1, "spec_proposed": 6}
    turns = [Turn(0, 0, 2, Action("x"), timings=counts), Turn(1, 0, 7, Action("y"))]
    told, other = trajectory([spans], turns=turns), trajectory([spans], index=1)
    (sample,) = to_samples(told)
    assert sample.spec_info == {
        "spec_verify_ct": 2,
        "spec_accept_token_num": 1,
        "spec_draft_token_num": 6,
        "completion_token_num": 4,
    }
    assert to_samples(other)[0].spec_info == {}
    metrics = rollout_metrics([Group(0, told.task, (told, other))], CauseTable(), 0)
    assert (metrics["spec_accept_rate"], metrics["spec_accept_length"]) == (1 / 6, 2.0)
    assert "spec_accept_rate" not in rollout_metrics([Group(0, told.task, (other,))], CauseTable(), 0)


def test_a_rollout_that_lost_everything_has_counts_and_no_means():
    row = rollout_metrics([], table_of(dropped=1, extra=[trajectory(reason=StopReason.ENV_FAILURE)]), 0)
    assert "reward" not in row
    assert (row["episodes"], row["failures"]) == (0, 1)


def test_evaluation_is_the_mean_over_episodes_and_pass_at_k_over_questions():
    easy, hard = group_of(1.0, 0.0), group_of(0.0, 0.0, index=1)
    hops = Task("q", "?", "x", {"hops": 2})
    hard = Group(1, hops, tuple(replace(t, task=hops) for t in hard.trajectories))
    assert eval_metrics("test", [easy, hard], ("hops",)) == {
        "eval/test/reward": 0.25,
        "eval/test/questions": 2.0,
        "eval/test/episodes": 4.0,
        "eval/test/r": 0.25,
        "eval/test/pass@2": 0.5,
        "eval/test/reward_hops2": 0.0,
    }
    assert "eval/test/reward_hops2" not in eval_metrics("test", [easy, hard]), (
        "only the keys that the environment names"
    )
    assert "eval/test/pass@1" not in eval_metrics("test", [group_of(1.0)])
    assert eval_metrics("test", []) == {}


def test_an_abstaining_component_is_left_out_of_its_mean_and_counted():
    g = group_of(1.0, 0.0)
    silent = replace(g.trajectories[0], rewards={"r": None})
    row = rollout_metrics([Group(0, g.task, (silent, g.trajectories[1]))], CauseTable(), 0)
    assert (row["reward/r"], row["abstained/r"]) == (0.0, 1)
    without = replace(silent, rewards={})
    row = rollout_metrics([Group(0, g.task, (silent, silent, without))], CauseTable(), 0)
    assert "reward/r" not in row
    assert row["abstained/r"] == 2, "an episode that has no such component does not abstain"
    assert "abstained/r" not in rollout_metrics([g], CauseTable(), 0)
    report = Report()
    row = eval_metrics("test", [Group(0, g.task, (silent, g.trajectories[1]))])
    assert row["eval/test/abstained/r"] == 1
    report.add_evaluation(0, "test", row, 1.0)
    assert "abstained" not in report.eval_line(0, "test", 1.0)
    assert not any("abstained" in key for key in report.summary(Config()))


def test_steps_of_a_rollout_are_averaged_and_maxima_stay_maxima():
    assert mean_over_steps([{"loss": 1.0, "diff_max": 0.1}, {"loss": 2.0, "diff_max": 0.3, "kl": 4.0}]) == {
        "loss": 1.5,
        "diff_max": 0.3,
        "kl": 4.0,
    }
    assert mean_over_steps([]) == {}


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_the_learning_rate_warms_up_and_decays_to_a_tenth(style, rates):
    settings = build_config({"lr": 1.0, "lr_warmup_rollouts": 2, "lr_decay_style": style}).train
    assert [learning_rate(settings, s, 6) for s in range(6)] == pytest.approx(rates, abs=1e-6)
    assert learning_rate(settings, 6, 6) == pytest.approx(1.0 if style == "constant" else 0.1)


# -- lines -----------------------------------------------------------------------------------------------------------


def test_the_table_of_causes_follows_a_rollout_only_if_it_says_something():
    report = Report()
    rolled(report, 0, group_of(1.0, 0.0))
    legend, line = report.step_line(0).splitlines()
    assert legend == LEGEND
    assert line.startswith("rollout    1")
    rolled(
        report, 0, group_of(1.0, 0.0, 1.0, reasons=[StopReason.TERMINATED, StopReason.MAX_TURNS, StopReason.TERMINATED])
    )
    assert len(report.step_line(0).splitlines()) == 1, "the legend is shown once, and a limit is no failure"
    failed = trajectory(reason=StopReason.TOOL_FAILURE, cause="tool search: InfraError")
    rolled(report, 1, group_of(1.0, 0.0), extra=[failed], retried=1)
    first, *table = report.step_line(1).splitlines()
    assert first.startswith("rollout    2  reward 0.500")
    assert "FAILURES 1" in first
    assert [line.split() for line in table[1:3]] == [
        ["terminated", "2"],
        ["tool_failure", "1", "tool", "search:", "InfraError"],
    ]
    assert table[-1].strip() == "1 retried, 0 groups dropped"
    evaluated(report, 2, group_of(1.0, reasons=[StopReason.MAX_TURNS]))
    assert "max_turns" in report.eval_line(2, "test", 0.5)
    assert "(1 questions, 1 episodes, 0.5 s)" in report.eval_line(2, "test", 0.5)


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"episodes": 0}, "no group is complete"),
        ({"episodes": 4, "flat_groups": 1.0}, "in every group all episodes scored the same"),
        ({"episodes": 4, "flat_groups": 0.5}, "cut by a limit"),
    ],
)
def test_a_rollout_that_trains_nothing_says_why_in_one_sentence(metrics, why):
    report = Report()
    report.add_step(0, metrics | {"train/rows": 0, "train/steps": 0, "failures": 0}, SECONDS)
    last = report.step_line(0).splitlines()[-1]
    assert last.strip().startswith("nothing was trained: ")
    assert why in last
    report.add_step(1, metrics | {"train/rows": 0, "failures": 0}, SECONDS)
    assert "nothing was trained" not in report.step_line(1), "`agentrl rollout` does not train"


def test_the_closing_summary_holds_the_causes_of_the_whole_run_and_the_curve(tmp_path):
    report = Report()
    rolled(report, 0, group_of(0.0, 0.0), extra=[trajectory(reason=StopReason.ENGINE_FAILURE, cause="gone")])
    rolled(report, 1, group_of(1.0, 1.0))
    evaluated(report, 2, group_of(1.0))
    said = report.closing_summary(tmp_path)
    assert "engine_failure        1  gone" in said
    assert "terminated            5" in said
    assert "training reward  ▁█  0.000 -> 1.000" in said
    assert "eval test reward by rollout  2: 1.000" in said
    assert "5 episodes, 0 exactness violations" in said


def test_the_closing_summary_shows_the_environments_score_where_an_evaluation_has_it(tmp_path):
    report = Report("r")
    evaluated(report, 0, group_of(0.5))
    assert "eval test r by rollout  0: 0.500" in report.closing_summary(tmp_path)
    report = Report("em")
    evaluated(report, 0, group_of(0.5))
    assert "eval test reward by rollout  0: 0.500" in report.closing_summary(tmp_path)


# -- the summary -----------------------------------------------------------------------------------------------------


def test_the_summary(tmp_path):
    report = Report()
    evaluated(report, 0, group_of(0.0, 0.0), group_of(1.0, 1.0, index=1))
    for step, score in enumerate((0.0, 0.5, 1.0, 1.0)):
        rolled(report, step, group_of(score, score))
    failed = trajectory(reason=StopReason.ENV_FAILURE, cause="db")
    rolled(report, 4, group_of(1.0, 1.0), extra=[failed], retried=1, violations=2)
    evaluated(report, 5, group_of(1.0, 0.0), group_of(1.0, 1.0, index=1))
    report.finish(tmp_path, CONFIG)
    found = orjson.loads((tmp_path / "summary.json").read_bytes())
    assert found.pop("wall_s") >= 0
    assert found == {
        "env": "search_r1",
        "model": "search_r1_3m",
        "seed": 3,
        "eval_reward_first": 0.5,
        "eval_reward_last": 0.75,
        "eval_r_first": 0.5,
        "eval_r_last": 0.75,
        "eval_pass@2_first": 0.5,
        "eval_pass@2_last": 1.0,
        "eval_questions": 2,
        "eval_episodes": 4,
        "train_reward_first": 0.25,
        "train_reward_last": 1.0,
        "train_reward_window": 2,
        "rollouts": 5,
        "steps": 10,
        "episodes": 18,
        "turns": 0,
        "exactness_violations": 2,
        "rollout_s": 10.0,
        "train_s": 7.5,
        "sync_s": 1.25,
        "eval_s": 1.0,
        "stop_reasons": {"env_failure": 1, "terminated": 18},
        "failures": 1,
        "retried": 1,
        "dropped_groups": 0,
        "causes": [
            {"stop_reason": "terminated", "cause": "", "count": 18},
            {"stop_reason": "env_failure", "cause": "db", "count": 1},
        ],
    }
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_several_evaluation_sets_keep_their_names():
    report = Report()
    for name in ("nq", "hotpot"):
        evaluated(report, 0, group_of(1.0), name=name)
    found = report.summary(CONFIG)
    assert (found["eval_nq_reward_last"], found["eval_hotpot_questions"]) == (1.0, 1)


def test_a_report_continues_from_its_state():
    report, again = Report(), Report()
    evaluated(report, 0, group_of(0.0))
    rolled(report, 0, group_of(1.0, 0.0), extra=[trajectory(reason=StopReason.ENV_FAILURE, cause="db")], dropped=1)
    again.load_state_dict(orjson.loads(orjson.dumps(report.state_dict())))
    for r in (report, again):
        rolled(r, 1, group_of(1.0, 1.0))
    assert again.summary(CONFIG) | {"wall_s": 0} == report.summary(CONFIG) | {"wall_s": 0}


def test_tensorboard_holds_no_rollout_that_was_lost(tmp_path):
    first = Report()
    first.open(tmp_path, CONFIG)
    kept = rolled(first, 0, group_of(1.0, 1.0))
    rolled(first, 1, group_of(0.0, 0.0))
    first.close()
    second = Report()
    second.open(tmp_path, CONFIG, [{"step": 0, **kept}])
    rolled(second, 1, group_of(0.5, 0.5))
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = [(e.step, e.value) for e in events.Scalars("reward")]
    assert values == [(0, 1.0), (1, 0.5)]
