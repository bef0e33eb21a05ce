"""Replies of HTTP/1.1 from bytes, however they are cut, and what is no reply."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libdsec._http1_parse import HEAD_MAX, LINE_MAX, Malformed, ReplyParser, parse_head

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Dsec-Size: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;name=value\r\nhel\r\n02\r\nlo\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + SIZED


def _read(data: bytes, cuts: list[int]) -> ReplyParser:
    parser = ReplyParser()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        parser.feed(data[start:end])
    return parser


@pytest.mark.parametrize("data", [SIZED, CHUNKED, TO_THE_END, INTERIM])
@given(cuts=st.lists(st.integers(0, 300), max_size=12))
def test_a_reply_is_the_same_however_it_is_cut(data, cuts):
    parser = _read(data, cuts)
    assert parser.is_whole is (data is not TO_THE_END)
    assert parser.feed_eof()
    assert parser.status == 200
    assert b"".join(parser.pieces) == b"hello"
    assert parser.keeps is (data is not TO_THE_END)


@pytest.mark.parametrize("data", [SIZED, CHUNKED])
@given(end=st.integers(0, 300))
def test_a_reply_that_is_cut_short_is_never_whole(data, end):
    parser = ReplyParser()
    parser.feed(data[: end % len(data)])
    assert not parser.is_whole
    assert not parser.feed_eof()


def test_headers_are_found_by_lower_case_name():
    status, newest, headers = parse_head(b"HTTP/1.0 404 Not Found\r\nA-B:  c \r\na-b: d\r\nE:")
    assert (status, newest, headers) == (404, False, {"a-b": "c, d", "e": ""})


@pytest.mark.parametrize(
    ("head", "keeps", "whole"),
    [
        (b"HTTP/1.1 204 No Content", True, True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7", True, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", True, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 0", True, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close", False, True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0", False, True),
        (b"HTTP/1.1 200 OK", False, False),
    ],
)
def test_what_may_follow_on_the_connection(head, keeps, whole):
    parser = ReplyParser()
    parser.feed(head + b"\r\n\r\n")
    assert (parser.keeps, parser.is_whole) == (keeps, whole)


@pytest.mark.parametrize(
    "data",
    [
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2\xc2\xb20 OK\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nspaced : x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xd9\xa3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        SIZED + b"more",
        CHUNKED + b"more",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"x" * (HEAD_MAX + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * (LINE_MAX + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * HEAD_MAX,
    ],
)
def test_what_is_doubtful_is_malformed(data):
    with pytest.raises(Malformed):
        ReplyParser().feed(data)
