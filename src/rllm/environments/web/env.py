"""A website as an environment: a page as text or picture, actions by BrowserGym's names, one context of a
shared browser.

    reset ──► a context ──► the first page ──► goal and page as text
    step  ──► actions ──► the page is quiet ──► page as text, or what made the action impossible
              send_msg_to_user, report_infeasible ──► judged ──► reward, done

An action that cannot be read or done changes nothing and is told. A page or browser that fails ends the
episode as a failure of the infrastructure: nobody is paid for it.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.judging import judge_of
from rllm.environments.multi_turn import split_task
from rllm.environments.web.acting import ImpossibleAction, act
from rllm.environments.web.actions import (
    UnreadableAction,
    WebAction,
    action_list,
    action_of_call,
    action_schemas,
    parse_actions,
)
from rllm.environments.web.browser import (
    CLOSE_LIMIT_S,
    BrowserThread,
    RunningBrowser,
    run_in_browser,
    wait_for_browser,
)
from rllm.environments.web.chromium import require_browser
from rllm.environments.web.context import BrowserContext
from rllm.environments.web.network import Site
from rllm.environments.web.observation import Observation, PageView, describe, in_quotes, observe_options
from rllm.environments.web.picture import screenshot
from rllm.errors import AgentError, BrowserError, ConfigError
from rllm.types.episode import Action

Part = dict[str, Any]
"""A part of a message, as chat completions write it."""
QUIET_MS = 40
"""A page is quiet when nothing has changed for so long."""
QUIET_LIMIT_MS = 3000
"""Longest wait for that; a page that never rests is shown as it is."""
ENDING = ("send_msg_to_user", "report_infeasible")
_OWN_KEYS = (
    *("start_url", "goal", "hosts", "files", "max_turns", "token_budget", "with_places", "marks_changes"),
    *("viewport_only", "with_address", "shows", "has_numbers", "clip"),
)


class WebEnv(BaseEnv):
    """One task in a browser.

    `hosts` are open to the pages: names, `*.example.org`, or a local `127.0.0.1:8080`; that of `start_url`
    is one of them. `sites` are hosts that this process answers itself: name -> function. What the agent
    tells the user is judged by the task's `grader`, as answers to questions are; without one it earns 0.
    `files`: name -> text, of what the agent may upload.
    """

    use = "web"
    """Contexts are kept for episodes of the same use."""
    reusable = False
    """Whether a context may serve another episode: only where the pages are known to leave nothing behind."""

    first_quiet_ms = QUIET_MS
    """The same before the first observation; less where the pages are known to be made at once."""

    def __init__(
        self,
        task: Mapping[str, Any] | None = None,
        *,
        start_url: str = "about:blank",
        goal: str = "",
        hosts: Sequence[str] = (),
        sites: Mapping[str, Site] | None = None,
        files: Mapping[str, str] | None = None,
        max_turns: int = 30,
        view: PageView | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"`max_turns` is {max_turns}; it must be at least 1.")
        self.task = dict(task or {})
        self.start_url = start_url
        self.goal = goal
        self.hosts = _hosts_of(hosts, start_url)
        self.sites = dict(sites or {})
        self.files = dict(files or {})
        self.max_turns = max_turns
        self.view = view or PageView()
        self.page = ""
        """The page of the last observation as text, whatever was shown of it."""
        self._judge = judge_of(self.task, None)
        self._browser: RunningBrowser | None = None
        self._context: BrowserContext | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._observation: Observation | None = None
        self._next_id = 0
        self._num_turns = 0
        self._over = True

    # ---- for engines -------------------------------------------------------------------------------------

    async def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, seed: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Goal and first page; `info["tools"]` are the schemas of the actions."""
        return await run_in_browser(self.reset_in)

    async def step(self, action: Any) -> Moved:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Act. `action` is text such as `click("3")`, one a line, or tool calls in OpenAI's form."""
        if self._over:
            raise AgentError(f"{type(self).__name__}.step: there is no episode; call reset first.")
        return await run_in_browser(lambda _: self.step_in(action))

    def close(self) -> None:
        """Give the context back. May be called twice."""
        if self._context is not None:
            wait_for_browser(lambda _: self.close_in(), 4 * CLOSE_LIMIT_S)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "WebEnv":
        """A task with the arguments of the class, and of its view, beside it."""
        task, own = split_task(info, _OWN_KEYS)
        require_browser()
        view = {name: own.pop(name) for name in tuple(own) if name in PageView.__dataclass_fields__}
        return WebEnv(task, view=PageView(**{**view, "clip": tuple(view.get("clip", ()))}), **own)

    # ---- for kinds of tasks: in the loop of the browser --------------------------------------------------

    async def begin(self, context: BrowserContext) -> str:
        """Show the first page; what the agent is to do."""
        try:
            await act(context, WebAction(name="goto", arguments={"url": self.start_url}), {})
        except ImpossibleAction as error:
            raise BrowserError(f"The first page {self.start_url!r} cannot be shown: {error}.") from error
        return self.goal

    async def verdict(
        self, context: BrowserContext, message: WebAction | None
    ) -> tuple[float, dict[str, Any]] | None:
        """(reward, info) once the task is over; None while it goes on. `message`: what ended it."""
        if message is None:
            return None
        answer = str(next(iter(message.arguments.values())))
        info: dict[str, Any] = {"response": answer, "infeasible": message.name == "report_infeasible"}
        if self._judge is None or info["infeasible"]:
            return 0.0, {**info, "is_correct": False}
        # In a thread: the loop of the browser serves all episodes of this process.
        judgement = await asyncio.to_thread(self._judge, answer)
        return judgement.reward, {**info, "metadata": judgement.info, "is_correct": judgement.is_correct}

    # ---- one episode -------------------------------------------------------------------------------------

    async def reset_in(self, thread: BrowserThread) -> tuple[Any, dict[str, Any]]:
        """`reset`, in the loop of the browser."""
        await self.close_in()
        self._browser = await thread.browser()
        self._context = await self._browser.lease(self.use)
        self._context.begin()
        self._context.network.admit(self.sites, self.hosts)
        self._num_turns, self._next_id, self._observation, self._over = 0, 0, None, False
        try:
            goal = await self.begin(self._context)
            page = await self._look(self._context, "", self.first_quiet_ms)
            if self._context.num_episodes:
                await self._context.tab.forget_history()
        except (BrowserError, asyncio.CancelledError):
            await self._give_up()
            raise
        return _with_goal(goal, page), {
            "tools": action_schemas(),
            "actions": action_list(),
            "goal": goal,
            "max_steps": self.max_turns,
        }

    async def step_in(self, action: Any) -> Moved:
        """`step`, in the loop of the browser."""
        context = self._context
        assert context is not None, "an episode has a context"
        self._num_turns += 1
        try:
            return await self._act_and_look(context, action.action if isinstance(action, Action) else action)
        except (BrowserError, asyncio.CancelledError):
            await self._give_up()
            raise

    async def _act_and_look(self, context: BrowserContext, action: Any) -> Moved:
        start_s = time.perf_counter()
        error, message = await self._act_all(context, action)
        acted_s = time.perf_counter()
        # Also when the episode is over: a verdict may read the text of the last page.
        observation = await self._look(context, error)
        end = await self.verdict(context, message)
        info: dict[str, Any] = {
            "valid": not error,
            "act_s": acted_s - start_s,
            "look_s": time.perf_counter() - acted_s,
        }
        if context.network.num_refused:
            info["refused_hosts"] = dict(context.network.num_refused)
        if end is not None:
            self._over = True
            return moved(_outputs(action, observation), end[0], {**info, **end[1]}, terminated=True)
        is_late = self._num_turns >= self.max_turns
        self._over = is_late
        return moved(_outputs(action, observation), 0.0, info, truncated=is_late)

    async def _act_all(self, context: BrowserContext, action: Any) -> tuple[str, WebAction | None]:
        """(error of the first action that failed, the action that ends the task)."""
        try:
            actions = _actions_of(action)
        except UnreadableAction as error:
            return f"Error: {error}", None
        for number, each in enumerate(actions):
            if each.name in ENDING:
                return "", each
            try:
                await act(context, each, self._paths())
            except ImpossibleAction as error:
                return f"Error: {each.name} was impossible: {error}", None
            if number < len(actions) - 1:
                await context.ensure_tab()
                await context.tab.call("quiet", QUIET_MS, QUIET_LIMIT_MS)
        return "", None

    async def _look(self, context: BrowserContext, error: str, quiet_ms: int = QUIET_MS) -> str | list[Part]:
        """The page when it is quiet: text, or the parts of a message that shows a picture."""
        page = await self._quiet_page(context, quiet_ms)
        # Ids are counted on over all documents, so that an id
        # of a page that was left never means another element.
        self._next_id = page["nextId"]
        header = [*([error] if error else []), *context.notes, *self._tabs(context, page)]
        if page["readyState"] == "loading" or not page["isQuiet"]:
            header.append("(The page is not at rest yet.)")
        context.notes.clear()
        before = None if self._observation is None else self._observation.lines
        self._observation = describe(page, self.view, before=before, header=header)
        self.page = self._observation.text
        if self.view.shows == "text":
            return self.page
        url = await screenshot(
            context.tab, page["rows"], clip=self.view.clip, has_marks=self.view.has_numbers
        )
        text = self.page if self.view.shows == "both" else self._observation.header
        picture: Part = {"type": "image_url", "image_url": {"url": url}}
        return [{"type": "text", "text": text}, picture] if text else [picture]

    async def _quiet_page(self, context: BrowserContext, quiet_ms: int) -> dict[str, Any]:
        deadline_s = time.perf_counter() + QUIET_LIMIT_MS / 1000
        while True:
            await context.ensure_tab()
            tab = context.tab
            await tab.wait_for_answers(deadline_s - time.perf_counter())
            left_ms = max(1, int((deadline_s - time.perf_counter()) * 1000))
            options = observe_options(self.view, first_id=self._next_id, quiet_ms=quiet_ms, limit_ms=left_ms)
            try:
                page = await tab.call("observe", options)
            except BrowserError:
                if tab in context.tabs:
                    raise
                continue  # it closed itself meanwhile, or was closed by another
            is_late = time.perf_counter() >= deadline_s
            # What ran while the page came to rest may have asked
            # for more, or brought another tab to the front.
            if is_late or (tab is context.tab and not tab.has_requests):
                return page

    def _tabs(self, context: BrowserContext, page: Mapping[str, Any]) -> list[str]:
        """The tabs, where there are several; the page's name and address, where they say something."""
        if not self.view.with_address:
            return []
        if len(context.tabs) > 1:
            names = [f"{place}{'*' if place == context.active else ''}" for place in range(len(context.tabs))]
            return [f"Tabs: {', '.join(names)}", f"Page: {in_quotes(page['title'])} {in_quotes(page['url'])}"]
        return [f"Page: {in_quotes(page['title'])} {in_quotes(page['url'])}"]

    def _paths(self) -> dict[str, str]:
        """Name -> path of what may be uploaded, written when it is first needed."""
        if not self.files:
            return {}
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rllm-web-")
            for name, text in self.files.items():
                (Path(self._folder.name) / name).write_text(text, encoding="utf-8")
        return {name: str(Path(self._folder.name) / name) for name in self.files}

    async def close_in(self) -> None:
        """Give the context back, in the loop of the browser."""
        context, browser = self._context, self._browser
        self._context = self._browser = None
        self._over = True
        if context is not None and browser is not None:
            await browser.release(context, reusable=self.reusable and context.is_pristine)

    async def _give_up(self) -> None:
        """Close a context whose episode failed; its browser too, if it does not answer."""
        if self._context is not None:
            self._context.fail("Its episode failed.")
        # An episode that is cancelled gives its context back as well.
        await asyncio.shield(self.close_in())


