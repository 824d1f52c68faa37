"""The page in a headless Chromium: it opens, filters, colours and follows a run, and the text of episodes stays text.

Needs Debian's chromium and chromium-driver and the package selenium; skipped where they are missing.
"""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from doubles import FakeGenerator, play
from processes import read_line
from viewruns import EVIL, add_group, decode, episode, make_large_run, make_run, step_record

from agentrl import Env, StepResult
from agentrl.core.message_images import PlacedImage, as_image
from agentrl.core.summary_request import SummaryRequest
from agentrl.store import EpisodeWriter, Recording, encode
from agentrl.store.episode_record import to_record
from agentrl.types import Action, Observation
from agentrl.view.episode_detail import episode_detail
from agentrl.view.html_export import html_of

pytest.importorskip("selenium.webdriver", reason="needs the package selenium")
import chromium
from chromium import find, open_page, press, start_browser, text, wait
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

Served = partial(chromium.Served, decode=decode)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (chromium.CHROMIUM and chromium.DRIVER), reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def browser():
    made = start_browser()
    yield made
    made.quit()


@pytest.fixture
def run(tmp_path):
    writer = make_run(tmp_path / "run")
    served = Served(tmp_path / "run")
    served.writer = writer
    yield served
    served.close()
    writer.close()


def check_quiet(browser, *allowed):
    """Assert that the console shows no error, every request went to the server, and no script of an episode ran."""
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    messages = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [u for u in urls if not u.startswith(("http://127.0.0.1:", "data:", "file:", "about:", *allowed))] == []
    assert browser.execute_script("return window.hacked === undefined")


def test_the_run_page_has_curves_and_the_failure_table(browser, run):
    open_page(browser, run.url)
    assert len(find(browser, ".curve-card")) == 2
    assert "terminated" in text(browser, "#causes")
    assert EVIL.split("\x1b")[0] in text(browser, "#causes"), "the cause of a failure is text"
    check_quiet(browser)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("page", ["", "#/episodes", "#/episode?id=9-0", "#/compare"])
def test_the_pages_fit_a_phone_and_a_desktop(browser, run, page, width):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, run.url + page)
        widths = "return [document.documentElement.scrollWidth, window.innerWidth]"
        wait(browser, lambda b: b.execute_script(widths)[1] == width)
        assert browser.execute_script(widths)[0] <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    check_quiet(browser)


