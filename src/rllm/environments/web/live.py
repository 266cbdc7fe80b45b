"""Tasks on live websites, judged by a model.

    ROWS.jsonl ──► `data.live_rows` ──► start page, goal, the hosts of its site ──► WebEnv
    what was done, the last page, what the user was told ──► judge ──► reward

The network is open for the site that a row names and what is below it, and closed for all else.
"""

import asyncio
from pathlib import Path
from typing import Any

from rllm.data.live_rows import live_row_tasks
from rllm.environments.base import Moved
from rllm.environments.web.actions import WebAction
from rllm.environments.web.browser import BrowserThread
from rllm.environments.web.chromium import require_browser
from rllm.environments.web.context import BrowserContext
from rllm.environments.web.env import WebEnv
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.types.episode import Action

_MAX_ACTION = 300
"""Characters of an answer that the judge is shown."""


class LiveWebEnv(WebEnv):
    """One task on a live site, judged by a model at its end."""

    async def reset_in(self, thread: BrowserThread) -> tuple[Any, dict[str, Any]]:
        self._answers: list[str] = []
        return await super().reset_in(thread)

    async def step_in(self, action: Any) -> Moved:
        self._answers.append(str(action.action if isinstance(action, Action) else action)[:_MAX_ACTION])
        return await super().step_in(action)

    async def verdict(
        self, context: BrowserContext, message: WebAction | None
    ) -> tuple[float, dict[str, Any]] | None:
        """The judge's, of the whole episode; 0 for a task that was called infeasible."""
        if message is None:
            return None
        answer = str(next(iter(message.arguments.values())))
        info: dict[str, Any] = {"response": answer, "infeasible": message.name == "report_infeasible"}
        if info["infeasible"]:
            return 0.0, {**info, "is_correct": False}
        done = "\n".join(self._answers)
        report = (
            f"Done, in this order:\n{done}\n\nThe last page:\n{self.page}\n\nThe user was told:\n{answer}"
        )
        assert self._judge is not None, "a row's task names a grader"
        # In a thread: a model answers, and the loop of the browser serves all episodes of this process.
        judgement = await asyncio.to_thread(self._judge, report)
        return judgement.reward, {**info, "metadata": judgement.info, "is_correct": judgement.is_correct}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "LiveWebEnv":
        """A task made by `live_tasks`. Raises ConfigError where no model is named that judges."""
        require_browser()
        own = {key: info[key] for key in ("start_url", "goal", "hosts", "max_turns") if key in info}
        return LiveWebEnv({key: info[key] for key in info if key not in own}, **own)


def live_tasks(
    split: str, count: int, *, start: int = 0, path: str = "", **arguments: Any
) -> list[dict[str, Any]]:
    """Up to `count` rows of a file, all of which are `test`."""
    if split != "test":
        raise ConfigError(f"There is no split `{split}` of live websites; there is test.")
    return [{**each, **arguments} for each in live_row_tasks(Path(path))[start : start + count]]


WORLD = World(env_class=LiveWebEnv, tasks=live_tasks)
