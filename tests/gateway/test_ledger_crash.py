"""The ledger when processes die, the disk fills, or two want the same file. Real processes throughout."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from rllm.errors import ConfigError, RunInUseError, StorageError
from rllm.gateway.ledger import Ledger
from rllm.types.wire import CallRecord

CALLS = """
    import asyncio, os, sys
    from pathlib import Path
    from rllm.gateway.ledger import Ledger
    from rllm.types.wire import CallRecord

    def call(name, session):
        return CallRecord(
            id=name, session=session, retry_key=name, prompt_ids=list(range(200)), completion_ids=[1, 2],
            logprobs=[-0.5, -0.25], messages=[{"role": "user", "content": f"question {name} " * 20}],
            response={"role": "assistant", "content": f"answer {name} " * 200},
        )
"""


def child(program: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CALLS) + textwrap.dedent(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
    )


APPENDING = """
    directory, life = Path(sys.argv[1]), sys.argv[2]
    ledger = Ledger.open(directory)

    async def session(name):
        number = 0
        while True:
            record = call(f"{life}-{name}-{number}", f"session {name}")
            await ledger.append([record])
            os.write(1, (record.id + "\\n").encode())
            number += 1

    async def main():
        await asyncio.gather(*(session(name) for name in range(16)))

    asyncio.run(main())
