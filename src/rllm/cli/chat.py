"""`rllm chat`: a conversation with a model in the terminal, word by word as it comes."""

import asyncio
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from rich.text import Text

from rllm.build.chatting import ChatSettings, LiveChat, hold_chat
from rllm.build.providers import resolve_model
from rllm.cli.command import (
    WordChoice,
    chat_form,
    chat_template_option,
    example,
    json_option,
    max_thinking_tokens_option,
    option,
    options_of,
    print_json_line,
    shared,
    thinking_option,
    tool_form_option,
    trust_option,
)
from rllm.cli.terminal import FittingTable, err, out, print_sentence, table
from rllm.config.schema import DTYPES
from rllm.errors import PartialAnswer, RequestRefused, printable
from rllm.types.messages import FinishReason
from rllm.types.wire import Choice, Piece, TokenLogprob

PROMPT = "> "
RESET, QUIT = "/reset", "/quit"
UNLIKELY = 0.5
"""A token below this probability is marked in the view of probabilities."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ChatOptions:
    """The options of `rllm chat`, as the user typed them."""

    model: str = option(
        "--model", default="", metavar="DIR|NAME", help="As of `rllm eval`: what is here, or on a server."
    )
    base_url: str = option("--base-url", default="", metavar="URL", help="An OpenAI-compatible server.")
    system: str = option("--system", default="", metavar="TEXT", help="The system message.")
    tools: tuple[str, ...] = option(
        "--tool", multiple=True, metavar="NAME", help="A tool that the model may call, such as calculator."
    )
    logprobs: int = option(
        "--logprobs",
        type=click.IntRange(0, 20),
        default=0,
        metavar="N",
        help="Show the probability of each token of an answer, with N alternatives.",
    )
    temperature: float = option(
        "--temperature", type=click.FloatRange(min=0.0), default=1.0, show_default=True, help="0 is greedy."
    )
    top_p: float = option(
        "--top-p",
        type=click.FloatRange(0.0, 1.0, min_open=True),
        default=1.0,
        help="Nucleus of the sampling.",
    )
    max_tokens: int = option(
        "--max-tokens",
        type=click.IntRange(min=1),
        default=512,
        show_default=True,
        help="Tokens of an answer.",
    )
    seed: int | None = option(
        "--seed", type=click.IntRange(0, 2**63 - 1), help="Draw the same answers again."
    )
    dtype: str = option(
        "--dtype",
        type=WordChoice(DTYPES),
        default="auto",
        help="Data type of a model that is here: float32 or bfloat16.  [default: float32]",
    )
    threads: int = option(
        "--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 takes one per core."
    )
    tool_form: str = shared(tool_form_option)
    chat_template: str = shared(chat_template_option)
    thinking: str = shared(thinking_option)
    max_thinking_tokens: int = shared(max_thinking_tokens_option)
    trust_remote_code: bool = shared(trust_option)
    as_json: bool = shared(json_option)

    def settings(self) -> ChatSettings:
        return ChatSettings(
            system=self.system,
            tools=self.tools,
            dtype=self.dtype,
            form=chat_form(self),
            trust_remote_code=self.trust_remote_code,
            threads=self.threads,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=self.seed,
            top_logprobs=self.logprobs,
        )


@click.command(
    "chat",
    epilog=example(
        "rllm chat --model runs/frozenlake-seed0",
        "rllm chat --model path/to/model --system 'Be brief.' --tool calculator --logprobs 3",
        "rllm chat --base-url http://127.0.0.1:8000/v1 --model NAME",
        "echo 'What is 2 + 2?' | rllm chat --model path/to/model --json",
    ),
)
@options_of(ChatOptions)
def command(options: ChatOptions) -> None:
    """Talk with a model, which is here or on a server.

    Each line is a message, and the answer comes word by word. /reset begins anew, /quit or Ctrl-D ends, and
    Ctrl-C stops an answer. What comes from a pipe is answered line by line; --json prints a line of JSON for
    each answer and each output of a tool.
    """
    place = resolve_model(options.model, base_url=options.base_url)
    hold_chat(place, options.settings(), partial(_talk, place.title, options))


async def _talk(title: str, options: ChatOptions, chat: LiveChat) -> None:
    if not options.as_json:
        print_sentence(err(), f"{title}. {RESET} begins anew, {QUIT} ends.", style="dim")
    while (text := _read_line()) is not None:
        if text == QUIT:
            return
        if text == RESET:
            chat.reset()
        elif text:
            await _answer(chat, text, options)


def _read_line() -> str | None:
    """The next line of the person; None at the end. From a pipe the lines are not prompted for."""
    if sys.stdin.isatty():
        try:
            return input(PROMPT).strip()
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


async def _answer(chat: LiveChat, text: str, options: ChatOptions) -> None:
    """Print what the model says to `text`, or why there is no answer; either way the chat continues."""
    screen = _Screen(is_quiet=options.as_json)

    async def answer() -> None:
        async with aclosing(chat.say(text, screen.show)) as turns:
            async for turn in turns:
                _print_turn(turn, screen, options)

    task, stops = asyncio.create_task(answer()), list[signal.Signals]()
    try:
        with _stopped_by_ctrl_c(task, stops):
            await task
    except (RequestRefused, PartialAnswer) as error:
        screen.end()
        click.echo(f"error: {printable(str(error))}", err=True)
    except asyncio.CancelledError:
        if not stops:  # the command itself is ended
            raise
        screen.end()
        click.echo("(stopped)", err=True)


@contextmanager
def _stopped_by_ctrl_c(task: "asyncio.Task[None]", stops: list[signal.Signals]) -> Iterator[None]:
    """Let Ctrl-C cancel `task` meanwhile, and note it in `stops`."""

    def stop() -> None:
        stops.append(signal.SIGINT)
        task.cancel()

    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGINT)


def _print_turn(turn: Any, screen: "_Screen", options: ChatOptions) -> None:
    """Print what is left once an answer, or the output of a tool, is whole."""
    if options.as_json:
        print_json_line(_as_dict(turn, with_logprobs=options.logprobs > 0))
        return
    screen.end()
    if not isinstance(turn, Choice):
        print_sentence(out(), Text(f"  {turn.get('name', 'tool')} → {turn['content']}", style="cyan"))
        return
    for call in turn.tool_calls:
        print_sentence(out(), Text(f"  {call.name}({call.arguments})", style="cyan"))
    if turn.finish_reason is FinishReason.LENGTH:
        print_sentence(err(), f"(cut off at {options.max_tokens} tokens: --max-tokens)", style="yellow")
    if turn.token_logprobs:
        out().print(_probabilities(turn.token_logprobs))


def _as_dict(turn: Any, *, with_logprobs: bool) -> dict[str, Any]:
    if not isinstance(turn, Choice):
        return dict(turn)
    tokens = [
        {
            "text": token.text,
            "logprob": token.logprob,
            "top": [{"text": text, "logprob": logprob} for _, text, logprob in token.top],
        }
        for token in turn.token_logprobs
    ]
    return {
        **turn.message(),
        **({"reasoning": turn.reasoning} if turn.reasoning else {}),
        "finish_reason": str(turn.finish_reason),
        **({"logprobs": tokens} if with_logprobs else {}),
    }


def _probabilities(tokens: list[TokenLogprob]) -> FittingTable:
    """Each token with its probability and the alternatives that it was drawn from."""
    token_table = table("token", "probability", "alternatives", right=("probability",))
    for token in tokens:
        probability = _probability(token.logprob)
        others = (f"{text!r} {_probability(logprob):.1%}" for _, text, logprob in token.top)
        style = "yellow" if probability < UNLIKELY else ""
        token_table.add_row(
            Text(repr(token.text), style=style), f"{probability:.1%}", Text(", ".join(others))
        )
    return token_table


def _probability(logprob: float) -> float:
    return min(1.0, math.exp(logprob))


class _Screen:
    """Prints the pieces of an answer as they come: thoughts dim, text plain."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._has_text = self._in_thought = False

    async def show(self, piece: Piece) -> None:
        if self._is_quiet:
            return
        if piece.reasoning:
            self._in_thought = True
            self._write(click.style(printable(piece.reasoning), dim=True))
        if piece.text:
            if self._in_thought:
                self._write("\n")
                self._in_thought = False
            self._write(printable(piece.text))

    def end(self) -> None:
        """End the line of an answer."""
        if self._has_text:
            click.echo()
        self._has_text = self._in_thought = False

    def _write(self, text: str) -> None:
        self._has_text = True
        click.echo(text, nl=False)
