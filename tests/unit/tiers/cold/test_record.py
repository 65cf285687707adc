import pytest

from h3kv.tiers.cold.record import SECTOR_BYTES, TWIN_BYTES, Kind, pack_record, twin_offset, unpack_twin, versions


def twin(*records: tuple[int, bytes]) -> bytearray:
    """Two sectors after these records were written one after the other."""
    sectors = bytearray(TWIN_BYTES)
    for sequence, payload in records:
        at = twin_offset(0, sequence)
        sectors[at : at + SECTOR_BYTES] = pack_record(Kind.AREA, sequence, payload)
    return sectors


def test_newer_record_is_the_truth() -> None:
    found = unpack_twin(Kind.AREA, bytes(twin((1, b"old"), (2, b"new"))))
    assert found is not None
    assert (found.sequence, found.payload) == (2, b"new")


def test_torn_write_loses_the_new_fact_and_keeps_the_old_one() -> None:
    sectors = twin((1, b"old"), (2, b"new"))
    at = twin_offset(0, 2)
    sectors[at + 2048 : at + SECTOR_BYTES] = b"\xff" * 2048
    found = unpack_twin(Kind.AREA, bytes(sectors))
    assert found is not None
    assert found.payload == b"old"


def test_each_write_goes_to_the_older_sector() -> None:
    found = unpack_twin(Kind.AREA, bytes(twin((1, b"a"), (2, b"b"), (3, b"c"))))
    assert found is not None
    assert found.payload == b"c"


@pytest.mark.parametrize("at", [0, 8, 12, 16, 24, 28, 32, 40, 4095])
def test_any_changed_byte_makes_a_record_invalid(at: int) -> None:
    sectors = twin((2, b"payload"))
    sectors[at] ^= 1
    assert unpack_twin(Kind.AREA, bytes(sectors)) is None


def test_record_of_another_kind_is_not_found() -> None:
    assert unpack_twin(Kind.BUDGET, bytes(twin((1, b"x")))) is None


def test_version_can_be_read_though_the_record_cannot() -> None:
    sectors = twin((2, b"x"))
    sectors[12:16] = (9).to_bytes(4, "little")
    assert unpack_twin(Kind.AREA, bytes(sectors)) is None
    assert versions(bytes(sectors)) == {9}
    assert versions(bytes(TWIN_BYTES)) == set()
