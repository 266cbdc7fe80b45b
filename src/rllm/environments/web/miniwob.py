"""MiniWoB++: `miniwob/NAME`, such as `miniwob/click-checkboxes`, and `miniwob/all` for all of them.

    the pages of the `miniwob` wheel ──► a site of this process ──► one page a task, seeded and started anew
    what it pays ──► its own raw reward, from -1 to 1; with `has_limit` its own limit and a decay

A task is a name and a seed. Training, validation and test seeds differ modulo 3. Some tasks have an expert: a
plan that the goal alone gives away, to be done on the page.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rllm.environments.web.acting import act
from rllm.environments.web.actions import WebAction
from rllm.environments.web.chromium import require_browser
from rllm.environments.web.context import BrowserContext
from rllm.environments.web.demonstrations import Plan, PlannedEnv, Step, baselines, demonstrate
from rllm.environments.web.network import Site, folder_site
from rllm.environments.web.observation import PageView
from rllm.environments.world import World
from rllm.errors import ConfigError, MissingExtraError

HOST = "miniwob.test"
SPLITS = {"train": 0, "validation": 1, "test": 2}
"""Split -> what is left of its seeds modulo their number."""
ALL = "all"
MAX_TURNS = 20
_AREA = (0, 50, 160, 160)
"""The place of a task on its page, below its text."""
_OWN_CLOCK = 10**9
"""Milliseconds of an episode without a limit."""
_EXCLUDED = "#query, #reward-display, #click-canvas, #sync-task-cover"
"""The surroundings of a task: its text, which is the goal, and the points."""
_START = """([seed, limit, excluded]) => {
  const around = Array.from(document.body.children).filter((each) => !each.matches(`#wrap, ${excluded}`));
  const html = around.map((each) => each.outerHTML).join("");
  if ((window.rllmAround ??= html) !== html) return null;
  Math.seedrandom(seed);
  const limits = window.rllmLimits ??= core.EPISODE_MAX_TIME;
  core.EPISODE_MAX_TIME = limit ?? limits;
  core.startEpisodeReal();
  document.activeElement?.blur();
  const said = core.getUtterance();
  return typeof said === "string" ? said : said.utterance;
}"""
"""Null where an episode left something around the task, such as an open calendar: the page is loaded anew."""
_VERDICT = """() => window.rllmLimits === undefined ? null :
  [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_GLOBAL, String(WOB_REWARD_REASON ?? '')]"""
"""Null for a page that was not started by us: another task, or this one loaded again."""
_SUBMIT: Step = ("click", "button", "Submit")
_COLOURS = {
    "black": "rgb(0, 0, 0)", "blue": "rgb(0, 0, 255)", "cyan": "rgb(0, 255, 255)",
    "grey": "rgb(128, 128, 128)", "lime": "rgb(0, 255, 0)",
    "magenta": "rgb(255, 0, 255)", "olive": "rgb(128, 128, 0)",
    "orange": "rgb(255, 165, 0)", "pink": "rgb(255, 192, 203)", "purple": "rgb(128, 0, 128)",
    "red": "rgb(255, 0, 0)", "white": "rgb(255, 255, 255)", "yellow": "rgb(255, 255, 0)",
}  # fmt: skip
_PLANS: dict[str, tuple[str, Callable[..., Sequence[Step]]]] = {
    "choose-list": (
        r"Select (.+) from the list and click Submit\.",
        lambda option: (("choose", "", option), _SUBMIT),
    ),
    "click-button": (
        r'Click on the "(.+)" button\.',
        lambda name: (("click", "button", name),),
    ),
    "click-checkboxes": (
        r"Select (.+) and click Submit\.",
        lambda names: (*(("click", "checkbox", each) for each in _names_in(names)), _SUBMIT),
    ),
    "click-color": (
        r"Click on the (.+) colored box\.",
        lambda colour: (("click", "box", _COLOURS[colour]),),
    ),
    "click-option": (
        r"Select (.+) and click Submit\.",
        lambda name: (("click", "radio", name), _SUBMIT),
    ),
    "enter-text": (
        r'Enter "(.+)" into the text field and press Submit\.',
        lambda text: (("fill", "", text), _SUBMIT),
    ),
    "form-sequence-2": (
        r'Check the (\d)\w\w radio button and enter the number "(.+)" into the (\d)\w\w textbox\.',
        lambda radio, number, box: (
            ("click", "radio", f"#{radio}"),
            ("fill", f"#{box}", number),
            _SUBMIT,
        ),
    ),
}
_PLANS["identify-shape"] = (
    r'Click the button that best describes the figure below\.\n\[1\] (\w+)(?: .*text="(.)")?.*',
    # The sign itself, because pictures of 62 signs hardly teach which are letters and which numbers.
    lambda role, sign: (("note", sign or role), ("click", "button", _figure_of(role, sign))),
)
_PLANS["enter-text-dynamic"] = _PLANS["enter-text"]
_PLANS["click-checkboxes-transfer"] = _PLANS["click-checkboxes"]
"""Task -> (its goal, and after a line break how its page begins where that matters; what is done on the
page, given the groups of that)."""
_FIGURES = {"rect": "Rectangle", "circle": "Circle", "polygon": "Triangle"}


def _figure_of(role: str, sign: str | None) -> str:
    """The name that `identify-shape` has for an element of an SVG; `sign`: the text in it."""
    if sign is not None:
        return "Number" if sign.isdigit() else "Letter"
    return _FIGURES[role]


def _names_in(names: str) -> Sequence[str]:
    return () if names == "nothing" else names.split(", ")


@cache
def miniwob_folder() -> Path:
    """Where the wheel keeps its pages. It is not imported, because it brings a browser driver of its own."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("miniwob", "web")
    return Path(spec.submodule_search_locations[0]) / "html"


