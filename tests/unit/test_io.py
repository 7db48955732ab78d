"""What job files may look like, and that result files are complete or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkv.errors import UserError
from batchkv.io import write
from batchkv.io.carried import CarriedSchema, conformed
from batchkv.io.columns import storable, to_cells
from batchkv.io.read import JobTable, open_jobs
from batchkv.io.write import check_schema, checked_target, write_table
from batchkv.job import carried_columns
from tests.jobs import read_block

TABLE = pa.table({"id": ["a", "b"], "prompt": ["one", "two"], "score": [1, 2]})
ENDINGS = [".parquet", ".arrow", ".feather", ".ipc", ".jsonl", ".ndjson"]


def cells(table: JobTable) -> dict[str, list[Any]]:
    return {name: to_cells(column) for name, column in table.columns.items()}


def blocks(jobs: Any) -> list[dict[str, list[Any]]]:
    return [cells(table) for table in open_jobs(jobs).blocks()]


def json_lines(folder: Path, *lines: object, name: str = "jobs.jsonl") -> Path:
    """A file of these lines: bytes and strings as they are, anything else as JSON."""
    path = folder / name
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


class TestReading:
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_every_format_reads_back_what_was_written(self, tmp_path: Path, ending: str) -> None:
        write_table(TABLE, tmp_path / f"jobs{ending}")
        assert cells(read_block(tmp_path / f"jobs{ending}")) == TABLE.to_pydict()

    def test_an_ending_in_capitals_is_the_same_ending(self, tmp_path: Path) -> None:
        pq.write_table(TABLE, tmp_path / "JOBS.PARQUET")
        assert read_block(str(tmp_path / "JOBS.PARQUET")).num_rows == 2

    def test_an_arrow_stream_reads_like_an_arrow_file(self, tmp_path: Path) -> None:
        path = tmp_path / "jobs.arrow"
        with path.open("wb") as file, pa.ipc.new_stream(file, TABLE.schema) as writer:
            writer.write_table(TABLE)
        assert cells(read_block(path)) == TABLE.to_pydict()

    def test_tables_and_frames_are_jobs(self) -> None:
        assert cells(read_block(TABLE)) == TABLE.to_pydict()
        assert cells(read_block(pl.DataFrame(TABLE))) == TABLE.to_pydict()

    def test_a_folder_named_like_a_partition_adds_no_column(self, tmp_path: Path) -> None:
        (tmp_path / "day=1").mkdir()
        pq.write_table(TABLE, tmp_path / "day=1" / "jobs.parquet")
        assert list(read_block(tmp_path / "day=1" / "jobs.parquet").columns) == TABLE.column_names

    def test_a_glob_is_sorted_and_a_list_keeps_its_order(self, tmp_path: Path) -> None:
        for name in ("b", "a"):
            pq.write_table(pa.table({"prompt": [name]}), tmp_path / f"{name}.parquet")
        assert blocks(tmp_path / "*.parquet") == [{"prompt": ["a"]}, {"prompt": ["b"]}]
        listed = [tmp_path / "b.parquet", str(tmp_path / "a.parquet")]
        assert blocks(listed) == [{"prompt": ["b"]}, {"prompt": ["a"]}]

    def test_a_file_whose_name_looks_like_a_glob_is_that_file(self, tmp_path: Path) -> None:
        pq.write_table(TABLE, tmp_path / "jobs[1].parquet")
        assert read_block(tmp_path / "jobs[1].parquet").num_rows == 2

    def test_columns_that_a_file_lacks_are_not_in_its_blocks(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"prompt": ["a"], "x": [1]}), tmp_path / "1.parquet")
        pq.write_table(pa.table({"prompt": ["b"], "x": [1.5], "y": ["q"]}), tmp_path / "2.parquet")
        assert blocks(tmp_path / "?.parquet") == [
            {"prompt": ["a"], "x": [1]},
            {"prompt": ["b"], "x": [1.5], "y": ["q"]},
        ]

    def test_json_lines_and_parquet_are_one_job(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"prompt": ["a"], "n": [1], "x": [1]}), tmp_path / "1.parquet")
        lines = json_lines(tmp_path, "not json", {"prompt": "b", "n": "two", "x": 2})
        first, second = open_jobs([tmp_path / "1.parquet", lines]).blocks()
        assert cells(first) == {"prompt": ["a"], "n": [1], "x": [1]}
        assert cells(second) == {"prompt": [None, "b"], "n": [None, "two"], "x": [None, 2]}
        assert (first.errors, list(second.errors)) == ({}, [0])

    @pytest.mark.parametrize("ending", [*ENDINGS, "table"])
    def test_blocks_follow_each_other_and_say_where_they_begin(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
    ) -> None:
        monkeypatch.setattr("batchkv.io.read.BLOCK_ROWS", 3)
        table, path = pa.table({"prompt": list("abcdefgh")}), tmp_path / f"jobs{ending}"
        if ending != "table":
            write_table(table, path)
        source = open_jobs(table if ending == "table" else path)
        for _ in range(2):  # it can be read any number of times
            assert [cells(block)["prompt"] for block in source.blocks()] == [list("abc"), list("def"), list("gh")]
        last = list(source.blocks())[-1].where
        assert last == {"table": "the table row 6"}.get(ending, f"{path} {'line 7' if 'json' in ending else 'row 6'}")

    @pytest.mark.parametrize(
        ("limit", "expected"), [(0, [[]]), (2, ["ab"]), (3, ["abc"]), (4, ["abc", "d"]), (9, ["abc", "de"])]
    )
    def test_a_limit_ends_in_the_middle_of_a_block(
        self, monkeypatch: pytest.MonkeyPatch, limit: int, expected: list[str]
    ) -> None:
        monkeypatch.setattr("batchkv.io.read.BLOCK_ROWS", 3)
        read = open_jobs(pa.table({"prompt": list("abcde")}), limit).blocks()
        assert [cells(block)["prompt"] for block in read] == [list(part) for part in expected]

    def test_what_comes_after_the_limit_is_not_read(self, tmp_path: Path) -> None:
        pq.write_table(TABLE, tmp_path / "1.parquet")
        (tmp_path / "2.parquet").write_bytes(b"corrupt")
        assert [block.num_rows for block in open_jobs(tmp_path / "*.parquet", 2).blocks()] == [2]

    def test_large_rows_come_a_few_at_a_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        table = pa.table({"prompt": [str(i) * 400 for i in range(8)]})
        pq.write_table(table, tmp_path / "jobs.parquet", compression="none", use_dictionary=False)
        write_table(table, tmp_path / "jobs.jsonl")
        monkeypatch.setattr("batchkv.io.read.BLOCK_BYTES", 1000)
        for ending in (".parquet", ".jsonl"):
            read = list(open_jobs(tmp_path / f"jobs{ending}").blocks())
            assert [text for block in read for text in cells(block)["prompt"]] == table["prompt"].to_pylist()
            assert max(block.num_rows for block in read) <= 3

    @pytest.mark.parametrize("table", [pa.table({}), TABLE[:0]])
    def test_an_empty_table_is_one_empty_block(self, table: pa.Table) -> None:
        block = read_block(table)
        assert (block.num_rows, list(block.columns)) == (0, table.column_names)

    def test_head_keeps_the_first_rows_and_their_errors(self, tmp_path: Path) -> None:
        table = read_block(json_lines(tmp_path, {"prompt": "a"}, "x", {"prompt": "b"}, "x")).head(2)
        assert (table.num_rows, cells(table), list(table.errors)) == (2, {"prompt": ["a", None]}, [1])


class TestJsonLines:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"prompt": secret', "Expecting value at column 12"),
            ("[1, 2]", "it holds another JSON value"),
            ('"secret"', "it holds another JSON value"),
            (b'{"prompt": "secret\xff"}', "not UTF-8 at byte 19"),
            ('{"prompt": "secret\\ud800"}', "half of a surrogate pair"),
            ('{"\\uDFFF": "secret"}', "half of a surrogate pair"),
            ('{"prompt": "secret", "x": ' + "[" * 40 + "]" * 40 + "}", "nested more than 32 levels"),
            ('{"prompt": "secret", "x": ' + "[" * 200_000, "nested more than 32 levels"),
            ('{"prompt": "secret", "x": ' + "1" * 5000 + "}", "too many digits"),
        ],
    )
    def test_a_bad_line_is_an_error_row_that_says_where_and_why(
        self, tmp_path: Path, line: str | bytes, reason: str
    ) -> None:
        path = json_lines(tmp_path, {"prompt": "a"}, "", line, {"prompt": "b"})
        table = read_block(path)
        assert cells(table) == {"prompt": ["a", None, "b"]}
        assert table.errors[1].code == "bad_json"
        assert table.errors[1].message.startswith(f"{path} line 3 is no JSON object: ")
        assert reason in table.errors[1].message
        assert "secret" not in table.errors[1].message

    def test_odd_but_valid_lines_are_rows(self, tmp_path: Path) -> None:
        path = json_lines(
            tmp_path,
            b'\xef\xbb\xbf{"prompt": "bom"}\r',
            "   ",
            '{"prompt": "\\u0000 \\ud83d\\ude00 \u2028"}',
            '{"prompt": "' + "[" * 100 + '"}',
            '{"prompt": NaN}',
        )
        table = read_block(path)
        assert table.errors == {}
        assert cells(table)["prompt"][:3] == ["bom", "\0 😀 \u2028", "[" * 100]

    def test_job_columns_may_mix_types_but_carried_columns_may_not(self, tmp_path: Path) -> None:
        path = json_lines(tmp_path, {"prompt": "a", "n": 1}, {"prompt": 2, "n": "x"}, {"n": [True]})
        assert cells(read_block(path)) == {"prompt": ["a", 2, None], "n": [1, "x", [True]]}

    @pytest.mark.parametrize("odd", ["private text", True, [1], {"a": 1}, 2**70])
    def test_a_carried_column_of_mixed_types_is_named_with_its_line(self, tmp_path: Path, odd: object) -> None:
        lines: list[object] = [{"prompt": "a", "score": 1.5} for _ in range(9)]
        path = json_lines(tmp_path, *lines, "", {"prompt": "b", "score": odd}, {"prompt": "c"})
        with pytest.raises(UserError, match=r"jobs\.jsonl line 11: column 'score' holds .* strings") as caught:
            read_block(path)
        assert "private" not in str(caught.value)

    def test_a_file_without_any_json_line_is_unusable(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"line 1 is no JSON object.*one JSON object on each line"):
            read_block(json_lines(tmp_path, "[", '{"prompt": "a"},', "]"))

    def test_an_empty_file_is_an_empty_job(self, tmp_path: Path) -> None:
        (tmp_path / "jobs.jsonl").write_bytes(b"")
        assert read_block(tmp_path / "jobs.jsonl").num_rows == 0

    def test_lines_of_any_length_and_bad_ones_stand_in_their_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("batchkv.io.read.BLOCK_ROWS", 2)
        monkeypatch.setattr("batchkv.io.read.MAX_LINE_BYTES", 100)
        lines = json_lines(tmp_path, {"prompt": "a"}, "x", "", {"prompt": "b" * 200}, {"prompt": "c"}, {"x": 1})
        read = list(open_jobs(lines).blocks())
        assert [cells(block) for block in read] == [
            {"prompt": ["a", None]},
            {"prompt": [None, "c"]},
            {"x": [1]},
        ]
        assert [list(block.errors) for block in read] == [[1], [0], []]
        assert "line 4 is no JSON object: longer than" in read[1].errors[0].message

    def test_a_file_is_unusable_only_if_no_block_has_a_good_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("batchkv.io.read.BLOCK_ROWS", 2)
        assert len(blocks(json_lines(tmp_path, "x", "x", "x", {"prompt": "a"}))) == 2
        with pytest.raises(UserError, match=r"line 1 is no JSON object.*and so are all others"):
            blocks(json_lines(tmp_path, "x", "x", "x", "x", name="bad.jsonl"))


class TestUnusableFiles:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("missing.parquet", "missing.parquet does not exist"),
            ("missing*.parquet", "no file matches .*missing"),
            ("jobs.csv", "unknown ending '.csv'.*ends in one of .parquet"),
            ("folder", "folder is a directory: name its files"),
            ("corrupt.parquet", "corrupt.parquet cannot be read as a .parquet file"),
            ("corrupt.arrow", "corrupt.arrow cannot be read as a .arrow file"),
            ("empty.parquet", "empty.parquet cannot be read"),
        ],
    )
    def test_the_error_is_one_line_that_names_the_file(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / "folder").mkdir()
        for file in ("jobs.csv", "corrupt.parquet", "corrupt.arrow"):
            (tmp_path / file).write_bytes(b"no such format at all, but long enough" * 10)
        (tmp_path / "empty.parquet").write_bytes(b"")
        with pytest.raises(UserError, match=message) as caught:
            read_block(tmp_path / name)
        assert "\n" not in str(caught.value)

    def test_conflicting_types_are_named_with_their_files(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"prompt": ["a"], "x": [1]}), tmp_path / "1.parquet")
        pq.write_table(pa.table({"prompt": ["b"], "x": ["q"]}), tmp_path / "2.parquet")
        first, second = open_jobs(tmp_path / "*.parquet").blocks()
        carried = CarriedSchema()
        carried.add(carried_columns(first).schema, first.where)
        with pytest.raises(
            UserError,
            match=r"'x' has conflicting types, int64 in .*1.parquet row 0 and string in .*2.parquet row 0: give it one",
        ):
            carried.add(carried_columns(second).schema, second.where)

    def test_two_columns_of_one_name_are_unusable(self) -> None:
        with pytest.raises(UserError, match="two columns named 'x'"):
            read_block(pa.table([[1], [2]], names=["x", "x"]))

    def test_two_fields_of_one_name_are_unusable_at_any_depth(self) -> None:
        twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["y", "y"])
        lists = pa.ListArray.from_arrays([0, 1], twice)
        for column in (twice, lists):
            with pytest.raises(UserError, match="column 'x' have two fields named 'y'"):
                read_block(pa.table({"prompt": ["a"], "x": column}))

    @pytest.mark.parametrize("jobs", [[], [1], 5, pl.LazyFrame({"prompt": ["a"]})])
    def test_other_values_are_no_jobs(self, jobs: Any) -> None:
        with pytest.raises(UserError, match="must be a path"):
            read_block(jobs)


class TestCarriedSchema:
    @staticmethod
    def schema_of(*tables: pa.Table) -> pa.Schema:
        carried = CarriedSchema()
        for number, table in enumerate(tables):
            carried.add(table.schema, f"block {number}")
        return carried.schema

    def test_columns_come_in_the_order_in_which_they_are_first_seen(self) -> None:
        schema = self.schema_of(pa.table({"b": [1], "a": ["x"]}), pa.table({"c": [1.5], "a": ["y"]}))
        assert schema == pa.schema({"b": pa.int64(), "a": pa.string(), "c": pa.float64()})

    @pytest.mark.parametrize("turn", [1, -1])
    @pytest.mark.parametrize(
        ("one", "other", "both"),
        [
            (pa.int64(), pa.float64(), pa.float64()),
            (pa.int8(), pa.int32(), pa.int32()),
            (pa.null(), pa.string(), pa.string()),
            (pa.list_(pa.null()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        ],
    )
    def test_types_that_go_together_are_the_wider_one(
        self, one: pa.DataType, other: pa.DataType, both: pa.DataType, turn: int
    ) -> None:
        tables = [pa.table({"x": pa.nulls(1, dtype)}) for dtype in (one, other)][::turn]
        assert self.schema_of(*tables, *tables) == pa.schema({"x": both})

    def test_a_conflict_names_the_first_block_with_values(self) -> None:
        tables = [pa.table({"x": [None]}), pa.table({"x": ["text"]}), pa.table({"x": [None]}), pa.table({"x": [1]})]
        with pytest.raises(UserError, match="column 'x' has conflicting types, string in block 1 and int64 in block 3"):
            self.schema_of(*tables)

    def test_a_block_takes_the_types_of_all_and_is_null_where_it_lacks_a_column(self) -> None:
        blocks = [pa.table({"x": [1, 2]}), pa.table({"y": ["a"], "x": [0.5]}), pa.table({"x": [None]})]
        schema = self.schema_of(*blocks)
        joined = pa.concat_tables([conformed(block, schema, block.num_rows, "here") for block in blocks])
        assert joined.schema == schema
        assert joined.to_pydict() == {"x": [1.0, 2.0, 0.5, None], "y": [None, None, "a", None]}

    def test_only_columns_of_several_types_are_mixed(self) -> None:
        def is_mixed(*tables: pa.Table) -> bool:
            carried = CarriedSchema()
            for table in tables:
                carried.add(table.schema, "block")
            return carried.is_mixed

        nothing, integers, floats = pa.table({"x": [None]}), pa.table({"x": [1]}), pa.table({"x": [1.5]})
        assert not is_mixed(nothing, integers, pa.table({"y": [1.5]}), nothing, integers)
        assert is_mixed(integers, floats)
        assert is_mixed(nothing, floats, integers)

    def test_a_value_that_does_not_fit_the_type_of_all_is_a_user_error(self) -> None:
        block = pa.table({"x": [2**60 + 1]})
        with pytest.raises(UserError, match=r"block 3: column 'x' is double elsewhere.*1152921504606846977.*strings"):
            conformed(block, pa.schema({"x": pa.float64()}), 1, "block 3")

    def test_a_block_without_any_column_has_its_rows(self) -> None:
        assert conformed(pa.table({}), pa.schema({"x": pa.int64()}), 2, "here").to_pydict() == {"x": [None, None]}
        assert conformed(pa.table({}), pa.schema([]), 2, "here").num_columns == 0


class TestFingerprint:
    def test_names_sizes_and_contents_count_but_not_folders_and_times(self, tmp_path: Path) -> None:
        marks = []
        for folder, name, text in (("1", "a", "x"), ("2", "a", "x"), ("3", "a", "y"), ("4", "b", "x")):
            (tmp_path / folder).mkdir()
            path = tmp_path / folder / f"{name}.jsonl"
            path.write_text(text)
            os.utime(path, (int(folder), int(folder)))
            marks.append(open_jobs(path).fingerprint())
        assert marks[0] == marks[1]
        assert marks[0] not in marks[2:]
        assert [mark["file"] for mark in marks[3]] == ["b.jsonl"]

    def test_a_table_has_none(self) -> None:
        with pytest.raises(UserError, match="write it to one"):
            open_jobs(TABLE).fingerprint()


class TestWriting:
    def test_parquet_and_arrow_keep_nan_and_json_lines_write_null(self, tmp_path: Path) -> None:
        table = pa.table({"x": [1.5, float("nan"), float("inf"), None]})
        for ending in (".parquet", ".arrow", ".jsonl"):
            write_table(table, tmp_path / f"out{ending}")
        for ending in (".parquet", ".arrow"):
            column = read_block(tmp_path / f"out{ending}").columns["x"]
            assert repr(to_cells(column)) == "[1.5, nan, inf, None]"
        lines = (tmp_path / "out.jsonl").read_text().splitlines()
        assert [json.loads(line)["x"] for line in lines] == [1.5, None, None, None]

    def test_parquet_keeps_the_metadata(self, tmp_path: Path) -> None:
        write_table(TABLE.replace_schema_metadata({b"batchkv.summary": b"{}"}), tmp_path / "out.parquet")
        assert pq.read_schema(tmp_path / "out.parquet").metadata[b"batchkv.summary"] == b"{}"

    def test_a_failed_write_leaves_what_was_there_and_no_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def break_half_way(tables: Any, schema: pa.Schema, file: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

        write_table(TABLE, tmp_path / "out.parquet")
        before = (tmp_path / "out.parquet").read_bytes()
        monkeypatch.setitem(write._WRITERS, ".parquet", break_half_way)
        with pytest.raises(UserError, match=r"out\.parquet cannot be written: No space left"):
            write_table(TABLE, tmp_path / "out.parquet")
        assert (tmp_path / "out.parquet").read_bytes() == before
        assert os.listdir(tmp_path) == ["out.parquet"]

    def test_the_file_is_on_disk_before_it_has_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        fsync, rename = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
        monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), rename(a, b)))
        write_table(TABLE, tmp_path / "out.parquet")
        assert calls == ["fsync", "replace", "fsync"]

    def test_an_interrupt_leaves_no_rest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(tables: Any, schema: pa.Schema, file: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setitem(write._WRITERS, ".parquet", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_table(TABLE, tmp_path / "out.parquet")
        assert os.listdir(tmp_path) == []

    def test_a_link_is_followed_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "out.parquet").symlink_to(tmp_path / "disk" / "real.parquet")
        write_table(TABLE, tmp_path / "out.parquet")
        assert (tmp_path / "out.parquet").is_symlink()
        assert pq.read_table(tmp_path / "disk" / "real.parquet").num_rows == 2

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("out.csv", "unknown ending '.csv'"),
            ("nowhere/out.parquet", "nowhere does not exist"),
            ("folder.parquet", "folder.parquet is a directory"),
        ],
    )
    def test_both_check_and_write_refuse_a_hopeless_path(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / "folder.parquet").mkdir()
        with pytest.raises(UserError, match=message):
            checked_target(tmp_path / name)
        with pytest.raises(UserError, match=message):
            write_table(TABLE, tmp_path / name)

    def test_an_existing_file_is_replaced_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "out.parquet").write_text("old")
        schema = TABLE.schema

        def check() -> None:
            assert pq.read_table(tmp_path / "new") == TABLE
            assert (tmp_path / "out.parquet").read_text() == "old"

        write.write_tables([TABLE], schema, tmp_path / "out.parquet", tmp_path / "new", before_rename=check)
        assert pq.read_table(tmp_path / "out.parquet") == TABLE
        assert os.listdir(tmp_path) == ["out.parquet"]

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_tables_follow_each_other_in_the_file(self, tmp_path: Path, ending: str) -> None:
        path = tmp_path / f"out{ending}"
        tables = (TABLE.slice(start, 1) for start in (0, 1))
        write.write_tables(tables, TABLE.schema, path, tmp_path / "temporary")
        assert [name for read in blocks(path) for name in read["id"]] == ["a", "b"]

    @pytest.mark.parametrize("ending", [".parquet", ".arrow"])
    def test_no_table_at_all_is_a_file_without_rows(self, tmp_path: Path, ending: str) -> None:
        path = tmp_path / f"out{ending}"
        write.write_tables([], TABLE.schema, path, tmp_path / "temporary")
        assert (read_block(path).num_rows, list(read_block(path).columns)) == (0, TABLE.column_names)

    def test_small_tables_share_a_row_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tables = [pa.table({"x": [i]}) for i in range(10)]
        monkeypatch.setattr(write, "_GROUP_ROWS", 4)
        write.write_tables(tables, tables[0].schema, tmp_path / "out.parquet", tmp_path / "temporary")
        metadata = pq.read_metadata(tmp_path / "out.parquet")
        assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4, 4, 2]

    def test_a_folder_without_permission_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UserError, match="not writable"):
            checked_target(tmp_path / "out.parquet")

    @pytest.mark.parametrize(
        ("ending", "array"),
        [
            (".parquet", pa.array([{}])),
            (".jsonl", pa.array([b"\xff"])),
            (".jsonl", pa.array([[{"a": b"\xff"}]])),
            (".jsonl", pa.array([[1]], pa.list_view(pa.int64()))),
        ],
    )
    def test_a_column_the_format_cannot_hold_is_found_beforehand(
        self, tmp_path: Path, ending: str, array: pa.Array
    ) -> None:
        table = pa.table({"x": array})
        with pytest.raises(UserError, match="cannot"):
            check_schema(tmp_path / f"out{ending}", table.schema)
        with pytest.raises(UserError, match="cannot"):
            write_table(table, tmp_path / f"out{ending}")
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([{}, None], [None, None]),
        ([{"a": {}, "b": 1}, None], [{"a": None, "b": 1}, None]),
        ([[{}], None, [{}, None]], [[None], None, [None, None]]),
        ([[{"a": [{}], "b": 2}], None], [[{"a": [None], "b": 2}], None]),
        ([{"a": [1]}], [{"a": [1]}]),
    ],
)
def test_empty_structs_become_null_and_all_else_stays(
    tmp_path: Path, values: list[object], expected: list[object]
) -> None:
    array = storable(pa.array(values))
    assert array.to_pylist() == expected
    assert storable(pa.array(values)[1:]).to_pylist() == expected[1:]
    write_table(pa.table({"x": array}), tmp_path / "out.parquet")
