"""The page in a browser, over the real server: what people do, and texts that try to be code."""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import bitnet_ops.server
import vision_models
from bitnet_ops.server.security import Access
from bitnet_ops.vision.decode import image_size
from bitnet_ops.vision.sources import image_bytes
from pictures import file_of, photograph
from served import app_of, scripted_lm, serving

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None and os.environ.get("CI") != "true":
    pytest.skip("needs a browser (apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api") if os.environ.get("CI") != "true" else None
if sync_api is None:
    from playwright import sync_api  # type: ignore[no-redef]

pytestmark = pytest.mark.slow
PAGE = Path(bitnet_ops.server.__file__).parent / "page"
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
    "sections": "### One\n\n#### Part\n\n### Two\n\n###### Small",
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
    return scripted_lm(ANSWERS, seconds=0.004, context=8192)


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


# What is on the screen ----------------------------------------------------------------------------


def shown(page: Any) -> list[str]:
    """The texts of the messages that can be seen."""
    texts = page.locator("article .bubble, article .markdown").filter(visible=True)
    return [text for text in texts.all_inner_texts() if text]


def wait_until_shown(page: Any, texts: list[str]) -> None:
    wanted = json.dumps(texts)
    try:
        page.wait_for_function(
            "wanted => JSON.stringify([...document.querySelectorAll("
            "'article .bubble, article .markdown')].filter(e => e.checkVisibility())"
            ".map(e => e.innerText).filter(Boolean)) == JSON.stringify(JSON.parse(wanted))",
            arg=wanted,
        )
    except sync_api.TimeoutError as error:
        raise AssertionError(f"expected {texts}, got {shown(page)}; {page.problems}") from error


def delete_by_menu(page: Any) -> None:
    page.click("#more")
    page.click("#delete")


def delete_in_the_list(page: Any) -> None:
    page.hover("#conversations li")
    page.click('#conversations [data-action="delete"]')


def delete_in_another_tab(page: Any) -> None:
    other = opened(page.context, page.url.split("#")[0])
    delete_in_the_list(other)
    wait_until_shown(page, [])  # what a tab has not written yet is lost when it is closed
    other.close()


@pytest.mark.parametrize("delete", [delete_by_menu, delete_in_the_list, delete_in_another_tab])
@pytest.mark.parametrize("question", ["hello", "count"], ids=["answered", "while it answers"])
def test_a_deleted_conversation_is_gone(page: Any, delete: Any, question: str) -> None:
    say(page, question)
    if question == "hello":
        wait_for_answer(page)
    else:
        page.wait_for_function("() => document.querySelector('.markdown')?.innerText.length > 40")
    delete(page)
    wait_until_shown(page, [])
    assert page.locator("#title").inner_text() == "New conversation"
    page.wait_for_function("() => !document.querySelector('#send').classList.contains('stop')")
    say(page, "again")
    wait_until_shown(page, ["again", "As you wish."])
    page.go_back()  # to the empty page, or to the address of what is deleted
    wait_until_shown(page, [])
    page.reload()
    page.wait_for_selector("#conversations a")
    assert page.locator("#conversations a").all_inner_texts() == ["again"]
    assert page.problems == []


def test_undo_shows_the_conversation_again(page: Any) -> None:
    say(page, "hello")
    wait_for_answer(page)
    other = opened(page.context, page.url)
    wait_until_shown(other, ["hello", "Good morning."])
    delete_by_menu(page)
    for tab in (page, other):
        wait_until_shown(tab, [])
    page.click("#toasts button:has-text('Undo')")
    wait_until_shown(page, ["hello", "Good morning."])
    other.click("#conversations a")
    wait_until_shown(other, ["hello", "Good morning."])
    assert page.problems == other.problems == []


def test_what_is_typed_stays_with_its_conversation(page: Any) -> None:
    typed = lambda: page.input_value("#prompt")  # noqa: E731
    say(page, "hello")
    wait_for_answer(page)
    page.fill("#prompt", "for the first")
    file = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"}
    page.set_input_files("#attachment", [file])
    page.wait_for_selector("#attached li")
    page.click("#new")
    wait_until_shown(page, [])
    assert typed() == "" and page.locator("#attached li").count() == 0
    page.fill("#prompt", "for a new one")
    page.click("#conversations a")
    wait_until_shown(page, ["hello", "Good morning."])
    assert typed() == "for the first" and page.locator("#attached li").count() == 1
    page.go_back()
    wait_until_shown(page, [])
    assert typed() == "for a new one"
    page.press("#prompt", "Enter")
    page.wait_for_selector("article.question")
    assert typed() == ""
    page.click("#new")
    page.wait_for_function("() => !document.querySelector('article')")
    assert typed() == ""
    page.reload()
    page.wait_for_selector("#conversations a")
    assert typed() == ""


