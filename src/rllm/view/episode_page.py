"""One episode as a conversation: what is new in each turn, its tokens with their numbers, and its timing.

Episode ──► trajectories ──► turns (a window of them) ──► new messages | answer | tokens | reward | seconds
                        └──► overview of every turn: rewards, seconds, where a segment begins

A trajectory of 2,000 turns is sent a window at a time; its overview is whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rllm.errors import ConfigError
from rllm.store.browsing import EpisodeBrowser, EpisodeFilter
from rllm.store.episodes import EpisodeStore
from rllm.types.content import is_image_part
from rllm.types.episode import Action, Episode, Step, Trajectory
from rllm.types.messages import Message
from rllm.types.prefix import Prefix
from rllm.view.messages import is_picture, shown_message, shown_value
from rllm.view.query import Query
from rllm.view.run_pages import rounded
from rllm.view.sources import Sources
from rllm.view.token_texts import TokenText, token_texts

WINDOW = 50
"""Turns of a trajectory that are sent at a time."""


def episode_page(sources: Sources, query: Query) -> dict[str, Any]:
    """An episode with a window of the turns of each trajectory, or of the one that is asked for."""
    run, row_id = sources.run(query.text("run")), query.number("id", 0)
    with EpisodeBrowser.open(run.store_path) as browser:
        rows = browser.page(EpisodeFilter(ids=[row_id]))
        if not rows:
            raise ConfigError(f"{run.path} holds no episode {row_id}.")
        summary = rows[0]
        of_task = EpisodeFilter(phase=summary.phase, step=summary.step, task_id=summary.task_id)
        attempts = sorted(browser.page(of_task), key=lambda each: each.attempt)
        neighbours = browser.page(EpisodeFilter(ids=[row_id - 1, row_id + 1]))
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        episode, numbers = store.episode(row_id), store.token_numbers(row_id)
    start, count = query.number("from", 0), query.number("count", WINDOW, low=1, high=500)
    only = query.optional_number("trajectory")
    token_text, remark = token_texts(run)
    return {
        **summary._asdict(),
        "run": query.text("run"),
        "remark": remark,
        "task": shown_value(episode.task),
        "metrics": {name: rounded(value) for name, value in episode.metrics.items()},
        "info": shown_value(episode.info) if episode.info else "",
        "artifacts": shown_value(episode.artifacts) if episode.artifacts else "",
        "attempts": [
            {
                "id": each.id,
                "attempt": each.attempt,
                "reward": each.reward,
                "is_correct": each.is_correct,
                "outcome": each.outcome,
                "termination_reason": each.termination_reason,
            }
            for each in attempts
        ],
        "previous": next((each.id for each in neighbours if each.id < row_id), None),
        "next": next((each.id for each in neighbours if each.id > row_id), None),
        "trajectories": [
            _trajectory(trajectory, index, TokenFacts(token_text, numbers, begins), start, count)
            for index, (trajectory, begins) in enumerate(_with_begins(episode))
            if only is None or only == index
        ],
    }


@dataclass(slots=True, frozen=True)
class TokenFacts:
    """Texts and numbers of the tokens of a trajectory, which the episode itself does not hold."""

    text: TokenText
    numbers: Mapping[str, Sequence[float]]
    """The trainer's values of all sampled tokens of the episode."""
    begins: Sequence[int]
    """Which of those is the first of each turn."""


def _with_begins(episode: Episode) -> Iterator[tuple[Trajectory, list[int]]]:
    first = 0
    for trajectory in episode.trajectories:
        ends = list(accumulate((len(step.response_ids) for step in trajectory.steps), initial=first))
        first = ends.pop()
        yield trajectory, ends


