"""The plainest agent: it says what it is shown and acts by the whole answer.

    observation (text or messages) ──► messages ──► model ──► Action(answer)

Demonstrations for programs are played through it: what a program asks, and what an expert would answer.
"""

from typing import Any

from rllm.agents.base import BaseAgent
from rllm.types.episode import Action, Step, Trajectory
from rllm.types.messages import Message


class ConversationAgent(BaseAgent):
    """Every observation is a user message, or the messages themselves where it is a list; before them stands
    `system_prompt`, where there is one."""

    def __init__(self, system_prompt: str = "") -> None:
        self._system_prompt = system_prompt
        self.reset()

    @property
    def chat_completions(self) -> list[Message]:
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def reset(self) -> None:
        self._messages: list[Message] = []
        if self._system_prompt:
            self._messages.append({"role": "system", "content": self._system_prompt})
        self._trajectory = Trajectory()

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if done:  # nobody answers the last observation
            return
        if isinstance(observation, list):
            self._messages.extend(observation)
        else:
            self._messages.append({"role": "user", "content": str(observation)})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self._messages.append({"role": "assistant", "content": response})
        step = Step(chat_completions=list(self._messages), model_response=response, action=response)
        self._trajectory.steps.append(step)
        return Action(response)
