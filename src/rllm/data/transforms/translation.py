"""Sentences to translate."""

from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row


def translation(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: source, target. The language asked for is the option `into`, or of the row's pair
    `en-de_DE`."""
    right = row.text("target")
    pair = row.optional_text("pair")
    into = str(options.get("into", "")) or pair.partition("-")[2]
    if not into:
        raise row.error("does not say which language is asked for; it has no `pair`.")
    return Question(
        prompt_values={"question": row.text("source"), "into": _LANGUAGES.get(into.partition("_")[0], into)},
        grading={"answer": right},
        oracle=right,
        category=pair or into,
    )


_LANGUAGES = dict(
    pair.split("=")
    for pair in (
        *("ar=Arabic", "bg=Bulgarian", "bn=Bengali", "ca=Catalan", "cs=Czech", "da=Danish", "de=German"),
        *("el=Greek", "es=Spanish", "et=Estonian", "fa=Persian", "fi=Finnish", "fil=Filipino", "fr=French"),
        *("gu=Gujarati", "he=Hebrew", "hi=Hindi", "hr=Croatian", "hu=Hungarian", "id=Indonesian"),
        *("is=Icelandic", "it=Italian", "ja=Japanese", "kn=Kannada", "ko=Korean", "lt=Lithuanian"),
        *("lv=Latvian", "ml=Malayalam", "mr=Marathi", "nl=Dutch", "no=Norwegian", "pa=Punjabi"),
        *("pl=Polish", "pt=Portuguese", "ro=Romanian", "ru=Russian", "sk=Slovak", "sl=Slovenian"),
        *("sr=Serbian", "sv=Swedish", "sw=Swahili", "ta=Tamil", "te=Telugu", "th=Thai", "tr=Turkish"),
        *("uk=Ukrainian", "ur=Urdu", "vi=Vietnamese", "zh=Chinese", "zu=Zulu"),
    )
)
"""ISO code -> how a prompt calls it."""
