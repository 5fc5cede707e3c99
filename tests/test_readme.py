"""The documents tell the truth: links lead somewhere, names exist, settings are all of them, and commands work.

A command in a document is run, or checked as far as that is possible in a test: a make target exists, a `tokenferry`
line is one that the parser takes, a module can be found, an address answers on a one-process server. What belongs to
an operator's machine (`OUTSIDE`) is not run.
"""

from __future__ import annotations

import ast
import configparser
import dataclasses
import importlib
import importlib.util
import re
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from decode.checkpoint.names import PUBLISHED
from tasks.observe.metrics import METRICS
from tasks.process.clients import connect
from tasks.process.settings import BridgeSettings, WebSettings, WorkerSettings, variable_of
from tasks.process.supervisor import EXIT_CANNOT_SERVE, KILL_AFTER_S
from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import WorkerLoad
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, info, job
from tokenferry.cell.one_process import LocalServer, open_server
from tokenferry.cli import build_parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
}
README = DOCUMENTS["README.md"]
OPERATING = DOCUMENTS["docs/operating.md"]
SHELLS = ("sh", "console")
OUTSIDE = {
    *(
        "systemctl",
        "journalctl",
        "nginx",
        "podman",
        "redis-cli",
        "sudo",
        "useradd",
        "git",
        "cp",
        "grep",
        "cat",
        "rm",
        "wc",
        "xargs",
    ),
}
"""Programs of an operator's machine."""
MAKE_VARIABLES = {"NAME", "PYTHON", "TORCH", "MINUTES", "SEED"}
TEST_VARIABLES = {"SIMULATION_SCHEDULES", "SIMULATION_SEED"}
EXAMPLES = {
    "MODEL": "smollm2-135m-instruct",
    "ID": "chatcmpl-x",
    "N": "1",
    "KEY": "k",
    "NAME": "web",
    "URL": "http://127.0.0.1:8080/v1",
    "FILE": "x.parquet",
    "FOLDER": "x",
}
"""What the capitals of a documented command stand for."""


@dataclass(frozen=True, slots=True)
class Line:
    """A command for the shell."""

    document: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"[:100]


