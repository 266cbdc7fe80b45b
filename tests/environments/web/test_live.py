"""Rows of live websites as tasks, played on a site of this process in a real Chromium, and judged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rllm.data.live_rows import live_row_tasks, live_schema
from rllm.environments import judging
from rllm.environments.web import SiteResponse
from rllm.environments.web.live import LiveWebEnv
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.tasks import benchmark_tasks
from rllm.inference.scripted import ScriptedClient
from rllm.rewards.judge import JudgeGrader
from rllm.types.messages import Message

VOYAGER = {
    "web_name": "Tea",
    "id": "Tea--3",
    "ques": "How much is the green tea?",
    "web": "http://www.tea.test/",
}
MIND2WEB = {
    "task_id": "ab12",
    "website": "http://www.tea.test/",
    "task_description": "Open the page of the green tea.",
    "reference_length": 2,
}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "schema", "task_id"),
    [
        (VOYAGER, "webvoyager", "webvoyager/Tea--3"),
        (MIND2WEB, "online-mind2web", "online-mind2web/ab12"),
        (
            {**MIND2WEB, "confirmed_task": "Open it.", "task_description": ""},
            "online-mind2web",
            "online-mind2web/ab12",
        ),
    ],
)
def test_a_file_of_rows_is_a_benchmark(
    tmp_path: Path, row: dict[str, Any], schema: str, task_id: str
) -> None:
    path = written(tmp_path, row)
    assert live_schema(path) == schema
    (task,) = benchmark_tasks(benchmark_named(str(path)))
    assert (task["task_id"], task["start_url"]) == (task_id, "http://www.tea.test/")
    assert task["goal"] in row.values()
    assert task["hosts"] == ["tea.test", "*.tea.test"]


@pytest.mark.parametrize("change", [{"web": "tea"}, {"web": None}, {"ques": ""}, {"id": ""}])
def test_a_row_without_what_a_task_needs_is_refused_by_its_place(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="row 2 needs `id`"):
        live_row_tasks(written(tmp_path, VOYAGER, {**VOYAGER, **change}))


def test_other_files_are_no_such_rows(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "1 + 1", "answer": "2"})
    assert live_schema(path) is None
    with pytest.raises(ConfigError, match="live websites"):
        live_row_tasks(path)


@pytest.mark.parametrize("name", ["webarena", "VisualWebArena", "workarena"])
def test_benchmarks_that_need_servers_are_refused_by_what_they_need(name: str) -> None:
    with pytest.raises(ConfigError, match=r"WA_\w+|SNOW_INSTANCE_URL"):
        benchmark_named(name)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a judge is shown that takes 12.50 as right."""
    shown: list[str] = []

    def judge(messages: list[Message]) -> str:
        shown.append(str(messages[-1]["content"]))
        seal = re.search(r'"seal": "(\w+)"', str(messages[0]["content"]))
        assert seal is not None
        told = shown[-1].rpartition("The user was told:")[2]
        scores = {"done": float("12.50" in told)}
        return json.dumps({"seal": seal[1], "reason": "because", "scores": scores})

    grader = JudgeGrader(client=ScriptedClient(judge))
    monkeypatch.setattr(judging, "shared_grader", lambda name, **options: grader)
    return shown


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        ('send_msg_to_user("It is 12.50.")', 1.0),
        ('send_msg_to_user("It is 9.")', 0.0),
        ('report_infeasible("No tea.")', 0.0),
    ],
)
async def test_the_judge_sees_what_was_done_and_the_last_page(
    chromium: str, tmp_path: Path, reports: list[str], action: str, reward: float
) -> None:
    (task,) = live_row_tasks(written(tmp_path, VOYAGER))
    env = LiveWebEnv.from_dict(task)
    env.sites = {
        "www.tea.test": lambda request: SiteResponse(
            body=b"<p>Green tea: 12.50" if request.path == "/green" else b"<a href=/green>Green tea</a>"
        )
    }
    page, _ = await env.reset()
    assert page.startswith("Goal: How much is the green tea?\n")
    *_, done, _ = await env.step('click("1")')
    assert not done
    *_, paid, done, info = await env.step(action)
    assert (paid, done, info["is_correct"]) == (reward, True, bool(reward))
    env.close()
    if "infeasible" in action:
        assert not reports
    else:
        (report,) = reports
        assert 'Done, in this order:\nclick("1")\nsend_msg_to_user(' in report
        assert '"Green tea: 12.50"' in report