def test_headings_leave_out_no_level(page: Any) -> None:
    say(page, "sections")
    wait_for_answer(page)
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')]"
        ".filter(e => e.checkVisibility({visibilityProperty: true}))"
        ".map(e => Number(e.localName[1]))"
    )
    assert levels == [1, 2, 2, 3, 4, 3, 4]


def test_icons_are_there_without_a_server(page: Any) -> None:
    page.route("**", lambda route: route.abort())
    say(page, "hello")
    page.wait_for_selector("article.answer .note.failed")
    assert page.evaluate(
        "[...document.querySelectorAll('svg.icon')].filter(e => e.checkVisibility())"
        ".map(e => e.getBBox().width).every(Boolean)"
    )
    named = r'icon(?:Button)?\("(\w+)"|icon\(busy \? "(\w+)" : "(\w+)"'
    names = {"system", "light", "dark"}  # of dom.js, by their themes
    for script in PAGE.glob("*.js"):
        names.update(name for found in re.findall(named, script.read_text()) for name in found)
    missing = page.evaluate(
        "names => names.filter(name => !document.querySelector(`#icon-${name}`))",
        sorted(names - {""}),
    )
    assert len(names) > 10 and missing == []


def test_the_demo_says_what_it_is(browser: Any) -> None:
    with serving(app_of()) as address:
        page = opened(browser.new_context(), address)
        page.wait_for_selector("#about:has-text('King James Bible') >> visible=true")
        page.context.close()


# Long conversations -------------------------------------------------------------------------------


def sent_by(page: Any) -> list[Any]:
    """The bodies of the requests for answers, as they are sent."""
    bodies: list[Any] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.post_data else None)
    return bodies


def streamed(*texts: str) -> str:
    chunks: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_a_cut_answer_goes_on(page: Any) -> None:
    bodies = sent_by(page)
    page.click("#open-settings")
    page.fill("#param-max_tokens", "9")
    page.keyboard.press("Escape")
    say(page, "count")
    begun = wait_for_answer(page)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            headers={"Content-Type": "text/event-stream"}, body=streamed(" and", " so on")
        ),
    )
    page.click(".note button:has-text('Continue')")
    wait_until_shown(page, ["count", f"{begun} and so on"])
    assert bodies[-1]["messages"] == [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": begun},
    ]
    assert bodies[-1]["continue_final_message"] is True
    assert bodies[-1]["add_generation_prompt"] is False
    assert "continue_final_message" not in bodies[0]
    assert page.locator(".versions").filter(visible=True).count() == 0
    page.unroute("**/v1/chat/completions")
    page.reload()
    wait_until_shown(page, ["count", f"{begun} and so on"])
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.click('[data-action="again"]')  # fails: what was there stays beside it
    page.wait_for_selector(".note.failed")
    page.click('[data-action="previous"]')
    wait_until_shown(page, ["count", f"{begun} and so on"])


def gauge(page: Any) -> int:
    return int(page.get_attribute("#gauge", "aria-valuenow"))


