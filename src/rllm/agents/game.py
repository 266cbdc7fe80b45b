"""The agent that plays any game of text: rules once, the board at every turn, one move an answer.

"rules\\n\\nboard" ──► model ──► "… so <answer>Up</answer>" ──► Action("Up")
                                "Up"                         ──► Action("Up")
"""

from functools import cache
from importlib import resources
from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.rewards.extraction import Marked, marked_answer
from rllm.types.episode import Action

NO_MOVE = ""
"""The action of an answer without a move; every game takes it for an invalid one."""


@cache
def system_prompt() -> str:
    """The system message, from prompts/game.md."""
    return resources.files("rllm").joinpath("agents/prompts/game.md").read_text(encoding="utf-8").strip()


def parse_move(response: str) -> Action:
    """The move that an answer ends with, or "" where there is none.

    Thoughts are left out, and those that do not end hold no move. What is in the last <answer>…</answer>
    counts if nothing follows it; without a tag the whole answer has to be the move. So a model cannot move by
    listing all there are.
    """
    mark = marked_answer(response)
    return Action(action=mark.text if isinstance(mark, Marked) else NO_MOVE)


class GameAgent(DialogueAgent):
    """One user message per observation.

    Without `instructions` there is no system message: who has learned to write moves needs no telling.
    """

    def __init__(self, instructions: bool = True) -> None:
        self._instructions = instructions
        self.reset()

    def reset(self) -> None:
        self.begin(system_prompt() if self._instructions else "")

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.pay(observation, reward, done, info)
        if not done:  # nobody answers the last observation
            self._messages.append({"role": "user", "content": str(observation)})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        action = parse_move(response)
        self._messages.append({"role": "assistant", "content": response})
        self.record(response, action)
        return action
