"""The token view in headless Chromium, opened from a file: what it shows, how it is used, that it asks for nothing.

Chromium speaks its DevTools protocol over two pipes, so the test needs a browser and no package. On Debian and Ubuntu:
``apt-get install chromium``.
"""

import base64
import dataclasses
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from nagnet.diagnostics.token_page import render_token_views, write_token_view
from nagnet.diagnostics.token_view import TokenView

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

SECONDS = 60  # to wait for an answer, on a machine busy with something else
CONTENTS = [b"The", b" \xf0\x9f", b"\x99\x82", b"</script><b>", b"\n", b" end", b" of", b" it"]
N_UPDATES = 6


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, profile: Path):
        read, self._requests = os.pipe()
        self._answers, write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]  # neither is 3 or 4 already
        # No sandbox: there is none for root, and the pages are ours. Chromium reads from 3 and writes to 4.
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        arguments += [f"--user-data-dir={profile}", "--force-color-profile=srgb", "--disable-background-networking"]
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec "${@:3}" 3<&$1 4>&$2', "-", *map(str, ends), str(CHROMIUM), *arguments],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read, write, *ends):
            os.close(end)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.events: list[dict] = []
        self._session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters) -> dict:
        """Sends a command and waits for its result."""
        message = {"id": next(self._numbers), "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != message["id"]:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next(self) -> dict:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer from {CHROMIUM} in {SECONDS} s")
            received = os.read(self._answers, 1 << 20)
            assert received, f"{CHROMIUM} ended with {self._process.wait()}"
            self._buffer += received
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path, width: int = 1000, height: int = 900) -> None:
        """Shows a file, in a window of so many pixels."""
        self.events.clear()
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        self("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def js(self, expression: str):
        """The value of an expression in the page."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, selector: str) -> None:
        """Moves the pointer to the middle of an element's first line."""
        x, y = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({one(selector)}.getClientRects()[0])")
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Clicks an element."""
        self.point(selector)
        x, y = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({one(selector)}.getClientRects()[0])")
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Presses a key."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def text(self, selector: str) -> str:
        """What an element shows."""
        return self.js(f"{one(selector)}.innerText")

    def rgb(self, selector: str, name: str) -> list[int]:
        """The computed colour of an element, red, green and blue from 0 to 255, whatever CSS calls it."""
        return self.js(
            f"(() => {{ const c = document.createElement('canvas').getContext('2d', {{willReadFrequently: true}});"
            f"c.fillStyle = getComputedStyle({one(selector)})['{name}']; c.fillRect(0, 0, 1, 1);"
            "return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); })()"
        )

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        return base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        self.js("1")
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[dict]:
        """Exceptions and messages of the console since the page was opened."""
        self.js("1")
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in methods]

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._requests)  # it ends when nobody can speak to it
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)


def one(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"


def token(number: int, model: int = 1) -> str:
    """Selects a token by its place from 1, in a model from 1."""
    return f".model:nth-of-type({model}) .text span:nth-child({number})"


def field(name: str, model: int = 1) -> str:
    """Selects what the panel of a model says of its token."""
    return f".model:nth-of-type({model}) dd.{name}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def view() -> TokenView:
    n = len(CONTENTS)
    ran = np.ones((n, N_UPDATES), dtype=bool)
    ran[3, [1, 4]] = False
    return TokenView(
        contents=tuple(CONTENTS),
        pieces=("The", " 🙂", "", "</script><b>", "\n", " end", " of", " it"),
        loss=np.linspace(0.1, 8.0, n),
        probability=np.exp(-np.linspace(0.1, 8.0, n)),
        rank=np.arange(1, n + 1),
        entropy=np.linspace(5.0, 0.0, n),
        max_probability=np.full(n, 0.25),
        likeliest=(b"<i>x", b"\xe4", b"", b"\x07", *CONTENTS[:4]),
        confidence=np.exp(np.linspace(0.0, 1.0, n)),
        log_norm=np.linspace(0.0, np.linspace(0.0, 1.0, n), N_UPDATES + 1).T,
        ran=ran,
        window_starts=(0, 5),
        vocab_size=2048,
        skip_threshold=0.25,
        scale_in_logits=True,
    )


@pytest.fixture
def pair(browser, view, tmp_path):
    """The page of a model that skips beside its twin, which has other tokens."""
    parts = {name.name: getattr(view, name.name) for name in dataclasses.fields(view)}
    first = {name: value[1:] for name, value in parts.items() if isinstance(value, tuple | np.ndarray)}
    first |= {"contents": (b"The \xf0\x9f", *CONTENTS[2:]), "pieces": ("The 🙂", *view.pieces[2:])}
    twin = dataclasses.replace(view, **(first | {"skip_threshold": None, "scale_in_logits": False}))
    twin = dataclasses.replace(twin, window_starts=(0,))
    write_token_view(tmp_path / "view.html", "A <pair>", {"norm_agnostic": view, "pre_norm": twin})
    browser.open(tmp_path / "view.html")
    return browser


def test_it_opens_from_a_file_and_asks_for_nothing(pair):
    assert [url.split("/")[-1] for url in pair.requests()] == ["view.html"]
    assert pair.complaints() == []
    assert pair.text("h1") == "A <pair>"
    assert pair.js("document.querySelectorAll('b, i').length") == 0  # no part of the text became markup
    shown = pair.js("[...document.querySelector('.text').children].map(token => token.textContent)")
    assert shown == ["The", " 🙂", "·", "</script><b>", "↵\n", " end", " of", " it"]


def test_pointing_at_a_token_shows_it(pair):
    pair.point(token(4))
    assert pair.text(field("token")) == "</script><b> 4 of 8"
    assert pair.text(field("probability")) == "0.0306"
    assert pair.text(field("rank")) == "4 of 2,048"
    assert pair.text(field("loss")) == "3.49 nats"
    assert pair.text(field("entropy")) == "2.86 nats"
    assert pair.text(field("likeliest")) == "␇ probability 0.250"
    assert pair.text(field("confidence")) == "exp(s_N) = 1.54"
    assert pair.text(field("ran")) == "4 of 6 ran; others scored ≤ 0.250"
    cells = pair.js(
        "[...document.querySelectorAll('.model:nth-of-type(1) .cell')].map(c => c.classList.contains('run'))"
    )
    assert cells == [True, True, False, False, True, True]  # attention of the three blocks, then their MLPs
    pair.point(token(2))
    assert pair.text(field("token")) == " 🙂 2 of 8, split: bytes 20 F0 9F"
    assert pair.text(field("likeliest")) == "\\xe4 probability 0.250"
    pair.point(token(3))
    assert pair.text(field("likeliest")) == "⟨bos⟩ probability 0.250"


def test_the_chart_is_s_by_depth(pair):
    pair.point(token(8))
    label = pair.js(f"{one('svg')}.getAttribute('aria-label')")
    assert label == "s by depth: 0.00 before the first update, 1.00 after the last"
    paths = [pair.js(f"{one(f'svg path.{name}')}.getAttribute('d')") for name in ("attention", "mlp")]
    points = [[tuple(map(float, p)) for p in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths]
    assert [len(part) for part in points] == [6, 6]  # both ends of three writes each
    along = sorted(set(points[0] + points[1]))
    assert len(along) == N_UPDATES + 1  # one line without a gap
    steps = np.diff(np.array(along), axis=0)
    np.testing.assert_allclose(steps, [steps.mean(axis=0)] * N_UPDATES, atol=0.11)
    assert steps[0, 0] > 0 > steps[0, 1]  # s grows upwards


def test_the_other_model_shows_the_token_with_the_same_byte(pair):
    pair.point(token(2))
    assert pair.text(field("token", 2)).startswith("The 🙂 1 of 7")
    assert pair.text(field("ran", 2)) == "all 6 ran; it skips none"
    assert pair.js("document.querySelectorAll('.model:nth-of-type(2) .cell').length") == 0
    pair.point(token(7, model=2))
    assert pair.text(field("token", 1)) == " it 8 of 8"
    assert "does not reach" in pair.text(".model:nth-of-type(2) .note")
    assert pair.text(field("confidence", 2)) == "exp(s_N) = 2.72 (control)"


def test_keys_move_from_token_to_token(pair):
    pair.press("Tab")
    pair.press("Tab")
    pair.press("Tab")  # past the two switches
    place = "[...document.activeElement.parentElement.children].indexOf(document.activeElement) + 1"
    assert pair.js(place) == 1
    for key, expected in [("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 8), ("ArrowRight", 8)]:
        pair.press(key)
        assert (key, pair.js(place)) == (key, expected)
        assert f" {expected} of 8" in pair.text(field("token"))
    pair.press("ArrowUp")
    assert pair.js(place) <= 5  # on the line before the line end
    pair.press("ArrowDown")
    assert pair.js(place) >= 6
    pair.press("Home")
    assert pair.js(place) == 1
    assert pair.js("document.querySelectorAll('.model:nth-of-type(1) [tabindex=\"0\"]').length") == 1
    assert pair.js("document.querySelectorAll('.model:nth-of-type(1) [aria-selected=true]').length") == 1
    assert pair.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    label = pair.js("document.activeElement.getAttribute('aria-label')")
    assert label == "token 1: The, probability 0.905, loss 0.100 nats, confidence 1.00"


def test_a_click_puts_the_keys_where_it_is(pair):
    pair.click(token(3))
    pair.press("ArrowRight")
    assert pair.text(field("token")).startswith("</script><b> 4")


def test_text_that_scrolls_below_a_resting_pointer_chooses_nothing(browser, view, tmp_path):
    """Two models with the same long text: keys scroll both, and the chosen token stays in sight in both."""
    repeated = {name.name: getattr(view, name.name) for name in dataclasses.fields(view)}
    repeated = {name: value for name, value in repeated.items() if isinstance(value, tuple | np.ndarray)}
    repeated = {
        name: value * 40 if isinstance(value, tuple) else np.concatenate([value] * 40)
        for name, value in repeated.items()
    }
    long = dataclasses.replace(view, **(repeated | {"window_starts": (0,)}))
    write_token_view(tmp_path / "view.html", "Long", {"norm_agnostic": long, "pre_norm": long})
    browser.open(tmp_path / "view.html")
    browser.click(token(3))
    browser.press("End")
    browser.js("new Promise(done => setTimeout(done, 300))")
    for model in (1, 2):
        assert " 320 of 320" in browser.text(field("token", model))
        text = f".model:nth-of-type({model}) .text"
        assert browser.js(f"{one(text)}.scrollTop") > 300
        last = browser.js(f"{one(token(320, model))}.getBoundingClientRect().bottom")
        assert last <= browser.js(f"{one(text)}.getBoundingClientRect().bottom") + 1
    browser.press("Home")
    assert [browser.js(f"{one(f'.model:nth-of-type({model}) .text')}.scrollTop") for model in (1, 2)] == [0, 0]


def contrast(first, second) -> float:
    """Contrast of two colours after WCAG, 1 to 21."""
    parts = np.array([first, second]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_follow_the_switches_and_stay_legible(pair, theme):
    pair.click(f"input[value={theme}]")
    assert (sum(pair.rgb("body", "backgroundColor")) < 384) == (theme == "dark")
    deep = {}
    for mode, deepest in [("loss", 8), ("entropy", 1), ("confidence", 8)]:
        pair.click(f"input[value={mode}]")
        colors = [pair.rgb(token(number), "backgroundColor") for number in range(1, 9)]
        ink = pair.rgb(token(1), "color")
        assert min(contrast(color, ink) for color in colors) > 4.5
        page = pair.rgb(".nagnet-tokens", "backgroundColor")
        away = [float(np.abs(np.array(color) - page).sum()) for color in colors]
        assert int(np.argmax(away)) + 1 == deepest and max(away) > 100
        order = away if deepest == 8 else away[::-1]
        assert order == sorted(order) and order[0] < 10  # from the page's own colour, ever deeper
        assert len(set(order)) >= 7
        deep[mode] = tuple(colors[deepest - 1])
        assert {"confidence": "exp(s_N)"}.get(mode, mode) in pair.text(".unit")
    assert len(set(deep.values())) == 3  # a hue for each
    assert pair.text(".scale .high") == "≥ 2.67"


def test_the_theme_is_the_systems_until_it_is_switched(pair):
    light = pair.rgb(token(8), "backgroundColor")
    pair("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert sum(pair.rgb("body", "backgroundColor")) < 384 and pair.rgb(token(8), "backgroundColor") != light
    pair.click("input[value=light]")
    assert pair.rgb(token(8), "backgroundColor") == light


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_nothing_overlaps_or_is_cut_off(browser, view, tmp_path, width):
    deep = dataclasses.replace(
        view,
        log_norm=np.linspace(-2.5, np.linspace(0.0, 12.0, len(CONTENTS)), 129).T,
        ran=np.ones((len(CONTENTS), 128), dtype=bool),
    )
    write_token_view(tmp_path / "view.html", "Depth", {"norm_agnostic": view, "deep": deep})
    browser.open(tmp_path / "view.html", width)
    browser.point(token(4))
    assert browser.js("document.documentElement.scrollWidth") <= width
    edges = "(e => (r => [r.x, r.y, r.right, r.bottom])(e.getBoundingClientRect()))"
    charts = "[...document.querySelectorAll('svg')]"
    frames = browser.js(f"{charts}.map({edges})")
    drawn = browser.js(f"{charts}.map(svg => [...svg.querySelectorAll('text, path[d$=h22]')].map({edges}))")
    assert [len(labels) > 13 for labels in drawn] == [True, True]
    for labels, (left, top, right, bottom) in zip(drawn, frames, strict=True):
        for x, y, x2, y2 in labels:
            assert x >= left and y >= top and x2 <= right and y2 <= bottom
        for (ax, ay, ax2, ay2), (bx, by, bx2, by2) in itertools.combinations(labels, 2):
            assert ax2 <= bx + 1 or bx2 <= ax + 1 or ay2 <= by + 4 or by2 <= ay + 4  # boxes are higher than letters


def test_two_fragments_in_one_page_have_their_own_switches(browser, view, tmp_path):
    fragment = render_token_views({"norm_agnostic": view})
    (tmp_path / "report.html").write_text(f"<!doctype html><meta charset=utf-8><body>{fragment}<hr>{fragment}")
    browser.open(tmp_path / "report.html")
    browser.click("section:nth-of-type(2) input[value=loss]")
    browser.click("section:nth-of-type(2) input[value=dark]")
    modes = browser.js("[...document.querySelectorAll('section')].map(s => [s.dataset.mode, s.dataset.theme])")
    assert modes == [["confidence", ""], ["loss", "dark"]]
    assert browser.complaints() == []
