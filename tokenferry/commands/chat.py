"""`tokenferry chat`: an interactive conversation with any server that speaks the OpenAI API.

Owns the prompt loop. Refuses to know anything about our server: it is a client like any other, through the `openai`
package. Ctrl-C stops the answer (the server sees the connection close and cancels), Ctrl-D ends the conversation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console

HELP = "Ctrl-C stops an answer, Ctrl-D or /exit leaves, /new forgets the conversation."


def converse(
    client: OpenAI,
    model: str,
    console: Console,
    read: Callable[[str], str],
    *,
    system: str = "",
    max_tokens: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask and answer until the input ends. `read` shows a prompt and returns a line; EOFError ends."""
    opening: list[ChatCompletionMessageParam] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    console.print(f"{model} at {client.base_url}. {HELP}", highlight=False)
    while True:
        try:
            line = read("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = list(opening)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        answer = _answer(client, model, messages, console, max_tokens, clock)
        if answer is None:
            messages.pop()  # nothing came back: the question may be asked again
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(
    client: OpenAI,
    model: str,
    messages: list[ChatCompletionMessageParam],
    console: Console,
    max_tokens: int | None,
    clock: Callable[[], float],
) -> str | None:
    """Stream one answer to the console; None when there was none. What was shown before a stop stays."""
    parts: list[str] = []
    num_tokens, started_s = 0, clock()
    try:
        limit = {} if max_tokens is None else {"max_completion_tokens": max_tokens}
        stream = client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}, extra_body=limit
        )
        with stream:
            for chunk in stream:
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    if choice.delta.content:
                        parts.append(choice.delta.content)
                        console.out(choice.delta.content, end="", highlight=False)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
        return "".join(parts) or None
    except OpenAIError as error:
        console.print(("\n" if parts else "") + _reason(error), style="red", markup=False, highlight=False)
        return "".join(parts) or None
    seconds = clock() - started_s
    rate = f"\n({num_tokens} tokens, {num_tokens / seconds:.0f} a second)" if num_tokens and seconds > 0 else ""
    console.print(rate, style="dim", markup=False, highlight=False)
    return "".join(parts)


def choose_model(client: OpenAI) -> str:
    """The first model that the server lists. Raises OpenAIError."""
    models = client.models.list().data
    if not models:
        raise OpenAIError(f"{client.base_url} serves no model")
    return models[0].id


def run(base_url: str, api_key: str, model: str, system: str, max_tokens: int | None) -> int:
    """The command. Returns its exit status."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() history and editing)
    console = Console()
    client = OpenAI(base_url=base_url, api_key=api_key)
    try:
        model = model or choose_model(client)
    except OpenAIError as error:
        Console(stderr=True).print(f"tokenferry: {base_url}: {_reason(error)}", highlight=False, markup=False)
        return 1
    converse(client, model, console, input, system=system, max_tokens=max_tokens)
    return 0


def _reason(error: OpenAIError) -> str:
    cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
    return f"{error}{cause}"
