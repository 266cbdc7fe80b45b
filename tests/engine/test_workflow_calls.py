"""The workflow engine: which step is which call of the model, and which policy answered it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.errors import AgentError, ConfigError
from rllm.inference import ScriptedClient
from rllm.inference.rollout_engine import RoleSettings
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.messages import Message, ModelOutput, SamplingParams
from rllm.workflows import Workflow

sys.path.insert(0, str(Path(__file__).parent))
from small_workflows import TASKS, Asks, engine_of, episodes_of, four


async def test_calls_that_no_step_is_are_counted() -> None:
    class Wasteful(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            messages: list[Message] = [{"role": "user", "content": "?"}]
            outputs = [await self.rollout_engine.get_model_response(messages) for _ in range(3)]
            return Episode(trajectories=[Trajectory(steps=[Step.from_model_output(outputs[1], messages)])])

    (episode,) = await episodes_of(engine_of(Wasteful), TASKS[:1])
    assert (episode.metrics["calls"], episode.metrics["unclaimed_calls"]) == (3.0, 2.0)
    assert episode.metrics["unclaimed_tokens"] == 4.0


async def test_one_call_in_two_steps_is_refused() -> None:
    class Doubles(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            messages: list[Message] = [{"role": "user", "content": "?"}]
            output = await self.rollout_engine.get_model_response(messages)
            steps = [Step.from_model_output(output, messages) for _ in range(2)]
            return Episode(trajectories=[Trajectory(steps=steps)])

    with pytest.raises(AgentError, match=r"Doubles: step 1 .* step 0 .*same"):
        await episodes_of(engine_of(Doubles), TASKS[:1])


async def test_every_call_of_an_episode_that_cannot_be_read_is_a_step() -> None:
    class DoublesOnce(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            messages: list[Message] = [{"role": "user", "content": "?"}]
            output = await self.rollout_engine.get_model_response(messages)
            judgement = await self.rollout_engine.get_model_response(messages, role="judge")
            num_steps = 2 if task == TASKS[0] else 1
            steps = [Step.from_model_output(output, messages) for _ in range(num_steps)]
            judge = Trajectory(name="judge", steps=[Step.from_model_output(judgement, messages)])
            return Episode(trajectories=[Trajectory(steps=steps), judge])

    episodes = await episodes_of(engine_of(DoublesOnce))
    (bad,) = [each for each in episodes if each.task_id == "t0"]
    assert bad.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert [(each.name, len(each.steps)) for each in bad.trajectories] == [
        (Trajectory().name, 1),
        ("judge", 1),
    ]
    assert (bad.metrics["unclaimed_calls"], bad.metrics["unclaimed_tokens"]) == (0.0, 0.0)


async def test_steps_without_an_output_are_found_by_what_they_say() -> None:
    class Plain(Workflow):
        """Steps as published agents make them: messages and text, no output; in no particular order."""

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            steps: list[Step] = []
            for number in range(3):
                messages: list[Message] = [{"role": "user", "content": f"question {number}"}]
                output = await self.rollout_engine.get_model_response(messages)
                said = {"role": "assistant", "content": output.text, "reasoning": ""}
                steps.append(Step(chat_completions=[*messages, said], model_response=output.text))
            steps.append(Step(observation="what a person did", action="stop"))
            return Episode(trajectories=[Trajectory(steps=steps[::-1])])

    client = ScriptedClient(four)
    (episode,) = await episodes_of(engine_of(Plain, client), TASKS[:1])
    by_person, *answers = episode.trajectories[0].steps
    assert by_person.response_ids == []
    assert [client.tokenizer.decode(step.prompt_ids) for step in answers] == [
        f"user:question {number}\nassistant:" for number in (2, 1, 0)
    ]
    assert episode.metrics["unclaimed_calls"] == 0.0


async def test_two_solvers_that_ask_the_same_and_hear_the_same_share_no_call() -> None:
    class Twins(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            trajectories: list[Trajectory] = []
            for _ in range(2):
                messages: list[Message] = [{"role": "user", "content": "?"}]
                output = await self.rollout_engine.get_model_response(messages, role="solver")
                said = {"role": "assistant", "content": output.text}
                trajectories.append(
                    Trajectory(name="solver", steps=[Step(chat_completions=[*messages, said])])
                )
            return Episode(trajectories=trajectories)

    (episode,) = await episodes_of(engine_of(Twins), TASKS[:1])
    ids = [each.steps[0].model_output.completion_id for each in episode.trajectories]  # type: ignore[union-attr]
    assert len(set(ids)) == 2
    assert episode.metrics["unclaimed_calls"] == 0.0


async def test_a_rollout_engine_of_ones_own_needs_one_method() -> None:
    class Own:
        async def get_model_response(self, messages: list[Message], **sampling: Any) -> ModelOutput:
            return ModelOutput(text=f"{sampling['max_tokens']}")

    (episode,) = await episodes_of(engine_of(Asks, Own()), TASKS[:1])
    (step,) = episode.trajectories[0].steps
    assert (step.model_response, step.response_ids) == ("256", [])
    assert (episode.outcome, episode.metrics["unclaimed_calls"]) == (Outcome.SCORED, 0.0)


# ---- several policies ------------------------------------------------------------------------------------


class Pair(Workflow):
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
        for name, role in (("solver", "solver"), ("judge", task.get("judge_asks_as", "judge"))):
            messages: list[Message] = [{"role": "user", "content": f"{name}?"}]
            output = await self.rollout_engine.get_model_response(messages, role=role)
            step = Step.from_model_output(output, messages, reward=1.0)
            self.commit(trajectory=Trajectory(name=name, steps=[step]))


async def test_each_role_is_answered_by_its_policy_and_sampled_in_its_way() -> None:
    clients = {
        "small": ScriptedClient(four, policy_version=3),
        "large": ScriptedClient(four, policy_version=8),
    }
    roles = {"judge": RoleSettings(policy="large", temperature=0.5, max_tokens=7)}
    engine = AgentWorkflowEngine(Pair, {}, clients=clients, roles=roles)
    (episode,) = await episodes_of(engine, TASKS[:1], sampling=SamplingParams(temperature=0.9, max_tokens=30))
    versions = {each.name: each.steps[0].policy_version for each in episode.trajectories}
    assert versions == {"solver": 3, "judge": 8}
    assert [(each.temperature, each.max_tokens) for each in clients["small"].samplings] == [(0.9, 30)]
    assert [(each.temperature, each.max_tokens) for each in clients["large"].samplings] == [(0.5, 7)]


async def test_a_trajectory_whose_calls_another_policy_answered_is_refused() -> None:
    clients = {"small": ScriptedClient(four), "large": ScriptedClient(four)}
    engine = AgentWorkflowEngine(Pair, {}, clients=clients, roles={"judge": RoleSettings(policy="large")})
    with pytest.raises(ConfigError, match=r"'judge' .*`large`.*`small` answered"):
        await episodes_of(engine, [TASKS[0] | {"judge_asks_as": "nobody"}])
