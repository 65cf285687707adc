"""The buddy allocator against a dict of what was handed out."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from h3kv.memory.buddy import BuddyAllocator, extent_class


class Buddy(RuleBasedStateMachine):
    extents = Bundle("extents")

    @initialize(units=st.integers(1, 4))
    def start(self, units: int) -> None:
        self.room = BuddyAllocator(units)
        self.capacity = 16 * units
        self.owned: dict[int, int] = {}

    @rule(target=extents, blocks=st.integers(1, 16))
    def allocate(self, blocks: int) -> int | None:
        size = extent_class(blocks)
        offset = self.room.allocate(blocks)
        if offset is None:
            assert not any(self.is_free(at, size) for at in range(0, self.capacity, size))
            return None
        assert self.is_free(offset, size)
        self.owned[offset] = size
        return offset

    @rule(offset=consumes(extents))
    def release(self, offset: int | None) -> None:
        if offset is not None:
            self.room.release(offset)
            del self.owned[offset]

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.room.check_integrity()
        assert self.room.used_blocks == sum(self.owned.values())
        assert self.room.free_blocks == self.capacity - self.room.used_blocks

    def is_free(self, start: int, size: int) -> bool:
        return all(at + used <= start or start + size <= at for at, used in self.owned.items())


TestBuddy = Buddy.TestCase
TestBuddy.settings = settings(max_examples=60, stateful_step_count=40)