def prompt_page(sources: Sources, query: Query) -> dict[str, Any]:
    """The exact prompt of one turn: its ids with their texts, and the messages it was made of."""
    run, row_id = sources.run(query.text("run")), query.number("id", 0)
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        step = _step_of(store.episode(row_id), query)
    token_text, remark = token_texts(run)
    messages = list(step.chat_completions)
    if messages and messages[-1].get("role") == "assistant":
        messages.pop()
    return {
        "ids": list(step.prompt_ids),
        "texts": [token_text(token) for token in step.prompt_ids],
        "response_ids": list(step.response_ids),
        "messages": messages,
        "answer": step.model_response,
        "temperature": None if step.model_output is None else step.model_output.temperature,
        "model": str(run.config().get("model", {}).get("path", "")),
        "store": str(run.store_path),
        "remark": remark,
    }


def _step_of(episode: Episode, query: Query) -> Step:
    trajectory, turn = query.number("trajectory", 0), query.number("turn", 0)
    try:
        return episode.trajectories[trajectory].steps[turn]
    except IndexError:
        raise ConfigError(f"Episode {episode.id} has no turn {turn} in trajectory {trajectory}.") from None


def _trajectory(
    trajectory: Trajectory, index: int, tokens: TokenFacts, start: int, count: int
) -> dict[str, Any]:
    steps = trajectory.steps
    spans = [spans_of(step.timings) for step in steps]
    begins = segment_beginnings(steps)
    return {
        "index": index,
        "name": trajectory.name,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome,
        "termination_reason": trajectory.termination_reason,
        "signals": {name: rounded(value) for name, value in trajectory.signals.items()},
        "info": shown_value(trajectory.info) if trajectory.info else "",
        "error": _error_of(trajectory),
        "num_turns": len(steps),
        "segments": [{"turn": turn, "reason": reason} for turn, reason in begins.items()],
        "overview": {
            "reward": [rounded(step.reward) for step in steps],
            "tokens": [len(step.response_ids) for step in steps],
            **{
                name: [rounded(each.get(name)) for each in spans]
                for name in (*_SPANS, *dict.fromkeys(name for each in spans for name in each))
                if any(name in each for each in spans)
            },
        },
        "from": start,
        "turns": [
            _turn(steps, turn, begins.get(turn), tokens)
            for turn in range(start, min(len(steps), start + count))
        ],
    }


_SPANS = ("queue_s", "model_s", "env_s", "grader_s")
"""Spans of a turn, in the order in which they follow each other."""


def spans_of(timings: Mapping[str, float]) -> dict[str, float]:
    """Seconds that add up: what was waited for a place in the engine is no part of the model's, and what a
    grader took no part of its environment's."""
    spans = dict(timings)
    for whole, part in (("model_s", "queue_s"), ("env_s", "grader_s")):
        if whole in spans and part in spans:
            spans[whole] = max(0.0, spans[whole] - spans[part])
    return {name: spans[name] for name in (*_SPANS, *spans) if name in spans}


def _error_of(trajectory: Trajectory) -> str:
    error = trajectory.info.get("error")
    return f"{error.get('type')}: {error.get('message')}" if isinstance(error, dict) else ""


def _turn(steps: Sequence[Step], turn: int, segment_reason: str | None, tokens: TokenFacts) -> dict[str, Any]:
    step, before = steps[turn], steps[turn - 1] if turn else None
    output = step.model_output
    answer = shown_message({"role": "assistant", "content": step.model_response})
    if output is not None:
        answer["text"] = output.content or output.text
        answer["reasoning"] = output.reasoning or step.thought
        answer["calls"] = [
            {"name": call.name, "arguments": shown_value(call.arguments), "id": call.id}
            for call in output.tool_calls
        ]
    info = {name: value for name, value in step.info.items() if not is_picture(value)}
    action = step.action.action if isinstance(step.action, Action) else step.action
    return {
        "turn": turn,
        "segment": segment_reason,
        "messages": [shown_message(message) for message in new_messages(step, before)],
        "observation": None if step.observation is None else _shown_observation(step.observation),
        "pictures": [each for each in step.info.values() if is_picture(each)],
        "answer": {name: value for name, value in answer.items() if value},
        "action": "" if action is None else shown_value(action),
        "reward": step.reward,
        "done": step.done,
        "mc_return": rounded(step.mc_return),
        "info": shown_value(info) if info else "",
        "timings": {name: rounded(value) for name, value in spans_of(step.timings).items()},
        "usage": step.usage,
        "finish_reason": None if output is None else output.finish_reason,
        "temperature": None if output is None else output.temperature,
        "logprob_meaning": None if output is None else output.logprob_meaning,
        "num_prompt_ids": len(step.prompt_ids),
        "tokens": _columns(step, tokens, tokens.begins[turn]),
    }


