"""The keys that a configuration leaves open ──► their values for the model of the run, each with its reason.

    open keys ─┬─ the run is there already ──► as it began
               └─ a new run ──► ModelFacts ─┬─ made from random weights by rLLM ──► as its tasks were tuned
                                            └─ pretrained ──► by size and by adapter

The rate of a pretrained model is 2e-5 for 135 M parameters (measured with SmolLM2-135M-Instruct:
docs/learning.md) and proportional to 1/sqrt(parameters); an adapter takes ten times the rate of all weights,
at every rank (Schulman et al. 2025, "LoRA Without Regret"; the same rule in tinker-cookbook's
`hyperparam_utils`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rllm.config.open_keys import MEMORY_KEYS, OPEN_KEYS, get_key, open_keys, set_key
from rllm.config.schema import TrainConfig
from rllm.config.supervised import SupervisedConfig
from rllm.models.facts import ModelFacts, directory_facts
from rllm.store.run_directory import RunDirectory, is_run
from rllm.trainer.backends.named import service_kind

REFERENCE_PARAMETERS = 134_515_008
REFERENCE_RATES = {"train": 2e-5, "sft": 2e-5, "dpo": 5e-6}
"""Learning rate of all weights of a pretrained model of that size, by kind of run."""
SCRATCH_RATES = {"train": 1e-3, "sft": 3e-3, "dpo": 3e-4}
ADAPTER_FACTOR = 10.0
FEWEST_WARMUP_STEPS, WARMUP_STEPS = 2, 5
"""Limits of the steps of a warm-up, which is a sixth of a run between them."""
SCRATCH_TURN, SCRATCH_CONTEXT, SCRATCH_PROGRAM_CONTEXT = 4, 512, 2048
TURN, CONTEXT = 256, 4096
"""Tokens of an answer, and of a conversation, of a pretrained model; a quarter and the whole of its positions
where these are fewer."""
IMITATION_STEPS, IMITATION_RATE = 100, 3e-3


@dataclass(kw_only=True, slots=True, frozen=True)
class KeyChoice:
    """The value of a key that the configuration left open."""

    key: str
    value: float | int
    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class ChoiceFacts:
    """The facts of a run that its open keys depend on."""

    kind: str
    """`train`, `sft` or `dpo`."""
    steps: int
    has_adapter: bool
    has_expert: bool
    """Whether there is an expert to imitate."""
    is_program: bool
    """Whether a program or workflow decides how long its conversations are."""
    model: ModelFacts

    @property
    def reason(self) -> str:
        """The model, for reasons."""
        if self.model.from_scratch:
            return "model made from random weights here"
        count = self.model.num_parameters
        size = "pretrained model" if count is None else f"pretrained, {count / 1e6:,.0f} M parameters"
        return f"{size}, adapter" if self.has_adapter else size


def settle_defaults(
    config: TrainConfig, output: Path, *, has_expert: bool = False, is_program: bool = False
) -> list[KeyChoice]:
    """Give every open key of `config` its value, and return the choices that were made; none are made for a
    run that is in `output` already, which is resumed as it began.

    Raises ModelDirectoryError for a model directory that cannot be read.
    """
    policies = config.named_policies
    models = {name: _facts_of_policy(config, name) for name in policies}
    trainable = [name for name, policy in policies.items() if policy.trainable]
    facts = ChoiceFacts(
        kind="train",
        steps=config.steps,
        # The rate of an adapter would destroy a policy beside it whose weights are trained.
        has_adapter=all(config.adapter_of(name).rank for name in trainable),
        has_expert=has_expert,
        is_program=is_program,
        model=_most_careful(
            [models[name] for name in trainable], [facts.max_positions for facts in models.values()]
        ),
    )
    return _settle(config, output, facts)


def settle_supervised(config: SupervisedConfig, output: Path, kind: str) -> list[KeyChoice]:
    """The same for a run on rows."""
    facts = ChoiceFacts(
        kind=kind,
        steps=0,
        has_adapter=config.lora.rank > 0,
        has_expert=False,
        is_program=False,
        model=model_facts(config.model.path),
    )
    return _settle(config, output, facts)


def settle_for_model(config: TrainConfig, model: ModelFacts) -> None:
    """Give every open key of `config` its value for an evaluation of `model`."""
    facts = ChoiceFacts(
        kind="train", steps=config.steps, has_adapter=False, has_expert=False, is_program=False, model=model
    )
    for key in set(open_keys(config)) & _CHOICES.keys():  # the others are about updates
        set_key(config, key, _CHOICES[key](facts)[0])


def model_facts(path: str) -> ModelFacts:
    """Return the facts of the model at `model.path`; none where it is not there, which loading it reports."""
    if path.startswith("builtin:"):
        return ModelFacts(from_scratch=True)
    return directory_facts(Path(path)) if (Path(path) / "config.json").is_file() else ModelFacts()


def choices_dict(choices: Sequence[KeyChoice]) -> dict[str, dict[str, Any]]:
    """Return what a run stores of its choices: key -> value and reason."""
    return {choice.key: asdict(choice) for choice in choices}


def choices_line(choices: Sequence[KeyChoice]) -> str:
    """Return the choices as one sentence for the screen."""
    by_reason: dict[str, list[str]] = {}
    for choice in choices:
        value = f"{choice.value:g}" if isinstance(choice.value, float) else f"{choice.value:,}"
        by_reason.setdefault(choice.reason, []).append(f"{choice.key} {value}")
    parts = (f"{', '.join(values)} ({reason})" for reason, values in by_reason.items())
    return f"Chosen for this model: {'; '.join(parts)}."


def _facts_of_policy(config: TrainConfig, name: str) -> ModelFacts:
    # The model of a service is a name there, and nothing of it is here to be read.
    path = config.named_policies[name].path
    return ModelFacts() if service_kind(config.backend) is not None else model_facts(path)


def _most_careful(trainable: Sequence[ModelFacts], positions: Sequence[int | None]) -> ModelFacts:
    """Return the facts that suit all models of a run: of those that learn, pretrained first and the
    largest; of all models, the shortest context."""
    pretrained = [model for model in trainable if not model.from_scratch] or trainable
    return ModelFacts(
        num_parameters=max(model.num_parameters or 0 for model in pretrained) or None,
        from_scratch=pretrained[0].from_scratch,
        max_positions=min(filter(None, positions), default=None),
    )


def _settle(config: TrainConfig | SupervisedConfig, output: Path, facts: ChoiceFacts) -> list[KeyChoice]:
    before: Mapping[str, Any] = RunDirectory.read(output).config() if is_run(output) else {}
    choices: list[KeyChoice] = []
    for key in open_keys(config):
        if key == "warm_start.learning_rate" and not get_key(config, "warm_start.steps"):
            continue  # nothing is imitated
        section, _, name = key.partition(".")
        value = before.get(section, {}).get(name, OPEN_KEYS[key])
        if value == OPEN_KEYS[key] and key not in MEMORY_KEYS:
            value, reason = _CHOICES[key](facts)
            if not before:
                choices.append(KeyChoice(key=key, value=value, reason=reason))
        set_key(config, key, value)
    if not before:
        choices += _fit(config, facts)
    config.validate()
    return choices


def _fit(config: TrainConfig | SupervisedConfig, facts: ChoiceFacts) -> list[KeyChoice]:
    """Give the keys that are still open the values that fit the memory that is free."""
    from rllm.trainer.fitting import fitting_values  # brings torch

    run = config if isinstance(config, TrainConfig) else config.train_config()
    values = fitting_values(run, is_small=facts.model.from_scratch, plays=isinstance(config, TrainConfig))
    choices = [
        KeyChoice(key=key, value=value, reason=reason)
        for key, (value, reason) in values.items()
        if key in open_keys(config)
    ]
    for choice in choices:
        set_key(config, choice.key, choice.value)
    return choices


def _learning_rate(facts: ChoiceFacts) -> tuple[float, str]:
    if facts.model.from_scratch:
        return SCRATCH_RATES[facts.kind], facts.reason
    count = facts.model.num_parameters or 10 * REFERENCE_PARAMETERS
    rate = REFERENCE_RATES[facts.kind] * math.sqrt(REFERENCE_PARAMETERS / count)
    return float(f"{rate * (ADAPTER_FACTOR if facts.has_adapter else 1.0):.2g}"), facts.reason


def _warmup_steps(facts: ChoiceFacts) -> tuple[int, str]:
    if facts.model.from_scratch or facts.kind != "train":
        return 0, facts.reason
    steps = min(WARMUP_STEPS, max(FEWEST_WARMUP_STEPS, -(-facts.steps // 6)))
    return steps, f"pretrained, {facts.steps} steps"


def _max_tokens_per_turn(facts: ChoiceFacts) -> tuple[int, str]:
    if facts.is_program:
        return 0, "the program sends its own limit"
    if facts.model.from_scratch:
        return SCRATCH_TURN, facts.reason
    return min(TURN, (facts.model.max_positions or 4 * TURN) // 4), "room to think for a pretrained model"


def _max_context(facts: ChoiceFacts) -> tuple[int, str]:
    usual = SCRATCH_PROGRAM_CONTEXT if facts.is_program else SCRATCH_CONTEXT
    limit = usual if facts.model.from_scratch else CONTEXT
    positions = facts.model.max_positions
    if positions is not None and positions <= limit:
        return positions, "all positions of the model"
    return limit, facts.reason


def _imitation_steps(facts: ChoiceFacts) -> tuple[int, str]:
    if not facts.has_expert:
        return 0, "no expert to imitate"
    if facts.model.from_scratch:
        return IMITATION_STEPS, facts.reason
    return 0, "a pretrained model begins with rewards"


def _imitation_rate(facts: ChoiceFacts) -> tuple[float, str]:
    if facts.model.from_scratch:
        return IMITATION_RATE, facts.reason
    return _learning_rate(facts)


_CHOICES: Mapping[str, Callable[[ChoiceFacts], tuple[float | int, str]]] = {
    "optimizer.learning_rate": _learning_rate,
    "optimizer.warmup_steps": _warmup_steps,
    "warm_start.steps": _imitation_steps,
    "warm_start.learning_rate": _imitation_rate,
    "rollout.max_tokens_per_turn": _max_tokens_per_turn,
    "inference.max_context": _max_context,
}
