"""A strict tar reader: v7, ustar, GNU and PAX members, all sparse forms, any byte in names, nothing skipped silently.

Python's own tarfile ends quietly at a damaged header, which would lose the rest of a layer.
"""
