"""Tags and notes of whoever looks, by run: in RLLM_HOME/view/notes.json, because a run is only read.

{absolute path of the run: {"tags": ["best"], "note": "…"}}
"""

import json
import threading
from typing import Any

from rllm.errors import ConfigError
from rllm.files.atomic import StorageErrors, write_atomic
from rllm.files.home import rllm_home
from rllm.view.sources import Sources

MAX_TAGS, MAX_TAG_CHARS, MAX_NOTE_CHARS = 20, 40, 10_000
NO_NOTE: dict[str, Any] = {"tags": [], "note": ""}
_lock = threading.Lock()


def notes() -> dict[str, dict[str, Any]]:
    """By absolute path of the run."""
    path = rllm_home() / "view" / "notes.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}); mend it, or move it away.") from error


def keep_note(sources: Sources, value: Any) -> dict[str, Any]:
    """Keep `tags` and `note` of `run`; both empty forgets them. Raises ConfigError where it cannot."""
    fields = value if isinstance(value, dict) else {}
    run, tags, note = fields.get("run"), fields.get("tags"), fields.get("note")
    if not (isinstance(run, str) and isinstance(note, str) and isinstance(tags, list)):
        raise ConfigError("A note has `run`, a text; `tags`, a list of texts; and `note`, a text.")
    names = list(dict.fromkeys(str(each).strip() for each in tags if str(each).strip()))
    if (
        len(names) > MAX_TAGS
        or any(len(each) > MAX_TAG_CHARS for each in names)
        or len(note) > MAX_NOTE_CHARS
    ):
        raise ConfigError(
            f"A run has at most {MAX_TAGS} tags of {MAX_TAG_CHARS} characters, and a note of "
            f"{MAX_NOTE_CHARS:,}."
        )
    key, new_note = str(sources.run(run).path), {"tags": names, "note": note.strip()}
    path = rllm_home() / "view" / "notes.json"
    with _lock:
        every = notes() | {key: new_note}
        if new_note == NO_NOTE:
            del every[key]
        with StorageErrors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, json.dumps(every, indent=1) + "\n")
    return new_note
