"""Configurations of published scripts, in verl's own keys ──► ours, key by key; imports nothing of verl.

    actor_rollout_ref.actor.optim.lr=1e-6   one of TRANSLATED: becomes a key of ours
    actor_rollout_ref.actor.ppo_epochs=1    one of FIXED: accepted at the value that is true here
    trainer.n_gpus_per_node=8               one of WITHOUT_EFFECT: a warning names it
    anything else                           ConfigError

Where a script leaves a key out it means verl's default, which DEFAULTS has where ours is another.
"""

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, cast

from rllm.config.algorithm import LOSSES as OUR_LOSSES
from rllm.config.loader import load_config, parse_assignment
from rllm.errors import ConfigError
from rllm.integrations.verl.composed import as_dict, is_composed, script_values
from rllm.integrations.verl.contract import require_installed
from rllm.integrations.verl.tables import (
    ARGUMENTS,
    CLIP,
    DEFAULTS,
    DEFAULTS_OF_CRITIC,
    DEFAULTS_OF_LOSS,
    EPOCHS,
    FAMILIES,
    FIXED,
    KL_KINDS,
    LENGTH,
    MEANS_OF_ROWS,
    NULLABLE,
    OF_CRITIC,
    TASKS_PER_UPDATE,
    TOGETHER,
    TRANSLATED,
    WITHOUT_EFFECT,
)
from rllm.integrations.verl.trees import leaves, nested
from rllm.integrations.verl.values import Reader, number, one_of, pair, switch, whole

log = logging.getLogger(__name__)

_ONLY_THEIRS = frozenset(FAMILIES) - {"critic"}
_ACTOR = "actor_rollout_ref.actor"


def is_published(config: Any) -> bool:
    """Whether it is in verl's keys: a mapping (an OmegaConf config counts), or a list of "a.b=c"."""
    if isinstance(config, Mapping):
        return bool(_ONLY_THEIRS & set(map(str, config)))
    if isinstance(config, list | tuple):
        return any(str(each).lstrip("+").partition(".")[0] in _ONLY_THEIRS for each in config)
    return False


def translate(config: Any, num_tasks: int) -> dict[str, Any]:
    """Our configuration, for `num_tasks` training tasks.

    Raises ConfigError for the first key that has no counterpart, or whose value has none.
    """
    translation = _Translation(_settings(config))
    translation.one_by_one()
    translation.together(num_tasks)
    if translation.keys_without_effect:
        log.warning(
            "Without effect here, where the built-in engine samples and the run's own files keep the record: "
            "%s.",
            ", ".join(translation.keys_without_effect),
        )
    tree = nested({**DEFAULTS, **translation.ours})
    try:
        load_config(tree)
    except ConfigError as error:
        raise ConfigError(f"{error}{translation.in_their_names(str(error))}") from error
    return tree


