"""A conversation with a model that is given ids: they are kept here, and only added to.

messages ──Conversation──► prompt ids ──TokenClient──► answer ──► recorded, as it may come back
"""

from collections.abc import Sequence
from types import TracebackType

from rllm.inference.client import TokenClient, Tools, require_may_fit
from rllm.inference.reading import as_it_may_come_back, parsed_text, read_into
from rllm.rendering.chat import Conversation
from rllm.types.messages import Message, ModelOutput, SamplingParams


class TokenSession:
    """A `ModelSession` before a server that keeps nothing of a conversation but, perhaps, a cache of its
    prefixes."""

    def __init__(self, client: TokenClient) -> None:
        self.client = client
        self.conversation = Conversation(renderer=client.renderer)

    async def respond(
        self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
    ) -> ModelOutput:
        """Raises ContextLengthError, before anything is encoded, for a message that cannot fit."""
        require_may_fit(messages, self.client.renderer, self.client.max_context)
        output = await self.client.generate_ids(self.conversation.prompt(messages, tools), sampling)
        if tools:
            read_into(output, parsed_text(output.text, self.client.renderer, tools))
        self.conversation.record(output.completion_ids, *as_it_may_come_back(output))
        return output

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        require_may_fit(messages, self.client.renderer, self.client.max_context)
        return self.conversation.prompt_tokens(messages, tools)

    def close(self) -> None:
        """There is nothing at the server that would have to be closed."""

    async def __aenter__(self) -> "TokenSession":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