def test_a_full_context_forgets_the_oldest(browser: Any) -> None:
    lm = scripted_lm(ANSWERS, context=256)
    with serving(app_of({"small": lm})) as address:
        page = opened(browser.new_context(), address)
        bodies = sent_by(page)
        questions = [f"{'word ' * 12}{number} hello" for number in range(12)]
        fulls = []
        for count, question in enumerate(questions, 1):
            say(page, question)
            wait_for_answer(page, count)
            if page.locator(".note.failed").count():
                break
            fulls.append(gauge(page))
        assert fulls == sorted(fulls) and len(fulls) >= 2
        assert bodies[0]["max_tokens"] == 256 // 4
        assert "256 tokens" in page.locator(".note.failed").inner_text()
        page.click(".note button:has-text('Forget the oldest')")
        page.wait_for_function("() => !document.querySelector('.note.failed')")
        assert wait_for_answer(page, count) == "Good morning."
        kept = [m["content"] for m in bodies[-1]["messages"] if m["role"] == "user"]
        assert kept == questions[count - len(kept) : count] and len(kept) < count
        assert gauge(page) < fulls[-1]
        begin = page.locator(".begin").filter(visible=True)
        assert begin.count() == 1 and len(shown(page)) == 2 * count
        page.reload()
        page.wait_for_selector(".begin")
        say(page, "hello")
        wait_for_answer(page, count + 1)
        assert bodies[-1]["messages"][0]["content"] == kept[0]
        page.click(".begin button")
        assert begin.count() == 0
        say(page, "word " * 300)  # alone too long: nothing that could be forgotten would help
        page.wait_for_selector(".note.failed")
        page.click("#new")
        wait_until_shown(page, [])
        say(page, "word " * 300)
        page.wait_for_selector(".note.failed:has-text('Make it shorter')")
        assert page.locator(".note button").count() == 0 and page.problems == []
        page.context.close()


def test_settings_of_all_conversations(page: Any) -> None:
    bodies = sent_by(page)
    say(page, "hello")
    wait_for_answer(page)
    page.click("#open-settings")
    assert page.get_attribute("#param-temperature", "placeholder") == "default: 0"
    assert page.get_attribute("#param-max_tokens", "placeholder") == f"default: {8192 // 4}"
    page.click(".scope label:has-text('All')")
    page.fill("#param-temperature", "0.5")
    page.fill("#param-stop", "END")
    page.fill("#system", "Be kind.")
    page.click(".scope label:has-text('This')")
    assert page.get_attribute("#param-temperature", "placeholder") == "default: 0.5"
    page.fill("#param-temperature", "0.25")
    page.keyboard.press("Escape")
    say(page, "again")
    wait_for_answer(page, 2)
    assert (bodies[-1]["temperature"], bodies[-1]["stop"]) == (0.25, ["END"])
    assert bodies[-1]["messages"][0] == {"role": "system", "content": "Be kind."}
    page.click("#new")
    page.reload()
    page.wait_for_function("() => !document.querySelector('#model').disabled")
    say(page, "hello")
    wait_for_answer(page)
    assert bodies[-1]["temperature"] == 0.5 and bodies[-1]["messages"][0]["role"] == "system"
    page.click("#open-settings")
    page.click(".scope label:has-text('All')")
    page.click("#reset")
    page.keyboard.press("Escape")
    say(page, "again")
    wait_for_answer(page, 2)
    assert "temperature" not in bodies[-1] and bodies[-1]["messages"][0]["role"] == "user"


# Files --------------------------------------------------------------------------------------------


def test_everything_is_exported_and_taken_over(browser: Any, address: str, tmp_path: Path) -> None:
    page = opened(browser.new_context(), address)
    for text in ("hello", "again"):
        say(page, text)
        wait_for_answer(page)
        page.click("#new")
        wait_until_shown(page, [])
    page.click("#more")
    with page.expect_download() as download:
        page.click("#export-all")
    download.value.save_as(tmp_path / "all.json")
    page.context.close()
    page = opened(browser.new_context(), address)
    page.set_input_files("#file", tmp_path / "all.json")
    page.wait_for_function("() => document.querySelectorAll('#conversations a').length == 2")
    page.click("#conversations a:has-text('hello')")
    wait_until_shown(page, ["hello", "Good morning."])
    page.click("#conversations a:has-text('again')")
    wait_until_shown(page, ["again", "As you wish."])
    page.context.close()


