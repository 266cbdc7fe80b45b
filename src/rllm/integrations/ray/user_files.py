"""Files of the user's (`file.py:NAME`), which other nodes do not have: their text travels, and each worker
imports it under the name that it has in the driver.

user_files() ──► name, path and text of each ──► import_user_files(files) at a worker
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rllm.errors import ConfigError
from rllm.types.names import USER_MODULE


@dataclass(kw_only=True, slots=True, frozen=True)
class UserFile:
    """A module that was made from a file of the user's."""

    module: str
    path: str
    text: str


def user_files() -> list[UserFile]:
    """The user's modules that this process has imported, in the order of their import."""
    return [
        UserFile(module=name, path=module.__file__, text=Path(module.__file__).read_text())
        for name, module in list(sys.modules.items())
        if name.startswith(USER_MODULE) and module.__file__ is not None
    ]


def import_user_files(files: Sequence[UserFile]) -> None:
    """Raises ConfigError for a file that needs a module that is not here."""
    for each in files:
        if each.module in sys.modules:
            continue
        module = sys.modules[each.module] = ModuleType(each.module)
        module.__file__ = each.path
        try:
            exec(compile(each.text, each.path, "exec"), module.__dict__)
        except ImportError as error:
            del sys.modules[each.module]
            raise ConfigError(
                f"{each.path} needs `{error.name}`, which a node of the cluster does not have ({error}): "
                "install it on each node; of the files of yours, only those that are named travel."
            ) from error
