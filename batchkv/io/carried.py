"""The columns that are copied from a job to its result: one schema over all blocks and files."""

from __future__ import annotations

import pyarrow as pa

from batchkv.errors import UserError
from batchkv.io.columns import one_line, shown, shown_type


class CarriedSchema:
    """Grows with the blocks: a column that a block lacks is null there, and integers and floats are floats."""

    def __init__(self) -> None:
        self.schema = pa.schema([])
        self.is_mixed = False  # whether some columns came with several types
        self._where: dict[str, tuple[pa.DataType, str]] = {}  # where each column was first seen with values

    def add(self, schema: pa.Schema, where: str) -> None:
        """One more block, that begins at `where`.

        Raises:
            UserError: a column of it has a type that goes together with no type of those before.
        """
        if schema.equals(self.schema):
            return
        for field in schema:
            self._add_field(field, where)

    def _add_field(self, field: pa.Field, where: str) -> None:
        if pa.types.is_null(field.type) and field.name in self._where:
            return
        seen = self._where.setdefault(field.name, (field.type, where))
        if pa.types.is_null(seen[0]):
            self._where[field.name] = (field.type, where)
        self.is_mixed |= not pa.types.is_null(seen[0]) and seen[0] != field.type
        try:
            self.schema = pa.unify_schemas(
                [self.schema, pa.schema([field.with_nullable(True)])], promote_options="permissive"
            )
        except pa.ArrowException:
            raise UserError(
                f"column {shown(field.name)} has conflicting types, {shown_type(seen[0])} in {seen[1]} and "
                f"{shown_type(field.type)} in {where}: "
                "give it one type, for example make all of it strings"
            ) from None


def conformed(table: pa.Table, schema: pa.Schema, num_rows: int, where: str) -> pa.Table:
    """The columns of a block of `num_rows` rows with the types of all blocks, null where the block lacks one.

    Raises:
        UserError: a value does not fit the type, as a large integer among floats; the block begins at `where`.
    """
    columns = {field.name: pa.chunked_array([pa.nulls(num_rows, field.type)]) for field in schema}
    for name, column in zip(table.column_names, table.columns, strict=True):
        dtype = schema.field(name).type
        try:
            columns[name] = column.cast(dtype)
        except pa.ArrowException as error:
            raise UserError(
                f"{where}: column {shown(name)} is {shown_type(dtype)} elsewhere, which some values here do not fit "
                f"({one_line(str(error))}): give it one type, for example make all of it strings"
            ) from None
    return pa.table(columns, schema=schema)
