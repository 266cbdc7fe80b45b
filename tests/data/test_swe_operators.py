import ast
import io
import tokenize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.data.swe_factory.edits import with_edits
from rllm.data.swe_factory.operators import OPERATOR_NAMES, Mutation, changes_meaning, mutations

BODIES = {
    "boundary": ("if a < b:\n        return 1", "if a <= b:\n        return 1"),
    "wrong_comparison": ("return a not   in b", "return a in b"),
    "wrong_operator": ("return (a)  +  b  # sum", "return (a)  -  b  # sum"),
    "dropped_condition": ("return a and b.c", "return a"),
    "negated_condition": ("if a  :\n        b()", "if not a  :\n        b()"),
    "swapped_branches": ("return a if a.x else b", "return b if a.x else a"),
    "dropped_branch": ("if a:\n        b()\n    else:  # or\n        a()", "if a:\n        b()\n"),
    "deleted_statement": ("b.append( a )  # keep\n    return b", "return b"),
    "removed_return": ("return b[a]", "b[a]"),
    "removed_await": ("return await a", "return a"),
    "off_by_one": ("return b[1]", "return b[2]"),
    "wrong_constant": ("a.x = True", "a.x = False"),
    "swapped_arguments": ("return f( a,  b )", "return f( b,  a )"),
    "wrong_function": ("return a.lstrip()", "return a.rstrip()"),
    "dropped_bound": ("return a[b: ]", "return a[: ]"),
    "wrong_exit": ("for a in b:\n        continue", "for a in b:\n        break"),
    "wrong_variable": ("return a.x", "return b.x"),
}


def function(body: str) -> str:
    return f"async def f(a, b):\n    {body}\n"


def with_operator(text: str, name: str) -> list[str]:
    return [with_edits(text, [each.edit]) for each in mutations(text) if each.operator == name]


def test_an_operator_changes_one_place_and_leaves_all_other_characters(subtests: pytest.Subtests) -> None:
    for name in sorted(BODIES):
        with subtests.test(name=name):
            before, after = BODIES[name]
            assert function(after).replace("\n\n", "\n") in [
                each.replace("\n\n", "\n") for each in with_operator(function(before), name)
            ]


def test_a_default_is_changed() -> None:
    text = "def f(a, b=1, *, c=True):\n    return a\n"
    changed = with_operator(text, "changed_default")
    assert "def f(a, b=2, *, c=True):\n    return a\n" in changed
    assert "def f(a, b=1, *, c=False):\n    return a\n" in changed


def test_every_operator_has_an_example_here() -> None:
    assert {*BODIES, "changed_default"} == {*OPERATOR_NAMES}


def test_docstrings_assertions_decorators_annotations_fstrings_and_module_code_stay() -> None:
    text = (
        "X = 1 + 2\n"
        "@cache(1)\n"
        "def f(a: Literal[3]) -> Literal[4]:\n"
        "    'a 5'\n"
        "    assert a == 6\n"
        "    x: Literal[7]\n"
        "    print(f'{a + 8}')\n"
    )
    assert {each.operator for each in mutations(text)} == {"deleted_statement"}


def test_bugs_in_methods_carry_the_qualified_name() -> None:
    text = "class A:\n    class B:\n        def f(self, x):\n            return x + 1\n"
    assert {each.function for each in mutations(text)} == {"A.B.f"}


SOURCE = '''\
def größe(werte, grenze=3):
    """Ä 1."""
    ü = "ß" ; n = 0   # größer als 1
    for w in werte :
        if w>=grenze and not (w == n): n+=w
        elif w < 0:
            break
        else :
            continue
    return  max(n , grenze) if n else -1
'''


def test_columns_behind_letters_of_several_bytes_are_right() -> None:
    changed = [with_edits(SOURCE, [each.edit]) for each in mutations(SOURCE)]
    assert SOURCE.replace("n+=w", "n-=w") in changed
    assert SOURCE.replace("w>=grenze", "w>grenze") in changed
    assert SOURCE.replace("max(n , grenze)", "min(n , grenze)") in changed
    assert SOURCE.replace("if n else -1", "if n else 1") in changed


@pytest.mark.parametrize("mark", ["\u2028", "\v", "\x0c", "\x1c", "\x1e", "\x85"])
def test_marks_that_end_no_line_of_python_do_not_move_an_edit(mark: str) -> None:
    text = f'def f(a, b):\n    """One{mark}two."""\n    c = "{mark}"\n    return a + b\n'
    assert text.replace("a + b", "a - b") in with_operator(text, "wrong_operator")


def test_ends_of_lines_of_other_systems_do_not_move_an_edit() -> None:
    for end in ("\r\n", "\r"):
        text = f"def f(a, b):{end}    c = 'x'{end}    return a + b{end}"
        assert text.replace("a + b", "a - b") in with_operator(text, "wrong_operator")


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [each.string for each in tokens if each.type == tokenize.COMMENT]


@given(st.sampled_from(mutations(SOURCE)))
def test_a_bug_is_one_edit_that_compiles_or_is_known_not_to(mutation: Mutation) -> None:
    changed = with_edits(SOURCE, [mutation.edit])
    start, end, text = mutation.edit.start, mutation.edit.end, mutation.edit.text
    assert changed[:start] == SOURCE[:start]
    assert changed[start + len(text) :] == SOURCE[end:]
    assert mutation.line == SOURCE.count("\n", 0, start) + 1
    if changes_meaning(changed, SOURCE):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert comments(changed) == comments(SOURCE)
