r"""Answers made by construction: forms × right values, each with values that equal it and values that do not.

    rows() ──► {kind, form, task, answer, right, strict}

A form says whether a strict reading pays it; one of the `…WRONG_FORMS` is paid by none, whatever its value.
"""

from collections.abc import Iterator
from typing import Any

MATH_VALUES: list[tuple[str, list[str], list[str]]] = [
    ("72", ["72", "72.0", r"72\text{ clips}"], ["71", "-72", "720", r"72\%", r"72\text{ thousand}"]),
    ("-5", ["-5", r"-\frac{10}{2}"], ["5", r"-\frac{1}{5}"]),
    ("3.5", ["3.5", r"\frac{7}{2}", r"3\frac{1}{2}", "7/2"], ["3.05", r"\frac{2}{7}"]),
    (r"\frac{3}{4}", [r"\frac34", "0.75", r"\dfrac{3}{4}", r"75\%"], [r"\frac43", "0.7"]),
    (r"2\sqrt{3}", [r"2\sqrt{3}", r"\sqrt{12}"], [r"3\sqrt{2}", r"2\sqrt{5}"]),
    (r"\pi/6", [r"\frac{\pi}{6}", r"\pi/6"], [r"\frac{\pi}{3}", "30"]),
    ("x^2+2x+1", ["(x+1)^2", "x^2+2x+1"], ["(x-1)^2", "x^2+1"]),
    (
        "(2, -3)",
        ["(2,-3)", r"\left(2,-3\right)", r"\begin{pmatrix}2\\-3\end{pmatrix}"],
        ["(-3,2)", r"\{2,-3\}"],
    ),
    ("[1, 4)", ["[1,4)", r"1\le x<4"], ["(1,4]", "[1,4]"]),
    (r"\{1, 3\}", [r"\{3,1\}", "1, 3"], ["1", r"\{1,3,5\}"]),
    (
        r"x \neq 2",
        [r"x\ne 2", r"\mathbb{R}\setminus\{2\}", r"(-\infty,2)\cup(2,\infty)"],
        ["x=2", r"x\ne -2"],
    ),
    ("x^3+C", ["x^3+C", "x^3+c"], ["x^3+x", "3x^2+C"]),
    (r"\textbf{(C)}\ 12", ["12", r"\text{(C)}"], ["13", r"\text{(B)}"]),
    ("1500 m", [r"1500\text{ m}", r"1500\text{ meters}"], [r"1500\text{ km}", "150"]),
    ("18", [r"\$18", "18.00", "18 dollars"], [r"\$81", "8"]),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{bmatrix}1\\2\end{bmatrix}", "(1,2)"], ["(2,1)"]),
    (r"\text{Tuesday}", [r"\text{Tuesday}", "tuesday"], [r"\text{Monday}"]),
    ("1,000,000", ["1000000", r"10^6", r"1\text{ million}"], ["100000", r"10^7"]),
]
_B = "$\\boxed{{{v}}}$"
MATH_FORMS: dict[str, tuple[str, bool]] = {
    "boxed": (rf"Adding up, we get {_B}.", True),
    "boxed, display": ("So\n\\[\n\\boxed{{{v}}}\n\\]", True),
    "boxed, the answer": (rf"Hence {_B} is the answer.", True),
    "boxed, hope": (rf"The answer is {_B}. I hope this helps!", True),
    "boxed, let me know": (rf"**Answer:** {_B}" + "\n\nLet me know if you have any questions! 😊", True),
    "boxed, option": ("\\[\\boxed{{{v}}}\\] (which is option B)", True),
    "boxed, thoughts": (rf"<think>Is it \boxed{{{{4}}}}? No.</think>So {_B}.", True),
    "boxed, final answer": (r"### Final Answer" + f"\n\n{_B}", True),
    "boxed, minerva": (rf"The final answer is {_B}. I hope it is correct.", True),
    "boxed, check": (
        rf"We get {_B}." + "\n\nCheck: substituting back, both sides are 17, as they must be.",
        False,
    ),
    "boxed, because": (rf"It is {_B}, because $17+4=21$.", False),
    "boxed after another": (rf"Step 1 gives $\boxed{{{{999}}}}$. Step 2 then gives {_B}.", True),
    "boxed, corrected": (rf"$\boxed{{{{999}}}}$? No, I forgot a sign: {_B}", True),
    "tagged": ("Sure. <answer>{v}</answer>", True),
    "tagged, dollars": ("<answer>${v}$</answer>\n", True),
    "Answer:": ("We add up.\n\n**Answer:** ${v}$", True),
    "Answer, bold": ("**Answer: ${v}$**", True),
    "the answer is": ("So the answer is ${v}$.", True),
    "the final answer is": ("Therefore, the final answer is: ${v}$.", True),
    "heading": ("## Work\n\nadd.\n\n## Final Answer\n\n$${v}$$", True),
    "answer =": ("ans = ${v}$", True),
    "alone": ("${v}$", True),
    "es": ("Sumamos todo. La respuesta es ${v}$.", True),
    "fr": ("La réponse finale est ${v}$.", True),
    "de": ("Die Antwort lautet ${v}$.", True),
    "zh": ("因此，答案是 ${v}$。", True),
    "zh boxed": ("所以最终答案为 $\\boxed{{{v}}}$。", True),
    "ja": ("したがって、答えは ${v}$ です。", True),
    "ko": ("따라서 정답은 ${v}$입니다.", True),
    "ru": ("Ответ: ${v}$", True),
    "pt": ("A resposta é ${v}$.", True),
    "it": ("La risposta è ${v}$.", True),
}
MATH_WRONG_FORMS: dict[str, str] = {
    "unfinished thoughts": "<think>I get $\\boxed{{{v}}}$",
    "unclosed": "The answer is $\\boxed{{{v}",
    "taken back": "$\\boxed{{{v}}}$\n\nWait, that is wrong. Let me recheck.",
    "corrected away": "$\\boxed{{{v}}}$? No: $\\boxed{{999}}$",
    "or": "\\boxed{{{v}}} or \\boxed{{999}}",
    "not": "The answer is not $\\boxed{{{v}}}$.",
    "asked": "Is it $\\boxed{{{v}}}$?",
    "unsure": "$\\boxed{{{v}}}$, but I am not sure; it could also be 999.",
    "parade": "$\\boxed{{997}}$ $\\boxed{{{v}}}$ $\\boxed{{999}}$",
    "parade, in words": "Try $\\boxed{{997}}$. Try $\\boxed{{998}}$. Try $\\boxed{{{v}}}$.",
    "two answers": "The answer is ${v}$ or $999$.",
    "then another": "The answer is ${v}$. Correction: the answer is $999$.",
    "refused": "I cannot solve this without ${v}$ being given first, sorry.",
    "goes on": "$\\boxed{{{v}}}+999$",
}
CHOICES = ["Paris", "London", "Rome", "Berlin"]
CHOICE_FORMS: dict[str, tuple[str, bool]] = {
    "letter": ("{l}", True),
    "small": ("{s}", True),
    "brackets": ("({l})", True),
    "bold": ("**{l}**", True),
    "exclaimed": ("It's {l}!", True),
    "not another": ("The answer is {l}, not {o}.", True),
    "Answer:": ("Answer: {l}", True),
    "ans=": ("ans={l}", True),
    "I think": ("I think **{l}** is correct", True),
    "boxed": ("So $\\boxed{{\\text{{{l}}}}}$.", True),
    "boxed text": ("\\boxed{{\\text{{({l}) {t}}}}}", True),
    "tagged": ("It must be big. <answer>{l}</answer>", True),
    "tagged, courtesy": ("<answer>{l}</answer>\n\nLet me know if you need more.", True),
    "letter and text": ("**{l}. {t}**", True),
    "correct answer is": ("The correct answer is **({l}) {t}**.", True),
    "Option": ("Option {l}", True),
    "go with": ("Weighing both, I'd go with {l}.", True),
    "is the correct": ("Therefore {l} is the correct answer.", True),
    "best option": ("So the best option is {l}.", True),
    "text alone": ("{t}", True),
    "the answer is text": ("The answer is {t}.", True),
    "es": ("La respuesta correcta es {l}.", True),
    "fr": ("La bonne réponse est {l}.", True),
    "de": ("Die richtige Antwort ist {l}.", True),
    "zh": ("综上，答案：{l}", True),
    "zh choose": ("故选{l}。", True),
    "ja": ("正解は{l}です。", True),
    "ko": ("정답은 {l}입니다.", True),
    "ru": ("Правильный ответ: {l}", True),
    "thoughts": ("<think>Could be {o}. No.</think>{l}", True),
    "explained after": (
        "My answer: {l}\n\nExplanation: {o} is wrong, since it is not on the river at all.",
        True,
    ),
    "explained with numbers": ("Answer: {l}\n\nIt was founded in 250 BC and has 2 million people.", False),
    "letter first": ("{l}\n\nThe river runs through it, and it has 20 districts.", False),
    "because": ("{l}, because the river runs through it.", True),
    "last sentence": ("The river is the Seine. That leaves ({l}).", False),
}
CHOICE_WRONG_FORMS: dict[str, str] = {
    "or": "{l} or {o}",
    "both": "Both {l} and {o}",
    "Answer: or": "Answer: {l} or {o}",
    "not": "The answer is not {l}.",
    "taken back": "Answer: {l}\n\nWait, {o} fits better.",
    "another later": "The answer is {l}.\nActually, the answer is {o}.",
    "unfinished": "<think>It is {l}",
    "maybe": "I don't know, maybe {l}",
    "list": "Answer: {l}, {o}",
    "letter against text": "{l}) {ot}",
    "asked": "Is it {l}?",
    "all": "A B C D",
    "article": "A good guess is hard to make here.",
}
EXACT_VALUES: list[tuple[str, list[str], list[str]]] = [
    ("Paris", ["Paris", "paris", "the Paris"], ["London", "Pari"]),
    ("-5", ["-5", "−5"], ["5", "-50"]),
    ("1.5", ["1.5", "1.50"], ["15", "1.05"]),
    ("C++", ["C++", "c++"], ["C", "C#"]),
    ("50%", ["50%", "50 %"], ["50", "5%"]),
    ("Marie Curie", ["Marie Curie", "marie curie"], ["Pierre Curie", "Marie"]),
    ("1,234", ["1,234", "1234"], ["1.234", "12340"]),
    ("12:30", ["12:30"], ["1230", "12:03"]),
    ("The Beatles", ["The Beatles", "Beatles"], ["The Beetles"]),
    ("U.S.A.", ["USA", "U.S.A."], ["UK"]),
]
EXACT_FORMS: dict[str, tuple[str, bool]] = {
    "alone": ("{v}", True),
    "full stop": ("{v}.", True),
    "bold": ("**{v}**", True),
    "quoted": ('"{v}"', True),
    "tagged": ("<answer>{v}</answer>", True),
    "boxed": ("\\boxed{{\\text{{{v}}}}}", True),
    "Answer:": ("Let me think.\n\nAnswer: {v}", True),
    "the answer is": ("The answer is {v}.", True),
    "final answer": ("**Final answer:** {v}", True),
    "thoughts": ("<think>Hm.</think>\n\n{v}", True),
    "hope": ("The answer is **{v}**. I hope this helps!", True),
    "es": ("La respuesta es {v}.", True),
    "zh": ("答案是{v}。", True),
    "sentence": ("What was asked for is {v}.", False),
    "bold in a sentence": ("It is known that **{v}** holds the record here.", False),
}
EXACT_WRONG_FORMS: dict[str, str] = {
    "or": "The answer is {v} or Nothing.",
    "not": "It is not {v}.",
    "taken back": "The answer is {v}. Wait, no, it is Nothing.",
    "unfinished": "<think>{v}",
    "mention": "I thought of {v} at first, and it does not fit at all.",
}


