"""What no store can hold, or nobody can learn from, fails the episode that brought it, before it is saved."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.records import MAX_ABS_REWARD, Records
from rllm.environments.base import BaseEnv
from rllm.errors import AgentError
from rllm.store.encoding import decode_episode, encode_episode
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.evaluation import EvalOutput
from rllm.types.messages import ModelOutput

sys.path.insert(0, str(Path(__file__).parent))
from bad_tasks import (
    BAD,
    NAN,
    Agent,
    Does,
    agent_engine,
    play,
    program_engine,
    raises,
    tasks,
    workflow_engine,
)


class Panic(BaseException):
    """What extensions written in Rust raise is no Exception."""


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


SHARED = Trajectory()


def endless() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def keeps(change: Callable[[Trajectory], Any]) -> AgentExecutionEngine:
    """An agent that does something to its own trajectory."""
    return agent_engine(agent={"on_answer": lambda agent: change(agent.trajectory)})


def last(trajectory: Trajectory, **values: Any) -> None:
    for name, value in values.items():
        setattr(trajectory.steps[-1], name, value)


def share(agent: Agent) -> None:
    agent.trajectory.uid = "one for all"


def answers(step: Any) -> Callable[[], AgentExecutionEngine]:
    return lambda: agent_engine({"on_step": lambda: step})


def returns(**fields: Any) -> Callable[[], Any]:
    return lambda: workflow_engine(lambda flow: Episode(**fields))


class AsyncExit(BaseEnv):
    """Leaves the whole program, in the engine's own loop."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.is_bad = task["is_bad"]

    async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return "go", {}

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        if self.is_bad:
            raise SystemExit(3)
        return "over", 1.0, True, {}

    async def close(self) -> None:  # type: ignore[override]
        raise SystemExit(4)

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> BaseEnv:  # type: ignore[override]
        return cls(info)


def panics_the_fourth_time() -> Callable[[Agent], None]:
    """That of the bad task."""
    made: list[Agent] = []

    def make(agent: Agent) -> None:
        made.append(agent)
        if len(made) == 4:
            raise Panic("index")
        Agent.__init__(agent)

    return make


