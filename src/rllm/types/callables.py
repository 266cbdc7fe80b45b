"""Functions that users write: what they are and how they can be called, found out before any work begins."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

from rllm.errors import ConfigError

T = TypeVar("T")


def is_async(function: Any) -> bool:
    """Whether calling it gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose `__call__` is async
    )


def name_of(something: Any) -> str:
    return getattr(something, "__name__", "") or type(something).__name__


def reduced(wrapper: Any, function: Any, protocol: SupportsIndex) -> Any:
    """The pickled form of an object that a decorator made of `function`: its name, as for the function
    itself; its contents where its module has no such name, or is a program's own `__main__`."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    is_named = module is not None and module.__name__ != "__main__" and getattr(module, name, None) is wrapper
    return name if is_named else object.__reduce_ex__(wrapper, protocol)


def made_from(user_class: type) -> Any:
    """An instance of a class that was given in its place."""
    try:
        return user_class()
    except TypeError as error:
        raise ConfigError(
            f"{user_class.__name__} cannot be made without arguments ({error}); give an instance of it."
        ) from error


def takes(function: Any, num_arguments: int) -> bool:
    """Whether `function` has places for so many positional arguments, those with a default not counted."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required_parameters = [each for each in parameters if each.kind in kinds and each.default is each.empty]
    return len(required_parameters) >= num_arguments


def require_call(function: Any, name: str, arguments: tuple[str, ...], what: str, mend: str) -> None:
    """Raises ConfigError unless `function` can be called with these positional arguments."""
    if not callable(function):
        raise ConfigError(f"{function!r:.200} (a {type(function).__name__}) is no {what}; {mend}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{name} is a generator; a {what} returns once. Write `return` for `yield`.")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called with ({', '.join(arguments)}): {error}; {mend}."
        ) from error
    except ValueError:  # a builtin without a signature
        return


def without_arguments(**successors: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: keywords that published programs give and this class has not, each with its successor.

    The class then raises ConfigError for them, in place of Python's TypeError.
    """

    def decorate(cls: type[T]) -> type[T]:
        original_init = cls.__init__

        @functools.wraps(original_init)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            for name, successor in successors.items():
                if name in kwargs:
                    raise ConfigError(f"{cls.__name__} does not take `{name}`: {successor}.")
            original_init(self, *args, **kwargs)

        cls.__init__ = init
        return cls

    return decorate
