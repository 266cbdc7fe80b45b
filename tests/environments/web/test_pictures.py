"""Pages as pictures, in a real Chromium: what they show, where the numbers stand, how they reach a model."""

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from rllm.agents.web import WebAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.web import MiniWobEnv, PageView, WebEnv
from rllm.environments.web.context import VIEWPORT
from rllm.environments.worlds import world_named
from rllm.errors import ConfigError
from rllm.inference.scripted import ScriptedClient

Play = Callable[..., WebEnv]
PAGE = """<style>body{margin:0} div{height:3000px;background:#00f}
button{position:absolute;left:100px;top:60px;width:80px;height:40px;background:#0f0;border:0;color:#0f0}</style>
<button>Go</button><div></div>"""
GREEN, BLUE = (0, 255, 0), (0, 0, 255)


def image_of(part: dict[str, Any]) -> Image.Image:
    url = part["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")


async def test_a_picture_is_the_view_with_numbers_on_what_can_be_acted_on(play: Play) -> None:
    env = play(PAGE, goal="Press it", view=PageView(shows="picture"))
    (text, picture), _ = await env.reset()
    assert text == {"type": "text", "text": 'Goal: Press it\nPage: "" "http://site.test/"'}
    image = image_of(picture)
    assert image.size == VIEWPORT
    frame = [image.getpixel(each) for each in ((100, 99), (179, 60), (179, 99))]
    assert len(set(frame)) == 1
    assert frame[0] not in (GREEN, BLUE)
    assert image.getpixel((150, 90)) == GREEN
    assert image.getpixel((300, 300)) == BLUE
    corner = {colour: count for count, colour in image.crop((101, 61, 111, 74)).getcolors() or []}
    assert corner[frame[0]] > 20, "the number has a ground in the colour of the frame"
    assert len(corner) > 2
    page, *_ = await env.step('click("1")\nscroll(0, 500)')
    assert image_of(page[-1]).getpixel((150, 90)) == BLUE, "it shows where the page was scrolled to"


async def test_text_and_picture_come_together_and_marks_can_be_left_out(play: Play) -> None:
    env = play(PAGE, view=PageView(shows="both", has_numbers=False, clip=(90, 50, 100, 60)))
    (text, picture), _ = await env.reset()
    assert '[1] button "Go"' in text["text"]
    image = image_of(picture)
    assert image.size == (100, 60)
    assert {image.getpixel(each) for each in ((10, 49), (89, 10))} == {GREEN}
    await env.step("scroll(0, 20)")
    (_, picture), *_ = await env.step("noop(1)")
    assert image_of(picture).getpixel((10, 49)) == BLUE, "a part of the view, wherever that was scrolled to"


async def test_an_error_is_told_beside_the_picture(play: Play) -> None:
    env = play(PAGE, view=PageView(shows="picture", with_address=False))
    (picture,), _ = await env.reset()
    assert picture["type"] == "image_url"
    (text, _), *_ = await env.step('click("99")')
    assert text["text"] == "Error: click was impossible: there is no such element"


async def test_a_model_is_shown_the_task_as_a_picture_and_the_goal_as_text(chromium: str) -> None:
    task = world_named("miniwob/click-test").tasks("test", 1, shows="picture")[0]
    messages: list[Any] = []

    def answer(prompt: list[Any]) -> str:
        messages.extend(prompt)
        return 'click("1")'

    engine = AgentExecutionEngine(
        WebAgent, MiniWobEnv, rollout_engine=ScriptedClient(answer), max_prompt_length=8192
    )
    (trajectory,) = await engine.execute_tasks([task])
    assert trajectory.reward == 1.0
    text, picture = next(each for each in messages if each["role"] == "user")["content"]
    assert text["text"] == "Goal: Click the button."
    assert image_of(picture).size == (160, 160)


@pytest.mark.parametrize(
    ("view", "why"), [({"shows": "sound"}, "`shows` is 'sound'"), ({"clip": (0, 0, 0, 5)}, "`clip` is")]
)
def test_a_view_that_there_is_not_is_refused(view: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PageView(**view)
