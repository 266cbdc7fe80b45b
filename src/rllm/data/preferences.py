"""Which answers are compared: dataset rows in chat form, or the attempts of a stored run.

    {"prompt", "chosen", "rejected"} ─┐
    {"prompt", "completion", "label"} ┴─► PreferenceRow: conversations with +1 better, -1 worse
    episodes ──► attempts at one task after one prompt ──► pairs of a success and a failure, counted

Each answer of a row is a conversation of `rllm.data.chat` whose prompt is read and whose rest is learned, so
tools, several turns and everything that is refused there are the same. Attempts of a stored run keep the ids
that were sampled.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.algorithms.grouping import LEARNABLE
from rllm.config.preference import PreferenceDataConfig
from rllm.data.chat import Chat, Problems, chat_of
from rllm.data.jsonl import read_jsonl_lines
from rllm.errors import ConfigError
from rllm.types.episode import Episode, TerminationReason, Trajectory
from rllm.types.messages import Message


@dataclass(kw_only=True, slots=True, frozen=True)
class PreferenceRow:
    """One prompt and what was answered to it."""

    where: str
    """Its row, for people."""
    answers: tuple[tuple[int, Chat], ...]
    """(1, better) and (-1, worse) of a pair; one of the two of an answer with a label."""


def read_comparisons(path: Path, *, paired: bool) -> list[PreferenceRow]:
    """The rows of a JSONL file; `paired`: with `chosen` and `rejected`, else with `completion` and `label`.

    Raises ConfigError naming the lines that are none.
    """
    return _comparisons(
        ((f"{path.name}:{number}", row) for number, row in read_jsonl_lines(path)), paired=paired
    )


def comparisons_of(rows: Iterable[Any], *, paired: bool) -> list[PreferenceRow]:
    """The same for rows from Python, counted from 0."""
    return _comparisons(((f"row {number}", row) for number, row in enumerate(rows)), paired=paired)


def _comparisons(rows: Iterable[tuple[str, Any]], *, paired: bool) -> list[PreferenceRow]:
    comparisons: list[PreferenceRow] = []
    problems = Problems()
    for where, row in rows:
        try:
            if not isinstance(row, Mapping):
                raise ConfigError(f"it is a {type(row).__name__}; give an object with `prompt`.")
            answers = _pair(row, where) if paired else _labels(row, where)
            comparisons.append(PreferenceRow(where=where, answers=answers))
        except ConfigError as error:
            problems.note(where, error)
    problems.raise_any()
    if not comparisons:
        raise ConfigError("The dataset is empty; give at least one preference.")
    return comparisons


def _pair(row: Mapping[str, Any], where: str) -> tuple[tuple[int, Chat], ...]:
    chosen = _answer(row, "chosen", "give `prompt`, `chosen` and `rejected`, or choose `kto` for labels")
    rejected = _answer(row, "rejected", "give `prompt`, `chosen` and `rejected`")
    if "prompt" in row or "messages" in row:
        prompt = _prompt(row)
    else:
        prompt = _common(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise ConfigError("`chosen` and `rejected` are the same, so nothing is preferred; leave the row out.")
    return (1, _chat(row, prompt, chosen, "chosen", where)), (
        -1,
        _chat(row, prompt, rejected, "rejected", where),
    )


def _labels(row: Mapping[str, Any], where: str) -> tuple[tuple[int, Chat], ...]:
    hint = "give `prompt`, `completion` and `label`"
    completion = _answer(row, "completion", hint)
    label = row.get("label")
    if not isinstance(label, bool):
        raise ConfigError(f"`label` is {label!r}; it must be true (desirable) or false.")
    return ((1 if label else -1, _chat(row, _prompt(row), completion, "completion", where)),)


def _answer(row: Mapping[str, Any], name: str, hint: str) -> list[Message]:
    value = row.get(name)
    if value is None:
        raise ConfigError(f"it has no `{name}`, but {', '.join(map(str, row)) or 'nothing'}; {hint}.")
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _messages([value] if isinstance(value, Mapping) else value, name)


def _prompt(row: Mapping[str, Any]) -> list[Message]:
    name = "prompt" if "prompt" in row else "messages"
    value = row.get(name)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else _messages(value, name)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"`{name}` ends with an answer; put it into the answers that are compared.")
    return messages


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"`{name}` is {value!r:.60}; it must be text, or a list of messages.")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"`{name}[{place}]` is {message!r:.60}; it must be an object with a `role`.")
    return [dict(message) for message in value]


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """The common beginning of two whole conversations, up to the last question in it."""
    num_shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        num_shared += 1
    while num_shared and chosen[num_shared - 1]["role"] == "assistant":
        num_shared -= 1
    if not num_shared:
        raise ConfigError(
            "it has no `prompt`, and `chosen` and `rejected` begin differently; give the prompt."
        )
    return list(chosen[:num_shared])


def _chat(
    row: Mapping[str, Any], prompt: list[Message], answer: list[Message], name: str, where: str
) -> Chat:
    if answer and answer[0]["role"] != "assistant":
        raise ConfigError(
            f"`{name}` begins with the role {answer[0]['role']!r}; an answer is the assistant's."
        )
    try:
        return chat_of({"prompt": prompt, "completion": answer, "tools": row.get("tools")}, where)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


# ---- a stored run ------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, frozen=True)
class Played:
    """One trajectory of a stored run that says something about the policy."""

    where: str
    """Its episode, for people."""
    task: str
    """The question, whatever the visit."""
    trajectory: Trajectory
    success: bool

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids that the attempt began with."""
        return tuple(self.trajectory.steps[0].prompt_ids)

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """Everything read and sampled, turn by turn: two attempts with the same are one."""
        return tuple((*step.prompt_ids, *step.response_ids) for step in self.trajectory.steps)


