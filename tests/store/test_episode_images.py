"""Images of episodes: each once in a store, by hash, and every message back to the letter."""

import base64
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.store.encoding import EncodedEpisode, EncodedEpisodes
from rllm.store.episodes import EpisodeStore
from rllm.store.migrations import LATEST
from rllm.types.episode import Episode, Step, Trajectory
from rllm.types.images import PATCH_IDS_FROM, patch_ids
from rllm.types.messages import ModelOutput

Conversation = Callable[..., Episode]

PICTURE, OTHER = bytes(range(256)) * 40, bytes(reversed(range(256))) * 40


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _episode(task_id: str, *urls: str, text: str = "What is it?") -> Episode:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    output = ModelOutput(
        text="x",
        content="x",
        prompt_ids=[1, *patch_ids(5, 3), 2],
        completion_ids=[3, 4],
        logprobs=[-1.0, -2.0],
        policy_versions=[0, 0],
    )
    step = Step.from_model_output(output, messages, reward=1.0)
    return Episode(task_id=task_id, task={"picture": urls[0]}, trajectories=[Trajectory(steps=[step])])


def _rows(path: Path, table: str) -> int:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    finally:
        connection.close()


def _as_format_1(path: Path) -> None:
    """What a store without images was before it could hold any."""
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE episode_images")
    connection.execute("DROP TABLE images")
    connection.execute("DROP TABLE token_numbers")
    connection.execute("PRAGMA user_version = 1")
    connection.close()


def test_rows_that_were_sent_bring_their_images_along(tmp_path: Path) -> None:
    episode, encoded = _episode("a", _url(PICTURE)), EncodedEpisodes()
    sent = EncodedEpisode.of(episode)
    assert sent.episode() == episode
    encoded.add(episode, sent)
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        store.save_episodes("train", 0, [episode], encoded)
        assert list(store.episodes("train")) == [episode]
    assert _rows(tmp_path / "store.sqlite", "images") == 1


def test_an_image_is_kept_once_and_messages_come_back_to_the_letter(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    episodes = [_episode(name, _url(PICTURE), _url(OTHER)) for name in "abcdefgh"]
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 1, episodes)
        assert list(store.episodes()) == episodes
        (first, *_) = store.episodes()
        assert first.trajectories[0].steps[0].prompt_ids == [1, *patch_ids(5, 3), 2]
    assert _rows(path, "images") == 2
    assert path.stat().st_size < 8 * len(PICTURE), "eight episodes with two images each"
    assert max(first.trajectories[0].steps[0].prompt_ids) >= PATCH_IDS_FROM


@pytest.mark.parametrize(
    "text",
    [
        f"rllm-image:{'0' * 64}:image/png",
        f'"rllm-image:{"0" * 64}:image/png"',
        _url(PICTURE),
        f'say "{_url(PICTURE)}" again',
        _url(PICTURE)[:-1] + "B",
        "data:image/png;base64," + "A" * 65,
        "data:image/png;base64," + "A" * 63 + "B==",
    ],
)
def test_texts_that_look_like_images_or_references_stay_as_they_are(tmp_path: Path, text: str) -> None:
    episodes = [_episode("a", _url(PICTURE), text=text), _episode("b", text, text=text)]
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        store.save_episodes("train", 1, episodes)
        assert list(store.episodes()) == episodes


def test_images_go_with_the_last_episode_that_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 1, [_episode("a", _url(PICTURE))])
        store.save_episodes("train", 2, [_episode("a", _url(PICTURE)), _episode("b", _url(OTHER))])
        store.rollback_to(2)
        assert _rows(path, "images") == 2
        store.save_episodes("train", 2, [_episode("b", _url(PICTURE))])
        assert _rows(path, "images") == 1
        store.rollback_to(0)
        assert _rows(path, "images") == 0
        store.save_episodes("before", 0, [_episode("a", _url(PICTURE))])
        store.forget("before")
        assert _rows(path, "images") == 0


def test_a_store_with_images_from_before_token_numbers_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    episode = _episode("a", _url(PICTURE))
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 1, [episode])
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE token_numbers")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with EpisodeStore.open(path, read_only=True) as reader:
        assert list(reader.episodes()) == [episode]
        assert reader.token_numbers(1) == {}


def test_a_store_from_before_images_is_read_as_it_is_and_converted_by_its_writer(
    tmp_path: Path, conversation: Conversation
) -> None:
    path = tmp_path / "store.sqlite"
    before, later = [conversation("a"), conversation("b")], _episode("c", _url(PICTURE))
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 1, before)
    _as_format_1(path)
    content = path.read_bytes()
    with EpisodeStore.open(path, read_only=True) as reader:
        assert list(reader.episodes()) == before
    assert path.read_bytes() == content, "a reader converts nothing"
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 2, [later])
        assert list(store.episodes()) == [*before, later]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (LATEST,)
    connection.close()


def test_a_reader_goes_on_while_a_writer_converts_the_store(
    tmp_path: Path, conversation: Conversation
) -> None:
    path = tmp_path / "store.sqlite"
    before, later = conversation("a"), _episode("c", _url(PICTURE))
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 1, [before])
    _as_format_1(path)
    with EpisodeStore.open(path, read_only=True) as reader:
        assert reader.count() == 1
        with EpisodeStore.open(path) as store:
            store.save_episodes("train", 2, [later])
            assert list(reader.episodes()) == [before, later]


def test_a_missing_image_is_a_damaged_store(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with EpisodeStore.open(path) as store:
        store.save_episodes("train", 1, [_episode("a", _url(PICTURE), _url(OTHER))])
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("DELETE FROM images WHERE rowid = 1")
    connection.close()
    with (
        EpisodeStore.open(path, read_only=True) as reader,
        pytest.raises(ConfigError, match=r"damaged.*image [0-9a-f]{64}"),
    ):
        list(reader.episodes())
