"""The arguments of an engine, resolved: a client, limits, sampling; or a ConfigError with the reason.

Published programs pass these arguments under their published names; each is honoured here or refused.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from numbers import Integral
from typing import Any

from rllm.engine.rollout import RolloutLimits
from rllm.errors import ConfigError
from rllm.inference.call_retries import CallPatience
from rllm.inference.client import ModelClient
from rllm.types.budget import TokenBudget
from rllm.types.messages import SamplingParams
from rllm.types.task import Task

_SAMPLING_NAMES = tuple(each.name for each in fields(SamplingParams))


def require_settings(
    *, oversampling: float, deadline_s: float | None, chat_parser: Any, config: Any, **at_least_one: int
) -> None:
    """Raises ConfigError for the first value that cannot be honoured."""
    for name, value in at_least_one.items():
        if not isinstance(value, Integral):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"`{name}` is {value!r}; it must be a whole number of at least 1.")
        if value < 1:
            raise ConfigError(f"`{name}` is {value}; it must be at least 1.")
    if not 1.0 <= oversampling < float("inf"):
        raise ConfigError(
            f"`oversampling` is {oversampling}; it must be 1 (none) or a finite factor above, such as 1.25."
        )
    if deadline_s is not None and not deadline_s > 0.0:
        raise ConfigError(f"`deadline_s` is {deadline_s}; it must be above 0, or None for no deadline.")
    if chat_parser is not None:
        raise ConfigError(
            f"`chat_parser` is {chat_parser!r}; prompts are made by the model's own chat template, so leave "
            "it out, or give the client a tokenizer with another template."
        )
    if config is not None:
        raise ConfigError(
            "`config` is given, but this engine reads nothing from it; pass the values by the names of its "
            "arguments, or train with AgentTrainer, which takes a whole configuration."
        )


def task_list(tasks: Iterable[Any]) -> list[Any]:
    """The tasks, which are looked at several times, as a list: a generator gives its tasks once.

    Raises ConfigError for a task that has no fields.
    """
    all_tasks = list(tasks)
    for place, task in enumerate(all_tasks):
        if not isinstance(task, Task | Mapping):
            raise ConfigError(
                f"Task {place} is {task!r:.80} (a {type(task).__name__}); a task is a dict with what the "
                "environment or workflow needs."
            )
    return all_tasks


def limits_of(
    *,
    max_steps: int,
    max_prompt_length: int,
    max_response_length: int,
    enforce_max_prompt_length: bool,
    step_timeout_s: float,
    trajectory_timeout: float | None,
    episode_timeout_s: float | None,
    model_timeout_s: float | None,
    call_timeout_s: float,
    api_retries: int,
    retry_wait_s: float,
) -> RolloutLimits:
    for name, value in (
        ("step_timeout_s", step_timeout_s),
        ("trajectory_timeout", trajectory_timeout),
        ("episode_timeout_s", episode_timeout_s),
        ("model_timeout_s", model_timeout_s),
    ):
        if value is not None and not value > 0.0:
            raise ConfigError(f"`{name}` is {value}; it must be above 0.")
    for name, value in (
        ("max_prompt_length", max_prompt_length),
        ("max_response_length", max_response_length),
    ):
        if value < 0:
            raise ConfigError(f"`{name}` is {value}; it must be 0 (no limit) or a count of tokens.")
    return RolloutLimits(
        max_turns=max_steps,
        step_timeout_s=step_timeout_s,
        episode_timeout_s=episode_timeout_s,
        wall_timeout_s=trajectory_timeout,
        model_timeout_s=model_timeout_s,
        budget=TokenBudget(
            max_prompt_tokens=max_prompt_length,
            max_response_tokens=max_response_length,
            every_prompt=enforce_max_prompt_length,
        ),
        patience=CallPatience(retries=api_retries, call_timeout_s=call_timeout_s, first_wait_s=retry_wait_s),
    )


def limit_patience(clients: Iterable[Any], patience: CallPatience) -> CallPatience:
    """The patience with these clients. The built-in engine may take as long as it likes: it is in this
    process, and a call that was given up would lose its place in the queue and be asked again."""
    return replace(patience, call_timeout_s=math.inf) if _are_built_in(clients) else patience


def silence_limit_s(clients: Iterable[Any], model_timeout_s: float | None) -> float | None:
    """The longest silence of these clients; none of the built-in engine, which also waits for episodes that
    are busy elsewhere."""
    return None if _are_built_in(clients) else model_timeout_s


def _are_built_in(clients: Iterable[Any]) -> bool:
    return all(getattr(client, "is_built_in", False) for client in clients)


def sampling_of(
    sampling: SamplingParams | Mapping[str, Any] | None, max_response_length: int
) -> tuple[SamplingParams, str]:
    """The sampling parameters, and which model was named among the parameters (empty for none).

    Where nothing says how long an answer may be, it is as long as the budget.
    """
    if isinstance(sampling, SamplingParams):
        return sampling, ""
    fields = dict(sampling or {})
    model = str(fields.pop("model", ""))
    for name in fields:
        if name not in _SAMPLING_NAMES:
            close = difflib.get_close_matches(name, _SAMPLING_NAMES)
            hint = f"did you mean `{close[0]}`?" if close else f"known are {', '.join(_SAMPLING_NAMES)}."
            raise ConfigError(f"`sampling_params` has `{name}`, which cannot be honoured; {hint}")
    if max_response_length:
        fields.setdefault("max_tokens", max_response_length)
    for name in ("stop", "stop_token_ids"):
        if isinstance(fields.get(name), list):
            fields[name] = tuple(fields[name])
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    try:
        return SamplingParams(**fields), model
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`sampling_params`: {error}") from error


def client_for(
    rollout_engine: Any, engine_name: str, engine_args: dict[str, Any], tokenizer: Any, model: str
) -> ModelClient:
    """The model client that these arguments describe: the one that is given, or one of the named kind."""
    if rollout_engine is None:
        from rllm.inference.engines import make_client

        if model:
            engine_args.setdefault("model", model)
        return make_client(engine_name or "openai", engine_args, tokenizer=tokenizer)
    for name, value in (
        ("engine_name", engine_name),
        ("rollout_engine_args", engine_args),
        ("tokenizer", tokenizer),
    ):
        if value:
            raise ConfigError(
                f"`{name}` is {value!r}, but `rollout_engine` is given as well, and it needs none; leave one "
                "of the two out."
            )
    if not hasattr(rollout_engine, "session"):
        from rllm.engine.published_client import PublishedClient

        return PublishedClient(rollout_engine)
    return rollout_engine


def copy_of(value: Any) -> Any:
    """`value` with its lists, dicts and sets made anew, however deep; whatever else it holds is shared."""
    kind = type(value)
    if kind is dict:
        return {key: copy_of(each) for key, each in value.items()}
    if kind is list:
        return [copy_of(each) for each in value]
    if kind is set:
        return set(value)
    return value
