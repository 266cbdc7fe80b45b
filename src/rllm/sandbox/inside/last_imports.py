"""The start of the verifier's Python, as its `sitecustomize`: modules of the agent come last.

Without it a `json.py` in the working directory, or beside a script of the agent's, would be imported instead
of the library's. With it they are found where nothing else is; beside tests, helpers are found first.
"""

import importlib.machinery
import os
import sys


def _script_folder():
    """Where the script lies that was started; nothing for `-c`, `-m` and the like."""
    for word in sys.orig_argv[1:]:
        if word.endswith(".py"):
            return os.path.dirname(os.path.abspath(word))
    return None


class LastImports:
    """Finds modules in folders that are not on `sys.path`, so that no plugin is looked for there either."""

    def __init__(self, folders):
        self.folders = folders

    def find_spec(self, name, path=None, target=None):
        if path is None:
            return importlib.machinery.PathFinder.find_spec(name, self.folders, target)
        return None


def install():
    folder = _script_folder()
    if folder and f"{folder}/".startswith("/tests/"):
        sys.path.insert(0, folder)
    last = [each for each in os.environ.get("VERIFIER_LAST", "").split(":") if each]
    sys.meta_path.append(LastImports([*last, *([folder] if folder else []), os.getcwd()]))


install()
