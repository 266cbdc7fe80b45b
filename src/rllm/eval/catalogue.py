"""The benchmark catalogue: one TOML file per benchmark, by name.

catalogue/NAME.toml ──► Benchmark: splits, licence, agent, evaluator, and
                          either `environment`: a world that makes its own tasks, without a network
                          or     `source`, `transform`, `prompt`: rows that somebody published
catalogue/FAMILY.toml with `members` ──► FAMILY/MEMBER, one benchmark for each; with `whole` FAMILY too;
                          `member_train.MEMBER` has sections of `train` in place of the family's
a registered data set, a directory of tasks ──► a Benchmark too, so that every command takes them
"""

import difflib
import hashlib
import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from rllm.data.live_rows import live_schema
from rllm.data.published_names import own_name
from rllm.data.registry import DatasetRegistry
from rllm.data.rows import FORMATS
from rllm.data.sources import PackageSource, Source, Split, source_of
from rllm.data.swe_rows import holds_swe_rows, swe_splits
from rllm.data.task_directory import is_task_collection, what_is_missing
from rllm.environments.openenv import sessions_of
from rllm.environments.worlds import OPENENV
from rllm.errors import ConfigError, choices_of
from rllm.eval.published_benchmarks import successor

ENVIRONMENT = "environment"
"""The evaluator of a benchmark whose world says itself what an episode was worth."""
SINGLE_TURN = "single_turn"
"""The environment of a benchmark of questions."""
FOLLOW_UPS = "follow-ups"
"""That of questions which are followed by others, whatever the answer."""
QUESTIONS = (SINGLE_TURN, FOLLOW_UPS)
BROWSERGYM = "browsergym/"
"""The prefix of ids of BrowserGym."""
HARBOR = "harbor:"
"""The prefix of names of Harbor's registry."""
TASK_DIRECTORY, SWE, LIVE_WEB = "task-directory", "swe", "live-web"
"""The environments of tasks that are directories, and of rows in a file."""
QUESTION_TRAINING: dict[str, Any] = {
    "rollout": {"max_turns": 1, "max_tokens_per_turn": 1024},
    "inference": {"max_context": 2048},
    "warm_start": {"steps": 0, "noise": 0.0},
}
"""The training settings of a benchmark of questions unless its file says otherwise."""
TASK_TRAINING: dict[str, Any] = {
    "rollout": {"max_turns": 20, "max_tokens_per_turn": 1024},
    "inference": {"max_context": 2048},
}
"""The same for tasks that are directories."""
SWE_TRAINING: dict[str, Any] = {
    "rollout": {
        "max_turns": 50,
        "max_tokens_per_turn": 2048,
        "step_timeout_s": 900.0,
        "episode_timeout_s": 3600.0,
    },
    "inference": {"max_context": 32_768},
    "warm_start": {"steps": 0, "noise": 0.0},
}
"""The same for rows of software-engineering tasks: the last step of an episode runs the hidden tests."""
WEB_TRAINING: dict[str, Any] = {
    "rollout": {"max_turns": 30, "max_tokens_per_turn": 1024},
    "inference": {"max_context": 32_768},
}
"""The same for tasks on live websites."""
UNTUNED_TRAINING = (QUESTION_TRAINING, TASK_TRAINING, SWE_TRAINING, WEB_TRAINING)
"""Training settings that no model was tuned with."""
TRAINING_ONLY = ("environment_args", "agent_args", "num_train_tasks")
"""The keys that `train.task` of a benchmark may set."""
PUBLISHED_READINGS = ("strict", "lenient", "likelihood")
"""The values that `published_reading` of a benchmark may have."""
_UNSET: dict[str, Any] = {}


