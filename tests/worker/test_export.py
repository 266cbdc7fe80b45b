"""From service back to training: filters, masks, corrections, and counts that add up."""

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import worker_files as files
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from rllm.cli.main import rllm as front_door
from rllm.contracts import parse_contract, read_contract
from rllm.data.row_filter import RowFilter
from rllm.errors import ConfigError
from rllm.worker.export import OUTCOMES, RUN_FIELDS
from rllm.worker.host import WorkerHost
from rllm.worker.http import WorkerServer

CONTRACT = """\
---
id: answer
version: 1.0.0
rllm: {model: "builtin:tiny"}
---
## worker.md contract

Purpose: Answer.

### Input schema

```json
{"type": "object", "required": ["run_id", "question"], "properties": {"run_id": {"type": "string"}, "question": {"type": "string"}}}
```

### Output schema

```json
{"type": "object", "additionalProperties": false, "required": ["yes"], "properties": {"yes": {"type": "boolean"}}}
```

### Constraints

- idempotency_key: run_id
"""  # noqa: E501

RUN = {
    "worker_id": "w",
    "status": "ok",
    "attempts": 2,
    "inputs": {"task": "sum", "deep": {"n": 3}},
    "outputs": {"value": 1.5},
    "score": 0.5,
    "label": None,
}


def test_a_filter_says_which_runs(subtests: pytest.Subtests) -> None:
    for text, holds in [
        ('status == "ok"', True),
        ('status == "ok" and score >= 0.5 and attempts < 3', True),
        ('not (status == "ok")', False),
        ('inputs.task in ["sum", "product"] or false', True),
        ("inputs.deep.n == 3", True),
        ("inputs.deep.missing.more == null", True),
        ("label == null", True),
        ("label > 1", False),
        ("label < 1", False),
        ("0 < score <= 0.5", True),
        ("score > -1", True),
        ('score > "a"', False),
        ('score != "a"', True),
        ('"x" not in inputs.missing', True),
        ("outputs.value", True),
    ]:
        with subtests.test(text=text, holds=holds):
            assert RowFilter(text, RUN_FIELDS)(RUN) is holds


def test_a_filter_can_do_nothing_else(subtests: pytest.Subtests) -> None:
    for text, word in [
        ("status = 1", "cannot be read"),
        ("", "cannot be read"),
        ("stauts == 1", "`stauts`"),
        ("open('x')", "open('x')"),
        ("inputs.__class__()", "__class__()"),
        ("inputs['task']", "inputs['task']"),
        ("score + 1 > 1", "score + 1"),
        ("[each for each in inputs]", "each for each"),
        ("(lambda: 1)", "lambda"),
        ("(1).real", "real"),
        ("'a' * 10**9", "*"),
        ("(" * 300 + "1" + ")" * 300, "cannot be read"),
        ("1 or " * 1000 + "1", "at most 2000"),
        ("inputs" + ".a" * 900, "deep"),
        ("inputs" + ".a" * 60, "deep"),
        ("not " * 60 + "1", "deep"),
        ("not " * 400 + "1", "deep"),
    ]:
        with subtests.test(text=text, word=word), pytest.raises(ConfigError, match=re.escape(word)):
            RowFilter(text, RUN_FIELDS)


@given(text=st.text(max_size=60))
def test_any_text_is_a_filter_or_is_refused(text: str) -> None:
    try:
        run_filter = RowFilter(text, RUN_FIELDS)
    except ConfigError:
        return
    assert isinstance(run_filter(RUN), bool)


def rllm(*words: str | Path) -> Result:
    return CliRunner().invoke(
        front_door, [str(word) for word in words], prog_name="rllm", catch_exceptions=False
    )


