"""The page of serve.py in a real browser, with tiny random models or with answers that are known.

Skipped where Debian's chromium or selenium is missing."""

import asyncio
import json
import shutil
import time
from types import SimpleNamespace

import pytest
from test_page import ask
from test_sample import save_run
from test_serve import serving

from groundup.generate.engine import Token
from groundup.generate.server import Job
from groundup.generate.tools import ToolTurn
from groundup.tokens.pairs import usable_pair

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WAIT = 30  # seconds, on a busy machine
RENDERED = "[...document.querySelectorAll('.rest')].every((node) => !node.textContent)"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    return [save_run(root / name, seed=seed, stage="sft", block_size=512) for seed, name in ((3, "a"), (4, "b"))]


@pytest.fixture(scope="module")
def server(directories, tmp_path_factory):
    file = tmp_path_factory.mktemp("clicks") / "new" / "preferences.jsonl"
    with serving(*directories, preferences=str(file), max_new_tokens=20) as (url, app):
        yield url, app, file


@pytest.fixture(scope="module")
def driver():
    webdriver = pytest.importorskip("selenium.webdriver", reason="the page's tests need selenium")
    binaries = [shutil.which("chromium"), shutil.which("chromedriver")]
    if not all(binaries):
        pytest.skip("the page's tests need a browser: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binaries[0]
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en-US"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=binaries[1]))
    yield found
    found.quit()


class Page:
    """What a person does with the page."""

    def __init__(self, driver, url):
        self.driver, self.url = driver, url

    def open(self):
        """The only setting is a seed: without one, a random model's answer is now and then empty."""
        self.driver.get(self.url)
        self.js("localStorage.clear(); sessionStorage.clear(); localStorage.setItem('groundup.settings', arguments[0])",
                json.dumps({"params": {"seed": "1"}}))  # fmt: skip
        self.reload()

    def reload(self):
        self.driver.refresh()
        self.until(f"models.length && {RENDERED} || document.querySelector('dialog[open]')")

    def js(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def until(self, condition):
        end = time.monotonic() + WAIT
        while not self.js(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}; {self.all('body')[0].text}"
            time.sleep(0.02)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def click(self, selector):
        self.all(selector)[-1].click()

    def type(self, selector, text):
        self.all(selector)[-1].send_keys(text)

    def ask(self, text):
        self.type("#ask", text + "\n")
        self.until(f"chat.turns.length && !runs.size && {RENDERED}")

    def texts(self, selector=".answer .text"):
        found = "[...document.querySelectorAll(arguments[0])]"
        return self.js(f"return {found}.map((node) => node.innerText.trim())", selector)


@pytest.fixture
def page(driver, server):
    """The page, fresh. Afterwards: nothing was asked of another origin, and nothing went wrong."""
    found = Page(driver, server[0] + "/")
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    found.open()
    yield found
    found.driver.switch_to.default_content()
    assert [line["message"] for line in driver.get_log("browser")] == []
    asked = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in asked if e["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith((server[0] + "/", "data:")) for url in urls), urls


@pytest.fixture
def answers(server, monkeypatch):
    """answers(piece, piece...): what every model writes from now on, slowly if there are many. -> what became of it."""
    seen = []

    # The engine hears of nothing.
    monkeypatch.setattr(Job, "add", lambda job, requests: job.requests.extend(requests))

    def set_answer(*pieces):
        async def events(job):
            (request,) = job.requests
            model, sample = job.model, SimpleNamespace(request=request, index=0)
            seen.append({"model": model.name, "prompt": model.tokenizer.decode(request.ids), "n": 0})
            mine = seen[-1]
            logprobs = {65: -0.5, 66: -1.5, 67: -3.0}
            end = Token(next(iter(request.params.stop_ids)), "", "stop", {0: 0.0}, is_end=True)
            for piece in pieces:
                if isinstance(piece, ToolTurn):
                    yield sample, end, (piece, request)
                    continue
                yield sample, Token(65, piece.replace("MODEL", model.name), "", logprobs), None
                mine["n"] += 1
                await asyncio.sleep(0.02 if len(pieces) > 20 else 0)
            yield sample, end, None

        running = {}  # {job: what it draws}

        async def token(job):
            return await anext(running.setdefault(job, events(job)))

        monkeypatch.setattr(server[1], "token", token)
        return seen

    return set_answer


def test_ask_and_reload(page, server):
    """A real model: the answer is the API's for the same seed."""
    page.click("#settings")
    page.type("#seed", "\ue0035")  # Backspace, 5
    page.type("#system", "Be 好.")
    page.type("#max_tokens", "12")
    page.click("#close")
    page.ask("从前有 a cat")
    messages = [{"role": "system", "content": "Be 好."}, {"role": "user", "content": "从前有 a cat"}]
    body = {"model": "tiny", "messages": messages, "seed": 5, "max_tokens": 12}
    want = json.loads(ask(server[0] + "/v1/chat/completions", "POST", body)[2])
    assert page.js("return chat.turns[1].answers[0].text") == want["choices"][0]["message"]["content"]
    shown = page.texts()
    assert f"{want['usage']['completion_tokens']} tokens" in page.texts(".facts")[0]
    page.reload()
    assert page.texts(".said") == ["从前有 a cat"] and page.texts() == shown
    assert [node.text for node in page.all("#chats [aria-current]")] == ["从前有 a cat"]
    page.click("#new")
    assert page.all("#strata")[0].is_displayed() and page.texts() == []
    page.click("#chats li > :first-child")
    assert page.texts() == shown


def test_stream_and_stop(page, answers):
    seen = answers(*["word "] * 3000)
    page.type("#ask", "Talk.\n")
    page.until("chat.turns[1]?.answers[0].text.length > 20")
    assert page.texts()[0].startswith("word word")
    assert page.all("#send")[0].get_attribute("title").startswith("Stop")
    assert page.all("#ask") == [page.driver.switch_to.active_element]
    page.type("#ask", "\ue00c")  # Escape
    page.until("!runs.size")
    n_shown = page.texts()[0].count("word")
    assert "stopped" in page.texts(".facts")[0]
    time.sleep(0.3)
    assert seen[0]["n"] <= n_shown + 50 and page.texts()[0].count("word") == n_shown  # the server has stopped, too
    page.reload()
    assert page.texts()[0].count("word") == n_shown
    page.type("#ask", "Again\n")
    page.until("chat.turns[3]?.answers[0].text.length > 20")
    page.click("#send")  # which stops now
    page.until("!runs.size")
    page.type("#ask", "And again\n")
    page.until("chat.turns[5]?.answers[0].text.length > 20")
    page.click("#new")  # it goes on
    assert page.all("#send")[0].get_attribute("title") == "Send"
    n_tokens = seen[-1]["n"]
    page.click("#chats .writing")
    page.until(f"chat.turns[5].answers[0].count > {n_tokens}")
    assert page.all("#send")[0].get_attribute("title").startswith("Stop")
    page.click("#send")
    page.until("!runs.size")


def test_regenerate_and_edit(page, answers):
    answers("first")
    page.ask("A\ue008\n\ue000B")  # Shift+Enter
    assert page.texts(".said") == ["A\nB"]
    seen = answers("second")
    page.click(".again")
    page.until("chat.turns[1].answers.length === 2 && !runs.size")
    assert page.texts() == ["second"] and "first" not in seen[-1]["prompt"]
    page.click(".tools .back")
    assert page.texts() == ["first"]
    answers("third")
    page.ask("C")
    assert "first" in seen[-1]["prompt"] and "second" not in seen[-1]["prompt"]  # the one that is shown
    page.all(".question .edit")[0].click()
    page.until("document.activeElement.tagName === 'TEXTAREA' && document.activeElement.id === ''")
    page.type(".question textarea", "!\n")
    page.until("chat.turns.length === 2 && !runs.size")
    assert page.texts(".said") == ["A\nB!"] and page.texts() == ["third"]
    page.click(".question .edit")
    page.until("document.activeElement.closest('.question')")
    page.type(".question textarea", "changed\ue00c")
    assert page.texts(".said") == ["A\nB!"]


def test_an_error_is_shown_and_can_be_tried_again(page, answers):
    page.js("settings.params.temperature = '-1'")
    page.ask("?")
    assert "temperature" in page.texts(".problem")[0]
    page.driver.get_log("browser")  # the 400 stands there
    page.js("settings.params = {}")
    answers("fine")
    page.click(".again")
    page.until("chat.turns[1].answers.length === 2 && !runs.size")
    assert page.texts() == ["fine"] and page.texts(".problem") == []


def test_copy_and_delete(page, answers):
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": page.url}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
    answers("*one*\n```\n  x = 1\n```")
    page.ask("first")
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
    for selector, want in ((".code .copy", "  x = 1"), (".answer > .tools .copy", "*one*\n```\n  x = 1\n```")):
        page.click(selector)
        page.until("at('status').textContent === 'Copied'")
        assert page.driver.execute_async_script(read) == want
        page.js("at('status').textContent = ''")
    page.click("#new")
    page.ask("second")
    for name, left in (("first", ["second"]), ("second", [])):
        page.js("[...document.querySelectorAll('#chats li')].find((node) => node.innerText.startsWith(arguments[0]))"
                ".querySelector('.remove').focus()", name)  # fmt: skip
        page.driver.switch_to.active_element.send_keys("\ue007")
        assert name in page.driver.switch_to.alert.text
        page.driver.switch_to.alert.accept()
        assert page.texts("#chats li") == left
        assert page.js("return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).length") == len(left)
    assert page.all("#strata")[0].is_displayed()


def test_a_server_that_is_gone(page, answers):
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        page.ask("?")
    finally:
        page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline | {"offline": False})
    assert page.texts(".problem") == ["The server does not answer. Is it running?"]
    page.driver.get_log("browser")
    answers("back")
    page.click(".again")
    page.until("chat.turns[1].answers.length === 2 && !runs.size")
    assert page.texts() == ["back"]


@pytest.mark.parametrize("random, button, want", [(0.9, 0, "tiny"), (0.1, 0, "other1"), (0.9, 2, "other1")])
def test_two_models_are_compared_blind(page, server, monkeypatch, random, button, want):
    """Real models, whose answers are taken for finished: random ones do not end."""
    monkeypatch.setattr("groundup.files.turns.is_unfinished", lambda *_: False)
    page.js(f"Math.random = () => {random}")
    page.click("#compare")
    page.js("settings.system = 'Be 好.'")
    page.ask("Which?")
    page.js("settings.system = 'changed since'")
    assert page.texts(".by") == ["Answer 1", "Answer 2"] and len(page.texts(".vote button")) == 4
    top = "document.querySelector('.pair').getBoundingClientRect().top >= at('log').getBoundingClientRect().top"
    assert page.js(f"return {top}")  # both beginnings are in sight
    page.type("#ask", "More\n")  # not before the answer is judged
    assert len(page.texts(".said")) == 1 and page.driver.switch_to.active_element.text == "1 is better"
    page.all(".vote button")[button].click()
    page.until("document.querySelector('.better')")
    row = json.loads(server[2].read_text(encoding="utf-8").splitlines()[-1])
    pair = usable_pair(row)
    assert row["chosen_model"] == want and [turn["content"] for turn in pair.prompt] == ["Be 好.", "Which?"]
    assert pair.chosen == page.js("return chosen(chat.turns[1]).text")
    assert str(server[2]) in page.texts("#turns .hint")[0]
    assert sorted(page.texts(".by")) == ["other1", "tiny"] and want in page.texts(".better")[0]
    page.reload()
    assert sorted(page.texts(".by")) == ["other1", "tiny"]


def test_a_tie_and_a_failed_click(page, server, answers):
    page.click("#compare")
    answers("the same")
    page.ask("Which?")
    page.all(".vote button")[0].click()
    page.until("document.querySelector('.vote .problem')")
    assert "chosen and rejected are the same" in page.texts(".vote .problem")[0]
    page.driver.get_log("browser")  # the 400 stands there
    page.all(".vote button")[1].click()
    page.until("!document.querySelector('.vote')")
    ties = server[2].with_suffix(".ties.jsonl")
    assert len(ties.read_text(encoding="utf-8").splitlines()) == 1 and str(ties) in page.texts("#turns .hint")[0]
    page.ask("And now?")
    page.all(".vote button")[3].click()  # does not say
    assert len(ties.read_text(encoding="utf-8").splitlines()) == 1 and page.texts(".vote") == []
    answers(*["MODEL "] * 3000)
    page.type("#ask", "And stopped?\n")
    page.until("chat.turns.at(-1).answers?.every((answer) => answer.text.length > 20)")
    page.type("#ask", "\ue00c")
    page.until("document.querySelector('.vote')")
    page.click(".vote button:nth-of-type(3)")
    page.until("!document.querySelector('.vote')")
    assert page.texts("#turns .hint")[-1].endswith("training will skip it: unfinished answer")


def test_nothing_becomes_markup(page, answers):
    evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    lines = [
        evil, f"**{evil}**", f"`{evil}`", f"[{evil}](https://a.example/\"onclick=hacked=1)", f"# {evil}",
        "[x](javascript:window.hacked=1)", "![x](https://a.example/x.png)", f"- {evil}\n> {evil}",
        f"| {evil} | b |\n|---|---|\n| {evil} | d |", f"```{evil}\n{evil}\n```",
    ]  # fmt: skip
    answers("\n\n".join(lines))
    page.ask(evil)
    page.click("#show")
    page.click("#new")
    page.ask(evil)
    page.click("#show")
    page.click("#new")
    page.ask(evil)
    assert page.js("return [window.hacked, document.querySelectorAll('main img, main script').length]") == [None, 0]
    assert page.texts(".said")[0] == evil and page.texts()[0].count("onerror") >= 9
    hrefs = {node.get_attribute("href") for node in page.all(".text a")}
    assert hrefs and all(href.startswith("https://a.example/") for href in hrefs)
    assert page.texts("#chats li")[0].startswith("<img")


def test_markdown(page, answers):
    """Blocks that have ended are rendered while the answer is written, the last one when it ends."""
    pieces = ["# A *b*\n", "\n__c__ _d_ \\*e\\*\nf\n\n", "```py\nx = 1\n", "```\n"]
    pieces += ["\n- [x] g\n\n| h |\n|--:|\n| $i^2$ |\n", "\n![j](https://a.example/j.png)"]
    answers(*pieces[:3], *[""] * 50, *pieces[3:])
    page.type("#ask", "?\n")
    page.until("document.querySelector('.answer h1')")
    page.until("document.querySelector('.rest').textContent.startsWith('```py')")
    assert page.all(".code") == []
    page.until("!runs.size && !document.querySelector('.rest').textContent")
    shape_of = """
        const box = document.querySelector(".text").cloneNode(true);
        box.querySelectorAll(".code > div, .rest").forEach((node) => node.remove());
        return box.innerHTML.replace(/\\s*\\n\\s*|disabled="" | disabled=""/g, "")"""
    shape = page.js(shape_of)
    assert shape == (
        '<h1>A <em>b</em></h1><p><strong>c</strong> <em>d</em> *e*<br>f</p>'
        '<div class="code"><pre tabindex="0"><code class="language-py">x = 1</code></pre></div>'
        '<ul><li><input checked="checked" type="checkbox"> g</li></ul>'
        '<table><thead><tr><th align="right">h</th></tr></thead><tbody><tr><td align="right">'
        '<math display="inline"><mrow><msup><mi>i</mi><mn>2</mn></msup></mrow></math></td></tr></tbody></table>'
        '<p><a href="https://a.example/j.png" target="_blank" rel="noopener noreferrer">j</a></p>'
    )  # fmt: skip
    page.reload()
    page.until("!document.querySelector('.rest').textContent")
    assert page.js(shape_of) == shape


def test_probabilities(page, answers):
    page.click("#show")
    answers("A", "A")
    page.ask("?")
    assert page.texts(".tokens span") and len(page.all(".core i")) == 2
    page.js("document.querySelector('.tokens').focus()")
    page.driver.switch_to.active_element.send_keys("\ue014")  # right
    rows = page.texts("#alternatives div")
    assert len(rows) == 3 and [row.split()[-1] for row in rows] == ["61%", "22%", "5%"]
    assert page.all("#alternatives .chosen")[0].text == rows[0]
    page.type(".tokens", "\ue00c")
    assert not page.all("#alternatives")[0].is_displayed()
    over = "dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    page.js("document.querySelector('.core i:last-child')." + over)
    assert page.all("#alternatives")[0].is_displayed() and page.all(".tokens .here") == page.all(".tokens span")[1:]


def test_probabilities_of_old_answers_stay(page, answers):
    """The switch only shows them. While an answer grows, what is drawn stays."""
    answers("A", "B")
    page.ask("?")
    page.click("#show")
    assert page.texts(".tokens span") == ["A", "A"]  # the names of the fixture's ids
    page.reload()
    assert page.texts(".tokens span") == ["A", "A"]
    answers(*["word "] * 60)
    page.type("#ask", "!\n")
    page.until("document.querySelectorAll('.tokens')[1]?.children.length > 3")
    page.js("document.querySelectorAll('.tokens')[1].firstChild.dataset.mark = 'old'")
    page.until("document.querySelectorAll('.tokens')[1].children.length > 20")
    assert page.js("return document.querySelectorAll('.tokens')[1].firstChild.dataset.mark") == "old"


def test_a_cut_answer_goes_on(page, answers):
    seen = answers(*["one "] * 3000)
    page.type("#ask", "Talk.\n")
    page.until("chat.turns[1]?.answers[0].text.length > 20")
    page.type("#ask", "\ue00c")
    page.until("!runs.size")
    text = page.js("return chat.turns[1].answers[0].text")
    seen = answers("and **two**")
    page.click(".proceed")
    page.until("!runs.size && document.querySelector('.text strong')")
    assert seen[-1]["prompt"].endswith("assistant\n" + text.rstrip() + text[len(text.rstrip()) :])
    assert page.js("return chat.turns[1].answers[0].text") == text + "and **two**"
    assert page.all(".proceed") == []


def test_a_full_context_drops_the_oldest_turns(page, answers):
    answers("long " * 200)
    for text in ("first", "second", "third"):
        page.ask(text)
    page.js("chat.turns[5].answers[0].used = 500")
    seen = answers("fine")
    page.ask("fourth")
    page.driver.get_log("browser")  # what did not fit was refused
    assert "first" not in seen[-1]["prompt"] and "fourth" in seen[-1]["prompt"]
    assert page.texts("#turns .hint")[-1].startswith("The context is full. Earlier turns left out: ")
    page.js("chat.turns[7].answers[0].used = 213; drawContext()")
    assert page.texts("#context") == ["213 / 512 tokens"]


def test_chats_are_found_renamed_and_exported(page, answers):
    answers("about cats")
    page.ask("first")
    page.click("#new")
    answers("about dogs")
    page.ask("second")
    page.type("#search", "CATS")
    page.js("window.prompt = () => ' named '")
    page.js("document.querySelector('#chats .rename').click()")
    assert page.texts("#chats li > :first-child") == ["named"]
    page.js("URL.createObjectURL = (blob) => { blob.text().then((text) => { window.exported = text; }); return '#'; }")
    page.click("#export")
    page.until("window.exported")
    row = {"messages": [{"role": "user", "content": "first"}, {"role": "assistant", "content": "about cats"}]}
    assert json.loads(page.js("return window.exported")) == row
    page.reload()
    assert page.texts("#chats li > :first-child") == ["second", "named"]  # in the order of their last answers


def test_calls_of_tools_and_what_these_said(page, answers):
    """They are shown as text above the answer, are kept, and are said again with the next question."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    turn = [{"role": "assistant", "content": "Let me see.\n" + call}, {"role": "tool", "content": "<b>5</b>"}]
    seen = answers("Let me ", "see.", ToolTurn(turn, [1], 1, 0), "It is ", "5.")
    page.ask("2 + 3?")
    shown = ['Let me see.\n{"name": "add", "arguments": {"a": 2}}', "→ <b>5</b>"]
    for _ in range(2):
        assert page.texts(".call") == shown and page.texts() == ["It is 5."]
        page.reload()
    page.ask("And?")
    assert all(part in seen[-1]["prompt"] for part in (call, "tool\n<b>5</b>", "assistant\nIt is 5."))
    assert page.js("return messagesBefore(2)").pop(1) == turn[0]


def test_switches(page):
    background = "return getComputedStyle(document.body).backgroundColor"
    page.click("#settings")
    for theme, colour in (("dark", "rgb(25, 22, 18)"), ("light", "rgb(247, 243, 234)")):
        page.click(f"#theme option[value={theme}]")
        assert page.js(background) == colour
    page.click("#language option[value=zh]")
    assert page.texts("#drawer-title") == ["设置"]
    page.type("#stops", "User:\n\nEND")
    assert page.js("return asked().stop") == ["User:", "END"]
    page.click("#reset")
    assert page.texts("#drawer-title") == ["Settings"] and page.js("return asked().stop ?? null") is None
    page.click("#close")


def test_site_data_may_be_blocked(page, answers):
    blocked = """for (const name of ["localStorage", "sessionStorage"]) {
        Object.defineProperty(window, name, { get() { throw new DOMException("blocked", "SecurityError"); } }); }"""
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": blocked})
    try:
        page.reload()
        answers("fine")
        page.ask("?")
        assert page.texts() == ["fine"] and len(page.texts("#chats li")) == 1
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_tokens_of_a_real_answer_are_its_text(page):
    page.click("#show")
    page.ask("从前")
    answer = "chat.turns[1].answers[0]"
    text, tokens = page.js(f"return [{answer}.text, {answer}.tokens.map((token) => token.text).join('')]")
    assert text and tokens.rstrip("\ufffd") == text.rstrip("\ufffd")


def test_chinese(page, answers):
    agent = page.js("return navigator.userAgent")
    override = lambda language: page.driver.execute_cdp_cmd(  # noqa: E731
        "Emulation.setUserAgentOverride", {"userAgent": agent, "acceptLanguage": language}
    )
    override("zh-CN")
    try:
        page.reload()
        assert page.js("return document.documentElement.lang") == "zh-CN"
        assert page.texts("#new") == ["新对话"] and page.all("#ask")[0].get_attribute("placeholder") == "问点什么"
        answers("你", "好")
        page.click("#ask")
        page.driver.execute_cdp_cmd("Input.insertText", {"text": "写一首诗"})
        enter = "{key: 'Enter', isComposing: true, bubbles: true}"
        page.js(f"at('ask').dispatchEvent(new KeyboardEvent('keydown', {enter}))")
        assert page.js("return chat.turns.length") == 0  # this Enter chose a word of the input method
        page.ask("。")
        assert page.texts(".said") == ["写一首诗。"] and page.texts() == ["你好"]
    finally:
        override("en-US")


def test_words_are_the_same_in_both_languages(page):
    missing, unused = page.js("""
        const en = Object.keys(WORDS.en), zh = Object.keys(WORDS.zh);
        return [en.filter((word) => !zh.includes(word) || String(WORDS.en[word]).split('{}').length
            !== String(WORDS.zh[word]).split('{}').length), zh.filter((word) => !en.includes(word))]""")
    assert missing == [] and unused == []


def test_a_model_that_is_not_tuned_is_named(page, server):
    assert "It may be wrong." in page.texts("#about")[0]
    for model in server[1].models.values():
        model.card["tuned"] = False
    try:
        page.reload()
        assert "continues the text instead of answering" in page.texts("#about")[0]
    finally:
        for model in server[1].models.values():
            model.card["tuned"] = True


def test_keyboard_and_names(page, answers):
    answers("fine")
    page.ask("?")
    page.click("#settings")
    nameless = page.js("""
        const kinds = "button, input, textarea, select, [role=group], section, nav, dialog";
        const named = (node) => node.ariaLabel || node.textContent.trim() || node.labels?.length
            || node.getAttribute("aria-labelledby");
        return [...document.querySelectorAll(kinds)].filter((n) => !named(n)).map((n) => n.outerHTML)""")
    assert nameless == []
    assert page.js("return document.activeElement.closest('dialog').id") == "drawer"
    page.driver.switch_to.active_element.send_keys("\ue00c")
    page.until("!at('drawer').open")
    page.click("#ask")
    order = []
    for _ in range(12):
        page.driver.switch_to.active_element.send_keys("\ue004")
        name, outline = page.js("""
            const node = document.activeElement;
            return [node.id || node.className || node.tagName, getComputedStyle(node).outlineStyle]""")
        order.append(name)
        assert outline != "none" or name == "BODY", order  # where the focus is can be seen
    assert "send" in order and "new" in order
    assert page.js("return at('status').textContent") == "fine"


def test_a_phone(page, answers):
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        answers("x" * 300 + "\n```\n" + "y" * 300 + "\n```\n")
        page.click("#compare")
        page.ask("z" * 300)
        assert page.js("return document.documentElement.scrollWidth") == 390
        assert page.js("return at('log').scrollWidth <= at('log').clientWidth")
        assert not page.all("#new")[0].is_displayed()
        page.click("#menu")
        page.until("getComputedStyle(at('side')).transform === 'none'")
        page.click("#new")
        assert page.texts() == []
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_key_is_asked_for(driver, directories):
    with serving(directories[0], api_key="sesame", max_new_tokens=5) as (url, _):
        page = Page(driver, url + "/")
        page.open()
        page.until("at('key').open")
        page.type("#key input", "wrong\n")
        page.until("at('key').open && at('key').innerText.includes('That is not its key')")
        page.type("#key input", "sesame\n")
        page.until("models.length")
        page.ask("?")
        assert page.texts(".problem") == [] and page.js("return chat.turns[1].answers[0].text")
        assert "sesame" not in page.js("return JSON.stringify(localStorage)")
    driver.get_log("browser")
