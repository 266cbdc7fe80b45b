"""A Hugging Face tokenizer behind the three verbs that rendering needs."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rllm.errors import ConfigError, MissingExtraError, ModelDirectoryError
from rllm.models.chat_template import render_template
from rllm.models.foreign import code_refused, json_object, own_class, require_plain_files
from rllm.models.named_templates import NAMES, chat_template_named, end_of_answer
from rllm.models.tokenizer_file import tokenizer_file
from rllm.rendering.answers import CLOSE_THINK, OPEN_THINK
from rllm.rendering.images import ImageReader
from rllm.rendering.text_tools import with_tools_as_text
from rllm.rendering.tools import MARKUP, required_tool_format, shown_markup, tool_format_of
from rllm.types.chat_forms import AUTO, NATIVE, ON, OWN_FORM, TEXT, ChatForm
from rllm.types.images import PATCH_IDS_FROM
from rllm.types.messages import Message

log = logging.getLogger(__name__)

_CONVERSATION_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
_PROBE = "text"
_SHORT: list[Message] = [{"role": "user", "content": "x"}]
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn thoughts on and off: Qwen's and GLM's, DeepSeek's and Granite's."""
_SHORT_CHARS = 4096
"""The length of a text that is encoded in a few milliseconds."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def _as_templates_read(message: Message, reads_parts_alone: bool) -> Message:
    """As transformers gives messages to templates: many print a null as `None`, and know what to do without
    the key; and a thought is under each name that one of them reads."""
    fields = {name: value for name, value in message.items() if value is not None}
    if reads_parts_alone and isinstance(text := fields.get("content"), str):
        fields["content"] = [{"type": "text", "text": text}]
    thought = next((fields[name] for name in _THOUGHTS if name in fields), None)
    return fields if thought is None else {"thinking": thought, **fields, "reasoning_content": thought}


class HuggingFaceTokenizer:
    """Loads with `AutoTokenizer`, or without transformers where that changes nothing.

    Encodes and decodes with the Rust tokenizer inside, which is several times faster. `trust_remote_code`:
    whether Python that the directory brings along may run. `form`: of conversations; without any chat
    template texts are encoded and conversations refused. Raises ConfigError for a form that the template
    cannot give: `native` tools, thoughts to switch, a limit of thoughts without tokens around them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trust_remote_code: bool = False,
        form: ChatForm = OWN_FORM,
    ) -> None:
        if not any(
            (directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
        ):
            raise ModelDirectoryError(
                f"{directory} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); copy it from "
                "the model that the weights came from."
            )
        require_plain_files(directory)
        self._directory = directory
        try:
            self._tokenizer: Any = tokenizer_file(directory) or _auto_tokenizer(directory, trust_remote_code)
        except MissingExtraError:
            raise
        except Exception as error:  # the Rust tokenizer raises nothing narrower
            settings = directory / "tokenizer_config.json"
            reference = own_class(json_object(settings), "AutoTokenizer") if settings.is_file() else ""
            if reference and "trust_remote_code" in str(error):
                raise code_refused(settings, "AutoTokenizer", reference) from error
            raise ModelDirectoryError(f"The tokenizer in {directory} cannot be read: {error}") from error
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if (
            self._fast is not None
        ):  # a file may ask for both; then prompts would be cut or filled without a word
            self._fast.no_truncation()
            self._fast.no_padding()
        self._hidden = self._hidden_tokens()
        self._max_token_chars = 0
        self._template_variables: dict[str, Any] = {}
        self.images: ImageReader | None = None
        self._reads_parts_alone = False
        self.chosen_template = ""
        """The text of the template that replaces the directory's own."""
        if form.chat_template:
            self.chosen_template = chat_template_named(form.chat_template, begins_texts=bool(self.begin_text))
            self._tokenizer.chat_template = self.chosen_template
        end = end_of_answer(self._tokenizer.chat_template or "")
        end_ids = self.encode(end) if end else []
        self.end_of_turn_id = end_ids[0] if len(end_ids) == 1 else None
        """The token that ends an answer in a named template."""
        self.stop_texts = (end,) if len(end_ids) > 1 else ()
        """Texts that end an answer in a named template, where no token does."""
        self._tool_form = form.tool_form
        if form.tool_form == NATIVE:
            required_tool_format(self)
        if form.thinking != AUTO:
            self._template_variables = {self._thinking_switch(): form.thinking == ON}
        if form.max_thinking_tokens and self.thought_ids is None:
            raise ConfigError(
                f"A limit of {form.max_thinking_tokens} thinking tokens needs {OPEN_THINK} and {CLOSE_THINK} "
                f"as tokens, and the vocabulary of {directory} has none; leave it out."
            )

    def read_images(self, reader: ImageReader) -> None:
        """From now on conversations may have images, which `reader` reads."""
        self.images = reader
        text = self.apply_template([{"role": "user", "content": _PROBE}], add_generation_prompt=False)
        # Some templates print content only where it is a list of parts.
        self._reads_parts_alone = _PROBE not in text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def require_chat_template(self) -> None:
        """Raises ModelDirectoryError for a model without a chat template, which knows no conversations."""
        if not self.has_chat_template:
            raise ModelDirectoryError(
                f"The tokenizer in {self._directory} has no chat template, as base models have none: choose "
                f"one with --chat-template {'|'.join(NAMES)}|FILE (`model.chat_template`)."
            )

    @cached_property
    def thought_ids(self) -> tuple[int, int] | None:
        """Ids of the tokens that open and close a thought; None where the vocabulary has no such tokens."""
        pair = [self.encode(tag) for tag in (OPEN_THINK, CLOSE_THINK)]
        return (pair[0][0], pair[1][0]) if all(len(ids) == 1 for ids in pair) else None

    def ends_in_thought(self, ids: Sequence[int]) -> bool:
        """Whether a thought was opened and not closed."""
        if self.thought_ids is None:
            return False
        tag = next((token for token in reversed(ids) if token in self.thought_ids), None)
        return tag == self.thought_ids[0]

    def _thinking_switch(self) -> str:
        """The variable by which the chat template turns thoughts on and off. Raises ConfigError for none."""
        for name in _SWITCHES:
            texts = {
                self.with_template_variables({name: value}).apply_template(_SHORT, add_generation_prompt=True)
                for value in (True, False)
            }
            if len(texts) > 1:
                return name
        raise ConfigError(
            f"The chat template of {self._directory} cannot turn thoughts on or off (it reads none of "
            f"{', '.join(_SWITCHES)}); leave `thinking` at {AUTO}."
        )

    @cached_property
    def begin_text(self) -> str:
        """The token that the tokenizer begins every text with; empty for none."""
        bos_id = self._tokenizer.bos_token_id
        if bos_id is None:
            return ""
        ids = self._tokenizer.encode("x") if self._fast is None else self._fast.encode("x").ids
        return self._tokenizer.special_tokens_map["bos_token"] if ids[:1] == [bos_id] else ""

    @property
    def max_token_chars(self) -> int:
        """Length of the longest token as the vocabulary spells it, where a character stands for a byte or for
        itself."""
        if not self._max_token_chars:
            self._max_token_chars = max(map(len, self._tokenizer.get_vocab()))
        return self._max_token_chars

    def encode(self, text: str) -> list[int]:
        if self._fast is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        if len(text) <= _SHORT_CHARS:
            return self._fast.encode(text, add_special_tokens=False).ids
        # A batch lets go of the interpreter while it works, and so of every other thread.
        return self._fast.encode_batch([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        decoder = self._tokenizer if self._fast is None else self._fast
        if self.images is not None:
            ids = [each for each in ids if each < PATCH_IDS_FROM]
        if self._hidden is None:
            return decoder.decode(list(ids), skip_special_tokens=True)
        visible_ids = [token for token in ids if token not in self._hidden]
        return decoder.decode(visible_ids, skip_special_tokens=False)

    @cached_property
    def tool_form(self) -> str:
        """The way in which tools are offered: `native`, by the chat template, or `text`."""
        if self._tool_form != AUTO or not self.has_chat_template:
            return self._tool_form
        native = copy.copy(self)
        native._tool_form = NATIVE
        if tool_format_of(native) is not None:
            return NATIVE
        log.warning(
            "The chat template of %s has no tools: they are described in the system message, and calls are "
            "read from the text (tool form `text`).",
            self._directory.name,
        )
        return TEXT

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the chat template prints system messages."""
        messages: list[Message] = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}]
        try:
            return _PROBE in self.apply_template(messages, add_generation_prompt=False)
        except ConfigError:
            return False

    def apply_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Raises ConfigError when the chat template refuses the messages, is broken, or exceeds a limit."""
        self.require_chat_template()
        uses_tools = tools or any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)
        if uses_tools and self.tool_form == TEXT:
            messages = with_tools_as_text(messages, tools or (), takes_system=self._takes_system)
            tools = None
        try:
            template = self._tokenizer.get_chat_template(tools=tools or None)
        except ValueError as error:  # several templates, and none for this
            raise ConfigError(f"The model's chat template refuses the conversation: {error}.") from error
        variables = {
            **self._template_variables,
            **self._tokenizer.special_tokens_map,
            "messages": [_as_templates_read(message, self._reads_parts_alone) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = render_template(template, variables)
        return text if self.images is None else self.images.with_frames(text)

    def with_template_variables(self, variables: Mapping[str, Any]) -> Self:
        """See `TextTokenizer`."""
        own = {*self._tokenizer.special_tokens_map, *_CONVERSATION_VARIABLES}
        if reserved_names := own.intersection(variables):
            raise ConfigError(
                f"The variable {sorted(reserved_names)[0]!r} is what chat templates get the conversation in; "
                "leave it out."
            )
        other = copy.copy(self)
        other._template_variables = {**self._template_variables, **variables}
        return other

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """Texts that are encoded as tokens of their own and mean more than what they say."""
        return frozenset(
            token.content
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.special or token.content in MARKUP
        )

    def _hidden_tokens(self) -> frozenset[int] | None:
        """Special tokens but for markup; None where no markup is special, so that the decoder can leave them
        out."""
        special = {
            token_id: token.content
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        }
        markup = shown_markup(frozenset(special.values()))
        if not markup:
            return None
        return frozenset(token_id for token_id, content in special.items() if content not in markup)

    def token_text(self, token_id: int) -> str:
        """The look of one token to a person, special tokens included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    @property
    def begin_token_id(self) -> int | None:
        """The id that every text begins with, by the tokenizer's own word; a chat template prints it, or does
        without."""
        return self._tokenizer.bos_token_id

    def vocabulary(self) -> dict[int, str]:
        """Id -> token as the tokenizer spells it, added ones included."""
        return {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}

    @cached_property
    def unused_ids(self) -> tuple[int, ...]:
        """Ids that the model of this directory has a row for and that no token has: embeddings are padded.

        Empty where the directory has no config.json, or config.json names no `vocab_size`.
        """
        path = self._directory / "config.json"
        config = json_object(path) if path.is_file() else {}
        text_config = config.get("text_config")
        num_rows = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
        return tuple(sorted(set(range(num_rows)) - set(self.vocabulary()))) if type(num_rows) is int else ()

    @property
    def end_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id


def _auto_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "train") from error
    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=trust_remote_code
    )


def token_text_of(directory: Path) -> Callable[[int], str]:
    """`HuggingFaceTokenizer.token_text` of a directory, without transformers, which takes seconds to import,
    where the Rust tokenizer has a file of its own."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return HuggingFaceTokenizer(directory).token_text
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("tokenizers", "train") from error
    require_plain_files(directory)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust tokenizer raises nothing narrower
        raise ModelDirectoryError(f"The tokenizer in {directory} cannot be read: {error}") from error
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