@cache
def task_names() -> tuple[str, ...]:
    """All tasks of the wheel."""
    return tuple(sorted(path.stem for path in (miniwob_folder() / "miniwob").glob("*.html")))


@cache
def _site() -> Site:
    return folder_site(miniwob_folder())


class MiniWobEnv(PlannedEnv):
    """One MiniWoB++ task with one seed.

    Its clock stands still unless `has_limit`: then the page ends the episode after its own limit, and pays
    less for what takes longer, which makes the reward depend on this machine.
    """

    use = "miniwob"
    reusable = True
    first_quiet_ms = 5
    """A task is all there when it was started."""

    def __init__(
        self,
        name: str,
        seed: int,
        *,
        has_limit: bool = False,
        max_turns: int = MAX_TURNS,
        view: PageView | None = None,
    ) -> None:
        require_task(name)
        if not 0 <= seed < 2**53:
            raise ConfigError(f"`seed` is {seed}; it must be from 0 to 2**53 - 1.")
        self.name = name
        self.seed = seed
        self.has_limit = has_limit
        view = view or PageView()
        super().__init__(
            start_url=f"http://{HOST}/miniwob/{name}.html",
            sites={HOST: _site()},
            max_turns=max_turns,
            view=replace(view, exclude=_EXCLUDED, with_address=False, clip=_AREA),
        )

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "MiniWobEnv":
        """A task made by `miniwob_tasks`."""
        view_names = ("token_budget", "with_places", "marks_changes", "shows", "has_numbers")
        own_names = ("name", "seed", "has_limit", "max_turns")
        for key in info:
            if key not in (*view_names, *own_names, "task_id", "uid"):
                raise ConfigError(
                    f"A task of miniwob has no `{key}`; it has {', '.join((*own_names, *view_names))}."
                )
        for key in ("name", "seed"):
            if key not in info:
                raise ConfigError(f"A task of miniwob needs `{key}`.")
        require_browser()
        view = PageView(**{key: info[key] for key in view_names if key in info})
        return MiniWobEnv(**{key: info[key] for key in own_names if key in info}, view=view)

    async def begin(self, context: BrowserContext) -> str:
        goal = None
        if context.tab.page.url == self.start_url and len(context.tabs) == 1:
            goal = await self._start(context)
        if goal is None:
            await super().begin(context)
            await context.tab.wait_for_load()
            goal = await self._start(context)
        self.goal = re.sub(r"\s+", " ", str(goal)).strip()
        return self.goal

    def plan(self) -> Plan:
        pattern, steps = _PLANS[self.name]
        match = re.match(rf"{pattern}\n", f"{self.goal}\n{self.page}\n")
        assert match is not None, f"the goal of {self.name} is {self.goal!r}, its page {self.page!r}"
        return (steps(*match.groups()),)

    async def _start(self, context: BrowserContext) -> str | None:
        await act(context, WebAction(name="mouse_move", arguments={"x": 0, "y": 0}), {})
        limit_ms = None if self.has_limit else _OWN_CLOCK
        return await context.tab.evaluate(_START, [self.seed, limit_ms, _EXCLUDED])

    async def verdict(
        self, context: BrowserContext, message: WebAction | None
    ) -> tuple[float, dict[str, Any]] | None:
        """The page's own reward once it is done; 0 for a task that was given up, or left."""
        # A copy, because tabs may open and close while one of them is asked.
        for tab in tuple(context.tabs):
            if (state := await tab.evaluate(_VERDICT)) is not None:
                break
        else:
            return 0.0, {"is_correct": False, "reason": "the page of the task was left"}
        done, raw, decayed_reward, reason = state
        if not done and message is None:
            return None
        reward = float(decayed_reward if self.has_limit else raw) if done else 0.0
        return reward, {"is_correct": bool(done and raw > 0), "reason": reason[:200]}


def require_task(name: str) -> None:
    """Raises ConfigError, with the nearest name, for a task that there is not."""
    import difflib

    if name not in task_names():
        nearest = difflib.get_close_matches(name, task_names(), n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(task_names())}."
        raise ConfigError(f"There is no MiniWoB task `{name}`; {hint}")


def miniwob_tasks(
    names: tuple[str, ...], split: str, count: int, *, start: int = 0, **arguments: Any
) -> list[dict[str, Any]]:
    """`count` tasks from `start` on, one after the other of `names`, each time with another seed."""
    if split not in SPLITS:
        raise ConfigError(f"There is no split `{split}`; there are {', '.join(SPLITS)}.")
    tasks: list[dict[str, Any]] = []
    for index in range(start, start + count):
        name, seed = names[index % len(names)], index // len(names) * len(SPLITS) + SPLITS[split]
        tasks.append({"task_id": f"miniwob/{name}/{seed}", "name": name, "seed": seed, **arguments})
    return tasks


def world_of(name: str) -> World:
    """The world of `miniwob/NAME`; of all tasks in turn for `all`."""
    if name == ALL:
        names = task_names()
    else:
        require_task(name)
        names = (name,)
    has_expert = all(each in _PLANS for each in names)
    return World(
        env_class=MiniWobEnv,
        tasks=partial(miniwob_tasks, names),
        demonstrate=partial(demonstrate, MiniWobEnv) if has_expert else None,
        expert_waits=True,
        baselines=partial(baselines, MiniWobEnv) if has_expert else None,
        kind=_kind,
    )


def _kind(task: Mapping[str, Any]) -> str:
    return str(task["name"])
