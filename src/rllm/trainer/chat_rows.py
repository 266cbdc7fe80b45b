"""Conversations ──► what a model reads and would have to write in them, turn by turn.

    {"messages": [...], "tools": [...]}    ──┐
    {"prompt": ..., "completion": ...}     ──┴──► Chat ──ChatEncoder──► Steps: prompt ids, answer ids

The prompts are those of a rollout: `ConversationTree` makes them, as for the gateway, by appending to the ids
so far, and where a template deletes earlier thoughts a new row begins. Every answer is to be learned, end
token included, unless its message has `"weight": 0`; nothing else is. What cannot be learned from is refused,
by the number of its row.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, choices_of
from rllm.files.jsonl import read_jsonl_lines, require_unicode
from rllm.models.vision.fetch import MAX_AT_ONCE, ImageFetcher
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.conversations import ConversationTree
from rllm.rendering.writing import THOUGHT_KEYS, AnswerWriter
from rllm.types.content import is_image_part, text_of, words_of
from rllm.types.episode import Step
from rllm.types.messages import Message
from rllm.types.sample import NOT_SAMPLED

ROLES = ("system", "developer", "user", "assistant", "tool")
SHOWN = 5
"""Problems that an error tells; it counts the others."""
TO_LEARN = 0
"""Policy version of an answer that is to be learned, as if the policy had sampled it before any update."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Chat:
    """One conversation of a dataset."""

    where: str
    """Its row, for people: `my.jsonl:12`, or `row 3`, counted from 0."""
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Problems:
    """Collects what is wrong with rows, so that one start tells all of it."""

    def __init__(self) -> None:
        self._problems: list[str] = []

    def note(self, where: str, what: object) -> None:
        self._problems.append(f"{where}: {what}")

    def raise_any(self) -> None:
        """Raises ConfigError with the first problems and the number of all."""
        if self._problems:
            more = len(self._problems) - SHOWN
            first_lines = "\n  ".join(self._problems[:SHOWN])
            raise ConfigError(f"{first_lines}\n  … and {more} rows more." if more > 0 else first_lines)


def read_chats(path: Path) -> list[Chat]:
    """The conversations of a JSONL file. Raises ConfigError naming the lines that are none."""
    return _chats((f"{path.name}:{number}", row) for number, row in read_jsonl_lines(path))


def chats_of(rows: Iterable[Chat | Mapping[str, Any]]) -> list[Chat]:
    """The same for rows from Python."""
    return _chats((f"row {number}", row) for number, row in enumerate(rows))


def _chats(rows: Iterable[tuple[str, Any]]) -> list[Chat]:
    chats: list[Chat] = []
    problems = Problems()
    for where, row in rows:
        try:
            chats.append(row if isinstance(row, Chat) else chat_of(row, where))
        except ConfigError as error:
            problems.note(where, error)
    problems.raise_any()
    if not chats:
        raise ConfigError("The dataset is empty; give at least one conversation.")
    return chats


def chat_of(row: Any, where: str) -> Chat:
    """One row as a conversation. Raises ConfigError that says what is wrong with it, without `where`."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"it is a {type(row).__name__}; give an object with `messages`.")
    chat = Chat(where=where, messages=_messages_of(row), tools=_tools_of(row))
    require_unicode([chat.messages, chat.tools], "it")
    _require_order(chat.messages)
    for place, message in enumerate(chat.messages):
        try:
            _require_message(message, chat)
        except ConfigError as error:
            raise ConfigError(f"message {place} ({message['role']}): {error}") from error
    return chat


# ---- rows ------------------------------------------------------------------------------------------------


def _messages_of(row: Mapping[str, Any]) -> list[Message]:
    if "functions" in row:
        raise ConfigError('it has `functions`; write them as `tools`: [{"type": "function", "function": …}].')
    if "messages" in row:
        return [dict(message) for message in _message_list(row["messages"], "messages")]
    if "prompt" in row and "completion" in row:
        return _prompt_messages(row["prompt"]) + _completion_messages(row["completion"])
    hint = (
        'turn each {"from", "value"} into {"role", "content"} and call them `messages`'
        if "conversations" in row
        else "give `messages`, or `prompt` and `completion`"
    )
    raise ConfigError(f"it has no `messages`, but {', '.join(map(str, row)) or 'nothing'}; {hint}.")


def _prompt_messages(prompt: Any) -> list[Message]:
    """The messages that ask; answers among them are read, and not learned."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [dict(message) for message in _message_list(prompt, "prompt")]
    return [{**each, "weight": 0} if each.get("role") == "assistant" else each for each in messages]


