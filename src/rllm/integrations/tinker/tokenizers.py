"""Does the service's tokenizer give the ids that ours gives?

A prompt is rendered and encoded here, from the files in `model.path`, and read by the service's model. Where
the two have different vocabularies, every row would be about other tokens than were meant.
"""

from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.types.messages import Message

CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "What is 12 + 30?\nAnswer with a number, naïvely: 42? Größe 漢字 🙂 {}"},
)
TEXTS = (
    " The quick brown fox\n\n\tjumps over 1234567890 dogs.",
    "def f(x):\n    return x ** 2  # naïve — “quoted” 漢字 🙂",
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
)


def require_same_tokenizer(ours: HuggingFaceTokenizer, theirs: Any, directory: Path, base_model: str) -> None:
    """Raises ConfigError that names the first text, or token, of which the two say different ids.

    `theirs` is a tokenizer of transformers.
    """
    conversation = ChatRenderer(ours).text(CONVERSATION)
    for text in (*TEXTS, conversation):
        mine, other = ours.encode(text), list(theirs.encode(text, add_special_tokens=False))
        if mine != other:
            place = next(
                (at for at, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b),
                min(len(mine), len(other)),
            )
            raise ConfigError(
                f"`model.path` is {directory}, whose tokenizer differs from that of `{base_model}` at the "
                f"service: of {text!r:.60} the token at place {place} is {_at(mine, place)} here and "
                f"{_at(other, place)} there. Give the directory of the model that is served."
            )


def _at(ids: list[int], place: int) -> str:
    return str(ids[place]) if place < len(ids) else "none"
