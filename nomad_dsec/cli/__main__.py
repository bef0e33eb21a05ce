"""`python -m nomad_dsec.cli` is `dsec`."""

import sys

from nomad_dsec.cli.main import main

sys.exit(main())
