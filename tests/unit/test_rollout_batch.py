"""`RolloutBatch` and what is exported from it, on batches written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchkv.rl import sampling_columns
from batchkv.rl.batch_schema import OPTIONAL_SCHEMA, SCHEMA
from batchkv.rl.ragged import Ragged
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.sampling_record import SamplingRecord

PAD = 9  # also the end token of the samples: masks must not be made from ids


def batch_of(*rows: dict[str, Any], pad_token_id: int = PAD) -> RolloutBatch:
    return RolloutBatch(table_of(*rows), pad_token_id)


def table_of(*rows: dict[str, Any]) -> pa.Table:
    filled = [
        {
            "prompt_index": 0,
            "sample_index": place,
            "finish_reason": "length" if row.get("truncated") else "stop",
            "truncated": False,
            "env_mask": [1] * len(row["token_ids"]),
            "seed": 2**64 - 1,
            "weight_version": 7,
            "num_cached_tokens": 0,
        }
        | row
        for place, row in enumerate(rows)
    ]
    return pa.Table.from_pylist(filled, schema=SCHEMA)


SHORT = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, PAD], "logprobs": [-0.5, -0.25]}
TURNS = {
    "prompt_token_ids": [5],
    "token_ids": [6, PAD, 7, 8, 6],  # an end token, then two tokens of the environment, then the model again
    "logprobs": [-1.0, -2.0, 0.0, 0.0, -3.0],
    "env_mask": [1, 1, 0, 0, 1],
    "truncated": True,
    "prompt_index": 1,
    "weight_version": 8,
}


@pytest.fixture
def batch() -> RolloutBatch:
    return batch_of(SHORT, TURNS)


def assert_tensors(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert given[name].dtype == tensor.dtype, name
        assert given[name].tolist() == tensor.tolist(), name


def ints(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def floats(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


# --- plain -----------------------------------------------------------------------------------------------------


def test_padded_tensors_meet_in_the_middle(batch: RolloutBatch) -> None:
    wanted = {
        "prompt_ids": ints([1, 2, 3], [PAD, PAD, 5]),
        "prompt_mask": ints([1, 1, 1], [0, 0, 1]),
        "completion_ids": ints([4, PAD, PAD, PAD, PAD], [6, PAD, 7, 8, 6]),
        "completion_mask": ints([1, 1, 0, 0, 0], [1, 1, 1, 1, 1]),
        "env_mask": ints([1, 1, 0, 0, 0], [1, 1, 0, 0, 1]),
        "logprobs": floats([-0.5, -0.25, 0, 0, 0], [-1, -2, 0, 0, -3]),
        "truncated": torch.tensor([False, True]),
    }
    assert_tensors(batch.to_padded(), wanted)


def test_tensors_are_copies(batch: RolloutBatch) -> None:
    for export in (batch.to_padded(), batch.to_verl(), batch.to_nemo_rl(), batch.to_areal()[0]):
        for tensor in export.values():
            tensor.zero_()
    assert batch.to_trl()["completion_ids"] == [SHORT["token_ids"], TURNS["token_ids"]]


# --- finished and not --------------------------------------------------------------------------------------------


def group(*reasons: str, prompt: int = 0, row: int = 0) -> list[dict[str, Any]]:
    """Samples of a prompt that ended so."""
    own = {"prompt_index": prompt, "row": row, "forked_from": -1, "forked_at": 0}
    return [
        SHORT | own | {"finish_reason": reason, "sample_index": sample, "token_versions": [3, 4]}
        for sample, reason in enumerate(reasons)
    ]


def rolled_out(*rows: dict[str, Any]) -> RolloutBatch:
    table = table_of(*rows)
    for name in ("row", "token_versions", "forked_from", "forked_at"):
        table = table.append_column(
            OPTIONAL_SCHEMA.field(name), pa.array([row[name] for row in rows]).cast(OPTIONAL_SCHEMA.field(name).type)
        )
    return RolloutBatch(table, PAD)


@pytest.mark.parametrize("length_ends", [True, False])
def test_a_sample_is_finished_or_not(length_ends: bool) -> None:
    batch = rolled_out(*group("stop", "length", "abort", "stop"))
    done = batch.finished(length_ends=length_ends).table["sample_index"].to_pylist()
    going = [sample for branch in batch.unfinished(length_ends=length_ends) for sample in branch.samples]
    assert done == ([0, 1, 3] if length_ends else [0, 3])
    assert sorted(done + going) == [0, 1, 2, 3]


def test_so_many_finished_samples_of_each_prompt_can_be_taken() -> None:
    rows = [*group("abort", "stop", "stop", "length"), *group("stop", "abort", prompt=1, row=1)]
    batch = rolled_out(*rows[::-1])
    taken = batch.finished(most=2).table
    assert taken["prompt_index"].to_pylist() == [1, 0, 0]
    assert taken["sample_index"].to_pylist() == [0, 2, 1]


def test_samples_of_a_row_in_several_batches_are_joined() -> None:
    first = rolled_out(*group("stop", "abort", row=7), *group("abort", "abort", prompt=1, row=3))
    later = rolled_out(*group("stop", "stop", row=3), *group("stop", "stop", row=7)[1:])
    joined = RolloutBatch.concat([first.finished(), later])
    assert joined.table["row"].to_pylist() == [7, 7, 3, 3]
    assert joined.table["prompt_index"].to_pylist() == [0, 0, 1, 1]
    assert joined.table["sample_index"].to_pylist() == [0, 1, 0, 1]
    assert joined.token_versions.lists() == [[3, 4]] * 4


def test_what_cannot_be_joined_is_refused() -> None:
    batch = rolled_out(*group("stop", row=7))
    with pytest.raises(ValueError, match="sample 0 of row 7 is there twice"):
        RolloutBatch.concat([batch, batch])
    with pytest.raises(ValueError, match=r"temperatures \[0.5, 1.0\], must be one"):
        RolloutBatch.concat([batch, RolloutBatch(batch.table, PAD, 0.5)])
    with pytest.raises(ValueError, match="no column row"):
        RolloutBatch.concat([batch_of(SHORT)])
    other = [SHORT | one | {"prompt_token_ids": [8]} for one in group("stop", "stop", row=7)]
    with pytest.raises(ValueError, match=r"row 7 has two prompts: .*rows="):
        RolloutBatch.concat([batch, rolled_out(*other[1:])])
    with pytest.raises(ValueError, match="there are no batches"):
        RolloutBatch.concat([])


def test_it_is_shown_in_a_line(batch: RolloutBatch) -> None:
    assert repr(batch) == "RolloutBatch(2 samples of 2 prompts, 7 tokens behind them)"


def test_rows_that_are_not_there_are_refused() -> None:
    batch = rolled_out(*group("stop"))
    for row in (-1, 1):
        with pytest.raises(ValueError, match=f"sample {row} must be a row of the batch, from 0 to 0"):
            batch.trajectory(row)


# --- TRL -------------------------------------------------------------------------------------------------------


def test_trl_gets_lists_as_they_are(batch: RolloutBatch) -> None:
    assert batch.to_trl() == {
        "prompt_ids": [[1, 2, 3], [5]],
        "completion_ids": [[4, PAD], [6, PAD, 7, 8, 6]],
        "logprobs": [[-0.5, -0.25], [-1.0, -2.0, 0.0, 0.0, -3.0]],
        "env_mask": [[1, 1], [1, 1, 0, 0, 1]],
    }


def test_trl_gets_no_mask_where_all_tokens_are_the_models() -> None:
    assert batch_of(SHORT).to_trl().keys() == {"prompt_ids", "completion_ids", "logprobs"}


# --- verl ------------------------------------------------------------------------------------------------------


def test_verl_prompts_left_responses_right(batch: RolloutBatch) -> None:
    wanted = {
        "prompts": ints([1, 2, 3], [PAD, PAD, 5]),
        "responses": ints([4, PAD, PAD, PAD, PAD], [6, PAD, 7, 8, 6]),
        "response_mask": ints([1, 1, 0, 0, 0], [1, 1, 0, 0, 1]),
        "input_ids": ints([1, 2, 3, 4, PAD, PAD, PAD, PAD], [PAD, PAD, 5, 6, PAD, 7, 8, 6]),
        "attention_mask": ints([1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]),
        "position_ids": ints([0, 1, 2, 3, 4, 4, 4, 4], [0, 0, 0, 1, 2, 3, 4, 5]),
        "rollout_log_probs": floats([-0.5, -0.25, 0, 0, 0], [-1, -2, 0, 0, -3]),
    }
    assert_tensors(batch.to_verl(), wanted)


def test_verl_widths_of_the_config() -> None:
    tensors = batch_of(SHORT).to_verl(prompt_length=4, response_length=3)
    assert tensors["input_ids"].tolist() == [[PAD, 1, 2, 3, 4, PAD, PAD]]
    assert tensors["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0]]
    assert tensors["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 4]]
    assert tensors["response_mask"].tolist() == [[1, 1, 0]]
    assert tensors["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0.0]]


@pytest.mark.parametrize(("width", "row"), [({"prompt_length": 2}, 0), ({"response_length": 4}, 1)])
def test_verl_refuses_rows_that_do_not_fit(batch: RolloutBatch, width: dict[str, int], row: int) -> None:
    name, value = next(iter(width.items()))
    with pytest.raises(ValueError, match=rf"row {row}: \d tokens do not fit into {name}={value}"):
        batch.to_verl(**width)


# --- OpenRLHF --------------------------------------------------------------------------------------------------


def test_openrlhf_samples(batch: RolloutBatch) -> None:
    assert batch.to_openrlhf() == [
        {
            "observation_tokens": [1, 2, 3, 4, PAD],
            "action_ranges": [(3, 5)],
            "rollout_log_probs": [0.0, 0.0, 0.0, -0.5, -0.25],
            "truncated": False,
        },
        {
            "observation_tokens": [5, 6, PAD, 7, 8, 6],
            "action_ranges": [(1, 3), (5, 6)],
            "rollout_log_probs": [0.0, -1.0, -2.0, 0.0, 0.0, -3.0],
            "truncated": True,
        },
    ]


def test_openrlhf_ranges_of_neighbours_do_not_join() -> None:
    """The first row ends with the model's tokens, and the second begins with them: it has no prompt tokens."""
    rows = batch_of(SHORT, SHORT | {"prompt_token_ids": []}).to_openrlhf()
    assert [row["action_ranges"] for row in rows] == [[(3, 5)], [(0, 2)]]


