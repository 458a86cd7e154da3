"""Random sequences of calls against a simple model and against fresh tensors."""

from __future__ import annotations

import itertools

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from bufpool import BufpoolError, FreshAllocator, OutputPool, OutputSpec, PoolLimitError, host_memory

PAGE = host_memory.PAGE_BYTES
SPECS = (
    OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32)),
    OutputSpec(out=((8, 64), torch.float16), lse=((8,), torch.float32)),
    OutputSpec(x=((), torch.int64)),
    OutputSpec(a=((1000,), torch.uint8), b=((3, 5), torch.float32), c=((PAGE,), torch.int8)),
)
specs = st.sampled_from(SPECS)
row_counts = st.one_of(st.integers(1, 40), st.integers(1, 700))


def addresses(outputs):
    return tuple(tensor.data_ptr() for tensor in outputs)


def rounded_bytes(spec, rows):
    return sum(-(-rows * row_bytes // PAGE) * PAGE for row_bytes in spec.row_bytes)


class ModelSlot:
    """What a slot may hold: its high-water rows since memory was last given back."""

    def __init__(self, spec):
        self.spec = spec
        self.high_water = 0


class Held:
    """A result that somebody holds, beside a fresh copy of what was written."""

    def __init__(self, spec, rows, outputs, expected, base):
        self.spec = spec
        self.rows = rows
        self.outputs = outputs
        self.expected = expected
        self.base = base
        self.is_partial = False

    def is_intact(self):
        return all(torch.equal(one, other) for one, other in zip(self.outputs, self.expected, strict=True))


class PoolMachine(RuleBasedStateMachine):
    """Keeps for each slot (known by its base address) the rows that the pool may have mapped for it."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pool = OutputPool(max_slots=3)
        self.fresh = FreshAllocator()
        self.like = torch.zeros(1)
        self.seed = 0
        self.live = []
        self.slots = {}
        """Of each base address seen in a result: the model of its slot."""
        self.reserved = []
        """Rows that were reserved for slots whose address was not seen yet."""
        self.maybe_gone = set()
        """Base addresses of slots that a trim may have released: another slot may get one of them."""
        self.asleep = False
        self.calls = 0

    def teardown(self):
        for one in self.live:
            assert one.is_intact()
        self.pool.close()
        for one in self.live:
            assert one.is_intact()

    # Rules

    def _write(self, spec, outputs):
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        expected = self.fresh.acquire(spec, len(outputs[0]), self.like)
        for mine, other in zip(outputs, expected, strict=True):
            values = torch.randint(0, 100, mine.shape, generator=generator)
            mine.copy_(values)
            other.copy_(values)
        return expected

    @precondition(lambda self: not self.asleep)
    @rule(target=held, spec=specs, rows=row_counts, keep=st.booleans())
    def acquire(self, spec, rows, keep):
        spills = self.pool.stats().spills
        outputs = self.pool.acquire(spec, rows, self.like)
        self.calls += 1
        base = addresses(outputs)
        assert [tensor.shape for tensor in outputs] == list(spec.shapes(rows))
        if self.pool.stats().spills == spills:
            slot = self.slots.setdefault(base, ModelSlot(spec))
            if base in self.maybe_gone and slot.spec != spec:
                slot = self.slots[base] = ModelSlot(spec)
            self.maybe_gone.discard(base)
            assert slot.spec == spec
            slot.high_water = max(slot.high_water, rows)
        else:
            assert sum(one.spec == spec and one.base is not None for one in self.live) >= 3
            base = None
        one = Held(spec, rows, outputs, self._write(spec, outputs), base)
        assert one.is_intact()
        if not keep:
            return multiple()
        self.live.append(one)
        return one

    @precondition(lambda self: not self.asleep)
    @rule(spec=specs)
    def acquire_no_rows(self, spec):
        assert [len(tensor) for tensor in self.pool.acquire(spec, 0, self.like)] == [0] * len(spec)
        self.calls += 1

    @rule(one=consumes(held))
    def drop(self, one):
        assert one.is_intact()
        self.live.remove(one)
        one.outputs = None

    @rule(one=held)
    def keep_only_a_view(self, one):
        if not one.is_partial:
            one.is_partial = True
            one.outputs = (one.outputs[0][-1:],)
            one.expected = (one.expected[0][-1:],)

    @precondition(lambda self: not self.asleep)
    @rule(spec=specs, rows=row_counts)
    def reserve(self, spec, rows):
        self.pool.reserve(spec, rows, self.like)
        self.reserved.append((spec, rows))

    @rule()
    def trim(self):
        if self.asleep:
            assert self.pool.trim() == 0  # wake() still maps the same sizes
            self.maybe_gone |= set(self.slots)
            return
        before = self.pool.stats().mapped_bytes
        freed = self.pool.trim()
        kept = {one.base: one.rows for one in self.live if one.base is not None}
        # Idle slots are empty now, and those of lanes that nobody used are gone: another one may get their address.
        self.slots = {base: slot for base, slot in self.slots.items() if base in kept}
        for base, slot in self.slots.items():
            slot.high_water = kept[base]
        self.reserved = []
        after = sum(rounded_bytes(one.spec, one.rows) for one in self.live if one.base is not None)
        assert self.pool.stats().mapped_bytes == after == before - freed

    @precondition(lambda self: not self.asleep)
    @rule(wakes=st.booleans())
    def sleep(self, wakes):
        if any(one.base is not None for one in self.live):
            try:
                self.pool.sleep()
            except BufpoolError:
                return
            raise AssertionError("slept while a result was live")
        mapped = self.pool.stats().mapped_bytes
        self.pool.sleep()
        assert self.pool.stats().mapped_bytes == 0
        if wakes:
            self.pool.wake()
            assert self.pool.stats().mapped_bytes == mapped
        self.asleep = not wakes

    @precondition(lambda self: self.asleep)
    @rule()
    def wake(self):
        self.pool.wake()
        self.asleep = False

    @precondition(lambda self: self.asleep)
    @rule(spec=specs, rows=row_counts)
    def acquire_asleep(self, spec, rows):
        try:
            self.pool.acquire(spec, rows, self.like)
        except BufpoolError:
            return
        raise AssertionError("served while asleep")

    # Invariants

    @invariant()
    def no_live_byte_is_handed_out_twice(self):
        ranges = sorted(
            (start.data_ptr(), start.data_ptr() + start.numel() * start.itemsize)
            for one in self.live
            for start in one.outputs
        )
        for (_, end), (start, _) in itertools.pairwise(ranges):
            assert end <= start

    @invariant()
    def held_results_keep_address_and_contents(self):
        for one in self.live:
            assert one.is_intact()
            if one.base is not None and not one.is_partial:
                assert addresses(one.outputs) == one.base

    @invariant()
    def mapped_bytes_are_within_the_model(self):
        stats = self.pool.stats()
        if self.asleep:
            assert stats.mapped_bytes == 0
            return
        allowed = sum(rounded_bytes(slot.spec, slot.high_water) for slot in self.slots.values())
        allowed += sum(rounded_bytes(spec, rows) for spec, rows in self.reserved)
        assert stats.needed_bytes <= stats.mapped_bytes <= allowed
        assert stats.mapped_bytes <= stats.reserved_bytes
        in_use = {one.base: one.spec.nbytes(one.rows) for one in self.live if one.base is not None}
        assert stats.in_use_bytes == sum(in_use.values()) <= stats.mapped_bytes
        assert stats.live_slots == len(in_use)

    @invariant()
    def calls_are_counted(self):
        stats = self.pool.stats()
        assert stats.acquires == self.calls
        assert stats.hits + stats.spills <= stats.acquires


PoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = PoolMachine.TestCase


class LimitedMachine(RuleBasedStateMachine):
    """Under max_bytes: never above it, and whatever fits beside what is held is served."""

    held = Bundle("held")
    LIMIT = 64 * PAGE

    def __init__(self):
        super().__init__()
        self.pool = OutputPool(max_bytes=self.LIMIT, max_slots=4)
        self.like = torch.zeros(1)
        self.specs = [OutputSpec(**{name: ((PAGE,), torch.uint8)}) for name in "abc"]
        self.live = []
        self.number = 0

    def teardown(self):
        self.pool.close()

    @rule(target=held, which=st.integers(0, 2), rows=st.integers(1, 80), keep=st.booleans())
    def acquire(self, which, rows, keep):
        spec = self.specs[which]
        held_pages = sum(pages for pages, _, _ in self.live)
        before = self.pool.stats()
        is_spill = sum(key == which for _, key, _ in self.live) == 4
        try:
            outputs = self.pool.acquire(spec, rows, self.like)
        except PoolLimitError as error:
            assert not is_spill
            assert held_pages + rows > self.LIMIT // PAGE, "it would have fitted beside what is held"
            assert error.limit == self.LIMIT
            assert error.need + error.have > error.limit
            assert self.pool.stats() == before
            return multiple()
        self.number = (self.number + 1) % 250
        outputs[0].fill_(self.number)
        if not keep or self.pool.stats().spills > before.spills:
            return multiple()
        # A slot may hold more than this result needs, from a larger one before; that much cannot be given away.
        pages = next(slot.mapped_bytes for slot in self.pool._slots if slot.has_address(outputs[0].data_ptr())) // PAGE
        one = [pages, which, (self.number, outputs)]
        self.live.append(one)
        return one

    @rule(one=consumes(held))
    def drop(self, one):
        self.live = [other for other in self.live if other is not one]
        one.clear()  # hypothesis keeps the list

    @invariant()
    def the_limit_is_kept_and_results_are_intact(self):
        assert self.pool.stats().mapped_bytes <= self.LIMIT
        for _, _, (number, outputs) in self.live:
            assert bool((outputs[0] == number).all())


LimitedMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLimitedPool = LimitedMachine.TestCase
