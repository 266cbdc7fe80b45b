"""Questions about pictures: free answers, or choices where the row has some."""

import re
from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row, letter
from rllm.data.transforms.choice import listed_choices


def pictures(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question, answer, images (one, a list, or the columns in the option `image_columns`); choices.

    `answer_is`: `letter`, `text` or `index` of a row with choices. The answer of one without is graded as
    it stands.
    """
    images = _images(row, options)
    choices = listed_choices(row, "choices") if row.optional("choices") else []
    answer = row.text("answer")
    question = re.sub(r"<image(?: \d+)?>", "", row.text("question")).strip()
    if not choices:
        return Question(
            prompt_values={"question": question, "choices": ""},
            grading={"answer": answer, "question": question, "reference": answer},
            oracle=f"\\boxed{{{answer}}}",
            pictures=images,
            category=row.optional_text("category"),
        )
    right = _letter_of(row, answer, choices, str(options.get("answer_is", "letter")))
    return Question(
        prompt_values={"question": question, "choices": "\n" + "\n".join(_lines(choices))},
        grading={"answer": right, "choices": choices, "question": question, "reference": right},
        oracle=f"\\boxed{{{right}}}",
        pictures=images,
        category=row.optional_text("category"),
    )


def _lines(choices: list[str]) -> list[str]:
    return [f"({letter(place)}) {each}" for place, each in enumerate(choices)]


def _letter_of(row: Row, answer: str, choices: list[str], answer_is: str) -> str:
    letters = [letter(place) for place in range(len(choices))]
    names = {"letter": letters, "text": choices, "index": [str(place) for place in range(len(choices))]}[
        answer_is
    ]
    if answer not in names:
        raise row.error(f"has the answer {answer!r:.60}, which is none of its choices.")
    return letters[names.index(answer)]


def hle(row: Row, options: Mapping[str, Any]) -> Question:
    """Humanity's Last Exam: a question, sometimes with a picture as a data URL, and what a judge compares
    with."""
    question, answer = row.text("question"), row.text("answer")
    picture = row.optional("image")
    return Question(
        prompt_values={"question": question, "context": ""},
        grading={"question": question, "answer": answer, "reference": answer},
        oracle=f"<answer>{answer}</answer>",
        pictures=[picture] if picture else [],
        category=row.optional_text("category"),
    )


def _images(row: Row, options: Mapping[str, Any]) -> list[Any]:
    columns = options.get("image_columns")
    if columns:
        pictures = [row.optional(column) for column in columns]
    else:
        value = row.value("images")
        pictures = value if isinstance(value, list) else [value]
    images = [each for each in pictures if each is not None]
    if not images:
        raise row.error("has no picture.")
    return images
