"""A conversation with a model that is given ids: they are kept here, and only added to.

messages ──Conversation──► prompt ids ──TokenClient──► answer ──► recorded, as it may come back
"""

from collections.abc import Sequence

from rllm.inference.client import ModelSession, TokenClient, Tools, require_may_fit
from rllm.inference.reading import as_it_may_come_back, parsed_text, read_into
from rllm.rendering.chat import Conversation
from rllm.types.messages import Message, ModelOutput, SamplingParams


class TokenSession(ModelSession):
    """One conversation before a server that keeps nothing of a conversation but, perhaps, a cache of its
    prefixes."""

    def __init__(self, client: TokenClient) -> None:
        self.client = client
        self.conversation = Conversation(renderer=client.renderer)

    async def respond(
        self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
    ) -> ModelOutput:
        """Raises ContextLengthError, before anything is encoded, for a message that cannot fit."""
        require_may_fit(messages, self.client.renderer, self.client.max_context)
        params = self.client.renderer.with_stops(sampling)
        output = await self.respond_to_ids(self.conversation.prompt(messages, tools), params)
        if tools:
            read_into(output, parsed_text(output.text, self.client.renderer, tools))
        self.conversation.record(output.completion_ids, *as_it_may_come_back(output))
        return output

    async def respond_to_ids(self, prompt_ids: list[int], sampling: SamplingParams) -> ModelOutput:
        """The answer to a prompt given as ids, of which the session takes no note."""
        return await self.client.generate_ids(prompt_ids, sampling)

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        require_may_fit(messages, self.client.renderer, self.client.max_context)
        return self.conversation.prompt_tokens(messages, tools)
