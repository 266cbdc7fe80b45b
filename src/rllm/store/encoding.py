"""An Episode as database rows, and back without loss.

    Episode ──► EpisodeRow (what queries ask for + one JSON payload)      ──► Episode
            └─► StepRow per step (token arrays as blobs, appended parts)  ──┘

Two things would grow with the square of an episode's length if written as they are: each prompt repeats the
prompt and answer before it, and so do the messages. A step stores how many tokens (messages) of the step
before it begins with, and what follows. That is exact for any history: in a rewritten one less is in common.
Where both steps are views of one row, nothing has to be compared to know it, so saving and loading take time
with an episode's length.

Token arrays are little-endian in the narrowest width that holds them; log-probabilities are float32.
"""

import math
import sys
import weakref
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from rllm.errors import AgentError
from rllm.store.payload import pack_payload, require_payload, unpack_payload
from rllm.types.episode import Action, Episode, Step, Trajectory
from rllm.types.messages import Message, ModelOutput
from rllm.types.prefix import Prefix

T = TypeVar("T")


class EpisodeRow(NamedTuple):
    """Columns of `episodes` after the keys, in their order."""

    task_id: str
    attempt: int
    outcome: str | None
    termination_reason: str
    reward: float | None
    """Sum over the trajectories, for queries; None when nobody was paid."""
    is_correct: bool
    num_steps: int
    num_sampled_tokens: int
    started_at: float | None
    """Seconds since 1970, from `Episode.metrics`, for queries."""
    duration_s: float | None
    payload: bytes
    """zlib of JSON: all that no other column holds."""


class StepRow(NamedTuple):
    """Columns of `steps` after the episode's key, in their order."""

    trajectory: int
    position: int
    reward: float
    num_prompt_ids_kept: int
    """The number of tokens of the last step's prompt and response that this prompt begins with."""
    prompt_ids: bytes
    """The ids that follow them."""
    response_ids: bytes
    logprobs: bytes
    policy_versions: bytes


class EncodedEpisode(NamedTuple):
    """The rows of an episode, and its images."""

    row: EpisodeRow
    steps: list[StepRow]
    images: dict[str, bytes]
    """By hash; the rows refer to them."""

    @classmethod
    def of(cls, episode: Episode) -> "EncodedEpisode":
        """See `encode_episode`."""
        images: dict[str, bytes] = {}
        return cls(*encode_episode(episode, images), images)

    def episode(self) -> Episode:
        """The episode with the same values."""
        return decode_episode(self.row, self.steps, self.images)

    def ends_like(self, episode: Episode) -> bool:
        """Whether the episode still has the end that it had when it was encoded."""
        row = self.row
        end = (row.outcome, row.termination_reason, row.is_correct)
        return end == (episode.outcome, episode.termination_reason, episode.is_correct)


def encode_episode(
    episode: Episode, images: dict[str, bytes] | None = None
) -> tuple[EpisodeRow, list[StepRow]]:
    """`images` takes the episode's images by hash, which are then not in the rows.

    Raises AgentError, naming episode, step and field, for a value that JSON cannot hold."""
    rows, fields, where = _rows_and_fields(episode)
    rewards = [float(each.reward) for each in episode.trajectories if each.reward is not None]
    row = EpisodeRow(
        task_id=episode.task_id,
        attempt=int(episode.rollout_idx),
        outcome=None if episode.outcome is None else str(episode.outcome),
        termination_reason=str(episode.termination_reason),
        reward=sum(rewards) if rewards else None,
        is_correct=bool(episode.is_correct),
        num_steps=len(rows),
        num_sampled_tokens=sum(
            len(step.response_ids) for each in episode.trajectories for step in each.steps
        ),
        started_at=_number_or_none(episode.metrics.get("started_at")),
        duration_s=_number_or_none(episode.metrics.get("duration_s")),
        payload=pack_payload(fields, where, images),
    )
    return row, rows


