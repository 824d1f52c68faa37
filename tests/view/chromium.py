"""A headless Chromium and a server over a run, for the page's tests and for the screenshots in docs/.

Needs Debian's chromium and chromium-driver and the package selenium.
"""

import asyncio
import shutil
import threading

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from agentrl.view.page_server import start
from agentrl.view.run_source import RunSource

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def start_browser(size="1400,1000"):
    """A browser that resolves no host names and logs all requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--window-size={size}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


class Served:
    """A run behind a server in a separate thread. `decode`: of its tokens; or what is served instead of one run."""

    def __init__(self, path, decode):
        self.path = path
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        source = RunSource(path, decode) if callable(decode) else decode
        self.runner, port = self._do(start(source, 0))
        self.url = f"http://127.0.0.1:{port}/"

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self):
        self._do(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def wait(browser, what, seconds=15):
    return WebDriverWait(browser, seconds, 0.05).until(what)


def find(browser, css):
    return browser.find_elements(By.CSS_SELECTOR, css)


def text(browser, css="main"):
    return browser.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", css)


def open_page(browser, url):
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(url)
    if "#" in url or url.startswith("http"):
        wait(browser, lambda b: b.execute_script("return document.getElementById('main')?.dataset.ready"))


def press(browser, *keys):
    for key in keys:
        browser.switch_to.active_element.send_keys(key)
