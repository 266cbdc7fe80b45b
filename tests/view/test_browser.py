"""The page in a real Chromium: what each page shows, what keys and buttons do, and that text stays text."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Outcome
from rllm.view.server import ViewServer
from rllm.view.sources import Sources

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
    rows = [{"question": text, "answer": str(number)} for number, text in enumerate(ATTACKS[:-2] * 6)]
    DatasetRegistry.register_dataset("sums", rows, "test", description="Small sums")
    server = ViewServer(Sources([root / "runs"]), token="t" * 24)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.stop()
    thread.join()
    patch.undo()


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
        ("models", ["No run here has made one yet"]),
        ("workers", ["There is no runs.sqlite"]),
        ("sessions", ["There is no ledger"]),
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
    for place in (
        *("run?run=lake-0", "compare?run=lake-0&run=lake-1", "step?run=lake-0", "episodes?run=lake-0"),
        *(
            "episode?run=lake-0&id=1",
            "evaluation?run=sums",
            "attempts?run=lake-0&task=test-3&phase=train&step=0",
        ),
        *("runs", "episode?run=hostile&id=2"),
    ):
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
    for place in (
        "runs",
        "run?run=lake-0",
        "episode?run=lake-0&id=1",
        "evaluation?run=sums",
        "episodes?run=lake-0",
    ):
        page.evaluate("place => { location.hash = `#/${place}` }", place)
        page.wait_for_timeout(400)
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, a, input, select, [role=img], figure, table')]"
            ".filter(each => !each.getAttribute('aria-label') && !each.textContent.trim() && !each.title"
            " && !each.labels?.length).map(each => each.outerHTML.slice(0, 200))"
        )
        assert nameless == [], place


HOSTILE = [
    *("runs", "run?run=hostile", "episodes?run=hostile", "step?run=hostile&phase=after"),
    *("evaluation?run=hostile", "evaluation?run=hostile&by=attempt", "dataset?name=sums"),
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
