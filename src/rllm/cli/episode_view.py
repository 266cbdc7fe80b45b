"""One episode on the screen, turn by turn: what the agent saw, wrote token by token, and was paid.

Episode, token texts ──► header, then per turn: observation | tokens by log-probability, action, reward
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rllm.types.content import source_of, with_captions
from rllm.types.episode import Action, Episode, Outcome, Step, Trajectory
from rllm.view.token_texts import TokenText

_GRID = re.compile(r"[SFHGPXW]{2,}(\n[SFHGPXW]{2,})+")
_CELLS = {"P": "bold", "H": "blue", "G": "green", "X": "bold red", "W": "bold green", "F": "dim", "S": "dim"}
_UNLIKELY = -3.0
"""Log-probability, in nats, from which on a token is plain red."""
_SCALE = ((0.0, (60, 180, 75)), (0.5, (225, 190, 40)), (1.0, (220, 60, 50)))
"""Share of the way from 0 to `_UNLIKELY` -> red, green, blue."""


def episode_view(episode: Episode, token_text: TokenText, where: str) -> RenderableType:
    """`where` says which episode of which phase it is."""
    parts: list[RenderableType] = [_header(episode, where)]
    for trajectory in episode.trajectories:
        if len(episode.trajectories) > 1:
            parts.append(Text(f"\n{trajectory.name}", style="bold underline"))
        if (instructions := _system_text(trajectory)) is not None:
            parts.append(instructions)
        pays_by_step = _pays_by_step(trajectory)
        for number, step in enumerate(trajectory.steps, start=1):
            parts.append(_turn(number, step, token_text, pays_by_step=pays_by_step))
        parts.append(_ending(trajectory))
    parts.append(_legend())
    return Group(*parts)


def token_color(logprob: float) -> str:
    """Green for what was certain, through yellow, to red for what was unlikely."""
    share = min(1.0, max(0.0, logprob / _UNLIKELY))
    for (low, start), (high, end) in itertools.pairwise(_SCALE):
        if share <= high:
            part = (share - low) / (high - low)
            channels = (round(a + (b - a) * part) for a, b in zip(start, end, strict=True))
            return f"rgb({','.join(map(str, channels))})"
    raise AssertionError("the scale ends at 1, and a share is at most 1")


def observation_text(observation: Any) -> Text:
    """A grid with its cells coloured; anything else as it is, with captions for images."""
    text = Text(with_captions(_panel_text(observation)))
    if isinstance(observation, str) and _GRID.fullmatch(observation):
        for place, cell in enumerate(observation):
            if cell in _CELLS:
                text.stylize(_CELLS[cell], place, place + 1)
    return text


def _header(episode: Episode, where: str) -> Text:
    style = "green" if episode.is_correct else "yellow" if episode.outcome is Outcome.TRUNCATED else "red"
    return Text.assemble(
        (where, "bold"),
        f"\ntask {episode.task_id}, attempt {episode.rollout_idx}: ",
        ("success" if episode.is_correct else "no success", style),
        f", reward {episode.reward:g}",
    )


def _system_text(trajectory: Trajectory) -> RenderableType | None:
    """The system message that the conversation begins with; None where there is none."""
    for step in trajectory.steps[:1]:
        for message in step.chat_completions:
            if message.get("role") == "system":
                text = Text(with_captions(_panel_text(message)))
                return Group(Text("\nSystem", style="bold"), Padding(text, (0, 0, 0, 2)))
    return None


def _pays_by_step(trajectory: Trajectory) -> bool:
    """Whether the steps were paid; programs and their evaluators pay the whole alone."""
    return trajectory.reward is None or any(step.reward for step in trajectory.steps) or not trajectory.reward


def _turn(number: int, step: Step, token_text: TokenText, *, pays_by_step: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 4))
    grid.add_column(no_wrap=True, overflow="fold", max_width=60)
    grid.add_column(overflow="fold")
    grid.add_row(
        observation_text(_step_panel(step)),
        Group(*_answer_lines(step, token_text, pays_by_step=pays_by_step)),
    )
    return Group(Text(f"\nTurn {number}", style="bold"), Padding(grid, (0, 0, 0, 2), expand=False))


def _step_panel(step: Step) -> Any:
    """The view of the agent; where it kept no observation, the message it was answering."""
    if step.observation is not None:
        return step.observation
    prompt_messages = [message for message in step.chat_completions if message.get("role") != "assistant"]
    return prompt_messages[-1].get("content", "") if prompt_messages else ""


def prompt_text(step: Step) -> str:
    """Return what the model answered: the observation, or the message."""
    return with_captions(_panel_text(_step_panel(step)))


def _panel_text(value: Any) -> str:
    """Messages and their parts as the texts and images that they show; anything else as it is."""
    if isinstance(value, list) and value and all(map(_is_message_or_part, value)):
        return "\n".join(map(_panel_text, value))
    if not _is_message_or_part(value):
        return str(value)
    if "role" in value:
        return _panel_text(value.get("content") or "")
    return source_of(value) or str(value.get("text", value))


def _is_message_or_part(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and ("role" in value or "type" in value)


def _answer_lines(step: Step, token_text: TokenText, *, pays_by_step: bool) -> list[Text]:
    action = step.action.action if isinstance(step.action, Action) else step.action
    lines = [
        Text.assemble(("tokens  ", "dim"), _token_row(step, token_text)),
        Text.assemble(("action  ", "dim"), str(action)),
    ]
    if pays_by_step:
        style = "bold green" if step.reward > 0 else ""
        lines.append(Text.assemble(("reward  ", "dim"), (f"{step.reward:g}", style)))
    if step.info:
        facts_line = ", ".join(f"{name} {value}" for name, value in step.info.items())
        lines.append(Text.assemble(("info    ", "dim"), (facts_line, "dim")))
    return lines


def _token_row(step: Step, token_text: TokenText) -> Text:
    row = Text()
    for index, token in enumerate(step.response_ids):
        text = visible(token_text(token))
        if index < len(step.logprobs):
            logprob = step.logprobs[index]
            nats = round(logprob, 2) + 0.0  # no -0.00
            row.append(text, style=token_color(logprob)).append(f" {nats:.2f}   ", style="dim")
        else:
            row.append(f"{text}   ")
    return row


def visible(text: str) -> str:
    """A token with its spaces and line ends made visible."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def _ending(trajectory: Trajectory) -> Text:
    reward = "not paid" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    text = Text.assemble(
        ("\nEnded: ", "bold"),
        f"{_REASONS.get(trajectory.termination_reason, trajectory.termination_reason)} "
        f"({trajectory.termination_reason}); {trajectory.outcome or 'not judged'}, {reward}",
    )
    error = trajectory.info.get("error")
    if isinstance(error, dict):
        text.append(f"\n{error.get('type')}: {error.get('message')}", style="red")
    return text


_REASONS = {
    "env_done": "the environment said it is over",
    "max_turns_exceeded": "no turns were left",
    "max_prompt_length_exceeded": "the conversation no longer fitted the context",
    "max_response_length_exceeded": "the answer was too long",
    "max_cost_exceeded": "its calls had cost all that they may",
    "timeout": "time was up",
    "error": "something raised an error",
}


def _legend() -> Text:
    legend = Text.assemble(("Log-probability of a token when it was sampled, in nats: ", "dim"))
    for logprob, label in (
        (0.0, "0"),
        (-0.75, "-0.75"),
        (-1.5, "-1.5"),
        (-2.25, "-2.25"),
        (-3.0, "-3 or less"),
    ):
        legend.append("■ ", style=token_color(logprob)).append(f"{label}  ", style="dim")
    return legend