def _actions_of(action: Any) -> list[WebAction]:
    if isinstance(action, str):
        return parse_actions(action)
    calls = action if isinstance(action, list) else [action]
    actions: list[WebAction] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise UnreadableAction("the action is neither text nor a tool call.")
        actions.append(action_of_call(str(function.get("name") or ""), function.get("arguments")))
    if not actions:
        raise UnreadableAction("there is no action in the answer.")
    return actions


def _with_goal(goal: str, page: str | list[Part]) -> str | list[Part]:
    if not goal:
        return page
    if isinstance(page, str):
        return f"Goal: {goal}\n{page}"
    texts = [each["text"] for each in page if each["type"] == "text"]
    pictures = [each for each in page if each["type"] != "text"]
    return [{"type": "text", "text": "\n".join((f"Goal: {goal}", *texts))}, *pictures]


def _outputs(action: Any, page: str | list[Part]) -> Any:
    """The observation in the form of the action: a page, or one output a call, the last of which has it."""
    if not isinstance(action, list) or not action:
        return page
    ids = [str(call.get("id") or f"call_{place}") for place, call in enumerate(action)]
    return {"tool_outputs": {**dict.fromkeys(ids, "Done before what follows."), ids[-1]: page}}


def _hosts_of(hosts: Sequence[str], start_url: str) -> tuple[str, ...]:
    from urllib.parse import urlsplit

    parts = urlsplit(start_url)
    own = () if not parts.hostname else (parts.netloc.rpartition("@")[2] if parts.port else parts.hostname,)
    return tuple(dict.fromkeys((*hosts, *own)))