@dataclass(kw_only=True, slots=True, frozen=True)
class Benchmark:
    """The facts of a benchmark, before anything of it is loaded."""

    name: str
    description: str
    category: str
    licence: str
    """The licence of the data, as its publishers name it; `unknown` where they do not."""
    citation: str
    agent: str
    """The agent, if no other is named."""
    evaluator: str
    """Name of the grader; `environment` where the world itself judges."""
    splits: dict[str, Split]
    """By the name that commands take: `test` is what is measured on, `train` is trained on."""
    environment: str = SINGLE_TURN
    """Name of its world."""
    extra: str = ""
    """The extra that it needs, beside that of its source."""
    source: Source | None = None
    """Where its rows are published; None for a world that makes its tasks."""
    transform: str = ""
    """The transform that makes questions of the rows."""
    fields: dict[str, str] = field(default_factory=dict[str, str])
    """Name in the transform -> column of the row."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the transform."""
    keep: str = ""
    """Which published rows are asked, as a filter over their columns: those that their publishers do not mark
    as faulty. All of them where it is empty."""
    prompt: str = ""
    """The prompt for the model, with {{names}} that the transform fills in."""
    system: str = ""
    """A system message before it."""
    instructions: str = ""
    """The explanation that a world lacks, as a system message to models that were not trained on it: rules
    and the form of an answer, with {{names}} of `task`."""
    published_reading: str = ""
    """The reading of answers that published figures are of: `strict` or `lenient`; `likelihood` where most
    are of models that wrote nothing, whose likelihoods of the choices were compared; empty where they differ
    or are of another measure."""
    likelihood_prompt: str = ""
    """The text that each choice continues where choices are compared by their likelihood; empty is
    `rllm.eval.likelihood.PROMPT`."""
    likelihood_answer: str = "text"
    """Form of a choice there: its `text`, or its `letter`."""
    evaluator_args: dict[str, Any] = field(default_factory=dict[str, Any])
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments that its tasks are made with."""
    agent_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the agent."""
    train_task: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same for training tasks alone, on top of `task`."""
    train: dict[str, Any] = field(default_factory=dict[str, Any])
    """Its training configuration, on top of the defaults of `TrainConfig`. `train.task.environment_args` and
    `train.task.agent_args` are on top of `task` and `agent_args`, for training alone."""

    pretrained: dict[str, Any] = field(default_factory=dict[str, Any])
    """The training configuration for pretrained models, which see the rules and have no warm start: where it
    differs from the defaults that a run chooses for its model."""

    @property
    def offline(self) -> bool:
        """Whether it runs without a network; an extra may have to be installed."""
        return self.source is None or isinstance(self.source, PackageSource)

    @property
    def asks_questions(self) -> bool:
        """Whether its tasks are rows that somebody published, each with its grader; else a world pays."""
        return self.environment in QUESTIONS

    @property
    def eval_split(self) -> str:
        """The split that is measured on unless a command says otherwise."""
        return "test" if "test" in self.splits else next(iter(self.splits))

    @property
    def size(self) -> int | str:
        """Tasks in the split that is measured on; `unlimited` where they are made, `unknown` where nobody
        says."""
        rows = self.splits[self.eval_split].rows
        if rows is not None:
            return rows
        return "unlimited" if self.source is None else "unknown"

    def stamp(self) -> dict[str, Any]:
        """The facts that must be the same for a result to be repeated, as plain JSON."""
        question_settings = {
            name: getattr(self, name)
            for name in (
                *("transform", "fields", "options", "prompt", "system", "instructions"),
                *("evaluator", "evaluator_args", "environment", "task"),
            )
        }
        if self.keep:
            question_settings["keep"] = self.keep
        digest = hashlib.sha256(json.dumps(question_settings, sort_keys=True).encode()).hexdigest()
        return {"benchmark": self.name, **question_settings, "sha256": digest}

    def summary(self) -> dict[str, Any]:
        """One line of `rllm benchmark list --json`."""
        return {
            "name": self.name,
            "category": self.category,
            "offline": self.offline,
            "splits": list(self.splits),
            "size": self.size,
            "agent": self.agent,
            "evaluator": self.evaluator,
            "published_reading": self.published_reading,
            "licence": self.licence,
        }


def benchmark_names() -> list[str]:
    """Every name of the catalogue, families spelt out."""
    return sorted(_files_of_names())


def benchmark_named(name: str) -> Benchmark:
    """A benchmark of the catalogue, a registered data set, a directory of tasks, or a file of rows of
    software-engineering tasks or of tasks on live websites.

    Raises ConfigError with the nearest name for one that there is not.
    """
    if name.startswith(HARBOR):
        raise ConfigError(
            f"`{name}`: collections of Harbor's registry are not fetched here. Get their directory, as by "
            "`git clone` of what the registry names, and give that: rllm eval ./DIRECTORY"
        )
    if name.startswith(OPENENV):
        return _openenv(name)
    if name.startswith(BROWSERGYM):
        return _browsergym(name)
    file_name = _files_of_names().get(name)
    if file_name is not None:
        return _benchmark(file_name, name)
    if DatasetRegistry.dataset_exists(name):
        return _registered_benchmark(name)
    same_name = own_name(name, [*benchmark_names(), *DatasetRegistry.get_dataset_names()])
    if same_name is not None:
        return benchmark_named(same_name)
    if is_task_collection(Path(name)):
        return _directory(name)
    if holds_swe_rows(Path(name)):
        return _swe_rows(name)
    if (schema := live_schema(Path(name))) is not None:
        return _live_rows(name, schema)
    if name.endswith(FORMATS) and Path(name).is_file():
        raise ConfigError(
            f"{name} is a file without software-engineering rows, such as SWE-bench's. Questions and "
            f"answers get a name first: rllm dataset register NAME {shlex.quote(name)} --evaluator GRADER."
        )
    if ("/" in name and Path(name).exists()) or Path(name).is_dir():
        raise ConfigError(what_is_missing(Path(name)))
    if (instead := successor(name)) is not None:
        raise ConfigError(f"The benchmark `{name}` is not here: {instead}.")
    names = [*benchmark_names(), *DatasetRegistry.get_dataset_names()]
    nearest = difflib.get_close_matches(name, names, n=1)
    there = "nor is there such a directory." if "/" in name else f"there are: {', '.join(_short(names))}."
    hint = f"did you mean `{nearest[0]}`?" if nearest else there
    raise ConfigError(f"There is no benchmark `{name}`; {hint}")


def benchmarks() -> list[Benchmark]:
    """The whole catalogue, by name."""
    return [_benchmark(file, name) for name, file in sorted(_files_of_names().items())]


@lru_cache(maxsize=1)
def _files_of_names() -> dict[str, str]:
    """Name -> its file. Only families have to be opened to know their names."""
    files: dict[str, str] = {}
    for path in (resources.files("rllm.eval") / "catalogue").iterdir():
        if not path.name.endswith(".toml"):
            continue
        name = path.name.removesuffix(".toml")
        members = _table(path.name).get("members")
        for each in (
            [name] if members is None else [f"{name}/{one}" for group in members.values() for one in group]
        ):
            files[each] = path.name
        if members is not None and "whole" in _table(path.name):
            files[name] = path.name
    return files


@lru_cache(maxsize=256)
def _table(file: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("rllm.eval") / "catalogue" / file).read_text("utf-8"))


def _benchmark(file: str, name: str) -> Benchmark:
    table = dict(_table(file))
    members = table.pop("members", None)
    whole = table.pop("whole", None)
    member_train = table.pop("member_train", _UNSET)
    if members is not None and "/" not in name:
        table["description"] = whole
        table["environment"] = f"{table['environment']}/all"
    elif members is not None:
        member = name.partition("/")[2]
        group = next(group for group, names in members.items() if member in names)
        table["name"] = name
        table["train"] = {**table.get("train", _UNSET), **member_train.get(member, _UNSET)}
        table["environment"] = f"{table['environment']}/{member}"
        table["description"] = table["description"].format(member=member.replace("_", " "), group=group)
    return benchmark_of(table, f"catalogue/{file}")


def benchmark_of(table: Mapping[str, Any], where: str) -> Benchmark:
    """A catalogue file's content. Raises ConfigError, beginning with `where`, for a key that means
    nothing."""
    field_names = {each.name for each in fields(Benchmark)}
    for key in table:
        if key not in field_names:
            raise ConfigError(
                f"{where}: there is no key `{key}`; there are {', '.join(sorted(field_names))}."
            )
    values = dict(table)
    if "source" in values:
        values["source"] = source_of(values["source"], where)
    if values.get("environment", SINGLE_TURN) in QUESTIONS:
        values.setdefault("train", QUESTION_TRAINING)
    elif values["environment"] == TASK_DIRECTORY:
        values.setdefault("train", TASK_TRAINING)
    values["splits"] = {name: _split(name, each, where) for name, each in values.get("splits", {}).items()}
    try:
        benchmark = Benchmark(**values)
    except TypeError as error:
        raise ConfigError(f"{where} is incomplete: {error}.") from error
    if not benchmark.splits:
        raise ConfigError(f"{where} has no `splits`; name at least one.")
    reading = benchmark.published_reading
    if reading and reading not in PUBLISHED_READINGS:
        raise ConfigError(
            f"{where}: `published_reading` is {reading!r}; {choices_of(reading, PUBLISHED_READINGS)}."
        )
    for key in benchmark.train.get("task", _UNSET).keys() - TRAINING_ONLY:
        raise ConfigError(
            f"{where}: there is no key `train.task.{key}`; there are {', '.join(TRAINING_ONLY)}."
        )
    if (
        benchmark.source is not None
        and benchmark.asks_questions
        and not (benchmark.transform and benchmark.prompt)
    ):
        raise ConfigError(f"{where} has rows but no `transform` or no `prompt`; say what is asked of them.")
    return benchmark


def _split(name: str, table: Mapping[str, Any], where: str) -> Split:
    unknown = table.keys() - {"rows", "published", "files"}
    if unknown:
        raise ConfigError(
            f"{where}: there is no `splits.{name}.{min(unknown)}`; there are rows, published, files."
        )
    return Split(
        rows=table.get("rows"),
        published=table.get("published", name),
        files=tuple(table.get("files", ())),
    )


def _registered_benchmark(name: str) -> Benchmark:
    """A person's own data set: what was said when it was registered, and plain defaults."""
    info = DatasetRegistry.get_dataset_info(name) or _UNSET
    splits = info["splits"]
    declaration = next(iter(splits.values())).get("benchmark", _UNSET)
    return Benchmark(
        name=name,
        description=info["description"] or f"Rows registered as `{name}`.",
        category=info["category"] or "own",
        licence="unknown",
        citation="",
        agent=declaration.get("agent", "conversation"),
        evaluator=declaration.get("evaluator", "exact"),
        splits={split: Split(rows=each["rows"], published=split) for split, each in splits.items()},
        transform="own",
        fields=declaration.get("fields", {}),
        prompt=declaration.get("prompt", "{{question}}"),
        train=QUESTION_TRAINING,
    )


