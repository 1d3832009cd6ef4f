"""The page in a browser, over the real server: what people do, and texts that try to be code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bitnet_ops.server.security import Access
from served import app_of, scripted_lm, serving

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None and os.environ.get("CI") != "true":
    pytest.skip("needs a browser (apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api") if os.environ.get("CI") != "true" else None
if sync_api is None:
    from playwright import sync_api  # type: ignore[no-redef]

pytestmark = pytest.mark.slow
WORDS = " ".join(f"word{i}" for i in range(300))
RICH = """# Title

A *soft* and **strong** `code` [link](https://example.org/a?b=c).

- one
  - two

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>hi</b>")
```
"""
INJECTIONS = """<script>window.pwned = 1</script>
<img src=x onerror="window.pwned = 1">
<svg onload="window.pwned = 1"></svg>
<iframe srcdoc="<script>parent.pwned = 1</script>"></iframe>
<a href="javascript:window.pwned = 1">x</a>
[a](javascript:window.pwned=1) [b](JaVaScRiPt:window.pwned=1) [c](java\tscript:window.pwned=1)
[d](data:text/html,<script>window.pwned=1</script>) [e](vbscript:x) [f](file:///etc/passwd)
[g]( javascript:window.pwned=1 ) [h](&#106;avascript:window.pwned=1) [i](//evil.example)
[j](https://evil.example/"onmouseover="window.pwned=1) [k](<javascript:window.pwned=1>)
![img](x" onerror="window.pwned=1) ![img](javascript:window.pwned=1)
<style>body { display: none }</style><link rel=stylesheet href=//evil.example>
<div style="position:fixed;inset:0">cover</div><base href="//evil.example/">
<form action="//evil.example"><input name=q></form><object data=x></object><embed src=x>
&lt;script&gt;window.pwned=1&lt;/script&gt; &#60;script&#62;window.pwned=1&#60;/script&#62;
</script><script>window.pwned=1</script> `</code><script>window.pwned=1</script>`
| <script>window.pwned=1</script> | [x](javascript:window.pwned=1) |
|---|---|
| <img src=x onerror=window.pwned=1> | ok |
> <script>window.pwned=1</script>
1. <details open ontoggle=window.pwned=1>
# <h1 onclick=window.pwned=1>
<math><mtext><script>window.pwned=1</script></mtext></math> <template><script></script></template>
\u202egnp.exe \u2066hidden\u2069 {{constructor.constructor('window.pwned=1')()}} ${window.pwned=1}
```html" onclick="window.pwned=1
</code></pre><script>window.pwned=1</script>
```"""
ALLOWED = set(
    """a article b blockquote br button code dd del details div dl dt em footer h1 h2 h3 h4 h5 h6 hr
    i kbd li ol p pre s section small span strong summary svg table tbody td th thead tr ul
    use""".split()
)
ANSWERS = {
    "count": WORDS,
    "rich": RICH,
    "inject": INJECTIONS,
    "think": "<think>\nLet me see.\n</think>\n\nIt is noon.",
    "hello": "Good morning.",
    "again": "As you wish.",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lm() -> Any:
    return scripted_lm(ANSWERS, seconds=0.004)


@pytest.fixture(scope="module")
def address(lm: Any) -> Iterator[str]:
    with serving(app_of({"scripted": lm})) as found:
        yield found


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield opened(context, address)
    context.close()


def opened(context: Any, address: str) -> Any:
    """The page, whose errors fail the test at its end."""
    context.set_default_timeout(30_000)  # a busy machine is no defect
    page = context.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(address)
    page.wait_for_function("() => !document.querySelector('#model').disabled")
    return page


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_answer(page: Any, count: int = 1) -> str:
    """The newest of so many answers, once it is whole."""
    try:
        page.wait_for_function(
            "n => { const all = document.querySelectorAll('article.answer');"
            " return all.length == n && all[n - 1].ariaBusy == 'false' }",
            arg=count,
        )
    except sync_api.TimeoutError as error:
        shown = page.locator("#messages").inner_html()
        raise AssertionError(f"no answer {count}: {shown}; errors: {page.problems}") from error
    return page.locator("article.answer .markdown").last.inner_text()


def test_a_conversation(page: Any) -> None:
    say(page, "hello")
    assert wait_for_answer(page) == "Good morning."
    assert "tokens" in page.locator(".stats").inner_text()
    say(page, "again")
    assert wait_for_answer(page, 2) == "As you wish."
    title = page.title()
    page.reload()
    page.wait_for_selector("article.answer >> nth=1")
    assert page.title() == title and "hello" in title
    texts = page.locator("article .bubble, article .markdown").all_inner_texts()
    assert texts == ["hello", "Good morning.", "again", "As you wish."]
    assert page.problems == []


def test_stop_regenerate_edit_and_branches(page: Any, lm: Any) -> None:
    say(page, "count")
    page.wait_for_function("() => document.querySelector('.markdown')?.innerText.length > 40")
    page.press("#prompt", "Escape")
    text = wait_for_answer(page)
    assert 40 < len(text) < len(WORDS)
    assert "Stopped." in page.locator("article.answer").inner_text()
    page.click('[data-action="again"]')
    page.wait_for_function("() => document.querySelector('.versions span')?.innerText == '2/2'")
    assert wait_for_answer(page) == WORDS
    page.click('[data-action="previous"]')
    assert page.locator(".versions span").inner_text() == "1/2"
    assert page.locator("article.answer .markdown").inner_text() == text
    page.click('article.question [data-action="edit"]', force=True)
    page.fill(".editor textarea", "hello")
    page.press(".editor textarea", "Enter")
    page.wait_for_function(
        "() => document.querySelector('article.question .versions span')?.innerText == '2/2'"
    )
    assert wait_for_answer(page) == "Good morning."
    page.click('article.question [data-action="previous"]', force=True)
    assert page.locator("article.question .bubble").inner_text() == "count"
    assert lm.engine.stats().running == 0 and page.problems == []


def test_rename_search_delete_and_undo(page: Any) -> None:
    for text in ("hello", "again"):
        say(page, text)
        wait_for_answer(page)
        page.click("#new")
    links = page.locator("#conversations a")
    assert links.count() == 2
    page.press("body", "Control+k")
    page.keyboard.type("morning")
    page.wait_for_function("() => document.querySelectorAll('#conversations a').length == 1")
    assert page.locator("#conversations mark").inner_text() == "morning"
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('article .bubble')?.innerText == 'hello'")
    page.fill("#search", "")
    page.click("#more")
    page.click("#rename")
    page.keyboard.press("Control+a")
    page.keyboard.type("A better name")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#title').innerText == 'A better name'")
    page.click("#more")
    page.click("#delete")
    page.wait_for_function("() => document.querySelectorAll('#conversations a').length == 1")
    page.click("#toasts button:has-text('Undo')")
    page.wait_for_function("() => document.querySelectorAll('#conversations a').length == 2")
    assert page.problems == []


def test_export_and_import(page: Any, tmp_path: Path) -> None:
    say(page, "rich")
    wait_for_answer(page)
    files = {}
    for kind in ("json", "markdown"):
        page.click("#more")
        with page.expect_download() as download:
            page.click(f"#export-{kind}")
        files[kind] = tmp_path / kind
        download.value.save_as(files[kind])
    assert files["markdown"].read_text().count("## ") == 2 and RICH in files["markdown"].read_text()
    assert json.loads(files["json"].read_text())["conversation"]["messages"][1]["text"] == RICH
    page.set_input_files("#file", files["json"])
    page.wait_for_function("() => document.querySelectorAll('#conversations a').length == 2")
    assert page.locator("article.answer .markdown table").count() == 1
    bad = tmp_path / "bad.json"
    bad.write_text('{"messages": 1}')
    page.set_input_files("#file", bad)
    page.wait_for_selector("#toasts .alert")
    assert page.problems == []


def test_parameters_reach_the_server(page: Any) -> None:
    bodies: list[Any] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.post_data else None)
    page.click("#open-settings")
    page.fill("#system", "Be kind.")
    for name, value in {"temperature": "0.5", "seed": "7", "max_tokens": "3", "top_k": "5"}.items():
        page.fill(f"#param-{name}", value)
    page.fill("#param-stop", "END\nSTOP")
    page.keyboard.press("Escape")
    say(page, "count")
    wait_for_answer(page)
    body = bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert (body["temperature"], body["seed"], body["max_tokens"], body["top_k"]) == (0.5, 7, 3, 5)
    assert body["stop"] == ["END", "STOP"] and body["stream"] is True
    assert "Cut off at the limit" in page.locator("article.answer").inner_text()
    page.click("#open-settings")
    page.click("#reset")
    page.keyboard.press("Escape")
    say(page, "hello")
    wait_for_answer(page, 2)
    assert "seed" not in bodies[-1] and bodies[-1]["messages"][0]["role"] == "user"


def test_thoughts_are_folded_away(page: Any) -> None:
    say(page, "think")
    assert wait_for_answer(page) == "It is noon."
    details = page.locator("article.answer details")
    assert details.get_attribute("open") is None
    details.locator("summary").click()
    assert details.locator(".thought").inner_text() == "Let me see."


def test_markdown(page: Any) -> None:
    say(page, "rich")
    wait_for_answer(page)
    body = page.locator("article.answer .markdown")
    for selector in ("em", "strong", "p > code", "ul ul li", "td", "pre code"):
        assert body.locator(selector).count() >= 1, selector
    link = body.locator("a")
    assert link.get_attribute("href") == "https://example.org/a?b=c"
    assert "noopener" in link.get_attribute("rel") and link.get_attribute("target") == "_blank"
    assert body.locator("pre code").inner_text().strip() == 'print("<b>hi</b>")'
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    body.locator("pre").locator("xpath=..").locator("button").click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == 'print("<b>hi</b>")'


def test_no_text_becomes_code(page: Any, address: str) -> None:
    """As an answer, as a question, as a title, as a name, as a system prompt, and from a file."""
    outside: list[str] = []
    page.on("request", lambda r: outside.append(r.url) if not r.url.startswith(address) else None)
    say(page, "inject")
    wait_for_answer(page)
    say(page, INJECTIONS.replace("\n", " "))
    wait_for_answer(page, 2)
    page.click("#more")
    page.click("#rename")
    page.keyboard.press("Control+a")
    page.keyboard.type("<img src=x onerror=window.pwned=1>")
    page.keyboard.press("Enter")
    page.reload()
    page.wait_for_selector("article.answer >> nth=1")
    names = page.evaluate("[...document.querySelectorAll('#messages *')].map(e => e.localName)")
    assert set(names) <= ALLOWED, set(names) - ALLOWED
    links = page.evaluate("[...document.querySelectorAll('#messages a')].map(e => e.protocol)")
    assert set(links) <= {"http:", "https:", "mailto:"}
    handlers = page.evaluate(
        "[...document.querySelectorAll('#messages *, #sidebar *')]"
        ".filter(e => [...e.attributes].some(a => a.name.startsWith('on') || a.name == 'style'))"
        ".filter(e => e.localName != 'textarea').length"
    )
    assert handlers == 0 and outside == []
    assert page.evaluate("window.pwned") is None
    assert page.locator("body").is_visible() and page.problems == []


def test_hostile_markdown_is_quick(page: Any) -> None:
    slowest = page.evaluate(
        """async () => {
          const { Markdown } = await import("/page/markdown.js");
          const units = ["*", "[", "`", "> ", "- ", "_*", "![](", "|", "~", "<", "\\n", "# ",
            "[a](", "**a", "`a", "1. ", "\\\\", "  - "];
          const texts = units.map((unit) => unit.repeat(100_000 / unit.length));
          texts.push(Array.from({length: 400}, (_, i) => " ".repeat(2 * i) + "- a").join("\\n"));
          let slowest = [0, ""];
          for (const text of texts) {
            let ms = Infinity;
            for (let trial = 0; trial < 3 && ms > 300; trial += 1) {
              const body = document.createElement("div");
              const began = performance.now();
              new Markdown(body).update(text);
              ms = Math.min(ms, performance.now() - began);
            }
            if (ms > slowest[0]) slowest = [ms, text.slice(0, 8)];
          }
          return slowest;
        }"""
    )
    assert slowest[0] < 1000, slowest


def test_errors_are_said_and_can_be_tried_again(page: Any, address: str) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=429,
            headers={"Retry-After": "1"},
            json={"error": {"message": "no place", "type": "rate_limit_error", "code": "x"}},
        ),
    )
    say(page, "hello")
    page.wait_for_selector("article.answer .note >> visible=true")
    page.unroute("**/v1/chat/completions")
    page.wait_for_function(
        "() => document.querySelector('.markdown')?.innerText == 'Good morning.'"
        " || document.querySelector('.note button')"
    )
    if page.locator(".note button").count():
        page.click(".note button")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.markdown')]"
        ".some(e => e.innerText == 'Good morning.')"
    )
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "again")
    page.wait_for_selector("article.answer .note.failed")


def test_a_key_is_asked_for(browser: Any) -> None:
    lm = scripted_lm(ANSWERS)
    with serving(app_of({"scripted": lm}, Access(keys=("the-long-key",)))) as address:
        refused = httpx.get(address, headers={"accept": "text/html,*/*"})
        assert refused.status_code == 401  # a browser asks for the password then
        assert refused.headers["www-authenticate"].startswith("Basic ")
        context = browser.new_context(
            http_credentials={"username": "x", "password": "the-long-key"}
        )
        page = opened(context, address)
        say(page, "hello")
        assert wait_for_answer(page) == "Good morning."
        context.close()


def test_by_keys_alone(page: Any) -> None:
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(".editor textarea:focus")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+/")
    page.wait_for_selector("#help[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+,")
    page.wait_for_selector("#settings[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_function("() => document.activeElement.id == 'prompt'")
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.localName"))
    assert {"new", "search", "model", "open-settings", "more", "prompt", "theme"} <= seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_and_contrast(browser: Any, address: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
    page = opened(context, address)
    say(page, "rich")
    wait_for_answer(page)
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, a, input, textarea, select')]"
        ".filter(e => !(e.ariaLabel || e.innerText?.trim() || e.labels?.length || e.title))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []
    low = page.evaluate(
        """() => {
          const value = (c) => c.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = (e) => {
            for (; e; e = e.parentElement) {
              const c = value(getComputedStyle(e).backgroundColor);
              if (c.length < 4 || c[3] > 0.99) return c;
            }
            return [255, 255, 255];
          };
          const found = [];
          for (const e of document.querySelectorAll("body *")) {
            const own = [...e.childNodes].some((n) => n.nodeType == 3 && n.data.trim());
            const left = ".sr-only, [disabled], .skip, dialog, #menu";
            if (!own || !e.checkVisibility() || e.closest(left)) continue;
            const a = light(value(getComputedStyle(e).color)), b = light(behind(e));
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) found.push([e.localName, e.className, e.innerText, ratio]);
          }
          return found;
        }"""
    )
    assert low == []
    context.close()


def test_on_a_phone(browser: Any, address: str) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True
    )
    page = opened(context, address)
    page.fill("#prompt", "rich")
    page.tap("#send")
    wait_for_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.tap("#open-sidebar")
    page.wait_for_selector("body.drawer #conversations a")
    small = page.evaluate(
        "[...document.querySelectorAll('button, #sidebar a')].filter(e => e.checkVisibility())"
        ".map(e => [e.id || e.title, e.getBoundingClientRect()])"
        ".filter(([, r]) => r.width && (r.height < 40 || r.width < 40)).map(([n]) => n)"
    )
    assert small == []
    page.tap("#close-sidebar")
    page.wait_for_function("() => !document.body.classList.contains('drawer')")
    context.close()


def test_two_tabs_see_each_other(browser: Any, address: str) -> None:
    context = browser.new_context()
    one, two = opened(context, address), opened(context, address)
    say(one, "hello")
    wait_for_answer(one)
    two.wait_for_function("() => document.querySelectorAll('#conversations a').length == 1")
    two.click("#conversations a")
    two.wait_for_function("() => document.querySelector('.markdown')?.innerText == 'Good morning.'")
    context.close()


def test_the_status_page(browser: Any, address: str) -> None:
    context = browser.new_context()
    page = opened(context, address)
    say(page, "hello")
    wait_for_answer(page)
    page.goto(f"{address}/status")
    page.wait_for_function("() => document.body.innerText.includes('scripted')")
    text = page.locator("body").inner_text()
    assert "Tokens generated a second" in text and "Cannot read" not in text
    assert page.locator("svg path, svg polyline").count() > 0
    assert page.problems == []
    context.close()