DROP = """([name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  document.querySelector("#main").dispatchEvent(
    new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""


def test_text_files_go_with_a_message(page: Any) -> None:
    bodies = sent_by(page)
    files = [
        {"name": "a.py", "mimeType": "text/x-python", "buffer": "print('é')\n".encode()},
        {"name": "b.md", "mimeType": "text/markdown", "buffer": b"```\ncode\n```"},
    ]
    page.set_input_files("#attachment", files)
    page.wait_for_function("() => document.querySelectorAll('#attached li').length == 2")
    page.evaluate(DROP, ["c.txt", "<script>window.pwned = 1</script>"])
    page.wait_for_function("() => document.querySelectorAll('#attached li').length == 3")
    page.click("#attached li:has-text('a.py') button")
    assert page.locator("#attached li").count() == 2
    page.set_input_files("#attachment", [files[0]])
    page.wait_for_function("() => document.querySelectorAll('#attached li').length == 3")
    refused = {"p.png": b"\x89PNG\0", "nul.txt": b"a\0b", "big": b"a" * 1_000_001}
    for name, buffer in refused.items():
        file = {"name": name, "mimeType": "text/plain", "buffer": buffer}
        page.set_input_files("#attachment", [file])
        page.wait_for_selector(f"#toasts .alert:has-text('{name}')")
    assert page.locator("#attached li span").all_inner_texts() == ["b.md", "c.txt", "a.py"]
    say(page, "hello")
    assert wait_for_answer(page) == "Good morning."
    assert bodies[-1]["messages"][0]["content"] == (
        "b.md\n````\n```\ncode\n```\n````\n\n"
        "c.txt\n```\n<script>window.pwned = 1</script>\n```\n\n"
        "a.py\n```\nprint('é')\n```\n\nhello"
    )
    assert page.locator("#attached li").count() == 0
    page.reload()
    page.wait_for_selector("article.question .file >> nth=2")
    page.click("article.question .file:has-text('a.py') summary")
    assert "print('é')" in page.locator("article.question .bubble").inner_text()
    assert page.evaluate("window.pwned") is None and page.problems == []
    page.click('article.question [data-action="edit"]', force=True)
    page.fill(".editor textarea", "again")
    page.press(".editor textarea", "Enter")
    page.wait_for_function("() => document.querySelector('.markdown')?.innerText == 'As you wish.'")
    assert bodies[-1]["messages"][0]["content"].endswith("print('é')\n```\n\nagain")


# Pictures -----------------------------------------------------------------------------------------


@pytest.fixture
def seeing(browser: Any, address: str) -> Iterator[Any]:
    """The page of a model that reads pictures too, and of one beside it that does not.

    What is sent is answered here: the scripted model has no eyes. `.bodies`: what was sent.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.problems, page.bodies = [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda m: page.problems.append(m.text) if m.type == "error" else None)

    def models(route: Any) -> None:
        rows = route.fetch().json()["models"]
        route.fulfill(json={"models": [{**rows[0], "vision": True}, {**rows[0], "id": "blind"}]})

    def answer(route: Any) -> None:
        page.bodies.append(route.request.post_data_json)
        route.fulfill(body=streamed("A cat."), content_type="text/event-stream")

    page.route("**/page/models", models)
    page.route("**/v1/chat/completions", answer)
    page.goto(address)
    page.wait_for_function("() => !document.querySelector('#model').disabled")
    yield page
    context.close()


def picture(name: str, kind: str = "PNG", size: tuple[int, int] = (60, 40)) -> dict[str, Any]:
    buffer = file_of(photograph(size[1], size[0]), kind)
    return {"name": name, "mimeType": f"image/{kind.lower()}", "buffer": buffer}


def attached(page: Any, count: int) -> None:
    page.wait_for_function("n => document.querySelectorAll('#attached li').length == n", arg=count)


