import asyncio
import sqlite3
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from rllm.errors import ConfigError, CountError
from rllm.gateway.ledger import Ledger
from rllm.gateway.ledger.file import open_for_writing
from rllm.types.wire import CallRecord, CallStatus

sys.path.insert(0, str(Path(__file__).parent))
from polling import eventually


def a_call(name: str, session: str = "lake", **fields: object) -> CallRecord:
    record = CallRecord(
        id=name,
        session=session,
        model="tiny",
        messages=[{"role": "user", "content": f"question {name}"}],
        response={"role": "assistant", "content": f"answer {name}"},
        prompt_ids=[1, 70_000, 3],
        completion_ids=[4, 5],
        logprobs=[-0.1, -2.5],
        policy_versions=[3, 3],
        usage={"prompt_tokens": 3, "completion_tokens": 2},
    )
    for field, value in fields.items():
        setattr(record, field, value)
    return record


def conversation(session: str, num_turns: int, *, answer: str = "right " * 40) -> list[CallRecord]:
    """Calls whose prompts and messages repeat all that was said before, as those of agents do."""
    messages = [{"role": "system", "content": "You walk over a frozen lake. " * 20}]
    ids = list(range(1000, 1300))
    calls: list[CallRecord] = []
    for turn in range(num_turns):
        messages = [*messages, {"role": "user", "content": f"observation {turn}: " + "SFFF " * 20}]
        ids = ids + [200_000 + turn] * 60
        record = a_call(f"{session}-{turn}", session, messages=messages, prompt_ids=ids)
        record.response = {"role": "assistant", "content": f"{turn} {answer}"}
        record.completion_ids = [turn] * 40
        record.logprobs = [-0.5] * 40
        record.policy_versions = [turn // 10] * 40
        record.tools = [{"type": "function", "function": {"name": "move", "description": "Moves. " * 200}}]
        calls.append(record)
        messages = [*messages, record.response]
        ids = ids + record.completion_ids
    return calls


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    with Ledger.open(tmp_path / "ledger") as ledger:
        yield ledger


async def test_a_call_is_read_back_as_it_was_recorded(ledger: Ledger) -> None:
    record = a_call(
        "chatcmpl-1", stream=True, first_token_s=0.25, error={"status": 502, "type": "server_error"}
    )
    await ledger.append([record])
    assert ledger.traces("lake") == [record]
    assert ledger.call("chatcmpl-1") == [record]


async def test_what_is_not_there_is_empty_and_no_error(ledger: Ledger) -> None:
    assert ledger.traces("nobody") == []
    assert ledger.call("chatcmpl-none") == []
    assert ledger.retry_of("nobody", "key") == []
    assert ledger.session_data("nobody") is None
    assert ledger.delete_session("nobody") == 0
    await ledger.append([])
    assert ledger.counts()["choices"] == 0


async def test_the_calls_of_a_session_come_in_the_order_in_which_they_were_recorded(ledger: Ledger) -> None:
    for number in range(30):
        await ledger.append([a_call(f"a{number}", "a"), a_call(f"b{number}", "b")])
    assert [record.id for record in ledger.traces("a")] == [f"a{number}" for number in range(30)]
    assert [record.id for record in ledger.traces("b")] == [f"b{number}" for number in range(30)]


async def test_all_choices_of_a_call_are_kept_in_their_order(ledger: Ledger) -> None:
    choices = [a_call("cmpl-1", choice=number, completion_ids=[number] * 2) for number in range(4)]
    await ledger.append(choices)
    assert ledger.call("cmpl-1") == choices
    assert ledger.counts()["recorded"] == 1
    assert ledger.counts()["choices"] == 4


@pytest.mark.parametrize(
    "name", ["a/b/../c", "", " ", "ünï 🧊", "x" * 1000, "nul\0byte", "half \ud83e", "' OR 1=1 --", "%"]
)
async def test_any_text_is_a_session_an_id_and_a_retry_key(ledger: Ledger, name: str) -> None:
    record = a_call(name, name, retry_key=name)
    await ledger.append([record, a_call("other", name + "x")])
    assert ledger.traces(name) == [record]
    assert ledger.call(name) == [record]
    assert ledger.retry_of(name, name) == ([record] if name else [])
    assert ledger.create_session(name, {"name": name})
    assert ledger.session_data(name) == {"name": name}
    assert ledger.delete_session(name) == 1
    assert ledger.counts()["choices"] == 1


async def test_a_long_conversation_is_read_back_whole_call_by_call(ledger: Ledger) -> None:
    calls = conversation("lake", 60)
    for record in calls:
        await ledger.append([record])
    assert ledger.traces("lake") == calls
    for number in (0, 1, 17, 59):
        assert ledger.call(f"lake-{number}") == [calls[number]]


async def test_a_conversation_takes_as_much_space_as_was_said_in_it(tmp_path: Path) -> None:
    sizes = []
    for num_turns in (50, 200):
        with Ledger.open(tmp_path / str(num_turns)) as ledger:
            for record in conversation("lake", num_turns):
                await ledger.append([record])
        sizes.append((tmp_path / str(num_turns) / "ledger.sqlite").stat().st_size)
    assert sizes[1] < 5 * sizes[0]
    assert sizes[1] / 200 < 2500  # the last prompt alone has 20,000 ids and 40 kB of messages


async def test_interleaved_conversations_of_a_session_share_what_each_has_said(ledger: Ledger) -> None:
    agents = [conversation("lake", 40, answer=f"agent {name} " * 30) for name in "abc"]
    for agent, calls in enumerate(agents):
        for record in calls:
            record.id += f"-{agent}"
            record.messages = [{"role": "system", "content": f"You are {agent}. " * 30}, *record.messages]
            record.prompt_ids = [agent] * 300 + record.prompt_ids
    said = [record for turn in zip(*agents, strict=True) for record in turn]
    for record in said:
        await ledger.append([record])
    assert ledger.traces("lake") == said
    assert ledger.call("lake-39-1") == [agents[1][39]]
    assert ledger.counts()["bytes"] / len(said) < 40_000


async def test_history_that_is_rewritten_forked_or_repeated_is_exact(ledger: Ledger) -> None:
    calls = conversation("lake", 12)
    short = calls[11]
    rewritten = a_call(
        "rewritten", messages=short.messages[:5] + short.messages[7:], prompt_ids=short.prompt_ids[:2]
    )
    rewritten.prompt_ids = [*short.prompt_ids[:700], 9, *short.prompt_ids[701:]]
    fork = a_call(
        "fork", messages=calls[4].messages, prompt_ids=calls[4].prompt_ids + calls[4].completion_ids[:7]
    )
    repeated = [
        a_call(f"again-{number}", messages=short.messages, prompt_ids=short.prompt_ids)
        for number in range(30)
    ]
    said = [*calls, rewritten, fork, *repeated, a_call("new")]
    for record in said:
        await ledger.append([record])
    assert ledger.traces("lake") == said
    assert ledger.call("again-29") == [repeated[29]]


async def test_prompts_of_the_completions_protocol_are_kept_as_text_or_ids(ledger: Ledger) -> None:
    story = "Once upon a time – " * 300
    said = [
        a_call("text", messages=[], prompt=story),
        a_call("more", messages=[], prompt=story + "ünd so weiter 🧊"),
        a_call("ids", messages=[], prompt=[5, 6, 2**40]),
        a_call("empty text", messages=[], prompt=""),
        a_call("no ids", messages=[], prompt=[]),
        a_call("none", prompt=None),
    ]
    for record in said:
        await ledger.append([record])
    assert ledger.traces("lake") == said


async def test_a_reopened_ledger_goes_on_where_it_ended(tmp_path: Path) -> None:
    calls = conversation("lake", 20)
    for start in (0, 5, 10, 15):
        with Ledger.open(tmp_path) as ledger:
            for record in calls[start : start + 5]:
                await ledger.append([record])
    with Ledger.open(tmp_path, read_only=True) as ledger:
        assert ledger.traces("lake") == calls
        assert ledger.counts()["recorded"] == 20


async def test_thousands_of_appends_at_once_share_their_commits(ledger: Ledger) -> None:
    assert ledger._writer is not None
    commits: list[int] = []
    commit = ledger._writer._commit
    ledger._writer._commit = lambda batch: commits.append(len(batch)) or commit(batch)  # type: ignore[method-assign]
    await asyncio.gather(
        *(ledger.append([a_call(f"c{number}", f"s{number % 50}")]) for number in range(3000))
    )
    assert ledger.counts()["recorded"] == 3000
    assert len({record.id for number in range(50) for record in ledger.traces(f"s{number}")}) == 3000
    assert len(commits) < 300


def test_several_threads_and_event_loops_append_at_once(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:

        async def session(name: str) -> None:
            for number in range(20):
                await ledger.append([a_call(f"{name}-{number}", name)])
                assert ledger.call(f"{name}-{number}")[0].session == name

        async def sessions(thread: int) -> None:
            await asyncio.gather(*(session(f"{thread}/{number}") for number in range(5)))

        threads = [threading.Thread(target=lambda n=n: asyncio.run(sessions(n))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in (f"{thread}/{number}" for thread in range(4) for number in range(5)):
            assert [record.id for record in ledger.traces(name)] == [
                f"{name}-{number}" for number in range(20)
            ]


async def test_the_retry_of_a_request_finds_its_whole_answer(ledger: Ledger) -> None:
    choices = [a_call("first", choice=number, retry_key="key") for number in range(2)]
    await ledger.append(choices)
    await ledger.append([a_call("elsewhere", "pond", retry_key="key")])
    await ledger.append([a_call("broken off", retry_key="other", status=CallStatus.PARTIAL)])
    assert ledger.retry_of("lake", "key") == choices
    assert ledger.retry_of("lake", "other") == []
    assert ledger.retry_of("lake", "") == []


async def test_one_request_never_becomes_two_samples(ledger: Ledger) -> None:
    await ledger.append([a_call("first", retry_key="key")])
    with pytest.raises(CountError, match=r"'second'.*'key'.*'lake'.*'first'"):
        await ledger.append([a_call("second", retry_key="key", choice=1), a_call("second", retry_key="key")])
    assert [record.id for record in ledger.traces("lake")] == ["first"]
    await ledger.append([a_call("failed", retry_key="key", status=CallStatus.ERROR)])
    await ledger.append([a_call("without key"), a_call("without key too")])
    assert ledger.counts()["ok"] == 3


async def test_a_refused_append_does_not_hinder_those_beside_it(ledger: Ledger) -> None:
    outcomes = await asyncio.gather(
        *(ledger.append([a_call(f"c{number}", retry_key=f"key {number % 50}")]) for number in range(100)),
        return_exceptions=True,
    )
    assert sum(outcome is None for outcome in outcomes) == 50
    assert sum(isinstance(outcome, CountError) for outcome in outcomes) == 50
    assert ledger.counts()["recorded"] == ledger.counts()["choices"] == 50
    assert sorted(record.retry_key for record in ledger.traces("lake")) == sorted(
        f"key {n}" for n in range(50)
    )


async def test_a_conversation_goes_on_after_a_refused_append(ledger: Ledger) -> None:
    calls = conversation("lake", 6)
    calls[0].retry_key = "key"
    await ledger.append([calls[0]])
    twin = conversation("lake", 1)[0]
    twin.retry_key = "key"
    with pytest.raises(CountError):
        await ledger.append([twin])
    for record in calls[1:]:
        await ledger.append([record])
    assert ledger.traces("lake") == calls


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_a_log_probability_that_is_no_number_is_refused(ledger: Ledger, value: float) -> None:
    with pytest.raises(ValueError, match=r"'bad'.*'lake'.*`logprobs\[1\]`.*finite"):
        await ledger.append([a_call("bad", logprobs=[-0.5, value])])
    await ledger.append([a_call("good")])
    assert [record.id for record in ledger.traces("lake")] == ["good"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"completion_ids": [2**64]}, "completion_ids"),
        ({"completion_ids": [1.5]}, "completion_ids"),
        ({"logprobs": ["-1"]}, "logprobs"),
        ({"policy_versions": [None]}, "policy_versions"),
        ({"prompt": [1.5]}, "prompt"),
        ({"sampling": {"stop": ("a",)}}, r"sampling\['stop'\].*tuple"),
        ({"messages": [{"role": "user", "content": float("nan")}]}, r"messages\['content'\].*nan"),
        ({"response": {1: "one"}}, "response.*key 1"),
        ({"tools": [{"type": {1, 2}}]}, "tools.*set"),
        ({"latency_s": float("nan")}, "latency_s"),
    ],
)
async def test_what_cannot_be_kept_exactly_is_refused_by_name(
    ledger: Ledger, fields: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=f"'bad'.*{named}"):
        await ledger.append([a_call("bad", **fields)])
    assert ledger.counts()["choices"] == 0


@pytest.mark.parametrize("value", [-0.1, -0.0, 0.0, -1e-300, -1e300, -0.10000000149011612, -5e-324, -7])
async def test_log_probabilities_come_back_bit_for_bit(ledger: Ledger, value: float) -> None:
    await ledger.append([a_call("c", logprobs=[-0.5, value])])
    (found,) = ledger.traces("lake")
    assert [each.hex() for each in found.logprobs] == [(-0.5).hex(), float(value).hex()]


async def test_a_session_keeps_the_data_that_it_was_created_with(ledger: Ledger) -> None:
    assert ledger.create_session("lake", {"seed": 7, "sampling": {"temperature": 0.6}})
    assert not ledger.create_session("lake", {"seed": 8})
    assert ledger.session_data("lake") == {"seed": 7, "sampling": {"temperature": 0.6}}
    await ledger.append([a_call("c", "pond")])
    assert ledger.session_data("pond") == {}
    assert ledger.create_session("pond", {"seed": 9})
    assert ledger.session_data("pond") == {"seed": 9}
    with pytest.raises(ValueError, match=r"'sea'.*data\['seed'\]"):
        ledger.create_session("sea", {"seed": float("nan")})
    assert ledger.counts()["sessions"] == 2


async def test_sessions_are_listed_page_by_page(ledger: Ledger) -> None:
    for number in range(25):
        ledger.create_session(f"s{number:02}", {"number": number})
    await ledger.append([a_call("a", "s07"), a_call("b", "s07")])
    pages = [ledger.sessions(limit=10)]
    while pages[-1]:
        pages.append(ledger.sessions(limit=10, after=pages[-1][-1]["id"]))
    assert [len(page) for page in pages] == [10, 10, 5, 0]
    listed = [session for page in pages for session in page]
    assert [session["data"]["number"] for session in listed] == list(range(25))
    assert [session["choices"] for session in listed] == [2 if number == 7 else 0 for number in range(25)]
    assert all(session["created_at"] > 1.7e9 for session in listed)
    with pytest.raises(ValueError, match="limit"):
        ledger.sessions(limit=0)


async def test_a_deleted_session_is_gone_and_its_name_is_free(ledger: Ledger) -> None:
    calls = conversation("lake", 5)
    ledger.create_session("lake", {"seed": 1})
    for record in [*calls, a_call("other", "pond", status=CallStatus.ERROR)]:
        await ledger.append([record])
    assert ledger.delete_session("lake") == 5
    assert ledger.traces("lake") == []
    assert ledger.call("lake-3") == []
    assert ledger.session_data("lake") is None
    counts = ledger.counts()
    counts.pop("bytes")
    assert counts == {"ok": 0, "partial": 0, "error": 1, "recorded": 1, "choices": 1, "sessions": 1}
    # The same conversation again: nothing of it may be taken over from calls that are gone.
    for record in calls:
        await ledger.append([record])
    assert ledger.traces("lake") == calls


async def test_calls_that_are_under_way_while_their_session_is_deleted_stay_whole(ledger: Ledger) -> None:
    calls = conversation("lake", 40)
    for record in calls[:10]:
        await ledger.append([record])

    async def go_on() -> None:
        await asyncio.gather(*(ledger.append([record]) for record in calls[10:]))

    await asyncio.gather(go_on(), asyncio.to_thread(ledger.delete_session, "lake"))
    found = ledger.traces("lake")
    assert found == [record for record in calls if record.id in {each.id for each in found}]
    assert ledger.counts()["choices"] == len(found)


async def test_a_session_deleted_in_the_commit_of_its_last_call_is_gone(ledger: Ledger) -> None:
    assert ledger._writer is not None
    go_on = threading.Event()
    calls = conversation("lake", 3)
    in_commit, waiting = threading.Event(), ledger._writer._queue
    busy = asyncio.ensure_future(
        asyncio.to_thread(ledger._writer.change, lambda _: (in_commit.set(), go_on.wait()))
    )
    await eventually(in_commit.is_set)
    append = asyncio.ensure_future(ledger.append(calls[:2]))
    await eventually(lambda: waiting.qsize() == 1)
    delete = asyncio.ensure_future(asyncio.to_thread(ledger.delete_session, "lake"))
    await eventually(lambda: waiting.qsize() == 2)
    go_on.set()
    await asyncio.gather(busy, append)
    assert await delete == 2
    await ledger.append(calls[2:])
    assert ledger.traces("lake") == calls[2:]


async def test_an_append_that_was_encoded_before_its_session_was_deleted_is_stored_whole(
    ledger: Ledger,
) -> None:
    assert ledger._writer is not None
    calls = conversation("lake", 3)
    await ledger.append(calls[:1])
    encoded = ledger._writer._encode(calls[1:])
    assert encoded[0][0].kept_prefix.parent is not None
    ledger.delete_session("lake")
    ledger._writer._encode = lambda records: encoded  # type: ignore[method-assign]
    await ledger.append(calls[1:])
    assert ledger.traces("lake") == calls[1:]


async def test_the_file_does_not_grow_when_sessions_come_and_go(ledger: Ledger) -> None:
    sizes = []
    for round in range(8):
        for record in conversation(f"s{round}", 30):
            await ledger.append([record])
        ledger.delete_session(f"s{round}")
        sizes.append(ledger.path.stat().st_size)
    assert sizes[-1] <= 1.2 * max(sizes[:3])


async def test_memory_stays_flat_over_many_calls(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        assert ledger._writer is not None
        ledger._writer.tips.limit_bytes = 1 << 18

        async def append(start: int, end: int) -> None:
            for first in range(start, end, 1000):
                some = range(first, first + 1000)
                await asyncio.gather(*(ledger.append([a_call(f"c{n}", f"s{n // 4}")]) for n in some))

        await append(0, 5_000)
        tracemalloc.start()
        await append(5_000, 8_000)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert ledger._writer.tips.num_bytes <= 1 << 18
        assert len(ledger._writer._session_rows) <= 8_000
        assert grown < 3_000_000  # less than the calls themselves take: 1.4 kB each
        assert ledger.counts()["choices"] == 8_000


async def test_counts_say_what_happened_to_each_call(ledger: Ledger) -> None:
    await ledger.append([a_call("a", choice=0), a_call("a", choice=1)])
    await ledger.append([a_call("b", status=CallStatus.PARTIAL)])
    await ledger.append([a_call("c", "pond", status=CallStatus.ERROR, error={"status": 500})])
    counts = ledger.counts()
    assert counts.pop("bytes") > 4096
    assert counts == {"ok": 1, "partial": 1, "error": 1, "recorded": 3, "choices": 4, "sessions": 2}


async def test_a_cancelled_append_leaves_the_others_alone(ledger: Ledger) -> None:
    tasks = [asyncio.ensure_future(ledger.append([a_call(f"c{number}")])) for number in range(20)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes].count(True) == 1
    assert {f"c{number}" for number in range(20) if number != 3} <= {
        each.id for each in ledger.traces("lake")
    }


async def test_close_waits_for_what_was_appended_and_refuses_what_comes_after(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    tasks = [asyncio.ensure_future(ledger.append([a_call(f"c{number}")])) for number in range(200)]
    await asyncio.sleep(0)
    ledger.close()
    ledger.close()
    await asyncio.gather(*tasks)
    with pytest.raises(RuntimeError, match="closed"):
        await ledger.append([a_call("late")])
    with pytest.raises(RuntimeError, match="closed"):
        ledger.traces("lake")
    with Ledger.open(tmp_path, read_only=True) as again:
        assert again.counts()["recorded"] == 200


async def test_a_ledger_opened_for_reading_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Ledger.open(tmp_path, read_only=True)
    with Ledger.open(tmp_path) as ledger:
        await ledger.append([a_call("c")])
    with Ledger.open(tmp_path, read_only=True) as ledger:
        assert [record.id for record in ledger.traces("lake")] == ["c"]
        with pytest.raises(ConfigError, match="for reading"):
            await ledger.append([a_call("d")])
        with pytest.raises(ConfigError, match="for reading"):
            ledger.delete_session("lake")


async def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(b"not a database at all " * 300)
    for read_only in (False, True):
        with pytest.raises(ConfigError, match=r"ledger\.sqlite is damaged.*--ledger"):
            Ledger.open(tmp_path, read_only=read_only)
    file.unlink()
    with Ledger.open(tmp_path) as ledger:  # and the lock was let go
        for record in conversation("lake", 30):
            await ledger.append([record])
    contents = bytearray(file.read_bytes())
    contents[8192:] = b"\x5a" * (len(contents) - 8192)
    file.write_bytes(contents)
    with Ledger.open(tmp_path, read_only=True) as ledger, pytest.raises(ConfigError, match="damaged"):
        ledger.traces("lake")


async def test_a_call_whose_bytes_were_changed_is_damage_and_no_answer(ledger: Ledger) -> None:
    await ledger.append([a_call("c")])
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("UPDATE calls SET tokens = x'ff00'")
    connection.close()
    with pytest.raises(ConfigError, match="damaged"):
        ledger.call("c")


def test_another_kind_of_file_is_left_alone(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="something else"):
            Ledger.open(tmp_path, read_only=read_only)


def test_a_ledger_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    Ledger.open(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="format 99"):
        Ledger.open(tmp_path)


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        Ledger.open(tmp_path / "taken")


def test_a_commit_returns_only_when_it_is_on_the_disk_itself(tmp_path: Path) -> None:
    with closing(open_for_writing(tmp_path / "ledger.sqlite")) as connection:
        (level,) = connection.execute("PRAGMA synchronous").fetchone()
    assert level == 2  # FULL: a crash of the machine loses no answered call, not only one of the process
