"""The `tokenferry` command: what a person types, to the function that does it.

Owns the arguments and how failures are told: one line that says what to do, no traceback. Refuses to do anything
itself. Modules are imported by the command that needs them, so that no command waits for torch in vain.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from decode.config import CheckpointError
from decode.registry import ModelError
from tasks.preflight import PreflightRefused
from tasks.settings import SettingsError, cache_dir
from tokenferry.errors import ForPeople

Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PREFLIGHT_FLAGS = {
    "min_memory_mb": "PREFLIGHT_MIN_MEMORY_MB",
    "min_swap_mb": "PREFLIGHT_MIN_SWAP_MB",
    "max_load_per_cpu": "PREFLIGHT_MAX_LOAD_PER_CPU",
    "force": "PREFLIGHT_FORCE",
}
SETTING_FLAGS = {"host": "HOST", "port": "PORT", "model": "MODEL", "variant": "VARIANT", "workers": "WORKERS"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads us: nothing more to say
        return 1
    except SettingsError as error:
        return _fail(error, 2)
    except (ModelError, CheckpointError, PreflightRefused, ForPeople) as error:
        return _fail(error, 1)


def _fail(error: Exception, status: int) -> int:
    print(f"tokenferry: {error}", file=sys.stderr)
    return status


def environ_from(options: argparse.Namespace, *tables: Mapping[str, str]) -> dict[str, str]:
    """The environment, with what was given on the command line in place of its variables."""
    environ = dict(os.environ)
    for table in tables:
        for flag, variable in table.items():
            value = getattr(options, flag, None)
            if value is not None and value is not False:
                environ[variable] = "1" if value is True else str(value)
    return environ


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenferry",
        description="Serve language models behind the OpenAI API. Settings: environment variables, see the README.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_model_commands(commands)
    _add_chat(commands)
    _add_preflight(commands)
    demo = commands.add_parser("demo", help="two workers without weights behind one listener, shown live")
    demo.set_defaults(command=_demo)
    for name, what in {
        "web": "the HTTP process",
        "worker": "one engine, kept running",
        "bridge": "watchdog and catalog",
        "redis": "the embedded Valkey",
    }.items():
        process = commands.add_parser(name, help=f"a line of the Procfile: {what}")
        process.set_defaults(command=_process, process=name)
    return parser


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run everything on this machine")
    serve.add_argument("--one-process", action="store_true", help="one process, an in-memory Redis, nothing kept")
    serve.add_argument("--host", help="HOST")
    serve.add_argument("--port", help="PORT")
    serve.add_argument("--model", help="MODEL: a name, a path or a hub id")
    serve.add_argument("--variant", help="VARIANT")
    serve.add_argument("--workers", help="WORKERS")
    _add_thresholds(serve)
    serve.set_defaults(command=_serve)


def _add_model_commands(commands: Commands) -> None:
    pull = commands.add_parser("pull", help="fetch a model into the cache and check it")
    pull.add_argument("model")
    pull.add_argument("--accept-terms", action="store_true", help="you have read and accept the model's terms")
    pull.add_argument("--check", action="store_true", help="only read what is there, against its checksum")
    pull.set_defaults(command=_pull)
    models = commands.add_parser("models", help="the known models, and which are here")
    models.set_defaults(command=_models)


def _add_chat(commands: Commands) -> None:
    chat = commands.add_parser("chat", help="talk to a server, answers stream")
    chat.add_argument("--base-url", default="", help="default: the server on this machine at HOST and PORT")
    chat.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "local"))
    chat.add_argument("--model", default="", help="default: the first that the server lists")
    chat.add_argument("--system", default="", help="a system message to begin with")
    chat.add_argument("--max-tokens", type=int, default=None, help="limit of one answer")
    chat.set_defaults(command=_chat)


def _add_preflight(commands: Commands) -> None:
    preflight = commands.add_parser("preflight", help="whether this machine can take the model now")
    preflight.add_argument("--model", help="MODEL")
    preflight.add_argument("--variant", help="VARIANT")
    _add_thresholds(preflight)
    preflight.set_defaults(command=_preflight)


def _add_thresholds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-memory-mb", help="available memory needed; default: what the model takes")
    parser.add_argument("--min-swap-mb", help="free swap needed, where there is swap; default 0")
    parser.add_argument("--max-load-per-cpu", help="one-minute load per processor allowed; default 16")
    parser.add_argument("--force", action="store_true", help="start whatever the figures are")


def _serve(options: argparse.Namespace) -> int:
    from tokenferry.serve import serve, serve_one_process

    environ = environ_from(options, SETTING_FLAGS, PREFLIGHT_FLAGS)
    return serve_one_process(environ) if options.one_process else serve(environ)


def _pull(options: argparse.Namespace) -> int:
    from tokenferry.models import pull

    return pull(options.model, cache_dir(os.environ), accept_terms=options.accept_terms, check_only=options.check)


def _models(options: argparse.Namespace) -> int:
    from tokenferry.models import models

    return models(cache_dir(os.environ))


def _chat(options: argparse.Namespace) -> int:
    from tasks.settings import WebSettings
    from tokenferry.chat import run
    from tokenferry.serve import origin

    web = WebSettings.from_env(os.environ)
    base_url = options.base_url or f"{origin(web.host, web.port)}/v1"
    return run(base_url, options.api_key, options.model, options.system, options.max_tokens)


def _preflight(options: argparse.Namespace) -> int:
    from tokenferry.machine import preflight

    return preflight(environ_from(options, SETTING_FLAGS, PREFLIGHT_FLAGS))


def _demo(options: argparse.Namespace) -> int:
    from tokenferry.demo import run

    return run()


def _process(options: argparse.Namespace) -> int:
    from tokenferry import processes

    entry: Callable[[], int] = getattr(processes, options.process)
    return entry()


if __name__ == "__main__":
    sys.exit(main())
