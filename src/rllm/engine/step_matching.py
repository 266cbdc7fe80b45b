"""Which call each step is, where the steps carry no completion id: by content, never by position alone.

    steps, calls ──► a step that fits one call is that call
                     a step that fits calls equal in prompt, answer and ids is the first of them
                     a step that fits calls that differ waits until other steps have taken all but one kind

Two solvers that ask the same and get the same answer are ordinary in a policy that has become sure of itself.
Their calls are interchangeable, so the order decides; where calls differ, it never does.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import TypeVar

StepT = TypeVar("StepT")
CallT = TypeVar("CallT")


def match_by_content(
    steps: Sequence[StepT],
    calls: Sequence[CallT],
    *,
    answer_of: Callable[[StepT], str | None],
    answers_of: Callable[[CallT], Iterable[str]],
    fits: Callable[[StepT, CallT], bool],
    identity_of: Callable[[CallT], Hashable],
) -> tuple[list[tuple[StepT, CallT]], list[tuple[StepT, list[CallT]]]]:
    """Pairs, and the steps that are left, each with the calls that it fits and no other step is.

    `answer_of` a step is the text that it gives as its answer (None where it gives none), one of `answers_of`
    the calls that it may fit; `identity_of` two calls is equal where nothing tells them apart.
    """
    by_answer: defaultdict[str, list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        for answer in set(answers_of(call)):
            by_answer[answer].append(place)
    fitting: list[list[int]] = []
    for step in steps:
        answer = answer_of(step)
        # By answer first: comparing every step's messages with every call's is quadratic.
        places = range(len(calls)) if answer is None else by_answer.get(answer, [])
        fitting.append([place for place in places if fits(step, calls[place])])
    identities = cache(lambda place: identity_of(calls[place]))
    step_of_call: dict[int, int] = {}
    """Place of a call: place of the step that it is."""
    left = list(range(len(steps)))
    while left:
        num_before = len(step_of_call)
        still_left: list[int] = []
        for number in left:
            fitting[number] = free = [place for place in fitting[number] if place not in step_of_call]
            if len(free) == 1 or len({identities(place) for place in free}) == 1:
                step_of_call[free[0]] = number
            else:
                still_left.append(number)
        left = still_left
        if len(step_of_call) == num_before:
            break
    pairs = [(steps[number], calls[place]) for place, number in step_of_call.items()]
    return pairs, [(steps[number], [calls[place] for place in fitting[number]]) for number in left]
