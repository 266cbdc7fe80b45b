"""Questions with choices: one of them is right, and its letter is the answer.

Rows name the right one in many ways; all of them become a letter here:

    choices                             answer
    ["x", "y"]                          "B" · 1 · "1" · "y" (answer_is = letter, index, text)
    {"text": [...], "label": [...]}     one of the labels
    {"A": "x", "B": "y"}                one of the keys
    columns A, B, C, D                  "B"
"""

import ast
import hashlib
import random
from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row, letter


def choice(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question, choices (or `choice_columns` in the options), answer; context and category.

    `answer_is`: letter, index, one_based, text, or label of `{"text", "label"}` choices.
    """
    choices, labels = _choices(row, options)
    right = _place(row, choices, labels, str(options.get("answer_is", "letter")))
    return lettered_question(row, choices, right)


def scored_choices(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question, choices, labels (1 for the right one). Published with the right one first:
    shuffled."""
    choices, marks = row.texts("choices"), row.texts("labels")
    if len(marks) != len(choices) or marks.count("1") != 1:
        raise row.error(f"has the labels {marks} for {len(choices)} choices; exactly one must be 1.")
    right = choices[marks.index("1")]
    order = shuffle(row.text("question"), choices)
    return lettered_question(row, order, order.index(right))


def correct_and_wrong(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question, correct, and the columns in the option `wrong`; shuffled by the question's text."""
    right = row.text("correct").strip()
    choices = [right, *(row.text(column).strip() for column in options["wrong"])]
    order = shuffle(row.text("question"), choices)
    return lettered_question(row, order, order.index(right))


def two_options(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question with a `_` to fill, option1, option2, answer "1" or "2"."""
    right = row.text("answer")
    if right not in ("1", "2"):
        raise row.error(
            f"has the answer {right!r}; it must be 1 or 2. Splits without labels cannot be graded."
        )
    return lettered_question(row, [row.text("option1"), row.text("option2")], int(right) - 1)


def yes_no(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question, answer (a boolean); context."""
    answer = row.value("answer")
    if not isinstance(answer, bool):
        raise row.wrong("answer", answer, "true or false")
    return lettered_question(row, ["Yes", "No"], 0 if answer else 1)


def lettered_question(row: Row, choices: list[str], right: int) -> Question:
    answer = letter(right)
    return Question(
        prompt_values={
            "question": row.text("question"),
            "choices": choices,
            "context": row.optional_text("context"),
        },
        grading={"answer": answer, "choices": choices},
        oracle=f"<answer>{answer}</answer>",
        category=row.optional_text("category"),
    )


def shuffle(key: str, choices: list[str]) -> list[str]:
    """In an order that follows from `key` alone: the same on every machine, and without a pattern."""
    order = list(choices)
    random.Random(hashlib.sha256(key.encode()).digest()).shuffle(order)
    return order


def listed_choices(row: Row, name: str) -> list[str]:
    """A list of texts; some data sets hold it as the text of a Python list."""
    choices = row.value(name)
    if isinstance(choices, str):
        try:
            choices = ast.literal_eval(choices)
        except (ValueError, SyntaxError) as error:
            raise row.wrong(name, choices, "a list of choices") from error
    if not isinstance(choices, list):
        raise row.wrong(name, choices, "a list of choices")
    return [str(each) for each in choices]


def _choices(row: Row, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(choices, what the row calls each of them)."""
    if "choice_columns" in options:
        columns = [column for column in options["choice_columns"] if row.optional(column) not in (None, "")]
        choices = [row.text(column) for column in columns]
    elif isinstance(table := row.value("choices"), Mapping) and "text" not in table:
        return [str(each) for each in table.values()], [str(each) for each in table]
    elif isinstance(table, Mapping):
        return [str(each) for each in table["text"]], [str(each) for each in table["label"]]
    elif isinstance(table, list) and table and isinstance(table[0], Mapping):
        return [str(each["text"]) for each in table], [str(each["label"]) for each in table]
    else:
        choices = listed_choices(row, "choices")
    if not 2 <= len(choices) <= 26:
        raise row.error(f"has {len(choices)} choices; there must be 2 to 26.")
    return choices, [letter(place) for place in range(len(choices))]


def _place(row: Row, choices: list[str], labels: list[str], answer_is: str) -> int:
    """Which of the choices is right, counted from 0."""
    if answer_is in ("index", "one_based"):
        place = row.integer("answer") - (answer_is == "one_based")
    elif answer_is == "text":
        answer = row.text("answer")
        place = choices.index(answer) if answer in choices else -1
    else:
        answer = row.text("answer").strip()
        place = labels.index(answer) if answer in labels else -1
    if not 0 <= place < len(choices):
        raise row.error(
            f"has the answer {row.value('answer')!r:.60}, which is none of its {len(choices)} choices. "
            "Splits "
            "without labels cannot be graded."
        )
    return place
