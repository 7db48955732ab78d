"""Files that recipes write."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkv.errors import UserError
from batchkv.recipes.output import check_output, whole_file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.txt", "must end in .csv or .parquet"),
        ("folder/out.csv", "is in a folder that does not exist"),
        ("old.csv", "exists; add --overwrite to replace it"),
    ],
)
def test_what_cannot_be_written_is_refused_before(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "old.csv").touch()
    with pytest.raises(UserError, match=message):
        check_output(tmp_path / name, (".csv", ".parquet"), overwrite=False)
    check_output(tmp_path / "new.csv", (".csv",), overwrite=False)
    check_output(tmp_path / "old.csv", (".csv",), overwrite=True)


def test_a_file_is_complete_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with whole_file(path) as part:
        part.write_text("new")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), whole_file(path) as part:
        part.write_text("half, and then \udc00", encoding="utf-8")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["out.csv"]
