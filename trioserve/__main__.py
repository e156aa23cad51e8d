"""`python -m trioserve` is the `trioserve` command."""

from __future__ import annotations

import sys

from trioserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
