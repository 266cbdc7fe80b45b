"""A page as text, and actions on it, in a real Chromium."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rllm.environments.web import SiteRequest, SiteResponse, WebEnv
from rllm.environments.web.browser import browser_thread

Play = Callable[..., WebEnv]

FORM = """<title>Form</title><h1>Order</h1>
<label>Name <input id=name></label>
<input type=checkbox id=gift aria-label="Gift wrap"> <select id=size><option>S<option>M<option>L</select>
<button onclick="document.title = [name.value, gift.checked, size.value].join()" id=go>Send</button>
<button disabled>Off</button> <p style="display:none">hidden words</p> <p id=out>Nothing yet</p>
<script>const name = document.getElementById('name');
go.onclick = () => { out.textContent = [name.value, gift.checked, size.value].join(' ') }</script>"""


async def test_a_form_is_shown_filled_and_sent(play: Play) -> None:
    env = play(FORM, goal="Order M for Ada")
    text, info = await env.reset()
    assert text.splitlines() == [
        "Goal: Order M for Ada",
        'Page: "Form" "http://site.test/"',
        '[1] heading "Order"',
        '[2] textbox "Name" value=""',
        '[3] checkbox "Gift wrap"',
        '[4] combobox value="S"',
        '  [5] option "S" selected',
        '  [6] option "M"',
        '  [7] option "L"',
        '[8] button "Send"',
        '[9] button "Off" disabled',
        '[10] text "Nothing yet"',
    ]
    assert {each["function"]["name"] for each in info["tools"]} >= {"click", "fill"}
    await env.step('fill("2", "Ada")\nclick("3")\nselect_option("4", "M")')
    text, reward, done, info = await env.step('click("8")')
    assert '* [10] text "Ada true M"' in text
    assert '[2] textbox "Name" value="Ada"' in text
    assert (reward, done, info["valid"]) == (0.0, False, True)


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ('click("9")', "it is disabled"),
        ('click("99")', "no such element"),
        ('fill("8", "x")', "nothing can be written"),
        ('select_option("4", "XXL")', 'no option "XXL"; it has S, M, L'),
        ('select_option("4", ["S", "M"])', "takes one option"),
        ('press("2", "Bogus")', "no key 'Bogus'"),
        ('goto("http://example.org/")', "closed to this task"),
        ('goto("file:///etc/passwd")', "closed to this task"),
        ("go_back()", "no such page in the history"),
        ("tab_close()", "the only tab"),
        ("tab_focus(3)", "no tab 3"),
        ('upload_file("2", "x.txt")', "no file 'x.txt'"),
        ("Hello!", "is no call"),
    ],
)
@pytest.mark.slow
async def test_an_impossible_action_is_an_observation(play: Play, action: str, why: str) -> None:
    env = play(FORM)
    await env.reset()
    text, reward, done, info = await env.step(action)
    assert text.startswith("Error: ")
    assert why in text.splitlines()[0]
    assert '[8] button "Send"' in text
    assert (reward, done, info["valid"]) == (0.0, False, False)


async def test_tool_calls_act_like_text(play: Play) -> None:
    env = play(FORM)
    await env.reset()
    calls = [
        {"id": "a", "function": {"name": "fill", "arguments": '{"bid": "2", "value": "Bo"}'}},
        {"id": "b", "function": {"name": "click", "arguments": {"bid": "8"}}},
    ]
    observation, *_ = await env.step(calls)
    assert list(observation["tool_outputs"]) == ["a", "b"]
    assert '"Bo false S"' in observation["tool_outputs"]["b"]


@pytest.mark.slow
async def test_a_link_is_followed_and_gone_back_from_and_ids_are_not_used_twice(play: Play) -> None:
    slow = lambda request: SiteResponse(body=b"<title>Two</title><p>Second page</p>")  # noqa: E731
    env = play({"/": "<a href=/two>Go on</a>", "/two": slow})
    await env.reset()
    text, *_ = await env.step('click("1")')
    assert '"Two" "http://site.test/two"' in text
    assert '[2] text "Second page"' in text
    text, *_ = await env.step('click("1")')
    assert text.startswith("Error: click was impossible: it is no longer on the page")
    text, *_ = await env.step("go_back()")
    assert 'link "Go on"' in text
    text, *_ = await env.step("go_forward()")
    assert "Second page" in text


@pytest.mark.slow
async def test_what_loads_late_is_waited_for(play: Play) -> None:
    """A fetch that the click starts, and a change that follows it, are over before the page is shown."""
    page = """<button onclick="fetch('/data').then(r => r.text())
      .then(t => setTimeout(() => out.textContent = t, 20))">Load</button><p id=out>-</p>"""
    env = play({"/": page, "/data": "<b>the answer is 7</b>"})
    await env.reset()
    text, *_ = await env.step('click("1")')
    assert "the answer is 7" in text


