"""check_agent says everything that is wrong with an agent, and nothing about one that keeps the contract."""

from typing import Any

import pytest

import rllm.agents
from rllm import types
from rllm.agents import BaseAgent, agent, check_agent
from rllm.errors import AgentError
from rllm.types import Action, Step, Trajectory


class Sound(BaseAgent):
    """Keeps the contract; the classes below break it in one place each."""

    def __init__(self) -> None:
        self.reset()

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return self.messages

    @property
    def trajectory(self) -> Trajectory:
        return self.record

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.record = Trajectory()

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.messages.append({"role": "user", "content": observation})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        self.record.steps.append(Step(chat_completions=list(self.messages)))
        return Action(response)


class ForgetsToRecord(Sound):
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        return Action(response)


class ReturnsText(Sound):
    def update_from_model(self, response: str, **kwargs: Any) -> Any:
        super().update_from_model(response)
        return response


class SharesItsList(Sound):
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        action = super().update_from_model(response)
        self.record.steps[-1].chat_completions = self.messages
        return action


class NeverForgets(Sound):
    def reset(self) -> None:
        if not hasattr(self, "messages"):
            super().reset()


class RemembersMessages(Sound):
    def reset(self) -> None:
        messages = getattr(self, "messages", [])
        super().reset()
        self.messages = messages


class IgnoresObservations(Sound):
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if not self.messages:
            super().update_from_env(observation, reward, done, info)


class SaysNothing(Sound):
    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return []


class SpeaksInAnotherRole(Sound):
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.messages.append({"role": "lake", "content": observation})


class StoresBytes(Sound):
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.messages.append({"role": "user", "content": observation.encode()})


class LeavesOutTheAnswer(Sound):
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.record.steps.append(Step(chat_completions=list(self.messages)))
        self.messages.append({"role": "assistant", "content": response})
        return Action(response)


class CountsObservationsAsSteps(Sound):
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        super().update_from_env(observation, reward, done, info)
        if done:
            self.record.steps.append(Step())


class PaysItself(Sound):
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        action = super().update_from_model(response)
        self.record.steps[-1].reward = 5.0
        return action


class Waits(Sound):
    async def update_from_model(self, response: str, **kwargs: Any) -> Any: ...


class ShowsNumbers(Sound):
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.messages.append({"role": "user", "content": 3.5})


class AssertsThatItSpoke(Sound):
    """As published agents do: nobody may ask for a state before there is one."""

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        return Action(response)

    def get_current_state(self) -> Step | None:
        assert self.record.steps
        return self.record.steps[-1]


class PointsAtTheFirstStep(Sound):
    def get_current_state(self) -> Step | None:
        return self.record.steps[0] if self.record.steps else None


def complaints(agent: Any) -> str:
    with pytest.raises(AgentError) as caught:
        check_agent(agent)
    return str(caught.value)


def test_a_sound_agent_passes() -> None:
    check_agent(Sound())


def test_each_broken_promise_is_named(subtests: pytest.Subtests) -> None:
    for agent_class, complaint in [
        (ForgetsToRecord, "`trajectory` holds 0 step(s) after answer 1; append one per answer"),
        (ReturnsText, "update_from_model returned 'answer'; return an rllm.types.Action"),
        (SharesItsList, "`chat_completions` of step 1 went from 2 to 5 messages"),
        (NeverForgets, "reset() does not forget"),
        (RemembersMessages, "reset() does not forget"),
        (IgnoresObservations, "ends with an assistant message after update_from_env"),
        (SaysNothing, "`chat_completions` is [] after update_from_env"),
        (SpeaksInAnotherRole, "a message is a dict with a `role` out of system"),
        (StoresBytes, "`chat_completions` cannot be stored as JSON"),
        (LeavesOutTheAnswer, "does not end with the assistant's answer"),
        (CountsObservationsAsSteps, "`trajectory` holds 3 steps after two answers"),
        (PaysItself, "the first step has reward 5.0 where the environment paid 0.25"),
        (PointsAtTheFirstStep, "get_current_state() is not the last step"),
        (Waits, "update_from_model is async, but agents are called: write a plain `def`"),
        (ShowsNumbers, "holds a message with the content 3.5; it must be text"),
        (AssertsThatItSpoke, "`trajectory` holds 0 step(s) after answer 1"),
    ]:
        with subtests.test(agent_class=agent_class, complaint=complaint):
            message = complaints(agent_class())
            assert complaint in message
            assert message.startswith(f"{agent_class.__name__} breaks the contract in ")


def test_a_used_agent_that_does_not_reset_is_named() -> None:
    used = NeverForgets()
    used.update_from_env("observation", 0.0, False, {})
    used.update_from_model("answer")
    assert "1 step(s) in `trajectory`" in complaints(used)


def test_what_is_no_agent_at_all_is_told_what_to_derive_from() -> None:
    assert "rllm.agents.BaseAgent" in complaints(object())


def test_before_the_model_has_spoken_there_is_no_current_state() -> None:
    assert Sound().get_current_state() is None


@pytest.mark.parametrize("name", ["BaseAgent", "FrozenLakeAgent", "check_agent"])
def test_a_name_is_handed_on_from_its_file(name: str) -> None:
    assert getattr(rllm.agents, name).__name__ == name
    assert name in dir(rllm.agents)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute `Nonsense`"):
        _ = rllm.agents.Nonsense


def test_published_programs_find_the_nouns_where_they_look_for_them() -> None:
    nouns = [name for name in agent.__all__ if name != "BaseAgent"]
    assert all(getattr(agent, name) is getattr(types, name) for name in nouns)
    assert agent.BaseAgent is BaseAgent
    assert {"Action", "Episode", "Step", "Trajectory"} <= set(agent.__all__)
