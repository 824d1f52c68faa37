"""Tasks from files, with the line where something is wrong; a source that resumes exactly where it stood."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Env, Task
from agentrl.data.data_files import load_tasks
from agentrl.data.data_source import DataSource, resolve_data_source
from agentrl.errors import ContractError, DataError


def jsonl(tmp_path, *rows):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def load(path, check=None, input_key="prompt", label_key="label"):
    return load_tasks(str(path), input_key=input_key, label_key=label_key, check=check)


ROWS = [{"prompt": f"q{i}", "label": i} for i in range(10)]


def test_rows_become_tasks(tmp_path):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl(
        tmp_path,
        {"prompt": "q", "label": ["a", "b"], "id": 7, "source": "nq", "metadata": {"k": 1}},
        "",
        {"prompt": talk, "label": None, "metadata": "a text"},
    )
    assert load(path) == [
        Task("7", "q", ["a", "b"], {"source": "nq", "k": 1}),
        Task("2", tuple(talk), None, {"metadata": "a text"}),
    ]


def test_columns_by_name(tmp_path):
    (task,) = load(jsonl(tmp_path, {"question": "q", "golden": "a"}), input_key="question", label_key="golden")
    assert (task.prompt, task.label, task.metadata) == ("q", "a", {})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "q", ', "line 2: not JSON"),
        ("[1, 2]", "line 2: expected a JSON object, found list"),
        ({"promt": "q", "label": 1}, "line 2: no column 'prompt'; did you mean 'promt'.*--input-key"),
        ({"prompt": "q"}, "line 2: no column 'label'"),
        ({"prompt": 5, "label": 1}, "line 2: 'prompt' must be a string or a list of messages, found int"),
        ({"prompt": [], "label": 1}, "line 2: 'prompt' must be"),
        ({"prompt": None, "label": 1}, "line 2: 'prompt' must be"),
        ({"prompt": ["q"], "label": 1}, "line 2: 'prompt' must be"),
        ({"prompt": [{"role": "user"}], "label": 1}, "line 2: 'prompt' must be"),
        ({"prompt": [{"role": "user", "content": 5}], "label": 1}, "line 2: 'prompt' must be"),
        ({"prompt": [{"role": 1, "content": "x"}], "label": 1}, "line 2: 'prompt' must be"),
    ],
    ids=str,
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, row, message):
    path = jsonl(tmp_path, ROWS[0], row, ROWS[1])
    with pytest.raises(DataError, match=message) as e:
        load(path)
    assert str(path) in str(e.value)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "q", "label": 1}\n{"prompt": "\xff", "label": 1}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        load(path)


def test_a_label_that_the_environment_refuses_is_named_by_line(tmp_path):
    class Numbers(Env):
        @classmethod
        def check_task(cls, task):
            if not isinstance(task.label, int):
                raise DataError(f"the label must be a number, found {task.label!r}")

    path = jsonl(tmp_path, ROWS[0], "", {"prompt": "q", "label": "x"})
    with pytest.raises(DataError, match=r"d\.jsonl, line 3: the label must be a number, found 'x'"):
        load(path, Numbers.check_task)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "no data file"),
        (".", "holds no tasks"),
        ("..none/*.json", "no data file"),
        ("e.jsonl", "holds no tasks"),
    ],
)
def test_no_file_or_nothing_in_it(tmp_path, name, message):
    (tmp_path / "e.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize(
    ("part", "labels"),
    [
        ("[2:4]", [2, 3]),
        ("[:3]", [0, 1, 2]),
        ("[8:]", [8, 9]),
        ("[:]", list(range(10))),
        ("[9:99]", [9]),
        ("[0:1]", [0]),
    ],
)
def test_a_slice_counts_rows(tmp_path, part, labels, blank):
    rows = [r for row in ROWS for r in ((row, "") if blank else (row,))]
    path = jsonl(tmp_path, *rows)
    assert [t.label for t in load(f"{path}@{part}")] == labels


def test_rows_behind_a_slice_are_not_read(tmp_path):
    path = jsonl(tmp_path, *ROWS[:3], "{broken")
    assert len(load(f"{path}@[:3]")) == 3
    with pytest.raises(DataError, match="line 4"):
        load(path)


def test_an_empty_slice_is_said(tmp_path):
    with pytest.raises(DataError, match=r"@\[20:\] holds no tasks"):
        load(f"{jsonl(tmp_path, *ROWS)}@[20:]")


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "d.parquet"
    talk = [{"role": "user", "content": "u"}]
    pq.write_table(pa.table({"prompt": [talk] * 4, "label": [1, 2, 3, 4], "n": [0, 0, 0, 0]}), path)
    assert load(f"{path}@[1:3]") == [Task("1", tuple(talk), 2, {"n": 0}), Task("2", tuple(talk), 3, {"n": 0})]


def test_parquet_that_is_broken_or_cannot_be_read_is_said(tmp_path):
    path = tmp_path / "d.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"needs pyarrow|not a Parquet file"):
        load(path)


# -- the source ------------------------------------------------------------------------------------------------------


def source(n=7, **more):
    return DataSource([Task(f"t{i}", "q") for i in range(n)], **{"n_samples_per_prompt": 2, "seed": 3, **more})


def ids(groups):
    return [g[0].task.id for g in groups]


@given(st.integers(1, 9), st.lists(st.integers(1, 8), min_size=1, max_size=6), st.data())
def test_resuming_equals_going_on(n, sizes, data):
    whole = source(n)
    expected = [whole.get_samples(k) for k in sizes]
    cut = data.draw(st.integers(0, len(sizes)))
    first = source(n)
    for k in sizes[:cut]:
        first.get_samples(k)
    state = json.loads(json.dumps(first.state_dict()))
    second = source(n)
    second.load_state_dict(state)
    assert [second.get_samples(k) for k in sizes[cut:]] == expected[cut:]


def test_ordinals_and_groups_are_never_given_twice():
    five = source(5)
    specs = [s for _ in range(5) for g in five.get_samples(4) for s in g]
    assert [s.index for s in specs] == list(range(40))
    assert [s.group_index for s in specs] == [i // 2 for i in range(40)]


def test_members_of_a_group_share_the_task():
    for group in source().get_samples(10):
        assert len({s.task.id for s in group}) == 1
        assert [s.attempt for s in group] == [0, 0]


def test_each_epoch_holds_every_task_once_in_a_new_order():
    s = source(20)
    epochs = [ids(s.get_samples(20)) for _ in range(4)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert source(20).get_samples(20) == source(20).get_samples(20)
    assert ids(source(20, seed=4).get_samples(20)) != epochs[0]


def test_without_shuffling_the_order_is_the_files():
    assert ids(source(3, shuffle=False).get_samples(7)) == ["t0", "t1", "t2", "t0", "t1", "t2", "t0"]


def test_other_data_than_when_it_was_saved_is_refused():
    with pytest.raises(DataError, match="made with 7 tasks, the data now has 8"):
        source(8).load_state_dict(source(7).state_dict())


@pytest.mark.parametrize("task", [Task("b", "q", 1), Task("a", "another", 1), Task("a", "q", 2)])
def test_edited_tasks_are_refused(task):
    def of(task):
        return DataSource([task], n_samples_per_prompt=1, seed=0)

    state = of(Task("a", "q", 1)).state_dict()
    of(Task("a", "q", 1)).load_state_dict(state)
    with pytest.raises(DataError, match="the tasks differ from those that the checkpoint was made with"):
        of(task).load_state_dict(state)
    del state["checksum"]
    of(task).load_state_dict(state)


def test_a_label_that_json_has_no_word_for_is_no_other_task():
    first, second = (DataSource([Task("a", "q", {object()})], n_samples_per_prompt=1, seed=0) for _ in range(2))
    second.load_state_dict(first.state_dict())


def test_no_tasks_are_refused():
    with pytest.raises(DataError, match="no tasks"):
        source(0)


def test_groups_that_were_given_back_are_played_again_before_others_as_new_groups():
    given_back = source(5)
    next_task = source(5).get_samples(3)[2][0].task
    first = given_back.get_samples(2)
    given_back.add_samples(first[1:])
    restored = source(5)
    restored.load_state_dict(json.loads(json.dumps(given_back.state_dict())))
    for continued in (given_back, restored):
        again, third = continued.get_samples(2)
        assert [s.task.id for s in again] == [s.task.id for s in first[1]]
        assert ([s.index for s in again], again[0].group_index) == ([4, 5], 2)
        assert (third[0].task, [s.index for s in third]) == (next_task, [6, 7])
    assert "returned" not in given_back.state_dict()


def test_a_data_source_is_a_subclass_of_the_default():
    assert resolve_data_source(None) is DataSource
    with pytest.raises(ContractError, match="expected a subclass of DataSource"):
        resolve_data_source("json:JSONDecoder")