PASTE = """bytes => {
  const clipboardData = new DataTransfer();
  const file = new File([new Uint8Array(bytes)], "image.png", { type: "image/png" });
  clipboardData.items.add(file);
  document.querySelector("#prompt").dispatchEvent(
    new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
}"""
DROP_PICTURE = """bytes => {
  const dataTransfer = new DataTransfer();
  const file = new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" });
  dataTransfer.items.add(file);
  document.querySelector("#main").dispatchEvent(
    new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""


def test_a_model_without_eyes_is_offered_no_pictures(page: Any) -> None:
    assert page.locator("#attach-picture").is_hidden()
    page.set_input_files("#attachment", [picture("cat.png")])
    page.wait_for_selector("#toasts .alert:has-text('cat.png is a picture, and this model reads')")
    assert page.locator("#attached li").count() == 0 and page.problems == []


def test_pictures_go_with_a_message(seeing: Any) -> None:
    page = seeing
    button = page.get_by_role("button", name="Attach pictures")
    with page.expect_file_chooser() as chooser:
        button.click()
    chooser.value.set_files([picture("cat.png"), picture("dog.jpg", "JPEG", (30, 50))])
    attached(page, 2)
    pasted, dropped = picture("a", size=(9, 7)), picture("b", "PNG", (5, 8))
    page.evaluate(PASTE, list(pasted["buffer"]))
    attached(page, 3)
    page.evaluate(DROP_PICTURE, list(dropped["buffer"]))
    attached(page, 4)
    page.set_input_files(
        "#attachment", [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"}]
    )
    attached(page, 5)
    preview = page.get_by_role("img", name="Picture cat.png, 60 by 40 pixels")
    assert preview.evaluate("image => image.complete && image.naturalWidth") == 60
    page.get_by_role("button", name="Leave dog.jpg out").click()
    attached(page, 4)
    say(page, "What is it?")
    assert wait_for_answer(page) == "A cat."
    assert page.locator("#attached li").count() == 0
    urls = [
        f"data:image/png;base64,{base64.b64encode(data).decode()}"
        for data in (picture("")["buffer"], pasted["buffer"], dropped["buffer"])
    ]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = {"type": "text", "text": "a.txt\n```\ntext\n```\n\nWhat is it?"}
    assert page.bodies[0]["messages"][-1] == {"role": "user", "content": [*parts, text]}
    # kept, and shown again; sent again with the next message
    page.reload()
    page.wait_for_selector("article.question .picture img >> nth=2")
    names = page.locator("article.question img").evaluate_all("all => all.map(i => i.alt)")
    assert names == [
        "Picture cat.png, 60 by 40 pixels",
        "Picture image.png, 9 by 7 pixels",
        "Picture dropped.png, 5 by 8 pixels",
    ]
    say(page, "Sure?")
    wait_for_answer(page, 2)
    assert page.bodies[1]["messages"][0]["content"] == [*parts, text]
    assert page.bodies[1]["messages"][2]["content"] == "Sure?"
    # an edited question keeps them
    page.locator("article.question").first.locator('[data-action="edit"]').click(force=True)
    page.fill(".editor textarea", "And now?")
    page.press(".editor textarea", "Enter")
    page.wait_for_function("() => document.querySelector('.bubble').innerText.includes('And now')")
    wait_for_answer(page)
    assert page.bodies[2]["messages"][-1]["content"][:3] == parts
    assert page.problems == []


def test_a_picture_is_read_by_a_model_with_a_tower(browser: Any, tmp_path: Path) -> None:
    """Nothing between the page and the model is made up."""
    lm = bitnet_ops.load(vision_models.write_model(tmp_path))
    with serving(app_of({"seeing": lm})) as address:
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        page = opened(context, address)
        page.set_input_files("#picture", [picture("cat.png", size=(300, 200))])
        attached(page, 1)
        say(page, "What is it?")
        wait_for_answer(page)
        assert lm.images is not None and lm.images.computed == 1
        assert page.get_by_role("img", name="Picture cat.png, 300 by 200 pixels").is_visible()
        page.screenshot(path=tmp_path / "page.png")
        say(page, "Sure?")
        wait_for_answer(page, 2)
        assert lm.images.computed == 1, "its rows are still known"
        assert page.problems == []
        context.close()


def test_a_picture_alone_is_a_message(seeing: Any) -> None:
    page = seeing
    assert page.locator("#send").is_disabled()
    page.set_input_files("#picture", [picture("cat.png")])
    attached(page, 1)
    page.click("#send")
    wait_for_answer(page)
    content = page.bodies[0]["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["image_url"]
    assert "cat.png" in page.title() and page.problems == []


def test_another_model_is_told_of_pictures(seeing: Any) -> None:
    page = seeing
    page.set_input_files("#picture", [picture("cat.png")])
    attached(page, 1)
    say(page, "What is it?")
    wait_for_answer(page)
    page.select_option("#model", "blind")
    assert page.locator("#attach-picture").is_hidden()
    say(page, "Really?")
    wait_for_answer(page, 2)
    assert page.bodies[1]["messages"][0]["content"] == (
        "(Here was a picture, cat.png, which you cannot see.)\nWhat is it?"
    )
    assert page.problems == []


def test_a_large_picture_is_made_smaller(seeing: Any) -> None:
    """More than a request holds; one of a kind that servers do not read becomes another."""
    page = seeing
    large = picture("large.png", size=(3000, 2000))
    assert len(large["buffer"]) > 10_000_000
    page.set_input_files("#picture", [large])
    attached(page, 1)
    page.set_input_files("#picture", [picture("new.avif", "AVIF")])
    attached(page, 2)
    say(page, "What?")
    wait_for_answer(page)
    found = []
    for part in page.bodies[0]["messages"][-1]["content"][:2]:
        data = image_bytes(part["image_url"]["url"])
        assert data[:3] == b"\xff\xd8\xff" and len(data) < 3_000_000
        found.append(image_size(data))
    assert found == [(1672, 2508), (40, 60)]
    assert page.problems == []


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"no picture", b""])
def test_a_picture_that_is_none(seeing: Any, data: bytes) -> None:
    file = {"name": "bad.png", "mimeType": "image/png", "buffer": data}
    seeing.set_input_files("#picture", [file])
    seeing.wait_for_selector("#toasts .alert:has-text('bad.png is no picture that this browser')")
    assert seeing.locator("#attached li").count() == 0 and seeing.problems == []


def test_pictures_are_exported_and_imported(seeing: Any, tmp_path: Path) -> None:
    page = seeing
    page.set_input_files("#picture", [picture("cat.png")])
    attached(page, 1)
    say(page, "hello")
    wait_for_answer(page)
    page.click("#more")
    with page.expect_download() as download:
        page.click("#export-json")
    download.value.save_as(tmp_path / "one.json")
    page.click("#more")
    with page.expect_download() as download:
        page.click("#export-markdown")
    download.value.save_as(tmp_path / "one.md")
    assert "(Picture cat.png)\nhello" in (tmp_path / "one.md").read_text()
    kept = json.loads((tmp_path / "one.json").read_text())
    [question, _] = kept["conversation"]["messages"]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    sources = ["https://evil.example/a.png", "page/evil.svg", "data:image/svg+xml;base64,AAAA"]
    question["files"] += [{"name": "evil", "image": source} for source in sources]
    (tmp_path / "two.json").write_text(json.dumps(kept))
    page.set_input_files("#file", tmp_path / "two.json")
    page.wait_for_selector("article.question .file >> nth=2")
    assert page.locator("article.question img").count() == 1
    assert not any("evil" in url for url in asked)
    assert page.problems == []


# Below a path of a host ---------------------------------------------------------------------------


@contextlib.contextmanager
def below(address: str, path: str) -> Iterator[tuple[str, list[str]]]:
    """A proxy that gives the server `path` of its host, and takes that path away.

    Its address, and the paths that it was asked for outside.
    """
    upstream = urlsplit(address)

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            inside = self.path == path or self.path.startswith((f"{path}/", f"{path}?"))
            if not inside:
                outside.append(self.path)
                self.send_error(404)
                return
            connection = http.client.HTTPConnection(upstream.netloc, timeout=60)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            target = self.path.removeprefix(path)
            target = target if target.startswith("/") else f"/{target}"
            connection.request(self.command, target, body, dict(self.headers))
            response = connection.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while part := response.read1(1 << 16):
                self.wfile.write(part)
                self.wfile.flush()
            self.close_connection = True

        do_POST = do_GET

    outside: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{path}", outside
        finally:
            server.shutdown()


@pytest.mark.parametrize("path", ["/llm", "/a/b%20c"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_below_a_path_of_a_host(browser: Any, address: str, path: str, slash: str) -> None:
    with below(address, path) as (outer, outside):
        page = opened(browser.new_context(), outer + slash)
        assert page.url == f"{outer}/"
        if not slash:
            outside.clear()  # what a browser fetched ahead, before it was sent to the other address
        say(page, "hello")
        assert wait_for_answer(page) == "Good morning."
        page.reload()
        wait_until_shown(page, ["hello", "Good morning."])
        page.click("a[href='status']")
        page.wait_for_selector("#models:has-text('scripted')")
        page.click("a[aria-label='Conversations']")
        page.wait_for_selector("#conversations a")
        page.goto(f"{outer}/status/")
        page.wait_for_selector("#models:has-text('scripted')")
        assert page.url == f"{outer}/status"
        assert page.problems == outside == []
        page.context.close()


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
