"""The files that compaction rewrites, and an amount written that does not grow with the table."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile, _take
from airflow_provider_pgrepl.replication.lake.files.compaction import FileSize, files_to_compact
from tests.support.examples import examples

KIB, MIB = 1 << 10, 1 << 20


def whole(*sizes: int) -> list[FileSize]:
    return [FileSize(size, 0.0) for size in sizes]


def test_small_files_are_joined_once_there_are_enough_of_a_size() -> None:
    assert files_to_compact(whole(*[KIB] * 9, 100 * MIB), 10, 0.25) == []
    assert files_to_compact(whole(100 * MIB, *[KIB] * 10), 10, 0.25) == list(range(1, 11))


def test_files_that_are_smaller_still_go_along() -> None:
    sizes = whole(*[MIB] * 10, KIB, 3 * MIB, 100 * MIB)
    assert files_to_compact(sizes, 10, 0.25) == list(range(11))


def test_a_file_without_rows_goes_whatever_its_size() -> None:
    assert files_to_compact([FileSize(100 * MIB, 1.0), FileSize(KIB, 0.0)], 10, 0.25) == [0]


def test_files_of_which_much_is_gone_are_purged_the_worst_first_and_not_all_at_once() -> None:
    sizes = [FileSize(50 * MIB, share) for share in (0.2, 0.3, 0.9, 0.5)]
    assert files_to_compact(sizes, 10, 0.25) == [2, 3]
    assert files_to_compact(sizes[:2], 10, 0.25) == [1]
    assert files_to_compact(sizes[:1], 10, 0.25) == []


def test_a_large_file_of_which_much_is_gone_waits_for_no_small_one() -> None:
    sizes = [FileSize(MIB, 0.5), FileSize(120 * MIB, 0.3), FileSize(2 * MIB, 0.9)]
    assert files_to_compact(sizes, 10, 0.25) == [1]


def test_files_are_joined_the_smallest_first_and_not_all_at_once() -> None:
    sizes = [FileSize(size * MIB, 0) for size in (15, 3, 14, 4, 13, 5, 12, 6, 11, 7)]
    assert files_to_compact(sizes, 10, 0.25) == [1, 3, 5, 7, 9]
    assert files_to_compact([FileSize(2 * MIB, 0, f"{day}") for day in range(3)] * 10, 10, 0.25) == [
        number for number in range(30) if number % 3 < 2
    ]


def test_without_a_share_all_marked_files_are_purged() -> None:
    sizes = [FileSize(MIB, 0.001), FileSize(MIB, 0.0)]
    assert files_to_compact(sizes, 10, 0.0) == [0]


@examples(100)
@given(st.lists(st.integers(KIB, 200 * KIB), min_size=200, max_size=2000))
def test_files_stay_few_and_each_byte_is_written_once_a_tier(batches: list[int]) -> None:
    files: list[int] = []
    written = 0
    for size in batches:
        files.append(size)
        chosen = files_to_compact(whole(*files), 10, 0.25)
        if chosen:
            joined = sum(files[number] for number in chosen)
            files = [size for number, size in enumerate(files) if number not in chosen] + [joined]
            written += joined
        assert len(files) <= 5 * 10 + sum(batches) // (16 * MIB)
    assert written <= 6 * sum(batches)


def test_a_file_whose_vectors_have_cost_as_much_as_it_has_is_purged_early() -> None:
    sizes = [FileSize(MIB, 0.05, vectors=2 * MIB), FileSize(MIB, 0.05, vectors=MIB // 2), FileSize(MIB, 0)]
    assert files_to_compact(sizes, 10, 0.25) == [0]


def test_deletion_vector_cost_is_estimated_from_newest_commit() -> None:
    def vector(rows: int) -> dict[str, object]:
        place = {"storageType": "u", "pathOrInlineDv": "x", "offset": 1}
        return {**place, "sizeInBytes": 2 * rows, "cardinality": rows}

    files = {path: LiveFile({"path": path, "size": 1}) for path in ("first", "gone")}
    files["a b"] = LiveFile({"path": "a%20b", "size": 1, "deletionVector": vector(90)})
    actions = [
        {"remove": {"path": "a%20b", "deletionVector": vector(90)}},
        {"add": {"path": "a%20b", "deletionVector": vector(100)}},
        {"remove": {"path": "first"}},
        {"add": {"path": "first", "deletionVector": vector(7)}},
        {"add": {"path": "new"}},
        {"remove": {"path": "gone"}},
    ]
    _take(files, {}, actions)
    assert {path: file.marked for path, file in files.items() if file.marked} == {"a b": 10, "first": 7}
    # Ten commits: 20, 40, … 200 bytes, as half of 200 ten times, nearly.
    assert files["a b"].vector_bytes == 1_000
    assert LiveFile({"path": "a%20b", "size": 1, "deletionVector": vector(100)}).vector_bytes == 0
