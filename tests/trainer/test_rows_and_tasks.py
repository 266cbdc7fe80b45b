"""Tasks of a run and rows of its episodes: which are reported, which can be trained on, which are kept."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm.build.run_tasks import as_sequence, run_tasks
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.errors import CheckpointError, ConfigError
from rllm.trainer.kept_scores import kept_scores
from rllm.trainer.trainable import fail_untrainable, trainable_rows
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.images import PATCH_IDS_FROM
from rllm.types.sample import NOT_SAMPLED, TrainingSample

Row = dict[str, Any]


def _rows(*names: str) -> list[Row]:
    return [{"task_id": f"{place}-{name}", "question": name} for place, name in enumerate(names)]


def _questions(tasks: Sequence[Any]) -> str:
    return "".join(task["question"] for task in tasks)


def _config(num_tasks: int, every_num_tasks: int, *more: str) -> TrainConfig:
    sizes = (f"evaluation.num_tasks={num_tasks}", f"evaluation.every_num_tasks={every_num_tasks}")
    return load_config([*sizes, *more])


def test_reported_are_the_first_held_out_tasks_and_validated_on_the_next() -> None:
    config = _config(2, 3)
    tasks = run_tasks(config, _rows(*"xyz"), _rows(*"abcdefgh"), None, None)
    assert (_questions(tasks.heldout), _questions(tasks.validation)) == ("ab", "cde")
    given = run_tasks(config, _rows(*"xyz"), _rows(*"abc"), _rows(*"stuv"), None)
    assert (_questions(given.heldout), _questions(given.validation)) == ("ab", "stu")
    trained = run_tasks(_config(2, 3, "evaluation.every_steps=0"), _rows(*"xyz"), None, None, None)
    assert (_questions(trained.heldout), _questions(trained.validation)) == ("xy", "")


def test_what_is_reported_is_not_validated_on_and_four_tasks_are_looked_through_for_each() -> None:
    config = _config(2, 2)
    repeated = run_tasks(config, _rows("x"), _rows(*"abababcabd"), None, None)
    assert _questions(repeated.validation) == "cd", "eight behind the reported two are looked through"
    assert _questions(run_tasks(config, _rows("x"), _rows(*"ababababaacd"), None, None).validation) == ""
    assert _questions(run_tasks(config, _rows("x"), _rows(*"abababababcd"), None, None).validation) == ""
    assert _questions(run_tasks(config, _rows("x"), _rows(*"ababababacd"), None, None).validation) == "c"


def test_a_task_keeps_what_it_says_and_has_the_rest_from_the_configuration() -> None:
    more = ("task.environment_args={size=4, depth=1}", "task.train_args={size=5}", "evaluation.every_steps=0")
    rows = [{"task_id": "a"}, {"task_id": "b", "size": 9}]
    tasks = run_tasks(_config(2, 1, *more), rows, rows, None, None)
    assert [(each["size"], each["depth"]) for each in tasks.train] == [(5, 1), (9, 1)]
    assert [(each["size"], each["depth"]) for each in tasks.heldout] == [(4, 1), (9, 1)]


@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [("every_steps", 2, True), ("every_steps", 0, False), ("every_steps", -1, False), ("patience", 1, True)],
)
def test_an_evaluation_between_needs_tasks(key: str, value: int, is_refused: bool) -> None:
    config = _config(2, 1)
    config.evaluation.every_steps, config.evaluation.patience = 0, 0
    setattr(config.evaluation, key, value)
    for heldout in (_rows(*"ab"), None):
        if is_refused:
            with pytest.raises(ConfigError, match=rf"`evaluation\.{key}` is {value}"):
                run_tasks(config, _rows("x"), heldout, None, None)
        else:
            assert not run_tasks(config, _rows("x"), heldout, None, None).validation
    assert run_tasks(config, _rows("x"), _rows(*"abc"), None, None).validation


def test_tasks_that_are_trained_on_and_reported_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = _config(3, 1, "evaluation.every_steps=0")
    facts = run_tasks(config, _rows(*"xaby"), _rows(*"abc"), None, None).facts()
    assert facts.trained_on == ["0-a", "1-b"]
    assert (facts.num_compared, facts.num_train) == (4, 4)
    (line,) = (each.getMessage() for each in caplog.records)
    assert line.startswith("2 of the 3 tasks")
    caplog.clear()
    apart = run_tasks(config, _rows(*"xy"), _rows(*"abc"), None, None).facts()
    assert apart.trained_on == []
    run_tasks(config, _rows(*"abc"), None, None, None).facts()
    assert not caplog.records, "where all are trained on, nobody takes them for others"


def test_a_sequence_is_taken_as_it_is_and_anything_else_is_listed() -> None:
    rows = _rows(*"ab")
    assert as_sequence(rows) is rows
    assert as_sequence(iter(rows)) == rows


# ---- rows that can be trained on -------------------------------------------------------------------------

VOCABULARY = 50


def _episode(*ids: int, role: str = "agent", logprob: float = -0.5, **more: Any) -> Episode:
    step = Step(
        prompt_ids=[0], response_ids=list(ids), logprobs=[logprob] * len(ids), policy_versions=[0] * len(ids)
    )
    trajectory = Trajectory(name=role, steps=[step], reward=1.0)
    return Episode(**{"task_id": "t", "trajectories": [trajectory], "outcome": Outcome.SCORED, **more})


def _policies(*, reads_images: bool = False) -> Any:
    return SimpleNamespace(
        vocabulary_of=lambda role: VOCABULARY,
        reads_images=lambda role: reads_images,
        is_trained=lambda role: role != "judge",
    )


@pytest.mark.parametrize(
    ("episode", "reads_images", "is_refused"),
    [
        (_episode(VOCABULARY - 1), False, False),
        (_episode(VOCABULARY), False, True),
        (_episode(-1), False, True),
        (_episode(3, PATCH_IDS_FROM), True, False),
        (_episode(3, PATCH_IDS_FROM), False, True),
        (_episode(VOCABULARY, PATCH_IDS_FROM), True, True),
        (_episode(3, logprob=float("nan")), False, True),
        (_episode(VOCABULARY, role="judge"), False, False),
    ],
)
def test_a_row_has_ids_of_its_model_and_finite_log_probabilities(
    episode: Episode, reads_images: bool, is_refused: bool
) -> None:
    policies = _policies(reads_images=reads_images)
    if is_refused:
        with pytest.raises(ConfigError):
            trainable_rows(episode, policies, policies.is_trained)
        return
    rows = trainable_rows(episode, policies, policies.is_trained)
    assert len(rows) == (episode.trajectories[0].name != "judge")
    assert all((row.advantages_T == 0.0).all() for row in rows)


@pytest.mark.parametrize(
    ("num_good", "num_bad", "num_failed", "fraction", "is_raised"),
    [
        (3, 1, 0, 0.25, False),
        (3, 1, 0, 0.24, True),
        (2, 1, 1, 0.25, False),  # of all episodes, those that failed before among them
        (0, 2, 3, 1.0, True),  # none is left
        (1, 2, 0, 1.0, False),
        (2, 0, 2, 0.0, False),
    ],
)
def test_what_cannot_be_trained_on_fails_alone_up_to_a_fraction(
    num_good: int, num_bad: int, num_failed: int, fraction: float, is_raised: bool
) -> None:
    bad = [_episode(VOCABULARY) for _ in range(num_bad)]
    good = [_episode(3) for _ in range(num_good)]
    failed = [_episode(VOCABULARY, outcome=Outcome.POLICY_FAILURE) for _ in range(num_failed)]
    if is_raised:
        with pytest.raises(ConfigError) as raised:
            fail_untrainable([*bad, *good, *failed], _policies(), fraction)
        assert f"{num_bad} of the {num_bad + num_good + num_failed}" in raised.value.__notes__[0]
        return
    fail_untrainable([*bad, *good, *failed], _policies(), fraction)
    assert all(each.outcome is Outcome.SCORED for each in good)
    assert all(each.outcome not in (None, Outcome.SCORED) for each in bad)


# ---- scores that a run keeps -----------------------------------------------------------------------------


def _row(ids: list[int], trained: list[bool]) -> TrainingSample:
    return TrainingSample(
        token_ids_T=np.array(ids),
        policy_versions_T=np.where(trained, 0, NOT_SAMPLED),
        logprobs_T=np.zeros(len(ids), dtype=np.float32),
        advantages_T=np.zeros(len(ids), dtype=np.float32),
        group_key=("t", "agent"),
        order_key=("t", 0, 0, 0),
    )


def test_scores_of_trained_tokens_are_computed_once_and_kept_for_these_rows_alone(tmp_path: Path) -> None:
    rows = [_row([1, 2, 3], [False, True, True]), _row([4, 5], [False, True]), _row([6], [False])]
    scores = [np.arange(len(each.token_ids_T), dtype=np.float32) - 7.0 for each in rows]
    scorer: Any = SimpleNamespace(score=lambda samples: scores)
    path = tmp_path / "scores"

    def nobody() -> Any:
        raise AssertionError("they are kept already")

    for source in (lambda: scorer, nobody):
        kept = kept_scores(path, rows, source)
        assert [each.tolist() for each in kept] == [[0.0, -6.0, -5.0], [0.0, -6.0], [0.0]]
    for others in ([rows[0]], [_row([1, 2, 9], [False, True, True]), *rows[1:]]):
        with pytest.raises(CheckpointError, match="other rows"):
            kept_scores(path, others, nobody)
    moved = [_row([1, 2, 3], [True, False, True]), *rows[1:]]
    with pytest.raises(CheckpointError, match="other rows"):
        kept_scores(path, moved, nobody)
    path.write_bytes(b"half")
    with pytest.raises(CheckpointError, match="delete it"):
        kept_scores(path, rows, nobody)
