"""The `tokenferry` command: what a person types, to the function that does it.

Owns the arguments and how failures are told: one line that says what to do, no traceback. Refuses to do anything
itself. Modules are imported by the command that needs them, so that no command waits for torch in vain.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from decode.checkpoint.config import CheckpointError
from decode.checkpoint.names import ModelError
from tasks.process.preflight import PreflightRefused
from tasks.process.settings import Settings, SettingsError
from tasks.protocol.moves import STATES
from tokenferry.errors import ForPeople

if TYPE_CHECKING:
    from redis import Redis

    from tokenferry.commands.history import History

Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

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


class Parser(argparse.ArgumentParser):
    """Names the nearest to a mistyped word, where argparse lists what there is."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(found[1], re.findall(r"'(.*?)'", found[2]), 1)
            message += f": did you mean {near[0]}?" if near else ""
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tokenferry",
        description="Serve language models behind the OpenAI API. Settings: environment variables, see the README.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_model_commands(commands)
    _add_chat(commands)
    _add_history(commands)
    _add_live(commands)
    _add_bench(commands)
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
    completion = commands.add_parser("completion", help="what makes a shell complete these commands")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(command=_completion)
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
    models.add_argument("--json", action="store_true", help="for programs")
    models.set_defaults(command=_models)


def _add_chat(commands: Commands) -> None:
    chat = commands.add_parser("chat", help="talk to a server, answers stream")
    chat.add_argument("--base-url", default="", help="default: the server on this machine at HOST and PORT")
    chat.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "local"))
    chat.add_argument("--model", default="", help="default: the first that the server lists")
    chat.add_argument("--system", default="", help="a system message to begin with")
    chat.add_argument("--max-tokens", type=int, default=None, help="limit of one answer")
    chat.set_defaults(command=_chat)


def _add_history(commands: Commands) -> None:
    requests = commands.add_parser("requests", help="the latest requests, from the catalog")
    requests.add_argument("--model", default="", help="of this model only")
    requests.add_argument("--state", choices=STATES, default="", help="in this state only")
    requests.add_argument("--failed", action="store_const", const="failed", dest="state", help="only what failed")
    requests.add_argument("--since", metavar="TIME", help="not older than 30s, 10m, 2h, 7d")
    requests.add_argument(
        "--slow", metavar="MS", type=int, nargs="?", const=1000, help="with a first token after MS (1000) or later"
    )
    requests.add_argument("--limit", type=_count, default=20, metavar="N", help="how many; default 20")
    requests.add_argument("--follow", action="store_true", help="go on, with a line for every change")
    requests.set_defaults(command=_requests)
    request = commands.add_parser("request", help="the whole life of one request")
    request.add_argument("id")
    request.set_defaults(command=_request)
    sql = commands.add_parser("sql", help="a question to the catalog, such as FROM usage")
    sql.add_argument("sql")
    sql.set_defaults(command=_sql)
    export = commands.add_parser("export", help="the catalog's tables as Parquet files")
    export.add_argument("folder")
    export.set_defaults(command=_export)
    for parser in (requests, request, sql, export):
        parser.add_argument("--json", action="store_true", help="for programs")


def _add_live(commands: Commands) -> None:
    top = commands.add_parser("top", help="workers, queues and running requests, live")
    top.add_argument("--once", action="store_true", help="one look, then end")
    top.add_argument("--json", action="store_true", help="for programs: a line each second, or one document")
    top.set_defaults(command=_top)
    doctor = commands.add_parser("doctor", help="whether everything here is as it has to be, and what to do if not")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(command=_doctor)


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="how fast the server on this machine is")
    bench.add_argument("--base-url", default="", help="default: the server on this machine at HOST and PORT")
    bench.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "local"))
    bench.add_argument("--model", default="", help="default: the first that the server lists")
    bench.add_argument("--kind", choices=("short", "long", "shared"), default="short", help="of prompts")
    bench.add_argument(
        "-c", "--concurrency", type=_count, nargs="+", default=[1, 4, 16], metavar="N", help="streams open at once"
    )
    bench.add_argument("-n", "--requests", type=_count, default=0, metavar="N", help="in each run")
    bench.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="of each answer")
    bench.add_argument("--json", action="store_true", help="for programs")
    bench.set_defaults(command=_bench)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 1,000,000, not {text!r}")
    return int(text)