def _completion_messages(completion: Any) -> list[Message]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return [dict(message) for message in _message_list(completion, "completion")]


def _message_list(value: Any, key: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"`{key}` is {value!r:.60}; it must be a list of messages with at least one.")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"`{key}[{place}]` is {message!r:.60}; it must be an object with a `role`.")
    return value


def _tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ConfigError(f"`tools` is no JSON: {error}.") from error
    if not tools:
        return []
    for place, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f'`tools[{place}]` is {tool!r:.60}; write {{"type": "function", "function": {{"name": …}}}}.'
            )
    if not isinstance(tools, list):
        raise ConfigError("`tools` is one object; it must be a list of tools.")
    return [dict(tool) for tool in tools]


def _require_order(messages: Sequence[Message]) -> None:
    for place, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise ConfigError(
                f"message {place} has the role {message['role']!r}; {choices_of(message['role'], ROLES)}."
            )
    first = next((message["role"] for message in messages if message["role"] not in ROLES[:2]), None)
    if first == "assistant":
        raise ConfigError("an answer comes first, and nothing asked for it; begin with a user message.")
    if not any(_is_learned(message) for message in messages):
        raise ConfigError("it has no label: no message of the assistant is to be learned; leave the row out.")


def _is_learned(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _require_message(message: Message, chat: Chat) -> None:
    content, calls = message.get("content"), message.get("tool_calls") or []
    if content is not None and not isinstance(content, str | list):
        raise ConfigError(f"its content is {content!r:.60}; it must be text, or a list of parts.")
    text = words_of(content)
    if message["role"] == "assistant" and isinstance(content, list) and any(map(is_image_part, content)):
        raise ConfigError("the answer shows an image, and models write text alone; take it out.")
    if message.get("weight", 1) not in (0, 1):
        raise ConfigError(f"its weight is {message['weight']!r}; it must be 1 (learned) or 0 (only read).")
    if message["role"] != "assistant":
        if "weight" in message:
            raise ConfigError("it has a weight, and only answers are learned; take it out.")
        if message["role"] == "tool":
            _require_call_of(message, chat.messages)
        return
    if not text.strip() and not calls and not any(message.get(key) for key in THOUGHT_KEYS):
        raise ConfigError("the answer is empty; take it out, or give it content or a call.")
    names = [tool["function"]["name"] for tool in chat.tools]
    for call in calls:
        _require_call(call, names)


def _require_call(call: Any, names: Sequence[str]) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f'a call is {call!r:.60}; write {{"id": …, "function": {{"name": …, "arguments": …}}}}.'
        )
    if function["name"] not in names:
        offer = f"the row's tools are {', '.join(names)}" if names else "the row has no `tools`"
        raise ConfigError(f"it calls {function['name']!r}, but {offer}; list the tool.")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            f"the arguments of {function['name']!r} are {function['arguments']!r:.60}; they must be a JSON "
            "object, or the text of one."
        )


def _require_call_of(message: Message, messages: Sequence[Message]) -> None:
    """A tool answers a call that was made."""
    ids = {str(call.get("id")) for each in messages for call in each.get("tool_calls") or [] if "id" in call}
    call_id = message.get("tool_call_id")
    if call_id is not None and str(call_id) not in ids:
        raise ConfigError(
            f"it answers the call {call_id!r}, which nobody made ({', '.join(sorted(ids)) or 'no calls'}); "
            "use the `id` of the call."
        )
    if not any(each.get("tool_calls") for each in messages):
        raise ConfigError("it answers a call, and no message has `tool_calls`; add the call.")


def fetcher_for(hosts: Sequence[str], renderer: ChatRenderer, album: Path | None) -> ImageFetcher | None:
    """None where no host is allowed. Raises ConfigError for hosts that are none, and where the model reads no
    images."""
    if not hosts:
        return None
    if renderer.tokenizer.images is None:
        raise ConfigError(
            f"`data.allowed_media_domains` is {list(hosts)}, and the model reads text alone; leave it at []."
        )
    return ImageFetcher(hosts, album=album)


def with_fetched_images(chats: Sequence[Chat], fetcher: ImageFetcher | None) -> list[Chat]:
    """Conversations with images in place of their addresses. Raises ConfigError naming the rows whose images
    are refused, or cannot be had."""
    if fetcher is None:
        return list(chats)

    def fetch(chat: Chat) -> Chat | ConfigError:
        try:
            return replace(chat, messages=fetcher.inline(chat.messages))
        except ConfigError as error:
            # Not raised, so that the problems of all rows are told at once.
            return error

    problems = Problems()
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        outcomes = list(pool.map(fetch, chats))
    for chat, outcome in zip(chats, outcomes, strict=True):
        if isinstance(outcome, ConfigError):
            problems.note(chat.where, outcome)
    problems.raise_any()
    return [each for each in outcomes if isinstance(each, Chat)]


