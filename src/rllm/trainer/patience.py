"""Early stopping: a run ends when its evaluations between no longer show a gain.

values by task ──► Patience.note ──► a gain over the last one that was a gain? else one more is flat

A gain is seen in an interval of pairs of the same tasks, so chance alone does not keep a run alive. A curve
that rises slowly is not flat: it is compared with where it last rose for certain, not with the point before.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rllm.eval.skill import SkillVerdict, Values, skill_of


@dataclass(kw_only=True, slots=True)
class Patience:
    """The memory of a run for its evaluations between steps."""

    last_gain: dict[str, float] = field(default_factory=dict[str, float])
    """Return of each task in the evaluation that showed the last gain, at first in the first of them."""
    flat: int = 0
    """Evaluations since then."""

    def note(self, values: Values, instances: Mapping[str, str]) -> None:
        """One evaluation more."""
        if not self.last_gain or self._is_gain(values, instances):
            self.last_gain, self.flat = dict(values), 0
        else:
            self.flat += 1

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def _is_gain(self, values: Values, instances: Mapping[str, str]) -> bool:
        if not any(each in values for each in self.last_gain):  # all of them failed: nothing can be said
            return False
        difference, _ = skill_of(values, {"last gain": self.last_gain}, instances)
        return difference.verdict is SkillVerdict.GAINED
