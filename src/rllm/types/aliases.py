"""Two spellings, one field: published programs use both `info` and `metadata`, `weight_version` and
`policy_version`.

`@with_aliases(metadata="info")` on a dataclass makes `metadata` a property that reads and writes `info`, and
lets the constructor take either name. Giving both is an error, because one of the two values would be lost.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def with_aliases(**field_of: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: each keyword is an alias, its value the field that the alias stands for."""

    def decorate(cls: type[T]) -> type[T]:
        original_init = cls.__init__

        @functools.wraps(original_init)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            for alias, field in field_of.items():
                if alias in kwargs:
                    if field in kwargs:
                        raise TypeError(
                            f"{cls.__name__}: `{alias}` is another name for `{field}`; give one of them."
                        )
                    kwargs[field] = kwargs.pop(alias)
            original_init(self, *args, **kwargs)

        cls.__init__ = init
        for alias, field in field_of.items():
            setattr(cls, alias, _alias_property(field))
        return cls

    return decorate


def _alias_property(field: str) -> property:
    def read(self: object) -> Any:
        return getattr(self, field)

    def write(self: object, value: Any) -> None:
        setattr(self, field, value)

    return property(read, write, doc=f"Another name for `{field}`.")