def blocks(text: str, languages: tuple[str, ...]) -> Iterator[str]:
    for language, body in re.findall(r"^ *```(\w+)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        if language in languages:
            yield body


def command_lines() -> Iterator[Line]:
    for document, text in DOCUMENTS.items():
        for block in blocks(text, SHELLS):
            for raw in block.replace("\\\n", " ").splitlines():
                words = shlex.split(raw, comments=True)
                for command in re.split(r" '(?:&&|\|)' ", shlex.join(words)):
                    if command:
                        yield Line(document, command)


def inline_commands() -> Iterator[Line]:
    for document, text in DOCUMENTS.items():
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`((?:[A-Z_]+=\S+ )*(?:make|curl|honcho|python -m|\.venv/bin/\S+) [^`]*)`", prose):
            yield Line(document, command)


LINES = sorted({*command_lines(), *inline_commands()}, key=str)
INLINE = sorted({command for text in DOCUMENTS.values() for command in re.findall(r"`tokenferry (\w[^`]*)`", text)})
NAMED_TESTS = sorted(
    {found for text in DOCUMENTS.values() for found in re.findall(r"`(\w+(?:/\w+)+)::(test_\w+)`", text)}
)
NAMED_CODE = sorted(
    {found for text in DOCUMENTS.values() for found in re.findall(r"\[`([\w.]+)`\]\([\w/.]+\.py\) `([\w.]+)`", text)}
)


def anchors(text: str) -> set[str]:
    """The addresses that GitHub gives the headings of a document."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def settings_in_code() -> dict[str, str | None]:
    """Every variable that is read, and its default where that is a constant."""
    found: dict[str, str | None] = {}
    for kind in (WebSettings, WorkerSettings, BridgeSettings):
        found |= {variable_of(one): one.metadata["default"] for one in dataclasses.fields(kind)}
    for node in ast.walk(ast.parse((ROOT / "tasks/process/preflight.py").read_text())):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        first, variable, *_ = node.args
        if isinstance(first, ast.Name) and first.id == "environ" and isinstance(variable, ast.Constant):
            found[str(variable.value)] = None
    return found


def settings_in_table() -> dict[str, str]:
    """Variable -> the cell of its default."""
    table = OPERATING.partition("## Settings")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in re.findall(r"^\|.*\|$", table, re.MULTILINE)]
    return {name: row[1] for row in rows for name in re.findall(r"`([A-Z][A-Z_]+)`", row[0])}


def test_every_link_leads_to_a_file_and_to_its_heading() -> None:
    bad = []
    num_links = 0
    for document, text in DOCUMENTS.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            num_links += 1
            file, _, anchor = link.partition("#")
            target = (ROOT / document).parent / file if file else ROOT / document
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                bad.append(f"{document}: {link}")
    assert bad == []
    assert num_links > 40


@pytest.mark.parametrize(("module", "name"), NAMED_CODE, ids=str)
def test_every_name_beside_a_link_to_code_exists(module: str, name: str) -> None:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)


@pytest.mark.parametrize(("module", "name"), NAMED_TESTS, ids=[name for _, name in NAMED_TESTS])
def test_every_named_test_exists(module: str, name: str) -> None:
    assert name in functions_of(module)


@cache
def functions_of(module: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_readme_leads_to_every_document() -> None:
    assert [name for name in DOCUMENTS if name.startswith("docs/") and f"]({name})" not in README] == []


def test_every_setting_is_in_the_table_with_its_default() -> None:
    code, table = settings_in_code(), settings_in_table()
    assert len(code) > 25
    assert set(table) == set(code)
    wrong = {
        name: (default, table[name])
        for name, default in code.items()
        if default and f"`{default}`" not in table[name]
    }
    assert wrong == {}


def test_every_model_is_in_the_table() -> None:
    for model in PUBLISHED.values():
        assert f"`{model.name}`" in README
        assert f"{model.download_bytes / 1e6:,.0f} MB" in README


def test_the_figures_of_the_peers_are_the_measured_ones() -> None:
    measured = DOCUMENTS["bench/RESULTS.md"]
    table = README.partition("## Measured")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \w.* \|$", table, re.MULTILINE)[1:]
    assert len(rows) > 3
    assert [row for row in rows if f"\n{row}" not in measured] == []


def test_the_figures_of_the_sizing_table_are_the_measured_ones() -> None:
    measured = DOCUMENTS["bench/RESULTS.md"]
    sizing = OPERATING.partition("## Sizing")[2].partition("\n## ")[0]
    rates = re.findall(r"(\d+)(?: tokens/s)? at (\d+)", sizing.partition("`MAX_NUM_SEQS` |")[2].partition("\n")[0])
    assert len(rates) == 3
    assert [pair for pair in rates if f"| {pair[1]} short | {pair[0]} (" not in measured] == []
    memory = re.search(r"([\d,]+) MB with the default settings under load", sizing)
    assert memory is not None
    assert f"| peak memory of all processes, MB | {memory[1]} |" in measured


def test_the_straight_line_names_every_room() -> None:
    table = README.partition("## One request in a straight line")[2].partition("\n## ")[0]
    steps = re.findall(r"\[`(\w+)\.", table)
    assert {"app", "bridge", "tasks", "decode"} <= set(steps)


def test_every_error_code_in_the_table_of_troubles_is_one() -> None:
    table = OPERATING.partition("## When something is wrong")[2]
    codes = set(re.findall(r"^\| [45]\d\d `(\w+)`", table, re.MULTILINE))
    assert len(codes) > 5
    source = (ROOT / "app/errors.py").read_text()
    assert [code for code in codes if f'"{code}"' not in source] == []


def test_every_number_that_is_named_is_measured() -> None:
    named = {name for text in DOCUMENTS.values() for name in re.findall(r"`(vllm:\w+|tokenferry_[a-z_]+)`", text)}
    assert len(named) > 10
    assert named - {metric.name for metric in METRICS} - {metric.shown_name for metric in METRICS} == set()


def test_every_script_of_the_protocol_is_described() -> None:
    table = DOCUMENTS["docs/protocol.md"].partition("## The scripts")[2].partition("\n## ")[0]
    names = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    described = {name for cell in names for name in re.findall(r"`(\w+)`", cell)}
    assert described == {path.stem for path in (ROOT / "tasks/protocol/scripts").glob("*.lua")}


@pytest.mark.parametrize("text", INLINE)
def test_every_command_is_one(text: str) -> None:
    parses([EXAMPLES.get(word, word) for word in shlex.split(text)])


@pytest.mark.parametrize("line", LINES, ids=str)
def test_every_command_line_works(line: Line, server: LocalServer) -> None:
    words = shlex.split(line.text)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        assert words[0].partition("=")[0] in set(settings_in_code()) | TEST_VARIABLES | {"PORT"}
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/")
    match program:
        case "make":
            check_make(words[1:])
        case "tokenferry":
            parses([EXAMPLES.get(word, word) for word in words[1:]])
        case "python" | "python3":
            check_python(words[1:])
        case "curl":
            assert fetch(words[1:], server) < 400
        case "pip" | "ruff" | "lint-imports" | "honcho" | "pytest":
            assert (Path(sys.executable).parent / program).exists()
        case _:
            assert program in OUTSIDE
            check_inside(words)


def check_inside(words: list[str]) -> None:
    """The `tokenferry` line that another program runs."""
    places = [number for number, word in enumerate(words) if Path(word).name == "tokenferry"]
    after = words[places[-1] + 1 :] if places else []
    if after and after != ["."]:
        parses(after)


def parses(arguments: list[str]) -> None:
    assert build_parser().parse_args(arguments).command is not None


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        variable, is_variable, _ = word.partition("=")
        if is_variable:
            assert variable in set(settings_in_code()) | MAKE_VARIABLES
        else:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"no make target {word}"


def check_python(words: list[str]) -> None:
    assert words[0] == "-m"
    assert importlib.util.find_spec(words[1]) is not None
    for word in words[2:]:
        path = word.partition("::")[0]
        if path.startswith("tests/"):
            assert (ROOT / path).exists()


def fetch(words: list[str], server: LocalServer) -> int:
    """What a curl line asks for, of the one-process server."""
    url, headers, data, method = "", {}, None, None
    rest = iter(words)
    for word in rest:
        match word:
            case "-H":
                name, _, value = next(rest).partition(": ")
                headers[name] = value
            case "-d":
                data = next(rest).replace("smollm2-135m-instruct", server.model).encode()
            case "-X":
                method = next(rest)
            case _ if word.startswith("http"):
                url = re.sub(r"http://127\.0\.0\.1:8080", server.origin, word)
            case _:
                assert re.fullmatch(r"-[sSNf]+", word), word
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with open_server("scripted", environ={}, scripted_step_ms=0, max_model_len=64) as running:
        yield running


@pytest.mark.parametrize("document", [name for name, text in DOCUMENTS.items() if list(blocks(text, ("python",)))])
def test_every_script_runs(document: str, server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    for script in blocks(DOCUMENTS[document], ("python",)):
        adapted = script.replace("http://127.0.0.1:8080", server.origin).replace(
            "smollm2-135m-instruct", server.model
        )
        names: dict[str, object] = {}
        exec(compile(adapted, document, "exec"), names)
        if close := getattr(names.get("client"), "close", None):
            close()
        assert capsys.readouterr().out.strip()


def units() -> dict[str, configparser.ConfigParser]:
    found = {}
    for path in sorted((ROOT / "docs/systemd").glob("*.service")):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(path)
        found[path.name] = unit
    return found


@pytest.mark.parametrize(("name", "unit"), units().items(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_unit_starts_a_process_and_lets_it_end(name: str, unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "tokenferry"
    parses(arguments)
    # Its supervisor passes the signal on: a second one from systemd would come to an embedded Valkey at once.
    assert service["KillMode"] == "mixed"
    assert service.get("KillSignal", "SIGTERM") == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > KILL_AFTER_S
    assert set(service["RestartPreventExitStatus"].split()) == {"2", str(EXIT_CANNOT_SERVE)}
    assert f"systemd/{name}" in OPERATING


def test_there_is_a_unit_for_every_kind_of_process() -> None:
    procfile = re.findall(r"^(\w+):", (ROOT / "Procfile").read_text(), re.MULTILINE)
    kinds = {re.match(r"tokenferry-(\w+)", name).group(1) for name in units()}  # type: ignore[union-attr]
    assert kinds == set(procfile)


def test_the_environment_file_of_the_units_is_made_of_settings() -> None:
    lines = (ROOT / "docs/systemd/tokenferry.env").read_text().splitlines()
    environ = dict(line.removeprefix("#").split("=", 1) for line in lines if re.match(r"#?[A-Z_]+=", line))
    assert len(environ) > 3
    assert set(environ) <= set(settings_in_code())
    WebSettings.from_env({name: value for name, value in environ.items() if name != "API_KEYS_FILE"})


def test_the_container_file_copies_what_there_is_and_starts_a_command() -> None:
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    for line in lines:
        if line.startswith("COPY "):
            assert [source for source in line.split()[1:-1] if not (ROOT / source).exists()] == []
        if line.startswith("CMD "):
            program, *arguments = ast.literal_eval(line.removeprefix("CMD "))
            assert program == "tokenferry"
            parses(arguments)
        if line.startswith("ENV "):
            assert {pair.partition("=")[0] for pair in line.split()[1:]} <= set(settings_in_code()) | {
                "PYTHONUNBUFFERED"
            }


def test_a_second_cell_in_the_databases_after_next_touches_nothing_of_the_first(real_server: RedisServer) -> None:
    assert real_server.url is not None
    url = real_server.url.replace("db=0", "db=2")
    redis, queue = connect(url, use="short"), connect(url, use="queue")
    try:
        records = RequestRecords(redis)
        records.heartbeat(info("w1"), WorkerLoad(), 60_000)
        Submitter(records, build_broker(queue), redis).submit([job()], reader="web", max_waiting=9)
        assert queue.llen(keys.message_list(keys.queue_new(MODEL))) == 1
        assert [real_server.connect().dbsize(), real_server.connect("queue").dbsize()] == [0, 0]
    finally:
        redis.close()
        queue.close()
