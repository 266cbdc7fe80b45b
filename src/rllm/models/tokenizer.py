"""A Hugging Face tokenizer behind the three verbs that rendering needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, MissingExtraError, ModelDirectoryError
from rllm.types.messages import Message


class HuggingFaceTokenizer:
    """Loads with `AutoTokenizer`; encodes and decodes with the Rust tokenizer inside, which is several times
    faster."""

    def __init__(self, directory: Path) -> None:
        try:
            from jinja2 import TemplateError
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtraError("transformers", "train") from error
        if not any(
            (directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
        ):
            raise ModelDirectoryError(
                f"{directory} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); copy it from "
                "the model that the weights came from."
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the Rust tokenizer raises nothing narrower
            raise ModelDirectoryError(f"The tokenizer in {directory} cannot be read: {error}") from error
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if (
            self._fast is not None
        ):  # a file may ask for both; then prompts would be cut or filled without a word
            self._fast.no_truncation()
            self._fast.no_padding()
        self._template_error = TemplateError
        if not self._tokenizer.chat_template:
            raise ModelDirectoryError(
                f"The tokenizer in {directory} has no chat template; add `chat_template` to "
                "tokenizer_config.json."
            )

    def encode(self, text: str) -> list[int]:
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        if self._fast is not None:
            return self._fast.decode(list(ids), skip_special_tokens=True)
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Raises ConfigError when the chat template refuses the messages or is broken."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except self._template_error as error:
            raise ConfigError(f"The model's chat template refuses the conversation: {error}.") from error

    def token_text(self, token_id: int) -> str:
        """How one token looks to a person, special tokens included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    @property
    def end_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id