def test_openrlhf_experience_is_shifted_by_one(batch: RolloutBatch) -> None:
    wanted = {
        "sequences": ints([1, 2, 3, 4, PAD, PAD], [5, 6, PAD, 7, 8, 6]),
        "attention_mask": ints([1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]),
        "action_mask": ints([0, 0, 1, 1, 0], [1, 1, 0, 0, 1]),
        "rollout_log_probs": floats([0, 0, -0.5, -0.25, 0], [-1, -2, 0, 0, -3]),
        "response_length": ints(2, 5),
        "total_length": floats(5, 6),
        "truncated": torch.tensor([False, True]),
    }
    assert_tensors(batch.to_openrlhf_experience(), wanted)


# --- NeMo-RL ---------------------------------------------------------------------------------------------------


def test_nemo_rl_fills_up_behind_everything(batch: RolloutBatch) -> None:
    wanted = {
        "output_ids": ints([1, 2, 3, 4, PAD, PAD], [5, 6, PAD, 7, 8, 6]),
        "generation_lengths": ints(2, 5),
        "unpadded_sequence_lengths": ints(5, 6),
        "logprobs": floats([0, 0, 0, -0.5, -0.25, 0], [0, -1, -2, 0, 0, -3]),
        "truncated": torch.tensor([False, True]),
        "token_mask": ints([0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1]),
    }
    assert_tensors(batch.to_nemo_rl(), wanted)


