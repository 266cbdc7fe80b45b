"""No silent option: whatever a configuration accepts is read by the run that it describes.

    a tiny run under a configuration ──recorder──► leaves that executed code has read
    every leaf × other values ──load──► refused, or read in that run; anything else would do nothing, silently

A recorder takes the place of every key's descriptor. What the config room reads to validate, to copy or to
print is not counted: only what it tells others.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rllm.config
from rllm.algorithms.tokens import TokenInputs
from rllm.algorithms.truncation import treat_truncated
from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.config.distributed import DistributedConfig
from rllm.config.loader import config_dict, load_as
from rllm.config.optimizer import OptimizerConfig
from rllm.config.policies import TruncationConfig
from rllm.config.preference import DpoConfig
from rllm.config.schema import TrainConfig
from rllm.config.supervised import SftConfig
from rllm.errors import ConfigError, NumericsError
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import load_model
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.dpo import AgentDPOTrainer
from rllm.trainer.sft import AgentSFTTrainer
from rllm.types.episode import Episode, Outcome, TerminationReason, Trajectory
from rllm.types.sample import NOT_SAMPLED, TrainingSample

CONFIG_ROOM = str(Path(rllm.config.__file__).parent)
ONLY_LOOKS = re.compile(
    r"_?validate.*|_?require.*|unused|load_.*|config_dict|_as_plain|_fill|derived|_differences"
)
"""Functions of the config room that read keys without acting on them."""
Key = tuple[type[Any], str]


class Recorder:
    """Which keys were read, and by whom."""

    def __init__(self) -> None:
        self.reads: set[Key] = set()

    @contextmanager
    def listening(self, *roots: type[Any]) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for kind in {each for root in roots for each in _sections(root())}:
                for each in fields(kind):
                    patch.setattr(kind, each.name, _Heard(kind, each.name, self))
            yield


class _Heard:
    def __init__(self, kind: type[Any], name: str, recorder: Recorder) -> None:
        self._key, self._descriptor, self._recorder = (kind, name), getattr(kind, name), recorder

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        if _acts(sys._getframe(1)):
            self._recorder.reads.add(self._key)
        return self._descriptor.__get__(owner, kind)

    def __set__(self, owner: Any, value: Any) -> None:
        self._descriptor.__set__(owner, value)


def _acts(frame: Any) -> bool:
    """Whether a read serves somebody outside of the config room, who did not merely want it validated."""
    if frame.f_code.co_filename.endswith("dataclasses.py"):  # a copy
        return False
    while frame is not None and frame.f_code.co_filename.startswith(CONFIG_ROOM):
        if ONLY_LOOKS.fullmatch(frame.f_code.co_name):
            return False
        frame = frame.f_back
    return frame is not None


def _sections(config: Any) -> Iterator[type[Any]]:
    yield type(config)
    for each in fields(config):
        if is_dataclass(value := getattr(config, each.name)):
            yield from _sections(value)


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Key, Any]]:
    """(path, key, value) of everything that is no section."""
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", (type(config), each.name), value


def _others(path: str, value: Any, load: Callable[[str], Any]) -> Iterator[str]:
    """Assignments of other values, among them all that the key's error message offers."""
    if isinstance(value, bool):
        yield f"{path}={str(not value).lower()}"
    elif isinstance(value, int | float):
        candidates = {0, 1, 2, value + 1, value * 2}
        candidates |= {0.25, 0.5, 1.5, value / 2, value + 0.1} if isinstance(value, float) else {value // 2}
        yield from (f"{path}={each}" for each in sorted(candidates - {value}))
    elif isinstance(value, str):
        yield f'{path}="something-else"'
        try:
            load(f'{path}="something-else"')
        except ConfigError as error:
            if offered := re.search(r"[Cc]hoose one of ([\w+, ]+)\.?$", str(error)):
                yield from (f'{path}="{each}"' for each in offered[1].split(", ") if each != value)
    elif isinstance(value, list):
        yield f'{path}=["something-else"]'
    else:
        yield f"{path}.something_else=1"


def silent_keys(kind: type[Any], base: dict[str, Any], reads: set[Key]) -> list[str]:
    """Assignments that are accepted on top of `base`, although the run under it does not read their key."""

    def load(assignment: str) -> Any:
        return load_as(kind, base, [assignment])

    silent: list[str] = []
    for path, key, value in _leaves(load_as(kind, base)):
        if key in reads or path in ("policies", "roles"):
            continue
        for assignment in _others(path, value, load):
            try:
                load(assignment)
            except ConfigError:
                continue
            silent.append(assignment)
    return silent


TINY = [
    "warm_start.steps=1",
    "warm_start.episodes_per_step=2",
    "steps=1",
    "rollout.tasks_per_step=2",
    "rollout.group_size=2",
    "rollout.max_turns=2",
    "inference.num_slots=8",
    "inference.max_context=256",
    "evaluation.num_tasks=2",
    "evaluation.every_steps=1",
    "evaluation.every_num_tasks=2",
    "task.num_train_tasks=16",
    "threads=1",
    "optimizer.warmup_steps=0",
    "algorithm.clip_high=-1",
    "algorithm.entropy_coef=0.01",  # no row is left out, so every part of a step has work
]
VARIANTS: dict[str, Sequence[str]] = {
    "critic": ["algorithm.estimator=gae", "critic.trunk=separate"],
    "shared trunk": ["algorithm.estimator=gae", "critic.trunk=shared"],
    "own policy gradient": ["algorithm.loss=policy_gradient", "algorithm.entropy_coef=0.1"],
    "sapo": ["algorithm.loss=sapo"],
    "constant": ["algorithm.aggregation=constant", "algorithm.aggregation_constant=4"],
    "kl": ["algorithm.kl_coef=0.1", "algorithm.kl_target=0.1"],
    "kl in the reward": ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_kind=k1"],
    "correction": ["algorithm.old_logprobs=trainer", "algorithm.correction=truncate"],
    "remax": ["algorithm.estimator=remax"],
    "pass at k": ["algorithm.estimator=pass_at_k", "algorithm.pass_k=2"],
    "gigpo": ["algorithm.estimator=gigpo", "algorithm.gigpo_omega=0.5", "algorithm.gigpo_norm=none"],
    "discounted": ["algorithm.credit=discounted", "algorithm.gamma=0.9"],
    "overlong answers": ["filters.overlong_buffer=2"],
    "first attempts": ["filters.first_attempts=2", "rollout.group_size=3"],
    "dynamic sampling": ["filters.dynamic=true", "filters.max_rounds=2"],
    "lora": ["lora.rank=2"],
    "teacher": [
        "algorithm.estimator=teacher",
        "distill.teacher=TEACHER",
        "warm_start.noise=0",
        "distill.gamma=0.5",
        "distill.clip=2",
    ],
    "whole distributions": [
        "algorithm.estimator=teacher",
        "distill.teacher=TEACHER",
        "warm_start.noise=0",
        "distill.divergence=jsd",
    ],
}


NOTHING_TO_TRAIN_ON = {
    "dynamic sampling": ['algorithm.old_logprobs="trainer"'],  # an untrained model has no group with signal
}
"""What is not read only because no row was left."""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("truth") / "tiny"
    create_model(path, TinyModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32))
    return path


