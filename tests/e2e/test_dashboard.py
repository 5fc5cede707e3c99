"""The dashboard in a real browser: with one worker, under load, while a worker is killed, and with none.

What the browser complains about (errors of the page, of the console, of the content policy) fails the test. Pictures
of the page are left in `tests/screenshots`. Skipped where there is no Chromium.
"""

from __future__ import annotations

import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.e2e.harness import TestedCell
from tokenferry.cell.one_process import open_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
SCREENSHOTS = Path(__file__).parent.parent / "screenshots"
WAIT_S = 15
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None,
        reason="no Chromium here: apt-get install chromium chromium-driver",
    ),
]


class Page:
    """The dashboard of one server, as somebody sees it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, origin: str) -> None:
        self.driver.get(f"{origin}/")

    def device(self, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """What is shown of the first such element, in one call: the page may change at any time."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def number(self, selector: str) -> int:
        digits = "".join(one for one in self.text(selector).split("\n")[0] if one.isdigit())
        return int(digits or -1)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, selector: str) -> None:
        """As a click does, on an element that may be replaced at any time."""
        assert self.run("const it = document.querySelector(arguments[0]); it?.click(); return !!it", selector)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        try:
            WebDriverWait(self.driver, WAIT_S, 0.05).until(lambda _: condition())
        except TimeoutException:
            self.picture("failure")
            raise AssertionError(f"not within {WAIT_S} s: {what}; {self.complaints()}") from None

    def wait_text(self, selector: str, part: str) -> None:
        self.wait(lambda: part in self.text(selector), f"{selector} says {part!r}")

    def ask(self, text: str, max_tokens: int) -> None:
        self.run("document.getElementById('chat-max').value = arguments[0]", max_tokens)
        self.find("#chat-text").send_keys(text)
        self.find("#chat-text").send_keys(Keys.ENTER)

    def picture(self, name: str) -> None:
        SCREENSHOTS.mkdir(exist_ok=True)
        self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield running
    running.quit()


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    """Fails the test in which the browser had something to complain about that the test did not take out itself."""
    page = Page(driver)
    page.device(1440, 1000)
    page.complaints()
    yield page
    complaints = page.complaints()
    driver.get("about:blank")
    assert complaints == []


@pytest.fixture(scope="module")
def cell(short_folder: Path) -> Iterator[TestedCell]:
    """One worker with four slots, a token every 20 ms."""
    with TestedCell(short_folder, environ={"SCRIPTED_STEP_MS": "20", "MAX_NUM_SEQS": "4"}) as running:
        yield running


@pytest.fixture
def origin(cell: TestedCell) -> str:
    return cell.base_url.removesuffix("/v1")


LONG = 5_000
"""Tokens of an answer that is not over before its test is: 100 s."""


@contextmanager
def load(cell: TestedCell, num_requests: int) -> Iterator[None]:
    """So many answers at once; they are cancelled at the end of the block."""
    with ExitStack() as stack:
        for number in range(num_requests):
            stack.enter_context(cell.open_stream(f"question {number}", LONG))
        yield


def test_one_worker_is_shown_idle_with_its_slots_and_blocks(page: Page, cell: TestedCell, origin: str) -> None:
    page.open(origin)
    page.wait_text("#status", "Live")
    assert page.text("#num-workers") == "1 live"
    [worker] = cell.workers()
    assert page.text(".worker h3") == worker.worker
    assert "0 of 4" in page.text(".worker")
    assert page.text(".worker .pill") == "idle"
    assert len(page.all(".worker .blocks path")) == 2
    assert page.text("#no-requests") == "Nothing is waiting or running."
    assert "nobody waits" in page.text("#queues")
    page.picture("one-worker")


