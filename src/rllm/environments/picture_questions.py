"""Questions about drawn pictures, whose answers follow from how they were drawn.

    (split, number, kind) ──► PictureQuestion(picture, text, answer, choices) ──► one answer, graded exactly

Each kind is a function that draws one. A number of a split is one picture; splits share no generator.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv
from rllm.environments.lake_maps import SPLITS
from rllm.environments.pictures import SHAPES, SIDE, Canvas, Colour, colour_between, showing
from rllm.environments.world import OPTIMUM, RANDOM, World
from rllm.errors import AgentError, ConfigError
from rllm.rewards.extraction import Marked, marked_answer
from rllm.types.episode import Action

_SIDES = range(32, 1025)
_TRIES = 64
"""Places that are drawn for a shape before all of them are drawn anew."""
_QUARTERS = ("Up Left", "Up Right", "Down Left", "Down Right")
_COLOURS: dict[str, tuple[Colour, Colour]] = {
    "red": ((190, 0, 0), (255, 60, 60)),
    "green": ((0, 150, 0), (60, 230, 60)),
    "blue": ((0, 0, 190), (70, 70, 255)),
    "yellow": ((200, 190, 0), (255, 255, 80)),
}
"""Name -> range that one is drawn from."""
_YES, _NO = "yes", "no"
_LETTERS = {shape: "X" if shape == "cross" else shape[0].upper() for shape in SHAPES}


@dataclass(kw_only=True, slots=True, frozen=True)
class PictureQuestion:
    """A picture, what is asked of it, and what is right."""

    url: str
    text: str
    answer: str
    choices: tuple[str, ...]
    """Every answer that a question of this kind may have."""
    reading: str = ""
    """The shapes by place, of kinds that ask for them: see `_read_shapes`."""


Draw = Callable[[np.random.Generator, int], PictureQuestion]
"""(generator, side in pixels) -> a question."""


def _ground(rng: np.random.Generator, side: int) -> Canvas:
    return Canvas(colour_between(rng, (0, 0, 0), (50, 50, 50)), side)


def _bright(rng: np.random.Generator) -> Colour:
    return colour_between(rng, (150, 150, 150), (255, 255, 255))


def _apart(rng: np.random.Generator, radii: Sequence[float], side: int) -> list[tuple[float, float]]:
    """Centres of circles that neither touch nor leave the picture."""
    while True:
        centres: list[tuple[float, float]] = []
        for radius in radii:
            draws = rng.uniform(radius + 1, side - radius - 2, (_TRIES, 2)).tolist()
            free = (
                (x, y)
                for x, y in draws
                if all(
                    (x - a) ** 2 + (y - b) ** 2 >= (radius + other + 1) ** 2
                    for (a, b), other in zip(centres, radii, strict=False)
                )
            )
            if (centre := next(free, None)) is None:
                break
            centres.append(centre)
        else:
            return centres


def _read_shapes(kinds: Sequence[str], centres: Sequence[tuple[float, float]], side: int) -> str:
    """The nine parts of the picture, row by row: a letter for each shape whose centre is in it, then a full
    stop. "C....RR....D." is a circle up left, two rings in the middle and a diamond down right."""
    cells = [""] * 9
    for kind, (x, y) in zip(kinds, centres, strict=True):
        cells[int(3 * y / side) * 3 + int(3 * x / side)] += _LETTERS[kind]
    return "".join(f"{''.join(sorted(cell))}." for cell in cells)


def _count(rng: np.random.Generator, side: int) -> PictureQuestion:
    """The number of one shape among others."""
    shape, other = (SHAPES[each] for each in rng.permutation(len(SHAPES))[:2])
    number, num_others = int(rng.integers(1, 5)), int(rng.integers(0, 3))
    kinds = [shape] * number + [other] * num_others
    radii = [float(each) for each in rng.uniform(0.09, 0.14, len(kinds)) * side]
    canvas, centres = _ground(rng, side), _apart(rng, radii, side)
    for kind, centre, radius in zip(kinds, centres, radii, strict=True):
        canvas.shape(kind, centre, radius, _bright(rng))
    return PictureQuestion(
        url=canvas.data_url(),
        text=f"How many {shape}?",
        answer=str(number),
        choices=_digits(4),
        reading=_read_shapes(kinds, centres, side),
    )


def _compare(rng: np.random.Generator, side: int) -> PictureQuestion:
    """Two shapes, one larger than the other."""
    first, second = (SHAPES[each] for each in rng.permutation(len(SHAPES))[:2])
    small = float(rng.uniform(0.08, 0.14)) * side
    large = small * float(rng.uniform(1.6, 2.2))
    is_larger = bool(rng.integers(2))
    radii = [large, small] if is_larger else [small, large]
    canvas, centres = _ground(rng, side), _apart(rng, radii, side)
    for kind, centre, radius in zip((first, second), centres, radii, strict=True):
        canvas.shape(kind, centre, radius, _bright(rng))
    reading = _read_shapes((first, second), centres, side)
    return _yes_or_no(canvas, f"{first} larger than {second}?", is_larger, reading)


def _locate(rng: np.random.Generator, side: int) -> PictureQuestion:
    """The quarter of the picture that a shape is in; others are elsewhere."""
    kinds = [SHAPES[each] for each in rng.permutation(len(SHAPES))[: int(rng.integers(1, 4))]]
    quarters = rng.permutation(4)[: len(kinds)]
    canvas, half, centres = _ground(rng, side), side / 2, list[tuple[float, float]]()
    for kind, quarter in zip(kinds, quarters, strict=True):
        radius = float(rng.uniform(0.09, 0.15)) * side
        down, right = divmod(int(quarter), 2)
        x, y = (float(each) for each in rng.uniform(radius + 1, half - radius - 1, 2))
        centres.append((x + right * half, y + down * half))
        canvas.shape(kind, centres[-1], radius, _bright(rng))
    return PictureQuestion(
        url=canvas.data_url(),
        text=f"Where is {kinds[0]}?",
        answer=_QUARTERS[int(quarters[0])],
        choices=_QUARTERS,
        reading=_read_shapes(kinds, centres, side),
    )


def _crossings(rng: np.random.Generator, side: int) -> PictureQuestion:
    """Two lines of two pieces each, which cross or not."""
    edge, middle, far = 0.08 * side, side / 2, 0.92 * side
    number = int(rng.integers(3))
    while True:
        heights = rng.uniform(edge, far, (2, 3))
        gaps = heights[0] - heights[1]
        if np.abs(gaps).min() > 0.1 * side and sum(a * b < 0 for a, b in pairwise(gaps)) == number:
            break
    canvas = _ground(rng, side)
    colours = (colour_between(rng, *_COLOURS["red"]), colour_between(rng, *_COLOURS["yellow"]))
    for line, colour in zip(heights, colours, strict=True):
        points = [(x, float(y)) for x, y in zip((edge, middle, far), line, strict=True)]
        canvas.line(points, colour, max(2, side // 40))
    return PictureQuestion(
        url=canvas.data_url(),
        text="How often do the lines cross?",
        answer=str(number),
        choices=("0", "1", "2"),
    )


def _overlaps(rng: np.random.Generator, side: int) -> PictureQuestion:
    """Two rings, which overlap or not."""
    radii = [float(each) for each in rng.uniform(0.12, 0.2, 2) * side]
    overlap = bool(rng.integers(2))
    reach = sum(radii) * float(rng.uniform(0.4, 0.8) if overlap else rng.uniform(1.15, 1.5))
    low, high = max(radii) + 1, side - max(radii) - 2
    while True:
        x, y = (float(each) for each in rng.uniform(low, high, 2))
        angle = float(rng.uniform(0, 2 * math.pi))
        other = (x + reach * math.cos(angle), y + reach * math.sin(angle))
        if all(low <= each <= high for each in other):
            break
    canvas = _ground(rng, side)
    for centre, radius in zip(((x, y), other), radii, strict=True):
        canvas.shape("ring", centre, radius, _bright(rng))
    return _yes_or_no(canvas, "Do the rings overlap?", overlap)


def _grid(rng: np.random.Generator, side: int) -> PictureQuestion:
    """The rows of a table."""
    rows, columns = (int(each) for each in rng.integers(2, 6, 2))
    width, height = (float(each) for each in rng.uniform(0.65, 0.9, 2) * side)
    left, top = (float(rng.uniform(1, side - each - 2)) for each in (width, height))
    canvas, colour, thick = _ground(rng, side), _bright(rng), max(1, side // 60)
    for row in range(rows + 1):
        y = top + height * row / rows
        canvas.line([(left, y), (left + width, y)], colour, thick)
    for column in range(columns + 1):
        x = left + width * column / columns
        canvas.line([(x, top), (x, top + height)], colour, thick)
    return PictureQuestion(
        url=canvas.data_url(),
        text="How many rows?",
        answer=str(rows),
        choices=(
            "2",
            "3",
            "4",
            "5",
        ),
    )


def _bars(rng: np.random.Generator, side: int) -> PictureQuestion:
    """The tallest bar of a chart, counted from the left."""
    number = int(rng.integers(3, 6))
    tallest = int(rng.integers(number))
    heights = rng.uniform(0.15, 0.6, number) * side
    heights[tallest] = float(rng.uniform(0.72, 0.9)) * side
    canvas, width, colour = _ground(rng, side), side / (number + 1), _bright(rng)
    left, foot = float(rng.uniform(1, width - 1)), side - 2
    for place, height in enumerate(heights):
        canvas.box(left + place * width, foot - float(height), 0.7 * width, float(height), colour)
    return PictureQuestion(
        url=canvas.data_url(),
        text="Which bar is tallest?",
        answer=str(tallest + 1),
        choices=_digits(5),
    )


def _clock(rng: np.random.Generator, side: int) -> PictureQuestion:
    """The hour that the only hand of a clock points to."""
    hour, radius = int(rng.integers(1, 13)), float(rng.uniform(0.3, 0.44)) * side
    x, y = (float(each) for each in rng.uniform(radius + 1, side - radius - 2, 2))
    canvas, angle = _ground(rng, side), hour * math.pi / 6
    canvas.shape("circle", (x, y), radius, _bright(rng))
    tip = (x + 0.9 * radius * math.sin(angle), y - 0.9 * radius * math.cos(angle))
    canvas.line([(x, y), tip], colour_between(rng, (0, 0, 0), (60, 60, 60)), max(2, side // 24))
    return PictureQuestion(
        url=canvas.data_url(),
        text="What hour is it?",
        answer=str(hour),
        choices=_digits(12),
    )


def _nested(rng: np.random.Generator, side: int) -> PictureQuestion:
    """Squares one in another."""
    number, size = int(rng.integers(1, 5)), float(rng.uniform(0.75, 0.9)) * side
    left, top = (float(each) for each in rng.uniform(1, side - size - 2, 2))
    canvas, colour, gap = _ground(rng, side), _bright(rng), size / 10
    for place in range(number):
        inset, x_end, y_end = place * gap, left + size - place * gap, top + size - place * gap
        x, y = left + inset, top + inset
        canvas.line([(x, y), (x_end, y), (x_end, y_end), (x, y_end), (x, y)], colour, max(1, side // 48))
    return PictureQuestion(
        url=canvas.data_url(),
        text="How many squares?",
        answer=str(number),
        choices=_digits(4),
    )


def _colour(rng: np.random.Generator, side: int) -> PictureQuestion:
    """The colour of one of two shapes."""
    kinds = [SHAPES[each] for each in rng.permutation(len(SHAPES))[:2]]
    names = [tuple(_COLOURS)[each] for each in rng.permutation(len(_COLOURS))[:2]]
    radii = [float(each) for each in rng.uniform(0.12, 0.2, 2) * side]
    canvas = _ground(rng, side)
    for kind, name, centre, radius in zip(kinds, names, _apart(rng, radii, side), radii, strict=True):
        canvas.shape(kind, centre, radius, colour_between(rng, *_COLOURS[name]))
    return PictureQuestion(
        url=canvas.data_url(),
        text=f"What colour has {kinds[0]}?",
        answer=names[0],
        choices=tuple(_COLOURS),
    )


def _arrow(rng: np.random.Generator, side: int) -> PictureQuestion:
    """The way that an arrow points."""
    ways = {"Left": (-1, 0), "Down": (0, 1), "Right": (1, 0), "Up": (0, -1)}
    way = tuple(ways)[int(rng.integers(4))]
    dx, dy = ways[way]
    length = float(rng.uniform(0.25, 0.4)) * side
    x, y = (float(each) for each in rng.uniform(length + 1, side - length - 2, 2))
    canvas, colour, thick, head = _ground(rng, side), _bright(rng), max(2, side // 20), length * 0.6
    tip = (x + dx * length, y + dy * length)
    canvas.line([(x - dx * length, y - dy * length), tip], colour, thick)
    for turn in (-1, 1):
        barb = (tip[0] - dx * head + turn * dy * head, tip[1] - dy * head + turn * dx * head)
        canvas.line([tip, barb], colour, thick)
    return PictureQuestion(
        url=canvas.data_url(),
        text="Where does the arrow point?",
        answer=way,
        choices=tuple(
            ways,
        ),
    )


def _digits(last: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(1, last + 1))


def _yes_or_no(canvas: Canvas, text: str, is_so: bool, reading: str = "") -> PictureQuestion:
    answer = _YES if is_so else _NO
    return PictureQuestion(
        url=canvas.data_url(), text=text, answer=answer, choices=(_YES, _NO), reading=reading
    )


KINDS: dict[str, Draw] = {
    "count": _count,
    "compare": _compare,
    "locate": _locate,
    "crossings": _crossings,
    "overlaps": _overlaps,
    "grid": _grid,
    "bars": _bars,
    "clock": _clock,
    "nested": _nested,
    "colour": _colour,
    "arrow": _arrow,
}
"""Name -> who draws one."""


def drawn_question(task: Mapping[str, Any]) -> PictureQuestion:
    """The question of a task. Raises ConfigError for a kind, split, number or side that there is not."""
    kind, split, number, side = (task.get(name) for name in ("drawing", "split", "seed", "side"))
    _check(str(kind), str(split), number, side)
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(str(split)), int(number or 0)]))
    return KINDS[str(kind)](rng, int(side or SIDE))


def question_tasks(
    split: str,
    count: int,
    *,
    start: int = 0,
    kinds: str | Sequence[str] = ("count", "compare", "locate"),
    side: int = SIDE,
) -> list[dict[str, Any]]:
    """Questions `start` to `start + count - 1` of a split; the kinds take turns."""
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds:
        raise ConfigError(f"`kinds` is {kinds!r}; give a list of some of {', '.join(KINDS)}.")
    for kind in kinds:
        _check(kind, split, start, side)
    return [
        {
            "task_id": f"pictures-{kinds[number % len(kinds)]}-{split}-{number}",
            "drawing": kinds[number % len(kinds)],
            "split": split,
            "seed": number,
            "side": side,
        }
        for number in range(start, start + count)
    ]


class PictureQuestionEnv(BaseEnv):
    """Shows a picture with a question; 1 for the right answer, 0 for every other, in any case of letters."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._question = drawn_question(task)
        self._is_open = False

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self._is_open = True
        return showing(self._question.url, self._question.text), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        if not self._is_open:
            raise AgentError("PictureQuestionEnv.step: the question was answered; call reset first.")
        self._is_open = False
        text = str(action.action if isinstance(action, Action) else action).strip()
        mark = marked_answer(text)
        answer = mark.text if isinstance(mark, Marked) else text
        success = " ".join(answer.lower().split()) == self._question.answer.lower()
        return "", float(success), True, {"success": success}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "PictureQuestionEnv":
        """The environment of a task made by `question_tasks`."""
        return PictureQuestionEnv(info)


