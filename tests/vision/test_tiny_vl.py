"""`builtin:tiny-vl`: a directory that transformers reads, and what it learns from pixels alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForImageTextToText, AutoProcessor

from rllm.cli.main import rllm as front_door
from rllm.environments.lake_pictures import LakeLook, LakePictureEnv
from rllm.environments.picture_questions import KINDS, drawn_question, question_tasks
from rllm.environments.pictures import SIDE
from rllm.environments.worlds import world_named
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.models.builtin import PATCH_SIDE, create_model, create_tokenizer
from rllm.models.directory import load_model

Make = Callable[..., Any]


def test_transformers_loads_the_built_in_vision_model_and_its_processor(tmp_path: Path) -> None:
    create_model(tmp_path / "a", "tiny-vl", seed=3)
    create_model(tmp_path / "b", "tiny-vl", seed=3)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    loader: Any = AutoModelForImageTextToText
    model, loading_info = loader.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(loading_info.values())
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    processor: Any = AutoProcessor.from_pretrained(tmp_path / "a")
    assert processor.image_token_id == model.config.image_token_id
    assert load_model(tmp_path / "a").num_parameters < 5_000_000


def test_an_image_reaches_every_token_that_stands_for_it_across_the_borders_of_patches(
    vision_model: Make, picture: Make
) -> None:
    """The tower is of overlapping convolutions: what is drawn beside a patch changes its vector too."""
    vision = vision_model("tiny-vl")
    pixels = torch.zeros(1, 3, SIDE, SIDE)
    changed = pixels.clone()
    changed[:, :, 0, 0] = 1.0
    with torch.no_grad():
        before, after = (vision.model.get_image_features(each).pooler_output[0] for each in (pixels, changed))
    assert before.shape == ((SIDE // PATCH_SIDE) ** 2, 96)
    assert (before != after).any(dim=-1).all()


def test_model_create_makes_one_and_says_what_it_reads(tmp_path: Path) -> None:
    arguments = ["model", "create", str(tmp_path / "eyes"), "--preset", "tiny-vl", "--json"]
    printed = CliRunner().invoke(front_door, arguments, catch_exceptions=False)
    facts = json.loads(printed.stdout)
    assert facts["reads_images"] is True
    assert facts["served_by"] == "transformers"


def test_a_lake_s_cells_lie_on_no_grid_of_patches() -> None:
    looks = [LakeLook.of_number("train", number, 4) for number in range(200)]
    assert len({(look.cell, look.corner) for look in looks}) > 40
    on_grid = [look for look in looks if look.cell % PATCH_SIDE == 0 or PATCH_SIDE % look.cell == 0]
    aligned = [look for look in on_grid if not any(each % look.cell for each in look.corner)]
    assert len(aligned) <= 2
    assert len({(look.hole_shape, look.goal_shape, look.player_shape) for look in looks}) > 60
    assert all(look.corner[0] + 4 * look.cell <= SIDE >= look.corner[1] + 4 * look.cell for look in looks)
    assert LakeLook.of_number("test", 7, 4) != LakeLook.of_number("train", 7, 4)


@pytest.mark.parametrize(
    ("name", "arguments"), [("frozenlake-pixels", {"size": 4}), ("picture-questions", {})]
)
def test_who_sees_a_picture_is_shown_nothing_else_and_the_expert_succeeds(
    name: str, arguments: dict[str, Any]
) -> None:
    world = world_named(name)
    expert: Any = world.demonstrate
    for task in world.tasks("validation", 6, **arguments):
        turns = expert(task, noise=0.0, rng=np.random.default_rng(1))
        env = world.env_class.from_dict(task)
        observation, _ = env.reset(seed=1)
        reward, done = 0.0, False
        for shown, answer in turns:
            assert shown == observation, "the expert is shown what the agent is shown"
            (message,) = observation
            assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
            observation, reward, done = env.step(answer)[:3]
        assert done
        assert reward == 1.0


def test_every_kind_of_picture_question_has_each_of_its_answers_and_none_without_the_picture() -> None:
    for kind in KINDS:
        questions = [drawn_question(task) for task in question_tasks("train", 120, kinds=[kind])]
        answers = {question.answer for question in questions}
        assert answers == set(questions[0].choices), kind
        counts = [sum(question.answer == each for question in questions) for each in answers]
        assert max(counts) <= 0.7 * len(questions), f"{kind}: one answer is right too often"
        assert len({question.url for question in questions}) == len(questions)


@pytest.mark.parametrize("name", ["frozenlake-pixels", "geometry-pixels"])
def test_the_blocks_that_learn_from_pictures_start(name: str) -> None:
    """A dry run comes as far as the model: that it reads images is known before it is made."""
    printed = CliRunner().invoke(front_door, ["train", name, "--dry-run"])
    assert printed.exit_code == 0, printed.output
    assert "builtin:tiny-vl" in printed.output


def _lake_demonstration(**arguments: Any) -> tuple[dict[str, Any], list[tuple[Any, str]]]:
    world = world_named("frozenlake-pixels")
    (task,) = world.tasks("validation", 1, size=4)
    expert: Any = world.demonstrate
    return task, expert(task, noise=0.0, rng=np.random.default_rng(2), **arguments)


def test_an_expert_that_reads_writes_every_cell_of_the_picture_before_its_move() -> None:
    task, turns = _lake_demonstration(reads=True)
    env = LakePictureEnv.from_dict(task)
    observation, _ = env.reset(seed=0)
    reward = 0.0
    for shown, answer in turns:
        assert shown == observation
        cells, _, move = answer.partition(" ")
        row, column = env.position
        assert [cells[4 * place : 4 * place + 4].replace("P", "F") for place in range(4)] == [
            each.replace("S", "F") for each in env.desc
        ]
        assert cells.index("P") == 4 * row + column
        assert move in ("Left", "Down", "Right", "Up")
        observation, reward = env.step(answer)[:2]
    assert reward == 1.0


def _read_question(task: dict[str, Any], **arguments: Any) -> tuple[str, str]:
    """The shapes by place, and the answer, as the expert who reads writes them."""
    expert: Any = world_named("picture-questions").demonstrate
    ((_, text),) = expert(task, noise=0.0, rng=np.random.default_rng(3), reads=True, **arguments)
    reading, _, tagged = text.partition(" <answer>")
    return reading, tagged.removesuffix("</answer>")


def test_an_expert_that_reads_writes_the_shapes_from_which_its_answer_follows() -> None:
    """A second reader, who sees no picture, answers from what is written."""
    for task in question_tasks("train", 90):
        question, (reading, answer) = drawn_question(task), _read_question(task)
        assert answer == question.answer
        *thirds, end = reading.split(".")
        assert (len(thirds), end) == (9, "")
        words = question.text.rstrip("?").split()
        shape = words[2] if task["drawing"] != "compare" else words[0]
        letter = "X" if shape == "cross" else shape[0].upper()
        places = [place for place, letters in enumerate(thirds) for each in letters if each == letter]
        match task["drawing"]:
            case "count":
                assert len(places) == int(answer)
            case "locate":
                (place,) = places
                row, column = divmod(place, 3)
                down, right = (half in answer for half in ("Down", "Right"))
                assert row in ((1, 2) if down else (0, 1))
                assert column in ((1, 2) if right else (0, 1))
            case _:
                assert len(places) == 1
                assert len("".join(thirds)) == 2


def test_an_expert_that_reads_answers_alone_where_no_shapes_are_asked_for() -> None:
    (task,) = question_tasks("train", 1, kinds=["clock"])
    assert _read_question(task) == (drawn_question(task).answer, "")


def test_what_a_reading_expert_writes_fits_into_an_answer_of_the_block() -> None:
    _, turns = _lake_demonstration(reads=True)
    readings = [
        "{} <answer>{}</answer>".format(*_read_question(task)) for task in question_tasks("train", 300)
    ]
    tokenizer = create_tokenizer()
    for name, answers in [
        ("frozenlake-pixels", [answer for _, answer in turns]),
        ("geometry-pixels", readings),
    ]:
        limit = benchmark_named(name).train["rollout"]["max_tokens_per_turn"]
        assert max(len(tokenizer.encode(answer).ids) + 1 for answer in answers) <= limit, name


def test_a_demonstration_shows_as_many_turns_as_are_asked_for() -> None:
    _, turns = _lake_demonstration()
    assert _lake_demonstration(turns=2)[1] == turns[:2]
    assert _lake_demonstration(turns=99)[1] == turns


def test_reading_questions_is_a_choice_of_two() -> None:
    (task,) = question_tasks("train", 1)
    with pytest.raises(ConfigError, match="`reads` is 'all'"):
        world_named("picture-questions").demonstrate(  # pyright: ignore[reportOptionalCall]
            task, noise=0.0, rng=np.random.default_rng(0), reads="all"
        )


@pytest.mark.parametrize(("name", "value"), [("reads", 1), ("turns", 0), ("turns", True), ("turns", "two")])
def test_what_the_lake_expert_cannot_do_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is {value!r}"):
        _lake_demonstration(**{name: value})


def test_the_last_word_of_an_answer_is_the_move(subtests: pytest.Subtests) -> None:
    for answer, is_move in [
        ("Right", True),
        ("right", True),
        ("PFFFFHFHFFFHHFFG Right", True),
        ("The hole is below.\n\nRight", True),
        ("Right or Left? <answer>Right</answer>", True),
        ("I go Right because the hole is below", False),
        ("Right, Left, Down", True),
        ("<think>Right", False),
        ("", False),
        ("   ", False),
    ]:
        with subtests.test(answer=answer, is_move=is_move):
            env = LakePictureEnv(["SFF", "FFF", "FFG"])
            env.reset(seed=0)
            assert env.step(answer)[3]["valid"] is is_move