def test_curves_have_axes_gaps_and_the_value_under_the_pointer(browser, tmp_path):
    writer = make_run(tmp_path / "run")
    rows = [{"step": s, "reward": s / 10, **({"stop/max_turns": s + 1} if s != 1 else {})} for s in range(4)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    served = Served(tmp_path / "run")
    try:
        open_page(browser, served.url)
        card = next(c for c in find(browser, ".curve-card") if "stop/max_turns" in c.text)
        path = card.find_element("css selector", ".curve").get_attribute("d")
        assert path.count("M") == 2, "a rollout without the value is a gap, not a ramp"
        assert card.find_element("css selector", ".x-axis").text.split() == ["1", "rollout", "4"]
        assert card.find_element("css selector", ".y-axis").text.split() == ["4", "1"]
        ActionChains(browser).move_to_element_with_offset(card.find_element("css selector", "svg"), 100, 0).perform()
        assert card.find_element("css selector", ".value").text in ("rollout 3: 3", "rollout 4: 4")
    finally:
        served.close()
        writer.close()
    check_quiet(browser)


def test_the_list_filters_searches_sorts_and_opens_by_keys(browser, run):
    open_page(browser, run.url + "#/episodes")
    wait(browser, lambda b: len(find(b, ".list-row[data-id]")) == 12)
    Select(find(browser, "select[data-filter=stop]")[0]).select_by_value("max_turns")
    wait(browser, lambda b: text(b, "#count") == "5 episodes")
    find(browser, "[data-sort=score]")[0].click()
    wait(browser, lambda b: [r.get_attribute("data-id") for r in find(b, ".list-row[data-id]")][:1] == ["11-0"])
    press(browser, "/")
    browser.switch_to.active_element.send_keys("9-0")
    wait(browser, lambda b: text(b, "#count") == "1 episodes")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    press(browser, Keys.ENTER)
    wait(browser, lambda b: "episode 9-0" in text(b, "h1"))
    press(browser, Keys.ESCAPE)
    wait(browser, lambda b: text(b, "#count") == "1 episodes")
    check_quiet(browser)


def test_an_episode_its_colours_and_its_trained_row(browser, run):
    open_page(browser, run.url + "#/episode?id=2-0")
    assert EVIL.split("\x1b")[0] in text(browser)
    assert "\\x1b[31mred\\x07" in text(browser)
    assert "125 ms" in text(browser)
    assert find(browser, "main script, main img") == []
    press(browser, "t")
    colours = {}
    for n, mode in enumerate(("provenance", "mask", "log_prob", "difference", "advantage", "version"), 1):
        press(browser, str(n))
        assert find(browser, "[data-mode][aria-pressed=true]")[0].get_attribute("data-mode") == mode
        colours[mode] = browser.execute_script(
            "return [...document.querySelectorAll('.tokens [data-i]')].map(e => e.style.backgroundColor)"
        )
        assert find(browser, ".legend span"), "every mode has a legend"
    assert len(colours["mask"]) == 14
    assert [bool(c) for c in colours["mask"]] == [False] * 5 + [True] * 3 + [False] * 3 + [True] * 3
    assert [bool(c) for c in colours["advantage"]] == [bool(c) for c in colours["mask"]]
    assert colours["version"][5] != colours["version"][11]
    assert len(set(colours["log_prob"])) > 3
    assert len(set(colours["difference"])) > 3
    webdriver.ActionChains(browser).move_to_element(find(browser, ".tokens [data-i='5']")[0]).perform()
    about = text(browser, ".about")
    assert all(
        part in about
        for part in (
            "token 5",
            '"<search>"',
            "SAMPLED",
            "turn 0",
            "mask 1",
            "version 2",
            "trainer -0.5000",
            "advantage 0.707",
        )
    )
    press(browser, "r")
    assert "optimizer step 2" in text(browser, ".trained-view")
    assert len(find(browser, ".row-table tbody tr")) == 13
    assert len(find(browser, ".row-table tr.trained")) == 6
    assert len(find(browser, ".lane")) == 2
    press(browser, "j")
    wait(browser, lambda b: "episode 3-0" in text(b, "h1"))
    check_quiet(browser)


def test_a_long_row_is_shown_in_parts(browser, tmp_path):
    """4,000 of 4,500 positions, then all of them, then the padding to a multiple of 16."""
    t = episode(0, 0, 1.0)
    spans = t.segments[0].spans
    long = dataclasses.replace(spans[0], ids=(1,) * (4501 - 14 + 5))
    writer = EpisodeWriter(tmp_path / "run")
    writer.write(dataclasses.replace(t, segments=(dataclasses.replace(t.segments[0], spans=(long, *spans[1:])),)))
    (row, _) = step_record(0, 0)["rows"]
    writer.write_step(**step_record(0, 0) | {"rows": [{**row, "tokens": 4501}], "plan": [[[0]]], "multiple": 16})
    writer.close()
    served = Served(tmp_path / "run")
    try:
        open_page(browser, served.url + "#/episode?id=0-0")
        press(browser, "r")
        assert "padded to 4512 positions, a multiple of 16" in text(browser, ".trained-view")
        assert len(find(browser, ".row-table tbody tr")) == 4000
        assert text(browser, ".rest") == "first 4000 of 4500 positions shown show 500 more"
        find(browser, ".rest button")[0].click()
        assert len(find(browser, ".row-table tbody tr")) == 4500 + 3 + 1
        assert "12 padding positions in total" in text(browser, ".row-table")
        assert not find(browser, ".rest")[0].is_displayed()
        check_quiet(browser)
    finally:
        served.close()


def test_two_episodes_side_by_side(browser, run):
    open_page(browser, run.url + "#/compare?a=0-0&b=1-0")
    assert len(find(browser, ".two .episode")) == 2
    assert text(browser, "#difference") == "identical tokens"
    press(browser, "2")
    assert len(find(browser, "[data-mode=mask][aria-pressed=true]")) == 2
    check_quiet(browser)


def test_it_follows_a_run_that_is_being_written(browser, run):
    open_page(browser, run.url + "#/episodes")
    wait(browser, lambda b: text(b, "#count") == "12 episodes")
    add_group(run.writer, 6)
    wait(browser, lambda b: text(b, "#count") == "14 episodes")
    assert len(find(browser, ".list-row[data-id]")) == 14
    check_quiet(browser)


WRITER = """
import json, sys
from pathlib import Path
from viewruns import add_group
from agentrl.store import EpisodeWriter

run = Path(sys.argv[1])
writer = EpisodeWriter(run / "episodes")
with (run / "metrics.jsonl").open("a") as metrics:
    for line in sys.stdin:
        group = int(line)
        add_group(writer, group)
        print(json.dumps({"step": group, "reward": 0.9}), file=metrics, flush=True)
        print("written", flush=True)
writer.close()
"""


def test_the_run_page_follows_a_run_that_another_process_writes(browser, run):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path])
    command = [sys.executable, "-c", WRITER, str(run.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as writer:
        open_page(browser, run.url)
        assert "12 episodes, 6 optimizer steps" in text(browser)
        for group in (6, 7):
            writer.stdin.write(f"{group}\n")
            writer.stdin.flush()
            assert read_line(writer) == "written\n"
            n = 2 * group + 2
            wait(browser, lambda b, n=n, g=group: f"{n} episodes, {g + 1} optimizer steps" in text(b))
            wait(browser, lambda b, g=group: text(b, ".curve-card .x-axis") == f"1rollout{g + 1}")
            assert "reward0.900" in text(browser, ".curve-card h3")
        writer.stdin.close()
        assert writer.wait(30) == 0
    check_quiet(browser)


def test_an_unknown_episode_is_an_error(browser, run):
    open_page(browser, run.url + "#/episode?id=<img src=x onerror=alert(1)>")
    assert "no episode" in text(browser, ".error")
    assert find(browser, "main img") == []
    check_quiet(browser)


def test_the_speakers_of_an_episode_are_named(browser, tmp_path, tags):
    class White(Env):
        roles = ("white", "black", "judge")

        def reset(self, task, *, seed):
            self.turns = 0
            return "White begins."

        def step(self, action):
            self.turns += 1
            to = self.roles[min(self.turns, 2)]
            rewards = {"white": 0.5} if self.turns == 2 else {}
            return StepResult(Observation.of(f"To {to}.", to=to), rewards=rewards, terminated=self.turns == 3)

    players = {"black": FakeGenerator(tags, ["frozen"]), "judge": lambda messages, *, seed: "well done"}
    t = asyncio.run(play(White, ["sampled"], tags, players=players))
    rows = [
        {"episode_id": t.episode_id, "role": "white", "segment_index": 0, "tokens": len(t.segments[0]), "trained": 3}
    ]
    step = {
        "step": 0,
        "optimizer_step": 1,
        "rows": [rows[0] | {"advantage": 0.75, "weight": 0.1}],
        "loss": {},
        "lr": 0.1,
    }
    detail = episode_detail(json.loads(encode(to_record(t))), step, tags.tokenizer.decode, None)
    assert [s.get("advantage") for s in detail["segments"]] == [0.75, None]
    (tmp_path / "e.html").write_text(html_of(detail), encoding="utf-8")
    open_page(browser, (tmp_path / "e.html").as_uri())
    shown = text(browser)
    for words in (
        "white, played by the policy",
        "black, played by another",
        "to judge",
        "well done",
        "white 0.500",
        "white 0.750",
    ):
        assert words.upper() in shown.upper()
    press(browser, "1")
    assert "OTHER_AGENT" in text(browser)
    check_quiet(browser)


def test_the_exported_file_opens_by_itself(browser, tmp_path):
    make_run(tmp_path / "run").close()
    recording = Recording(tmp_path / "run")
    detail = episode_detail(recording.record(recording.entry("0-0")), recording.step_of("0-0"), decode, 0.7071)
    (tmp_path / "e.html").write_text(html_of(detail), encoding="utf-8")
    open_page(browser, (tmp_path / "e.html").as_uri())
    assert "episode 0-0" in text(browser, "h1")
    assert EVIL.split("\x1b")[0] in text(browser)
    press(browser, "2")
    assert (
        len(
            [
                c
                for c in browser.execute_script(
                    "return [...document.querySelectorAll('.tokens [data-i]')].map(e => e.style.backgroundColor)"
                )
                if c
            ]
        )
        == 6
    )
    check_quiet(browser)


def test_images_are_shown_from_the_record_without_a_request(browser, tmp_path):
    pil = pytest.importorskip("PIL.Image")
    there, gone = (as_image({"image": pil.new("RGB", (64, 32), colour)}) for colour in ("red", "blue"))
    t = episode(0, 0, 1.0)
    parts = [{"type": "text", "text": EVIL}, *({"type": "image", "image": i} for i in (there, gone))]
    turn = dataclasses.replace(t.turns[0], observation=Observation(({"role": "user", "content": parts},)))
    shown = (PlacedImage(there, 2, 1), PlacedImage(gone, 3, 1))
    segment = dataclasses.replace(t.segments[0], images=shown)
    writer = EpisodeWriter(tmp_path / "run")
    writer.write(dataclasses.replace(t, turns=(turn, t.turns[1]), segments=(segment,)))
    writer.close()
    recording = Recording(tmp_path / "run")
    (recording.images / f"{gone.sha256}.png").unlink()
    detail = episode_detail(recording.record(recording.entry("0-0")), None, decode, None, recording.images)
    (tmp_path / "e.html").write_text(html_of(detail), encoding="utf-8")
    served = Served(tmp_path / "run")
    try:
        for url in ((tmp_path / "e.html").as_uri(), served.url + "#/episode?id=0-0"):
            open_page(browser, url)
            sizes = browser.execute_script(
                "return [...document.querySelectorAll('img.shown')].map(e => [e.naturalWidth, e.naturalHeight])"
            )
            assert sizes == [[64, 32], [64, 32]]  # in the prompt and in the observation
            assert text(browser).count(f"image {gone.sha256[:12]}…, not in this record") == 2
            assert EVIL.split("\x1b")[0] in text(browser)
            check_quiet(browser)
    finally:
        served.close()


def test_the_result_of_rescore_is_a_table(browser, run):
    made = {
        "groups": 6,
        "changed": 4,
        "pairs": 6,
        "swapped": 2,
        "reversed": 1,
        "flipped_groups": 1,
        "estimator": "grpo",
    }
    made |= {"episodes": 12, "failed": [], "text": "as text", "rewards": ["f1"]}
    made |= {"means": [["<b>f1", None, 0.5], ["score", 0.75, 0.25]], "flipped": [[2, "5-0", 0.7, -0.7]]}
    (run.path / "rescore.json").write_text(json.dumps(made))
    (run.path / "replay.jsonl").write_text(json.dumps({"episode_id": "1-0", "divergence": None}) + "\n")
    open_page(browser, run.url)
    assert text(browser, "#replayed") == "identical: 1"
    assert [r.text for r in find(browser, "#rescored tbody tr")] == ["<b>f1 – 0.500 –", "score 0.750 0.250 -0.500"]
    assert "pairs of one group that changed order 2 of 6" in text(browser)
    find(browser, "#flipped a")[0].click()
    wait(browser, lambda b: "episode 5-0" in text(b, "h1"))
    (run.path / "rescore.json").write_text(json.dumps({"text": "as text"}))  # as an older agentrl left it
    open_page(browser, run.url)
    assert "as text" in text(browser)
    check_quiet(browser)


def test_dark_mode(browser, run):
    def brightness():
        rgb = browser.execute_script("return getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")
        return sum(map(int, rgb)) / 3

    open_page(browser, run.url)
    light = brightness()
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert light > 200 > 60 > brightness()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_hundred_thousand_episodes(browser, tmp_path):
    """Run page and list appear within two seconds; scrolling to the end works, and few elements exist."""
    make_large_run(tmp_path / "run", 100_000)
    began, cpu = time.perf_counter(), time.process_time()
    served = Served(tmp_path / "run")
    print(f"opened in {time.perf_counter() - began:.2f} s, {time.process_time() - cpu:.2f} s of CPU time")
    try:
        for name, url in (("run", served.url), ("list", served.url + "#/episodes")):
            open_page(browser, url)
            mark = f"return performance.getEntriesByName('{name}-painted')[0]?.startTime"
            painted = wait(browser, lambda b, mark=mark: b.execute_script(mark))
            print(f"the {name} on the screen after {painted:.0f} ms")
            assert painted < 2000
        assert len(find(browser, ".list-row[data-id]")) > 20
        assert text(browser, "#count") == "100000 episodes"
        press(browser, Keys.END)
        wait(browser, lambda b: any(r.get_attribute("data-id") == "99999-0" for r in find(b, ".list-row[data-id]")))
        assert len(find(browser, ".list-row")) < 120
        find(browser, "[data-sort=score]")[0].click()
        wait(browser, lambda b: "score ↓" in text(b, "[data-sort=score]"))
        wait(browser, lambda b: find(b, ".list-row[data-id]"))
        check_quiet(browser)
    finally:
        served.close()


def test_a_summary_is_named_with_what_was_asked(browser, tmp_path):
    t = episode(0, 0, 1.0)
    first, last = t.turns
    request = SummaryRequest(instruction=f"Sum it up. {EVIL}", keep=1)
    summary = dataclasses.replace(first, index=1, summary=request, action=Action("the summary"))
    t = dataclasses.replace(t, turns=(first, summary, dataclasses.replace(last, index=2)))
    detail = episode_detail(json.loads(encode(to_record(t))), None, decode, None)
    (tmp_path / "e.html").write_text(html_of(detail), encoding="utf-8")
    open_page(browser, (tmp_path / "e.html").as_uri())
    shown = text(browser)
    assert shown.count("turn 1: a summary of the context") == 1
    assert "Sum it up." in shown
    check_quiet(browser)


def test_the_forest_shows_the_agent_and_the_reason_of_each_branch(browser, tmp_path):
    """Two branches of one turn, and a sub-agent that a third request continues."""

    def turn(index, segment, parent, reason=None):
        info = {"request": {"parent": parent}, **({"new_segment": reason} if reason else {})}
        return dataclasses.replace(
            episode(0, 0, 1.0).turns[0], index=index, segment=segment, context_length=5, info=info
        )

    t = episode(0, 0, 1.0)
    (whole,) = t.segments
    turns = [
        turn(0, 0, -1),
        turn(1, 1, 0, f"another request continued the same turn {EVIL}"),
        turn(2, 2, -1, "an agent with another system prompt began"),
        turn(3, 3, 2, "the template drops earlier thinking"),
    ]
    segments = (whole, whole, *[dataclasses.replace(whole, agent_id="agent-1")] * 2)
    t = dataclasses.replace(t, segments=segments, turns=tuple(turns))
    detail = episode_detail(json.loads(encode(to_record(t))), None, decode, None)
    (tmp_path / "e.html").write_text(html_of(detail), encoding="utf-8")
    open_page(browser, (tmp_path / "e.html").as_uri())
    find(browser, "[data-tab=tokens]")[0].click()
    trees = [item.text.split("\n") for item in find(browser, ".forest > ul > li")]
    assert [[line.split(",")[0] for line in tree if line.startswith("segment")] for tree in trees] == [
        ["segment 0 policy", "segment 1 policy"],
        ["segment 2 agent-1", "segment 3 agent-1"],
    ]
    shown = text(browser, ".forest")
    assert "turn 1 continues turn 0; another request continued the same turn" in shown
    assert "turn 2 an agent with another system prompt began" in shown
    find(browser, ".forest button")[-1].click()
    check_quiet(browser)
