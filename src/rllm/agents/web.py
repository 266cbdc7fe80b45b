"""The agent that uses a browser: a goal and a page in, actions out, until the task is over.

    goal, page ──► user message ──► model ──► "… ```click("3")```" ──► Action('click("3")') ──► WebEnv …
                                              tool calls           ──► Action([call, …])

A page is text, or parts of a message with a picture, as the environment shows it. An action is what stands in
the last block of an answer that nothing follows, or the whole answer. When the conversation grows beyond
`max_history_chars`, the oldest pages are cut to a line, for half of the room at once: that changes what was
said, so a new segment begins.
"""

import re
from collections.abc import Mapping
from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.agents.prompts_named import prompt_named
from rllm.environments.web.actions import action_list, action_schemas
from rllm.errors import AgentError, ConfigError
from rllm.inference.reading import answer_message, call_messages, read_into
from rllm.rendering.tools import HermesFormat
from rllm.rewards.extraction import final_text
from rllm.types.episode import Action
from rllm.types.messages import Message, ModelOutput

FORM = 'Write the actions as calls in one block, and nothing after it:\n\n```\nclick("3")\n```'
KEPT_PAGES = 1
"""The newest pages are never cut."""
PICTURE_CHARS = 4000
"""Characters that a picture counts for in the budget of the history: it takes about a thousand tokens."""
_CUT = "[A page of {count:,} characters was here.]"
_BLOCK = re.compile(r"```(?:\w+\n|\n)?(.*?)```\s*\Z", re.DOTALL)


def parse_action(response: str) -> str:
    """The actions that an answer ends with; the whole answer where there is no block."""
    answer = final_text(response) or ""
    head, fence, _ = answer.rpartition("```")
    if fence:
        start = head.rfind("```")
        block = _BLOCK.match(answer[start:]) if start >= 0 else None
        return block.group(1).strip() if block else ""
    return answer.strip()


class WebAgent(DialogueAgent):
    """One conversation in a browser.

    `use_fn_calling`: actions are tool calls of the model's own template. Without `instructions` there is no
    system message, for models that were trained on the form.
    """

    def __init__(
        self, use_fn_calling: bool = False, instructions: bool = True, *, max_history_chars: int = 100_000
    ) -> None:
        if max_history_chars < 1000:
            raise ConfigError(
                f"`max_history_chars` is {max_history_chars}; one page alone takes 1000 or more."
            )
        self.use_fn_calling = use_fn_calling
        self.instructions = instructions
        self.max_history_chars = max_history_chars
        self.reset()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return action_schemas() if self.use_fn_calling else []

    def reset(self) -> None:
        self.begin(self._system_prompt())
        self._pages: list[int] = []
        """Places in the messages of pages that are whole."""

    def _system_prompt(self) -> str:
        if not self.instructions:
            return ""
        if self.use_fn_calling:
            return prompt_named("web")
        return f"{prompt_named('web')}\n\nThe actions:\n\n{action_list()}\n\n{FORM}"

    # ---- from the environment ----------------------------------------------------------------------------

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.pay(observation, reward, done, info)
        if done:  # nobody answers the last observation
            return
        self._pages.append(len(self._messages))
        if isinstance(observation, Mapping):
            self._extend_with_outputs(observation)
        else:
            page = observation if isinstance(observation, list) else str(observation)
            self._messages.append({"role": "user", "content": page})
        if sum(map(_num_chars, self._messages)) > self.max_history_chars:
            self._cut_pages()

    def _extend_with_outputs(self, observation: Mapping[str, Any]) -> None:
        outputs = observation.get("tool_outputs")
        if not isinstance(outputs, Mapping) or not outputs:
            raise AgentError("WebAgent was shown a dict without `tool_outputs`; it reads those, and text.")
        calls: Any = self._trajectory.steps[-1].action.action if self._trajectory.steps else []
        names = {call["id"]: call["function"]["name"] for call in calls}
        for call_id, page in outputs.items():
            name, text = names.get(call_id, ""), page
            if isinstance(page, list):  # outputs of tools are text in most templates
                text = "The page is shown below."
            self._messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})
        last = list(outputs.values())[-1]
        if isinstance(last, list):
            self._messages.append({"role": "user", "content": last})
        self._pages[-1] = len(self._messages) - 1

    def _cut_pages(self) -> None:
        """Cut the oldest pages until half of the room is free; the first message keeps its goal."""
        messages = list(self._messages)
        total = sum(map(_num_chars, messages))
        while len(self._pages) > KEPT_PAGES and total > self.max_history_chars / 2:
            place = self._pages.pop(0)
            text, size = _text_of(messages[place]["content"]), _num_chars(messages[place])
            goal, newline, _ = text.partition("\n") if text.startswith("Goal: ") else ("", "", "")
            cut = f"{goal}{newline}{_CUT.format(count=size - len(goal + newline))}"
            if len(cut) < size:
                messages[place] = {**messages[place], "content": cut}
                total -= size - len(cut)
        self._messages = messages

    # ---- from the model ----------------------------------------------------------------------------------

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        if self.use_fn_calling:
            action = self._called(response, kwargs.get("output"))
        else:
            self._messages.append({"role": "assistant", "content": response})
            action = Action(parse_action(response))
        self.record(response, action)
        return action

    def _called(self, response: str, output: ModelOutput | None) -> Action:
        if output is None:
            output = ModelOutput(text=response)
            read_into(output, HermesFormat().parse(response, self.tool_schemas))
        self._messages.append(answer_message(output))
        calls = [] if output.unparsed_markup else call_messages(output.tool_calls)
        return Action(calls)


def _text_of(content: Any) -> str:
    if not isinstance(content, list):
        return str(content)
    return "\n".join(each["text"] for each in content if each["type"] == "text")


def _num_chars(message: Message) -> int:
    content = message.get("content")
    num_pictures = sum(each["type"] != "text" for each in content) if isinstance(content, list) else 0
    return len(_text_of(content)) + PICTURE_CHARS * num_pictures
