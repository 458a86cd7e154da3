"""What a pool did and holds, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .spec import OutputSpec

__all__ = ["LaneStats", "PoolStats"]


@dataclass(frozen=True)
class LaneStats:
    """One lane. Bytes are of this lane's slots.

    Attributes:
        device: its home.
        stream: raw stream handle; 0 is the default stream, and the only one of the host.
        capture: capture id of a lane that belongs to a CUDA graph, else None.
        shared: name of the shared capture that the lane belongs to, else None; ``capture`` is then its first one.
        spec: what it hands out.
        arena: arena kind that serves, ``cuda``, ``host`` or ``torch``; only the last one moves when it grows.
        acquires: calls served, spills included.
        hits: calls that neither grew, nor added a slot, nor spilled.
        grows: calls that mapped memory.
        rotations: calls that took another slot because the current one was live.
        spills: calls served from ``torch.empty``.
        slots: slots of the lane.
        live_slots: slots whose result somebody holds.
        pinned_slots: slots that a living graph contains.
        reserved_bytes: address space; never counted as memory.
        mapped_bytes: physical memory (on the host: its upper bound).
        in_use_bytes: rows held by somebody now.
        needed_bytes: high-water rows of each slot times row bytes; what mapped_bytes is rounded up from.
        peak_mapped_bytes: largest mapped_bytes since the last reset.
        holders: with ``trace=True``, where each live result was acquired (``file:line in function``).
    """

    device: str
    stream: int
    capture: int | None
    spec: OutputSpec
    arena: str
    acquires: int
    hits: int
    grows: int
    rotations: int
    spills: int
    slots: int
    live_slots: int
    pinned_slots: int
    reserved_bytes: int
    mapped_bytes: int
    in_use_bytes: int
    needed_bytes: int
    peak_mapped_bytes: int
    holders: tuple[str, ...] = ()
    shared: str | None = None


@dataclass(frozen=True)
class PoolStats:
    """The whole pool: counts and bytes as in ``LaneStats``, summed over all lanes, former lanes and free slots.

    Attributes:
        arena: arena kinds that serve, joined by ``+``; empty before the first use.
        handout: how the ends of results are seen: ``post`` (the quick way) or ``owner`` (by public means), joined by ``+``.
        free_slots: slots that no lane owns: reserved ahead, or given back by a graph that is gone.
        short_reservations: slots whose address range is smaller than their device's memory.
        asleep: whether the pool sleeps.
        lanes: one entry a lane.
    """

    arena: str
    acquires: int
    hits: int
    grows: int
    rotations: int
    spills: int
    slots: int
    free_slots: int
    live_slots: int
    pinned_slots: int
    reserved_bytes: int
    mapped_bytes: int
    in_use_bytes: int
    needed_bytes: int
    peak_mapped_bytes: int
    short_reservations: int
    asleep: bool
    handout: str
    lanes: tuple[LaneStats, ...] = field(default=())

    def report(self) -> str:
        """The numbers as a plain-text table, one line a lane and a sum."""
        heads = (
            "lane",
            "arena",
            "acquires",
            "hits",
            "grows",
            "rotations",
            "spills",
            "slots",
            "in use",
            "mapped",
            "peak",
        )
        body = [
            (
                _lane_name(lane),
                lane.arena,
                lane.acquires,
                lane.hits,
                lane.grows,
                lane.rotations,
                lane.spills,
                lane.slots,
                _size(lane.in_use_bytes),
                _size(lane.mapped_bytes),
                _size(lane.peak_mapped_bytes),
            )
            for lane in self.lanes
        ]
        total = (
            f"sum ({self.free_slots} free)" if self.free_slots else "sum",
            self.arena,
            self.acquires,
            self.hits,
            self.grows,
            self.rotations,
            self.spills,
            self.slots,
            _size(self.in_use_bytes),
            _size(self.mapped_bytes),
            _size(self.peak_mapped_bytes),
        )
        table = [tuple(map(str, row)) for row in (heads, *body, total)]
        widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        lines.append(
            f"reserved address space {_size(self.reserved_bytes)}, needed {_size(self.needed_bytes)}"
            + (", asleep" if self.asleep else "")
        )
        lines += [f"held: {holder}" for lane in self.lanes for holder in lane.holders]
        return "\n".join(lines)


def _lane_name(lane: LaneStats) -> str:
    name = f"{lane.device} stream {lane.stream:#x}" if lane.stream else lane.device
    if lane.shared is not None:
        name += f" shared capture {lane.shared!r}"
    elif lane.capture is not None:
        name += f" capture {lane.capture}"
    return f"{name} ({', '.join(lane.spec.names)})"


def _size(nbytes: int) -> str:
    if nbytes >= 2**33:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
