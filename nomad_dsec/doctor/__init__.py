"""What this host can and can't do, found by trying, each with the fix: the checks behind `dsec doctor`.

Nothing here changes the host. `examine` is the way in; the rows are data, in the order in which they are shown.
"""

from nomad_dsec.doctor.checks import Check, Subject, examine

__all__ = ["Check", "Subject", "examine"]
