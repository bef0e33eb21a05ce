"""Traces of first accesses: their form, and what is refused."""

from __future__ import annotations

import json

import pytest
from dsec_imagefs import ImageError
from dsec_imagefs.prefetch import Trace

IMAGE, A, B = "sha256:" + "1" * 64, "a" * 64, "b" * 64
TRACE = Trace(image=IMAGE, accesses=((0, A, 0, 4096), (3, B, 8192, 100), (7, A, 4096, 1 << 20)))


def test_a_trace_comes_back_as_it_was():
    assert Trace.parse(TRACE.render(), IMAGE) == TRACE


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"image": "sha256:" + "2" * 64},
        {"blobs": ["../x", B]},
        {"accesses": [[0, 9, 0, 1]]},
        {"accesses": [[0, 0, -1, 1]]},
        {"accesses": [[0, 0, 1]]},
        {"accesses": "x"},
        {"accesses": None},
    ],
)
def test_what_is_no_trace_of_this_image_is_refused(change):
    with pytest.raises(ImageError) as caught:
        Trace.parse(json.dumps(json.loads(TRACE.render()) | change).encode(), IMAGE)
    assert caught.value.code == "corrupt"