def _directory(path: str) -> Benchmark:
    return Benchmark(
        name=Path(path).resolve().name,
        description=f"Task directories under {path}.",
        category="agentic",
        licence="unknown",
        citation="",
        agent="conversation",
        evaluator=ENVIRONMENT,
        splits={"test": Split()},
        environment=TASK_DIRECTORY,
        task={"path": str(Path(path).resolve())},
        train=TASK_TRAINING,
    )


def _swe_rows(path: str) -> Benchmark:
    return Benchmark(
        name=Path(path).resolve().name.partition(".")[0],
        description=f"Software-engineering tasks in {path}.",
        category="software",
        licence="unknown",
        citation="",
        agent="swe",
        evaluator=ENVIRONMENT,
        splits={split: Split() for split in swe_splits(Path(path))},
        environment=SWE,
        task={"path": str(Path(path).resolve())},
        train=SWE_TRAINING,
    )


def _browsergym(name: str) -> Benchmark:
    return Benchmark(
        name=name,
        description=f"{name} of an installed BrowserGym, as the text of a page.",
        category="web",
        licence="Apache-2.0",
        citation="Chezelles et al. 2024, arXiv:2412.05467",
        agent="web",
        evaluator=ENVIRONMENT,
        splits={split: Split() for split in ("test", "train", "validation")},
        environment=name,
        train=WEB_TRAINING,
    )


