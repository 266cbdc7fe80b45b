"""The plan of an evaluation, complete before it begins, so that it can be repeated and resumed.

plan ──► config.json ──► the same plan again goes on; another one is refused, with what differs
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.types.messages import SamplingParams

KIND = "eval"
_SOMETIMES = ("skipped", "dtype", "form", "few_shot", "likelihood")
"""Keys that a plan has only where they were chosen."""
_MAY_DIFFER = ("rllm", "source", "settings")
"""Said in the stamp, and no reason to begin anew; what `settings` change, the hashes and limits tell."""

_CONDITIONS = (
    *("agent", "evaluator", "judge_model", "max_turns", "attempts", "seed"),
    *("dtype", "form", "few_shot", "likelihood"),
)
"""Keys of a stored plan that move a score, whatever the model; tasks are compared one by one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationPlan:
    """Everything that a score depends on."""

    name: str
    """The name of the benchmark or program."""
    model: str
    """A directory, or the name that a server knows it by."""
    agent: str
    evaluator: str
    """The evaluator; `environment` where the world itself pays."""
    ways: dict[str, SamplingParams | None]
    """The ways of sampling from the model, by name; None leaves that to the program."""
    split: str = ""
    num_tasks: int = 0
    attempts: int = 1
    seed: int = 0
    base_url: str = ""
    """The address of the server; empty for the built-in engine."""
    dtype: str = ""
    """The data type of the model on the built-in engine, where it is not float32."""
    form: dict[str, str] = field(default_factory=dict[str, str])
    """The form of conversations, as far as it was chosen: tools, chat template, thoughts."""
    few_shot: int = 0
    """Number of worked examples before each question."""
    likelihood: str = ""
    """The reading by which choices were compared by their likelihood; empty where the model was asked."""
    dataset_hash: str = ""
    model_hash: str = ""
    """The hash of the weights; empty for a server, which does not tell."""
    agent_hash: str = ""
    """The hash of the agent's class and arguments, or of the program's source."""
    evaluator_hash: str = ""
    judge_model: str = ""
    """The model of an LLM judge."""
    max_turns: int = 0
    """0 where a program decides."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """The settings of a world: `of` names their origin, `training` or the `benchmark` itself, which explains
    its rules; and the arguments of its environment and its agent."""
    source: dict[str, str] = field(default_factory=dict[str, str])
    """Where the rows were published, and which state of them they are: commit or checksum."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Name -> reason of tasks of the benchmark that cannot be played here and were left out."""
    rllm: str = ""

    def to_dict(self) -> dict[str, Any]:
        structured_fields = ("ways", "model", "model_hash")
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in structured_fields
        }
        for name in _SOMETIMES:
            if not values[name]:
                del values[name]
        ways = {name: None if way is None else asdict(way) for name, way in self.ways.items()}
        return {"kind": KIND, "model": {"path": self.model, "hash": self.model_hash}, **values, "ways": ways}


def require_evaluation(run_config: Mapping[str, Any], where: Path) -> None:
    """Raises ConfigError for the configuration of another kind of run."""
    if run_config.get("kind") != KIND:
        raise ConfigError(
            f"{where} is a run of `rllm {run_config.get('kind', 'train')}`, and no evaluation; choose "
            "another."
        )


def require_same_plan(run_config: Mapping[str, Any], plan: Mapping[str, Any], where: Path) -> None:
    """Raises ConfigError with every key in which a stored evaluation differs from the one asked for."""
    require_evaluation(run_config, where)
    plan_as_json = json.loads(json.dumps(plan))
    differing = [
        f"`{key}` was {_short(run_config.get(key))} and is {_short(plan_as_json.get(key))}"
        for key in sorted({*run_config, *plan_as_json})
        if run_config.get(key) != plan_as_json.get(key) and key not in _MAY_DIFFER
    ]
    if differing:
        raise ConfigError(
            f"{where} holds another evaluation: {'; '.join(differing)}. Choose another --output, or --fresh."
        )


def differing_conditions(
    first: Mapping[str, Any], second: Mapping[str, Any], ways: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """The differences of two stored evaluations beside their models: a name, and the value that each has."""
    one, other = (_conditions(config, ways) for config in (first, second))
    return {
        name: (one.get(name), other.get(name))
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    }


def _conditions(config: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    sampling = {way: config["ways"][way] or {} for way in ways}
    return {
        **{name: config.get(name) for name in _CONDITIONS},
        "shown as by": config.get("settings", {}).get("of"),
        **{f"{way}.{name}": value for way, each in sampling.items() for name, value in each.items()},
    }


def hash_of(value: Any) -> str:
    """Hash of plain data: the same for equal data, in whatever order its keys are."""
    return _digest([json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()])


def files_hash(paths: Sequence[Path]) -> str:
    """Hash of the contents and names of files."""
    return _digest(part for path in sorted(paths) for part in (path.name.encode(), _content_digest(path)))


def model_hash(directory: Path) -> str:
    """Hash of a model directory: weights, configuration and tokenizer."""
    suffixes = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
    return files_hash([each for each in directory.iterdir() if each.is_file() and each.suffix in suffixes])


def _content_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _digest(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"