@dataclass(kw_only=True, slots=True)
class RunCounts:
    """The numbers of a run's trajectories by what became of them.

    trajectories = other_role + failed + timed_out + unscored + repeated + contradictory
                 + successes + failures
    """

    trajectories: int = 0
    other_role: int = 0
    failed: int = 0
    """The number of episodes that infrastructure or the agent failed, or that were cancelled: never a worse
    answer."""
    timed_out: int = 0
    """Cut off by the clock, which says nothing about the answer."""
    unscored: int = 0
    repeated: int = 0
    """Token for token as an attempt before it, with the same result."""
    contradictory: int = 0
    """Token for token as an attempt with the other result: chance decided, not the answer."""
    successes: int = 0
    failures: int = 0
    tasks: int = 0
    tasks_with_both: int = 0
    """With a success and a failure after one prompt."""


def plays_of(
    episodes: Iterable[Episode], task_of: Callable[[Episode], str], data: PreferenceDataConfig
) -> tuple[list[Played], RunCounts]:
    """Successes and failures of one role, each sequence of tokens once.

    `task_of` says what was asked, whatever the visit. Raises ConfigError where the role has to be named, or
    is not there.
    """
    plays: list[Played] = []
    counts = RunCounts()
    roles: Counter[str] = Counter()
    for episode in episodes:
        for trajectory in episode.trajectories:
            counts.trajectories += 1
            roles[trajectory.name] += 1
            reward = trajectory.reward
            if data.role not in ("", trajectory.name):
                counts.other_role += 1
            elif episode.outcome not in LEARNABLE or not trajectory.steps:
                counts.failed += 1
            elif TerminationReason.TIMEOUT in (episode.termination_reason, trajectory.termination_reason):
                counts.timed_out += 1
            elif reward is None:
                counts.unscored += 1
            else:
                plays.append(
                    Played(
                        where=f"episode {episode.id} ({trajectory.name})",
                        task=task_of(episode),
                        trajectory=trajectory,
                        success=reward >= data.min_reward,
                    )
                )
    _require_one_role(roles, data)
    return _each_once(plays, counts), counts


def _require_one_role(roles: Iterable[str], data: PreferenceDataConfig) -> None:
    names = sorted(roles)
    if data.role and data.role not in names:
        raise ConfigError(
            f"`data.role` is {data.role!r}; the training episodes have {', '.join(names) or 'none'}."
        )
    if not data.role and len(names) > 1:
        raise ConfigError(
            f"The training episodes of {data.run} have several roles; set `data.role` to one of "
            f"{', '.join(names)}."
        )


def _each_once(plays: Sequence[Played], counts: RunCounts) -> list[Played]:
    keys = [(each.task, each.ids) for each in plays]
    results: dict[tuple[str, Any], set[bool]] = {}
    for key, each in zip(keys, plays, strict=True):
        results.setdefault(key, set()).add(each.success)
    first_plays: dict[tuple[str, Any], Played] = {}
    for key, each in zip(keys, plays, strict=True):
        if len(results[key]) == 2:
            counts.contradictory += 1
        elif key in first_plays:
            counts.repeated += 1
        else:
            first_plays[key] = each
    counts.successes = sum(each.success for each in first_plays.values())
    counts.failures = len(first_plays) - counts.successes
    return list(first_plays.values())


def pairs_of(
    attempts: Sequence[Played], data: PreferenceDataConfig, counts: RunCounts
) -> list[tuple[Played, Played]]:
    """(success, failure) at one task after one prompt, by `data.pairing`; of each task the first
    `data.max_per_task`."""
    after: dict[str, dict[tuple[int, ...], list[Played]]] = {}
    for each in attempts:
        after.setdefault(each.task, {}).setdefault(each.prompt_ids, []).append(each)
    of_task = {
        task: [pair for group in prompts.values() for pair in _pairs(group, data.pairing)]
        for task, prompts in after.items()
    }
    counts.tasks = len(of_task)
    counts.tasks_with_both = sum(bool(pairs) for pairs in of_task.values())
    return [pair for pairs in of_task.values() for pair in pairs[: data.max_per_task or None]]


def _pairs(group: Sequence[Played], pairing: str) -> Iterator[tuple[Played, Played]]:
    successes = [each for each in group if each.success]
    failures = [each for each in group if not each.success]
    if pairing == "all":
        return ((better, worse) for better in successes for worse in failures)
    return zip(successes, failures, strict=False)


def at_most(attempts: Sequence[Played], limit: int, counts: RunCounts) -> list[Played]:
    """The first `limit` answers to each task, for a loss that needs no pairs; 0 takes all."""
    of_task: dict[str, list[Played]] = {}
    for each in attempts:
        of_task.setdefault(each.task, []).append(each)
    counts.tasks = len(of_task)
    counts.tasks_with_both = sum(len({each.success for each in mine}) == 2 for mine in of_task.values())
    return [each for mine in of_task.values() for each in mine[: limit or None]]