def _openenv(name: str) -> Benchmark:
    return Benchmark(
        name=name,
        description=f"The environment behind the OpenEnv server {name.removeprefix(OPENENV)}.",
        category="own",
        licence="unknown",
        citation="",
        agent="conversation",
        evaluator=ENVIRONMENT,
        splits={split: Split() for split in ("test", "train", "validation")},
        environment=name,
        extra="openenv",
        # Not in lockstep: who waits for one of the server's sessions waits for others to finish.
        train={
            "rollout": {"max_turns": 20, "max_tokens_per_turn": 256, "num_parallel": sessions_of(name)},
            "inference": {"lockstep": False, "max_context": 2048},
            "warm_start": {"steps": 0, "noise": 0.0},
        },
    )


def _live_rows(path: str, schema: str) -> Benchmark:
    return Benchmark(
        name=Path(path).resolve().name.partition(".")[0],
        description=f"Tasks on live websites in {path}, as {schema} writes them; a model judges.",
        category="web",
        licence="unknown",
        citation="",
        agent="web",
        evaluator=ENVIRONMENT,
        splits={"test": Split()},
        environment=LIVE_WEB,
        extra="web",
        task={"path": str(Path(path).resolve())},
        train=WEB_TRAINING,
    )


def _short(names: list[str]) -> list[str]:
    """Names for a sentence: families by their first part."""
    return sorted({f"{name.partition('/')[0]}/…" if "/" in name else name for name in names})
