"""Pages of data sets, models, workers and gateway sessions, and tags and notes."""

import asyncio
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.view.conftest import write_run

from rllm.data.registry import DatasetRegistry
from rllm.errors import ConfigError
from rllm.gateway.ledger import Ledger
from rllm.types.wire import CallRecord
from rllm.view.pages import answer
from rllm.view.server import ViewServer
from rllm.view.sources import Sources
from rllm.worker.store import Run, RunStore, canonical_json, digest_of

Ask = Callable[[str], dict[str, Any]]


def test_data_sets_are_listed_and_read_a_window_at_a_time(ask: Ask) -> None:
    rows = [{"question": f"What is {number}?", "answer": number} for number in range(120)]
    DatasetRegistry.register_dataset("sums", rows, "test", description="Small sums")
    (listed,) = ask("datasets")["datasets"]
    assert (listed["name"], listed["description"], listed["splits"]["test"]["rows"]) == (
        "sums",
        "Small sums",
        120,
    )
    page = ask("dataset?name=sums&offset=100")
    assert [row["number"] for row in page["rows"]] == list(range(100, 120))
    assert page["rows"][0]["fields"] == {"question": "What is 100?", "answer": "100"}
    assert [row["number"] for row in ask("dataset?name=sums&q=is%2042")["rows"]] == [42]
    with pytest.raises(ConfigError, match="did you mean `sums`"):
        ask("dataset?name=sum")


def test_models_are_those_that_runs_made_and_those_with_a_name(ask: Ask, runs: Path, home: Path) -> None:
    (runs / "lake" / "model").mkdir()
    (runs / "lake" / "model" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "hidden_size": 64})
    )
    (runs / "lake" / "model" / "model.safetensors").write_bytes(bytes(1000))
    home.mkdir(exist_ok=True)
    entry = {"provider": "openai", "model": "m", "base_url": "", "key": "env:SECRET_KEY_NAME"}
    (home / "models.json").write_text(
        json.dumps({"version": 1, "default": "judge", "models": {"judge": entry}})
    )
    page = ask("models")
    (trained,) = page["trained"]
    assert (trained["run"], trained["shape"]) == ("lake", {"model_type": "qwen3", "hidden_size": 64})
    assert trained["bytes"] > 1000
    assert page["named"] == [
        {"name": "judge", "provider": "openai", "model": "m", "base_url": "", "is_default": True}
    ]


def test_a_damaged_model_or_run_hides_no_other_model(ask: Ask, runs: Path) -> None:
    for run, text in {"lake": '{"model_type": "qwen3"}', "damaged": "{", "older": "[]"}.items():
        (runs / run / "model").mkdir(parents=True)
        (runs / run / "model" / "config.json").write_text(text)
    (runs / "damaged" / "config.json").write_text("{")
    (runs / "older" / "config.json").write_text("{}")
    models = {each["run"]: each["shape"] for each in ask("models")["trained"]}
    assert models == {"lake": {"model_type": "qwen3"}, "damaged": {}, "older": {}}


def test_folders_that_are_closed_to_the_reader_hide_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as name:
        shared = Path(name)
        monkeypatch.setenv("RLLM_HOME", str(shared / "home"))
        for run in ("open", "half", "private"):
            write_run(shared / run, {})
        for folder in ("closed", "listed", "group"):
            (shared / folder / "inner").mkdir(parents=True)
        modes = {".": 0o755, "open": 0o755, "half": 0o755, "private": 0o755, "closed": 0o000, "listed": 0o444}
        modes |= {f"open/{each.name}": 0o644 for each in (shared / "open").iterdir()}
        modes |= {f"half/{each.name}": 0o644 for each in (shared / "half").iterdir()} | {"half/lock": 0o000}
        modes |= {"private/config.json": 0o000, "group/inner": 0o444, "group": 0o755}
        for folder, mode in modes.items():
            (shared / folder).chmod(mode)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            sources = Sources([shared])
            page = answer(sources, "runs")
            assert [each["key"] for each in page["runs"]] == ["open"]
            assert {"closed", "half", "private"} <= {each["key"] for each in page["unreadable"]}
            for request in ("models", "workers", "sessions"):
                answer(sources, request)
            with pytest.raises(ConfigError):
                Sources([shared / "closed"])
        finally:
            os.seteuid(user)
            for folder in modes:
                (shared / folder).chmod(0o700)


