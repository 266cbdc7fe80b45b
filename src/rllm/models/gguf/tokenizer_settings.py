"""tokenizer.json as the settings of a GGUF file: `rllm.models.gguf.tokenizer` the other way."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import ConfigError
from rllm.models.gguf.tokenizer import SPACE, SPLITS, TokenKind

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
HAND_MADE_SCORE = -1000.0
"""Score of tokens that no merge makes, as llama.cpp's converter writes it."""


def tokenizer_settings(
    document: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    vocab_size: int,
    end_token_ids: Sequence[int],
) -> dict[str, Any]:
    """Return the settings of a tokenizer. `document` is tokenizer.json, `settings` tokenizer_config.json.

    `vocab_size` is the number of rows of the embedding: ids without a token are written as unused ones.
    Raises ConfigError for a tokenizer that llama.cpp would read otherwise.
    """
    model = document["model"]
    if model.get("type") != "BPE":
        raise ConfigError(f"is of the type {model.get('type')!r}; GGUF is written for BPE.")
    extra = {int(token["id"]): token for token in document.get("added_tokens") or ()}
    vocabulary: dict[str, int] = {**model["vocab"], **{token["content"]: id for id, token in extra.items()}}
    if vocabulary and max(vocabulary.values()) >= vocab_size:
        raise ConfigError(
            f"has the token id {max(vocabulary.values()):,}, and the model {vocab_size:,} rows; take the "
            "tokenizer that the model was made with."
        )
    texts = {token: text for text, token in vocabulary.items()}
    kinds = {token: _kind(text, extra.get(token)) for token, text in texts.items()}
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    name = _find_split(document)
    own = _byte_bpe(name, merges) if name else _character_bpe(document, texts, kinds, merges, vocab_size)
    if not name:
        texts = {
            token: text.replace(SPACE, " ") if kinds[token] == TokenKind.USER_DEFINED else text
            for token, text in texts.items()
        }
    return {
        **own,
        "tokenizer.ggml.tokens": [texts.get(token, f"[PAD{token}]") for token in range(vocab_size)],
        "tokenizer.ggml.token_type": [int(kinds.get(token, TokenKind.UNUSED)) for token in range(vocab_size)],
        **_special_tokens(vocabulary, settings, end_token_ids),
        "tokenizer.ggml.add_bos_token": _adds_begin_token(document, settings),
        **_template(settings),
    }


def _kind(text: str, extra: Mapping[str, Any] | None) -> TokenKind:
    if extra is not None:
        return TokenKind.CONTROL if extra.get("special") else TokenKind.USER_DEFINED
    return TokenKind.BYTE if _BYTE.fullmatch(text) else TokenKind.NORMAL


def _byte_bpe(name: str, merges: list[list[str]]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
    }


def _character_bpe(
    document: Mapping[str, Any],
    texts: Mapping[int, str],
    kinds: Mapping[int, TokenKind],
    merges: list[list[str]],
    vocab_size: int,
) -> dict[str, Any]:
    """Return scores in place of merges: a token has the place of the first merge that makes it."""
    model, normalizer = document["model"], str(document.get("normalizer"))
    if not model.get("byte_fallback") or SPACE not in normalizer:
        raise ConfigError(
            "splits texts in a way that has no name in GGUF; names are there for the tokenizers of "
            f"{', '.join(SPLITS)}, and for SentencePiece's."
        )
    places: dict[str, int] = {}
    for left, right in merges:
        places.setdefault(left + right, len(places))
    scores = [
        float(-places[texts[token]])
        if kinds.get(token) == TokenKind.NORMAL and texts[token] in places
        else 0.0
        if kinds.get(token) == TokenKind.BYTE
        else HAND_MADE_SCORE
        if kinds.get(token) != TokenKind.NORMAL
        else float(-len(places))
        for token in range(vocab_size)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": "Prepend" in normalizer,
    }


def _find_split(document: Mapping[str, Any]) -> str:
    """Return the name of the split; empty where none of the names is for it."""
    split = _without_offsets(document.get("pre_tokenizer"))
    return next((name for name, named_split in SPLITS.items() if _without_offsets(named_split) == split), "")


def _without_offsets(value: Any) -> Any:
    """Return a part of tokenizer.json without what does not change ids."""
    if isinstance(value, dict):
        return {name: _without_offsets(each) for name, each in value.items() if name != "trim_offsets"}
    return [_without_offsets(item) for item in value] if isinstance(value, list) else value


def _special_tokens(
    vocabulary: Mapping[str, int], settings: Mapping[str, Any], end_token_ids: Sequence[int]
) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in vocabulary:
            ids[key] = vocabulary[text]
    ends: list[int] = [*([ids["eos"]] if "eos" in ids else []), *map(int, end_token_ids)]
    ids.update(zip(("eos", "eot", "eom"), dict.fromkeys(ends), strict=False))
    return {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}


def _adds_begin_token(document: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    processor = document.get("post_processor") or {}
    steps = processor.get("processors") or [processor]
    templates = [step["single"] for step in steps if step.get("type") == "TemplateProcessing"]
    return any("SpecialToken" in template[0] for template in templates if template) or bool(
        settings.get("add_bos_token") and not templates
    )


def _template(settings: Mapping[str, Any]) -> dict[str, str]:
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return {"tokenizer.chat_template": template} if template else {}