@pytest.mark.slow
async def test_a_window_becomes_a_tab(play: Play) -> None:
    env = play(
        {
            "/": "<button onclick=\"window.open('/pop')\">Open</button>",
            "/pop": "<title>Pop</title><p>Popped up",
        }
    )
    await env.reset()
    text, *_ = await env.step('click("1")')
    assert "A new tab was opened: 1." in text
    assert "Tabs: 0, 1*" in text
    assert "Popped up" in text
    text, *_ = await env.step("tab_focus(0)")
    assert 'button "Open"' in text
    await env.step("tab_focus(1)")
    text, *_ = await env.step("tab_close()")
    assert "Tab 1 was closed." in text
    assert 'button "Open"' in text


@pytest.mark.slow
async def test_dialogs_are_decided_and_told(play: Play) -> None:
    env = play(
        "<button onclick=\"out.textContent = confirm('Sure?') + prompt('Who?', 'me')\">Ask</button>"
        "<p id=out>-"
    )
    await env.reset()
    text, *_ = await env.step('click("1")')
    assert 'A dialog (confirm) was accepted: "Sure?".' in text
    assert 'A prompt was accepted with its default text: "Who?".' in text
    assert '"trueme"' in text


@pytest.mark.slow
async def test_a_file_of_the_task_is_uploaded_and_no_other(play: Play) -> None:
    page = """<input type=file id=f><p id=out>-</p>
    <script>f.onchange = async () => { out.textContent = await f.files[0].text() }</script>"""
    env = play(page, files={"note.txt": "forty-two"})
    await env.reset()
    text, *_ = await env.step('upload_file("1", "/etc/passwd")')
    assert "there are: note.txt" in text
    text, *_ = await env.step('upload_file("1", "note.txt")')
    assert "forty-two" in text


@pytest.mark.slow
async def test_what_is_covered_cannot_be_clicked(play: Play) -> None:
    env = play(
        "<button>Below</button><div role=dialog style='position:fixed;inset:0;background:white'>Cover</div>"
    )
    await env.reset()
    text, *_ = await env.step('click("1")')
    assert text.startswith("Error: click was impossible: it is covered by a dialog")


@pytest.mark.slow
async def test_things_are_dragged_scrolled_and_typed(play: Play) -> None:
    page = """<div id=a style="width:50px;height:50px;background:red"></div>
    <div id=b style="width:50px;height:50px;background:blue;margin-top:50px"></div><input id=t>
    <div style="height:3000px"></div><button>Far</button>
    <script>let from = null; a.onmousedown = () => from = 1;
    b.onmouseup = () => { if (from) b.textContent = 'dropped' }
    t.onkeydown = e => { if (e.key === 'Enter') t.title = 'entered ' + t.value }</script>"""
    env = play(page)
    text, _ = await env.reset()
    assert '[1] box fill="rgb(255, 0, 0)"' in text
    assert "Far" not in text
    text, *_ = await env.step('drag_and_drop("1", "2")')
    assert "dropped" in text
    text, *_ = await env.step('click("3")\nkeyboard_type("hey")\nkeyboard_press("Enter")')
    assert 'textbox "entered hey" value="hey" focused' in text
    text, *_ = await env.step("scroll(0, 3000)")
    assert 'button "Far"' in text