# ---- ids -------------------------------------------------------------------------------------------------


class ChatEncoder:
    """Turns conversations into the Steps of a trajectory, as if the model had given the answers."""

    def __init__(
        self,
        renderer: ChatRenderer,
        end_token_ids: Sequence[int],
        end_token_id: int,
        begin_token_id: int | None,
    ) -> None:
        self.renderer = renderer
        self._writer = AnswerWriter(renderer, end_token_ids, end_token_id)
        self._begin_token_id = begin_token_id
        controls = {*end_token_ids, *([] if begin_token_id is None else [begin_token_id])}
        self._controls = tuple(filter(None, map(renderer.tokenizer.token_text, controls)))
        self._known_shapes: set[tuple[object, ...]] = set()

    def steps(self, chat: Chat) -> list[Step]:
        """One Step for each answer. Raises ConfigError, without the row, for one that cannot be learned."""
        self._require_no_controls(chat)
        self._require_all_said(chat)
        tree = ConversationTree(self.renderer)
        steps: list[Step] = []
        for place, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            answer = {key: value for key, value in message.items() if key != "weight"}
            before = [_without_weight(each) for each in chat.messages[:place]]
            turn = tree.begin(before, chat.tools)
            try:
                answer_ids = self._writer.ids(before, answer, chat.tools)
            except ConfigError as error:
                raise ConfigError(f"message {place}: {error}") from error
            tree.record(turn, answer_ids, answer)
            version = TO_LEARN if _is_learned(message) else NOT_SAMPLED
            steps.append(
                Step(
                    prompt_ids=turn.prompt_ids,
                    response_ids=answer_ids,
                    logprobs=[0.0] * len(answer_ids),
                    policy_versions=[version] * len(answer_ids),
                    model_response=text_of(answer.get("content")),
                )
            )
        self._require_one_begin(steps)
        return steps

    def _require_no_controls(self, chat: Chat) -> None:
        for place, message in enumerate(chat.messages):
            text = words_of(message.get("content"))
            if control_token := next((control for control in self._controls if control in text), None):
                raise ConfigError(
                    f"message {place} holds the text {control_token!r}, which the model reads as the token "
                    "that begins or ends a text; take it out: the chat template sets it where it belongs."
                )

    def _require_one_begin(self, steps: Sequence[Step]) -> None:
        begin = self._begin_token_id
        if begin is not None and steps[0].prompt_ids[:2] == [begin, begin]:
            raise ConfigError(
                f"the text begins with {self.renderer.tokenizer.token_text(begin)!r} twice; take one out of "
                "the model's chat template."
            )

    def _require_all_said(self, chat: Chat) -> None:
        """The template prints what every message of such a conversation says: tried once for each order of
        roles, with words that stand for the contents."""
        shape = tuple((each["role"], bool(each.get("tool_calls"))) for each in chat.messages)
        key = (shape, bool(chat.tools))
        if key in self._known_shapes:
            return
        last = max(place for place, (role, _) in enumerate(shape) if role == "assistant")
        missing = [
            {**_without_weight(each), "content": _word(place)} if each["role"] != "assistant" else each
            for place, each in enumerate(chat.messages[:last])
        ]
        text = self.renderer.text_that_asks([_without_weight(each) for each in missing], chat.tools)
        for place, message in enumerate(missing):
            if message["role"] != "assistant" and _word(place) not in text:
                raise ConfigError(
                    f"the model's chat template drops message {place} ({message['role']}); leave such "
                    "messages out, or use a template that prints them."
                )
        for tool in chat.tools:
            if tool["function"]["name"] not in text:
                raise ConfigError(
                    f"the model's chat template does not show the tool {tool['function']['name']!r}; train a "
                    "model whose template knows tools."
                )
        self._known_shapes.add(key)


def encode_all(chats: Sequence[Chat], encode: Callable[[Chat], Any]) -> list[Any]:
    """`encode` of every conversation. Raises ConfigError naming the rows that it refuses."""
    encodings: list[Any] = []
    problems = Problems()
    for chat in chats:
        try:
            encodings.append(encode(chat))
        except ConfigError as error:
            problems.note(chat.where, error)
    problems.raise_any()
    return encodings


def _without_weight(message: Message) -> Message:
    return (
        {key: value for key, value in message.items() if key != "weight"} if "weight" in message else message
    )


def _word(place: int) -> str:
    """A word that no template knows and no escaping changes."""
    return f"word{place}said"
