"""What the controller knows of segments: the word of their owners, and until they spoke the directory's.

A restarted controller knows nothing. The directory tells it at once whom to expect and where blocks probably lie; the
owners then report all that they have, and their word replaces the hints. Commands follow from reports alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from h3kv.core.types import BlockKey, SegmentId
from h3kv.directory.entries import DirectoryEntry
from h3kv.policy.migration_state import Event, Owner, OwnerJoined, OwnerLeft, SegmentGone, SegmentReported


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """All segments of a process, at one moment."""

    owner: Owner
    segments: tuple[SegmentReported, ...]


@dataclass(frozen=True, slots=True)
class OwnerView:
    """What is known of one life of a process."""

    boot: str
    is_confirmed: bool
    """Whether it reported: then only its own word counts."""
    segments: Mapping[SegmentId, SegmentReported] = field(default_factory=dict)
    hints: Mapping[BlockKey, DirectoryEntry] = field(default_factory=dict)
    """Entries of the directory that nothing it said contradicts."""


@dataclass(frozen=True, slots=True)
class ControllerView:
    """What is known of all processes. Nobody changes its mappings."""

    owners: Mapping[str, OwnerView] = field(default_factory=dict)

    @property
    def awaited(self) -> tuple[Owner, ...]:
        """Processes that the directory knows and that did not report yet."""
        return tuple(Owner(name, each.boot) for name, each in self.owners.items() if not each.is_confirmed)


def with_entries(view: ControllerView, entries: Iterable[DirectoryEntry]) -> ControllerView:
    """The view with what a directory says, as far as owners do not say otherwise.

    Where entries of two lives of a silent owner meet, the later one in `entries` counts.
    """
    owners = dict(view.owners)
    for entry in entries:
        known = owners.get(entry.owner.name)
        if known is not None and known.is_confirmed and contradicts(known, entry):
            continue
        if known is None or known.boot != entry.owner.boot:
            known = OwnerView(entry.owner.boot, is_confirmed=False)
        owners[entry.owner.name] = replace(known, hints={**known.hints, entry.key: entry})
    return ControllerView(owners)


def with_report(view: ControllerView, report: OwnerReport) -> tuple[ControllerView, tuple[Event, ...]]:
    """The view with an owner's word in place of all that was known of it, and what changed, for `migration.step`."""
    name = report.owner.name
    known = view.owners.get(name)
    is_same_life = known is not None and known.boot == report.owner.boot
    before = known.segments if known is not None and is_same_life else {}
    after = {each.segment: each for each in report.segments}
    now = OwnerView(report.owner.boot, is_confirmed=True, segments=after)
    if known is not None and is_same_life:
        kept = {key: entry for key, entry in known.hints.items() if not contradicts(now, entry)}
        now = replace(now, hints=kept)
    events: list[Event] = []
    if known is None or not is_same_life or not known.is_confirmed:
        events.append(OwnerJoined(report.owner))
    events += [SegmentGone(report.owner, segment) for segment in before if segment not in after]
    events += [each for each in report.segments if before.get(each.segment) != each]
    return ControllerView({**view.owners, name: now}), tuple(events)


def without(view: ControllerView, owner: Owner) -> tuple[ControllerView, tuple[Event, ...]]:
    """The view after a life of a process ended, and what changed: nothing where a later one is there already."""
    known = view.owners.get(owner.name)
    if known is None or known.boot != owner.boot:
        return view, ()
    owners = {name: each for name, each in view.owners.items() if name != owner.name}
    return ControllerView(owners), (OwnerLeft(owner),) if known.is_confirmed else ()


def void_entries(view: ControllerView, entries: Iterable[DirectoryEntry]) -> tuple[DirectoryEntry, ...]:
    """Those entries of a directory that their owners contradict: to be withdrawn."""
    return tuple(
        entry
        for entry in entries
        if (known := view.owners.get(entry.owner.name)) is not None and known.is_confirmed and contradicts(known, entry)
    )


def contradicts(known: OwnerView, entry: DirectoryEntry) -> bool:
    """Whether an owner that reported has no such segment there: another life, another generation, another tier."""
    segment = known.segments.get(entry.segment)
    return (
        known.boot != entry.owner.boot
        or segment is None
        or segment.generation != entry.generation
        or entry.tier not in segment.tiers
    )
