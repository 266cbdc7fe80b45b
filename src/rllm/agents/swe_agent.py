"""The agent that works on a repository: an issue in, calls of tools out, until it submits.

    issue ──► system message with the tools ──► model ──► one call ──► Action ──► SWEEnv ──► its output ──► …

How a call is written is the scaffold's (`rllm.environments.swe.scaffolds`): XML functions, one command in a
block, or with `use_fn_calling` the tool calls of the model's own template. When the conversation grows beyond
`max_history_chars`, the oldest outputs are cut to a line. That changes what was said before, so a new segment
begins; it is done for half of the room at once, so that segments stay long.
"""

from collections.abc import Mapping
from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.agents.prompts_named import prompt_named
from rllm.environments.swe.scaffolds import (
    DEFAULT_SCAFFOLD,
    call_text,
    require_scaffold,
    steps_left,
    tool_schemas,
    tool_texts,
)
from rllm.errors import AgentError, ConfigError
from rllm.inference.reading import answer_message, call_messages, read_into
from rllm.rendering.tools import HermesFormat
from rllm.types.episode import Action
from rllm.types.messages import ModelOutput

FORMS = {
    "r2egym": "Write the call like this, and nothing after it:\n\n<function=NAME>\n<parameter=NAME>VALUE"
    "</parameter>\n</function>",
    "bash": "Write the call as one command in one block, and nothing after it:\n\n```bash\nCOMMAND\n```\n\n"
    "A block with the single word `submit` ends the work.",
}
"""The description of a call's form, where it is text."""
KEPT_OUTPUTS = 2
"""The newest outputs are never cut."""
_CUT = "[An output of {count:,} characters was here.]"


class SWEAgent(DialogueAgent):
    """One conversation about one repository.

    `format_model_response` keeps of each answer what stands before its call and the call, and drops the rest
    from the conversation. `token_warning_threshold`: when a prompt with its answer has so many
    tokens, every output ends with the advice to submit; 0 is never.
    """

    def __init__(
        self,
        use_fn_calling: bool = False,
        format_model_response: bool = False,
        scaffold: str = DEFAULT_SCAFFOLD,
        token_warning_threshold: int = 0,
        *,
        max_history_chars: int = 200_000,
    ) -> None:
        self.scaffold = require_scaffold(scaffold)
        if use_fn_calling and scaffold == "bash":
            raise ConfigError("The scaffold `bash` has no functions to call; leave `use_fn_calling` out.")
        if token_warning_threshold < 0:
            raise ConfigError(f"`token_warning_threshold` is {token_warning_threshold}; 0 is never, or more.")
        if max_history_chars < 1000:
            raise ConfigError(
                f"`max_history_chars` is {max_history_chars}; an issue alone takes 1000 or more."
            )
        self.use_fn_calling = use_fn_calling
        self.format_model_response = format_model_response
        self.token_warning_threshold = token_warning_threshold
        self.max_history_chars = max_history_chars
        self.reset()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return tool_schemas(self.scaffold) if self.use_fn_calling else []

    def reset(self) -> None:
        self.begin(self._system_prompt())
        self._outputs: list[int] = []
        """Places in the messages of outputs that are whole."""

    def _system_prompt(self) -> str:
        if self.use_fn_calling:
            return prompt_named("swe")
        form = FORMS["bash" if self.scaffold == "bash" else "r2egym"]
        tools = "" if self.scaffold == "bash" else f"The tools:\n\n{tool_texts(self.scaffold)}\n\n"
        return f"{prompt_named('swe')}\n\n{tools}{form}"

    # ---- from the environment ----------------------------------------------------------------------------

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.pay(observation, reward, done, info)
        if done:  # nobody answers the last observation
            return
        if not self._trajectory.steps:
            self._messages.append({"role": "user", "content": f"The issue:\n\n{observation}"})
            return
        self._outputs += range(len(self._messages), len(self._messages) + self._extend(observation, info))
        if sum(len(str(each.get("content"))) for each in self._messages) > self.max_history_chars:
            self._cut_outputs()

    def _extend(self, observation: Any, info: Mapping[str, Any]) -> int:
        """Say what the environment answered; how many messages that takes."""
        remark = self._remark(info)
        if isinstance(observation, Mapping) and "tool_outputs" in observation:
            outputs: Mapping[str, Any] = observation["tool_outputs"]
            names = self._names_of_calls()
            made = [
                {"role": "tool", "tool_call_id": call_id, "name": names.get(call_id, ""), "content": text}
                for call_id, text in outputs.items()
            ]
            if not made:
                raise AgentError("SWEAgent was shown `tool_outputs` without any; it needs one a call.")
            made[-1]["content"] = f"{made[-1]['content']}{remark}"
        else:
            made = [{"role": "user", "content": f"{observation}{remark}"}]
        self._messages += made
        return len(made)

    def _remark(self, info: Mapping[str, Any]) -> str:
        max_steps, num_steps = info.get("max_steps"), len(self._trajectory.steps)
        newest = self._trajectory.steps[-1]
        num_tokens = len(newest.prompt_ids) + len(newest.response_ids)
        if self.token_warning_threshold and num_tokens >= self.token_warning_threshold:
            return f"\nThe conversation has {num_tokens:,} tokens: submit now."
        if not isinstance(max_steps, int):
            return ""
        return steps_left(max_steps - num_steps)

    def _names_of_calls(self) -> dict[str, str]:
        calls: Any = self._trajectory.steps[-1].action.action
        return {call["id"]: call["function"]["name"] for call in calls} if isinstance(calls, list) else {}

    def _cut_outputs(self) -> None:
        """Cut the oldest outputs until half of the room is free, but for the newest."""
        messages = list(self._messages)
        total = sum(len(str(each.get("content"))) for each in messages)
        while len(self._outputs) > KEPT_OUTPUTS and total > self.max_history_chars / 2:
            place = self._outputs.pop(0)
            text = str(messages[place]["content"])
            cut = _CUT.format(count=len(text))
            if len(cut) < len(text):
                messages[place] = {**messages[place], "content": cut}
                total -= len(text) - len(cut)
        self._messages = messages

    # ---- from the model ----------------------------------------------------------------------------------

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        if self.use_fn_calling:
            thought, action = self._called(response, kwargs.get("output"))
        else:
            thought, markup, call = call_text(response, self.scaffold)
            content = f"{thought}{markup}" if self.format_model_response else response
            self._messages.append({"role": "assistant", "content": content})
            action = Action(call)
        self.record(response, action, thought=thought)
        return action

    def _called(self, response: str, output: ModelOutput | None) -> tuple[str, Action]:
        if output is None:
            output = ModelOutput(text=response)
            read_into(output, HermesFormat().parse(response, self.tool_schemas))
        self._messages.append(answer_message(output))
        calls = [] if output.unparsed_markup else call_messages(output.tool_calls)
        return output.reasoning or output.content, Action(calls)
