"""The table of all metrics in `docs/metrics.md`: `python -m app.reference.metrics` writes it there again.

Owns how a metric is written down for people. Refuses to know any metric by name.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.observe.metrics import METRICS

BEGIN, END = "<!-- table: python -m app.reference.metrics docs/metrics.md -->\n", "<!-- end of the table -->\n"
_SOURCES = {
    "worker": "workers",
    "web": "web processes",
    "bridge": "bridges",
    "all": "whoever it happens to",
    "scrape": "looked up for each scrape",
}


def table() -> str:
    rows = [("name", "type", "labels", "from", "meaning"), ("---",) * 5]
    rows += [
        (
            f"`{metric.shown_name}`",
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            _SOURCES[metric.source],
            metric.meaning,
        )
        for metric in METRICS
    ]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def with_table(page: str) -> str:
    """The page with the table of now between its marks. Raises ValueError if they are not there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
