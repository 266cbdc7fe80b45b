"""The interface of a tokenizer for rendering: text to ids, ids to text, and a conversation to text."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from rllm.rendering.images import ImageReader
from rllm.types.messages import Message


class TextTokenizer(Protocol):
    """The interface of a tokenizer for rendering."""

    images: ImageReader | None
    """The processor of images; None for a model that reads text alone."""

    @property
    def max_token_chars(self) -> int:
        """Characters of the longest token: a longer text than n times that has more than n tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text, special tokens recognised, none added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens; the markup of tool calls and reasoning stays."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as people see it, special tokens included."""
        ...

    def apply_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation as text. `arguments` of tool calls are objects here where their JSON could be
        read.

        Raises ConfigError where the template refuses it, such as one with a system message.
        """
        ...

    def with_template_variables(self, variables: Mapping[str, Any]) -> Self:
        """The same with more variables for the template, such as `enable_thinking`; it may ignore them.

        Raises ConfigError for a name that the conversation itself is given under.
        """
        ...