def demonstrate(
    task: dict[str, Any], *, noise: float, rng: np.random.Generator, reads: bool = False
) -> list[tuple[Any, str]]:
    """The right answer; with probability `noise` any answer that a question of its kind may have.

    One that `reads` writes down the shapes by place before it answers, where shapes are asked for:
    "C....RR....D. <answer>2</answer>".
    """
    if not isinstance(reads, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"`reads` is {reads!r}; choose true or false.")
    question = drawn_question(task)
    answer = question.answer
    if rng.random() < noise:
        answer = question.choices[rng.integers(len(question.choices))]
    if reads and question.reading:
        answer = f"{question.reading} <answer>{answer}</answer>"
    return [(showing(question.url, question.text), answer)]


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Any answer of the kind, and for each kind always the same one."""
    questions = [drawn_question(task) for task in tasks]
    most = max((len(question.choices) for question in questions), default=0)
    constants = {
        f"always answer {place + 1}": [
            float(question.choices[place % len(question.choices)] == question.answer)
            for question in questions
        ]
        for place in range(most)
    }
    return {
        RANDOM: [1 / len(question.choices) for question in questions],
        **constants,
        OPTIMUM: [1.0] * len(questions),
    }


def identity(task: Mapping[str, Any]) -> str:
    """The picture, and what is asked of it."""
    question = drawn_question(task)
    return f"{hashlib.sha256(question.url.encode()).hexdigest()} {question.text}"


def _check(kind: str, split: str, number: Any, side: Any) -> None:
    if kind not in KINDS:
        raise ConfigError(f"There is no kind of picture question {kind!r}; there are {', '.join(KINDS)}.")
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; there are {', '.join(SPLITS)}.")
    if not isinstance(number, int) or number < 0:
        raise ConfigError(f"`seed` is {number!r}; pictures are counted from 0.")
    if not isinstance(side, int) or side not in _SIDES:
        raise ConfigError(f"`side` is {side!r}; choose {_SIDES[0]} to {_SIDES[-1]} pixels.")


WORLD = World(
    env_class=PictureQuestionEnv,
    tasks=question_tasks,
    demonstrate=demonstrate,
    expert_args=("reads",),
    draws=True,
    identity=identity,
    identity_draws=True,
    kind=lambda task: str(task["drawing"]),
    baselines=baselines,
)
