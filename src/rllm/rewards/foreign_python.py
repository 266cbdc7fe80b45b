"""Python that a model or a data set wrote, as a syntax tree; nothing of it is run."""

import ast
import threading
import warnings

from rllm.rewards.long_integers import with_short_literals

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""The errors of `foreign_tree`, for a text that is no Python, or too deep."""
_READING = threading.Lock()
"""A lock around reading: filters of warnings hold for all threads."""


def foreign_tree(source: str) -> ast.Module:
    """Read without warnings of what the text does, such as `1if`: they are for its author. Raises one of
    UNREADABLE."""
    with _READING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(with_short_literals(source))
