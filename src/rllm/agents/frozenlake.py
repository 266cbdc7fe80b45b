"""The agent that plays FrozenLake: the grid goes in as a user message, one word comes out.

    "PFF\\nHFH\\nFFG" ──► model ──► "Right" ──► Action("Right")

The words around the grid are few on purpose: a small model reads every one of them at every turn.
"""

from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.agents.prompts_named import prompt_named
from rllm.environments.frozenlake import PLAYER
from rllm.environments.lake_values import MOVES
from rllm.errors import ConfigError
from rllm.rewards.extraction import Marked, marked_answer
from rllm.types.episode import Action

WALL = "#"
"""The mark for places beyond the edge when neighbours are shown."""
_STEP_OF_MOVE = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""(rows, columns) that each move goes."""
_MOVE_OF_ANSWER = {move.lower(): move for move in MOVES}


def parse_move(response: str) -> Action:
    """The move when the whole answer is one of the four words, in any case, or ends with one of them in
    <answer>…</answer>; the answer itself otherwise.

    A word inside a sentence does not count, so a model cannot move by listing all four. The environment takes
    what is no move for an invalid one: the turn is spent.
    """
    answer = response.strip()
    move = _MOVE_OF_ANSWER.get(answer.lower())
    if move is None:  # looking for a mark takes ten times as long
        mark = marked_answer(answer)
        word = mark.text if isinstance(mark, Marked) else answer
        move = _MOVE_OF_ANSWER.get(word.lower(), answer)
    return Action(action=move)


class FrozenLakeAgent(DialogueAgent):
    """One user message per observation: the grid and nothing else, unless asked for.

    `max_steps` adds how many moves are left; `show_neighbours` adds a line with what lies to the left, below,
    to the right and above. With `view` the grid is cut to what lies ahead: as many rows from the player's
    own downwards, and as many columns from the player's own to the right, so that lakes of all sizes look
    alike. `system_prompt`: None is the built-in one.
    """

    def __init__(
        self,
        max_steps: int | None = None,
        show_neighbours: bool = False,
        view: int | None = None,
        system_prompt: str | None = None,
    ) -> None:
        if view is not None and (not isinstance(view, int) or isinstance(view, bool) or view < 1):
            raise ConfigError(f"`view` is {view!r}; it is a number of rows and columns, so choose 1 or more.")
        self._max_steps = max_steps
        self._show_neighbours = show_neighbours
        self._view = view
        self._system_prompt = prompt_named("frozenlake") if system_prompt is None else system_prompt
        self.reset()

    def reset(self) -> None:
        self.begin(self._system_prompt)

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.pay(observation, reward, done, info)
        if not done:  # nobody answers the last observation
            self._messages.append({"role": "user", "content": self._question(observation)})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        action = parse_move(response)
        self._messages.append({"role": "assistant", "content": response})
        self.record(response, action)
        return action

    def _question(self, grid: str) -> str:
        lines = [grid if self._view is None else ahead(grid, self._view)]
        if self._show_neighbours:
            lines.append(neighbours(grid))
        if self._max_steps is not None:
            lines.append(f"Moves left: {self._max_steps - len(self._trajectory.steps)}")
        return "\n".join(lines)


def ahead(grid: str, view: int) -> str:
    """The part of the grid that begins with the player and has at most `view` rows and columns; all of it
    where no player is on the ice."""
    rows = grid.split("\n")
    for row, cells in enumerate(rows):
        if PLAYER in cells:
            column = cells.index(PLAYER)
            return "\n".join(each[column : column + view] for each in rows[row : row + view])
    return grid


def neighbours(grid: str) -> str:
    """The cells to the left of the player, below, to the right and above, one character each; "" for a player
    who left the ice."""
    rows = grid.split("\n")
    places = [(row, cells.index(PLAYER)) for row, cells in enumerate(rows) if PLAYER in cells]
    return "".join(
        _cell(rows, row + down, column + right)
        for row, column in places
        for down, right in _STEP_OF_MOVE.values()
    )


def _cell(rows: list[str], row: int, column: int) -> str:
    inside = 0 <= row < len(rows) and 0 <= column < len(rows[row])
    return rows[row][column] if inside else WALL