def rows() -> Iterator[dict[str, Any]]:
    yield from _values("math", MATH_VALUES, MATH_FORMS, MATH_WRONG_FORMS)
    yield from _values("exact", EXACT_VALUES, EXACT_FORMS, EXACT_WRONG_FORMS)
    yield from _choices()


def _values(
    kind: str,
    values: list[tuple[str, list[str], list[str]]],
    forms: dict[str, tuple[str, bool]],
    wrong_forms: dict[str, str],
) -> Iterator[dict[str, Any]]:
    """Every form with a right and a wrong value; values take turns."""
    for number, (name, (form, strict)) in enumerate(forms.items()):
        for place, (gold, equal, different) in enumerate(values):
            turn = number + place
            for right, options in ((True, equal), (False, different)):
                answer = form.format(v=options[turn % len(options)])
                yield _row(kind, name, {"answer": gold}, answer, right=right, strict=strict)
    for number, (name, form) in enumerate(wrong_forms.items()):
        for place, (gold, equal, _) in enumerate(values):
            answer = form.format(v=equal[(number + place) % len(equal)])
            yield _row(kind, name, {"answer": gold}, answer)


def _choices() -> Iterator[dict[str, Any]]:
    for with_texts in (True, False):
        for gold in range(4):
            task: dict[str, Any] = {"answer": "ABCD"[gold]} | ({"choices": CHOICES} if with_texts else {})
            for name, (form, strict) in CHOICE_FORMS.items():
                if not with_texts and "{t}" in form:
                    continue
                for right in (True, False):
                    place = gold if right else (gold + 1) % 4
                    yield _row("choice", name, task, _written(form, place), right=right, strict=strict)
            for name, form in CHOICE_WRONG_FORMS.items():
                if with_texts or "{ot}" not in form:
                    yield _row("choice", name, task, _written(form, gold))


def _row(
    kind: str, form: str, task: dict[str, Any], answer: str, *, right: bool = False, strict: bool = False
) -> dict[str, Any]:
    return {
        "kind": kind,
        "form": form,
        "task": task,
        "answer": answer,
        "right": right,
        "strict": right and strict,
    }


def _written(form: str, place: int) -> str:
    other = (place + 2) % 4
    return form.format(l="ABCD"[place], s="abcd"[place], t=CHOICES[place], o="ABCD"[other], ot=CHOICES[other])
