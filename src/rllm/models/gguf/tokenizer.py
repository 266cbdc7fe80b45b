"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

    tokenizer.ggml.model `gpt2`  + tokens, merges, `pre`  ──► byte-level BPE with the split that `pre` names
    tokenizer.ggml.model `llama` + tokens, scores         ──► BPE of characters whose merges the scores order

Sources: llama.cpp, llama-vocab.cpp; transformers, convert_slow_tokenizer.py (merges from scores).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from rllm.errors import ModelDirectoryError, choices_of

SPACE = "▁"
_GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(digits: str) -> dict[str, Any]:
    """Return the split of GPT-4 with up to so many digits in one part."""
    pattern = {"Regex": _GPT4_SPLIT.replace("DIGITS", digits)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


SPLITS: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(use_regex=True),
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    },
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
}
"""`tokenizer.ggml.pre` -> the same split as tokenizer.json writes it."""


def tokenizer_files(fields: Mapping[str, Any], *, max_positions: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name. `fields` are the settings of a GGUF file.

    Raises ModelDirectoryError for a tokenizer of another kind.
    """
    kind = fields.get("tokenizer.ggml.model")
    tokens = _tokens(fields)
    if kind == "gpt2":
        document = _byte_bpe(fields, tokens)
    elif kind == "llama":
        document = _character_bpe(fields, tokens)
    else:
        raise ModelDirectoryError(
            f"has a tokenizer of the kind {kind!r}; those that can be read are gpt2 and llama."
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        **_special_tokens(fields),
    }
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return {
        "tokenizer.json": json.dumps(document, ensure_ascii=False).encode(),
        "tokenizer_config.json": (json.dumps(settings, ensure_ascii=False, indent=2) + "\n").encode(),
    }


def end_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """Return every id that ends an answer: of a text, of a turn, of a message to a tool."""
    ids = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(token) for token in ids if token is not None))


def adds_begin_token(fields: Mapping[str, Any]) -> bool:
    """Whether every text begins with `bos`. Where the file does not say, llama.cpp's default holds."""
    is_default = (
        fields.get("tokenizer.ggml.model") == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    return bool(fields.get("tokenizer.ggml.add_bos_token", is_default))


def _tokens(fields: Mapping[str, Any]) -> list[tuple[str, TokenKind]]:
    """Return text and kind of every id. Ids behind the last token that is used are left out."""
    texts: Sequence[str] = fields.get("tokenizer.ggml.tokens") or ()
    kinds: Sequence[int] = fields.get("tokenizer.ggml.token_type") or [TokenKind.NORMAL] * len(texts)
    if not texts or len(kinds) != len(texts):
        raise ModelDirectoryError(f"has {len(texts):,} tokens and {len(kinds):,} kinds of tokens.")
    tokens = [(text, TokenKind(kind)) for text, kind in zip(texts, kinds, strict=True)]
    while tokens and tokens[-1][1] == TokenKind.UNUSED:
        tokens.pop()
    return tokens


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    texts: list[str] = fields["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {
        name: texts[token] for name, token in ids.items() if token is not None and 0 <= token < len(texts)
    }


def _byte_bpe(fields: Mapping[str, Any], tokens: list[tuple[str, TokenKind]]) -> dict[str, Any]:
    name = fields.get("tokenizer.ggml.pre", "gpt-2")
    name = "gpt-2" if name == "default" else name
    if name not in SPLITS:
        raise ModelDirectoryError(f"has `tokenizer.ggml.pre` {name!r}; {choices_of(name, SPLITS)}.")
    vocabulary = {text: token for token, (text, _) in enumerate(tokens)}
    merges = [merge.split(" ") for merge in fields.get("tokenizer.ggml.merges") or ()]
    model = _bpe(vocabulary, merges, ignore_merges=name == "llama-bpe")
    return {
        **_document(tokens),
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": SPLITS[name],
        "post_processor": _post_processor(fields) or _byte_level(use_regex=False),
        "decoder": _byte_level(use_regex=True),
        "model": model,
    }


def _character_bpe(fields: Mapping[str, Any], tokens: list[tuple[str, TokenKind]]) -> dict[str, Any]:
    # Runs of spaces that are tokens stand in GGUF as spaces.
    tokens = [
        (text.replace(" ", SPACE) if kind == TokenKind.USER_DEFINED else text, kind) for text, kind in tokens
    ]
    vocabulary = {text: token for token, (text, _) in enumerate(tokens)}
    scores: Sequence[float] = fields.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    has_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = {"type": "Prepend", "prepend": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        **_document(tokens),
        "normalizer": {"type": "Sequence", "normalizers": [prefix, to_marks]} if has_prefix else to_marks,
        "pre_tokenizer": None,
        "post_processor": _post_processor(fields),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges_from_scores(tokens, vocabulary, scores),
            unk_token=tokens[unknown][0],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def merges_from_scores(
    tokens: list[tuple[str, TokenKind]], vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[list[str]]:
    """Return every way to make a token of two others, the tokens with the highest score first.

    Tokens that were defined by hand come before all, as SentencePiece looks for them first.
    """

    def order(token: int) -> tuple[float, int]:
        return (-float("inf") if tokens[token][1] == TokenKind.USER_DEFINED else -scores[token], token)

    made_of_two = [
        token for token, (_, kind) in enumerate(tokens) if kind in (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    ]
    return [
        [text[:cut], text[cut:]]
        for text in (tokens[token][0] for token in sorted(made_of_two, key=order))
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]


def _document(tokens: Iterable[tuple[str, TokenKind]]) -> dict[str, Any]:
    """Return what both kinds have in common."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != TokenKind.USER_DEFINED,
            }
            for token, (text, kind) in enumerate(tokens)
            if kind in (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED)
        ],
    }


def _bpe(vocabulary: Mapping[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": dict(vocabulary),
        "merges": merges,
    }


def _post_processor(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what writes the token of a beginning before each text; None where there is none."""
    token = fields.get("tokenizer.ggml.bos_token_id")
    if token is None or not adds_begin_token(fields):
        return None
    text = fields["tokenizer.ggml.tokens"][token]
    begin = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": {text: {"id": text, "ids": [int(token)], "tokens": [text]}},
    }
