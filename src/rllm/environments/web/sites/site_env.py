"""A task on one of our own sites: a site drawn from a seed, a goal, and who judges it by the site's books.

    SiteTemplate(name, draw) + seed ──► SiteTask: goal, the books as they should be at the end, the answer
    books after the episode == those, the answer is right, infeasible was said if and only if it is so ──► 1

What pages say is never read for the reward. A task ends when the agent tells the user something; until then
nothing is paid.
"""

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rllm.environments.web.actions import WebAction
from rllm.environments.web.chromium import require_browser
from rllm.environments.web.context import BrowserContext
from rllm.environments.web.demonstrations import Plan, PlannedEnv, baselines, demonstrate
from rllm.environments.web.network import Site
from rllm.environments.web.observation import PageView
from rllm.environments.world import World
from rllm.errors import ConfigError

SPLITS = {"train": 0, "validation": 1, "test": 2}
"""Split -> what is left of its seeds modulo their number."""
MAX_TURNS = 15
TOKEN_BUDGET = 2000
DIFFICULTIES = ("easy", "medium", "hard")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(kw_only=True, slots=True)
class SiteTask:
    """One task. `plan` is one way to solve it: what is done on one page, page after page."""

    goal: str
    plan: Plan
    books: Any = None
    """The books as they should be at the end; None where nothing may change."""
    number: str = ""
    """The answer, where it is a number."""
    choice: str = ""
    """The answer, where it is one of `choices`."""
    choices: Sequence[str] = ()
    is_infeasible: bool = False

    def is_answered_by(self, text: str) -> bool:
        """Whether a text names the answer and no other one."""
        if self.number and {float(each) for each in _NUMBER.findall(text)} != {float(self.number)}:
            return False
        if self.choice:
            return [each for each in self.choices if each.casefold() in text.casefold()] == [self.choice]
        return True

    def mistake(self, books: Any, message: WebAction) -> str:
        """The reason that the episode that ends with `message` and these books is not paid; empty where it
        is."""
        gave_up = message.name == "report_infeasible"
        if gave_up != self.is_infeasible:
            return "it can be done" if gave_up else "it cannot be done, and that was not said"
        if books != self.books:
            return "the books are not as they should be"
        if not gave_up and not self.is_answered_by(str(message.arguments["text"])):
            return "the answer is not right"
        return ""


@dataclass(kw_only=True, slots=True, frozen=True)
class SiteTemplate:
    name: str
    difficulty: str
    draw: Callable[[Any, random.Random], SiteTask]
    """(books, generator) -> a task on them; it may prepare them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SiteKind:
    """One of our sites with its templates."""

    name: str
    host: str
    draw_books: Callable[[random.Random], Any]
    serve: Callable[[Any], Site]
    templates: Mapping[str, SiteTemplate]

    def task(self, template: str, seed: int) -> tuple[Any, SiteTask]:
        """(books, task): the same for the same seed, on every machine."""
        # A text as a seed goes through SHA-512 and not through `hash`, which differs from process to process.
        generator = random.Random(f"{self.name}/{template}/{seed}")
        books = self.draw_books(generator)
        task = self.templates[template].draw(books, generator)
        if task.books is None:
            task.books = copy.deepcopy(books)
        return books, task


class SiteEnv(PlannedEnv):
    """One task on a site of ours. Derive from it with a `kind`."""

    kind: SiteKind
    reusable = True
    first_quiet_ms = 5
    """Its pages have no scripts."""

    def __init__(
        self, template: str, seed: int, *, max_turns: int = MAX_TURNS, view: PageView | None = None
    ) -> None:
        if template not in self.kind.templates:
            names = ", ".join(self.kind.templates)
            raise ConfigError(f"There is no template `{template}` of {self.kind.name}; there are: {names}.")
        self.use = self.kind.name
        self.template = template
        self.seed = seed
        super().__init__(
            start_url=f"http://{self.kind.host}/",
            max_turns=max_turns,
            view=view or PageView(token_budget=TOKEN_BUDGET, viewport_only=False, with_address=False),
        )

    @classmethod
    def of_task(cls, info: Mapping[str, Any]) -> "SiteEnv":
        """A task made by `site_tasks`."""
        view_names = ("token_budget", "marks_changes", "shows", "has_numbers")
        own_names = ("template", "seed", "max_turns")
        for key in info:
            if key not in (*view_names, *own_names, "task_id", "uid"):
                names = ", ".join((*own_names, *view_names))
                raise ConfigError(f"A task of {cls.kind.name} has no `{key}`; it has {names}.")
        for key in ("template", "seed"):
            if key not in info:
                raise ConfigError(f"A task of {cls.kind.name} needs `{key}`.")
        require_browser()
        budget = {"token_budget": TOKEN_BUDGET, **{key: info[key] for key in view_names if key in info}}
        view = PageView(viewport_only=False, with_address=False, **budget)
        return cls(**{key: info[key] for key in own_names if key in info}, view=view)

    async def begin(self, context: BrowserContext) -> str:
        # Drawn anew for each attempt, because an attempt changes its books.
        self.books, self.site_task = self.kind.task(self.template, self.seed)
        self.sites = {self.kind.host: self.kind.serve(self.books)}
        context.network.admit(self.sites, ())
        await super().begin(context)
        return self.site_task.goal

    async def verdict(
        self, context: BrowserContext, message: WebAction | None
    ) -> tuple[float, dict[str, Any]] | None:
        if message is None:
            return None
        reason = self.site_task.mistake(self.books, message)
        return float(not reason), {"is_correct": not reason, "reason": reason}

    def plan(self) -> Plan:
        return self.site_task.plan


def site_tasks(
    kind: SiteKind, names: Sequence[str], split: str, count: int, *, start: int = 0, **arguments: Any
) -> list[dict[str, Any]]:
    """`count` tasks from `start` on, one after the other of `names`, each time with another seed."""
    if split not in SPLITS:
        raise ConfigError(f"There is no split `{split}`; there are {', '.join(SPLITS)}.")
    tasks: list[dict[str, Any]] = []
    for index in range(start, start + count):
        name, seed = names[index % len(names)], index // len(names) * len(SPLITS) + SPLITS[split]
        tasks.append({"task_id": f"{kind.name}/{name}/{seed}", "template": name, "seed": seed, **arguments})
    return tasks


def site_world(env_class: type[SiteEnv], member: str) -> World:
    """The world of a template, of all templates of a difficulty, or of `all`."""
    templates = env_class.kind.templates
    if member in templates:
        names: tuple[str, ...] = (member,)
    else:
        names = tuple(name for name, each in templates.items() if member in ("all", each.difficulty))
    if not names:
        raise ConfigError(
            f"There is no `{env_class.kind.name}/{member}`; there are: "
            f"{', '.join(('all', *DIFFICULTIES, *templates))}."
        )
    return World(
        env_class=env_class,
        tasks=partial(site_tasks, env_class.kind, names),
        demonstrate=partial(demonstrate, env_class),
        expert_waits=True,
        baselines=partial(baselines, env_class),
        kind=_template,
    )


def _template(task: Mapping[str, Any]) -> str:
    return str(task["template"])
