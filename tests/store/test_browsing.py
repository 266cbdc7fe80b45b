"""Tables of episodes: each is what counting whole episodes by hand gives."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.store.browsing import EpisodeBrowser, EpisodeFilter, EpisodeSummary, PhaseSummary, TaskSummary
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory


def _episode(
    task_id: str, attempt: int, reward: float | None, outcome: Outcome | None, num_tokens: int = 1
) -> Episode:
    ids = list(range(num_tokens))
    steps = [Step(response_ids=ids, logprobs=[-1.0] * num_tokens, policy_versions=[0] * num_tokens)]
    return Episode(
        task_id=task_id,
        rollout_idx=attempt,
        trajectories=[Trajectory(steps=steps * (attempt + 1), reward=reward, outcome=outcome)],
        outcome=outcome,
        is_correct=reward == 1.0,
        termination_reason=TerminationReason.ENV_DONE,
        metrics={"started_at": 1.5, "duration_s": 10.0 - attempt},
    )


BROKEN = Outcome.INFRASTRUCTURE_FAILURE
STEPS = {
    ("train", 0): [_episode("a", 0, 1.0, Outcome.SCORED, 5), _episode("a", 1, 0.0, Outcome.SCORED, 3)],
    ("train", 2): [_episode("b", 0, 0.5, Outcome.TRUNCATED, 9), _episode("b", 1, None, BROKEN)],
    ("after", 0): [_episode("b", 0, None, None, 7)],
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodeBrowser]:
    path = tmp_path_factory.mktemp("store") / "store.sqlite"
    with EpisodeStore.open(path) as store:
        for (phase, step), episodes in STEPS.items():
            store.save_episodes(phase, step, episodes)
    with EpisodeBrowser.open(path) as browser:
        yield browser


def test_a_row_has_the_columns_of_its_episode(browser: EpisodeBrowser) -> None:
    assert browser.page(EpisodeFilter(ids=[2])) == [
        EpisodeSummary(2, "train", 0, "a", 1, "scored", "env_done", 0.0, False, 2, 6, 1.5, 9.0)
    ]
    assert [row.is_correct for row in browser.step_summaries("train", 0)] == [True, False]
    assert browser.step_summaries("train", 1) == []


def test_phases_and_steps_are_those_that_have_episodes(browser: EpisodeBrowser) -> None:
    assert browser.phases() == [PhaseSummary("train", 4, 0, 2), PhaseSummary("after", 1, 0, 0)]
    assert (browser.steps("train"), browser.steps("after"), browser.steps("none")) == ([0, 2], [0], [])


@pytest.mark.parametrize(
    ("which", "ids"),
    [
        (EpisodeFilter(), [1, 2, 3, 4, 5]),
        (EpisodeFilter(phase="train"), [1, 2, 3, 4]),
        (EpisodeFilter(phase="train", step=2), [3, 4]),
        (EpisodeFilter(task_id="b"), [3, 4, 5]),
        (EpisodeFilter(outcome="unjudged"), [5]),
        (EpisodeFilter(outcome="scored"), [1, 2]),
        (EpisodeFilter(is_correct=True), [1]),
        (EpisodeFilter(is_correct=False), [2, 3, 4, 5]),
        (EpisodeFilter(verdict="right"), [1]),
        (EpisodeFilter(verdict="wrong"), [2, 3]),
        (EpisodeFilter(verdict="failed"), [4, 5]),
        (EpisodeFilter(ids=[]), []),
        (EpisodeFilter(ids=[5, 1], without=[5]), [1]),
        (EpisodeFilter(without=[1, 2]), [3, 4, 5]),
    ],
)
def test_a_filter_leaves_what_fulfils_all_of_it(
    browser: EpisodeBrowser, which: EpisodeFilter, ids: list[int]
) -> None:
    assert [row.id for row in browser.page(which)] == ids
    assert browser.count(which) == len(ids)


def test_a_page_is_a_part_of_the_order_and_what_has_no_value_comes_last(browser: EpisodeBrowser) -> None:
    def ids(**how: object) -> list[int]:
        return [row.id for row in browser.page(EpisodeFilter(), **how)]  # type: ignore[arg-type]

    assert ids(descending=True) == [5, 4, 3, 2, 1]
    assert ids(limit=2, offset=1) == [2, 3]
    assert ids(order="reward") == [2, 3, 1, 4, 5]
    assert ids(order="reward", descending=True) == [1, 3, 2, 4, 5]
    assert ids(order="turns") == [1, 3, 5, 2, 4]
    assert ids(order="tokens", descending=True) == [3, 5, 2, 1, 4]
    assert ids(order="duration") == [2, 4, 1, 3, 5]


def test_attempts_are_counted_by_task(browser: EpisodeBrowser) -> None:
    train = EpisodeFilter(phase="train")
    first = TaskSummary("a", 2, 1, 0, 0.5, 2, 0.5, 0.0, 1.0, 1)
    second = TaskSummary("b", 2, 0, 1, 0.5, 1, 0.25, 0.5, 0.5, 3)
    assert browser.tasks(train) == [first, second]
    assert browser.tasks(train, descending=True) == browser.tasks(train, order="success") == [second, first]
    assert browser.tasks(train, order="failed", descending=True, limit=1) == [second]
    assert browser.tasks(train, limit=1, offset=1) == [second]
    assert [each.attempts for each in browser.tasks(EpisodeFilter(), order="attempts")] == [2, 3]


def test_payloads_are_those_of_the_step_without_its_tokens(browser: EpisodeBrowser) -> None:
    payloads = dict(browser.payloads("train", 2))
    assert payloads.keys() == {3, 4}
    assert [each["trajectories"][0]["reward"] for each in payloads.values()] == [0.5, None]
    assert dict(browser.payloads("after", 2)) == {}


def test_of_attempts_that_were_made_again_the_newest_success_of_the_machinery_counts(tmp_path: Path) -> None:
    rounds = (
        [
            _episode("a", 0, None, BROKEN),
            _episode("a", 1, 1.0, Outcome.SCORED),
            _episode("b", 0, None, BROKEN),
        ],
        [_episode("a", 0, 0.0, Outcome.SCORED), _episode("b", 0, None, None)],
        [_episode("a", 0, None, Outcome.CANCELLED)],
    )
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        for step, episodes in enumerate(rounds):
            store.save_episodes("eval", step, episodes)
    with EpisodeBrowser.open(tmp_path / "store.sqlite") as browser:
        assert sorted(browser.superseded("eval")) == [1, 3, 6]
        assert browser.superseded("train") == []


def test_a_file_that_is_no_store_is_refused_and_closed(tmp_path: Path) -> None:
    for content in (b"", b"not a database"):
        (tmp_path / "store.sqlite").write_bytes(content)
        with pytest.raises(ConfigError, match=r"store\.sqlite"):
            EpisodeBrowser.open(tmp_path / "store.sqlite")
