"""Numbers for the draws of one session: asked again, the same prompt is given other draws.

    digest of a prompt ──take──► 0, 1, 2, …
    a call that failed ──give_back──► the number is that of the next call that asks the same

So the draws of a session follow from what was answered, which is what the ledger has of it after a restart.
"""

from dataclasses import dataclass, field

from rllm.rendering.conversation_index import put_bounded

MAX_PROMPTS = 8192
"""That are remembered, of one session."""


@dataclass(slots=True)
class _Prompt:
    next_number: int = 0
    free_numbers: list[int] = field(default_factory=list[int])


class DrawNumbers:
    """The numbers of each prompt, by its digest; the prompt that was asked longest ago is forgotten first."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, _Prompt] = {}

    def take(self, digest: bytes) -> int:
        """The lowest number that no other call with this digest has."""
        prompt = self._prompts.pop(digest, None) or _Prompt()
        put_bounded(self._prompts, digest, prompt, MAX_PROMPTS)
        if prompt.free_numbers:
            number = min(prompt.free_numbers)
            prompt.free_numbers.remove(number)
            return number
        prompt.next_number += 1
        return prompt.next_number - 1

    def give_back(self, digest: bytes, number: int) -> None:
        prompt = self._prompts.get(digest)
        if prompt is not None:
            prompt.free_numbers.append(number)
