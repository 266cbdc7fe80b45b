"""The engine step by step: who gets a slot, who has to go, and what is counted."""

from typing import Any

import pytest
import torch

from rllm.errors import InferenceError
from rllm.inference.local import cache as cache_module
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.requests import Holder, Request
from rllm.models.directory import LoadedModel
from rllm.types.messages import FinishReason, SamplingParams

ROOM = 128
"""What one conversation of the longest context takes, with shelves of 32, 64 and 128 tokens."""


DEFAULTS = {"max_prefill_tokens": 8192, "cache_tokens": 0, "num_drafts": 0, "lockstep": False}


class SteppedEngine(LocalEngine):
    """Has no thread: a test makes each step."""

    def _run(self) -> None: ...

    def _require_running(self) -> None: ...

    def step(self) -> bool:
        """One step, where there is anything to do."""
        with self._condition:
            if not self._has_work():
                return False
            self._take_in()
        with torch.inference_mode():
            if self.lockstep and self._outside > 0:
                self._drop_cancelled()
            else:
                self._step()
        return True

    def run(self) -> int:
        """Steps until nothing is left to do; their number."""
        num_steps = 0
        while self.step():
            num_steps += 1
            assert num_steps < 1000
        return num_steps


class Talk:
    """A conversation, or a single call."""

    def __init__(self, engine: SteppedEngine, number: int, *, one_shot: bool = False) -> None:
        self.engine, self.number = engine, number
        self.holder: Holder = engine.open(one_shot=one_shot)
        self.answers: list[Request] = []

    def ask(self, prompt_ids: list[int], max_tokens: int = 1, **fields: Any) -> Request:
        request = Request(
            order=("talk", self.number),
            prompt_ids=prompt_ids,
            sampling=SamplingParams(max_tokens=max_tokens, seed=self.number),
            end_token_ids=frozenset(),
            deliver=self.answers.append,
            holder=self.holder,
            **fields,
        )
        self.engine.submit(request)
        return request

    @property
    def has_slot(self) -> bool:
        return self.holder.slot is not None


@pytest.fixture(autouse=True)
def small_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "FIRST_SHELF", 32)


def engine_of(model: LoadedModel, **options: Any) -> SteppedEngine:
    return SteppedEngine(
        model.model,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_positions=model.max_positions,
        **{"num_slots": 2, "max_context": ROOM, **DEFAULTS, **options},
    )


def ids(length: int, first: int = 5) -> list[int]:
    return [first + place % 200 for place in range(length)]


def test_the_conversation_that_is_idle_for_longest_gives_its_slot(endless: LoadedModel) -> None:
    engine = engine_of(endless)
    first, second, third = (Talk(engine, number) for number in range(3))
    for talk in (second, first):
        talk.ask(ids(4))
        engine.run()
    third.ask(ids(4))
    engine.run()
    assert [talk.has_slot for talk in (first, second, third)] == [True, False, True]
    first.ask(ids(9), max_tokens=5)
    engine.step()
    second.ask(ids(9))
    engine.step()
    assert [talk.has_slot for talk in (first, second, third)] == [True, True, False], "one is at work"
    engine.run()
    assert [len(talk.answers) for talk in (first, second, third)] == [2, 2, 1]


