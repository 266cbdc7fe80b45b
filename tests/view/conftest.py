"""Runs made of plain episodes, as a training leaves them on disk, and the page over them."""

import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rllm.environments.web.chromium import find_chromium, require_browser
from rllm.errors import ConfigError
from rllm.eval.report import details_of, report_of
from rllm.eval.results import result_of
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import ModelOutput
from rllm.view.pages import answer
from rllm.view.sources import Sources

CONFIG = {
    "seed": 3,
    "steps": 2,
    "task": {"environment": "frozenlake"},
    "model": {"path": "builtin:tiny"},
    "warm_start": {"steps": 0},
}


def conversation(texts: Sequence[str], *, asked: str = "Where to?", reward: float = 1.0) -> Trajectory:
    """A trajectory with an answer of two tokens for each text, every prompt going on from the one before."""
    steps: list[Step] = []
    ids, messages = [1, 2, 3], [{"role": "user", "content": asked}]
    for number, text in enumerate(texts):
        answer_ids = [10 + number, 11 + number]
        output = ModelOutput(
            text=text,
            content=text,
            prompt_ids=list(ids),
            completion_ids=answer_ids,
            logprobs=[-0.5, -2.0],
            policy_versions=[4, 4],
        )
        step = Step.from_model_output(output, list(messages), action=text)
        step.timings = {"model_s": 0.25, "env_s": 0.05}
        step.reward = reward if number == len(texts) - 1 else 0.0
        steps.append(step)
        messages = [*step.chat_completions, {"role": "user", "content": f"Then, after {number}?"}]
        ids = [*ids, *answer_ids, 5]
    return Trajectory(steps=steps, reward=reward, termination_reason=TerminationReason.ENV_DONE)


def episode(
    task_id: str, attempt: int, *trajectories: Trajectory, outcome: Outcome = Outcome.SCORED
) -> Episode:
    return Episode(
        task={"task_id": task_id, "question": "Where to?"},
        task_id=task_id,
        rollout_idx=attempt,
        trajectories=list(trajectories),
        is_correct=sum(each.reward or 0.0 for each in trajectories) >= 1.0,
        outcome=outcome,
        termination_reason=TerminationReason.ENV_DONE,
        metrics={"started_at": 1_700_000_000.0, "duration_s": 1.5},
    )


def write_run(
    path: Path,
    saved: dict[tuple[str, int], list[Episode]],
    *,
    lines: Sequence[dict[str, Any]] = (),
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """A run that nobody works on any more."""
    with RunDirectory.create_or_open(path) as run:
        run.write_config(config or CONFIG)
        with EpisodeStore.open(run.store_path) as store:
            for (phase, step), episodes in saved.items():
                store.save_episodes(phase, step, episodes)
        run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if summary is not None:
            run.write_summary(summary)
    return path


def note_token_numbers(run: Path, task_id: str, numbers: Sequence[Sequence[float]]) -> None:
    """Save numbers of the tokens of attempt 0 at a task in step 0, as a trainer computes them."""
    with EpisodeStore.open(run / "store.sqlite") as store:
        flat = array("f", [value for each in numbers for value in each])
        store.save_token_numbers("train", 0, [(task_id, 0, flat.tobytes())])


def answers_in(html: str) -> dict[str, Any]:
    """Request -> answer, of a page that was saved as one file."""
    _, _, rest = html.partition('<script type="application/json" id="kept">')
    return json.loads(rest.partition("</script>")[0])["answers"]


def write_evaluation(path: Path, attempts: dict[str, list[bool | None]], *, model: str = "m") -> Path:
    """A finished evaluation by the tasks' attempts: right, wrong, or None for one that failed."""
    episodes: list[Episode] = []
    for task_id, outcomes in attempts.items():
        for attempt, is_right in enumerate(outcomes):
            trajectory = conversation(
                [f"It is {is_right}."], asked=f"What is {task_id}?", reward=float(bool(is_right))
            )
            if is_right is None:
                trajectory.reward = None
                trajectory.info["error"] = {"type": "InferenceError", "message": "the server answered 500"}
            else:
                trajectory.info["grade"] = {"reason": f"because {task_id}", "extracted": str(is_right)}
            outcome = Outcome.SCORED if is_right is not None else Outcome.INFRASTRUCTURE_FAILURE
            made = episode(task_id, attempt, trajectory, outcome=outcome)
            made.task = {"task_id": task_id, "question": f"What is {task_id}?"}
            episodes.append(made)
    config = {"kind": "eval", "name": "sums", "model": {"path": model, "hash": ""}, "ways": {"sampled": None}}
    config |= {"attempts": max(map(len, attempts.values())), "seed": 0, "split": "test"}
    results = [result_of(each) for each in episodes]
    report = {**report_of(results).to_dict(), **details_of(results, ks=(1,))}
    summary = {"stamp": config, "baselines": {}, "reports": {"sampled": report}}
    return write_run(path, {("sampled", 0): episodes}, config=config, summary=summary)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def runs(tmp_path: Path, home: Path) -> Path:
    """A directory with one run of two steps: twelve tasks, two attempts each, the second one failing."""
    saved = {
        ("train", step): [
            episode(f"test-{task}", attempt, conversation(["Left", word], reward=float(word == "Down")))
            for task in range(12)
            for attempt, word in enumerate(["Down", "Up"] if task else ["Down", "Down"])
        ]
        for step in range(2)
    }
    lines = [
        {"phase": "train", "step": step, "time_s": 2.0 * step, "success": 0.5 + 0.1 * step, "groups": 12}
        | {"groups_tied": 10, "episodes": 24, "failed": 0, "step_s": 2.0, "rollout_s": 1.0}
        for step in range(2)
    ]
    write_run(tmp_path / "runs" / "lake", saved, lines=lines)
    return tmp_path / "runs"


@pytest.fixture
def ask(runs: Path) -> Callable[[str], dict[str, Any]]:
    """The answer of the page to a request, through JSON as it goes out."""
    sources = Sources([runs])

    def call(request: str) -> dict[str, Any]:
        return json.loads(json.dumps(answer(sources, request), default=str, allow_nan=False))

    return call


ATTACKS = (
    "<script>window.attacked = 1</script>",
    "<img src=x onerror='window.attacked = 1'>",
    "</pre></div><svg onload=window.attacked=1>",
    "<iframe srcdoc='<script>parent.attacked = 1</script>'></iframe>",
    "<a href='javascript:window.attacked=1'>here</a>",
    "{{constructor.constructor('window.attacked=1')()}} ${window.attacked=1}",
    "<style>*{display:none!important}</style>",
    "<meta http-equiv=refresh content='0;url=data:text/html,gone'>",
    "</script><!--<script>",
    "<base href='http://elsewhere.test/'><form action=/api/notes><input autofocus onfocus=window.attacked=1>",
    "\u202e\u2066 right to left \x1b[2J \x00 \ud83d half",
    "&lt;b&gt; &amp; \"' onmouseover=window.attacked=1 '\"",
)
"""What a model may write to reach whoever looks at it."""


@pytest.fixture
def chromium() -> Iterator[Any]:
    """A browser that is driven by a test; without one it skips, or fails under `make test-web`. It ends with
    the test: as long as it is there, its driver's event loop runs, and no other test can have one."""
    try:
        path = find_chromium().path
        require_browser()
    except ConfigError as error:
        if os.environ.get("RLLM_TEST_WEB"):
            raise
        pytest.skip(f"{error} `make test-web` installs what these tests need")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