def _train_config(assignments: Sequence[str], model: Path) -> dict[str, Any]:
    """Of a benchmark by name: so nothing is given that a configuration could not say."""
    config = config_dict(training_config("frozenlake"))
    config["warm_start"]["expert_args"] = {}
    config["model"]["path"] = str(model)
    told = [each.replace("TEACHER", str(model)) for each in (*TINY, *assignments)]
    return config_dict(load_as(TrainConfig, config, told))


class _Spoilt:
    """A loss that is no number."""

    aggregation, needs_every_row, needs_entropy, needs_whole_groups = "token_mean", True, False, False

    def terms(self, tokens: TokenInputs) -> Any:
        return tokens.new_M * float("nan")

    def measures(self, tokens: TokenInputs) -> dict[str, Any]:
        return {}


def _provoke(optimizer: OptimizerConfig, truncation: TruncationConfig | None, model: Path) -> None:
    """What a run does only where something goes wrong: what it then looks at counts as read."""
    sampled_T = np.array([NOT_SAMPLED, 0])
    row = TrainingSample(
        token_ids_T=np.array([1, 2]),
        policy_versions_T=sampled_T,
        logprobs_T=np.zeros(2, dtype=np.float32),
        advantages_T=np.ones(2, dtype=np.float32),
        group_key=("t", "agent"),
        order_key=("t", 0, 0, 0),
    )
    backend = TorchBackend(load_model(model).model, publish=lambda version: None, config=optimizer)
    with suppress(NumericsError):
        backend.update([row], _Spoilt(), 1e-3)
    if truncation is not None:
        episodes = [
            Episode(task_id="t", rollout_idx=number, trajectories=[Trajectory(reward=1.0)])
            for number in range(len(TerminationReason))
        ]
        for episode, reason in zip(episodes, TerminationReason, strict=True):
            episode.outcome, episode.termination_reason = Outcome.TRUNCATED, reason
        treat_truncated(episodes, truncation)


