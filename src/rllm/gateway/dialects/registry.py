"""Every protocol by its name: how its clients are answered, how its upstreams are asked."""

from rllm.gateway.dialects.base import ClientDialect, UpstreamDialect
from rllm.gateway.dialects.chat import ChatDialect, ChatUpstream
from rllm.gateway.dialects.completions import CompletionsDialect, CompletionsUpstream
from rllm.gateway.dialects.messages import MessagesDialect, MessagesUpstream
from rllm.gateway.dialects.responses import ResponsesDialect, ResponsesUpstream
from rllm.types.wire import Dialect

DIALECTS: dict[Dialect, ClientDialect] = {
    Dialect.CHAT: ChatDialect(),
    Dialect.COMPLETIONS: CompletionsDialect(),
    Dialect.RESPONSES: ResponsesDialect(),
    Dialect.MESSAGES: MessagesDialect(),
}
UPSTREAMS: dict[Dialect, UpstreamDialect] = {
    Dialect.CHAT: ChatUpstream(),
    Dialect.COMPLETIONS: CompletionsUpstream(),
    Dialect.RESPONSES: ResponsesUpstream(),
    Dialect.MESSAGES: MessagesUpstream(),
}
