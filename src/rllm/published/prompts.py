"""System prompts under the names that published programs import; the sentences are ours."""

from rllm.agents.prompts_named import prompt_named

SEARCH_SYSTEM_PROMPT = (
    "Answer the question with the help of the search tool. Search before you answer, also for what you "
    "believe to know; when a result is not enough, search again with other words. Say which results your "
    "answer rests on, then end with the answer alone inside \\boxed{}."
)
TOOL_SYSTEM_PROMPT = prompt_named("tool")
MATH_SYSTEM_PROMPT = prompt_named("math")


def fetch_live_code_bench_system_prompt(prompt: str, starter_code: str | None = None) -> str:
    """A programming problem as a prompt: what to read and write, and in which form to answer."""
    task = f"Write a correct Python program for this problem.\n\n{prompt}\n\n"
    if starter_code:
        form = (
            f"Go on from this code and answer with all of it in one block:\n```python\n{starter_code}\n```\n"
        )
    else:
        form = "It reads standard input and prints to standard output. Answer with one ```python block.\n"
    return task + form
