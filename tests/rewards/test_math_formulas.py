"""Two readers of formulas agree wherever the quick one has no doubt, and the comparison is exact."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.rewards.extraction import Marked, marked_answer
from rllm.rewards.math_reading import UnreadableError, read
from rllm.rewards.math_values import Equation, Scalar, Several, Value

math_symbols = pytest.importorskip("rllm.rewards.math_symbols", reason="needs the extra `grading`")
formula = pytest.importorskip("rllm.rewards.math_formulas").formula

CORPUS = Path(__file__).with_name("corpus")


def scalars(value: Value) -> Iterator[str]:
    if isinstance(value, Scalar) and value.value is None and not value.is_huge:
        yield value.text
    for part in value.items if isinstance(value, Several) else ():
        yield from scalars(part)
    if isinstance(value, Equation):
        yield from (*scalars(value.left), *scalars(value.right))


def formulas_of_the_corpus() -> list[str]:
    found: dict[str, None] = {}
    for path in CORPUS.glob("math_*.jsonl"):
        for case in map(json.loads, path.read_text().splitlines()):
            marked = marked_answer(case["answer"])
            for text in (marked.text if isinstance(marked, Marked) else "", str(case["task"].get("answer"))):
                try:
                    found |= dict.fromkeys(scalars(read(text)))
                except UnreadableError:
                    continue
    return list(found)


def test_what_is_read_quickly_is_read_as_latex2sympy_reads_it() -> None:
    compared = 0
    for text in formulas_of_the_corpus():
        quick = formula(text)
        if quick is None or quick.has(math_symbols.sympy.zoo):
            continue
        try:
            slow = math_symbols._sympy(text)
        except math_symbols._NoFormulaError:
            continue
        assert math_symbols._formulas_same(quick, slow, 0.0), text
        compared += 1
    assert compared > 90


def test_what_could_be_read_in_two_ways_is_left_to_others(subtests: pytest.Subtests) -> None:
    for text in [
        *(
            "f(x)",
            "g(2)",
            r"\sin 2x",
            r"\sin x/2",
            r"\sin^{-1}x",
            r"\sin x^{2}",
            "1/2x",
            "x 2",
            r"2\frac{x}{2}",
        ),
        *(
            r"\foo{5}",
            r"\binom{5}{2}",
            "x+",
            "(x",
            "x)",
            "|x",
            "",
            "é",
            r"\sum_{k=1}^{n}k",
            "x^{2}^{3}",
            "..5",
            "x=2",
        ),
    ]:
        with subtests.test(text=text):
            assert formula(text) is None


LETTERS = st.sampled_from(["x", "y", "n", r"\pi ", "2", "3", "x_{1}", r"\sqrt{x}", r"\sin(x)", "e", r"|y|"])
SUMS = st.recursive(
    LETTERS,
    lambda inner: st.builds("({}){}({})".format, inner, st.sampled_from(["+", "-", r"\cdot ", "/"]), inner),
    max_leaves=5,
)


@given(SUMS, st.sampled_from(["+10^{-20}", r"\cdot \frac{1000000001}{1000000000}", "+x^{9}", "+i"]))
def test_a_formula_is_not_what_is_next_to_it(text: str, change: str) -> None:
    assert math_symbols.check(f"x+y+{text}", f"(x+y+{text}){change}").get("same") is not True


@given(SUMS)
def test_a_formula_is_itself_in_another_order_wherever_it_has_a_value(text: str) -> None:
    verdict = math_symbols.check(f"x+y+{text}", f"y+{text}+x")
    assert verdict.get("same") is True or "/" in text, "a division by zero has none"