def exits() -> AgentExecutionEngine:
    engine = agent_engine()
    engine.env_class = AsyncExit
    return engine


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "NaN in info": (lambda: keeps(lambda t: t.info.update(x={"y": [NAN]})), "info['x']['y'][0]` is nan"),
    "object in a step's info": (lambda: keeps(lambda t: t.steps[-1].info.update(x=Mute())), "is a Mute"),
    "bytes as action": (
        lambda: keeps(lambda t: last(t, action=b"x")),
        "step 0 of 'agent': `action` is a bytes",
    ),
    "set as observation": (lambda: keeps(lambda t: last(t, observation={1})), "`observation` is a set"),
    "message": (
        lambda: keeps(lambda t: last(t, chat_completions=[{"role": "user", "content": NAN}])),
        "chat_completions[0]['content']` is nan",
    ),
    "whole number": (lambda: keeps(lambda t: t.info.update(x=10**5000)), "info['x']` has"),
    "holds itself": (lambda: keeps(lambda t: t.info.update(x=endless())), "holds itself"),
    "signal": (lambda: keeps(lambda t: t.signals.update(x=NAN)), "signals['x']"),
    "no name": (lambda: keeps(lambda t: setattr(t, "name", None)), "`name`"),
    "no uid": (lambda: keeps(lambda t: setattr(t, "uid", [1])), "`uid`"),
    "no steps": (lambda: keeps(lambda t: setattr(t, "steps", None)), "NoneType"),
    "steps of text": (lambda: keeps(lambda t: t.steps.__setitem__(0, "x")), "'str'"),
    "no info": (lambda: keeps(lambda t: setattr(t, "info", None)), "`info`"),
    "huge reward": (answers(("o", 1e300, True, {})), "reward"),
    "nested observation": (answers(({"a": [{"b": NAN}]}, 0.0, False, {})), "observation"),
    "mute observation": (answers(Mute()), "no repr"),
    "panic of an environment": (lambda: agent_engine({"on_step": raises(Panic("index"))}), "Panic"),
    "panic of an agent": (lambda: agent_engine(agent={"on_answer": raises_of(Panic("index"))}), "index"),
    "exit in the loop": (exits, "3"),
    "panic of a constructor": (lambda: agent_engine(agent={"__init__": panics_the_fourth_time()}), "index"),
    "panic of a workflow": (lambda: workflow_engine(raises_of(Panic("index"))), "index"),
    "panic of a program": (lambda: program_engine(raises(Panic("index"))), "index"),
    "panic of a judge": (lambda: program_engine(lambda: None, raises(Panic("index"))), "Panic"),
    "workflow's info": (returns(info={"x": NAN}), "`info['x']` is nan"),
    "workflow's artifacts": (returns(artifacts={"x": object()}), "`artifacts['x']` is a object"),
    "workflow's reason": (returns(termination_reason="timeout"), "termination_reason`"),
    "workflow's trajectory's reason": (
        returns(trajectories=[Trajectory(reward=1.0, termination_reason="over")]),  # type: ignore[arg-type]
        "termination_reason`",
    ),
    "workflow's output": (returns(trajectories=[Trajectory(reward=1.0, output=NAN)]), "`output` is nan"),
    "workflow's reward": (returns(trajectories=[Trajectory(reward=-1e40)]), "reward"),
    "workflow's tokens": (
        returns(trajectories=[Trajectory(reward=1.0, steps=[Step(prompt_ids=[-1])])]),
        "`prompt_ids`",
    ),
    "workflow's notes of a step": (
        returns(trajectories=[Trajectory(reward=1.0, steps=[Step(info="words")])]),  # type: ignore[arg-type]
        "its `info`, is 'words'",
    ),
    "workflow's times": (
        returns(trajectories=[Trajectory(reward=1.0, steps=[Step(timings={"grader_s": "long"})])]),  # type: ignore[dict-item]
        "`timings['grader_s']`, is 'long'",
    ),
    "workflow's usage": (
        returns(trajectories=[Trajectory(reward=1.0, steps=[Step(usage=3)])]),  # type: ignore[arg-type]
        "its `usage`, is 3",
    ),
    "workflow's model output": (
        returns(trajectories=[Trajectory(reward=1.0, steps=[Step(model_output={"text": "x"})])]),  # type: ignore[arg-type]
        "`model_output`",
    ),
    "workflow's finish reason": (
        returns(
            trajectories=[
                Trajectory(reward=1.0, steps=[Step(model_output=ModelOutput(finish_reason="odd"))])  # type: ignore[arg-type]
            ]
        ),
        "`finish_reason`",
    ),
    "one trajectory twice": (returns(trajectories=[SHARED, SHARED]), "uid"),
    "program's info": (lambda: program_engine(lambda: Episode(info={"x": {1, 2}})), "`info['x']` is a set"),
    "program's reason": (
        lambda: program_engine(lambda: Episode(termination_reason="over")),  # type: ignore[arg-type]
        "termination_reason`",
    ),
    "judgement's notes": (
        lambda: program_engine(
            lambda: None, lambda: EvalOutput(reward=1.0, is_correct=True, metadata={"x": NAN})
        ),
        "info['evaluation']['x']` is nan",
    ),
}


def raises_of(error: BaseException) -> Callable[[Agent], Any]:
    does: Does = raises(error)
    return lambda agent: does()


def restored(episode: Episode) -> Episode:
    return decode_episode(*encode_episode(episode))


async def test_what_cannot_be_kept_fails_one_episode_by_name() -> None:
    for name, (make, words) in HOSTILE.items():
        engine = make()
        episodes = await play(engine, tasks(10))
        bad = episodes.pop(BAD)
        assert bad.outcome in (Outcome.INFRASTRUCTURE_FAILURE, Outcome.POLICY_FAILURE), name
        assert not bad.is_correct, name
        assert [each.reward for each in bad.trajectories if each.reward is not None] == [], name
        records = [bad.info.get("error"), *(each.info.get("error") for each in bad.trajectories)]
        record = next(each for each in records if each is not None)
        assert words in record["message"], (name, record)
        assert record == next(
            each
            for each in (
                restored(bad).info.get("error"),
                *(t.info.get("error") for t in restored(bad).trajectories),
            )
            if each is not None
        ), name
        assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}, name
        assert [restored(each).outcome for each in episodes.values()] == [Outcome.SCORED] * 9, name
        engine.counts.check()


async def test_an_environment_that_exits_as_it_closes_is_on_record() -> None:
    for episode in (await play(exits(), tasks(2))).values():
        (trajectory,) = episode.trajectories
        assert "SystemExit(4)" in trajectory.info["close_error"]


async def test_what_was_sampled_stays_on_record_when_the_rest_cannot_be_kept() -> None:
    engine = keeps(lambda trajectory: last(trajectory, info={"x": NAN, "why": "kept"}))
    bad = (await play(engine, tasks(10)))[BAD]
    (step,) = restored(bad).trajectories[0].steps
    assert step.info == {"why": "kept"}
    assert step.model_response == "go"
    assert step.chat_completions[-1]["content"] == "go"


