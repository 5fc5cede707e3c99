"""Outside judges of the chat surface: `make conformance`.

    python -m tests.conformance            # all
    python -m tests.conformance langchain  # some

Sets up the judges' own environment in `.conformance`, serves the real small model by processes of their own and the
scripted model in this one, and runs every judge against both. A judge is a program of its own (`judge_*`), in the
language of its client, that knows of us only two addresses. Ends with 1 when a judge is not content.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.harness import TestedCell
from tokenferry.cell.one_process import open_server

HERE = Path(__file__).parent
PLACE = HERE.parent.parent / ".conformance"
PYTHON = PLACE / "venv" / "bin" / "python"
NODE = PLACE / "node"
REAL = "smollm2-135m-instruct"
MIN_NODE = 20
JUDGES = ("comply", "langchain", "litellm", "node", "openai")
# Small enough that an answer without a limit, which a small model does not always end by itself, is over soon.
MAX_MODEL_LEN = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="Outside judges of the surface.")
    parser.add_argument("judges", nargs="*", choices=[*JUDGES, []], metavar="JUDGE", help=", ".join(JUDGES))
    judges = parser.parse_args(arguments).judges or list(JUDGES)
    set_up(judges)
    with (
        tempfile.TemporaryDirectory(prefix="tf-") as folder,
        TestedCell(Path(folder), model=REAL, environ={"MAX_MODEL_LEN": str(MAX_MODEL_LEN)}, start_s=120) as cell,
        open_server("scripted", environ={}, scripted_step_ms=0) as scripted,
    ):
        addresses = {"REAL_URL": cell.base_url, "REAL_MODEL": REAL, "SCRIPTED_URL": scripted.base_url}
        verdicts = {judge: run(judge, addresses) for judge in judges}
    print()
    for judge, (is_content, seconds) in verdicts.items():
        print(f"{judge:10} {'content' if is_content else 'NOT CONTENT'} after {seconds:.0f} s")
    return 0 if all(is_content for is_content, _ in verdicts.values()) else 1


def set_up(judges: Sequence[str]) -> None:
    """Installs what is not there yet; a changed list of judges is installed again."""
    if set(judges) - {"node"} and is_new(HERE / "requirements.txt", PLACE / "requirements.txt"):
        if not PYTHON.exists():
            subprocess.run([sys.executable, "-m", "venv", PLACE / "venv"], check=True)
        pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", HERE / "requirements.txt"], check=True)
        shutil.copy(HERE / "requirements.txt", PLACE)
    if "node" in judges:
        check_node()
        if is_new(HERE / "package.json", NODE / "installed.json"):
            NODE.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / "package.json", NODE)
            subprocess.run(["npm", "install", "--no-fund", "--no-audit", "--no-package-lock"], cwd=NODE, check=True)
            shutil.copy(HERE / "package.json", NODE / "installed.json")


def is_new(wanted: Path, installed: Path) -> bool:
    return not installed.exists() or installed.read_bytes() != wanted.read_bytes()


def check_node() -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        sys.exit(
            f"The judges in JavaScript need node {MIN_NODE} or newer, and npm. Name the others to leave them out."
        )
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < MIN_NODE:
        sys.exit(f"The judges in JavaScript need node {MIN_NODE} or newer; this is {version}.")


def run(judge: str, addresses: dict[str, str]) -> tuple[bool, float]:
    """Whether the judge is content, and after how many seconds it was sure."""
    print(f"\n== {judge}", flush=True)
    if judge == "node":
        # Modules are looked for beside the program.
        command = ["node", "--test", "--test-reporter=spec", shutil.copy(HERE / "judge_node.mjs", NODE)]
    else:
        # Not with the settings of our own tests.
        command = [
            str(PYTHON),
            "-m",
            "pytest",
            "-v",
            "-s",
            "-c",
            os.devnull,
            "--noconftest",
            str(HERE / f"judge_{judge}.py"),
        ]
    began_s = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **addresses}, cwd=PLACE)
    return done.returncode == 0, time.monotonic() - began_s


if __name__ == "__main__":
    sys.exit(main())
