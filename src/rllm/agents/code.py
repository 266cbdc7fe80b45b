"""The agent that writes programs, and mends them when it is shown which tests they failed.

problem      ──► user message ──► model ──► "```python …```" ──► Action(the whole answer)
test_results ──► user message: input, expected, actual and error of some failed tests ──► a second attempt
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rllm.agents.math import MathAgent, text_shown
from rllm.agents.prompts_named import prompt_named
from rllm.types.messages import Message

MAX_SHOWN_CHARS = 300
"""The length of each input, output and error."""
PASSED = (
    "Congratulations, all tests passed. Go over your program once more: if it is right, answer with the same "
    "program again."
)
MEND = "Find what is wrong and write the whole program again."
NO_PUBLIC_TESTS = "Some tests failed that are not shown."


class CompetitionCodingAgent(MathAgent):
    """Shows the problem, then the tests that failed: at most `max_tests` of them.

    With `public_test_only` those alone whose input stands in the problem's text, so that nothing hidden is
    given away. `system_prompt`: "" is none, None the built-in one, which asks for one code block.
    """

    def __init__(
        self,
        accumulate_thinking: bool = False,
        max_tests: int = 2,
        public_test_only: bool = False,
        system_prompt: str | None = "",
        *,
        thinks_first: bool = False,
    ) -> None:
        self.max_tests = max_tests
        self.public_test_only = public_test_only
        super().__init__(accumulate_thinking, system_prompt, thinks_first=thinks_first)

    def built_in_prompt(self) -> str:
        return prompt_named("code")

    def reset(self) -> None:
        super().reset()
        self._problem = ""

    def said(self, observation: Any, info: Mapping[str, Any]) -> list[Message]:
        if isinstance(observation, Mapping) and "test_results" in observation:
            return [{"role": "user", "content": self.feedback(observation["test_results"])}]
        if isinstance(observation, list):
            self._problem = "\n".join(str(message.get("content")) for message in observation)
            return observation
        self._problem = text_shown(observation, type(self).__name__)
        return [{"role": "user", "content": self._problem}]

    def feedback(self, test_results: Sequence[Mapping[str, Any]]) -> str:
        """Feedback on a program that was tested."""
        failures = [each for each in test_results if not each.get("passed")]
        if not failures:
            return PASSED
        visible_failures = [each for each in failures if not self.public_test_only or self._is_public(each)]
        if not visible_failures:
            return f"{NO_PUBLIC_TESTS} {MEND}"
        reports = "\n\n".join(
            _failure_text(number, each) for number, each in enumerate(visible_failures[: self.max_tests], 1)
        )
        return f"These tests failed:\n\n{reports}\n\n{MEND}"

    def _is_public(self, test: Mapping[str, Any]) -> bool:
        """Whether the problem itself shows the test, whatever space is in between."""
        test_input = _without_space(test.get("input"))
        return bool(test_input) and test_input in _without_space(self._problem)


def _failure_text(number: int, test: Mapping[str, Any]) -> str:
    return "\n".join([f"Test {number}", *_lines(test)])


def _lines(test: Mapping[str, Any]) -> Iterable[str]:
    for title, names in (
        ("Input", ("input",)),
        ("Expected", ("expected",)),
        ("Actual", ("actual", "output")),
        ("Error", ("error", "error_message")),
    ):
        value = next((test[name] for name in names if test.get(name) not in (None, "")), None)
        if value is not None:
            yield f"{title}: {_cut(str(value))}"


def _cut(text: str) -> str:
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[:MAX_SHOWN_CHARS]}… ({len(text) - MAX_SHOWN_CHARS} more characters)"


def _without_space(value: Any) -> str:
    return "".join(str("" if value is None else value).split())
