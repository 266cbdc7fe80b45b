"""The conditions of an episode that is kept and learned from; one that breaks them fails alone, as soon as it
ends.

episode ──► types, sizes, uids, what the store can hold? ──► yes: as it is
                                                         └─► no: failed, with what of it can be kept

Users' classes may put anything into an episode. Found only when it is saved or learned from, one such value
would end a run of thousands.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from rllm.engine.contracts import require_episode
from rllm.engine.failures import contract_error_of, fail_episode
from rllm.engine.rollout import PAID
from rllm.errors import AgentError, RewardError
from rllm.store.encoding import require_storable
from rllm.types.episode import Episode, Outcome, Step, Trajectory

Part = TypeVar("Part", Episode, Trajectory, Step)

MAX_ABS_REWARD = 1e18
"""Its square is still a number in 32 bits, so what is made of rewards is one as well."""
_MAX_KEYS_TRIED = 100
"""The number of keys that are tried one by one of a dict that cannot be kept whole."""


class Records:
    """The episodes of one run of an engine, as they end."""

    def __init__(self, place: str, *, is_stored: bool) -> None:
        """`place`: whose values these are, for the record of a failure. `stored`: a store is to hold them."""
        self._place = place
        self._is_stored = is_stored
        self._uids: set[str] = set()

    def keep(self, episode: Episode, error: BaseException | None) -> tuple[Episode, BaseException | None]:
        """The episode and what made it fail; where it cannot be kept, one that can."""
        if episode.outcome is Outcome.CANCELLED:
            return episode, error
        try:
            self._require(episode)
        except Exception as unfit:  # noqa: BLE001  of users' values, which may do anything when looked at
            cause = contract_error_of(unfit, f"Episode {episode.id} cannot be kept")
            if episode.outcome not in PAID:
                return _rest_of(episode, str(cause)), error
            rest = _rest_of(episode)
            fail_episode(rest, cause, self._place)
            return rest, cause
        self._uids |= {each.uid for each in episode.trajectories}
        return episode, error

    def _require(self, episode: Episode) -> None:
        where = f"Episode {episode.id}"
        require_episode(episode, where)
        # On a copy, because an episode that is refused later in this loop must leave no uid behind.
        uids = self._uids.copy() if len(episode.trajectories) > 1 else self._uids
        for trajectory in episode.trajectories:
            if trajectory.uid in uids:
                raise AgentError(
                    f"{where} has a trajectory of role {trajectory.name!r} with the uid of another, "
                    f"{trajectory.uid}; make a new Trajectory for each, as an agent's reset() does."
                )
            if uids is not self._uids:
                uids.add(trajectory.uid)
            for reward in (trajectory.reward or 0.0, *(step.reward for step in trajectory.steps)):
                # Not `>`, which is false for NaN.
                if not abs(reward) <= MAX_ABS_REWARD:
                    raise RewardError(
                        f"{where} has a reward of {reward:g} (role {trajectory.name!r}); rewards must be "
                        f"between {-MAX_ABS_REWARD:g} and {MAX_ABS_REWARD:g}, so that they can be compared."
                    )
        if self._is_stored:
            require_storable(episode)


def _rest_of(episode: Episode, why: str = "") -> Episode:
    """A new episode of all that can be kept of it; nothing of it is shared with the old one."""
    rest = _storable_part(episode, Episode(), lambda each: each)
    rest.outcome = episode.outcome
    for trajectory in _instances(episode.trajectories, Trajectory):
        part = _storable_part(trajectory, Trajectory(), lambda each: Episode(trajectories=[each]))
        part.outcome, part.reward = trajectory.outcome, None
        part.steps = [
            _storable_part(step, Step(), lambda each: Episode(trajectories=[Trajectory(steps=[each])]))
            for step in _instances(trajectory.steps, Step)
        ]
        rest.trajectories.append(part)
    if why:
        rest.info["left_out"] = why
    return rest


def _instances(values: Any, kind: type[Part]) -> list[Part]:
    return [each for each in values if isinstance(each, kind)] if isinstance(values, list) else []


def _storable_part(source: Part, part: Part, episode_of: Callable[[Part], Episode]) -> Part:
    """`part` with each field of `source` that an episode can be stored with; of dicts key by key."""
    for name in (each.name for each in fields(source) if each.name not in ("trajectories", "steps", "uid")):
        trial, value = type(part)(), getattr(source, name)
        choices = [value]
        if isinstance(value, dict) and isinstance(getattr(part, name), dict):
            keys = list(value) if len(value) <= _MAX_KEYS_TRIED else []
            choices += [{key: value[key]} for key in keys]
        # The whole value first; key by key only where that fails.
        for number, choice in enumerate(choices):
            setattr(trial, name, choice)
            if not _is_storable(episode_of(trial)):
                continue
            if number == 0:
                setattr(part, name, value)
                break
            getattr(part, name).update(choice)
    return part


def _is_storable(episode: Episode) -> bool:
    try:
        require_episode(episode, "")
        require_storable(episode)
    except Exception:  # noqa: BLE001  of users' values, which may do anything when looked at
        return False
    return True