# --- slime, AReaL ----------------------------------------------------------------------------------------------


def test_slime_samples(batch: RolloutBatch) -> None:
    assert batch.to_slime()[1] == {
        "group_index": 1,
        "index": 1,
        "tokens": [5, 6, PAD, 7, 8, 6],
        "response_length": 5,
        "loss_mask": [1, 1, 0, 0, 1],
        "rollout_log_probs": [-1.0, -2.0, 0.0, 0.0, -3.0],
        "weight_versions": ["8"],
        "status": "truncated",
    }
    assert batch.to_slime()[0]["status"] == "completed"


def test_areal_has_versions_by_token(batch: RolloutBatch) -> None:
    wanted = {
        "input_ids": torch.tensor([[5, 6, PAD, 7, 8, 6]], dtype=torch.int32),
        "loss_mask": torch.tensor([[0, 1, 1, 0, 0, 1]], dtype=torch.int32),
        "logprobs": floats([0, -1, -2, 0, 0, -3]),
        "versions": torch.tensor([[-1, 8, 8, -1, -1, 8]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 6, dtype=torch.bool),
    }
    assert_tensors(batch.to_areal()[1], wanted)


def test_slime_and_areal_have_versions_of_partial_rollouts() -> None:
    """The second sample was begun by one version, and went on under others; tokens of the environment have none."""
    versions = pa.array([[7, 7], [3, 4, 9, 9, 5]], pa.list_(pa.int64()))
    batch = RolloutBatch(table_of(SHORT, TURNS).append_column("token_versions", versions), PAD)
    assert [row["weight_versions"] for row in batch.to_slime()] == [["7"], ["3", "4", "5"]]
    assert [row["versions"].tolist() for row in batch.to_areal()] == [[[-1, -1, -1, 7, 7]], [[-1, 3, 4, -1, -1, 5]]]


def test_slime_has_the_version_of_a_sample_without_tokens() -> None:
    assert batch_of(SHORT | {"token_ids": [], "logprobs": []}).to_slime()[0]["weight_versions"] == ["7"]


# --- any batch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_completions_and_empty_batches(rows: int) -> None:
    batch = batch_of(*[SHORT | {"token_ids": [], "logprobs": []}] * rows)
    assert batch.to_padded()["completion_ids"].shape == (rows, 0)
    assert batch.to_verl(response_length=2)["response_mask"].tolist() == [[0, 0]] * rows
    assert [row["action_ranges"] for row in batch.to_openrlhf()] == [[]] * rows
    assert batch.to_openrlhf_experience()["response_length"].tolist() == [0] * rows
    assert batch.to_nemo_rl()["generation_lengths"].tolist() == [0] * rows
    assert len(batch.to_slime()) == len(batch.to_areal()) == len(batch) == rows


def test_slices_and_chunks_of_tables(batch: RolloutBatch) -> None:
    """Offsets of Arrow lists do not begin at 0 in a slice."""
    chunked = pa.concat_tables([table_of(TURNS, SHORT).slice(1), table_of(SHORT, TURNS, SHORT).slice(1, 1)])
    other = RolloutBatch(chunked, PAD)
    assert_tensors(other.to_padded(), batch.to_padded())
    assert other.to_openrlhf() == batch.to_openrlhf()


def test_a_batch_survives_parquet(batch: RolloutBatch, tmp_path: Any) -> None:
    pq.write_table(batch.table, tmp_path / "batch.parquet")
    assert RolloutBatch(pq.read_table(tmp_path / "batch.parquet"), PAD).to_slime() == batch.to_slime()


def test_random_batches_come_back_from_their_padding() -> None:
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 9, 50))])
    lists = Ragged(random.integers(0, 100, offsets[-1]), offsets)
    for left in (False, True):
        matrix, mask = lists.padded(-1, left=left, width=11), lists.mask(left=left, width=11)
        assert matrix[mask == 1].tolist() == lists.values.tolist()
        assert (matrix[mask == 0] == -1).all()
        assert (np.diff(mask, axis=1) >= 0).all() if left else (np.diff(mask, axis=1) <= 0).all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"logprobs": [-0.5]}, "row 1: logprobs has 1 values for 2 token_ids"),
        ({"env_mask": [1]}, "row 1: env_mask has 1 values for 2 token_ids"),
        ({"env_mask": [1, 2]}, "row 1: env_mask must be 0 or 1, not 2"),
        ({"env_mask": [1, 0]}, "row 1: logprobs must be 0 for tokens of the environment, not -0.25"),
        ({"logprobs": [-0.5, float("nan")]}, "row 1: logprobs must be finite, not nan"),
        ({"logprobs": [-0.5, None]}, "row 1: a value of logprobs is null"),
        ({"token_ids": [-1, 2]}, "row 1: token_ids must be at least 0, not -1"),
        ({"truncated": None}, "row 1: truncated is null"),
        ({"finish_reason": "error"}, "row 1: finish_reason 'error' is not one of stop, length"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of(SHORT, SHORT | row)


def test_missing_and_wrong_columns_are_named() -> None:
    with pytest.raises(ValueError, match="no column 'env_mask'"):
        RolloutBatch(table_of(SHORT).drop_columns("env_mask"), PAD)
    wrong = table_of(SHORT).set_column(0, "prompt_index", pa.array([0.5]))
    with pytest.raises(ValueError, match="column 'prompt_index' is of type double, not int32"):
        RolloutBatch(wrong, PAD)
    with pytest.raises(ValueError, match="pad_token_id -1"):
        batch_of(SHORT, pad_token_id=-1)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("row", pa.array([1], pa.int32()), "column 'row' is of type int32, not int64"),
        ("forked_at", pa.array([None], pa.int32()), "row 0: forked_at is null"),
        ("token_versions", pa.array([[7]], pa.list_(pa.int64())), "row 0: token_versions has 1 values for 2 token_ids"),
        ("token_versions", pa.array([[7, None]], pa.list_(pa.int64())), "row 0: a value of token_versions is null"),
    ],
)
def test_optional_columns_are_checked(name: str, column: pa.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutBatch(table_of(SHORT).append_column(name, column), PAD)


RECORDED = {
    "sampling_logprobs": pa.array([[0.0, -0.125], [-0.5, -1.0, 0.0, 0.0, -3.0]], pa.list_(pa.float32())),
    "entropies": pa.array([[0.25, 1.0], [2.0, 3.0, 0.0, 0.0, 4.0]], pa.list_(pa.float32())),
    "kept_token_ids": pa.array([[[4], [2, PAD]], [[6, 7, 8], [3, PAD], [], [], []]], pa.list_(pa.list_(pa.int32()))),
}


def recorded(**changed: Any) -> RolloutBatch:
    """SHORT and TURNS with what they were drawn from; at the last token of TURNS nothing was removed."""
    table = table_of(SHORT, TURNS)
    for name, column in RECORDED.items():
        table = table.append_column(name, pa.array(changed.get(name, column), column.type))
    return RolloutBatch(table, PAD)


def test_what_was_recorded_is_there_as_lists(tmp_path: Any) -> None:
    batch = recorded()
    pq.write_table(batch.table, tmp_path / "batch.parquet")
    again = RolloutBatch(pq.read_table(tmp_path / "batch.parquet"), PAD)
    for one in (batch, again, RolloutBatch(pa.concat_tables([batch.table.slice(1), batch.table]).slice(1), PAD)):
        assert one.sampling_logprobs is not None
        assert one.entropies is not None
        assert one.kept_token_ids is not None
        assert one.sampling_logprobs.lists() == RECORDED["sampling_logprobs"].to_pylist()
        assert one.entropies.lists() == RECORDED["entropies"].to_pylist()
        assert one.kept_token_ids.lists() == [[4], [2, PAD], [6, 7, 8], [3, PAD], [], [], []]
    plain = batch_of(SHORT)
    assert plain.sampling_logprobs is plain.entropies is plain.kept_token_ids is None


def test_slime_gets_what_top_p_kept() -> None:
    """Offsets begin at 0 in each row; log-probabilities are over what was kept, as the trainer's then are."""
    rows = recorded().to_slime(top_p=0.9)
    assert [row["rollout_log_probs"] for row in rows] == RECORDED["sampling_logprobs"].to_pylist()
    assert [row["rollout_top_p_token_ids"].tolist() for row in rows] == [[4, 2, PAD], [6, 7, 8, 3, PAD]]
    assert [row["rollout_top_p_token_offsets"].tolist() for row in rows] == [[0, 1, 3], [0, 3, 5, 5, 5, 5]]
    tensors = [tensor for row in rows for name, tensor in row.items() if name.startswith("rollout_top_p")]
    assert [tensor.dtype for tensor in tensors] == [torch.int32] * 4
    assert [len(row["rollout_top_p_token_offsets"]) for row in rows] == [row["response_length"] + 1 for row in rows]


def test_slime_without_top_p_gets_what_it_scores_over_all_tokens() -> None:
    assert recorded().to_slime() == batch_of(SHORT, TURNS).to_slime()


def test_slime_with_top_p_wants_a_record() -> None:
    with pytest.raises(ValueError, match="record_sampling=True"):
        batch_of(SHORT).to_slime(top_p=0.9)


def test_samples_that_were_read_back_have_their_record() -> None:
    columns = {
        "row": pa.array([0, 1], pa.int64()),
        "token_versions": pa.array([[7] * 2, [7] * 5], pa.list_(pa.int64())),
        "forked_from": pa.array([-1, -1], pa.int32()),
        "forked_at": pa.array([0, 0], pa.int32()),
    }
    table = recorded().table
    for name, column in columns.items():
        table = table.append_column(name, column)
    for source in (table, pa.concat_tables([table.slice(1), table]).slice(1)):
        record = RolloutBatch(source, PAD).trajectory(1).sampling
        assert record is not None
        assert record.logprobs.tolist() == [-0.5, -1.0, 0.0, 0.0, -3.0]
        assert record.entropies.tolist() == [2.0, 3.0, 0.0, 0.0, 4.0]
        assert record.kept_ids.tolist() == [6, 7, 8, 3, PAD]
        assert record.kept_counts.tolist() == [3, 2, 0, 0, 0]
        trunk = RolloutBatch(source, PAD).fork(1, 4, 2).trunk.sampling
        assert trunk is not None
        assert (trunk.kept_ids.tolist(), len(trunk)) == ([6, 7, 8, 3, PAD], 4)
    assert RolloutBatch(table.drop_columns("entropies"), PAD).trajectory(1).sampling is None


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_more_kept_ids_than_an_array_can_hold_are_in_chunks(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(sampling_columns, "_MOST_IDS", most)
    records = [
        SamplingRecord(
            np.full(count, -1, np.float32),
            np.full(count, 2, np.float32),
            np.arange(count, dtype=np.int32),
            np.ones(count, np.int32),
        )
        for count in (1, 0, 2, 1, 0, 3)
    ]
    columns = sampling_columns.sampling_columns(records)
    assert columns["kept_token_ids"].to_pylist() == [[[i] for i in range(count)] for count in (1, 0, 2, 1, 0, 3)]
    assert columns["entropies"].to_pylist() == [[2.0] * count for count in (1, 0, 2, 1, 0, 3)]
    assert columns["kept_token_ids"].num_chunks == {1: 4, 2: 4, 3: 3, 100: 1}[most]
    table = pa.table(columns)
    found = [sampling_columns.sampling_record(table, row) for row in range(6)]
    assert [one.kept_ids.tolist() for one in found if one is not None] == [
        list(range(count)) for count in (1, 0, 2, 1, 0, 3)
    ]


TURN = [-0.5, -1.0, 0.0, 0.0, -3.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampling_logprobs": [[0.0], TURN]}, "row 0: sampling_logprobs has 1 values for 2 token_ids"),
        ({"entropies": [[0.25, None], [0.0] * 5]}, "row 0: a value of entropies is null"),
        ({"entropies": [[0.25, 1.0], [2.0, 3.0, 0.5, 0.0, 4.0]]}, "row 1: entropies must be 0 for tokens of the env"),
        ({"entropies": [[0.25, -1.0], [0.0] * 5]}, "row 0: entropies must be at least 0, not -1.0"),
        ({"entropies": [[0.25, float("nan")], [0.0] * 5]}, "row 0: entropies must be finite, not nan"),
        ({"sampling_logprobs": [[0.0, float("-inf")], TURN]}, "row 0: sampling_logprobs must be finite"),
        ({"sampling_logprobs": [[0.0, 0.0], [0, 0, -1, 0, 0]]}, "row 1: sampling_logprobs must be 0 for tokens of the"),
        ({"kept_token_ids": [[[4]], [[]] * 5]}, "row 0: kept_token_ids has 1 values for 2 token_ids"),
        ({"kept_token_ids": [[[4], None], [[]] * 5]}, "row 0: a value of kept_token_ids is null"),
        ({"kept_token_ids": [[[4], []], [[], [PAD, None], [], [], []]]}, "row 1: an id in kept_token_ids is null"),
        ({"kept_token_ids": [[[4], []], [[], [1, 2], [], [], []]]}, "row 1: token_ids must be among its .*not 9"),
        ({"kept_token_ids": [[[4], []], [[], [], [7], [], []]]}, "row 1: token_ids of the environment has"),
    ],
)
def test_records_are_checked(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recorded(**changed)


def test_lists_of_other_numbers_are_no_kept_ids() -> None:
    column = pa.array([[4, PAD]], pa.list_(pa.int32()))
    with pytest.raises(ValueError, match=r"column 'kept_token_ids' is of type list<.*int32>, not list<.*list<"):
        RolloutBatch(table_of(SHORT).append_column("kept_token_ids", column), PAD)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_logprobs_have_a_temperature(temperature: float) -> None:
    assert RolloutBatch(table_of(SHORT), PAD).temperature == 1.0
    with pytest.raises(ValueError, match=f"temperature {temperature} must be above 0"):
        RolloutBatch(table_of(SHORT), PAD, temperature=temperature)


def test_signed_seeds_and_more_columns() -> None:
    table = table_of(SHORT).drop_columns("seed").append_column("seed", pa.array([-1])).append_column("x", pa.array([1]))
    assert RolloutBatch(table, PAD).table["seed"].to_pylist() == [-1]