def _shown_observation(observation: Any) -> dict[str, Any]:
    """The state that an environment showed: text, a picture, or parts of both."""
    parts = observation if isinstance(observation, list) else [observation]
    if any(is_image_part(part) for part in parts):
        return shown_message({"role": "observation", "content": parts})
    if is_picture(observation):
        return {"role": "observation", "text": "", "images": [observation]}
    return {"role": "observation", "text": shown_value(observation)}


def _columns(step: Step, tokens: TokenFacts, first: int) -> dict[str, list[Any]]:
    """The sampled tokens, a list for each of their numbers; those that nobody kept are left out."""
    columns: dict[str, list[Any]] = {
        "id": list(step.response_ids),
        "text": [tokens.text(token) for token in step.response_ids],
        "logprob": [rounded(value) for value in step.logprobs],
        "version": list(step.policy_versions),
    }
    if step.advantage is not None:
        each = (
            step.advantage if isinstance(step.advantage, list) else [step.advantage] * len(step.response_ids)
        )
        columns["advantage"] = [rounded(value) for value in each]
    for name, values in tokens.numbers.items():
        of_turn = [rounded(value) for value in values[first : first + len(step.response_ids)]]
        if any(value is not None for value in of_turn):
            columns[name] = of_turn
    return columns


def new_messages(step: Step, before: Step | None) -> list[Message]:
    """The messages of a turn that the turn before did not have, without the answer itself."""
    messages = step.chat_completions
    start = 0 if before is None else num_common(before.chat_completions, messages)
    new = list(messages[start:])
    if new and new[-1].get("role") == "assistant":
        new.pop()
    return new


def segment_beginnings(steps: Sequence[Step]) -> dict[int, str]:
    """Turn -> why a new row of tokens begins there: its prompt does not begin with all that came before."""
    begins: dict[int, str] = {}
    for turn, step in enumerate(steps):
        if turn == 0:
            begins[turn] = "the conversation begins"
            continue
        before = steps[turn - 1]
        expected = len(before.prompt_ids) + len(before.response_ids)
        if not before.prompt_ids or not step.prompt_ids or _goes_on(before, step):
            continue
        num_ids = num_common([*before.prompt_ids, *before.response_ids], step.prompt_ids)
        num_messages = num_common(before.chat_completions, step.chat_completions)
        begins[turn] = f"the prompt repeats {num_ids:,} of the {expected:,} tokens before it" + (
            f", and message {num_messages + 1} is another"
            if num_messages < len(before.chat_completions)
            else ": the same messages were written in other tokens"
        )
    return begins


def _goes_on(before: Step, step: Step) -> bool:
    """Whether a prompt begins with prompt and answer of the step before."""
    start, end = len(before.prompt_ids), len(before.prompt_ids) + len(before.response_ids)
    if len(step.prompt_ids) < end or step.prompt_ids[start:end] != before.response_ids:
        return False
    ids = before.prompt_ids
    # Two prefixes of one stored row are alike without a look at their tokens, of which there may be many.
    if isinstance(ids, Prefix) and ids.shares_row_with(step.prompt_ids):
        return True
    return step.prompt_ids[:start] == ids[:start]


def num_common(earlier: Sequence[Any], later: Sequence[Any]) -> int:
    """The number of items that two sequences begin with alike."""
    if isinstance(earlier, Prefix) and earlier.shares_row_with(later):
        return min(len(earlier), len(later))
    limit = min(len(earlier), len(later))
    return next((index for index in range(limit) if earlier[index] != later[index]), limit)
