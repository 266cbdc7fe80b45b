"""Texts of a run's tokens, by its own tokenizer; each is loaded once for a process."""

from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

from rllm.errors import MissingExtraError, ModelDirectoryError
from rllm.store.run_directory import RunDirectory

TokenText = Callable[[int], str]


def token_texts(run: RunDirectory) -> tuple[TokenText, str]:
    """Id -> text, and a remark where only the numbers of tokens can be shown."""
    places = [
        run.model_path,
        run.path / "initial_model",
        Path(run.config().get("model", {}).get("path", "")),
    ]
    place = next((each for each in places if (each / "tokenizer_config.json").is_file()), None)
    if place is None:
        return (
            _by_number,
            "This run has no tokenizer (model/ or initial_model/), so tokens are shown by number.",
        )
    try:
        return _texts_of(place.absolute(), (place / "tokenizer_config.json").stat().st_mtime_ns), ""
    except (MissingExtraError, ModelDirectoryError) as error:
        return _by_number, f"Tokens are shown by number: {error}"


@lru_cache(maxsize=4)
def _texts_of(place: Path, changed_at: int) -> TokenText:
    from rllm.models.tokenizer import token_text_of

    return cache(token_text_of(place))


def _by_number(token: int) -> str:
    return f"#{token}"
