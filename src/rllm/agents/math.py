"""The agent that solves mathematics problems: the question goes in, thoughts and an answer come out.

    "What is 6 * 7?" ──► user message ──► model ──► "<think>…</think> \\boxed{42}" ──► Action("\\boxed{42}")
    feedback         ──► user message ──► the same conversation, with or without the thoughts of earlier turns

One turn in a `SingleTurnEnvironment`, several in a `SelfCorrectionEnvironment`.
"""

from collections.abc import Mapping
from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.agents.prompts_named import prompt_named
from rllm.errors import AgentError
from rllm.rendering.answers import CLOSE_THINK, OPEN_THINK, without_thoughts
from rllm.types.episode import Action
from rllm.types.messages import Message

FEEDBACK_KEYS = ("feedback", "question", "problem", "prompt")
"""Where the text of an observation is, when it is a dict."""


class MathAgent(DialogueAgent):
    """Questions as user messages; the action is what comes behind the thoughts.

    Without `accumulate_thinking` the thoughts of earlier turns are left out of what the model reads: each
    turn begins a new segment then. `system_prompt`: "" is none, None the built-in one, which asks for
    \\boxed{}. `thinks_first`: the model's chat template ends with <think>, so what comes before </think> is a
    thought, and all of an answer without it.
    """

    def __init__(
        self,
        accumulate_thinking: bool = True,
        system_prompt: str | None = "",
        *,
        thinks_first: bool = False,
    ) -> None:
        self.accumulate_thinking = accumulate_thinking
        self.thinks_first = thinks_first
        self._system_prompt = self.built_in_prompt() if system_prompt is None else system_prompt
        self.reset()

    def built_in_prompt(self) -> str:
        return prompt_named("math")

    @property
    def chat_completions(self) -> list[Message]:
        if self.accumulate_thinking:
            return self._messages
        return [*map(without_thoughts, self._messages[:-1]), *self._messages[-1:]]

    def reset(self) -> None:
        self.begin(self._system_prompt)

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.pay(observation, reward, done, info)
        if not done:  # nobody answers the last observation
            self._messages += self.said(observation, info)

    def said(self, observation: Any, info: Mapping[str, Any]) -> list[Message]:
        """The messages that an observation becomes."""
        if isinstance(observation, list):
            return observation
        return [{"role": "user", "content": text_shown(observation, type(self).__name__)}]

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        thought, action = split_thought(response, thinks_first=self.thinks_first)
        self._messages.append({"role": "assistant", "content": response})
        messages = [*self.chat_completions[:-1], self._messages[-1]]
        self.record(response, Action(action), thought=thought, messages=messages)
        return Action(action)


def split_thought(response: str, *, thinks_first: bool = False) -> tuple[str, str]:
    """(thought, answer). A thought that was begun, here or by the prompt, and not ended is all there is: no
    answer follows it."""
    thought, tag, answer = response.rpartition(CLOSE_THINK)
    if tag:
        return thought.strip().removeprefix(OPEN_THINK).strip(), answer.strip()
    if thinks_first or response.lstrip().startswith(OPEN_THINK):
        return response.strip().removeprefix(OPEN_THINK).strip(), ""
    return "", response.strip()


def text_shown(observation: Any, name: str) -> str:
    """The text of an observation that is text, or a dict with a question or feedback."""
    if isinstance(observation, str):
        return observation
    texts = [observation[key] for key in FEEDBACK_KEYS if key in observation] if observation else []
    if not texts or not isinstance(texts[0], str):
        raise AgentError(
            f"{name} was shown {observation!r:.200}; it reads text, messages, and dicts with one of "
            f"{', '.join(FEEDBACK_KEYS)}."
        )
    return texts[0]
