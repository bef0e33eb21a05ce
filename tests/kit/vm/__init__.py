"""Tests of ours on another kernel: a small machine under QEMU whose root is this Python and this source tree."""