async def test_attempts_that_share_a_trajectory_are_told_apart() -> None:
    """The first keeps what it has; the others would overwrite its advantages."""
    engine = agent_engine(agent={"on_answer": share})
    episodes = await play(engine, tasks(4, bad=lambda number: number < 2))
    outcomes = [episodes[f"t{number}"].outcome for number in range(4)]
    assert sorted(outcomes[:2]) == [Outcome.INFRASTRUCTURE_FAILURE, Outcome.SCORED]
    assert outcomes[2:] == [Outcome.SCORED, Outcome.SCORED]


async def test_odd_but_whole_values_are_kept_as_they_are(tmp_path: Path) -> None:
    """Lone surrogates, large texts and dicts, tuples, keys that are no text."""
    odd = {"surrogate": "\udc80", "wide": {str(number): number for number in range(20_000)}, "tuple": (1, 2)}
    engine = agent_engine(
        {"on_step": lambda: ("x" * 2_000_000, 1.0, True, {})},
        agent={"on_answer": lambda agent: agent.trajectory.info.update(odd | {"keys": {1: "a"}})},
    )
    episodes = await play(engine, tasks(5))
    assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        store.save_episodes("train", 0, list(episodes.values()))
        kept = {each.task_id: each for each in store.episodes()}
    info = kept[BAD].trajectories[0].info
    assert {name: info[name] for name in (*odd, "keys")} == odd | {"keys": {1: "a"}}
    assert kept[BAD].termination_reason is TerminationReason.ENV_DONE
    assert math.isfinite(kept[BAD].reward)


def is_kept(*trajectories: Trajectory, records: Records | None = None) -> bool:
    episode = Episode(id="t:0", outcome=Outcome.SCORED, trajectories=list(trajectories))
    kept, error = (records or Records("agent", is_stored=True)).keep(episode, None)
    assert (kept is episode, kept.outcome is Outcome.SCORED) == (error is None, error is None)
    return error is None


def test_rewards_are_kept_up_to_what_32_bits_can_square() -> None:
    for reward, is_fit in ((MAX_ABS_REWARD, True), (-MAX_ABS_REWARD, True), (1.01e18, False), (-1e19, False)):
        assert is_kept(Trajectory(reward=reward)) is is_fit, reward
        assert is_kept(Trajectory(reward=0.5, steps=[Step(reward=0.0), Step(reward=reward)])) is is_fit, (
            reward
        )
    assert is_kept(Trajectory(reward=None, steps=[Step(reward=1.0)]))
    assert MAX_ABS_REWARD == 1e18


def test_no_two_trajectories_of_a_run_have_one_uid() -> None:
    records = Records("agent", is_stored=False)
    assert is_kept(Trajectory(uid="a"), Trajectory(uid="b"), records=records)
    assert not is_kept(Trajectory(uid="c"), Trajectory(uid="c"), records=records)
    assert not is_kept(Trajectory(uid="d"), Trajectory(uid="a"), records=records)
    assert not is_kept(Trajectory(uid="b"), records=records)
    assert is_kept(Trajectory(uid="c"), records=records), "of the two that were refused, none is on record"


def test_what_is_something_else_than_it_should_be_is_left_out_whole() -> None:
    step = Step(info="words", timings=3, thought="hm")  # type: ignore[arg-type]
    trajectory = Trajectory(info="words", signals=[1.0], steps=[step])  # type: ignore[arg-type]
    episode = Episode(outcome=Outcome.SCORED, trajectories=[trajectory], metrics="many")  # type: ignore[arg-type]
    kept, error = Records("agent", is_stored=True).keep(episode, None)
    assert isinstance(error, AgentError)
    (rest,) = kept.trajectories
    assert (rest.info, rest.signals, kept.metrics) == ({}, {}, {})
    assert rest.steps == [Step(id=rest.steps[0].id, thought="hm")]


def test_what_cannot_be_kept_of_a_dict_is_left_out_key_by_key_up_to_a_hundred() -> None:
    for size, num_kept in ((99, 99), (100, 0)):
        info: dict[str, Any] = {str(number): number for number in range(size)} | {"bad": object()}
        episode = Episode(outcome=Outcome.SCORED, trajectories=[Trajectory(info=info, steps=[Step()])])
        kept, error = Records("agent", is_stored=True).keep(episode, None)
        assert error is not None
        assert kept.trajectories[0].info.keys() - {"error"} == {str(number) for number in range(num_kept)}
        assert (kept.trajectories[0].reward, len(kept.trajectories[0].steps)) == (None, 1)
