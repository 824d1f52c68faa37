"""Every layout of a data file gives the same rows; what cannot be read is refused with file and line."""

import builtins
import gzip
import json
import re
import sys
from types import SimpleNamespace

import pytest

from agentrl import ToolEnv
from agentrl.config import build_config
from agentrl.data.data_files import load_tasks
from agentrl.data.task_sets import TaskSets, split_keys
from agentrl.errors import DataError

ROWS = [{"prompt": f"q{i}", "label": f"a{i}"} for i in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b"prompt,label\r\n" + b"".join(f'"q{i}",a{i}\r\n'.encode() for i in range(4))


def load(name, **keys):
    return load_tasks(str(name), **{"input_key": "prompt", "label_key": "label", **keys})


def pairs(tasks):
    return [(t.prompt, t.label) for t in tasks]


EXPECTED = [(r["prompt"], r["label"]) for r in ROWS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", LINES),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES),
        ("d.jsonl.gz", gzip.compress(LINES)),
        ("d.json", json.dumps(ROWS).encode()),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("lines.json", LINES),
        ("d.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("d.csv", CSV),
        ("bom.csv", b"\xef\xbb\xbf" + CSV),
        ("d.csv.gz", gzip.compress(CSV)),
        ("d.tsv", CSV.replace(b",", b"\t")),
    ],
)
def test_every_layout_gives_the_same_tasks(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    tasks = load(tmp_path / name)
    assert pairs(tasks) == EXPECTED
    assert [t.id for t in tasks] == ["0", "1", "2", "3"]
    assert pairs(load(f"{tmp_path / name}@[1:3]")) == EXPECTED[1:3]


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\x0cb", "a\x85b", "a\x1eb", "a\x0bb"])
@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.tsv"])
def test_only_a_newline_ends_a_line(tmp_path, name, text):
    """Other characters that `str.splitlines` divides at are text, without quotes too."""
    lines = {"d.json": json.dumps([{"prompt": text}]), "d.jsonl": json.dumps({"prompt": text}, ensure_ascii=False)}
    (tmp_path / name).write_text(lines.get(name, f"prompt\n{text}\n"), encoding="utf-8", newline="")
    assert [t.prompt for t in load(tmp_path / name)] == [text]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("d.jsonl", b'{"prompt": "q"}\n\n{"prompt": "q", "tools": "[f"}\n', "line 3"),
        ("d.csv", b'prompt,tools\n"two\nlines",\nq,[f\n', "line 4"),
        ("d.json", b'[{"prompt": "q"}, {"prompt": "q", "tools": "[f"}]', "item 2"),
        ("d.parquet", None, "row 2"),
    ],
)
def test_a_row_is_named_by_its_place_in_the_file(tmp_path, name, content, place):
    if content is None:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"prompt": ["q", "q"], "tools": ["", "[f"]}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{re.escape(name)}, {place}: tools is text that is not JSON"):
        load(tmp_path / name)


