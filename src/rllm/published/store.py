"""A memory that workflows share across attempts, under the names of published programs."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SharedStore(Protocol):
    """`rllm.workflows.store.Store`: values by key; each call is awaited."""

    async def get(self, key: str, default: Any = None) -> Any: ...
    async def set(self, key: str, value: Any) -> None: ...
    async def delete(self, key: str) -> bool: ...
    async def keys(self) -> list[str]: ...
    async def has(self, key: str) -> bool: ...
    async def clear(self) -> None: ...


class InMemoryStore:
    """A SharedStore in this process. No call waits in the middle, so none sees another one half done."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    async def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    async def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    async def delete(self, key: str) -> bool:
        """Whether there was a value."""
        return self._values.pop(key, self) is not self

    async def keys(self) -> list[str]:
        return list(self._values)

    async def has(self, key: str) -> bool:
        return key in self._values

    async def clear(self) -> None:
        self._values.clear()