def test_where_all_slots_are_at_work_who_comes_waits_in_order(endless: LoadedModel) -> None:
    engine = engine_of(endless)
    talks = [Talk(engine, number) for number in range(5)]
    for number in (3, 1, 4, 0, 2):
        talks[number].ask(ids(4), max_tokens=3)
    engine.step()
    assert [talk.has_slot for talk in talks] == [True, True, False, False, False]
    assert engine.num_in_flight == 5
    assert engine.run() > 3
    assert [len(talk.answers) for talk in talks] == [1] * 5
    finished = sorted(talks, key=lambda talk: talk.answers[0].finished_at)
    assert [talk.number // 2 for talk in finished] == [0, 0, 1, 1, 2]
    counts = engine.counts
    assert (counts.accepted, counts.finished, counts.cancelled, counts.failed) == (5, 5, 0, 0)
    assert (counts.prompt_tokens, counts.sampled_tokens) == (20, 15)
    assert engine.num_in_flight == 0


def test_a_step_reads_as_much_of_new_prompts_as_it_may(endless: LoadedModel) -> None:
    engine = engine_of(endless, num_slots=8, max_prefill_tokens=10)
    talks = [Talk(engine, number) for number in range(4)]
    for talk in talks:
        talk.ask(ids(6, first=5 + 20 * talk.number))
    began = [0, 0, 0, 0]
    for step in (1, 2, 3):
        engine.step()
        began = [began[number] or step * bool(talk.has_slot) for number, talk in enumerate(talks)]
    assert began == [1, 1, 2, 2]
    assert [len(talk.answers) for talk in talks] == [1] * 4
    assert not engine.step()


def test_prompts_that_are_known_are_many_in_a_step_and_each_counts_for_one(endless: LoadedModel) -> None:
    engine = engine_of(endless, num_slots=8, max_prefill_tokens=3)
    talks = [Talk(engine, number) for number in range(5)]
    for talk in talks:
        talk.ask([7])
    engine.step()
    assert [talk.has_slot for talk in talks] == [True, True, True, False, False]
    engine.run()
    for talk in talks:
        talk.ask([7])
    engine.step()
    assert [len(talk.answers) for talk in talks] == [2, 2, 2, 1, 1]


def test_who_finds_no_slot_holds_back_those_without_one_and_nobody_else(endless: LoadedModel) -> None:
    engine = engine_of(endless, num_slots=2)
    at_work, with_slot = Talk(engine, 0), Talk(engine, 9)
    with_slot.ask(ids(4))
    engine.run()
    at_work.ask(ids(4), max_tokens=50)
    engine.step()
    others = [Talk(engine, number) for number in (1, 2)]
    with_slot.ask(ids(5))
    for talk in others:
        talk.ask(ids(4))
    engine.step()
    assert [len(talk.answers) for talk in (with_slot, *others)] == [2, 0, 0]
    engine.step()
    assert [talk.has_slot for talk in (with_slot, *others)] == [False, True, False], "idle now"
    engine.run()
    assert [len(talk.answers) for talk in (at_work, *others)] == [1, 1, 1]


def test_where_room_ends_the_last_goes_back_and_goes_on_later(endless: LoadedModel) -> None:
    """Each of three answers grows beyond a slot of 64 tokens, and there is room for two larger ones."""
    engine = engine_of(endless, num_slots=3, cache_tokens=2 * ROOM)
    talks = [Talk(engine, number) for number in range(3)]
    requests = [talk.ask(ids(50, first=5 + talk.number), max_tokens=20) for talk in talks]
    lost: list[int] = []
    while engine.step():
        lost += [talk.number for talk in talks if not talk.answers and not talk.has_slot]
    assert {*lost} == {2}, "those that came first keep theirs"
    alone = engine_of(endless, num_slots=1)
    for number, request in enumerate(requests):
        expected = Talk(alone, number).ask(ids(50, first=5 + number), max_tokens=20)
        alone.run()
        assert request.completion_ids == expected.completion_ids
        assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert request.policy_versions == [0] * 20
    assert engine.counts.prompt_tokens == 150, "what is read once more counts once"
    assert engine.counts.sampled_tokens == 60


def test_where_nobody_is_at_work_the_last_that_waits_gives_its_place(endless: LoadedModel) -> None:
    """Three conversations hold what they have read; the next turns of all find no room."""
    engine = engine_of(endless, num_slots=3, cache_tokens=ROOM)
    talks = [Talk(engine, number) for number in range(3)]
    for talk in talks:
        talk.ask(ids(20, first=5 + talk.number))
        engine.run()
    assert all(talk.has_slot for talk in talks)
    for talk in talks:
        talk.ask(ids(60, first=5 + talk.number), max_tokens=4)
    engine.step()
    assert [talk.has_slot for talk in talks] == [True, True, False]
    engine.run()
    assert [len(talk.answers) for talk in talks] == [2] * 3
    assert all(talk.answers[-1].finish_reason is FinishReason.LENGTH for talk in talks)


def test_a_score_is_read_behind_what_is_known_and_lasts_one_step(endless: LoadedModel) -> None:
    engine = engine_of(endless)
    talk = Talk(engine, 0)
    talk.ask(ids(20))
    engine.run()
    for start in (19, 5, 1):
        request = talk.ask(ids(20), score_from=start)
        assert engine.run() == 1
        assert (len(request.logprobs), request.policy_versions) == (20 - start, [0] * (20 - start))
        assert request.finish_reason is FinishReason.STOP
        whole = talk.ask(ids(20), score_from=1)
        engine.run()
        assert request.logprobs == pytest.approx(whole.logprobs[start - 1 :], abs=1e-5)
    full = Talk(engine, 1).ask(ids(ROOM), score_from=ROOM - 1)
    engine.run()
    assert len(full.logprobs) == 1, "no token follows, so a whole context fits"


def test_cancelling_reaches_who_waits_who_is_read_and_who_is_answered(endless: LoadedModel) -> None:
    engine = engine_of(endless, num_slots=2, max_prefill_tokens=30)
    answered, read, waiting, last = (Talk(engine, number) for number in range(4))
    first = answered.ask(ids(4), max_tokens=50)
    engine.step()
    second = read.ask(ids(100), max_tokens=50)
    third, fourth = waiting.ask(ids(4)), last.ask(ids(4))
    engine.step()
    assert [talk.has_slot for talk in (answered, read, waiting, last)] == [True, True, False, False]
    for request in (first, second, third):
        engine.cancel(request)
    engine.step()
    for talk, request, num_sampled in ((answered, first, 2), (read, second, 0), (waiting, third, 0)):
        assert talk.answers == [request]
        assert request.finish_reason is FinishReason.CANCELLED
        assert len(request.completion_ids) == num_sampled
    engine.run()
    assert last.answers == [fourth]
    assert fourth.finish_reason is FinishReason.LENGTH
    counts = engine.counts
    assert (counts.accepted, counts.finished, counts.cancelled, counts.failed) == (4, 1, 3, 0)
    engine.cancel(first)
    assert not engine.step(), "it is over"


def test_who_is_cancelled_while_its_prompt_is_read_takes_nobody_along_who_asked_the_same(
    endless: LoadedModel,
) -> None:
    engine = engine_of(endless, max_prefill_tokens=64)
    talks = [Talk(engine, number) for number in range(2)]
    for talk in talks:
        talk.ask(ids(100))
    engine.run()
    first, second = (talk.ask(ids(90, first=250)) for talk in talks)  # nothing of it was read before
    engine.step()
    engine.cancel(first)
    engine.run()
    assert (first.finish_reason, second.finish_reason) == (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert len(second.completion_ids) == 1


def test_a_failure_is_told_to_all_that_are_there(endless: LoadedModel) -> None:
    engine = engine_of(endless, num_slots=2)
    talks = [Talk(engine, number) for number in range(4)]
    for talk in talks[:3]:
        talk.ask(ids(4), max_tokens=9)
    engine.step()
    talks[3].ask(ids(4))
    cause = RuntimeError("out of memory")
    engine._fail_all(cause)
    for talk in talks:
        (request,) = talk.answers
        assert isinstance(request.error, InferenceError)
        assert request.error.__cause__ is cause
    assert (engine.counts.failed, engine.num_in_flight) == (4, 0)
    assert not engine.step()
    failure = InferenceError("closed")
    talks[0].ask(ids(4))
    engine._fail_all(failure)
    assert talks[0].answers[-1].error is failure
    again = talks[0].ask(ids(4))
    engine.run()
    assert again.error is None


def test_under_lockstep_nothing_moves_while_a_conversation_is_elsewhere(endless: LoadedModel) -> None:
    engine = engine_of(endless, lockstep=True)
    first, second = Talk(engine, 0), Talk(engine, 1)
    given_up = first.ask(ids(4))
    assert not engine.step()
    engine.cancel(given_up)
    assert engine.step()
    assert given_up.finish_reason is FinishReason.CANCELLED
    assert engine.counts.steps == 0
    first.ask(ids(4))
    second.ask(ids(4))
    assert engine.step()
    assert (len(first.answers), len(second.answers)) == (2, 1)
    first.ask(ids(4))
    assert not engine.step()
    engine.close_session(second.holder)
    engine.close_session(second.holder)
    assert engine.step()
    assert len(first.answers) == 3


def test_who_closes_gives_its_slot_back_once_its_answer_is_over(endless: LoadedModel) -> None:
    engine = engine_of(endless)
    talk, other = Talk(engine, 0), Talk(engine, 1)
    request = talk.ask(ids(4), max_tokens=50)
    engine.step()
    engine.close_session(talk.holder)
    with pytest.raises(InferenceError, match="closed"):
        talk.ask(ids(4))
    engine.step()
    assert request.finish_reason is FinishReason.CANCELLED
    other.ask(ids(4))
    with pytest.raises(InferenceError, match="one request"):
        other.ask(ids(4))
    engine.run()
    assert not talk.has_slot
    assert engine._cache.num_free == 1


def test_gaps_are_closed_before_anybody_loses_its_place(endless: LoadedModel) -> None:
    engine = engine_of(endless, num_slots=4, cache_tokens=ROOM)
    talks = [Talk(engine, number) for number in range(4)]
    for talk in talks:
        talk.ask(ids(4, first=5 + talk.number))
    engine.run()
    for number in (0, 2):
        engine.close_session(talks[number].holder)
    longer = Talk(engine, 4)
    longer.ask(ids(50))
    engine.run()
    assert [talk.has_slot for talk in (*talks, longer)] == [False, True, False, True, True]
    for number in (1, 3):  # what they had read is known
        talks[number].ask(ids(6, first=5 + number))
    engine.run()
    assert [talks[number].answers[-1].cached_tokens for number in (1, 3)] == [4, 4]


def test_gaps_are_closed_for_one_that_grows_as_well(endless: LoadedModel) -> None:
    """Slots of 32, 32 and 32 tokens become 64, 32, 32 and then 64, 64, 32, where there is room for 192."""
    engine = engine_of(endless, num_slots=3, cache_tokens=192)
    talks = [Talk(engine, number) for number in range(3)]
    for talk in talks:
        talk.ask(ids(4, first=5 + talk.number))
    engine.run()
    for talk in talks[:2]:
        talk.ask(ids(50, first=5 + talk.number))
        engine.run()
        assert all(each.has_slot for each in talks)
        assert talk.answers[-1].cached_tokens == 4
