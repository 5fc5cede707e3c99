"""The load generator of `tokenferry bench` (`tokenferry.load`), for reports.

python -m bench.load --kind short -c 16        one JSON line
python -m bench.load --all                     every kind at 1, 4, 16 and 32 streams, as a table
"""

from __future__ import annotations

import sys

from tokenferry.load import main

if __name__ == "__main__":
    sys.exit(main())
