"""The plainest agent: it says what it is shown and acts by the whole answer.

    observation (text or messages) ──► messages ──► model ──► Action(answer)

Demonstrations for programs are played through it: what a program asks, and what an expert would answer.
"""

from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.errors import ConfigError
from rllm.types.episode import Action, Step


class ConversationAgent(DialogueAgent):
    """Every observation is a user message, or the messages themselves where it is a list; before them stands
    `system_prompt`, where there is one.

    `memory`: how many observations the model reads at most, the newest last, each with its answer; None is
    all. 1 is for worlds whose newest picture says everything.
    """

    def __init__(self, system_prompt: str = "", memory: int | None = None) -> None:
        if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
            raise ConfigError(f"`memory` is {memory!r}; it is a number of observations, so choose 1 or more.")
        self._system_prompt = system_prompt
        self._memory = memory
        self.reset()

    def reset(self) -> None:
        self.begin(self._system_prompt)
        self._starts: list[int] = []  # of observations, in the messages

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if done:  # nobody answers the last observation
            return
        self._starts.append(len(self._messages))
        if self._memory is not None and len(self._starts) > self._memory:
            self._forget(num_observations=len(self._starts) - self._memory)
        if isinstance(observation, list):
            self._messages.extend(observation)
        else:
            self._messages.append({"role": "user", "content": str(observation)})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self._messages.append({"role": "assistant", "content": response})
        step = Step(chat_completions=list(self._messages), model_response=response, action=response)
        self._trajectory.steps.append(step)
        return Action(response)

    def _forget(self, num_observations: int) -> None:
        first, end = self._starts[0], self._starts[num_observations]
        del self._messages[first:end]
        self._starts = [each - (end - first) for each in self._starts[num_observations:]]
