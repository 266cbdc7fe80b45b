"""The page in a real Chromium: what each page shows, what keys and buttons do, and that text stays text."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.view.conftest import (
    ATTACKS,
    conversation,
    episode,
    note_token_numbers,
    write_evaluation,
    write_run,
)

from rllm.data.registry import DatasetRegistry
from rllm.gateway.ledger import Ledger
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Outcome
from rllm.types.wire import CallRecord
from rllm.view.export import exported_page, requests_of
from rllm.view.server import ViewServer
from rllm.view.sources import Sources
from rllm.worker.store import Run, RunStore, canonical_json, digest_of

Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    """Two runs with curves on one world, two evaluations, and a run of what attackers write."""
    patch, root = pytest.MonkeyPatch(), tmp_path_factory.mktemp("world")
    patch.setenv("RLLM_HOME", str(root / "home"))
    for seed in range(2):
        lines = [
            {"phase": "train", "step": step, "time_s": 2.0 * step, "success": (0.3 + seed / 10) + step / 20}
            | {"groups": 12, "groups_tied": 10, "episodes": 24, "failed": 0, "step_s": 2.0, "rollout_s": 1.0}
            | {"entropy": 1.0 - step / 20, "grad_norm": 0.5, "kl": 0.001}
            for step in range(10)
        ]
        saved = {
            ("train", step): [
                episode(f"test-{task}", attempt, conversation(["Left", word], reward=float(word == "Down")))
                for task in range(12)
                for attempt, word in enumerate(["Down", "Up"])
            ]
            for step in range(2)
        }
        saved["after", 0] = [
            episode(f"test-{task}", 0, conversation(["Down"], reward=float(task < 5 + 5 * seed)))
            for task in range(12)
        ]
        config = {
            "seed": seed,
            "steps": 10,
            "task": {"environment": "frozenlake"},
            "optimizer": {"learning_rate": 0.1},
        }
        write_run(root / "runs" / f"lake-{seed}", saved, lines=lines, config=config)
    write_evaluation(
        root / "runs" / "sums", {f"sum-{number}": [number % 3 > 0, None] for number in range(70)}
    )
    write_evaluation(root / "runs" / "sums-later", {f"sum-{number}": [True] for number in range(5)})
    hostile = [conversation(list(ATTACKS), asked=text) for text in ATTACKS]
    for text, trajectory in zip(ATTACKS, hostile, strict=True):
        trajectory.name = text
        trajectory.info["error"] = {"type": text, "message": text}
    episodes = [
        episode(text.encode("utf-8", "replace").decode(), 0, trajectory, outcome=Outcome.POLICY_FAILURE)
        for text, trajectory in zip(ATTACKS, hostile, strict=True)
    ]
    write_run(
        root / "runs" / "hostile",
        {("after", 0): episodes},
        config={"seed": 0, "task": {"environment": ATTACKS[0]}, **{text: text for text in ATTACKS}},
        lines=[{"phase": ATTACKS[0], "step": step, ATTACKS[1]: step, ATTACKS[0]: 1.0} for step in range(3)],
    )
    write_worker_runs(root / "runs" / "sorter")
    asyncio.run(write_sessions(root / "runs" / "calls"))
    model = root / "runs" / "lake-0" / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": [ATTACKS[1]], "hidden_size": 64}))
    rows = [{"question": text, "answer": str(number)} for number, text in enumerate(ATTACKS[:-2] * 6)]
    DatasetRegistry.register_dataset("sums", rows, "test", description="Small sums")
    server = ViewServer(Sources([root / "runs"]), token="t" * 24)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.stop()
    thread.join()
    patch.undo()


def write_worker_runs(directory: Path) -> None:
    """A run for each text of an attacker, the last one failed and corrected by its reader."""
    store = RunStore(directory)
    for number, text in enumerate(PLAIN_ATTACKS):
        inputs = canonical_json({"text": text})
        run = Run(
            worker="sorter", key=f"key-{number}", id=f"run-{number}", digest=digest_of(inputs), attempts=0
        )
        store.start_attempt(run, inputs, f"session-{number}")
        response = json.dumps({"outputs": {"label": text}}).encode()
        store.end_attempt(run, status="ok", error=None, result=json.dumps({"label": text}), response=response)
    store.add_feedback("run-0", {"score": 0.5, "label": ATTACKS[0], "outputs": {"label": ATTACKS[0]}})
    store.close()


async def write_sessions(directory: Path) -> None:
    """A session of 120 calls, each going on from the one before, and one of an attacker."""
    with Ledger.open(directory) as ledger:
        messages: list[dict[str, Any]] = []
        for number in range(120):
            messages = [*messages, {"role": "user", "content": f"question {number}"}]
            reply = {"role": "assistant", "content": f"reply {number}"}
            record = CallRecord(
                id=f"call-{number}", session="program", messages=messages, response=reply, model="m"
            )
            await ledger.append([record])
            messages = [*messages, reply]
        for number, text in enumerate(PLAIN_ATTACKS):
            record = CallRecord(
                id=f"hostile-{number}",
                session="hostile",
                messages=[{"role": "user", "content": text}],
                response={"role": "assistant", "content": text, "tool_calls": [{"function": {"name": text}}]},
                model=text,
            )
            await ledger.append([record])


PLAIN_ATTACKS = ATTACKS[:-2]
"""Those that a database takes as text."""
RUN_PAGES = (
    *("runs", "run?run=lake-0", "compare?run=lake-0&run=lake-1", "step?run=lake-0", "episodes?run=lake-0"),
    *("episode?run=lake-0&id=1", "episode?run=hostile&id=2", "evaluation?run=sums"),
    *("evaluation?run=sums&by=attempt", "attempts?run=lake-0&task=test-3&phase=train&step=0&order=reward"),
)
LIBRARY_PAGES = (
    *("datasets", "dataset?name=sums&offset=50", "models", "workers", "sessions"),
    *("worker_run?store=sorter&id=run-0", "session?ledger=calls&id=program&offset=100"),
)


@pytest.fixture
def visit(world: ViewServer, chromium: Any) -> Iterator[Visit]:
    """Opens a place of the page in a browser of its own; scripts that fail or are refused fail the test."""
    problems: list[str] = []
    contexts: list[Any] = []

    def open_page(place: str, *, width: int = 1400, height: int = 1000, **settings: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **settings)
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda note: problems.append(note.text) if is_problem(note) else None)
        page.goto(world.url)
        page.goto(f"{world.origin}/#/{place}")
        page.wait_for_selector("h1, [role=alert]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems, problems


def is_problem(note: Any) -> bool:
    """An answer of 404 has a sentence on the page."""
    return note.type in ("error", "warning") and "Failed to load resource" not in note.text


def text_of(page: Any) -> str:
    return page.inner_text("#content")


def test_from_the_runs_to_a_token_of_an_episode(visit: Visit) -> None:
    page = visit("runs")
    page.click("text=lake-0")
    page.click("text=Steps and groups")
    page.click("#content >> text=test-3")
    page.click("text=attempt 1")
    page.wait_for_selector(".token")
    assert page.title().startswith("test-3, attempt 1")
    page.hover(".tokens .token")
    page.wait_for_selector(".tokens .reading >> text=log-probability -0.500")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "texts"),
    [
        ("runs", ["lake-0", "lake-1", "frozenlake", "stopped", "finished", "10/10"]),
        ("run?run=lake-0", ["83% of groups tie", "filters.dynamic", "Entropy", "Episodes by step"]),
        ("compare?run=lake-0&run=lake-1", ["41.7 % to 83.3 %", "+41.7 points [", "seed", ": 5 better"]),
        ("step?run=lake-0&step=1", ["test-11", "± 0.5", "0 of 12 groups tie"]),
        ("attempts?run=lake-0&phase=train&step=0&task=test-3", ["attempt 0 best", "turn 2", "This task in"]),
        ("episodes?run=lake-0", ["test-10", "env done", "1 to 60 of 60 episodes"]),
        ("episode?run=lake-0&id=1", ["Where to?", "Then, after 0?", "Timing: 600 ms", "by number"]),
        ("evaluation?run=sums", ["sums: m", "32.9 %", "140", "sum-9", "because attempts at one"]),
        ("evaluation?run=sums&by=attempt&verdict=failed", ["answered 500", "1 to 50 of 70 attempts"]),
        ("evaluation?run=sums&beside=sums-later", ["in sums-later", "not attempted", "100 % [20.7, 100.0]"]),
        ("evaluation?run=lake-0", ["success, after", "41.7 %", "test-0"]),
        ("datasets", ["sums", "Small sums", "question, answer"]),
        ("dataset?name=sums", ["1 to 50 of 60 rows", "<script>window.attacked = 1</script>"]),
        ("models", ["1 model of runs", "lake-0", "64", "<img src=x"]),
        ("workers", ["10 runs in sorter", "key-9", "0.5"]),
        ("worker_run?store=sorter&id=run-0", ["Corrected", "Attempt 1: ok", "<script>window.attacked"]),
        ("sessions", ["Sessions in calls", "program", "120"]),
        ("session?ledger=calls&id=program", ["120 calls", "Call 1", "question 0", "reply 0", "later →"]),
        ("nowhere", ["There is no page “nowhere”"]),
        ("run?run=nobody", ["There is no run 'nobody' here"]),
    ],
)  # fmt: skip
def test_each_page_shows_what_it_is_for(visit: Visit, place: str, texts: list[str]) -> None:
    page = visit(place)
    for text in texts:
        page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)


@pytest.mark.slow
def test_runs_are_filtered_sorted_chosen_and_compared(visit: Visit) -> None:
    page = visit("runs")
    names = "() => [...document.querySelectorAll('tbody tr a')].map(each => each.textContent)"
    page.keyboard.press("/")
    page.keyboard.type("frozen seed:1")
    assert page.evaluate(names) == ["lake-1"]
    page.fill("[type=search]", "lake")
    page.click("button.sort >> text=run")
    assert page.evaluate(names) == ["lake-1", "lake-0"]
    page.click("button.sort >> text=run")
    assert page.evaluate(names) == ["lake-0", "lake-1"]
    page.check("[aria-label='Compare lake-0']")
    page.check("[aria-label='Compare lake-1']")
    page.reload()  # what was chosen is in the address
    page.wait_for_selector("tbody tr")
    assert page.evaluate(names) == ["lake-0", "lake-1"]
    page.click("text=Compare 2 runs")
    page.wait_for_selector("text=Settings that differ")
    assert page.locator(".chart canvas").count() >= 1


@pytest.mark.slow
def test_tags_and_notes_are_kept_and_filtered_by(visit: Visit) -> None:
    page = visit("run?run=lake-1")
    page.fill("[aria-label='Tags of this run']", "best, <b>bold</b>")
    page.fill("[aria-label='Note on this run']", "publish this one")
    page.press("[aria-label='Note on this run']", "Tab")
    page.wait_for_selector("text=Tags and note are kept.")
    page = visit("runs?filter=tag:best")
    page.wait_for_selector("td >> text=publish this one")
    assert page.locator("tbody tr").count() == 1
    assert page.inner_text(".tag >> nth=1") == "<b>bold</b>"


@pytest.mark.slow
def test_keys_lead_through_attempts_turns_and_tasks(visit: Visit) -> None:
    page = visit("episode?run=lake-0&id=1")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.id") == "turn-0-1"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.title.startsWith('test-0, attempt 1')")
    page.keyboard.press("n")
    page.wait_for_function("() => location.hash.includes('id=3')")
    page.keyboard.press("?")
    assert "the next attempt" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("g")
    page.wait_for_selector("text=choose two runs")
    page = visit("step?run=lake-0&step=0")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "test-0"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('step=1')")


@pytest.mark.slow
def test_tokens_are_coloured_and_copies_are_made(visit: Visit) -> None:
    page = visit("episode?run=lake-0&id=1")
    page.select_option("#coloring", "version")
    page.wait_for_selector(".tokens .token.k4")
    clipboard = "navigator.clipboard.readText()"
    page.click("text=Copy messages >> nth=0")
    page.wait_for_function("() => document.getElementById('status').textContent.includes('copied')")
    assert json.loads(page.evaluate(clipboard))[-1] == {"role": "assistant", "content": "Left"}
    page.click("text=Copy curl >> nth=1")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Copy curl')")
    assert page.evaluate(clipboard).startswith('curl "${BASE_URL')
    page.click("text=Copy link >> nth=1")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Copy link')")
    link = page.evaluate(clipboard)
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("#turn-0-1")
    page.click("text=Exact prompt and ids >> nth=1")
    page.wait_for_selector("text=6 prompt ids, 2 answer ids")


@pytest.mark.slow
def test_tokens_are_coloured_by_what_the_trainer_computed(visit: Visit, world: ViewServer) -> None:
    nan = float("nan")
    numbers = [[0.5, 0.5, -2.0, nan], [1.0, 1.25, 0.5, nan], [0.125, 3.0, 1.5, nan]]
    note_token_numbers(world.sources.run("lake-1").path, "test-3", numbers)
    page = visit("attempts?run=lake-1&phase=train&step=0&task=test-3")
    page.wait_for_selector("text=advantage -0.333")
    page.click("text=attempt 0")
    page.wait_for_selector("#coloring")
    classes: dict[str, list[str]] = {}
    for kind in ("advantage", "ratio", "entropy"):
        page.select_option("#coloring", kind)
        page.wait_for_selector(f".tokens[aria-label$='{kind if kind != 'ratio' else 'importance ratio'}']")
        classes[kind] = [
            each.get_attribute("class").split()[-1] for each in page.query_selector_all(".tokens .token")
        ]
    assert classes == {
        "advantage": ["p2", "p2", "n8", "token"],
        "ratio": ["p0", "p5", "n8", "token"],
        "entropy": ["s0", "s8", "s4", "token"],
    }
    page.hover(".tokens .token >> nth=1")
    reading = page.text_content(".tokens .reading >> nth=0")
    for words in ("advantage 0.5", "ratio 1.25", "entropy 3", "log-probability -2.000", "policy version 4"):
        assert words in reading


@pytest.mark.slow
def test_an_evaluation_is_filtered_searched_and_opened(visit: Visit) -> None:
    page = visit("evaluation?run=sums")
    page.select_option("label:has-text('by') select >> nth=0", "attempt")
    page.wait_for_selector("h2:has-text('Attempts')")
    page.select_option("label:has-text('went') select", "wrong")
    page.wait_for_selector("text=1 to 24 of 24 attempts")
    page.click("summary:has-text('because sum-3') >> nth=0")
    page.wait_for_selector("pre:has-text('What is sum-3?')")
    page.fill("[type=search]", '"sum-66"')
    page.press("[type=search]", "Enter")
    page.wait_for_selector("text=1 to 1 of 1 attempt")
    page.wait_for_selector("mark")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["evaluation?run=sums", "run?run=lake-0", "episode?run=lake-0&id=1", "runs"]
)
def test_a_page_that_is_saved_opens_alone(visit: Visit, chromium: Any, tmp_path: Path, place: str) -> None:
    page = visit(place)
    page.wait_for_timeout(300)
    with page.expect_download() as download:
        page.click("[aria-label='Save this page as one file']")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    context = chromium.new_context(offline=True)
    alone, problems = context.new_page(), []
    alone.on("pageerror", lambda error: problems.append(str(error)))
    alone.on(
        "console", lambda note: problems.append(note.text) if note.type in ("error", "warning") else None
    )
    alone.goto(file.as_uri())
    alone.wait_for_selector("h1")
    assert alone.inner_text("h1") == page.inner_text("h1")
    assert alone.locator("[role=alert], .problem").count() == page.locator("[role=alert], .problem").count()
    alone.evaluate("location.hash = '#/episodes?run=lake-1'")
    alone.wait_for_selector("text=This file does not hold it")
    assert problems == []
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", [*RUN_PAGES, *LIBRARY_PAGES])
def test_a_page_that_the_command_wrote_holds_all_that_it_shows(
    chromium: Any, world: ViewServer, tmp_path: Path, place: str
) -> None:
    file = tmp_path / "page.html"
    file.write_text(exported_page(world.sources, place, requests_of(world.sources, place)))
    context = chromium.new_context(offline=True)
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("h1, [role=alert]")
    page.wait_for_timeout(200)
    assert "This file does not hold it" not in page.inner_text("body")
    context.close()


@pytest.mark.slow
def test_a_link_leads_to_its_turn(visit: Visit) -> None:
    page = visit("episode?run=hostile&id=1&turn=9")
    page.wait_for_function("() => document.activeElement.id === 'turn-0-9'")
    assert page.evaluate("document.activeElement.getBoundingClientRect().top < innerHeight")
    page.keyboard.press("ArrowUp")
    assert page.url.endswith("turn=8")
    page.reload()
    page.wait_for_function("() => document.activeElement.id === 'turn-0-8'")


@pytest.mark.slow
def test_lists_are_filtered_and_calls_are_walked_through(visit: Visit) -> None:
    page = visit("workers")
    page.keyboard.press("/")
    page.keyboard.type("key-3")
    assert page.locator("tbody tr:visible").count() == 1
    page.reload()
    page.wait_for_selector("text=key-3")
    assert page.locator("tbody tr:visible").count() == 1
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "key-3"
    page = visit("session?ledger=calls&id=program")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Call 2"
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("text=question 119")
    page = visit("step?run=lake-0&step=1")
    page.fill("[type=search]", "test-7")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("h1:has-text('train step 0')")
    assert page.locator("tbody tr").count() == 1


@pytest.mark.slow
def test_what_is_copied_runs(visit: Visit, tmp_path: Path) -> None:
    page = visit("episode?run=lake-0&id=1")
    page.click("text=Copy pytest >> nth=1")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Copy pytest')")
    test = tmp_path / "test_copied.py"
    test.write_text(page.evaluate("navigator.clipboard.readText()"))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(test)]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert "1 passed" in ran.stdout, ran.stdout
    test.write_text(test.read_text().replace('"Down"', '"Up"'))
    assert subprocess.run(words, capture_output=True, cwd=tmp_path).returncode == 1
    page.click("text=Copy curl >> nth=1")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Copy curl')")
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nfor each in "$@"; do printf "%s\\n" "$each"; done\n')
    curl.chmod(0o755)
    ran = subprocess.run(
        ["/bin/sh", "-c", page.evaluate("navigator.clipboard.readText()")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "API_KEY": "k", "BASE_URL": "http://h/v1"},
        capture_output=True,
        text=True,
    )
    address, *_, body = ran.stdout.splitlines()
    assert address == "http://h/v1/chat/completions"
    assert json.loads(body)["messages"][-1] == {"role": "user", "content": "Then, after 0?"}


@pytest.mark.slow
def test_a_live_run_grows_on_the_page(visit: Visit, world: ViewServer) -> None:
    path = world.sources.roots[0] / "live"
    line = {"phase": "train", "step": 0, "time_s": 1.0, "success": 0.125}
    with RunDirectory.create_or_open(path) as run:
        run.write_config({"seed": 0, "steps": 5, "task": {"environment": "frozenlake"}})
        run.metrics_path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "step": 1}) + "\n")
        page = visit("run?run=live")
        page.wait_for_selector("text=running")
        with run.metrics_path.open("a") as file:
            file.write(json.dumps({**line, "step": 2, "success": 0.875}) + "\n")
        page.wait_for_selector("figcaption:has-text('88 %')")


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 3840])
def test_no_page_is_wider_than_the_window(visit: Visit, width: int) -> None:
    page = visit("runs", width=width)
    for place in (*RUN_PAGES, *LIBRARY_PAGES, "session?ledger=calls&id=hostile"):
        page.evaluate("place => { location.hash = `#/${place}` }", place)
        page.wait_for_function(
            "place => !document.querySelector('#content').hasAttribute('aria-busy')", arg=place
        )
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place


@pytest.mark.slow
def test_colours_follow_the_system_and_the_button(visit: Visit) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    page = visit("runs", color_scheme="dark")
    dark = page.evaluate(paper)
    assert dark != "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    page.reload()
    page.wait_for_selector("h1")
    assert page.evaluate(paper) == "rgb(255, 255, 255)", "the choice is kept"
    assert visit("runs", color_scheme="light").evaluate(paper) == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_everything_that_can_be_used_has_a_name(visit: Visit) -> None:
    page = visit("runs")
    for place in (*RUN_PAGES, *LIBRARY_PAGES):
        page.evaluate("place => { location.hash = `#/${place}` }", place)
        page.wait_for_timeout(400)
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, a, input, select, textarea, img, article, section, "
            "[role=img], [role=region], figure, table')]"
            ".filter(each => !each.getAttribute('aria-label') && !each.textContent.trim() && !each.title"
            " && !each.alt"
            " && !each.labels?.length).map(each => each.outerHTML.slice(0, 200))"
        )
        assert nameless == [], place


HOSTILE = [
    *("runs", "run?run=hostile", "episodes?run=hostile", "step?run=hostile&phase=after"),
    *("evaluation?run=hostile", "evaluation?run=hostile&by=attempt", "dataset?name=sums", "models"),
    *("workers", "worker_run?store=sorter&id=run-0", "session?ledger=calls&id=hostile"),
    *(
        "compare?run=hostile&run=lake-0",
        "datasets",
        f"attempts?run=hostile&phase=after&step=0&task={quote(ATTACKS[0])}",
    ),
    *(f"episode?run=hostile&id={number + 1}" for number in range(len(ATTACKS))),
]


@pytest.mark.slow
@pytest.mark.parametrize("place", HOSTILE)
def test_text_of_models_is_text(visit: Visit, place: str) -> None:
    page = visit(place)
    page.wait_for_timeout(300)
    for each in page.locator("summary").all()[:30]:
        each.evaluate("each => { each.parentElement.open = true }")
    page.wait_for_timeout(200)
    assert page.evaluate("window.attacked") is None
    strangers = "script, iframe, style, meta, base, form, [onload], [onerror], a[href^='javascript']"
    assert page.locator(f"#content :is({strangers})").count() == 0
    assert page.url.startswith("http://127.0.0.1")
    if re.search(r"episode\?", place):
        assert "<script>window.attacked = 1</script>" in text_of(page)