def _silent_in_a_run(assignments: Sequence[str], model: Path, output: Path) -> list[str]:
    base, recorder = _train_config(assignments, model), Recorder()
    with recorder.listening(TrainConfig):
        config = load_as(TrainConfig, base)
        build_run(config, output).train()
        _provoke(config.optimizer, config.rollout.truncation, model)
    reads = recorder.reads | {(DistributedConfig, "timeout_s")}  # read by runs on several processes alone
    return silent_keys(TrainConfig, base, reads)


def test_every_key_of_a_training_run_is_read_or_refused(tiny_model: Path, tmp_path: Path) -> None:
    assert _silent_in_a_run([], tiny_model, tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_so_is_every_key_of_runs_with_other_parts(variant: str, tiny_model: Path, tmp_path: Path) -> None:
    silent = _silent_in_a_run(VARIANTS[variant], tiny_model, tmp_path / "run")
    assert silent == NOTHING_TO_TRAIN_ON.get(variant, [])


def _supervised(kind: type[Any], make: Callable[..., Any], base: dict[str, Any], output: Path) -> list[str]:
    recorder = Recorder()
    with recorder.listening(kind):
        config = load_as(kind, base)
        make(config, output=output).train()
        _provoke(config.optimizer, None, Path(config.model.path))
        with suppress(ConfigError):  # no row is short enough
            make(
                load_as(kind, base, ["data.max_length=2", "data.max_length_policy=drop"]), output=output
            ).plan()
    return silent_keys(kind, config_dict(load_as(kind, base)), recorder.reads)


def _jsonl(path: Path, lines: Sequence[str]) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def test_every_key_of_supervised_fine_tuning_is_read_or_refused(tiny_model: Path, tmp_path: Path) -> None:
    rows = [f'{{"prompt": "say {word}", "completion": "{word}"}}' for word in ("Up", "Down", "Left", "Right")]
    base: dict[str, Any] = {
        "threads": 1,
        "model": {"path": str(tiny_model)},
        "data": {"dataset": _jsonl(tmp_path / "chats.jsonl", rows), "heldout_fraction": 0.25},
        "evaluation": {"every_steps": 1},
        "batch_size": 2,
    }
    assert _supervised(SftConfig, AgentSFTTrainer, base, tmp_path / "run") == []


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_every_key_of_preference_runs_is_read_or_refused(loss: str, tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        f'{{"prompt": "say {word}", "chosen": "{word}", "rejected": "no"}}'
        for word in ("Up", "Down", "Left", "Right")
    ]
    base: dict[str, Any] = {
        "threads": 1,
        "model": {"path": str(tiny_model)},
        "data": {"dataset": _jsonl(tmp_path / "pairs.jsonl", rows), "heldout_fraction": 0.25},
        "preference": {"loss": loss},
        "evaluation": {"every_steps": 1},
        "batch_size": 2,
    }
    assert _supervised(DpoConfig, AgentDPOTrainer, base, tmp_path / "run") == []


def test_a_key_that_nobody_reads_would_be_found() -> None:
    reads = {key for _, key, _ in _leaves(TrainConfig())}
    assert silent_keys(TrainConfig, {}, reads) == []
    unread = next(key for path, key, _ in _leaves(TrainConfig()) if path == "optimizer.weight_decay")
    assert "optimizer.weight_decay=0.5" in silent_keys(TrainConfig, {}, reads - {unread})