def test_a_folder_and_a_pattern_read_their_shards_in_order(tmp_path):
    lines = LINES.splitlines(keepends=True)
    (tmp_path / "train-00000-of-00002.jsonl").write_bytes(b"".join(lines[:2]))
    (tmp_path / "train-00001-of-00002.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[2:])))
    (tmp_path / "README.md").write_text("not data")
    for name in (tmp_path, tmp_path / "train-*-of-*"):
        tasks = load(name)
        assert pairs(tasks) == EXPECTED
        assert len({t.id for t in tasks}) == 4
        assert pairs(load(f"{name}@[1:3]")) == EXPECTED[1:3]
    (tmp_path / "test-00000-of-00001.jsonl").write_bytes(LINES)
    assert pairs(load(tmp_path / "train-*")) == EXPECTED
    with pytest.raises(DataError, match=r"several splits \(test, train\)"):
        load(tmp_path)


def test_integers_of_any_size_are_exact(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "q", "label": 93326215443944152681}\n{"prompt": "q", "label": -18446744073709551617}\n')
    assert [t.label for t in load(file)] == [93326215443944152681, -18446744073709551617]
    file.write_text('{"prompt": "1234567890123456789012", "label": NaN}\n')
    with pytest.raises(DataError, match="line 1: not JSON: NaN"):
        load(file)


def test_labels_are_optional_unless_they_are_named(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert pairs(load(file)) == [("a", None), ("b", None)]
    with pytest.raises(DataError, match=r"line 1: no column 'label'.*the columns are prompt"):
        load(file, label_required=True)
    file.write_text('{"prompt": "a", "label": 1}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="line 2: no column 'label'"):
        load(file)


def test_dotted_keys_reach_into_columns(tmp_path):
    file = tmp_path / "d.jsonl"
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": {"target": ["a"]}}, "a.b": 5}
    file.write_text(json.dumps(row))
    (task,) = load(file, label_key="reward_model.ground_truth.target")
    assert task.label == ["a"]
    assert task.prompt == ({"role": "user", "content": "q"},)
    assert load(file, label_key="a.b")[0].label == 5, "a column of this very name comes first"
    with pytest.raises(DataError, match=r"no column 'reward_model.truth'"):
        load(file, label_key="reward_model.truth", label_required=True)


def test_the_tools_of_a_task_are_kept_in_one_form(tmp_path):
    file = tmp_path / "d.jsonl"
    schema = {"type": "function", "function": {"name": "f"}}
    file.write_text(json.dumps({"prompt": "q", "tools": json.dumps([schema])}))
    assert load(file)[0].metadata["tools"] == [schema]
    file.write_text(json.dumps({"prompt": "q", "tools": "[f"}))
    with pytest.raises(DataError, match=r"d\.jsonl, line 1: tools is text that is not JSON"):
        load(file)


def test_prompts_are_read_in_the_normal_form(tmp_path):
    file = tmp_path / "d.jsonl"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    file.write_text(json.dumps({"prompt": talk}))
    (task,) = load(file)
    assert task.prompt[0]["content"] == "q"
    assert task.prompt[1]["content"] == ""
    assert task.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    file.write_text(json.dumps({"prompt": [{"role": "wizard", "content": "q"}]}))
    with pytest.raises(DataError, match=r"line 1: 'prompt' must be .*unknown role 'wizard'"):
        load(file)


def test_parquet_rows_lose_the_keys_that_were_filled_with_null(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    calls = [{"name": "f", "arguments": {"city": "Oslo"}}, {"name": "g", "arguments": {"query": "x"}}]
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": calls}]
    pq.write_table(pa.Table.from_pylist([{"prompt": talk}]), tmp_path / "d.parquet")
    (task,) = load(tmp_path / "d.parquet")
    assert task.prompt[0] == {"role": "user", "content": "q"}
    assert [c["function"]["arguments"] for c in task.prompt[1]["tool_calls"]] == [{"city": "Oslo"}, {"query": "x"}]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("d.csv", b"prompt,label\nq\n", "line 2: expected 2 columns"),
        ("d.csv", b"prompt,label\nq,a,b\n", "line 2: expected 2 columns"),
        ("d.csv", b"prompt\n\xff\n", "not a text in UTF-8"),
        ("d.json", b"[1]", "item 1: expected a JSON object, found int"),
        ("d.json", b"[{]", "not JSON"),
        ("d.jsonl.gz", b"no gzip", "not a gzip file"),
        ("d.jsonl.gz", gzip.compress(LINES)[:-9], "not a gzip file"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load(tmp_path / name)


def test_a_hub_id_without_the_package_is_refused_with_what_to_install(monkeypatch):
    real = builtins.__import__

    def no_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(DataError, match="pip install datasets"):
        load("nobody/no-such-data")


@pytest.mark.parametrize(
    ("name", "read"), [("owner/set", ("owner/set", "train")), ("owner/set:test[:10]", ("owner/set", "test[:10]"))]
)
def test_a_hub_id_is_read_with_its_split_and_without_the_keys_that_were_filled_with_null(
    monkeypatch, tmp_path, name, read
):
    asked = []
    prompt = [{"role": "user", "content": "q", "tool_calls": None}]

    def load_dataset(path, *, split):
        asked.append((path, split))
        return [{"prompt": prompt, "label": "a"}, {"prompt": prompt, "label": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    tasks = load(name)
    assert asked == [read]
    assert pairs(tasks) == [(({"role": "user", "content": "q"},), "a"), (({"role": "user", "content": "q"},), "b")]
    with pytest.raises(DataError, match=rf"owner/set \({re.escape(read[1])}\), row 0: no column 'answer'"):
        load(name, label_key="answer", label_required=True)


def test_each_evaluation_set_is_read_with_its_own_keys(hermes, tmp_path):
    for name, row in (("a", {"q": "one?", "x": {"y": "1"}}), ("b", {"prompt": "two?", "label": "2"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    words = ["aime:input_key=q,label_key=x.y", str(tmp_path / "a.jsonl"), "plain", str(tmp_path / "b.jsonl")]
    sets = TaskSets(build_config({"eval_prompt_data": words}), ToolEnv, hermes).evaluation()
    assert {name: pairs(tasks) for name, tasks in sets.items()} == {"aime": [("one?", "1")], "plain": [("two?", "2")]}


def test_an_evaluation_set_may_have_its_own_keys():
    assert split_keys("aime") == ("aime", {})
    assert split_keys("aime:input_key=q,label_key=a.b") == ("aime", {"input_key": "q", "label_key": "a.b"})
    assert split_keys("aime:n_samples_per_eval_prompt=16") == ("aime", {"n_samples_per_eval_prompt": "16"})
    for wrong in (
        "aime:n_samples_per_eval_prompt=0",
        "aime:n_samples_per_eval_prompt=x",
        "aime:",
        "aime:input_key",
        "aime:input=q",
        "aime:input_key=a,input_key=b",
    ):
        with pytest.raises(DataError, match="expected NAME or NAME:input_key"):
            split_keys(wrong)