class EncodedEpisodes:
    """Episodes that were encoded for another process, so that the store need not encode them again.

    An episode's rows go with it. Nothing changes an episode after it was played, but that it may fail
    (`rllm.engine.failures.fail_episode`); rows from before that are not given out.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Episode], EncodedEpisode]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, episode: Episode, encoding: EncodedEpisode) -> None:
        # An id is another object's as soon as its own is gone, so the entry goes with the episode.
        key = id(episode)
        self._entries[key] = weakref.ref(episode, lambda _: self._entries.pop(key, None)), encoding

    def of(self, episode: Episode) -> EncodedEpisode:
        """The rows that were added, unless the episode failed since; else new ones."""
        entry = self._entries.get(id(episode))
        if entry is not None and entry[1].ends_like(episode):
            return entry[1]
        return EncodedEpisode.of(episode)


def require_storable(episode: Episode) -> None:
    """Raises what `encode_episode` would raise."""
    _, fields, where = _rows_and_fields(episode)
    require_payload(fields, where)


def _rows_and_fields(episode: Episode) -> tuple[list[StepRow], dict[str, Any], str]:
    """The rows of the steps, what the payload is made of, and how an error names the episode."""
    where = f"Episode {episode.id!r}"
    rows: list[StepRow] = []
    trajectories: list[dict[str, Any]] = []
    for index, trajectory in enumerate(episode.trajectories):
        trajectories.append(_trajectory_fields(trajectory, episode))
        before: Step | None = None
        for position, step in enumerate(trajectory.steps):
            rows.append(
                _step_row(index, position, step, before, f"{where}, step {position} of {trajectory.name!r}")
            )
            trajectories[-1]["steps"].append(_step_fields(step, before))
            before = step
    return rows, _episode_fields(episode, trajectories), where


def decode_episode(
    row: EpisodeRow, step_rows: Iterable[StepRow], images: Mapping[str, bytes] = {}
) -> Episode:
    """`images`: those that `encode_episode` took out of the rows."""
    fields = unpack_payload(row.payload, images)
    fields |= {
        "task_id": row.task_id,
        "rollout_idx": row.attempt,
        "is_correct": bool(row.is_correct),
        "termination_reason": row.termination_reason,
        "outcome": row.outcome,
    }
    for trajectory in fields["trajectories"]:
        trajectory.setdefault("task", fields["task"])
    prompt, response, messages = Prefix[int]([]), list[int](), Prefix[Message]([])
    for step_row in sorted(step_rows, key=itemgetter(0, 1)):
        # The first step of a trajectory keeps nothing of the one before it, which is another trajectory's.
        step = fields["trajectories"][step_row.trajectory]["steps"][step_row.position]
        # The payload has one only where it is -0.0, which the column could not hold.
        step.setdefault("reward", step_row.reward)
        prompt = _continuation(prompt, response, step_row.num_prompt_ids_kept, _unpack(step_row.prompt_ids))
        step["prompt_ids"] = prompt
        step["response_ids"] = _unpack(step_row.response_ids)
        step["logprobs"] = _unpack(step_row.logprobs)
        step["policy_versions"] = _unpack(step_row.policy_versions)
        messages = _continuation(messages, [], step.pop("num_messages_kept", 0), step.pop("messages", []))
        step["chat_completions"] = messages
        if "model_output" in step:
            _restore_output(step["model_output"], step)
        response = step["response_ids"]
    return Episode.from_dict(fields)


def _continuation(before: Prefix[T], answer: list[T], num_kept: int, new: list[T]) -> Prefix[T]:
    """The first `num_kept` of `before` and `answer`, then `new`; of one row where all of both is kept."""
    if num_kept == len(before) + len(answer):
        return before.followed_by([*answer, *new])
    return Prefix([*before[:num_kept], *answer[: max(0, num_kept - len(before))], *new])


def _episode_fields(episode: Episode, trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": episode.id,
        "task": episode.task,
        "session_id": episode.session_id,
        "artifacts": episode.artifacts,
        "metrics": episode.metrics,
        "info": episode.info,
        "trajectories": trajectories,
    }


def _trajectory_fields(trajectory: Trajectory, episode: Episode) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "uid": trajectory.uid,
        "name": trajectory.name,
        "reward": trajectory.reward,
        "signals": trajectory.signals,
        "input": trajectory.input,
        "output": trajectory.output,
        "termination_reason": trajectory.termination_reason,
        "outcome": trajectory.outcome,
        "info": trajectory.info,
        "steps": [],
    }
    # Nearly all trajectories have the episode's own task, which is then stored once.
    if trajectory.task is not episode.task:
        fields["task"] = trajectory.task
    return fields


def _step_row(index: int, position: int, step: Step, before: Step | None, where: str) -> StepRow:
    num_kept = 0 if before is None else _num_ids_kept(before, step.prompt_ids)
    return StepRow(
        trajectory=index,
        position=position,
        reward=_finite(step.reward, where),
        num_prompt_ids_kept=num_kept,
        # Only prompts need 64 bits: they hold the ids of images.
        prompt_ids=_pack(
            step.prompt_ids[num_kept:] if num_kept else step.prompt_ids, "BHIQ", where, "prompt_ids"
        ),
        response_ids=_pack(step.response_ids, "BHI", where, "response_ids"),
        logprobs=_pack(step.logprobs, "f", where, "logprobs"),
        policy_versions=_pack(step.policy_versions, "bhi", where, "policy_versions"),
    )


def _step_fields(step: Step, before: Step | None) -> dict[str, Any]:
    """The payload of a step; a field that has its default is left out."""
    fields: dict[str, Any] = {"id": step.id}
    if repr(float(step.reward)) == "-0.0":
        fields["reward"] = -0.0  # a column of SQLite forgets the sign of a zero
    num_kept = 0 if before is None else _num_equal_messages(before.chat_completions, step.chat_completions)
    if num_kept:
        fields["num_messages_kept"] = num_kept
    if num_kept < len(step.chat_completions):
        fields["messages"] = step.chat_completions[num_kept:]
    if step.action is not None:
        fields["action"] = step.action.to_dict() if isinstance(step.action, Action) else step.action
    if step.model_output is not None:
        fields["model_output"] = _output_fields(step.model_output, step)
    for name in ("input", "output", "observation", "advantage", "policy_version"):
        if (value := getattr(step, name)) is not None:
            fields[name] = value
    for name, default, value in zip(_DEFAULTS, _DEFAULTS.values(), _with_defaults(step), strict=True):
        if not _same(value, default):
            fields[name] = value
    return fields


_DEFAULTS: dict[str, Any] = {
    "thought": "",
    "model_response": "",
    "done": False,
    "mc_return": 0.0,
    "usage": {},
    "timings": {},
    "info": {},
}
_with_defaults = attrgetter(*_DEFAULTS)


_OUTPUT_FIELDS_OF_STEP = {
    "prompt_ids": "prompt_ids",
    "completion_ids": "response_ids",
    "logprobs": "logprobs",
    "policy_versions": "policy_versions",
    "usage": "usage",
    "text": "model_response",
}
"""Field of a ModelOutput: the field of its Step that holds the same. It is stored only when it differs."""
_of_output, _of_step = attrgetter(*_OUTPUT_FIELDS_OF_STEP), attrgetter(*_OUTPUT_FIELDS_OF_STEP.values())


def _output_fields(output: ModelOutput, step: Step) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "finish_reason": output.finish_reason,
        "logprob_meaning": output.logprob_meaning,
        "temperature": output.temperature,
        "latency_s": output.latency_s,
    }
    for own, mine, theirs in zip(_OUTPUT_FIELDS_OF_STEP, _of_output(output), _of_step(step), strict=True):
        if mine is not theirs and not _same(mine, theirs):
            fields[own] = list(mine) if isinstance(mine, Prefix) else mine
    if output.content != output.text:
        fields["content"] = output.content
    if output.reasoning:
        fields["reasoning"] = output.reasoning
    if output.tool_calls:
        fields["tool_calls"] = [asdict(call) for call in output.tool_calls]
    if output.unparsed_markup:
        fields["unparsed_markup"] = True
    if output.queue_s:
        fields["queue_s"] = output.queue_s
    return fields


def _restore_output(fields: dict[str, Any], step: dict[str, Any]) -> None:
    for own, of_step in _OUTPUT_FIELDS_OF_STEP.items():
        if own not in fields:
            fields[own] = step.get(of_step, "" if own == "text" else {} if own == "usage" else [])
    fields.setdefault("content", fields["text"])


def _num_ids_kept(before: Step, prompt_ids: Sequence[int]) -> int:
    """The number of tokens that a prompt shares with the beginning of the step before: its prompt and
    answer."""
    ids_before = before.prompt_ids
    # Views of one row agree as far as both reach. Of them only the answer is compared, which may have been
    # written anew.
    if type(ids_before) is not Prefix or not ids_before.shares_row_with(prompt_ids):
        return _num_equal([*ids_before, *before.response_ids], prompt_ids)
    if len(prompt_ids) < len(ids_before):
        return len(prompt_ids)
    return len(ids_before) + _num_equal(
        before.response_ids, prompt_ids[len(ids_before) : len(ids_before) + len(before.response_ids)]
    )


def _num_equal(earlier: Sequence[int], later: Sequence[int]) -> int:
    """The number of leading tokens that two rows have in common."""
    limit = min(len(earlier), len(later))
    if earlier[:limit] == later[:limit]:
        return limit
    return next(index for index in range(limit) if earlier[index] != later[index])


def _num_equal_messages(earlier: Sequence[Message], later: Sequence[Message]) -> int:
    if type(earlier) is Prefix and earlier.shares_row_with(later):
        return min(len(earlier), len(later))
    num_equal = 0
    for mine, theirs in zip(earlier, later, strict=False):
        if not _same(mine, theirs):
            break
        num_equal += 1
    return num_equal


def _same(mine: Any, theirs: Any) -> bool:
    """Equality alone is not enough: 1 == True == 1.0 and 0.0 == -0.0, and JSON tells them apart."""
    if mine is theirs:
        return True
    if type(mine) is Prefix and mine.shares_row_with(theirs):
        return len(mine) == len(theirs)
    return mine == theirs and repr(mine) == repr(theirs)


_COMPRESS_FROM_BYTES = 1024
"""zlib takes 50 us to set up: below this it costs more than the bytes it saves are worth."""


def _pack(values: Sequence[float], typecodes: str, where: str, field: str) -> bytes:
    """The first of `typecodes` that holds all values, `z` for compressed or `-` for not, then the values."""
    for typecode in typecodes:
        try:
            numbers = array(typecode, values)
        except OverflowError:
            continue
        except TypeError as error:
            raise AgentError(f"{where}: `{field}` holds something else than numbers ({error}).") from error
        if sys.byteorder == "big":
            numbers.byteswap()
        raw = numbers.tobytes()
        if len(raw) < _COMPRESS_FROM_BYTES:
            return f"{typecode}-".encode() + raw
        return f"{typecode}z".encode() + zlib.compress(raw, 1)
    raise AgentError(f"{where}: `{field}` spans {min(values)} to {max(values)}; 32 bits do not hold that.")


def _unpack(blob: bytes) -> list[Any]:
    raw = zlib.decompress(blob[2:]) if blob[1:2] == b"z" else blob[2:]
    numbers = array(chr(blob[0]))
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _finite(reward: float, where: str) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise AgentError(f"{where}: `reward` is {reward!r}; it must be a number.") from error
    if not math.isfinite(number):
        raise AgentError(f"{where}: `reward` is {number}; it must be finite.")
    return number


def _number_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
