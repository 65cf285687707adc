"""The KV that one sequence holds: mounted segments of others, then segments of its own.

    blocks   0 | 1  2  3 | 4 ............... 19 | 20 .. 27 | 28 ......... 43 | 44
          (A, 1) (B, 3)    own, sealed when full  own, open  window            being filled

A sequence pins every segment that it reads until it ends. Without a window its own segments lie where attention
appends, and are written in place. With one, new blocks are written on the device, and each is copied into the open
segment when it leaves the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from torch import Tensor

from h3kv.attention.paged import PagedCache
from h3kv.core.hashing import blocks_in_common
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import BlockKey, SlabKey, Tier
from h3kv.engine.attended import AttendedTokens
from h3kv.engine.held import Held, HeldRow, label_of, run_of, unknown_tokens_error
from h3kv.engine.kv_parts import KvParts
from h3kv.engine.prefix import Mount
from h3kv.engine.rooms import Rooms
from h3kv.engine.segment import Phase, Segment
from h3kv.engine.window import Window
from h3kv.telemetry import names


class SequenceKv:
    """Owns the pins and the window of one sequence until `close`. Satisfies `models.decoder.SteppedKvCache`.

    Args:
        parts: of the pool.
        mounts: reused beginnings, pinned. Taken over once the sequence is made.
        rooms_from: sizes of the segments that it opens for its blocks from a given one on, in order; finite with eager
            parts.
        keys: the root key, then those of the prompt's whole blocks; taken over. None: it shares nothing.
        window: its blocks on the device; None where its home is the device.
        blocks_max: of it at its longest.
        reserved_blocks: that it is sure of; with eager parts, those that are opened now.
        committed_blocks: what it was counted in with.
        retrieves: whether it will decode under retrieval: its indexes stay in memory then.

    Raises:
        TierFullError: with eager parts, there is too little room. Nothing is held then but the mounts.
    """

    def __init__(
        self,
        parts: KvParts,
        mounts: Sequence[Mount],
        rooms_from: Callable[[int], Iterator[int]],
        *,
        keys: list[BlockKey] | None,
        window: Window | None,
        blocks_max: int = 0,
        reserved_blocks: int = 0,
        committed_blocks: int = 0,
        retrieves: bool = False,
    ) -> None:
        self.blocks_max = blocks_max
        self.reserved_blocks = reserved_blocks
        self.committed_blocks = committed_blocks
        self.recomputed_tokens = 0
        """That were found in the cold store and are computed all the same: whoever opened it says so."""
        self._parts = parts
        self._segments = parts.segments
        self._rooms = Rooms(rooms_from, sum(mount.blocks for mount in mounts))
        self._keys = keys
        self._window = window
        self._spare: deque[Segment] = deque()
        self._held = HeldRow(self._segments, retrieves=retrieves)
        self.cache = PagedCache(
            parts.page_kernels,
            self._segments.layout,
            pages=16,
            source=parts.stream,
            window_tokens=parts.window_blocks * BLOCK_TOKENS,
            recall_sample=parts.recall_sample,
            touch_sample=parts.touch_sample,
            offload=parts.offload,
        )
        # The first block that was computed under retrieval: its KV is of another class than what others look for.
        self._retrieved_from: int | None = None
        self.reused_tokens = self._mount(mounts)
        # The first block that was not copied into its segment, or without a window sealed; and that is in the window.
        self._flushed = self._left = self.blocks
        try:
            if parts.is_eager:
                self._spare.extend(self._segments.open(self._rooms.take_all(reserved_blocks - self.blocks)))
            self._make_room(0)
        except BaseException:
            self._give_back_own()
            raise

    @property
    def tokens(self) -> int:
        """See `KvCache.tokens`."""
        return self.cache.tokens

    @property
    def blocks(self) -> int:
        """Whole blocks in the cache."""
        return self.cache.tokens // BLOCK_TOKENS

    @property
    def pins(self) -> int:
        """Pins that this sequence holds, one for each segment."""
        return len(self._held) + len(self._spare)

    @property
    def blocks_beside_documents(self) -> int:
        """Blocks of it at its longest, but for those that documents hold."""
        return self.blocks_max - self._held.document_blocks

    def attended_tokens(self) -> AttendedTokens:
        """Counts what the tokens of its answer attend to."""
        return self._parts.attended_tokens()

    def blocks_in_common(self, keys: Sequence[BlockKey]) -> int:
        """Whole blocks with which it begins as another prompt does, whose root key and keys of blocks these are."""
        return blocks_in_common(self._keys or (), keys)

    def touch_found(self) -> None:
        """Say that what a lookup found for it is in use: as long as it reads its prompt."""
        self._parts.touch_sample.find(held.segment.id for held in self._held if not held.is_own)

    @property
    def retrieval(self) -> RetrievalSetting | None:
        """How the next chunks choose what they read, each row for itself; None: they read everything.

        Blocks that are computed under retrieval are not shared: others would compute other numbers for them.
        """
        return self.cache.retrieval

    @retrieval.setter
    def retrieval(self, setting: RetrievalSetting | None) -> None:
        lane = self._parts.page_lane(setting) if setting is not None and setting != self.cache.retrieval else None
        if lane is not None:
            self._give_back_pages()
            self.cache.page_source = lane
        self.cache.retrieval = setting
        if setting is not None and self._retrieved_from is None:
            self._retrieved_from = self.blocks
        if setting is not None:
            self._held.retrieve()

    def prepare(self, tokens: int, *, reads_ahead: bool = True) -> None:
        """Make ready for a chunk of so many tokens: room for them, and everything readable where it lies now.

        Call `refresh` first where a loss can be made good by computing tokens again. Where sequences step together,
        their caller reads ahead: it knows in which order all of them are read.

        Raises:
            TierFullError: there is no room for the chunk.
            SlabUnavailableError: a part was lost of a sequence that shares nothing.
        """
        self.refresh()
        self._make_room(tokens)
        if reads_ahead:
            self.read_ahead()

    def refresh(self) -> None:
        """Take notice of segments that moved or were lost since the last chunk.

        A segment that was lost takes its tokens and all behind them out of the cache: look at `tokens` afterwards.
        """
        for held in self._held:
            segment = held.segment
            if segment.version == held.version or self._is_on_device(held):
                continue
            if segment.phase is Phase.LOST:
                self._rewind(held)
                return
            self._place(held)

    def read_ahead(self) -> None:
        """Begin to read what the next chunk needs from the cold store."""
        if self._parts.stream is not None:
            slabs = self.cache.cold_slabs()
            if slabs:
                self._parts.stream.plan(slabs, repeats=self._parts.census.running == 1)

    def attend(self, layer: int, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float | None = None) -> Tensor:
        """See `PagedCache.attend`."""
        return self.cache.attend(layer, q_QHD, k_TKD, v_TKD, scale=scale)

    def attend_steps(self, layer: int, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Generator[None, None, Tensor]:
        """See `PagedCache.attend_steps`."""
        return self.cache.attend_steps(layer, q_QHD, k_TKD, v_TKD)

    def advance(self, tokens: int) -> None:
        """See `KvCache.advance`."""
        self.cache.advance(tokens)

    def forget_from(self, slab: SlabKey) -> None:
        """A slab cannot be read now: what lies in the cold store, and all behind it, is computed again.

        Raises:
            SlabUnavailableError: of a sequence that shares nothing, and whose tokens are not known here.
        """
        cold = (held for held in self._held if held.segment.home_L is None or held.segment.id == slab.segment)
        first = next(cold, None)
        if first is not None:
            self._rewind(first)

    def settle(self, tokens: Sequence[int]) -> None:
        """After a chunk: move blocks out of the window, and share own segments that are full.

        Args:
            tokens: all of the sequence, from the first; may be empty for one that shares nothing.

        Raises:
            TierFullError: what leaves the window finds no room.
        """
        if self._window is not None:
            self._leave(self._window.first_kept(self.blocks), tokens)
            return
        # Tokens of the window stay where they are: clustered ones are attended to in another order.
        end = self.blocks
        if self._parts.is_clustered:
            end = max(end - self._parts.window_blocks, 0)
        for held in self._held:
            if held.is_own and held.segment.phase is Phase.OPEN and held.end <= end:
                self._seal(held, tokens)
                self._flushed = held.end

    def share(self, blocks: int, tokens: Sequence[int]) -> None:
        """Have others find its first blocks now, and not when they leave the window, in which it goes on reading them.

        Not where segments are clustered, whose tokens come in another order, nor where room takes time to come.
        """
        if self._window is not None and not self._parts.is_clustered and blocks > self._held.sealed_blocks:
            try:
                self._copy_out(min(blocks + SEGMENT_BLOCKS_MAX - 1, self.blocks), tokens, waits=False)
            except Exception:  # noqa: BLE001  (whoever asks computes them again, and this one goes on)
                self._parts.telemetry.count(names.FAILED_SEALS, tier=self._segments.tier)

    def close(self, tokens: Sequence[int]) -> None:
        """Share the whole blocks that are left, then give all pins and all other room back.

        Sharing that goes wrong costs the reuse of those blocks and is not raised: the sequence has ended either way.
        """
        try:
            if self._keys is not None:
                self._share_rest(min(self.blocks, len(tokens) // BLOCK_TOKENS), tokens)
        except Exception:  # noqa: BLE001  (the sequence has ended: its blocks are only computed again)
            self._parts.telemetry.count(names.FAILED_SEALS, tier=self._segments.tier)
        finally:
            self._give_back_pages()
            self._give_back_own()
            while self._held:
                self._held.let_go()

    def _give_back_pages(self) -> None:
        """Give back single pages that an interrupt left pinned."""
        if self.cache.page_source is not None:
            self.cache.page_source.give_back()

    def _give_back_own(self) -> None:
        """Give back all that is not a mount: the window, and own segments, which follow the mounts."""
        try:
            while self._spare:
                self._segments.unpin(self._spare.popleft())
            while (last := self._held.last) is not None and last.is_own:
                self._held.let_go()
        finally:
            if self._window is not None:
                self._window.close()

    def _mount(self, mounts: Sequence[Mount]) -> dict[Tier, int]:
        """Place reused segments. Returns their tokens, by the tier in which they lie."""
        home = self._segments.tier
        reused = {home: 0}
        start = 0
        for mount in mounts:
            end = start + mount.blocks
            self._held.add(Held(mount.segment, start, end, is_own=False, version=mount.segment.version))
            self.cache.place(start, mount.blocks, run_of(self._segments, mount.segment))
            tier = home if mount.segment.home_L is not None else Tier.NVME
            reused[tier] = reused.get(tier, 0) + mount.blocks * BLOCK_TOKENS
            start = end
        self.cache.set_tokens(start * BLOCK_TOKENS)
        return reused

    def _make_room(self, tokens: int) -> None:
        """Place room behind the cache's last token: for so many tokens, and for all spare segments without a window."""
        if self._window is None:
            while self._spare or self.cache.room_tokens < tokens:
                self._open(self.cache.placed_blocks)
            return
        first = self.cache.placed_blocks
        last = -(-(self.cache.tokens + tokens) // BLOCK_TOKENS)
        if last > first:
            for addresses_L in self._window.take(range(first, last)):
                self.cache.extend(addresses_L, room_blocks=1)

    def _open_next(self, *, waits: bool) -> Segment:
        room = self._rooms.take()
        try:
            return self._segments.open([room], waits=waits)[0]
        except BaseException:
            self._rooms.put_back(room)
            raise

    def _open(self, start: int, *, waits: bool = True) -> Held:
        """The next own segment, for the blocks from `start` on."""
        segment = self._spare.popleft() if self._spare else self._open_next(waits=waits)
        end = start if self._window is not None else start + segment.room_blocks
        held = Held(segment, start, end, is_own=True, version=segment.version)
        self._held.add(held)
        if self._window is None:
            self.cache.place(start, segment.room_blocks, run_of(self._segments, segment))
        return held

    def _leave(self, end: int, tokens: Sequence[int]) -> None:
        """Have the blocks before `end` read in own segments. The sink stays on the device as well."""
        window = self._window
        assert window is not None
        try:
            self._copy_out(end, tokens)
        finally:
            # Also where there was no room for all of them. After a loss the window is longer for a while.
            end = min(end, self._flushed)
            for held in self._held.behind(self._left) if end > self._left else ():
                first, self._left = max(self._left, 1), min(held.end, end)
                self._place(held)
                for block in range(first, self._left):
                    window.drop(block)

    def _place(self, held: Held) -> None:
        """Have a segment read where it lies now, as far as its blocks have left the window."""
        if held.segment.phase is Phase.LOST:
            return  # `refresh` sees to it.
        held.version = held.segment.version
        end = held.end if self._window is None else min(held.end, self._left)
        if end > held.start and not self._is_on_device(held):
            self.cache.place(held.start, end - held.start, run_of(self._segments, held.segment))

    def _copy_out(self, end: int, tokens: Sequence[int], *, waits: bool = True) -> None:
        """Copy the blocks of the window before `end` into own segments."""
        window = self._window
        assert window is not None
        while self._flushed < end:
            held = self._held.last
            if held is None or held.segment.phase is not Phase.OPEN:
                held = self._open(self._flushed, waits=waits)
            segment = held.segment
            assert segment.addresses_L is not None, "an open segment lies in its home"
            room_blocks = segment.room_blocks
            blocks = range(self._flushed, min(end, held.start + room_blocks))
            window.copy_out(blocks, segment.addresses_L, first_block=blocks.start - held.start, room_blocks=room_blocks)
            moved_bytes = len(blocks) * self._segments.layout.block_bytes
            self._parts.telemetry.count(names.MOVED_BYTES, moved_bytes, source=Tier.DEVICE, target=Tier.HOST)
            held.end = self._flushed = blocks.stop
            if held.end - held.start == room_blocks:
                self._seal(held, tokens)

    def _share_rest(self, whole_blocks: int, tokens: Sequence[int]) -> None:
        """Seal what is filled of the open segments, up to the sequence's last whole block."""
        if self._window is not None:
            # Room that takes time to come is not worth waiting for: whoever cancels wants to go on.
            self._copy_out(whole_blocks, tokens, waits=False)
        for held in self._held:
            held.end = min(held.end, whole_blocks)
            if held.segment.phase is Phase.OPEN and held.end > held.start:
                self._seal(held, tokens)

    def _seal(self, held: Held, tokens: Sequence[int]) -> None:
        segment, blocks = held.segment, held.end - held.start
        parent = self._held.before(held)
        is_shared = self._retrieved_from is None or held.end <= self._retrieved_from
        label = label_of(held, self._keys, tokens) if self._keys is not None and is_shared else None
        self._parts.cluster(segment, blocks)
        self._segments.seal(segment, label, parent=parent)
        if segment.clustered_blocks:
            self.cache.place(held.start, blocks, run_of(self._segments, segment))

    def _rewind(self, lost: Held) -> None:
        """Go back to the block before a lost segment: what follows is computed again."""
        if self._keys is None:
            raise unknown_tokens_error(lost)
        for _ in self._held.behind(lost.start):
            self._held.let_go()
        self._flushed = lost.start
        self._rooms.restart(lost.start)
        if self._window is not None:
            if lost.start >= self._left:
                return  # All of it is in the window still.
            self._window.drop_from(lost.start)
        self.cache.set_tokens(lost.start * BLOCK_TOKENS)
        self._left = lost.start

    def _is_on_device(self, held: Held) -> bool:
        """Whether it is the sink, which the window keeps besides."""
        return self._window is not None and held.start == 0 and held.end == 1 and 0 in self._window
