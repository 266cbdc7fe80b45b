"""A model's answer ──► the program in it: the last fenced block that fits, or the whole text if it is code.

```python …```   that defines the function asked for, the last of those; else the last block
no block         the whole text, or what goes on from the prompt's beginning of a function (HumanEval)
"""

import re
from dataclasses import dataclass

from rllm.rewards.code_asserts import closed, defined_names, is_python
from rllm.rewards.code_tasks import CodeProblem
from rllm.rewards.extraction import final_text
from rllm.rewards.fences import fenced_blocks

_FUTURE = re.compile(r"^from __future__ import [\w, ]+(?:#.*)?$", re.MULTILINE)
MAX_ANSWER_CHARS = 500_000
_PYTHON = ("", "python", "py", "python3")


@dataclass(kw_only=True, slots=True, frozen=True)
class NoProgram:
    """The reason that there is nothing to run."""

    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class AnswerProgram:
    """A program, and the part of the answer that it was read from."""

    source: str
    """With the beginning that the prompt gives where there is one."""
    rule: str


def program_of(answer: str, problem: CodeProblem) -> AnswerProgram | NoProgram:
    """The whole program of an answer, or why there is none."""
    text = final_text(answer)
    if text is None:
        return NoProgram(reason="unfinished thinking")
    if not text.strip():
        return NoProgram(reason="empty")
    if len(text) > MAX_ANSWER_CHARS:
        return NoProgram(reason=f"{len(text)} characters; {MAX_ANSWER_CHARS} are read")
    blocks = _blocks(text)
    if isinstance(blocks, NoProgram):
        return blocks
    if blocks:
        place = _best_place(blocks, problem.functions)
        rule = f"fenced Python block {place + 1} of {len(blocks)}"
        # What is no Python runs into its own syntax error, and the reason will say which.
        return AnswerProgram(source=_whole(blocks[place], problem), rule=rule)
    whole = _whole(_with_indent(answer, text), problem)
    if is_python(whole):
        return AnswerProgram(source=whole, rule="the whole text behind the thoughts")
    return NoProgram(reason="no code: neither a ```python block nor a text that is Python")


def _whole(code: str, problem: CodeProblem) -> str:
    if not problem.prompt:
        return code
    if set(problem.functions) & set(defined_names(code)):
        first = "".join(f"{line}\n" for line in _FUTURE.findall(code))  # Python wants them before all else
        return f"{first}{closed(problem.prompt)}\n\n{_FUTURE.sub('', code)}"
    goes_on = (
        f"{problem.prompt.rstrip(' ')}{code}" if problem.prompt.endswith("\n") else problem.prompt + code
    )
    return goes_on if is_python(goes_on) else f"{problem.prompt}\n{code}"


def _best_place(blocks: list[str], functions: tuple[str, ...]) -> int:
    """The place of the last block that defines what is asked for, else of the last."""
    expected_names = {*functions, "Solution"} if functions else set[str]()
    fitting = [place for place, block in enumerate(blocks) if expected_names & set(defined_names(block))]
    return fitting[-1] if fitting else len(blocks) - 1


def _blocks(text: str) -> list[str] | NoProgram:
    """The contents of all Python blocks. A last one that nothing closes is one where it is whole."""
    blocks = fenced_blocks(text)
    python = [block for block in blocks if block.language in _PYTHON]
    if python and not python[-1].is_closed and not _is_whole(python[-1].text):
        return NoProgram(reason="the last code block is not closed")
    if blocks and not python:
        languages = ", ".join(dict.fromkeys(block.language for block in blocks))
        return NoProgram(reason=f"no Python block, only {languages}")
    return [block.text for block in python]


def _is_whole(code: str) -> bool:
    return bool(code.strip()) and is_python(code)


def _with_indent(answer: str, text: str) -> str:
    """`text` with the blanks before its first line: a completion goes on inside of a function."""
    place = answer.rfind(text)
    begin = place
    while begin > 0 and answer[begin - 1] in " \t":
        begin -= 1
    return answer[begin:place] + text if place >= 0 else text
