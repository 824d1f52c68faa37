"""Every estimator and its loss against its paper, written out a second time: advantages, and gradients by autograd; and the laws of all."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from bigram import Bigram, gradient, log_probs, loss_of, made_batches, rollouts, tree  # noqa: E402
from doubles import PROMPT, SAMPLED, group_of, span, trajectory  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis_examples import examples  # noqa: E402

from agentrl.config.settings import ESTIMATOR_NAMES  # noqa: E402
from agentrl.errors import ConfigError, ContractError, UnknownNameError  # noqa: E402
from agentrl.train.advantage import Overlong, compare  # noqa: E402
from agentrl.train.estimators import Options, estimator, find_estimator, whiten  # noqa: E402
from agentrl.train.estimators.base import ESTIMATORS  # noqa: E402
from agentrl.types import Action, Group, Provenance, Task, Turn  # noqa: E402

OPTIONS = Options(gamma=0.9, lambd=0.8, step_weight=0.7)
BUDGET = 1024
"""the default response budget, which 'constant' divides by"""


# -- the papers, over plain lists ----------------------------------------------------------------------------------------


class Told:
    """An episode in plain Python, read from the trajectory and not from what is tested."""

    def __init__(self, t, group, truncated, model):
        self.id, self.group, self.score = t.episode_id, group, t.score
        self.trained = truncated == "train" or t.status.value == "completed"
        self.tokens = []
        """(turn, segment's ids, position) of each sampled token"""
        for segment in t.segments:
            ids, at = segment.ids, 0
            for s in segment.spans:
                if s.provenance is Provenance.SAMPLED:
                    self.tokens += [(s.turn, ids, at + i) for i in range(len(s.ids))]
                at += len(s.ids)
        self.engine = [p for g in t.segments for s in g.spans for p in (s.log_probs or ())]
        self.rewards = [0.0] * len(self.tokens)
        for turn in t.turns:
            last = max(i for i, (k, _, _) in enumerate(self.tokens) if k <= turn.index)
            self.rewards[last] += turn.reward
        self.rewards[-1] += sum(t.rewards.values())
        self.keys = ["start", *(turn.state_key for turn in t.turns[:-1])]
        self.values = [float(model.value[ids[at - 1]]) for _, ids, at in self.tokens]

    def log_probs(self, table):
        by_segment = {tuple(ids): log_probs(table, ids) for ids in {tuple(ids) for _, ids, _ in self.tokens}}
        return [by_segment[tuple(ids)][at] for _, ids, at in self.tokens]


def told(groups, model, truncated="train"):
    return [Told(t, g.index, truncated, model) for g in groups for t in g.trajectories]


def mean(xs):
    return math.fsum(xs) / len(xs)


def std(xs):
    return math.sqrt(math.fsum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def normal(x, xs):
    return 0.0 if len(xs) < 2 or max(xs) - min(xs) < 1e-6 else (x - mean(xs)) / (std(xs) + 1e-6)


def of_group(e, episodes):
    return [o.score for o in episodes if o.group == e.group]


def flat(e, episodes):
    scores = of_group(e, episodes)
    return len(scores) < 2 or max(scores) - min(scores) < 1e-6


def paper_grpo(episodes, o):
    return [[normal(e.score, of_group(e, episodes))] * len(e.tokens) for e in episodes]


def paper_dr_grpo(episodes, o):
    return [[0.0 if flat(e, episodes) else e.score - mean(of_group(e, episodes))] * len(e.tokens) for e in episodes]


def paper_rloo(episodes, o):
    def one(e):
        others = [x.score for x in episodes if x.group == e.group and x is not e]
        return 0.0 if flat(e, episodes) else e.score - mean(others)

    return [[one(e)] * len(e.tokens) for e in episodes]


def normalised(lists, episodes):
    every = [x for xs, e in zip(lists, episodes, strict=True) for x in xs if e.trained]
    if len(every) < 2:
        return [[0.0] * len(xs) for xs in lists]
    m, v = mean(every), std(every) ** 2
    return [[(x - m) / math.sqrt(v + 1e-8) for x in xs] for xs in lists]


def paper_reinforce_plus_plus(episodes, o):
    returns = [
        [sum(o.gamma ** (j - i) * r for j, r in enumerate(e.rewards) if j >= i) for i in range(len(e.rewards))]
        for e in episodes
    ]
    return normalised(returns, episodes)


def paper_reinforce_plus_plus_baseline(episodes, o):
    return normalised(paper_dr_grpo(episodes, o), episodes)


def paper_ppo(episodes, o):
    def gae(e):
        v = [*e.values, 0.0]
        deltas = [r + o.gamma * v[i + 1] - v[i] for i, r in enumerate(e.rewards)]
        return [
            sum((o.gamma * o.lambd) ** (j - i) * d for j, d in enumerate(deltas) if j >= i) for i in range(len(deltas))
        ]

    return [gae(e) for e in episodes]


def paper_gigpo(episodes, o):
    def step_return(e, k):
        own = {}
        for r, (turn, _, _) in zip(e.rewards, e.tokens, strict=True):
            own[turn] = own.get(turn, 0.0) + r
        return sum(o.gamma ** (j - k) * r for j, r in own.items() if j >= k)

    groups = {}
    for e in episodes:
        for k in {turn for turn, _, _ in e.tokens}:
            if e.keys[k] is not None:
                groups.setdefault((e.group, e.keys[k]), []).append(step_return(e, k))

    def token(e, k):
        anchored = groups.get((e.group, e.keys[k]), [])
        return normal(e.score, of_group(e, episodes)) + o.step_weight * normal(step_return(e, k), anchored)

    return [[token(e, k) for k, _, _ in e.tokens] for e in episodes]


PAPERS = {
    "grpo": paper_grpo,
    "gspo": paper_grpo,
    "cispo": paper_grpo,
    "dr_grpo": paper_dr_grpo,
    "rloo": paper_rloo,
    "reinforce_plus_plus": paper_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": paper_reinforce_plus_plus_baseline,
    "ppo": paper_ppo,
    "gigpo": paper_gigpo,
}


def compared(groups, model, truncated="train"):
    made = compare(groups, truncated)
    values = [v for e in told(groups, model, truncated) for v in e.values]
    return replace(made, data=replace(made.data, values=np.array(values)))


@pytest.mark.parametrize("name", PAPERS)
@given(rollouts(), st.sampled_from(["train", "mask"]))
@examples(15)
def test_advantages_are_those_of_the_paper(name, drawn, truncated):
    groups, model = drawn
    made = compared(groups, model, truncated)
    found = find_estimator(name)(made.data, OPTIONS)
    want = PAPERS[name](told(groups, model, truncated), OPTIONS)
    np.testing.assert_allclose(found, [x for xs in want for x in xs], rtol=1e-6, atol=1e-6)


# -- the objectives, by autograd -----------------------------------------------------------------------------------------


def ratio_of_token(e, model):
    return [n - o for n, o in zip(e.log_probs(model.now), e.log_probs(model.old), strict=True)]


def clipped(ratio, a, low=0.2, high=0.28):
    return torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def objective(name, episodes, advantages, model, per_token):
    """J of the paper, as a function of the current table."""
    used = [(e, a) for e, a in zip(episodes, advantages, strict=True) if e.trained]
    tokens = sum(len(e.tokens) for e, _ in used)
    total = torch.zeros((), dtype=torch.float64)
    for e, a in used:
        logs = ratio_of_token(e, model)
        if name == "gspo":
            s = torch.exp(torch.stack(logs).mean())
            total = total + clipped(s, a[0]) / len(used)
            continue
        if name == "cispo":
            now = e.log_probs(model.now)
            terms = [torch.exp(x).detach().clamp(0.8, 1.28) * a[t] * now[t] for t, x in enumerate(logs)]
        else:
            terms = [clipped(torch.exp(x), a[t]) for t, x in enumerate(logs)]
        if name == "cispo" or per_token:
            total = total + sum(terms) / tokens
        elif name in ("dr_grpo", "rloo"):
            total = total + sum(terms) / (len(used) * BUDGET)
        else:
            total = total + sum(terms) / (len(used) * len(e.tokens))
    return total


@pytest.mark.parametrize("name", PAPERS)
@given(rollouts(truncated=False, groups=2), st.booleans(), st.integers(1, 4))
@examples(4)
def test_the_gradient_is_that_of_the_papers_objective_for_any_split_into_micro_batches(name, drawn, per_token, splits):
    groups, model = drawn
    per_token = per_token and name != "gspo"
    given_settings = {
        "advantage_estimator": name,
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": per_token,
        "kl_loss_coef": 1e-9,
        "use_kl_loss": True,  # so that flat rows are kept
        "rejection_level": "token",  # so that old log-probs are computed although there is one step
        "rejection_high": 1e9,
        "rejection_low": 0.0,
    }
    given_settings |= {"gamma": 0.9} if name in ("ppo", "reinforce_plus_plus", "gigpo") else {}
    given_settings |= {"lambd": 0.8} if name == "ppo" else {"gigpo_step_weight": 0.7} if name == "gigpo" else {}
    (rows,) = made_batches(groups, model, given_settings).policy
    found = gradient(rows, model, loss_of(given_settings), splits)
    episodes = told(groups, model)
    advantages = PAPERS[name](episodes, OPTIONS)
    model.now.grad = None
    (-objective(name, episodes, advantages, model, per_token)).backward()
    torch.testing.assert_close(found, model.now.grad, rtol=1e-5, atol=1e-6)


@given(rollouts(truncated=False))
@examples(5)
def test_the_critics_targets_are_advantage_and_value_and_its_rows_are_all_rows(drawn):
    groups, model = drawn
    made = made_batches(groups, model, {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8})
    want = {
        e.id: np.array(a) + e.values
        for e, a in zip(told(groups, model), paper_ppo(told(groups, model), OPTIONS), strict=True)
    }
    for row in (r for rows in made.critic for r in rows):
        assert row.source[0] in want
        assert row.values is not None
    found = {}
    for row in sorted((r for rows in made.critic for r in rows), key=lambda r: r.source):
        found.setdefault(row.source[0], []).extend(row.returns[row.weights != 0].tolist())
    assert found.keys() == want.keys()
    for episode_id, values in want.items():
        np.testing.assert_allclose(found[episode_id], values, rtol=1e-5, atol=1e-5)
    assert all(r.values is None and r.returns is None for rows in made.policy for r in rows)


# -- laws ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPERS)
@given(rollouts(), st.randoms())
@examples(5)
def test_the_order_of_groups_and_of_their_members_changes_nothing(name, drawn, random):
    groups, model = drawn

    def by_episode(groups):
        made = compared(groups, model)
        return made.by_episode(find_estimator(name)(made.data, OPTIONS))

    before = by_episode(groups)
    shuffled = [replace(g, trajectories=tuple(random.sample(g.trajectories, len(g.trajectories)))) for g in groups]
    random.shuffle(shuffled)
    after = by_episode(shuffled)
    assert before.keys() == after.keys()
    for episode_id, values in before.items():
        np.testing.assert_allclose(after[episode_id], values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["grpo", "gspo", "cispo", "gigpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
@given(rollouts(truncated=False), st.floats(0.5, 100))
@examples(5)
def test_what_is_normalised_does_not_change_with_the_scale_of_rewards(name, drawn, scale):
    groups, _ = drawn

    def scaled(t):
        turns = tuple(replace(turn, reward=turn.reward * scale) for turn in t.turns)
        return replace(t, turns=turns, weights={k: w * scale for k, w in t.weights.items()})

    larger = [replace(g, trajectories=tuple(map(scaled, g.trajectories))) for g in groups]
    a, b = (find_estimator(name)(compare(g).data, OPTIONS) for g in (groups, larger))
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
@given(rollouts(truncated=False), st.floats(0.5, 100))
@examples(5)
def test_what_is_not_normalised_scales_with_rewards(name, drawn, scale):
    groups, _ = drawn
    data = compare(groups).data
    larger = replace(data, scores=data.scores * scale)
    np.testing.assert_allclose(find_estimator(name)(larger), find_estimator(name)(data) * scale, rtol=1e-9, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in PAPERS if "group" in find_estimator(n).needs])
def test_a_group_of_one_learns_nothing_from_its_score(name):
    assert not find_estimator(name)(compare([group_of(1.0)]).data).any()


@pytest.mark.parametrize("name", [n for n in PAPERS if n != "ppo"])
def test_equal_scores_have_advantage_0_also_where_they_are_whitened(name):
    found = find_estimator(name)(compare([group_of(1.0, 1.0, 1.0), group_of(1.0, 1.0, index=1)]).data)
    assert not found.any()
    assert not whiten(np.full(5, 3.0)).any()
    assert whiten(np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("name", PAPERS)
@given(rollouts(truncated=False))
@examples(5)
def test_masked_tokens_have_no_gradient_and_the_ratio_is_1_at_the_first_step(name, drawn):
    groups, model = drawn
    wanted = {"advantage_estimator": name, "entropy_coef": 0.1}
    (rows,) = made_batches(groups, model, wanted).policy
    for row in rows:
        mask = row.weights != 0
        assert not row.advantages[~mask].any()
        ids = [s for g in groups for t in g.trajectories if t.episode_id == row.source[0] for s in t.segments][
            row.source[1]
        ]
        sampled = np.concatenate([[s.provenance is SAMPLED] * len(s.ids) for s in ids.spans])
        assert (mask == sampled).all()
        assert row.old_log_probs is None or name == "ppo"
    if name != "ppo":
        from agentrl.train.megatron.loss import token_loss
        from agentrl.train.megatron.micro_batch import collate

        batch = collate(rows, trained_only=True)
        now = torch.randn(len(batch.data.weights)).requires_grad_()
        _, sums, maxima = token_loss(now, torch.zeros_like(now), batch.data, loss_of(wanted))
        weight, ratio = float(sums[7]), float(sums[6])
        assert ratio == pytest.approx(weight, rel=1e-12)
        assert float(maxima[1]) == 1.0


def test_dr_grpo_weighs_the_tokens_of_a_long_and_a_short_answer_equally():
    """Liu et al. 2025, §3.2: answers of 10 and 40 tokens with scores 1 and 0."""

    def answer(index, tokens, score):
        return trajectory([[span(PROMPT, (1, 2), -1), span(SAMPLED, [3] * tokens)]], index=index, score=score)

    groups = [Group(0, Task("x", "x"), (answer(0, 10, 1.0), answer(1, 40, 0.0)))]
    for name in ("dr_grpo", "rloo"):
        (rows,) = made_batches(groups, Bigram.random(0), {"advantage_estimator": name}).policy
        per_token = [{float(abs(w * a)) for w, a in zip(r.weights, r.advantages, strict=True) if w} for r in rows]
        assert len(set.union(*per_token)) == 1, name
        assert sum(float(r.weights.sum()) for r in rows) == pytest.approx(50 / (2 * BUDGET))
    (rows,) = made_batches(groups, Bigram.random(0), {"advantage_estimator": "grpo"}).policy
    assert rows[0].weights.max() / rows[1].weights.max() == pytest.approx(4)


@given(rollouts(truncated=False))
@examples(5)
def test_normalised_advantages_have_mean_0_and_variance_1_over_the_tokens(drawn):
    groups, model = drawn
    wanted = {"advantage_estimator": "dr_grpo", "normalize_advantages": True, "entropy_coef": 0.1}
    (rows,) = made_batches(groups, model, wanted).policy
    every = np.concatenate([r.advantages[r.weights != 0] for r in rows]).astype(np.float64)
    if every.any():
        assert every.mean() == pytest.approx(0, abs=1e-5)
        assert every.var(ddof=1) == pytest.approx(1, abs=1e-3)


# -- branches ------------------------------------------------------------------------------------------------------------


def test_siblings_at_a_branch_are_compared_with_each_other_and_the_trunk_by_the_mean_below_it():
    groups = tree()
    made = compare(groups)
    found = find_estimator("branch_rloo")(made.data)
    by_turn = {}
    for e, turn, a in zip(made.data.episode, made.data.turn, found, strict=True):
        by_turn.setdefault((made.trajectories[e].episode_id, int(turn)), set()).add(round(float(a), 9))
    whole = ((1.0 + 4.0) / 2 + 0.0 + 2.0) / 3  # at turn 1 the rest of the first episode and two branches
    continued = (1.0 + 4.0) / 2  # below turn 1 of the first episode: itself and the branch from turn 2
    assert by_turn == {
        ("0-0", 0): {round(whole - 0.5, 9)},
        ("0-0", 1): {round(continued - (0.0 + 2.0) / 2, 9)},
        ("0-0", 2): {1.0 - 4.0},
        **{("1-0", k): {round(0.5 - whole, 9)} for k in range(3)},
        **{("b1", k): {0.0 - (continued + 2.0) / 2} for k in (1, 2)},
        **{("b2", k): {2.0 - (continued + 0.0) / 2} for k in (1, 2)},
        ("c1", 2): {4.0 - 1.0},
    }


def test_tokens_before_a_branch_are_trained_once_in_the_episode_it_branched_from():
    groups = tree()
    made = compare(groups)
    assert [int(made.data.turn[part].min()) for part in made.data.starts()] == [0, 0, 1, 1, 2]
    (rows,) = made_batches(groups, Bigram.random(1), {"advantage_estimator": "grpo"}).policy
    own = {
        t.episode_id: sum(
            len(s.ids) for s in t.segments[0].spans if s.provenance is SAMPLED and s.turn >= t.branch_turn
        )
        for t in made.trajectories
    }
    assert {r.source[0]: int((r.weights != 0).sum()) for r in rows} == own
    scores = [t.score for t in made.trajectories]
    each = [normal(s, scores) for s in scores]
    shared = find_estimator("grpo")(made.data)[made.data.episode == 0]
    turn = made.data.turn[made.data.episode == 0]
    np.testing.assert_allclose(shared[turn == 0], mean([mean([each[0], each[4]]), *each[2:4]]), atol=1e-12)
    np.testing.assert_allclose(shared[turn == 1], mean([each[0], each[4]]))
    np.testing.assert_allclose(shared[turn == 2], each[0])


# -- overlong responses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "penalty"), [(10, 0.0), (60, 0.0), (70, -0.5), (80, -1.0), (100, -2.0), (130, -2.0)]
)
def test_the_overlong_penalty_grows_from_the_buffer_to_the_limit(length, penalty):
    """DAPO, eq. 13."""
    assert Overlong(limit=100, buffer=40, factor=2.0).penalty(length) == pytest.approx(penalty)
    assert Overlong(limit=100, buffer=0).penalty(length) == 0.0


def test_an_overlong_response_loses_its_penalty_in_the_score_and_on_its_last_token():
    long = trajectory(
        [[span(PROMPT, (1, 2), -1), span(SAMPLED, [3] * 9), span(Provenance.OBSERVATION, (5,))]], index=0, score=1.0
    )
    data = compare([Group(0, Task("x", "x"), (long,))], overlong=Overlong(limit=12, buffer=4)).data
    assert data.scores.tolist() == [0.5]
    assert data.rewards.tolist() == [0.0] * 8 + [0.5]


# -- registration and refusals -------------------------------------------------------------------------------------------


def test_the_settings_name_every_built_in_estimator():
    assert sorted(ESTIMATOR_NAMES) == sorted(n for n in ESTIMATORS.names() if n != "halved")
    assert {*PAPERS, "branch_rloo", "distillation"} == set(ESTIMATOR_NAMES)


def test_users_register_with_the_decorator_and_are_found_in_their_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from agentrl.train.estimators import estimator\n\n"
        '@estimator("halved", policy_loss="cispo")\n'
        "def halved(episodes, options):\n    return episodes.on_tokens(episodes.scores / 2)\n"
    )
    for name in (str(file), f"{file}:halved", "halved"):
        found = find_estimator(name)
        assert (found.name, found.policy_loss) == ("halved", "cispo")
    assert find_estimator("halved")(compare([group_of(1.0, 3.0)]).data).tolist() == [0.5, 0.5, 1.5, 1.5]


def test_an_estimator_that_returns_another_shape_or_no_number_is_refused_by_name():
    data = compare([group_of(1.0, 3.0)]).data
    short = estimator("halved")(lambda episodes, options: np.zeros(3))
    with pytest.raises(ContractError, match="'halved' returned shape"):
        short(data)
    endless = estimator("halved")(lambda episodes, options: np.full(4, np.inf))
    with pytest.raises(ContractError, match="not finite"):
        endless(data)
    with pytest.raises(ConfigError, match="needs the values of a critic"):
        find_estimator("ppo")(data)


def test_an_unknown_estimator_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'gspo'"):
        find_estimator("gsppo")
    (tmp_path / "other.py").write_text("thing = 3\n")
    with pytest.raises(ConfigError, match="expected a function with the decorator @estimator, found int"):
        find_estimator(f"{tmp_path / 'other.py'}:thing")


def test_a_turn_reward_without_a_token_of_its_turn_goes_to_the_token_before():
    spans = [span(PROMPT, (1, 2), -1), span(SAMPLED, (3, 4), 0), span(SAMPLED, (5,), 2)]
    turns = [Turn(k, 0, 1, Action("x"), reward=r) for k, r in enumerate((0.25, 0.5, 2.0))]
    data = compare([Group(0, Task("x", "x"), (trajectory([spans], score=1.0, turns=turns),))]).data
    assert data.rewards.tolist() == [0.0, 0.75, 3.0]
