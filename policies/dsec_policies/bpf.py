"""A small assembler for classic BPF as seccomp runs it: labels, long jumps, packing. Pure.

Conditional jumps of classic BPF reach 255 instructions forward at most. The assembler lets a program name
any later label and puts an unconditional jump (32-bit reach) in between where the distance is too large.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dsec_policies.errors import FilterError

# include/uapi/linux/bpf_common.h: class | size or operation | mode or source.
LD_W_ABS = 0x20
ALU_AND_K = 0x54
JA = 0x05
JEQ_K = 0x15
JGT_K = 0x25
JGE_K = 0x35
JSET_K = 0x45
RET_K = 0x06

#: struct sock_filter { u16 code; u8 jt; u8 jf; u32 k; }, 8 bytes, host order (little-endian on both targets).
SOCK_FILTER = struct.Struct("<HBBI")
#: BPF_MAXINSNS, include/uapi/linux/bpf_common.h.
MAX_INSTRUCTIONS = 4096
REACH = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction before layout; ``if_true``/``if_false`` name labels, None means the next instruction."""

    code: int
    k: int = 0
    if_true: str | None = None
    if_false: str | None = None


class Assembler:
    """Collects instructions and labels; ``assemble`` lays them out. Jumps go forward only, as in the kernel."""

    def __init__(self) -> None:
        """Starts an empty program."""
        self._items: list[Instruction | str] = []
        self._fresh = 0

    def label(self, name: str) -> None:
        """Marks the place of the next instruction."""
        self._items.append(name)

    def fresh_label(self, stem: str) -> str:
        """Returns a label that nobody else has."""
        self._fresh += 1
        return f"{stem}.{self._fresh}"

    def load(self, offset: int) -> None:
        """Loads the 32-bit word at byte ``offset`` of struct seccomp_data."""
        self._items.append(Instruction(code=LD_W_ABS, k=offset))

    def mask(self, value: int) -> None:
        """Ands the accumulator with ``value``."""
        self._items.append(Instruction(code=ALU_AND_K, k=value))

    def jump(self, label: str) -> None:
        """Goes to ``label``."""
        self._items.append(Instruction(code=JA, if_true=label))

    def branch(self, code: int, k: int, *, if_true: str | None = None, if_false: str | None = None) -> None:
        """Tests the accumulator (JEQ_K, JGT_K, JGE_K or JSET_K) and goes to the named label, if there is one."""
        self._items.append(Instruction(code=code, k=k, if_true=if_true, if_false=if_false))

    def give(self, verdict: int) -> None:
        """Ends the filter with ``verdict``, a SECCOMP_RET_ value."""
        self._items.append(Instruction(code=RET_K, k=verdict))

    def assemble(self) -> bytes:
        """Returns the program as an array of struct sock_filter.

        Raises FilterError on an unknown or backward label, or when the program is too long.
        """
        items = self._items
        while True:
            places = _places(items)
            far = _first_far_jump(items, places)
            if far is None:
                return _encode(items, places)
            items = self._with_trampoline(items, far)

    def _with_trampoline(self, items: list[Instruction | str], index: int) -> list[Instruction | str]:
        """Rewrites the conditional jump at ``index`` to jump over, or onto, unconditional ones right behind it."""
        item = items[index]
        assert isinstance(item, Instruction)
        after = self.fresh_label("near")
        true_hop, false_hop = self.fresh_label("hop"), self.fresh_label("hop")
        hops: list[Instruction | str] = []
        if item.if_true is not None:
            hops += [true_hop, Instruction(code=JA, if_true=item.if_true)]
        if item.if_false is not None:
            hops += [false_hop, Instruction(code=JA, if_true=item.if_false)]
        near = Instruction(
            code=item.code,
            k=item.k,
            if_true=true_hop if item.if_true is not None else after,
            if_false=false_hop if item.if_false is not None else after,
        )
        return [*items[:index], near, *hops, after, *items[index + 1 :]]


def _places(items: list[Instruction | str]) -> dict[str, int]:
    """Maps each label to the index of the instruction that follows it."""
    places: dict[str, int] = {}
    index = 0
    for item in items:
        if isinstance(item, str):
            if item in places:
                raise FilterError(f"label {item!r} is defined twice")
            places[item] = index
        else:
            index += 1
    return places


def _distance(places: dict[str, int], label: str | None, index: int) -> int:
    """Returns how many instructions lie between ``index`` and ``label``."""
    if label is None:
        return 0
    if label not in places:
        raise FilterError(f"label {label!r} is not defined")
    distance = places[label] - index - 1
    if distance < 0:
        raise FilterError(f"label {label!r} lies behind the jump to it")
    return distance


def _first_far_jump(items: list[Instruction | str], places: dict[str, int]) -> int | None:
    """Returns the position in ``items`` of the first conditional jump that can't reach its label."""
    index = 0
    for position, item in enumerate(items):
        if isinstance(item, str):
            continue
        if item.code not in {JA, RET_K}:
            reach = max(_distance(places, item.if_true, index), _distance(places, item.if_false, index))
            if reach > REACH:
                return position
        index += 1
    return None


def _encode(items: list[Instruction | str], places: dict[str, int]) -> bytes:
    """Packs instructions whose jumps are all in reach."""
    instructions = [item for item in items if isinstance(item, Instruction)]
    if not 0 < len(instructions) <= MAX_INSTRUCTIONS:
        raise FilterError(f"{len(instructions)} instructions; the kernel takes 1 to {MAX_INSTRUCTIONS}")
    packed = bytearray()
    for index, item in enumerate(instructions):
        if item.code == JA:
            packed += SOCK_FILTER.pack(JA, 0, 0, _distance(places, item.if_true, index))
            continue
        true, false = _distance(places, item.if_true, index), _distance(places, item.if_false, index)
        packed += SOCK_FILTER.pack(item.code, true, false, item.k & 0xFFFF_FFFF)
    return bytes(packed)