async def test_what_was_served_is_what_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real answers of a model, feedback over HTTP, rows that `rllm sft` takes."""
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    contract, served = parse_contract(CONTRACT), tmp_path / "served"
    questions = {
        "good": "Is it 1732345678901?",
        "again": "Is it 1732345678901?",
        "corrected": "jane.doe+x@mail.example.org, card 4111 1111 1111 1111, sk-abcdefghijklmnop1234",
        "bad": "Never?",
    }
    async with WorkerHost([contract], served) as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host, token=None)
        await server.start()
        try:
            runs = f"{server.url}/workers/answer/runs"
            answers: dict[str, Any] = {}
            for key, question in questions.items():
                async with http.post(runs, json={"inputs": {"run_id": key, "question": question}}) as reply:
                    assert reply.status == 200
                    answers[key] = (await reply.json())["outputs"]
            await http.post(runs, json={"inputs": {"run_id": "broken"}})

            async def say(key: str, feedback: Any) -> int:
                async with http.post(f"{runs}/{key}/feedback", json=feedback) as reply:
                    return reply.status

            assert [await say(key, {"score": 1}) for key in ("good", "again", "corrected")] == [201] * 3
            right = {"yes": not answers["corrected"]["yes"]}
            assert await say("corrected", {"outputs": right, "label": "wrong"}) == 201
            assert await say("nobody", {"score": 1}) == 404
            for feedback in ({}, [], {"score": True}, {"score": "1"}, {"stars": 5}, {"outputs": {"yes": 1}}):
                assert await say("good", feedback) == 400
        finally:
            await server.close()

    rows_path = tmp_path / "rows.jsonl"
    result = rllm("dataset", "from-runs", served, "--filter", "score > 0", "--out", rows_path, "--json")
    counts = json.loads(result.stdout)
    assert counts["runs"] == 5 == sum(counts[name] for name in OUTCOMES)
    assert (counts["kept"] + counts["double"], counts["filtered"]) == (3, 2)
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    assert len(rows) == counts["rows"] == counts["kept"]
    texts = [json.dumps(row["messages"]) for row in rows]
    assert len(set(texts)) == len(texts)
    raw_answers = [row["messages"][-1]["content"] for row in rows if not row["run"]["corrected"]]
    assert counts["double"] == 2 - len(raw_answers)  # the same question, and perhaps the same answer
    twice = tmp_path / "twice"
    shutil.copytree(served, twice)
    with sqlite3.connect(twice / "runs.sqlite") as database:  # the same session for both: surely a double
        database.execute("UPDATE attempts SET session=(SELECT session FROM attempts LIMIT 1)")
    words = ("dataset", "from-runs", twice, "--filter", "score > 0 and label == null", "--json", "--out")
    assert json.loads(rllm(*words, tmp_path / "twice.jsonl").stdout)["double"] == 1
    assert json.loads(rows[0]["messages"][-1]["content"]) == answers["good"]
    assert "1732345678901" in rows[0]["messages"][-2]["content"]  # a time in ms, and no card
    corrected = next(row for row in rows if row["run"]["corrected"])
    assert json.loads(corrected["messages"][-1]["content"]) == right
    asked = corrected["messages"][-2]["content"]
    assert "[email]" in asked
    assert "[card]" in asked
    assert "[secret]" in asked
    assert not any(word in rows_path.read_text() for word in ("jane", "4111", "sk-abc"))
    check = rllm("sft", rows_path, "--model", "builtin:tiny", "--dry-run", "--output", tmp_path / "run")
    assert check.exit_code == 0, check.output
    pairs_path, tasks_path = tmp_path / "pairs.jsonl", tmp_path / "tasks.jsonl"
    words = ("dataset", "from-runs", served, "--json", "--as")
    pairs = json.loads(rllm(*words, "preferences", "--out", pairs_path).stdout)
    assert pairs["runs"] == 5 == sum(pairs[name] for name in OUTCOMES)
    (pair,) = [json.loads(line) for line in pairs_path.read_text().splitlines()]
    assert json.loads(pair["chosen"][0]["content"]) == right
    assert json.loads(pair["rejected"][0]["content"]) == answers["corrected"]
    assert "[email]" in pair["prompt"][-1]["content"]
    check = rllm("dpo", pairs_path, "--model", "builtin:tiny", "--dry-run", "--output", tmp_path / "pairs")
    assert check.exit_code == 0, check.output
    assert (
        json.loads(rllm(*words, "tasks", "--filter", "score == 1", "--out", tasks_path).stdout)["rows"] == 2
    )
    tasks = [json.loads(line) for line in tasks_path.read_text().splitlines()]
    assert [each["outputs"] for each in tasks] == [answers["good"], right]
    assert tasks[0]["inputs"] == {"question": questions["good"]}
    assert rllm(*words, "tasks", "--name", "asked").exit_code == 0
    assert json.loads(rllm("dataset", "inspect", "asked", "--json").stdout)
    assert rllm(*words, "sft", "--out", "talks").exit_code == 0
    check = rllm("sft", "talks", "--model", "builtin:tiny", "--dry-run", "--output", tmp_path / "by-name")
    assert check.exit_code == 0, check.output
    for options, word in (((), "give one of"), (("--out", pairs_path, "--name", "x"), "give one of")):
        refused = rllm("dataset", "from-runs", served, *options)
        assert (refused.exit_code, word in " ".join(refused.stderr.split())) == (2, True)
    again = rllm("dataset", "from-runs", served, "--out", rows_path)
    assert again.exit_code == 2
    assert "is there already" in " ".join(again.stderr.split())


async def test_tasks_of_what_was_served_are_trained_on_by_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    async with WorkerHost([read_contract(files.write_worker(tmp_path))], tmp_path / "served") as host:
        for number in range(20):
            assert (await host.workers["measure"].run({"run_id": f"{number}", "task": "x" * number})).is_ok
    kept = rllm("dataset", "from-runs", "served", "--as", "tasks", "--out", "lengths", "--json")
    assert json.loads(kept.stdout)["rows"] == 20
    plan = rllm("train", "lengths", "--dry-run", "--json")
    assert plan.exit_code == 0, plan.stderr
    assert json.loads(plan.stdout)["config"]["task"]["environment"] == "lengths"


async def test_runs_are_read_while_a_server_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    async with WorkerHost([parse_contract(CONTRACT)], tmp_path / "runs") as host:
        for number in range(2):
            response = await host.workers["answer"].run({"run_id": f"{number}", "question": f"{number}?"})
            assert response.is_ok
        listed = rllm("worker", "runs", tmp_path / "runs", "--json")
        kept = rllm("dataset", "from-runs", tmp_path / "runs", "--out", tmp_path / "rows.jsonl", "--json")
    assert [row["key"] for row in json.loads(listed.stdout)["runs"]] == ["1", "0"]
    assert json.loads(kept.stdout)["rows"] == 2
    assert rllm("worker", "runs", tmp_path).exit_code == 2
