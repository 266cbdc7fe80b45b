"""The files of the page, which come in the wheel."""

from functools import cache
from importlib import resources
from pathlib import Path


@cache
def static_names() -> dict[str, Path]:
    """The files of the page, by the name that they are asked for under."""
    root = Path(str(resources.files("rllm.view") / "static"))
    return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
