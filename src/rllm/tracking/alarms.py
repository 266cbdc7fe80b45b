"""Alarms of a training run in words, each with what to do about it.

    lines of metrics.jsonl ──► alarms_of: what holds now, for the page of a run
                           └─► AlarmWatch: what begins to hold in a step, for the screen and the end of a run

Hints and problems look at the mean of the last steps, so that one odd step raises nothing. Critical alarms
say that a run is being spoilt; `stop_on_alarm` ends it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

NUM_STEPS = 10
"""The number of last steps that a rule looks at."""
_LATEST = 3
"""The same for critical alarms, which shall come before all is lost."""
_MOVED, _ENTROPY_FLOOR, _ENTROPY_SHARE, _GOOD, _CUT, _LEARNT = 0.1, 0.05, 0.05, 0.9, 0.5, 0.05
CRITICAL = "critical"
_TIED, _FAILED, _CLIPPED, _DROPPED = 0.6, 0.1, 0.3, 0.25
_KL, _LOGPROB_GAP, _HELDOUT_DROP, _NORM_JUMP = 0.1, 0.05, 0.1, 10.0
_RATIO_LOW, _RATIO_HIGH = 0.8, 1.25
_SOLVED, _SAMPLING_SHARE = 0.98, 0.85
_SAMPLER_KL = 0.02
"""Nats a token. A pretrained model in bfloat16 beside itself in float32 has a thousandth of a nat."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Alarm:
    """One thing that a person should look at."""

    name: str
    level: str
    """`critical`, `problem`, or `hint`."""
    sentence: str
    mend: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def alarms_of(lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Alarm]:
    """`lines`: those of training, in order; `config`: the run's."""
    recent = lines[-NUM_STEPS:]
    if not recent:
        return []
    rules = (*_CRITICAL_RULES, _no_reward, _ties, _failures, _update_size, _gaps, _heldout, _tokens, _time)
    alarms = [alarm for rule in rules for alarm in rule(lines, recent, config)]
    # A policy that always says the same ties in every group: harder or easier tasks would not help it.
    has_collapsed = any(alarm.name == "entropy" for alarm in alarms)
    return [alarm for alarm in alarms if not (has_collapsed and alarm.name in ("ties", "no reward"))]


@dataclass(kw_only=True, slots=True, frozen=True)
class AlarmEvent:
    """An alarm and the step in which it began to hold."""

    step: int
    alarm: Alarm

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, **self.alarm.to_dict()}

    def __str__(self) -> str:
        return f"Step {self.step + 1}: {self.alarm.sentence} {self.alarm.mend}"