def test_the_playground_streams_an_answer_and_says_what_it_cost(page: Page, origin: str) -> None:
    page.open(origin)
    page.wait_text("#chat-model", "scripted")
    page.ask(HOSTILE, 30)
    page.wait_text(".turn.assistant .cost", "length")
    cost = page.text(".turn.assistant .cost")
    assert "30 tokens" in cost
    assert "first token" in cost
    assert "tokens/s" in cost
    assert "cached" in cost
    assert page.text(".turn.user .text") == HOSTILE
    assert page.driver.title == "tokenferry"
    assert page.run("return document.activeElement.id") == "chat-text"

    page.press("#chat-tokens")
    page.ask("the same again", 5)
    page.wait(lambda: len(page.all(".turn.assistant:last-child .token")) == 5, "every token is shown by itself")
    page.wait_text(".turn.assistant:last-child .cost", "length")
    titles = [one.get_attribute("title") or "" for one in page.all(".turn.assistant:last-child .token")]
    assert all("%" in title for title in titles)
    ids = [title.split(",")[0].removeprefix("id ") for title in titles]
    # The scripted model's token N reads <N>.
    assert page.text(".turn.assistant:last-child .text") == "".join(f"<{token_id}>" for token_id in ids)

    page.run("document.querySelector('.turn.assistant:last-child .ids summary').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait_text(".turn.assistant:last-child .ids", "Prompt")
    rows = [row.text.split() for row in page.all(".turn.assistant:last-child .ids tbody tr")]
    assert [row[:3] for row in rows] == [[str(n + 1), one, f'"<{one}>"'] for n, one in enumerate(ids)]
    prompt = page.text(".turn.assistant:last-child .ids p .mono").split()
    # ... and its prompts are bytes.
    assert bytes(map(int, prompt)).decode().endswith("user: the same again\nassistant:")
    page.picture("token-ids")

    page.press("#chat-tokens")
    page.ask("a long one", 2000)
    page.wait(lambda: len(page.text(".turn.assistant:last-child .text")) > 20, "the answer streams")
    page.press("#chat-stop")
    page.wait_text(".turn.assistant:last-child .cost", "stopped")
    page.wait_text("#ended-requests", "cancelled: stopped")
    page.picture("playground")


def test_under_load_running_and_waiting_requests_move(page: Page, cell: TestedCell, origin: str) -> None:
    page.open(origin)
    page.wait_text("#status", "Live")
    with load(cell, 7):
        page.wait(lambda: page.number("#figure-running") == 4, "four are running")
        page.wait(lambda: page.number("#figure-waiting") == 3, "three are waiting")
        page.wait_text("#queues", "the oldest for")
        page.wait(
            lambda: page.run("return document.querySelector('#live-requests progress')?.value") > 20, "progress"
        )
        page.wait(lambda: page.number("#figure-rate") > 20, "the token rate")
        assert page.text(".worker .pill") == "busy"
        assert "4 of 4" in page.text(".worker")
        page.picture("load-light")
        page.device(1440, 1000, dark=True)
        page.picture("load-dark")
        page.device(390, 844, mobile=True)
        page.picture("load-phone")
        width = page.run("return document.documentElement.scrollWidth")
        assert width <= 390, "a phone does not scroll sideways"
    page.wait(lambda: page.number("#figure-running") == 0, "all are over")


def test_a_killed_worker_shows_as_a_move_and_the_timeline_tells_it(page: Page, cell: TestedCell, origin: str) -> None:
    page.open(origin)
    page.wait_text("#status", "Live")
    page.ask("and you?", LONG)
    page.wait_text("#live-requests", "answering")
    request_id = str(page.run("return document.querySelector('#live-requests button').title"))
    cell.kill_engine_of(request_id)
    page.run("document.querySelector('#live-requests button').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait_text("#timeline-list", "was lost at token")
    assert page.text("#timeline-id") == request_id
    page.wait(lambda: page.text("#timeline-list").count("Claimed by") == 2, "another worker goes on")
    assert len(page.all("#timeline-bar .phase")) >= 4
    page.picture("timeline")
    page.find("body").send_keys(Keys.ESCAPE)
    page.wait(lambda: not page.find("#timeline").is_displayed(), "Escape closes the timeline")
    page.wait_text("#lately", "lost its worker")
    page.wait_text("#live-requests", "2nd attempt")
    num_shown = len(page.text(".turn.assistant .text"))
    page.wait(lambda: len(page.text(".turn.assistant .text")) > num_shown, "the answer goes on")
    page.picture("killed")
    page.press("#chat-stop")
    page.wait_text(".turn.assistant .cost", "stopped")


def test_the_page_comes_back_by_itself_when_the_web_process_does(page: Page, cell: TestedCell, origin: str) -> None:
    page.open(origin)
    page.wait_text("#status", "Live")
    pid = cell.wait_pid_at_work("web")
    os.kill(pid, signal.SIGKILL)
    page.wait_text("#status", "trying again")
    cell.wait_pid_at_work("web", other_than=pid)
    page.wait_text("#status", "Live")
    assert all("net::ERR" in complaint for complaint in page.complaints())


def test_everything_has_a_name_and_can_be_reached_by_keyboard(page: Page, origin: str) -> None:
    page.open(origin)
    page.wait_text("#status", "Live")
    nameless = """
        return [...document.querySelectorAll("button, input, select, textarea, svg[role=img], progress, a")]
          .filter((one) => one.offsetParent !== null || one instanceof SVGElement)
          .filter((one) => !one.closest("[hidden], dialog"))
          .filter((one) => !(one.textContent.trim() && one.matches("button, a")) && !one.getAttribute("aria-label")
            && !(one.labels && one.labels.length))
          .map((one) => one.outerHTML.slice(0, 80))
    """
    assert page.run(nameless) == []
    for landmark in ("header", "main", "nav[aria-label]", "[role=status][aria-live=polite]", "h1"):
        assert len(page.all(landmark)) >= 1, landmark
    reached = []
    for _ in range(40):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("const it = document.activeElement; return it.id || it.className || it.textContent"))
        outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"{reached[-1]}: the focus is seen"
        if reached[-1] == "chat-send":
            break
    assert reached[0] == "skip"
    assert reached[-1] == "chat-send"


def test_without_a_worker_the_page_says_what_to_do(page: Page, cell: TestedCell, origin: str) -> None:
    page.open(origin)
    page.wait_text("#status", "Live")
    cell.end("worker.1")
    page.wait_text("#status", "without a worker")
    page.wait_text("#no-workers", "tokenferry worker")
    page.wait_text("#lately", "left")
    page.wait_text("#news", "gone")
    page.ask("anybody there?", 5)
    page.wait_text(".turn.assistant", "No worker is serving the model")
    page.picture("no-worker")
    [complaint] = page.complaints()
    assert "503" in complaint


def test_with_api_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(page: Page, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    with open_server(model="scripted", api_keys_file=keys, preflight_force=1) as server:
        page.open(server.origin)
        page.wait_text("#status", "A key is needed")
        assert page.find("#key-form").is_displayed()
        page.picture("key")
        page.find("#key").send_keys("sk-wrong", Keys.ENTER)
        page.wait_text("#key-note", "not valid")
        page.find("#key").send_keys("sk-right", Keys.ENTER)
        page.wait_text("#status", "Live")
        page.wait(lambda: not page.find("#key-form").is_displayed(), "the form is gone")
        page.ask("hello", 5)
        page.wait_text(".turn.assistant .cost", "length")
        complaints = page.complaints()
        assert complaints
        assert all("401" in complaint for complaint in complaints)
        page.driver.refresh()
        page.wait_text("#status", "Live")
        assert page.run("return localStorage.length + document.cookie.length") == 0
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{server.origin}/dashboard/events")
        page.driver.get("about:blank")