@dataclass(slots=True)
class _Translation:
    """One configuration on its way."""

    settings: dict[str, Any]
    """The values that the script sets, by whole key."""
    ours: dict[str, Any] = field(default_factory=dict[str, Any])
    """The meaning of the key here, by whole key."""
    origins: dict[str, str] = field(default_factory=dict[str, str])
    """Our key -> the published one that it comes from."""
    keys_without_effect: list[str] = field(default_factory=list[str])

    def one_by_one(self) -> None:
        """Raises ConfigError for a key that is in no table, or whose value cannot be read."""
        for key, value in self.settings.items():
            if key in TRANSLATED:
                name, reader = TRANSLATED[key]
                self._set(name, _read(key, value, reader), key)
            elif key in FIXED:
                _require_value(key, value)
            elif any(fnmatch(key, pattern) for pattern in WITHOUT_EFFECT):
                self.keys_without_effect.append(key)
            elif key not in TOGETHER and key not in OF_CRITIC:
                raise ConfigError(_unknown(key, value))

    def together(self, num_tasks: int) -> None:
        """Check and translate keys that only together have a meaning."""
        self._time()
        self._sizes()
        self._steps(num_tasks)
        self._aggregation()
        self._loss()
        self._estimator()
        self._divergence()
        self._record()

    def in_their_names(self, message: str) -> str:
        """Which published keys the names of ours in a message come from."""
        names = [name for name in re.findall(r"`([\w.]+)`", message) if name in self.origins]
        origins = [
            f"`{name}` is `{self.origins[name]}` of this configuration" for name in dict.fromkeys(names)
        ]
        return f" Here {', '.join(origins)}." if origins else ""

    def _set(self, name: str, value: Any, key: str) -> None:
        self.ours[name], self.origins[name] = value, key

    def _value(self, key: str, default: Any, reader: Reader) -> Any:
        return _read(key, self.settings[key], reader) if key in self.settings else default

    def _ours(self, name: str) -> Any:
        return self.ours.get(name, DEFAULTS.get(name))

    def _time(self) -> None:
        """A limit of all of an episode's time bounds its own as well."""
        if (wall_s := self.ours.get(key := "rollout.wall_timeout_s")) is not None:
            self._set("rollout.episode_timeout_s", wall_s, self.origins[key])

    def _sizes(self) -> None:
        prompt = self._value("data.max_prompt_length", LENGTH, whole(1))
        response = self._value("data.max_response_length", LENGTH, whole(1))
        self._set("rollout.max_tokens_per_turn", response, "data.max_response_length")
        self._set("inference.max_context", prompt + response, "data.max_prompt_length")
        batch, key = self._ours("rollout.tasks_per_step"), f"{_ACTOR}.ppo_mini_batch_size"
        mini = self._value(key, min(TASKS_PER_UPDATE, batch), whole(1))
        if batch % mini:
            source = "" if key in self.settings else ", verl's default"
            raise ConfigError(
                f"`{key}` is {mini}{source}, which does not divide `data.train_batch_size`, {batch}; set it "
                "to a divisor."
            )
        self._set("algorithm.updates_per_step", batch // mini, key)
        generation_batch = self._value("data.gen_batch_size", batch, whole(1))
        if generation_batch != batch:
            raise ConfigError(
                f"`data.gen_batch_size` is {generation_batch} and `data.train_batch_size` {batch}; a step "
                "here trains on all that it has sampled: set both to the same, or leave the first out."
            )

    def _steps(self, num_tasks: int) -> None:
        epochs = self._value("trainer.total_epochs", EPOCHS, whole(0))
        if "steps" in self.ours:
            return
        batch = self._ours("rollout.tasks_per_step")
        if num_tasks < batch:
            raise ConfigError(
                f"`data.train_batch_size` is {batch} and there are {num_tasks} training tasks, so an epoch "
                "has no step; lower it, or set `trainer.total_training_steps`."
            )
        self._set("steps", epochs * (num_tasks // batch), "trainer.total_epochs")

    def _aggregation(self) -> None:
        mode, key = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"
        if (loss := self._ours("algorithm.loss")) in MEANS_OF_ROWS:  # verl does not look at the mode
            if mode in self.settings:
                self.keys_without_effect.append(f"{mode} (of `{loss}` the mean over rows is taken)")
            self._set("algorithm.aggregation", "sequence_mean", f"{_ACTOR}.policy_loss.loss_mode")
        if self._ours("algorithm.aggregation") == "constant":
            longest = self._value(key, self.ours["rollout.max_tokens_per_turn"], whole(1))
            self._set("algorithm.aggregation_constant", longest, key)
        elif key in self.settings:
            raise ConfigError(
                f"`{key}` is {self.settings[key]!r}, which `seq-mean-token-sum-norm` alone divides by: set "
                f"`{mode}` to that."
            )

    def _loss(self) -> None:
        if (key := f"{_ACTOR}.optim.betas") in self.settings:
            for name, value in zip(("beta1", "beta2"), _read(key, self.settings[key], pair), strict=True):
                self._set(f"optimizer.{name}", value, key)
        if (key := f"{_ACTOR}.clip_ratio") in self.settings:
            both = _read(key, self.settings[key], number)
            for name in {"algorithm.clip_low", "algorithm.clip_high"} - self.ours.keys():
                self._set(name, both, key)
        loss = self._ours("algorithm.loss")
        for name in ("clip", "kl"):
            key = f"{_ACTOR}.policy_loss.{name}_cov_ratio"
            if key in self.settings:
                if loss != f"{name}_cov":
                    raise ConfigError(
                        f"`{key}` is given, and only the loss `{name}_cov` looks at it; leave it out."
                    )
                self._set("algorithm.cov_fraction", _read(key, self.settings[key], number), key)
        if "clip_low" in OUR_LOSSES[loss]:
            self.ours.setdefault("algorithm.clip_low", CLIP)
            self.ours.setdefault("algorithm.clip_high", CLIP)
        for name, value in DEFAULTS_OF_LOSS.get(loss, {}).items():
            self.ours.setdefault(name, value)

    def _estimator(self) -> None:
        estimator, key = self._ours("algorithm.estimator"), "algorithm.norm_adv_by_std_in_grpo"
        if not self._value(key, True, switch):
            if estimator != "grpo":
                raise ConfigError(
                    f"`{key}` is False, and the estimator is `{estimator}`; only `grpo` divides by a "
                    "standard deviation: leave it out."
                )
            self._set("algorithm.estimator", "dr_grpo", key)
        if estimator == "gae":
            self._critic()
        else:
            self._require_no_critic(estimator)

    def _critic(self) -> None:
        self._set("critic.trunk", "separate", "algorithm.adv_estimator")
        self.ours |= {**DEFAULTS_OF_CRITIC, "algorithm.gamma": 1.0, "algorithm.gae_lambda": 1.0}
        for key, (name, reader) in OF_CRITIC.items():
            if key in self.settings:
                self._set(name, _read(key, self.settings[key], reader), key)
        key, path = "critic.model.path", self.settings.get("actor_rollout_ref.model.path")
        if self.settings.get(key, path) != path:
            raise ConfigError(
                f"`{key}` is {self.settings[key]!r} and `actor_rollout_ref.model.path` {path!r}; a critic "
                "here begins with the policy's weights: set both to the same, or leave the first out."
            )

    def _require_no_critic(self, estimator: str) -> None:
        """Raises ConfigError for a key that only an estimator with a critic looks at."""
        usual = {"trainer.critic_warmup": 0, "algorithm.gamma": 1, "algorithm.lam": 1}
        for key in (*OF_CRITIC, "critic.model.path"):
            if key in self.settings and (
                key not in usual or _read(key, self.settings[key], number) != usual[key]
            ):
                mend = f"set it to {usual[key]}" if key in usual else "leave it out"
                raise ConfigError(
                    f"`{key}` is {self.settings[key]!r}, which only `gae` honours here, and the estimator is "
                    f"`{estimator}`; {mend}."
                )

    def _divergence(self) -> None:
        in_loss = self._value(f"{_ACTOR}.use_kl_loss", False, switch)
        in_reward = self._value("algorithm.use_kl_in_reward", False, switch)
        if in_loss and in_reward:
            raise ConfigError(
                f"`{_ACTOR}.use_kl_loss` and `algorithm.use_kl_in_reward` are both true; a run here has the "
                "divergence in one place: set one of them to false."
            )
        if not (in_loss or in_reward):
            return
        coef, kind, usual = (
            (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type", "k3")
            if in_loss
            else ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "k1")
        )
        self._set("algorithm.kl_coef", self._value(coef, 0.001, number), coef)
        self._set("algorithm.kl_kind", self._value(kind, usual, one_of(KL_KINDS)), kind)
        self._set("algorithm.kl_in", "loss" if in_loss else "reward", kind)

    def _record(self) -> None:
        """verl's -1 is never: here the last step is always kept, and evaluations between are 0."""
        save, test = (self._value(f"trainer.{name}_freq", -1, whole(-1)) for name in ("save", "test"))
        self.ours["checkpoint.every_steps"] = save if save > 0 else max(1, self.ours["steps"])
        self.ours["evaluation.every_steps"] = max(0, test)


def _require_value(key: str, value: Any) -> None:
    allowed_values, why = FIXED[key]
    if value not in allowed_values:
        raise ConfigError(f"`{key}` is {value!r}, and only {allowed_values[0]!r} is honoured: {why}.")


def _read(key: str, value: Any, reader: Reader) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise ConfigError(f"`{key}` is {value!r}, which has no counterpart: {error}.") from error


def _unknown(key: str, value: Any) -> str:
    if key in ARGUMENTS:
        return f"`{key}` is {value!r}, which has no counterpart: give `{ARGUMENTS[key]}` to AgentTrainer."
    section, _, argument = key.removeprefix("rllm.").partition("_args.")
    if argument and (name := section.rpartition(".")[2]) in ("agent", "env", "workflow"):
        return f"`{key}` has no counterpart: give `{name}_args` to AgentTrainer, with `{argument}` in it."
    nearest = difflib.get_close_matches(key, [*TRANSLATED, *OF_CRITIC, *FIXED, *TOGETHER], n=1, cutoff=0.75)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else " Leave it out."
    return f"`{key}` is {value!r}, which has no counterpart here, and rLLM ignores no key.{hint}"


def _settings(config: Any) -> dict[str, Any]:
    """The values that a script sets, by whole key; without null values, where null is verl's own default."""
    if not isinstance(config, Mapping):
        flat = dict[str, Any]()
        for each in config:
            flat.update(leaves(parse_assignment(str(each).lstrip("+"))))
        plain = {"null": None, "True": True, "False": False}
        settings = {key: plain.get(str(value), value) for key, value in flat.items()}
    elif is_composed(mapping := cast(Mapping[str, Any], config)):
        require_installed()
        settings = script_values(mapping)
    else:
        settings = dict(leaves(as_dict(mapping, resolve=True)))
    return {key: value for key, value in settings.items() if value is not None or key not in NULLABLE}
