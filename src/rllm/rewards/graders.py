"""A grader by its name.

    grader_named("math", timeout_s=2.0)  ──► GRADERS["math"] ──► rllm.rewards.math:MathGrader(timeout_s=2.0)

A grader's file, and the packages that it needs, are imported when it is asked for.
"""

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from rllm.errors import ConfigError, RllmError
from rllm.rewards.grade import Grader

GRADERS = {
    "math": "rllm.rewards.math:MathGrader",
    "choice": "rllm.rewards.choice:ChoiceGrader",
    "exact": "rllm.rewards.text:ExactGrader",
    "f1": "rllm.rewards.text:F1Grader",
    "rouge": "rllm.rewards.text:RougeGrader",
    "bleu": "rllm.rewards.translation:BleuGrader",
    "translation": "rllm.rewards.translation:TranslationGrader",
    "search": "rllm.rewards.search:SearchGrader",
    "countdown": "rllm.rewards.countdown_grader:CountdownGrader",
    "composite": "rllm.rewards.composite:CompositeGrader",
    "code": "rllm.rewards.code:CodeGrader",
    "schema": "rllm.rewards.schema:SchemaGrader",
    "instructions": "rllm.rewards.instructions:InstructionGrader",
    "judge": "rllm.rewards.judge:JudgeGrader",
    "equality": "rllm.rewards.judge:EqualityGrader",
    "calls": "rllm.rewards.calls:CallsGrader",
    "swebench": "rllm.rewards.swe_grader:SWEGrader",
}
"""Name -> `module:factory`; what the factory takes by keyword are the grader's options."""


def grader_named(name: str, **options: Any) -> Grader:
    """The grader, made with its options. Raises ConfigError for a name or an option that there is not."""
    if name not in GRADERS:
        nearest = difflib.get_close_matches(str(name), GRADERS, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(GRADERS)}."
        raise ConfigError(f"There is no grader `{name}`; {hint}")
    module, _, attribute = GRADERS[name].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    names = option_names(factory)
    for option in options:
        if option not in names:
            nearest = difflib.get_close_matches(option, names, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"it has {', '.join(names) or 'none'}."
            raise ConfigError(f"The {name} grader has no option `{option}`; {hint}")
    if name == "composite" and isinstance(options.get("parts"), Mapping):
        options["parts"] = {part: _with_grader(part, settings) for part, settings in options["parts"].items()}
    try:
        return factory(**options)
    except RllmError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The {name} grader cannot be made with {options!r:.300}: {error}") from error


def _with_grader(part: str, settings: Any) -> Any:
    """A part of a composite with a grader in place of its name."""
    if not isinstance(settings, Mapping):
        return {"grader": grader_named(part), "weight": settings}
    complete = {"grader": part, "weight": None, **settings}
    args = complete.pop("args", {})
    if isinstance(complete["grader"], str):
        complete["grader"] = grader_named(complete["grader"], **args)
    return complete


def option_names(factory: Any) -> list[str]:
    """The keyword arguments of a grader's factory."""
    return [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
