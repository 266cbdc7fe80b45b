"""The plainest agent: it says what it is shown and acts by the whole answer.

    observation (text or messages) ──► messages ──► model ──► Action(answer)

Demonstrations for programs are played through it: what a program asks, and what an expert would answer.
"""

from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.types.episode import Action, Step


class ConversationAgent(DialogueAgent):
    """Every observation is a user message, or the messages themselves where it is a list; before them stands
    `system_prompt`, where there is one."""

    def __init__(self, system_prompt: str = "") -> None:
        self._system_prompt = system_prompt
        self.reset()

    def reset(self) -> None:
        self.begin(self._system_prompt)

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
