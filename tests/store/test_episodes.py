import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm.engine.failures import fail_episode
from rllm.errors import AgentError, ConfigError, StorageError
from rllm.store.encoding import EncodedEpisode, EncodedEpisodes, decode_episode, encode_episode
from rllm.store.episodes import EpisodeStore, connect_store
from rllm.store.migrations import LATEST
from rllm.types.episode import Action, Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import FinishReason, LogprobMeaning, ModelOutput, ToolCall
from rllm.types.prefix import Prefix
from rllm.types.task import Task

Conversation = Callable[..., Episode]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EpisodeStore]:
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        yield store


def _round_trip(episode: Episode) -> Episode:
    return decode_episode(*encode_episode(episode))


texts = st.text(max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
float32s = st.floats(width=32, allow_nan=False)
scalars = st.none() | st.booleans() | st.integers() | floats | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts | st.sampled_from(["__tuple__", "__pairs__"]), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=6,
)
infos = st.dictionaries(texts, values, max_size=3)
rows = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300), max_size=6)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": values}), max_size=4
)


@st.composite
def outputs(draw: st.DrawFn, response_ids: list[int], logprobs: list[float]) -> ModelOutput:
    same = draw(st.booleans())
    text = draw(texts)
    return ModelOutput(
        text=text,
        content=draw(st.sampled_from([text, ""])),
        reasoning=draw(texts),
        tool_calls=draw(st.lists(st.builds(ToolCall, name=texts, arguments=infos, id=texts), max_size=1)),
        prompt_ids=draw(rows),
        completion_ids=response_ids if same else draw(rows),
        logprobs=logprobs if same else [],
        logprob_meaning=draw(st.sampled_from(LogprobMeaning)),
        temperature=draw(st.floats(0, 2)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        latency_s=draw(st.floats(0, 9)),
    )


@st.composite
def steps(draw: st.DrawFn, before: Step | None) -> Step:
    response_ids = draw(rows)
    size = len(response_ids)
    logprobs = draw(st.just([]) | st.lists(float32s, min_size=size, max_size=size))
    grows = before is not None and draw(st.booleans())
    return Step(
        prompt_ids=(before.prompt_ids + before.response_ids if before and grows else []) + draw(rows),
        response_ids=response_ids,
        logprobs=logprobs,
        policy_versions=draw(
            st.just([]) | st.lists(st.integers(-1, 2**31 - 1), min_size=size, max_size=size)
        ),
        chat_completions=(list(before.chat_completions) if before and grows else []) + draw(messages),
        observation=draw(values),
        thought=draw(texts),
        action=draw(values.map(Action) | values),
        model_response=draw(texts),
        model_output=draw(st.none() | outputs(response_ids, logprobs)),
        reward=draw(floats),
        done=draw(st.booleans()),
        mc_return=draw(floats),
        advantage=draw(st.none() | floats | st.lists(floats, max_size=2)),
        policy_version=draw(st.none() | st.integers(0, 9)),
        usage=draw(st.dictionaries(texts, st.integers(), max_size=2)),
        timings=draw(st.dictionaries(texts, floats, max_size=2)),
        info=draw(infos),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    members: list[Step] = []
    for _ in range(draw(st.integers(0, 3))):
        members.append(draw(steps(members[-1] if members else None)))
    return Trajectory(
        name=draw(texts),
        task=draw(values),
        steps=members,
        reward=draw(st.none() | floats),
        signals=draw(st.dictionaries(texts, floats, max_size=2)),
        input=draw(values),
        output=draw(values),
        termination_reason=draw(st.sampled_from(TerminationReason)),
        outcome=draw(st.none() | st.sampled_from(Outcome)),
        info=draw(infos),
    )


episodes = st.builds(
    Episode,
    id=texts,
    task=values,
    task_id=texts,
    rollout_idx=st.integers(0, 99),
    trajectories=st.lists(trajectories(), max_size=2),
    is_correct=st.booleans(),
    termination_reason=st.sampled_from(TerminationReason),
    outcome=st.none() | st.sampled_from(Outcome),
    session_id=texts,
    artifacts=infos,
    metrics=st.dictionaries(texts, floats, max_size=2),
    info=infos,
)


@pytest.fixture(autouse=True)
def whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons by text are of every token, though a long row shows its ends alone."""
    monkeypatch.setattr("rllm.types.prefix._MAX_SHOWN", sys.maxsize)


@given(episode=episodes)
@settings(suppress_health_check=list(HealthCheck))
def test_any_episode_comes_back_as_it_was(episode: Episode) -> None:
    # repr tells 1, 1.0 and True apart, which == does not.
    assert repr(_round_trip(episode)) == repr(episode)


def test_saved_episodes_come_back_as_they_were(store: EpisodeStore, conversation: Conversation) -> None:
    saved = [conversation(f"lake-{task}", attempt) for task in range(3) for attempt in range(2)]
    store.save_episodes("train", 1, saved)
    assert list(store.episodes("train", 1)) == saved


def test_a_zero_keeps_its_sign_on_the_way_through_the_database(
    store: EpisodeStore, conversation: Conversation
) -> None:
    saved = conversation(num_steps=2)
    step = saved.trajectories[0].steps[0]
    step.reward, step.mc_return, step.timings = -0.0, -0.0, {"model_s": -0.0}
    store.save_episodes("train", 0, [saved])
    (restored,) = store.episodes("train", 0)
    assert repr(restored) == repr(saved)


def test_tokens_are_exact_and_logprobs_are_exact_to_float32(conversation: Conversation) -> None:
    episode = conversation(num_steps=1)
    step = episode.trajectories[0].steps[0]
    step.prompt_ids = [0, 255, 256, 65535, 65536, 2**32 - 1] * 300
    step.logprobs = [-1 / 3] * 30
    restored = _round_trip(episode).trajectories[0].steps[0]
    assert restored.prompt_ids == step.prompt_ids
    assert restored.logprobs == [float(np.float32(-1 / 3))] * 30


def test_a_rewritten_history_comes_back_exactly(conversation: Conversation) -> None:
    episode = conversation(num_steps=3)
    last = episode.trajectories[0].steps[2]
    last.prompt_ids = [*last.prompt_ids[:50], 7, *last.prompt_ids[51:]]
    last.chat_completions = [last.chat_completions[0], {"role": "user", "content": "summary"}]
    assert _round_trip(episode) == episode
    row = [1, 2, 3]
    views = [Step(prompt_ids=cast("list[int]", Prefix(row, length))) for length in (3, 1, 2)]
    views.append(Step(prompt_ids=cast("list[int]", Prefix(row)), response_ids=[4, 5]))
    views.append(Step(prompt_ids=cast("list[int]", Prefix(row).followed_by([4, 5, 6]))))
    episode = Episode(task_id="t", trajectories=[Trajectory(steps=views)])
    assert [each.num_prompt_ids_kept for each in encode_episode(episode)[1]] == [0, 1, 1, 2, 5]
    (trajectory,) = _round_trip(episode).trajectories
    assert [list(step.prompt_ids) for step in trajectory.steps] == [list(step.prompt_ids) for step in views]


def test_messages_that_are_equal_in_python_and_different_in_json_are_kept_apart() -> None:
    first, second = Step(chat_completions=[{"content": 1}]), Step(chat_completions=[{"content": True}])
    restored = _round_trip(Episode(trajectories=[Trajectory(steps=[first, second])]))
    assert restored.trajectories[0].steps[1].chat_completions[0]["content"] is True


def test_size_grows_with_the_length_of_an_episode_and_not_with_its_square(conversation: Conversation) -> None:
    def num_bytes(num_steps: int) -> int:
        row, step_rows = encode_episode(conversation(num_steps=num_steps))
        columns = [row.payload, *(column for step in step_rows for column in step)]
        return sum(len(column) for column in columns if isinstance(column, bytes))

    # Eight times the steps: eight times the bytes, or above thirty times if each step repeated its prompt.
    assert num_bytes(80) < 10 * num_bytes(10)


def test_what_python_programs_put_into_episodes_is_kept(conversation: Conversation) -> None:
    episode = conversation()
    episode.task = Task("lake-1", "go", metadata={"size": 4}, dataset_dir=Path("data"))
    episode.info = {"cells": {(0, 1): "H"}, "position": (1, 2), "path": Path("x"), 3: "three"}
    episode.trajectories[0].steps[0].action = Action((0, 1))
    assert _round_trip(episode) == episode


def test_numpy_numbers_become_python_numbers(conversation: Conversation) -> None:
    episode = conversation()
    step = episode.trajectories[0].steps[0]
    step.reward = np.float32(0.5)
    step.info = {"state": np.int64(3), "prob": np.float32(0.25), "win": np.bool_(True)}
    restored = _round_trip(episode).trajectories[0].steps[0]
    assert repr((restored.reward, restored.info)) == "(0.5, {'state': 3, 'prob': 0.25, 'win': True})"


def test_the_largest_integers_that_are_kept_come_back(
    store: EpisodeStore, conversation: Conversation
) -> None:
    """Beside a tuple, which plain JSON does not give back."""
    saved = conversation()
    step = saved.trajectories[0].steps[0]
    step.info = {"pair": (1, 2), "large": 2**14_000 - 1, "small": 1 - 2**14_000}
    store.save_episodes("train", 0, [saved])
    (restored,) = store.episodes("train", 0)
    assert restored.trajectories[0].steps[0].info == step.info
    step.info["large"] += 1
    with pytest.raises(AgentError, match=r"`info\['large'\]` has 14,001 bits"):
        store.save_episodes("train", 1, [saved])


def _set_info(step: Step, value: object) -> None:
    step.info = {"a": [value]}


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda step: _set_info(step, {1, 2}), r"`info\['a'\]\[0\]` is a set"),
        (lambda step: _set_info(step, np.zeros(2)), r"`info\['a'\]\[0\]` is a ndarray"),
        (lambda step: _set_info(step, float("nan")), r"`info\['a'\]\[0\]` is nan"),
        (lambda step: _set_info(step, step.info), "nested deeper than 100 levels"),
        (lambda step: setattr(step, "action", object()), "`action` is a object"),
        (lambda step: setattr(step, "chat_completions", [object()]), r"`chat_completions\[0\]` is a object"),
        (lambda step: setattr(step, "prompt_ids", [-1]), "`prompt_ids` spans -1 to -1"),
        (lambda step: setattr(step, "response_ids", [2**32]), "`response_ids` spans"),
        (lambda step: setattr(step, "prompt_ids", ["a"]), "`prompt_ids` holds something else"),
        (lambda step: setattr(step, "reward", float("inf")), "`reward` is inf"),
        (lambda step: setattr(step, "reward", None), "`reward` is None"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named_with_episode_step_and_field(
    store: EpisodeStore, conversation: Conversation, spoil: Callable[[Step], None], complaint: str
) -> None:
    whole, spoiled = conversation("lake-1"), conversation("lake-2")
    step = spoiled.trajectories[0].steps[1]
    spoil(step)
    if "nested" in complaint:
        step.info["a"] = [step.info]
    with pytest.raises(AgentError, match=f"Episode 'lake-2:0', step 1 of 'agent': .*{complaint}"):
        store.save_episodes("train", 1, [whole, spoiled])
    assert store.count() == 0


def test_tasks_are_read_in_the_order_of_their_numbers(store: EpisodeStore) -> None:
    names = ["test-10", "test-2", "test-0", "test-11", "other-1", "test-1", "9" * 5000]
    store.save_episodes("after", 0, [Episode(task_id=name) for name in names])
    ordered = ["9" * 5000, "other-1", "test-0", "test-1", "test-2", "test-10", "test-11"]
    assert [each.task_id for each in store.episodes("after")] == ordered
    assert [store.episode(row_id).task_id for row_id in store.row_ids("after")] == ordered
    assert [each.task_id for each in store.episodes("after", limit=3)] == ordered[:3]


def test_saving_a_step_again_replaces_it(store: EpisodeStore, conversation: Conversation) -> None:
    store.save_episodes("train", 1, [conversation("old", attempt) for attempt in range(3)])
    store.save_episodes("train", 2, [conversation("other")])
    store.save_episodes("train", 1, [conversation("new")])
    assert [episode.task_id for episode in store.episodes()] == ["new", "other"]
    assert store.count("train", 1) == 1


def test_rows_that_are_there_already_are_stored_unless_their_episode_failed_since(
    store: EpisodeStore, conversation: Conversation
) -> None:
    sent, failed, other = (conversation(f"task-{number}") for number in range(3))
    encoded = EncodedEpisodes()
    for each in (sent, failed):
        encoded.add(each, EncodedEpisode.of(each))
    sent.info["note"] = "nobody looks at it again"
    fail_episode(failed, ValueError("it has no log-probabilities"), "trainer")
    store.save_episodes("train", 0, [sent, failed, other], encoded)
    first, *others = store.episodes("train", 0)
    assert first.info == {}
    assert others == [failed, other]


def test_rows_go_with_their_episode(conversation: Conversation) -> None:
    encoded = EncodedEpisodes()
    kept = conversation("kept")
    for episode in (kept, conversation("dropped")):
        encoded.add(episode, EncodedEpisode.of(episode))
    del episode
    assert len(encoded) == 1


def test_reading_order_does_not_depend_on_the_order_of_arrival(
    store: EpisodeStore, conversation: Conversation
) -> None:
    some = [conversation("b", 1), conversation("a", 1), conversation("a", 0)]
    for phase, step in (("untrained", 0), ("train", 2), ("train", 1), ("after", 0)):
        store.save_episodes(phase, step, some)
    order = [(episode.task_id, episode.rollout_idx) for episode in store.episodes()]
    assert order == [("a", 0), ("a", 1), ("b", 1)] * 4
    assert store.phases() == ["untrained", "train", "after"]
    assert store.row_ids() == [1, 2, 3, 7, 8, 9, 4, 5, 6, 10, 11, 12]
    assert [store.episode(row_id) for row_id in store.row_ids()] == list(store.episodes())
    assert len(list(store.episodes("train", limit=4))) == 4


def test_rolling_back_forgets_later_training_steps_only(
    store: EpisodeStore, conversation: Conversation
) -> None:
    for phase in ("before", "train"):
        for step in (1, 2, 3):
            store.save_episodes(phase, step, [conversation()])
    store.rollback_to(1)
    assert (store.count("before"), store.count("train")) == (3, 1)
    store.forget("before")
    assert (store.count(), store.phases()) == (1, ["train"])
    for read_only in (True, False):
        with closing(connect_store(store.path, read_only=read_only)) as connection:
            assert connection.execute("PRAGMA busy_timeout").fetchone() == (30_000,)
            assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
    with sqlite3.connect(store.path) as connection:
        assert connection.execute("SELECT count(*) FROM steps").fetchone() == (3,)
    connection.close()


def test_outcomes_are_counted(store: EpisodeStore, conversation: Conversation) -> None:
    outcomes = [Outcome.SCORED, Outcome.SCORED, Outcome.INFRASTRUCTURE_FAILURE, None]
    some = [replace(conversation("a", index), outcome=outcome) for index, outcome in enumerate(outcomes)]
    store.save_episodes("train", 1, some)
    assert store.counts_by_outcome("train") == {"infrastructure_failure": 1, "scored": 2, "unjudged": 1}
    assert store.counts_by_outcome("after") == {}


def test_queries_find_what_an_episode_was_worth(store: EpisodeStore, conversation: Conversation) -> None:
    unpaid = conversation("b")
    unpaid.trajectories[0].reward = None
    store.save_episodes("train", 1, [conversation("a"), unpaid])
    with sqlite3.connect(store.path) as connection:
        found = connection.execute(
            "SELECT reward, num_steps, num_sampled_tokens, started_at, duration_s FROM episodes ORDER BY id"
        ).fetchall()
    connection.close()
    assert found == [(1.0, 3, 90, 1.5, 2.5), (None, 3, 90, 1.5, 2.5)]


def test_an_unknown_row_is_named(store: EpisodeStore) -> None:
    with pytest.raises(ConfigError, match=r"episode 7; .* 0 episodes"):
        store.episode(7)


def test_values_of_the_run_are_kept(store: EpisodeStore) -> None:
    store.set_value("sampler", {"epoch": 1})
    store.set_value("sampler", {"epoch": 2})
    assert store.value("sampler") == {"epoch": 2}
    assert store.value("absent", 5) == 5
    with pytest.raises(ValueError, match="JSON"):
        store.set_value("sampler", float("inf"))
    assert store.value("sampler") == {"epoch": 2}


def test_an_iteration_shows_the_store_as_it_was_when_it_began(
    store: EpisodeStore, conversation: Conversation
) -> None:
    store.save_episodes("train", 1, [conversation("a"), conversation("b")])
    reading = store.episodes()
    first = next(reading)
    store.save_episodes("train", 1, [conversation("c")])
    assert [first.task_id, *(episode.task_id for episode in reading)] == ["a", "b"]
    assert [episode.task_id for episode in store.episodes()] == ["c"]


def test_a_store_can_be_read_while_another_process_writes(tmp_path: Path, spawn) -> None:
    child = spawn(
        "import sys\n"
        "from pathlib import Path\n"
        "from rllm.store.episodes import EpisodeStore\n"
        "from rllm.types.episode import Episode\n"
        "store = EpisodeStore.open(Path(sys.argv[1]))\n"
        "for step in range(1000):\n"
        "    store.save_episodes('train', step, [Episode(task_id=str(each)) for each in range(4)])\n"
        "    print(step, flush=True)\n"
        "    if step >= 20 and sys.stdin.readline() != 'on\\n': break\n",
        tmp_path / "store.sqlite",
    )
    for expected in range(10):
        assert child.stdout.readline() == f"{expected}\n"
    with EpisodeStore.open(tmp_path / "store.sqlite", read_only=True) as reader:
        seen = len(list(reader.episodes()))
        assert seen >= 40
        assert seen % 4 == 0
        while child.stdout.readline() != "20\n":
            assert reader.count() % 4 == 0
        assert reader.count() == 84
        child.kill()
        child.wait()
        assert len(list(reader.episodes())) == 84
    with EpisodeStore.open(tmp_path / "store.sqlite") as writer:
        assert writer.count() == 84


def test_a_reader_changes_nothing(tmp_path: Path, conversation: Conversation) -> None:
    path = tmp_path / "store.sqlite"
    with EpisodeStore.open(path) as writer:
        writer.save_episodes("train", 1, [conversation()])
    with EpisodeStore.open(path, read_only=True) as reader:
        with pytest.raises(ConfigError, match="for reading"):
            reader.forget("train")
        with EpisodeStore.open(path) as writer:  # one that comes later is seen
            writer.save_episodes("train", 2, [conversation()])
            assert reader.count() == 2
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(ConfigError, match="does not exist"):
            next(reader.episodes())
        assert not path.exists()


def test_a_store_on_a_read_only_medium_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.sqlite"
    with EpisodeStore.open(path) as writer:
        writer.save_episodes("train", 1, [Episode(task_id="a")])
    monkeypatch.setattr("os.access", lambda *_: False)
    with EpisodeStore.open(path, read_only=True) as reader:
        assert [episode.task_id for episode in reader.episodes()] == ["a"]
    assert [each.name for each in tmp_path.iterdir()] == ["store.sqlite"]


def test_a_full_disk_keeps_what_was_saved_before(store: EpisodeStore, conversation: Conversation) -> None:
    store.save_episodes("train", 1, [conversation("a")])
    store._connection.execute("PRAGMA max_page_count = 20")
    with pytest.raises(StorageError, match=r"store\.sqlite .*full.*resumes"):
        store.save_episodes("train", 2, [conversation("b", attempt, 8) for attempt in range(40)])
    store._connection.execute("PRAGMA max_page_count = 100000")
    store.save_episodes("train", 3, [conversation("c")])
    assert [episode.task_id for episode in store.episodes()] == ["a", "c"]


def test_a_store_of_a_newer_rllm_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    EpisodeStore.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {LATEST + 1}")
    connection.close()
    for read_only in (True, False):
        with pytest.raises(ConfigError, match=f"format {LATEST + 1}.*Upgrade rllm"):
            EpisodeStore.open(path, read_only=read_only)


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        EpisodeStore.open(tmp_path / "store.sqlite", read_only=True)
    with pytest.raises(ConfigError, match="cannot be opened"):
        EpisodeStore.open(tmp_path / "absent" / "store.sqlite")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(ConfigError, match="no episodes"):
        EpisodeStore.open(tmp_path / "empty.sqlite", read_only=True)
    (tmp_path / "text.sqlite").write_text("no database " * 100)
    with pytest.raises(ConfigError, match=r"damaged.*file is not a database"):
        EpisodeStore.open(tmp_path / "text.sqlite")


def test_a_truncated_store_is_called_damaged(tmp_path: Path, conversation: Conversation) -> None:
    path = tmp_path / "store.sqlite"
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 1, [conversation("a", attempt, 8) for attempt in range(20)])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match="is damaged"), EpisodeStore.open(path, read_only=True) as reader:
        list(reader.episodes())


def test_a_damaged_payload_is_called_damaged(store: EpisodeStore, conversation: Conversation) -> None:
    store.save_episodes("train", 1, [conversation("a")])
    store._connection.execute("UPDATE episodes SET payload = substr(payload, 1, length(payload) / 2)")
    with pytest.raises(ConfigError, match="is damaged"):
        list(store.episodes())


def test_an_output_that_differs_from_its_step_keeps_its_own_fields(conversation: Conversation) -> None:
    episode = conversation(num_steps=1)
    output = episode.trajectories[0].steps[0].model_output
    assert output is not None
    output.text, output.content, output.logprobs = "raw", "", [0.1] * 30
    output.tool_calls = [ToolCall(name="go", arguments={"to": "right"})]
    assert _round_trip(episode).trajectories[0].steps[0].model_output == output


def test_the_payload_repeats_no_tokens(conversation: Conversation) -> None:
    import zlib

    row, _ = encode_episode(conversation())
    assert "completion_ids" not in json.dumps(json.loads(zlib.decompress(row.payload)))


def test_a_value_that_is_empty_or_one_comes_back_as_it_was(tmp_path: Path) -> None:
    steps = [Step(mc_return=1.0), Step(mc_return=0.0), Step(model_output=ModelOutput(text=""))]
    episode = Episode(id="t:0", task_id="t", trajectories=[Trajectory(steps=steps)])
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        with ThreadPoolExecutor(1) as other_thread:
            other_thread.submit(store.save_episodes, "train", 0, [episode]).result()
        (back,) = store.episodes("train", 0)
    assert back.trajectories[0].steps == steps
    output = back.trajectories[0].steps[2].model_output
    assert output is not None
    assert (output.text, output.usage, output.completion_ids) == ("", {}, [])