"""


def test_kill_9_at_any_moment_loses_no_call_that_was_answered(tmp_path: Path) -> None:
    rng = random.Random(20)
    answered: list[str] = []
    for life in range(12):
        process = child(APPENDING, tmp_path, life)
        assert process.stdout is not None
        answered += [process.stdout.readline() for _ in range(rng.randrange(1, 60))]
        process.kill()
        rest = process.stdout.read()  # with what `readline` has read ahead, which `communicate` leaves out
        process.communicate()
        answered += [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    answered = [name.strip() for name in answered]
    assert len(answered) > 200
    with Ledger.open(tmp_path) as ledger:
        recorded = Counter(record.id for name in range(16) for record in ledger.traces(f"session {name}"))
        assert set(answered) <= recorded.keys()
        assert set(recorded.values()) == {1}
        # At most what was under way when each of them died was recorded without having been answered.
        assert len(recorded) - len(answered) <= 12 * 16
        assert ledger.counts()["recorded"] == ledger.counts()["choices"] == len(recorded)
        for name in rng.sample(answered, 50):
            (record,) = ledger.call(name)
            assert record.response["content"] == f"answer {name} " * 200
            assert record.prompt_ids == list(range(200))
            assert ledger.retry_of(record.session, name) == [record]


async def test_an_append_returns_only_when_its_commit_is_on_the_disk(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        assert ledger._writer is not None
        assert ledger._writer._connection is not None
        assert ledger._writer._connection.execute("PRAGMA synchronous").fetchone() == (
            2,
        )  # FULL: fsync a commit
        other = sqlite3.connect(ledger.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # nobody can commit now
        append = asyncio.ensure_future(ledger.append([CallRecord(id="c", session="lake")]))
        await asyncio.sleep(0.2)
        assert not append.done()
        other.execute("ROLLBACK")
        await append
        assert other.execute("SELECT id FROM calls").fetchall() == [(b"c",)]
        other.close()


def test_the_file_is_sound_after_a_kill(tmp_path: Path) -> None:
    process = child(APPENDING, tmp_path, 0)
    assert process.stdout is not None
    for _ in range(100):
        process.stdout.readline()
    process.kill()
    process.communicate()
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    with Ledger.open(tmp_path):
        process = child("Ledger.open(Path(sys.argv[1]))", tmp_path)
        _, said = process.communicate()
        assert process.returncode != 0
        assert (
            f"RunInUseError: {tmp_path / 'ledger.sqlite'} is being written by process {os.getpid()};" in said
        )
        with pytest.raises(RunInUseError, match=str(os.getpid())):
            Ledger.open(tmp_path)
    Ledger.open(tmp_path).close()


async def test_another_process_reads_while_this_one_writes(tmp_path: Path) -> None:
    reading = """
        ledger = Ledger.open(Path(sys.argv[1]), read_only=True)
        for line in sys.stdin:
            name = line.strip()
            found = len(ledger.call(name)), ledger.counts()["recorded"], len(ledger.traces("lake"))
            print(name, *found, flush=True)
    """
    with Ledger.open(tmp_path) as ledger:
        await ledger.append([CallRecord(id="first", session="lake")])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", textwrap.dedent(CALLS) + textwrap.dedent(reading), str(tmp_path)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(2, 50):
            await ledger.append([CallRecord(id=f"c{number}", session="lake")])
            process.stdin.write(f"c{number}\n".encode())
            assert await process.stdout.readline() == f"c{number} 1 {number} {number}\n".encode()
        process.stdin.close()
        await process.wait()


async def test_a_reader_half_way_through_does_not_hold_up_the_writer(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger, Ledger.open(tmp_path, read_only=True) as reader:
        await ledger.append([CallRecord(id="before", session="lake")])
        with reader._reading() as connection:
            assert connection.execute("SELECT count(*) FROM calls").fetchone() == (1,)
            for number in range(200):
                await ledger.append([CallRecord(id=f"c{number}", session="lake")])
            assert connection.execute("SELECT count(*) FROM calls").fetchone() == (1,)
        assert len(reader.traces("lake")) == 201


def test_a_full_disk_refuses_every_waiting_append_and_later_ones_work_again(tmp_path: Path) -> None:
    filling = """
        import resource
        from rllm.errors import StorageError

        async def main():
            ledger = Ledger.open(Path(sys.argv[1]))
            await ledger.append([call("first", "lake")])
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
            waiting = [ledger.append([call(f"w{number}", f"lake {number % 7}")]) for number in range(2000)]
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            refused = [outcome for outcome in outcomes if outcome is not None]
            assert len(refused) > 1000, len(refused)
            assert all(type(outcome) is StorageError for outcome in refused), refused[:3]
            kept = [f"w{number}" for number, outcome in enumerate(outcomes) if outcome is None]
            try:
                ledger.create_session("pond", {"text": "x" * 200_000})
            except StorageError as error:
                print(error)
            assert len(ledger.call("first")) == 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            await asyncio.gather(*(ledger.append([call(f"later{n}", "lake")]) for n in range(100)))
            for name in ["first", *kept, *(f"later{n}" for n in range(100))]:
                assert ledger.call(name) == [call(name, ledger.call(name)[0].session)], name
            assert ledger.counts()["recorded"] == 101 + len(kept)
            ledger.close()
            print("done")

        asyncio.run(main())
    """
    said, failed = child(filling, tmp_path).communicate()
    assert failed == ""
    assert "ledger.sqlite" in said
    assert "free space" in said
    assert said.endswith("done\n")


async def test_one_append_that_the_disk_refuses_does_not_end_the_ledger(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        await ledger.append([CallRecord(id="first", session="lake", prompt_ids=[1, 2, 3])])
        assert ledger._writer is not None
        connection = ledger._writer._connection
        assert connection is not None
        connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(StorageError, match="full"):
            await ledger.append([CallRecord(id="large", session="lake", prompt_ids=list(range(100_000)))])
        following = CallRecord(id="second", session="lake", prompt_ids=[1, 2, 3, 4])
        await ledger.append([following])
        assert ledger.call("large") == []
        assert ledger.traces("lake")[1] == following


def test_a_place_where_nothing_can_be_written_is_a_storage_error() -> None:
    with pytest.raises((StorageError, ConfigError), match=r"/proc.*written"):
        Ledger.open(Path("/proc/rllm-ledger"))


def test_a_forked_child_cannot_write_and_does_not_hang(tmp_path: Path) -> None:
    forking = """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        ledger = Ledger.open(Path(sys.argv[1]))
        asyncio.run(ledger.append([call("parent", "lake")]))
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(ledger.append([call("child", "lake")]))
            except RuntimeError as error:
                os._exit(7 if "a fork of it" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        asyncio.run(ledger.append([call("parent again", "lake")]))
        print([record.id for record in ledger.traces("lake")])
        ledger.close()
    """
    said, failed = child(forking, tmp_path).communicate()
    assert failed == ""
    assert said == "['parent', 'parent again']\n"


def test_a_program_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    forgetting = """
        ledger = Ledger.open(Path(sys.argv[1]))
        asyncio.run(ledger.append([call("kept", "lake")]))
    """
    process = child(forgetting, tmp_path)
    process.communicate(timeout=30)
    assert process.returncode == 0
    with Ledger.open(tmp_path) as ledger:
        assert len(ledger.call("kept")) == 1
