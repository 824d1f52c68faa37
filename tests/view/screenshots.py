"""The screenshots in docs/: `python tests/view/screenshots.py [RUN]`. Without a run, search_r1 is trained for 12 rollouts and replayed first."""

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

import PIL.Image
from chromium import Served, find, open_page, press, start_browser, text, wait

from agentrl.cli.view_command import decoder
from agentrl.store import Recording

DOCS = Path(__file__).parents[2] / "docs"
TRAIN = ["--env", "search_r1", "--num-rollout", "12", "--rollout-batch-size", "8", "--num-steps-per-rollout", "2"]
TRAIN += ["--eval-interval", "4", "--eval-limit", "32"]


def make_run(folder):
    """A short training run, replayed."""
    run = folder / "search_r1"
    agentrl = [sys.executable, "-m", "agentrl.cli"]
    subprocess.run([*agentrl, "train", *TRAIN, "--run", run], check=True)
    subprocess.run([*agentrl, "replay", run], check=True)
    return run


def chosen(run):
    """An episode of three turns that was trained on with a negative advantage, and another of its group with a positive one."""
    recording = Recording(run)
    advantages = recording.advantages
    episodes = [e for e in recording.episodes if e.split == "train" and e.id in advantages]
    groups = {}
    for e in episodes:
        groups.setdefault((e.step, e.group), []).append(e)
    pairs = (
        (a, b)
        for group in reversed(list(groups.values()))
        for a in group
        for b in group
        if advantages[a.id] < 0 < advantages[b.id] and a.turns == 3
    )
    a, b = next(pairs)
    return a.id, b.id


def take(browser, url, run):
    a, b = chosen(run)

    def shoot(name):
        wait(browser, lambda b: "episodes" in text(b, "#live"))
        picture = PIL.Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        picture.save(DOCS / f"view-{name}.png", optimize=True)
        print(DOCS / f"view-{name}.png")

    open_page(browser, url)
    shoot("run")
    open_page(browser, f"{url}#/episodes?sort=advantage&desc=1")
    wait(browser, lambda b: len(find(b, ".list-row[data-id]")) > 10)
    shoot("episodes")
    open_page(browser, f"{url}#/episode?id={a}")
    press(browser, "t", "3")
    shoot("tokens")
    press(browser, "r")
    shoot("trained")
    open_page(browser, f"{url}#/compare?a={a}&b={b}")
    press(browser, "5")
    shoot("compare")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    given = parser.parse_args().run
    with tempfile.TemporaryDirectory() as folder:
        run = given or make_run(Path(folder))
        decode, _ = decoder(run, None)
        served, browser = Served(run, decode), start_browser("1280,900")
        try:
            take(browser, served.url, run)
        finally:
            browser.quit()
            served.close()


if __name__ == "__main__":
    main()