async def test_an_answer_to_the_user_is_graded_as_answers_are(play: Play) -> None:
    task = {"question": "How many?", "grader": "math", "grading": {"answer": "42"}}
    for text, reward in (("42", 1.0), ("41", 0.0)):
        env = play("<p>42 things</p>", task=task, goal="How many?")
        await env.reset()
        _, paid, done, info = await env.step(f'send_msg_to_user("{text}")')
        assert (paid, done, info["is_correct"]) == (reward, True, reward == 1.0)


@pytest.mark.slow
async def test_turns_are_limited(play: Play) -> None:
    env = play("<p>x", max_turns=1)
    await env.reset()
    *_, done, info = await env.step("noop(1)")
    assert done
    assert info["TimeLimit.truncated"]


async def test_contexts_share_one_browser_and_nothing_else(play: Play) -> None:
    page = """<p id=out></p><script>localStorage.n = Number(localStorage.n || 0) + 1;
    document.cookie = 'n=' + localStorage.n;
    out.textContent = 'visit ' + localStorage.n + ' ' + document.cookie</script>"""
    envs = [play(page) for _ in range(3)]
    await envs[0].reset()
    num_started = browser_thread().num_started
    texts = await asyncio.gather(*(env.reset() for env in envs))
    assert all('"visit 1 n=1"' in text for text, _ in texts)
    for env in envs:
        text, _ = await env.reset()
        assert '"visit 1 n=1"' in text
    assert browser_thread().num_started == num_started


@pytest.mark.slow
async def test_a_page_knows_no_host_but_those_of_the_task(play: Play) -> None:
    """Fetches, frames, images, workers and websockets: all go through the proxy of the context."""
    requests: list[str] = []

    def count(request: SiteRequest) -> SiteResponse:
        requests.append(request.path)
        return SiteResponse(body=b"friend", headers=(("Access-Control-Allow-Origin", "*"),))

    page = """<p id=out></p><iframe src="http://evil.test/frame"></iframe><img src="http://127.0.0.1:PORT/x">
    <script>
    const w = new Worker(URL.createObjectURL(new Blob(["fetch('http://evil.test/worker')"])));
    try { new WebSocket('ws://evil.test/ws') } catch {}
    Promise.allSettled([fetch('http://friend.test/ok').then(r => r.text()), fetch('http://evil.test/x'),
      fetch('http://169.254.169.254/latest'), fetch('http://localhost:PORT/'), fetch('https://example.org/')])
      .then(all => out.textContent = all.map(one => one.status + (one.value ?? '')).join(' '))</script>"""
    num_local = 0

    def connected(reader: object, writer: asyncio.StreamWriter) -> None:
        nonlocal num_local
        num_local += 1
        writer.close()

    local = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = local.sockets[0].getsockname()[1]
    env = play(page.replace("PORT", str(port)), sites={"friend.test": count})
    await env.reset()
    text, _, _, info = await env.step("noop(500)")
    assert "fulfilledfriend rejected rejected rejected rejected" in text
    assert requests == ["/ok"]
    local.close()
    assert num_local == 0
    assert info["refused_hosts"].keys() >= {
        *("evil.test:80", "169.254.169.254:80", f"localhost:{port}", f"127.0.0.1:{port}", "example.org:443")
    }


def test_a_task_is_made_of_plain_values(chromium: str) -> None:
    env: Any = WebEnv.from_dict(
        {"start_url": "http://site.test/", "goal": "g", "token_budget": 50, "question": "q", "max_turns": 3}
    )
    assert (env.view.token_budget, env.max_turns, env.task) == (50, 3, {"question": "q"})
