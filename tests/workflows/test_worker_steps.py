"""Workers as steps of a workflow: contracts hold in training, and what breaks them is an outcome."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from rllm.contracts import Contract, RunStatus, parse_contract
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.errors import ConfigError
from rllm.inference import ScriptedClient
from rllm.inference.scripted import ScriptedAnswer
from rllm.types.episode import Episode, Outcome, TerminationReason
from rllm.workflows import Workflow
from rllm.workflows.workers import StepReply

Play = Callable[..., Any]
CONTRACT = """\
---
id: count
version: 1.0.0
{front}---
## worker.md contract

Purpose: Count the letters.

### Input schema

```json
{{"type": "object", "additionalProperties": false, "required": ["run_id", "text"],
 "properties": {{"run_id": {{"type": "string"}}, "text": {{"type": "string", "maxLength": 20}}}}}}
```

### Output schema

```json
{{"type": "object", "additionalProperties": false, "required": ["run_id", "length"],
 "properties": {{"run_id": {{"type": "string"}}, "length": {{"type": "integer"}}}}}}
```

### Constraints

- timeout_seconds: {timeout_s}
- max_attempts: {attempts}
- idempotency_key: run_id
- repair: {repair}
"""
TASK = {"question": "four"}


def contract(*, front: str = "", attempts: int = 1, repair: bool = False, timeout_s: float = 20) -> Contract:
    values = {"front": front, "attempts": attempts, "repair": str(repair).lower(), "timeout_s": timeout_s}
    return parse_contract(CONTRACT.format(**values))


def calling(worker: Contract) -> type[Workflow]:
    """A workflow that asks one worker and pays it for the right length."""

    class Counting(Workflow):
        workers: ClassVar = {"count": worker}

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
            step = await self.worker("count", {"text": task["question"]})
            right = step.outputs["length"] == len(task["question"])
            if step.trajectory is not None:
                step.trajectory.reward = float(right)
            return Episode(is_correct=right)

    return Counting


async def test_a_worker_that_the_policy_plays_is_in_the_episode_with_its_tokens(play: Play) -> None:
    client = ScriptedClient(['{"length": 4}'])
    episode = await play(calling(contract()), client, TASK)
    (trajectory,) = episode.trajectories
    assert (trajectory.name, trajectory.reward, episode.outcome) == ("count", 1.0, Outcome.SCORED)
    assert trajectory.steps[0].response_ids
    assert episode.metrics["unclaimed_calls"] == 0.0
    assert trajectory.output["length"] == 4
    (record,) = episode.info["workers"]
    assert (record["worker"], record["status"], record["output_schema"]) == ("count", "ok", "checked")
    prompt = client.tokenizer.decode(client.prompts[0])
    assert "Count the letters." in prompt
    assert "run_id" not in prompt, "a name of the run says nothing about its task"


async def test_a_policy_that_breaks_the_contract_is_a_policy_failure_without_a_reward(play: Play) -> None:
    client = ScriptedClient(['{"length": "four"}', "no JSON"])
    episode = await play(calling(contract(attempts=2)), client, TASK)
    assert (episode.outcome, episode.reward) == (Outcome.POLICY_FAILURE, 0.0)
    assert episode.info["error"]["type"] == "WorkerStepError"
    assert "all 2 attempts" in episode.info["error"]["message"]
    assert episode.info["workers"][0]["status"] == "invalid_output"
    assert len(client.prompts) == 2, "a policy failure is not tried again"


async def test_a_penalty_pays_for_a_broken_contract_and_ends_the_episode_there(play: Play) -> None:
    episode = await play(
        calling(contract(attempts=2)), ["no", '{"length": 1.5}'], TASK, broken_contract_reward=-0.5
    )
    assert (episode.outcome, episode.termination_reason) == (Outcome.SCORED, TerminationReason.ENV_DONE)
    assert [(each.name, each.reward) for each in episode.trajectories] == [("count", -0.5)] * 2
    assert not episode.is_correct


async def test_an_attempt_that_fits_is_paid_for_itself_alone(play: Play) -> None:
    """The attempt before it broke the contract: it must not be credited with what came after."""
    answers = ["no", '{"length": 4}']
    paid = await play(calling(contract(attempts=2)), answers, TASK, broken_contract_reward=-1.0)
    assert [each.reward for each in paid.trajectories] == [-1.0, 1.0]
    unpaid = await play(calling(contract(attempts=2)), answers, TASK)
    assert [each.reward for each in unpaid.trajectories] == [1.0]
    assert unpaid.metrics["unclaimed_calls"] == 1.0


async def test_a_repair_is_one_more_turn_of_the_same_conversation(play: Play) -> None:
    client = ScriptedClient(["many", '{"length": 4}'])
    episode = await play(calling(contract(repair=True)), client, TASK)
    (trajectory,) = episode.trajectories
    first, second = trajectory.steps
    assert second.chat_completions[: len(first.chat_completions)] == first.chat_completions
    assert "no JSON object" in second.chat_completions[-2]["content"]
    assert episode.info["workers"][0]["output_schema"] == "repaired"
    assert trajectory.reward == 1.0


async def test_inputs_that_break_the_schema_ask_no_model(play: Play) -> None:
    client = ScriptedClient(['{"length": 4}'])
    episode = await play(calling(contract()), client, {"question": "x" * 21})
    assert episode.outcome is Outcome.POLICY_FAILURE
    assert "$.text" in episode.info["error"]["message"]
    assert client.prompts == []


async def test_a_step_has_no_more_time_than_its_contract(play: Play) -> None:
    never = asyncio.Event()
    client = ScriptedClient([ScriptedAnswer(text="{}", wait_for=never.wait)])
    episode = await play(calling(contract(timeout_s=0.05)), client, TASK)
    assert episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert episode.termination_reason is TerminationReason.TIMEOUT


class Runner:
    """What a host of workers is to a workflow."""

    def __init__(self, *replies: StepReply) -> None:
        self.replies, self.keys = list(replies), list[str]()

    async def run_step(self, contract: Contract, inputs: Mapping[str, Any], key: str) -> StepReply:
        self.keys.append(str(inputs["run_id"]))
        return self.replies.pop(0)


async def test_a_worker_with_its_own_model_is_run_by_the_runner_and_is_not_trained_on() -> None:
    bound = contract(front="rllm: {model: other}\n")
    runner = Runner(StepReply(status=RunStatus.OK, outputs={"length": 4}, observability={"trace_id": "t"}))
    engine = AgentWorkflowEngine(calling(bound), {}, ScriptedClient([]), workers=runner)
    (episode,) = await engine.execute_tasks([TASK])
    assert (episode.is_correct, episode.trajectories) == (True, [])
    assert episode.info["workers"][0]["trace_id"] == "t"
    failing = Runner(*[StepReply(status=RunStatus.RETRYABLE_ERROR, message="gone")] * 2)
    engine = AgentWorkflowEngine(
        calling(bound), {}, ScriptedClient([]), workers=failing, retry_limit=2, raise_on_error=False
    )
    (episode,) = await engine.execute_tasks([TASK])
    assert episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert "gone" in episode.info["error"]["message"]
    assert len(set(failing.keys)) == 1, "the same attempt at the same task asks under the same key"


async def test_another_try_with_other_inputs_is_another_run_of_its_worker() -> None:
    """Under one key they would be a conflict in every try to come."""
    texts = iter(["one", "two"])

    class Changing(Workflow):
        workers: ClassVar = {"count": contract(front="rllm: {model: other}\n")}

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
            step = await self.worker("count", {"text": next(texts)})
            return Episode(is_correct=step.outputs["length"] == 3)

    reply = StepReply(status=RunStatus.OK, outputs={"length": 3})
    runner = Runner(StepReply(status=RunStatus.RETRYABLE_ERROR, message="gone"), reply)
    engine = AgentWorkflowEngine(Changing, {}, ScriptedClient([]), workers=runner, retry_limit=2)
    (episode,) = await engine.execute_tasks([TASK])
    assert episode.is_correct
    assert len(set(runner.keys)) == 2


def test_a_worker_that_nobody_here_runs_is_refused_before_the_first_task() -> None:
    with pytest.raises(ConfigError, match=r"`count`, .*contract"):
        AgentWorkflowEngine(
            calling(contract(front="rllm: {model: other}\n")), {}, ScriptedClient([]), raise_on_error=False
        )


async def test_a_name_that_is_no_worker_is_named_with_those_that_are(play: Play) -> None:
    class Wrong(Workflow):
        workers: ClassVar = {"count": contract()}

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
            await self.worker("cuont", {})
            return None

    with pytest.raises(ConfigError, match=r"`cuont`; .*`workers` has count"):
        await play(Wrong, [], TASK)
