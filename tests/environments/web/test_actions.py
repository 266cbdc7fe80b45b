"""What agents write is read as calls with plain values, and nothing of it is run."""

import json
import warnings

import pytest

from rllm.environments.web.actions import (
    ACTIONS,
    UnreadableAction,
    action_list,
    action_of_call,
    action_schemas,
    parse_actions,
)
from rllm.rewards.code_asserts import is_python

BROWSERGYM = {
    *(
        "noop",
        "send_msg_to_user",
        "report_infeasible",
        "scroll",
        "fill",
        "select_option",
        "click",
        "dblclick",
    ),
    *(
        "hover",
        "press",
        "focus",
        "clear",
        "drag_and_drop",
        "mouse_move",
        "mouse_up",
        "mouse_down",
        "mouse_click",
    ),
    *("mouse_dblclick", "mouse_drag_and_drop", "keyboard_press", "keyboard_up", "keyboard_down"),
    *("keyboard_type", "keyboard_insert_text", "goto", "go_back", "go_forward", "new_tab", "tab_close"),
    *("tab_focus", "upload_file"),
}


def test_what_python_would_warn_of_in_an_answer_reaches_no_screen() -> None:
    with warnings.catch_warnings(record=True) as reached:
        warnings.simplefilter("always")
        with pytest.raises(UnreadableAction):
            parse_actions("1if 1else 2")
        (action,) = parse_actions(r"""fill("3", "\d")""")
        assert is_python("assert f(1) == 1or 2")
    assert action.arguments["value"] == "\\d"
    assert reached == []


def test_actions_have_browsergyms_names() -> None:
    assert set(ACTIONS) == BROWSERGYM


def test_a_call_is_read(subtests: pytest.Subtests) -> None:
    for text, name, arguments in [
        ('click("12")', "click", {"bid": 12, "button": "left", "modifiers": []}),
        ("click(12)", "click", {"bid": 12, "button": "left", "modifiers": []}),
        ("click('[12]', button='right')", "click", {"bid": 12, "button": "right", "modifiers": []}),
        ('fill("3", "a \\"b\\"\\nc")', "fill", {"bid": 3, "value": 'a "b"\nc'}),
        ("fill(bid='3', value=42)", "fill", {"bid": 3, "value": "42"}),
        ("select_option('4', ['x', 'y'])", "select_option", {"bid": 4, "options": ["x", "y"]}),
        ("select_option('4', 'x')", "select_option", {"bid": 4, "options": ["x"]}),
        ("scroll(0, -200.5)", "scroll", {"delta_x": 0, "delta_y": -200.5}),
        ("noop()", "noop", {"wait_ms": 1000}),
    ]:
        with subtests.test(text=text, name=name, arguments=arguments):
            (action,) = parse_actions(text)
            assert (action.name, dict(action.arguments)) == (name, arguments)
            assert action_of_call(name, json.dumps(arguments)) == action
            assert parse_actions(str(action)) == [action]


def test_several_calls_are_done_in_order() -> None:
    assert [each.name for each in parse_actions('click("1")\nfill("2", "x")\npress("2", "Enter")')] == [
        "click",
        "fill",
        "press",
    ]


def test_what_is_no_action_says_why(subtests: pytest.Subtests) -> None:
    for text, why in [
        ("", "no action"),
        ("I click the button", "is no call"),
        ("click(", "is no call"),
        ("x = 1", "is no call"),
        ("page.click('1')", "is no call"),
        ("__import__('os').system('true')", "is no call"),
        ("open('/etc/passwd')", "no action `open`"),
        ("click(open('/etc/passwd'))", "plain values"),
        ("click(*[1])", "plain values"),
        ("click(**{'bid': '1'})", "plain values"),
        ("click()", "needs `bid`"),
        ("click('1', 'left', [], 4)", "takes 3 arguments"),
        ("click('1', bid='1')", "takes no `bid`"),
        ("click('a')", "must be the id"),
        ("click(True)", "must be the id"),
        ("click('1', button='top')", "must be one of left"),
        ("scroll(1e9, 0)", "must be a number"),
        ("scroll('1', 0)", "must be a number"),
        ("clik('1')", "no action `clik`"),
        ("select_option('1', [])", "must be a text"),
        ("noop()\n" * 11, "11 actions"),
        ("(" * 5000, "is no call"),
        ("click(" + "-" * 9000 + "1)", "`click`|no call"),
        ("a" * 20_001, "20001 characters"),
    ]:
        with subtests.test(text=text, why=why), pytest.raises(UnreadableAction, match=why):
            parse_actions(text)


@pytest.mark.parametrize(
    "text",
    [
        "fill('3', {})",
        "click({})",
        "scroll({}, 0)",
        "select_option('3', [{}])",
        "goto(({},))",
        "press('3', {})",
    ],
)
def test_a_number_with_more_digits_than_python_writes_is_no_action(text: str) -> None:
    with pytest.raises(UnreadableAction):
        parse_actions(text.format("0x" + "f" * 4000))


@pytest.mark.parametrize("arguments", ["{", "[]", 3, '{"bid": null}', "[" * 100_000])
def test_a_tool_call_that_cannot_be_read_says_why(arguments: object) -> None:
    with pytest.raises(UnreadableAction):
        action_of_call("click", arguments)


def test_agents_are_told_every_action() -> None:
    assert [each["function"]["name"] for each in action_schemas()] == list(ACTIONS)
    assert all(each["function"]["parameters"]["type"] == "object" for each in action_schemas())
    assert 'click(bid, button="left", modifiers=[]): Click an element.' in action_list()
