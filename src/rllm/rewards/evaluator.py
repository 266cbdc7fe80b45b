"""The evaluators of an episode, and the one place that reads their judgement.

    (task row, episode) ──► evaluator ──► EvalOutput, float, bool, (reward, is_correct) ──► EvalOutput
                             └ a function, an object, a grader; or a name: of a grader, else of an entry point

A reward of None, NaN, infinity or text is a RewardError that names the evaluator: never taken for a zero.
"""

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, SupportsIndex, overload

from rllm.errors import ConfigError
from rllm.files.named_places import EVALUATOR_PLACES
from rllm.rewards.evaluators import GraderEvaluator
from rllm.rewards.grade import Grader
from rllm.rewards.graders import GRADERS, grader_named
from rllm.types.callables import is_async, made_from, name_of, reduced, require_call
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput
from rllm.types.judgements import judgement
from rllm.types.names import object_named
from rllm.types.task import Task

ENTRY_POINTS = "rllm.evaluators"
_PUBLISHED = {
    **{f"{name}_reward_fn": name for name in ("math", "f1", "code", "countdown", "search", "translation")},
    "mcq_reward_fn": "choice",
    "ifeval_reward_fn": "instructions",
    "bfcl_reward_fn": "calls",
    "llm_equality_reward_fn": "equality",
    "llm_judge_reward_fn": "judge",
    "swebench_reward_fn": "swebench",
}
"""Published name of an evaluator -> the grader."""
_ABSENT = (
    *("claw_eval_reward_fn", "widesearch_reward_fn", "iou_reward_fn", "point_in_mask_reward_fn"),
    *("depth_reward_fn", "frozenlake_reward_fn"),
)
_WANTED = "write it as `def score(task: dict, episode: Episode) -> float`"


class Evaluator:
    """A judge under a name. Called, it is the function that it was made from."""

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self.function = function
        self.name = name or name_of(function)
        self.is_async = is_async(function)
        self.__doc__ = inspect.getdoc(function)
        self.__module__ = getattr(function, "__module__", __name__)
        require_call(function, self.name, ("task", "episode"), "evaluator", _WANTED)
        self._takes_task = _takes_task(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def evaluate(self, task: Mapping[str, Any], episode: Episode) -> EvalOutput | Awaitable[EvalOutput]:
        """The judgement, or something to await that gives it, for an async function.

        Raises RewardError for what is no judgement, and whatever the function raises.
        """
        result = self.function(_as_task(task) if self._takes_task else task, episode)
        return self._await_judgement(result) if inspect.isawaitable(result) else judgement(result, self.name)

    async def _await_judgement(self, result: Awaitable[Any]) -> EvalOutput:
        return judgement(await result, self.name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return reduced(self, self.function, protocol)

    def __repr__(self) -> str:
        return f"Evaluator({self.name!r})"


def _takes_task(function: Callable[..., Any]) -> bool:
    """Whether its first argument is written down as a Task, and not as a row."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()))
    except (ValueError, StopIteration):  # something built in, or `*args` alone
        return False
    return first.annotation is Task or first.annotation in ("Task", "rllm.types.Task", "types.Task")


def _as_task(row: Mapping[str, Any]) -> Task:
    if isinstance(row, Task):  # from a program that calls the evaluator itself
        return row
    return Task(id=str(row.get("task_id", "")), instruction=row.get("instruction", ""), metadata=dict(row))


@overload
def evaluator(function: Callable[..., Any]) -> Evaluator: ...
@overload
def evaluator(*, name: str = "", register: str = "") -> Callable[[Callable[..., Any]], Evaluator]: ...
def evaluator(
    function: Callable[..., Any] | None = None, *, name: str = "", register: str = ""
) -> Evaluator | Callable[[Callable[..., Any]], Evaluator]:
    """Make an evaluator of a function, sync or async, that takes the task and the episode.

    The task is its row, a dict; a Task where the function's first argument is annotated so. `register`: keeps
    the place of the function, so that `--evaluator` finds it by that name.
    """

    def decorate(function: Callable[..., Any]) -> Evaluator:
        if register:
            EVALUATOR_PLACES.register_function(register, function)
        return Evaluator(function, name)

    return decorate if function is None else decorate(function)


def as_evaluator(judge: Any) -> Evaluator:
    """The evaluator: itself, a plain function, a name, a grader, or an object or class with `evaluate`."""
    if isinstance(judge, Evaluator):
        return judge
    if isinstance(judge, str):
        return load_evaluator(judge)
    if inspect.isclass(judge):
        judge = made_from(judge)
    if isinstance(judge, Grader):
        judge = GraderEvaluator(judge)
    if callable(method := getattr(judge, "evaluate", None)):
        return Evaluator(method, getattr(judge, "name", "") or type(judge).__name__)
    if not callable(judge):
        raise ConfigError(f"{judge!r:.200} (a {type(judge).__name__}) is no evaluator; {_WANTED}.")
    return Evaluator(judge)


def load_evaluator(name: str) -> Evaluator:
    """The evaluator that a name stands for.

    A grader (`math`, `choice`, …: `rllm.rewards.graders.GRADERS`), also by its published name
    (`math_reward_fn`), an entry point, `package.module:name` or `file.py:name`.
    """
    name = _PUBLISHED.get(name, name)
    if name in _ABSENT:
        raise ConfigError(
            f"There is no evaluator `{name}`, because the benchmark that it is for is not here; write it as "
            "a function made with @rllm.evaluator, and name it file.py:NAME."
        )
    if name in GRADERS:
        return as_evaluator(grader_named(name))
    try:
        evaluator = object_named(EVALUATOR_PLACES.place_of(name), group=ENTRY_POINTS, what="evaluator")
    except ConfigError as error:
        nearest = difflib.get_close_matches(name, GRADERS, n=1)
        if not nearest or "did you mean" in str(error):
            raise
        raise ConfigError(
            f"There is no evaluator `{name}`; did you mean the grader `{nearest[0]}`?"
        ) from error
    return as_evaluator(evaluator)
