"""All figures of this server by itself, by one command: `python -m bench.own` (`make bench`), in about ten minutes.

Writes bench/OWN.md and what belongs to it (QUALITY.md, growth.svg). Owns the order and the report. Each part has a
program of its own, which is named above its figures. Run it on a machine with nothing else to do; what the machine
was doing when it began stands in the report.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import overhead, peers, quality, relay
from bench.machine import machine
from bench.parts import growth
from decode.checkpoint.checkpoint import open_checkpoint
from decode.checkpoint.names import DEFAULT_MODEL, resolve
from tasks.process.settings import Settings

REPORT = Path(__file__).parent / "OWN.md"


@dataclass(frozen=True, slots=True)
class Part:
    """One section. `command` measures it alone; `run` returns its text."""

    name: str
    title: str
    command: str
    run: Callable[[], str]


def load() -> str:
    server = next(one for one in peers.servers(Path("none"), Path("none")) if one.name == "tokenferry")
    with tempfile.TemporaryDirectory(prefix="tokenferry-bench-") as folder:
        return load_table(peers.measure(server, 1, Path(folder)))


def load_table(rows: dict[str, dict[str, Any]]) -> str:
    """`rows` as `bench.peers.measure` gives them."""
    lines = [
        "| load | tokens/s | TTFT p50 / p95, ms | inter-token p50 / p95, ms | cached prompt tokens | errors |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        speed = row.get("prompt_tokens_per_s", row["output_tokens_per_s"])
        figures = [f"{speed:,.0f}" if speed else "failed", _pair(row, "ttft", ",.0f"), _pair(row, "itl", ".1f")]
        cached = f"{row['cached_tokens']:,} of {row['prompt_tokens']:,}"
        lines.append(f"| {' | '.join([name, *figures, cached, str(row['errors'])])} |")
    last = next(reversed(rows.values()))
    lines += ["", "tokens/s: output tokens, in the row prefill prompt tokens to the first output token."]
    lines += [f"Peak memory of all processes {last['peak_mb']:,} MB; start to ready {last['ready_s']} s."]
    return "\n".join(lines)


def _pair(row: dict[str, Any], figure: str, form: str) -> str:
    """Median and 95th percentile; nothing where there is none."""
    middle, late = row[f"{figure}_p50_ms"], row[f"{figure}_p95_ms"]
    return "" if middle is None else f"{middle:{form}} / {late:{form}}"


def of_overhead() -> str:
    return overhead.table(*overhead.measure(overhead.parse_arguments([])))


def of_relay() -> str:
    return relay.table(relay.all_shapes(1))


def of_growth() -> str:
    checkpoint = open_checkpoint(resolve(DEFAULT_MODEL, Settings.from_env(os.environ).cache_dir))
    measured = growth.measure(checkpoint, "auto", say)
    growth.PLOT.write_text(growth.plot(measured), encoding="utf-8")
    return f"![growth]({growth.PLOT.name})\n\n{growth.table(measured)}"


def of_quality() -> str:
    quality.main(["--write"])
    return f"See [{quality.REPORT.name}]({quality.REPORT.name})."


PARTS = (
    Part("load", "The whole server under load", "python -m bench.load --all", load),
    Part("overhead", "Around the engine", "python -m bench.overhead", of_overhead),
    Part("relay", "The web process", "python -m bench.relay --all --rounds 1", of_relay),
    Part("growth", "Growth", "python -m bench.parts.growth --write", of_growth),
    Part("quality", "Quality", "python -m bench.quality --write", of_quality),
)


def report(sections: Sequence[tuple[Part, str]], load_average: float, started: str) -> str:
    text = f"""# This server by itself

Written by `python -m bench.own` (`make bench`) on {started}: {machine()}.
Load average when it began: {load_average:.1f}. Beside the peers: [RESULTS.md](RESULTS.md).
"""
    for part, figures in sections:
        text += f"\n## {part.title}\n\n`{part.command}`\n\n{figures}\n"
    return text


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.own", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help=f"of {','.join(part.name for part in PARTS)}, comma separated")
    options = parser.parse_args(arguments)
    wanted = set(options.only.split(",")) if options.only else {part.name for part in PARTS}
    if unknown := wanted - {part.name for part in PARTS}:
        parser.error(f"--only: no part named {', '.join(sorted(unknown))}")
    load_average, started = os.getloadavg()[0], time.strftime("%Y-%m-%d")
    sections = []
    for part in PARTS:
        if part.name in wanted:
            begin = time.monotonic()
            sections.append((part, part.run()))
            say(f"{part.name}: {time.monotonic() - begin:.0f} s\n{sections[-1][1]}")
    text = report(sections, load_average, started)
    if options.only:  # a part alone leaves the report of all as it is
        print(text)
    else:
        REPORT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
