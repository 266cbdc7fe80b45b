"""The part that agents of one conversation share: its messages, and a Step for each answer.

observation ──► pay: what the last answer earned ──► messages ──► model ──► record: a Step, not yet paid
"""

from collections.abc import Sequence
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.types.episode import Step, Trajectory
from rllm.types.messages import Message


class DialogueAgent(BaseAgent):
    """Keeps messages and steps; who derives from it says what is in them."""

    def begin(self, system_prompt: str = "") -> None:
        """Forget everything; the conversation begins with `system_prompt`, where there is one."""
        self._trajectory = Trajectory()
        self._messages: list[Message] = []
        if system_prompt:
            self._messages.append({"role": "system", "content": system_prompt})
        self._observation: Any = None
        self._unpaid_step: Step | None = None

    @property
    def chat_completions(self) -> list[Message]:
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def pay(self, observation: Any, reward: float, done: bool, info: dict[str, Any]) -> None:
        """Write down what the last answer earned, and what is seen now."""
        if self._unpaid_step is not None:
            self._unpaid_step.reward, self._unpaid_step.done = reward, done
            self._unpaid_step.info.update(info)
            self._unpaid_step = None
        self._observation = observation

    def record(
        self, response: str, action: Any, *, thought: str = "", messages: Sequence[Message] | None = None
    ) -> None:
        """Append the Step of an answer that is in the messages already. `messages`: what was said, where that
        is not all of them as they are."""
        self._unpaid_step = Step(
            chat_completions=list(self._messages if messages is None else messages),
            observation=self._observation,
            thought=thought,
            model_response=response,
            action=action,
        )
        self._trajectory.steps.append(self._unpaid_step)