def _add_preflight(commands: Commands) -> None:
    preflight = commands.add_parser("preflight", help="whether this machine can take the model now")
    preflight.add_argument("--model", help="MODEL")
    preflight.add_argument("--variant", help="VARIANT")
    preflight.add_argument("--json", action="store_true", help="for programs")
    _add_thresholds(preflight)
    preflight.set_defaults(command=_preflight)


def _add_thresholds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-memory-mb", help="available memory needed; default: what the model takes")
    parser.add_argument("--min-swap-mb", help="free swap needed, where there is swap; default 0")
    parser.add_argument("--max-load-per-cpu", help="one-minute load per processor allowed; default 16")
    parser.add_argument("--force", action="store_true", help="start whatever the figures are")


def _serve(options: argparse.Namespace) -> int:
    from tokenferry.commands.serve import serve, serve_one_process

    environ = environ_from(options, SETTING_FLAGS, PREFLIGHT_FLAGS)
    return serve_one_process(environ) if options.one_process else serve(environ)


def _pull(options: argparse.Namespace) -> int:
    from tokenferry.commands.models import pull

    return pull(
        options.model,
        Settings.from_env(os.environ).cache_dir,
        accept_terms=options.accept_terms,
        check_only=options.check,
    )


def _models(options: argparse.Namespace) -> int:
    from tokenferry.commands.models import models

    return models(Settings.from_env(os.environ).cache_dir, as_json=options.json)


def _chat(options: argparse.Namespace) -> int:
    from tasks.process.settings import WebSettings
    from tokenferry.cell.plan import origin
    from tokenferry.commands.chat import run

    web = WebSettings.from_env(os.environ)
    base_url = options.base_url or f"{origin(web.host, web.port)}/v1"
    return run(base_url, options.api_key, options.model, options.system, options.max_tokens)


def _requests(options: argparse.Namespace) -> int:
    from tokenferry.commands.history import Wanted, duration_ms, show_requests

    wanted = Wanted(
        model=options.model,
        state=options.state,
        since_ms=None if options.since is None else duration_ms(options.since),
        slow_ms=options.slow,
        limit=options.limit,
    )
    return show_requests(_history(), wanted, as_json=options.json, follow=options.follow)


def _request(options: argparse.Namespace) -> int:
    from tokenferry.commands.timeline import Lives, show_request

    return show_request(Lives(_catalog_folder(), _redis()), options.id, as_json=options.json)


def _sql(options: argparse.Namespace) -> int:
    from tokenferry.commands.history import show_sql

    return show_sql(_history(), options.sql, as_json=options.json)


def _export(options: argparse.Namespace) -> int:
    from tokenferry.commands.history import show_export

    return show_export(_history(), Path(options.folder), as_json=options.json)


def _top(options: argparse.Namespace) -> int:
    from tasks.observe.live import LiveCell
    from tokenferry.commands.top import show_top

    return show_top(LiveCell(_redis()).look, once=options.once, as_json=options.json)


def _doctor(options: argparse.Namespace) -> int:
    from tokenferry.commands.doctor import examine, show_doctor

    return show_doctor(examine(os.environ, _redis()), as_json=options.json)


def _bench(options: argparse.Namespace) -> int:
    from tasks.process.settings import WebSettings
    from tokenferry.cell.plan import origin
    from tokenferry.commands.bench import bench

    web = WebSettings.from_env(os.environ)
    return bench(options, (options.base_url or f"{origin(web.host, web.port)}/v1").rstrip("/"))


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(build_parser(), options.shell))
    return 0


def _history() -> History:
    from tokenferry.commands.history import History

    return History(_catalog_folder())


def _catalog_folder() -> Path:
    return Settings.from_env(os.environ).data_dir / "catalog"


def _redis() -> Redis:
    from tasks.process.clients import connect

    return connect(Settings.from_env(os.environ).redis_url, use="short")


def _preflight(options: argparse.Namespace) -> int:
    from tokenferry.cell.plan import preflight

    return preflight(environ_from(options, SETTING_FLAGS, PREFLIGHT_FLAGS), as_json=options.json)


def _demo(options: argparse.Namespace) -> int:
    from tokenferry.commands.demo import run

    return run()


def _process(options: argparse.Namespace) -> int:
    from tokenferry.cell import processes

    entry: Callable[[], int] = getattr(processes, options.process)
    return entry()


if __name__ == "__main__":
    sys.exit(main())
