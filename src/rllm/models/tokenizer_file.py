"""A tokenizer that is all in two files: read without transformers, which takes seconds to import.

    tokenizer.json, and tokenizer_config.json of SETTINGS alone ──► TokenizerFile, as `AutoTokenizer`'s is
    anything else                                               ──► None: `AutoTokenizer` knows what it means

The built-in models have such files. Whether both answer alike is a test.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.errors import MissingExtraError
from rllm.models.foreign import json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLASS = "PreTrainedTokenizerFast"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
SETTINGS = {
    "tokenizer_class",
    "chat_template",
    "clean_up_tokenization_spaces",
    "model_max_length",
    *SPECIAL,
}
FILES = {"tokenizer.json", "tokenizer_config.json"}
_OF_TOKENIZERS = ("token", "vocab", "merges", "template", "processor")
"""Parts of the names of files that decide about a tokenizer."""


class TokenizerFile:
    """A tokenizer with what `HuggingFaceTokenizer` needs of one of transformers, by the same names."""

    def __init__(self, backend: "Tokenizer", settings: Mapping[str, Any]) -> None:
        self.backend_tokenizer = backend
        self.chat_template: str = settings["chat_template"]
        self.special_tokens_map: dict[str, str] = {
            name: settings[name] for name in SPECIAL if settings.get(name) is not None
        }
        self.added_tokens_decoder = backend.get_added_tokens_decoder()

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_chat_template(self, *, tools: object = None) -> str:
        return self.chat_template

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def tokenizer_file(directory: Path) -> TokenizerFile | None:
    """The tokenizer, or None where transformers has more to say.

    Raises what the Rust tokenizer raises for a broken file.
    """
    files = {path.name for path in directory.iterdir() if any(each in path.name for each in _OF_TOKENIZERS)}
    if files != FILES:
        return None
    settings = json_object(directory / "tokenizer_config.json")
    texts = [settings[name] for name in ("chat_template", *SPECIAL) if settings.get(name) is not None]
    if (
        not settings.keys() <= SETTINGS
        or settings.get("tokenizer_class") != CLASS
        or settings.get("clean_up_tokenization_spaces") is not False
        or not settings.get("chat_template")
        or not all(isinstance(text, str) for text in texts)
    ):
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("tokenizers", "train") from error
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special_tokens = {settings[name] for name in SPECIAL if settings.get(name) is not None}
    return TokenizerFile(backend, settings) if special_tokens <= special else None
