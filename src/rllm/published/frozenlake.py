"""The published FrozenLake agent: thoughts, then the move in a fence, as a number from 1 to 4.

"I go right. ```Right```" ──► Action("3")
"""

import re
from typing import Any

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.environments.base import Moved
from rllm.environments.frozenlake import FrozenLakeEnv, env_arguments
from rllm.rendering.answers import without_thoughts
from rllm.types.episode import Action
from rllm.types.messages import Message

_FENCE = re.compile(r"```(.*?)```", re.DOTALL)
_NUMBERS = {"left": "1", "down": "2", "right": "3", "up": "4"}
_MOVE_OF_NUMBER = {number: move.capitalize() for move, number in _NUMBERS.items()}
_INVALID = "0"
_PROMPT = (
    "You walk over a frozen lake. Reach G, avoid H. Think, then write your move between triple backticks as "
    "the last thing: ```Left```, ```Down```, ```Right``` or ```Up```."
)


class FencedLakeAgent(FrozenLakeAgent):
    """Reads the last fence of an answer: a direction in any case, or its number; anything else is 0.

    Without `use_accumulate_history` each prompt is the system message and the latest grid alone, so that each
    turn begins a new segment; without `use_accumulate_thinking` earlier answers are left out of what follows.
    `use_multistep_prompt` is what published programs give; the prompt is the same.
    """

    def __init__(
        self,
        max_steps: int | None = None,
        use_accumulate_thinking: bool = True,
        use_multistep_prompt: bool = False,
        use_accumulate_history: bool = True,
        **options: Any,
    ) -> None:
        self._keeps_thoughts = use_accumulate_thinking
        self._keeps_history = use_accumulate_history
        options.setdefault("system_prompt", _PROMPT)
        super().__init__(max_steps, **options)

    @property
    def chat_completions(self) -> list[Message]:
        if not self._keeps_history:
            return [self._messages[0], *self._messages[1:][-1:]]
        if self._keeps_thoughts:
            return self._messages
        return [*map(without_thoughts, self._messages[:-1]), *self._messages[-1:]]

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        super().update_from_model(response, **kwargs)
        action = Action(action=move_number(response))
        self._trajectory.steps[-1].action = action
        return action


class NumberedLakeEnv(FrozenLakeEnv):
    """A lake whose moves are also numbers: 1 left, 2 down, 3 right, 4 up."""

    def step(self, action: Any) -> Moved:
        value = action.action if isinstance(action, Action) else action
        return super().step(_MOVE_OF_NUMBER.get(str(value), value))

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "NumberedLakeEnv":
        return NumberedLakeEnv(**env_arguments(info))


def move_number(response: str) -> str:
    """The move in the last fence as "1" to "4"; "0" where there is none."""
    fences = _FENCE.findall(response)
    text = fences[-1].strip().lower() if fences else ""
    return text if text in _MOVE_OF_NUMBER else _NUMBERS.get(text, _INVALID)
