"""An answer that somebody else gave ──► the tokens that the model would have had to sample to give it.

    conversation, asked    …<|assistant|>
    conversation, answered …<|assistant|>Left<|end|>\\n
                                         ╰────────╯ written: what comes behind the question, end token and all

The chat template itself prints the answer, so calls and thoughts are in the form of the model's family. What
the template would keep out of a history, a thought above all, is written in front.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rllm.errors import ConfigError
from rllm.rendering.answers import CLOSE_THINK, OPEN_THINK
from rllm.rendering.chat import ChatRenderer
from rllm.types.content import text_of
from rllm.types.messages import Message

Tools = Sequence[Mapping[str, Any]]

_MARK = "\u2063answer\u2063"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where messages keep what was thought before the answer, whoever wrote them."""


class AnswerWriter:
    """Writes answers as the model would. `end_token_id` ends those that the template prints no end behind."""

    def __init__(self, renderer: ChatRenderer, end_token_ids: Sequence[int], end_token_id: int) -> None:
        self.renderer = renderer
        self._ends = frozenset(end_token_ids)
        self._end_token_id = end_token_id

    def ids(self, messages: Sequence[Message], answer: Message, tools: Tools = ()) -> list[int]:
        """Ids of `answer` to `messages`, from its first token to its end token.

        Raises ConfigError where the template drops part of the answer, or prints it elsewhere than it asks
        for one.
        """
        answer_text = self._text(messages, answer, tools)
        ids = self.renderer.tokenizer.encode(answer_text)
        end = next((place for place, token in enumerate(ids) if token in self._ends), None)
        if end is None:  # what the template puts behind an answer instead is not the model's
            return [
                *self.renderer.tokenizer.encode(answer_text.removesuffix(self._closing)),
                self._end_token_id,
            ]
        if rest := self.renderer.tokenizer.decode(ids[end + 1 :]).strip():
            raise ConfigError(
                f"the answer goes on behind its end token ({rest!r:.60}); take the text of the end token out "
                "of the message."
            )
        return ids[: end + 1]

    @cached_property
    def _closing(self) -> str:
        """The text that the template prints behind the last answer."""
        question: Message = {"role": "user", "content": "x"}
        text = self.renderer.text([question, {"role": "assistant", "content": _MARK}])
        return text.partition(_MARK)[2]

    def _text(self, messages: Sequence[Message], answer: Message, tools: Tools) -> str:
        """The text that the model writes."""
        prompt_text = self.renderer.text_that_asks(messages, tools)
        whole_text = self.renderer.text([*messages, answer], tools)
        thought, content = _taken_apart(answer)
        opens_thought = prompt_text.rstrip().endswith(OPEN_THINK)
        if whole_text.startswith(prompt_text):
            answer_text = whole_text[len(prompt_text) :]
        # Such a template opens a thought where it asks, and prints past answers without one.
        elif opens_thought and whole_text.startswith(before := prompt_text.rstrip().removesuffix(OPEN_THINK)):
            answer_text = whole_text[len(before) :]
        else:
            raise ConfigError(
                "the chat template prints the answer elsewhere than where it asks for one "
                f"(it asks with {prompt_text[-40:]!r}); use a template whose generation prompt begins its "
                "answers."
            )
        if thought and thought not in answer_text:
            answer_text = self._with_thought(answer, thought, answer_text, opens_thought=opens_thought)
        elif not thought and opens_thought and not whole_text.startswith(prompt_text):
            raise ConfigError(
                "the chat template opens a thought before every answer, and this answer has none; give the "
                "message a `reasoning_content`."
            )
        self._require_whole(answer, content, answer_text, tools)
        return answer_text

    def _with_thought(self, answer: Message, thought: str, answer_part: str, *, opens_thought: bool) -> str:
        """A thought that the template leaves out of histories, written as the message or the model has it."""
        _, _, answer_text = answer_part.rpartition(CLOSE_THINK)
        raw, tag, _ = text_of(answer.get("content")).partition(CLOSE_THINK)
        if tag:
            raw = raw.lstrip().removeprefix(OPEN_THINK).lstrip("\n") if opens_thought else raw
            return f"{raw}{CLOSE_THINK}\n\n{answer_text.lstrip()}"
        if not opens_thought:
            raise ConfigError(
                "the chat template drops the thought of the message; take it out, or write it into the "
                f"content as the model is to write it ({OPEN_THINK}…{CLOSE_THINK})."
            )
        return f"{thought}\n{CLOSE_THINK}\n\n{answer_text.lstrip()}"

    def _require_whole(self, answer: Message, content: str, answer_text: str, tools: Tools) -> None:
        if content not in answer_text:
            raise ConfigError(
                f"the chat template drops or rewrites the content of the answer ({content!r:.60}); use a "
                "template that prints it, or take it out."
            )
        calls = answer.get("tool_calls") or []
        if not calls:
            return
        tool_format = self.renderer.tool_format
        if tool_format is None:
            raise ConfigError(
                "the answer calls tools, and the model's chat template does not know them; train a model "
                "whose template does."
            )
        tokenizer = self.renderer.tokenizer
        # By way of ids, as answers of the model come.
        read = tool_format.parse(tokenizer.decode(tokenizer.encode(answer_text)), tools).calls
        names = [str(call["function"]["name"]) for call in calls]
        if [call.name for call in read] != names:
            raise ConfigError(
                f"the answer calls {', '.join(names)}, and of what the chat template makes of it "
                f"{', '.join(call.name for call in read) or 'no call'} can be read back; train a model whose "
                "template knows tools, or one call an answer where it takes no more."
            )


def _taken_apart(answer: Message) -> tuple[str, str]:
    """(thought, content) of a message, without the space around them."""
    content = text_of(answer.get("content"))
    thought = next((text_of(answer[key]) for key in THOUGHT_KEYS if answer.get(key)), "")
    before, tag, behind = content.partition(CLOSE_THINK)
    if tag:
        thought, content = thought or before.lstrip().removeprefix(OPEN_THINK), behind
    return thought.strip(), content.strip()