class AlarmWatch:
    """Looks at a run step by step, and raises each critical alarm when it begins to hold."""

    def __init__(self, config: Mapping[str, Any], lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """`lines`: of the steps so far, where a run is resumed."""
        self._config = config
        self._lines: list[Mapping[str, Any]] = []
        self._active: set[str] = set()
        self.history: list[AlarmEvent] = []
        """All so far, in order."""
        for line in lines:
            self.observe(line)

    def observe(self, line: Mapping[str, Any]) -> list[AlarmEvent]:
        """Return the alarms that begin with this line of a training step."""
        self._lines.append(line)
        recent = self._lines[-NUM_STEPS:]
        alarms = [alarm for rule in _CRITICAL_RULES for alarm in rule(self._lines, recent, self._config)]
        new = [
            AlarmEvent(step=int(line["step"]), alarm=alarm)
            for alarm in alarms
            if alarm.name not in self._active
        ]
        self._active = {alarm.name for alarm in alarms}
        self.history += new
        return new


Lines = Sequence[Mapping[str, Any]]


def _large_step(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    kl = max((float(recent[-1][name]) for name in recent[-1] if name.endswith("update_kl")), default=0.0)
    if kl > _MOVED:
        rate = config["optimizer"]["learning_rate"]
        yield Alarm(
            name="large step",
            level=CRITICAL,
            sentence=f"One step moved the policy by {kl:.2g} nats a token, and {_MOVED:g} is much.",
            mend=f"Lower `optimizer.learning_rate`, which is {rate:g}, to {rate / 5:g}, or raise "
            "`optimizer.warmup_steps`.",
        )


def _success_lost(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    latest, earlier = lines[-_LATEST:], lines[:-_LATEST]
    before = _mean(earlier[-NUM_STEPS:], "success")
    if len(latest) == _LATEST and before is not None and before > _LEARNT and _mean(latest, "success") == 0.0:
        yield Alarm(
            name="success lost",
            level=CRITICAL,
            sentence=f"Nothing succeeded in the last {_LATEST} steps; before, {before:.0%} of attempts did.",
            mend="Begin again with a lower `optimizer.learning_rate`; look at an episode of these steps.",
        )


def _all_failed(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    last = recent[-1]
    if last.get("episodes") and last.get("failed") == last["episodes"]:
        yield Alarm(
            name="all failed",
            level=CRITICAL,
            sentence=f"All {last['episodes']} episodes of the step failed, through no fault of the policy.",
            mend="Open one (`rllm runs show RUN --phase train`): its error names the cause.",
        )


def _entropy(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    first, now = _mean(lines[:1], "policy_entropy"), _mean(lines[-_LATEST:], "policy_entropy")
    success = _mean(lines[-_LATEST:], "success")
    if first is None or now is None or success is None or len(lines) < _LATEST or success >= _GOOD:
        return
    if now < _ENTROPY_FLOOR or now < _ENTROPY_SHARE * first:
        yield Alarm(
            name="entropy",
            level=CRITICAL,
            sentence=f"The policy hardly varies any more: its entropy is {now:.2g} nats a token and was "
            f"{first:.2g}, while {success:.0%} of attempts succeed.",
            mend="Lower `optimizer.learning_rate`, raise `algorithm.clip_high` to 0.28, or set "
            "`algorithm.entropy_coef`; go back to a checkpoint from before.",
        )


def _cut(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    cut_share = _mean(lines[-_LATEST:], "answers_cut")
    if cut_share is not None and cut_share > _CUT:
        yield Alarm(
            name="answers cut",
            level=CRITICAL,
            sentence=f"{cut_share:.0%} of answers are cut at their token limit.",
            mend="Raise `rollout.max_tokens_per_turn` (a program's own `max_tokens`), or ask for less.",
        )


_CRITICAL_RULES = (_large_step, _success_lost, _all_failed, _entropy, _cut)


def _mean(lines: Lines, name: str) -> float | None:
    values = [float(line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return fmean(values) if values else None


def _share(lines: Lines, part: str, whole: str) -> float | None:
    """A ratio of sums, None where there is nothing to divide by."""
    total = sum(float(line.get(whole, 0)) for line in lines)
    return sum(float(line.get(part, 0)) for line in lines) / total if total else None


def _no_reward(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    success, reward = _mean(recent, "success"), _mean(recent, "reward_mean")
    if success == 0.0 and not reward:
        yield Alarm(
            name="no reward",
            level="problem",
            sentence=f"Nothing was paid in the last {len(recent)} steps: there is nothing to learn from.",
            mend="Look at an episode; begin with easier tasks, a warm start (`warm_start.steps`), or a "
            "reward that pays parts of a solution.",
        )
    if success is not None and success > _SOLVED:
        yield Alarm(
            name="solved",
            level="hint",
            sentence=f"{success:.0%} of attempts succeed: these tasks teach little more.",
            mend="Stop here, or make the tasks harder (`task.train_args`).",
        )


def _ties(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    tied_share = _share(recent, "groups_tied", "groups")
    if tied_share is not None and tied_share > _TIED:
        success = _mean(recent, "success") or 0.0
        yield Alarm(
            name="ties",
            level="problem",
            sentence=f"{tied_share:.0%} of groups tie: all attempts at a task are paid alike, so no signal.",
            mend=(
                "Most succeed: make tasks harder, or sample those of medium difficulty "
                if success > 0.5
                else "Most fail: make tasks easier, or raise `rollout.group_size` "
            )
            + "(`filters.dynamic = true` leaves ties out and samples other tasks).",
        )


def _failures(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    failed = _share(recent, "failed", "episodes")
    if failed is not None and failed > _FAILED:
        causes = {
            name.partition(".")[2]: sum(float(line.get(name, 0)) for line in recent)
            for line in recent
            for name in line
            if name.startswith("failed.")
        }
        cause = max(causes, key=lambda name: causes[name]).replace("_", " ") if causes else "unknown"
        yield Alarm(
            name="failures",
            level="problem",
            sentence=f"{failed:.0%} of episodes fail, mostly by {cause}; they are left out, never a reward "
            "of zero.",
            mend="Open one (filter the episodes by outcome): its error names the cause.",
        )


def _update_size(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    kl, clipped_share, ratio = (_mean(recent, name) for name in ("kl", "clipped_frac", "ratio_mean"))
    large: list[str] = []
    if kl is not None and kl > _KL:
        large.append(f"a step moves the policy by a KL of {kl:.2g} nats a token")
    if clipped_share is not None and clipped_share > _CLIPPED:
        large.append(f"{clipped_share:.0%} of tokens are clipped")
    if ratio is not None and not _RATIO_LOW < ratio < _RATIO_HIGH:
        large.append(f"the mean importance ratio is {ratio:.2f}")
    if large:
        yield Alarm(
            name="large updates",
            level="problem",
            sentence=f"Updates are large: {', '.join(large)}.",
            mend="Lower `optimizer.learning_rate` or `algorithm.updates_per_step`.",
        )
    norms = [float(line["grad_norm"]) for line in lines if isinstance(line.get("grad_norm"), int | float)]
    if len(norms) > NUM_STEPS and norms[-1] > _NORM_JUMP * median(norms) > 0:
        yield Alarm(
            name="gradient norm",
            level="problem",
            sentence=f"The gradient norm is {norms[-1]:.2g}, and its median {median(norms):.2g}.",
            mend="Lower `optimizer.learning_rate`, or clip (`optimizer.max_grad_norm`).",
        )
    if num_skipped := sum(float(line.get("skipped_updates", 0)) for line in recent):
        yield Alarm(
            name="skipped updates",
            level="problem",
            sentence=f"{num_skipped:.0f} updates of the last {len(recent)} steps were skipped: their "
            "gradient was not finite or exploded.",
            mend="Lower `optimizer.learning_rate`; look at the step's losses.",
        )


def _gaps(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    if _sampler_differs(config):
        kl = _mean(recent, "sampler_kl")
        if kl is not None and kl > _SAMPLER_KL:
            yield Alarm(
                name="sampler and trainer",
                level="problem",
                sentence=f"The sampler's tokens diverge from the trainer by {kl:.2g} nats each.",
                mend="Set `inference.dtype` to auto: both then compute in one data type.",
            )
        return
    gap = _mean(recent, "logprob_gap_first")
    if gap is not None and gap > _LOGPROB_GAP:
        yield Alarm(
            name="sampler and trainer",
            level="problem",
            sentence=f"Sampler and trainer disagree by {gap:.2g} nats on tokens that neither has updated.",
            mend='Set `algorithm.old_logprobs = "trainer"`, or use the same precision in both.',
        )


def _sampler_differs(config: Mapping[str, Any]) -> bool:
    """Whether the sampler of a run computes in a data type of its own, in which single tokens may be far
    apart."""
    return dict(config.get("inference") or {}).get("dtype", "auto") != "auto"


def _heldout(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    heldout = [float(line["heldout_success"]) for line in lines if "heldout_success" in line]
    if len(heldout) > 2 and max(heldout) - heldout[-1] > _HELDOUT_DROP:
        yield Alarm(
            name="held-out success falls",
            level="problem",
            sentence=f"Held-out success is {heldout[-1]:.0%} and was {max(heldout):.0%}.",
            mend="The best checkpoint is kept: stop there, or lower `optimizer.learning_rate`.",
        )


def _tokens(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    dropped_names = {
        name
        for line in recent
        for name in line
        if name.startswith("tokens.dropped.") and not name.endswith((".greedy", ".untrained", ".tied"))
    }
    num_sampled = sum(float(line.get("tokens.sampled", 0)) for line in recent)
    num_dropped = sum(float(line.get(name, 0)) for line in recent for name in dropped_names)
    if num_sampled and num_dropped / num_sampled > _DROPPED:
        yield Alarm(
            name="dropped tokens",
            level="problem",
            sentence=f"{num_dropped / num_sampled:.0%} of sampled tokens are not learned from.",
            mend="Raise `rollout.max_turns` or `rollout.max_tokens_per_turn`, or see `rollout.truncation`.",
        )
    if num_unparsed := sum(float(line.get("unparsed_tool_markup", 0)) for line in recent):
        yield Alarm(
            name="tool calls",
            level="hint",
            sentence=f"{num_unparsed:.0f} answers hold markup of a tool call that cannot be read.",
            mend="Look at one: the model's format may differ from the one that is parsed.",
        )


def _time(lines: Lines, recent: Lines, config: Mapping[str, Any]) -> Iterator[Alarm]:
    share = _share(recent, "rollout_s", "step_s")
    if share is not None and share > _SAMPLING_SHARE:
        yield Alarm(
            name="time",
            level="hint",
            sentence=f"{share:.0%} of the time goes into sampling and the environment.",
            mend="Raise `rollout.num_parallel` and `inference.num_slots`; with slow environments set "
            "`inference.lockstep = false`, and `schedule.kind = async` to sample while learning.",
        )
