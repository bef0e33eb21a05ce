"""`python -m nomad_dsec.node`."""

from __future__ import annotations

import sys

from nomad_dsec.node.main import main

if __name__ == "__main__":
    sys.exit(main())