def test_runs_of_workers_have_a_page_each(ask: Ask, runs: Path) -> None:
    with_directory = runs / "sorter-runs"
    store = RunStore(with_directory)
    inputs = canonical_json({"text": "<b>sort me</b>"})
    run = Run(worker="sorter", key="k-1", id="run-1", digest=digest_of(inputs), attempts=0)
    store.start_attempt(run, inputs, "session-1")
    store.end_attempt(
        run, status="ok", error=None, result='{"label": "a"}', response=b'{"outputs": {"label": "a"}}'
    )
    store.add_feedback("run-1", {"score": 0.5})
    (listed,) = ask("workers")["stores"]
    assert listed["key"] == "sorter-runs"
    assert [(each["run_id"], each["status"], each["feedback"]) for each in listed["runs"]] == [
        ("run-1", "ok", {"score": 0.5})
    ]
    page = ask("worker_run?store=sorter-runs&id=run-1")
    assert json.loads(page["inputs"]) == {"text": "<b>sort me</b>"}
    assert [each["session"] for each in page["attempts_made"]] == ["session-1"]
    store.close()
    for request in ("worker_run?store=sorter-runs&id=none", "session?ledger=calls&id=x"):
        with pytest.raises(ConfigError, match="There is no"):
            ask(request)


def test_sessions_show_what_is_new_in_each_call(ask: Ask, runs: Path) -> None:
    async def write() -> None:
        with Ledger.open(runs / "calls") as ledger:
            first = [{"role": "user", "content": "one"}]
            reply = {"role": "assistant", "content": "two"}
            second = [*first, reply, {"role": "user", "content": "three"}]
            for number, messages in enumerate((first, second)):
                record = CallRecord(
                    id=f"call-{number}", session="program-1", messages=messages, response=reply, model="m"
                )
                await ledger.append([record])

    asyncio.run(write())
    (ledger,) = ask("sessions")["ledgers"]
    assert (ledger["key"], ledger["counts"]["recorded"]) == ("calls", 2)
    assert [(each["id"], each["choices"]) for each in ledger["sessions"]] == [("program-1", 2)]
    page = ask("session?ledger=calls&id=program-1")
    assert [[message["text"] for message in call["messages"]] for call in page["calls"]] == [
        ["one"],
        ["three"],
    ]
    assert page["calls"][1]["response"]["text"] == "two"
    with pytest.raises(ConfigError, match="no session 'nobody'"):
        ask("session?ledger=calls&id=nobody")


def test_tags_and_notes_are_kept_beside_the_run_and_found_by_the_table(runs: Path, home: Path) -> None:
    server = ViewServer(Sources([runs]), token="t" * 24)
    thread = threading.Thread(target=server.serve)
    thread.start()
    before = {path: path.stat().st_mtime_ns for path in (runs / "lake").rglob("*")}

    def send(value: Any, kind: str = "application/json", token: str = "t" * 24) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        request = urllib.request.Request(f"{server.origin}/api/notes", json.dumps(value).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    try:
        kept = send({"run": "lake", "tags": ["best", " best ", "to publish", ""], "note": " <b>good</b>\n"})
        assert kept == {"tags": ["best", "to publish"], "note": "<b>good</b>"}
        (row,) = answer(server.sources, "runs")["runs"]
        assert (row["tags"], row["note"]) == (kept["tags"], kept["note"])
        assert answer(server.sources, "run?run=lake")["note"] == "<b>good</b>"
        for value, kind, token, status in (
            ({"run": "none", "tags": [], "note": ""}, "application/json", "t" * 24, 400),
            ({"run": "lake", "tags": ["x" * 41], "note": ""}, "application/json", "t" * 24, 400),
            ([], "application/json", "t" * 24, 400),
            ({"run": "lake", "tags": [], "note": ""}, "text/plain", "t" * 24, 415),
            ({"run": "lake", "tags": [], "note": ""}, "application/json", "wrong", 401),
        ):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                send(value, kind, token)
            with refusal.value:
                assert refusal.value.code == status
        assert send({"run": "lake", "tags": [], "note": ""}) == {"tags": [], "note": ""}
        assert json.loads((home / "view" / "notes.json").read_text()) == {}
        assert {path: path.stat().st_mtime_ns for path in before} == before
    finally:
        server.stop()
        thread.join()
