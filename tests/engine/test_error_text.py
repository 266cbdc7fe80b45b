"""What messages show of user code."""

import sys
from types import FrameType

from rllm.engine.frames import frames_of_thread, frames_text
from rllm.errors import error_text, shorten
from rllm.errors.redaction import hide_key


def test_a_text_is_cut_only_where_it_is_longer_than_may_be() -> None:
    assert shorten("abcde", 5) == "abcde"
    assert shorten("abcdef", 5) == "abcde… (6 characters in all)"
    assert shorten("x" * 4000) == "x" * 4000
    assert shorten("x" * 4001) == "x" * 4000 + "… (4,001 characters in all)"


def test_a_key_is_hidden_also_where_the_cut_would_halve_it() -> None:
    key = "sk-" + "a1B2c3D4" * 6
    hide_key(key)
    for text in (f"the key {key} is wrong", f"{'x ' * 1990}{key} {'y ' * 50}"):
        assert key[:12] not in shorten(text)


def test_an_error_is_shown_with_its_notes() -> None:
    error = ValueError("wrong")
    assert error_text(error) == "wrong"
    error.add_note("first")
    error.add_note("second")
    assert error_text(error) == "wrong (first; second)"


def frame_of(filename: str, name: str) -> FrameType:
    namespace: dict[str, FrameType] = {"sys": sys}  # type: ignore[dict-item]
    exec(compile(f"def {name}():\n    return sys._getframe()\nframe = {name}()", filename, "exec"), namespace)
    return namespace["frame"]


def test_the_innermost_line_of_a_user_is_shown_and_the_outermost_where_there_is_none() -> None:
    mine, theirs = frame_of("/home/me/program.py", "solve"), frame_of("/home/me/lib.py", "helper")
    foreign, outer = frame_of(sys.prefix + "/lib/x.py", "get"), frame_of(sys.prefix + "/lib/y.py", "main")
    assert frames_text([outer, mine, theirs, foreign]) == "/home/me/lib.py:2 in helper"
    assert frames_text([outer, mine, foreign]) == "/home/me/program.py:2 in solve"
    assert frames_text([outer, foreign]) == f"{sys.prefix}/lib/y.py:2 in main"
    assert frames_text([]) == ""


def test_the_frames_of_a_thread_go_from_the_outermost_to_the_innermost() -> None:
    import threading

    mine = [frame.f_code.co_name for frame in frames_of_thread(threading.get_ident())]
    assert mine[-2:] == [
        "test_the_frames_of_a_thread_go_from_the_outermost_to_the_innermost",
        "frames_of_thread",
    ]
    assert frames_of_thread(None) == []
