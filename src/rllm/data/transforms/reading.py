"""Questions with a short answer in words: with a passage to read, with pages, or from memory."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row


def qa(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question, answers (a list, any of them is right, or one text); context and category.

    With the option `grader_question` the grader is given the question too: judges want to see it.
    """
    answers = [each for each in row.texts("answers") if each.strip()]
    if not answers:
        raise row.error("has no answer; splits without labels cannot be graded.")
    question = row.text("question")
    grading: dict[str, Any] = {"answers": answers} if len(answers) > 1 else {"answer": answers[0]}
    if options.get("grader_question"):
        grading = {"question": question, "answer": answers[0], "reference": answers[0]}
    return Question(
        prompt_values={"question": question, "context": _context(row)},
        grading=grading,
        oracle=f"<answer>{answers[0]}</answer>",
        category=row.optional_text("category"),
    )


def drop(row: Row, options: Mapping[str, Any]) -> Question:
    """DROP: the answer is one span, several spans, a number or a date."""
    spans = row.texts("answers_spans.spans")
    unique = list(dict.fromkeys(spans))
    kinds = row.optional("answers_spans.types") or ["span"]
    right = unique[0] if kinds[0] != "span" or len(unique) == 1 else ", ".join(unique)
    return Question(
        prompt_values={"question": row.text("question"), "context": row.text("passage")},
        grading={"answer": right},
        oracle=f"<answer>{right}</answer>",
        category=str(kinds[0]),
    )


def needles(row: Row, options: Mapping[str, Any]) -> Question:
    """RULER: long text, and values that all have to be found in it."""
    answers = row.texts("answer")
    right = ", ".join(answers)
    return Question(
        prompt_values={"question": row.text("question"), "context": row.text("context")},
        grading={"answer": right},
        oracle=f"<answer>{right}</answer>",
        category=row.optional_text("task"),
    )


def rubric(row: Row, options: Mapping[str, Any]) -> Question:
    """A question that a judge grades by the option `rubric`, the same for every row. No row holds an
    answer."""
    question = row.text("question")
    return Question(
        prompt_values={"question": question},
        grading={"question": question, "rubric": str(options["rubric"])},
        category=row.optional_text("category"),
    )


def multichallenge(row: Row, options: Mapping[str, Any]) -> Question:
    """A conversation whose next answer is judged by one question about it.

    Fields: conversation (messages, the last one the user's), target (the question), verdict (YES or NO: what
    passes); category.
    """
    messages = [
        {"role": str(each.get("role", "")).lower(), "content": each.get("content")}
        for each in row.records("conversation")
    ]
    if any(
        each["role"] not in ("system", "user", "assistant") or not isinstance(each["content"], str)
        for each in messages
    ) or [each["role"] for each in messages[-1:]] != ["user"]:
        raise row.wrong("conversation", messages, "messages with a role and a text, the last one the user's")
    verdict = row.text("verdict").strip().upper()
    if verdict not in ("YES", "NO"):
        raise row.wrong("verdict", verdict, "YES or NO")
    question = str(messages[-1]["content"])
    criterion = f"1 if the answer to this question is {verdict}, else 0: {row.text('target')}"
    return Question(
        prompt_values={"question": question},
        history=messages[:-1],
        grading={"question": question, "rubric": [{"name": "passes", "description": criterion}]},
        category=row.optional_text("category"),
    )


def browsecomp(row: Row, options: Mapping[str, Any]) -> Question:
    """BrowseComp keeps its rows out of training data by enciphering them with the canary that each row
    holds."""
    canary = row.text("canary")
    question = _decipher(row, "problem", canary)
    answer = _decipher(row, "answer", canary)
    return Question(
        prompt_values={"question": question, "context": ""},
        grading={"question": question, "answer": answer, "reference": answer},
        oracle=f"<answer>{answer}</answer>",
        category=row.optional_text("problem_topic"),
    )


def _decipher(row: Row, name: str, password: str) -> str:
    """XOR with the SHA-256 of the password, repeated."""
    try:
        cipher = base64.b64decode(row.text(name), validate=True)
        key = hashlib.sha256(password.encode()).digest()
        return bytes(each ^ key[place % len(key)] for place, each in enumerate(cipher)).decode()
    except ValueError as error:
        raise row.error(f"has a `{name}` that its canary does not decipher: {error}.") from error


def _context(row: Row) -> str:
    """A passage; paragraphs of HotpotQA's form `{"title": [...], "sentences": [[...], ...]}` become text."""
    context = row.optional("context")
    if context is None:
        return ""
    if isinstance(context, str):
        return context
    if isinstance(context, Mapping) and {"title", "sentences"} <= context.keys():
        pairs = zip(context["title"], context["sentences"], strict=True)
        return "\n\n".join(f"{title}\n{''.join(sentences)}" for title, sentences in pairs)
    if isinstance(context, list) and all(isinstance(each, Mapping) for each in context):
        return "\n\n".join(
            f"{each.get('title', '')}\n{each.get('paragraph_text', '')}".strip() for each in context
        )
    raise row.wrong("context", context, "text or paragraphs")
