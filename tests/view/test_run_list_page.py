"""The list of runs in a headless Chromium, on a screen and on a phone."""

import pytest

pytest.importorskip("selenium.webdriver", reason="needs the package selenium")
import chromium
from chromium import Served, find, open_page, start_browser, text, wait
from test_run_list import folder, runs_in

__all__ = ["folder"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (chromium.CHROMIUM and chromium.DRIVER), reason="needs chromium and chromedriver"),
]


@pytest.mark.parametrize("width", [390, 1440])
def test_a_click_opens_a_run_and_hostile_names_stay_text(folder, width):
    served, browser = Served(folder, runs_in(folder)), start_browser(f"{width},900")
    try:
        open_page(browser, served.url)
        assert len(find(browser, "#runs tbody tr")) == 2
        assert "0.500 → 0.750" in text(browser)
        assert "<b>two & é" in text(browser)
        assert browser.execute_script("return window.hacked === undefined")
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        next(a for a in find(browser, "#runs a") if a.text == "one").click()
        wait(browser, lambda b: b.execute_script("return document.getElementById('main')?.dataset.ready === '#/'"))
        assert next(a.text for a in find(browser, "nav a")) == "All runs"
        browser.execute_script("location.hash = '#/episodes'")
        wait(browser, lambda b: "Paris" in text(b, ".list-row"))
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    finally:
        browser.quit()
        served.close()
