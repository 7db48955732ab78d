"""Samples that go on: turns with an environment, forks, what was cut off; and what is made of finished ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import batchkv
from batchkv.errors import UserError
from batchkv.model_support import tiny_model
from batchkv.rl.environment import Turn
from batchkv.rl.rollout_batch import RolloutBatch
from batchkv.rl.scoring import score
from batchkv.rl.session import Session, rollout
from batchkv.rl.trajectory import Trajectory
from tests.parity.test_rollout import (
    SMALL,
    assert_own_logprobs,
    assert_own_sampling,
    assert_same,
    own_logprobs,
    prompts,
    samples,
)
from tests.tiny_models import CONFIGS, FAMILIES, tiny_tokenizer

ENDS = list(range(6, 20))  # so that some turns end soon
FAMILY = pytest.mark.parametrize("family", ["llama", "gemma2"])


def cells(batch: RolloutBatch, name: str) -> list[Any]:
    found: list[Any] = batch.table[name].to_pylist()
    return found


@torch.no_grad()
def own_entropies(model: PreTrainedModel, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """Where each of the tokens behind a prompt was drawn, by the model's own forward."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    found: torch.Tensor = torch.distributions.Categorical(logits=logits / temperature).entropy()
    return found


def answers(turn: Turn) -> list[int] | None:
    """Two tokens that tell which sample and turn it is, twice."""
    return [20 + turn.trajectory.sample_index, 40 + turn.number] if turn.number < 2 else None


class TestTurns:
    @FAMILY
    def test_replies_are_spliced_masked_and_gone_on_from(self, family: str) -> None:
        model = FAMILIES[family]()
        batch = rollout(model, prompts(3), n=4, stop_token_ids=ENDS, environment=answers, **SMALL)
        turns = []
        for sample, ids, mask, logprobs in zip(
            *(cells(batch, name) for name in ("sample_index", "token_ids", "env_mask", "logprobs")), strict=True
        ):
            replies = [i for i, is_models in enumerate(mask) if not is_models]
            assert [ids[i] for i in replies] == [20 + sample, 40, 20 + sample, 41][: len(replies)]
            assert all(ids[first - 1] in ENDS for first in replies[::2])
            assert all(logprobs[i] == 0 for i in replies)
            turns.append(1 + len(replies) // 2)
        assert {1, 3} <= set(turns)  # some run to the length of their first turn
        assert_own_logprobs(model, batch)

    @FAMILY
    def test_the_conversation_stays_in_the_cache(self, family: str) -> None:
        model = FAMILIES[family]()
        batch = rollout(model, prompts(2), n=4, stop_token_ids=ENDS, environment=answers, **SMALL)
        replies = sum(mask.count(0) for mask in cells(batch, "env_mask"))
        again = replies // 2  # the token that ended each turn was never run
        assert batch.summary["prefill_tokens"] == 15 + 2 * 15 + replies + again

    @FAMILY
    def test_the_same_samples_with_little_memory_and_small_batches(self, family: str) -> None:
        model = FAMILIES[family]()
        options: dict[str, Any] = {"n": 4, "stop_token_ids": ENDS, "environment": answers, **SMALL}
        whole = rollout(model, prompts(4), **options)
        layout = batchkv.Engine(model).layout
        for config in (
            {"max_batch_rows": 3},
            {"kv_memory": 140 * layout.bytes_per_token, "page_size": 4},
            {"no_prefix_sharing": True},
        ):
            assert_same(samples(rollout(model, prompts(4), **options, **config)), samples(whole))
        order = [2, 0, 3, 1]
        shuffled = rollout(model, [prompts(4)[i] for i in order], rows=order, **options)
        assert_same(samples(shuffled), samples(whole))

    def test_text_and_messages_go_through_the_tokenizer_once(self) -> None:
        tokenizer: Any = tiny_tokenizer()
        model = FAMILIES["llama"]()
        chat = [{"role": "user", "content": "the thing"}]
        said: list[str | None] = []

        def environment(turn: Turn) -> Any:
            said.append(turn.text)
            return [" and you", [{"role": "user", "content": "again"}], None][turn.number]

        options: dict[str, Any] = {"n": 6, "tokenizer": tokenizer, "stop_token_ids": ENDS, **SMALL, "max_tokens": 60}
        batch = rollout(model, [chat], environment=environment, **options)
        row = int(np.argmax([mask.count(0) for mask in cells(batch, "env_mask")]))
        ids, mask = cells(batch, "token_ids")[row], cells(batch, "env_mask")[row]
        reply = "".join(tokenizer.decode([token]) for token, is_models in zip(ids, mask, strict=True) if not is_models)
        assert reply.startswith(" and you")
        assert "user\nagain" in reply
        assert reply.endswith("assistant\n")
        own = [token for token, is_models in zip(ids, mask, strict=True) if is_models]
        assert any(text == tokenizer.decode(own, skip_special_tokens=True)[: len(text)] for text in said if text)

    def test_max_turns_ends_a_conversation_that_would_not_end(self) -> None:
        batch = rollout(
            FAMILIES["llama"](),
            prompts(2),
            n=2,
            stop_token_ids=ENDS,
            environment=lambda turn: [50],
            max_turns=3,
            **SMALL,
        )
        assert max(mask.count(0) for mask in cells(batch, "env_mask")) == 2

    @pytest.mark.parametrize(
        ("reply", "says"),
        [
            ([], "is empty"),
            ([500], "token ids from 0 to 127"),
            (5, "must be text"),
            ("x", "pass tokenizer="),
            ([0.5], "ids"),
        ],
    )
    def test_what_is_no_reply_is_named(self, reply: Any, says: str) -> None:
        with pytest.raises(UserError, match=f"sample . of prompt .*{says}"):
            rollout(FAMILIES["llama"](), prompts(2), n=2, stop_token_ids=ENDS, environment=lambda turn: reply, **SMALL)

    def test_what_an_environment_is_shown_cannot_be_written_to(self) -> None:
        asked: list[int] = []

        def environment(turn: Turn) -> None:
            asked.append(turn.number)
            with pytest.raises(ValueError, match="read-only"):
                turn.token_ids[:] = 9

        model = FAMILIES["llama"]()
        batch = rollout(model, prompts(2), n=2, stop_token_ids=ENDS, environment=environment, **SMALL)
        assert asked
        assert_own_logprobs(model, batch)

    def test_replies_can_be_arrays_and_tensors(self) -> None:
        model, plain = FAMILIES["llama"](), None
        for reply in ([7, 8], np.array([7, 8]), torch.tensor([7, 8])):
            batch = rollout(
                model, prompts(2), n=2, stop_token_ids=ENDS, environment=lambda turn, r=reply: r, max_turns=2, **SMALL
            )
            plain = plain or samples(batch)
            assert_same(samples(batch), plain)

    def test_conversations_end_with_the_context(self) -> None:
        model = FAMILIES["llama"]()
        batch = rollout(model, prompts(2), n=2, stop_token_ids=ENDS, environment=lambda turn: [50] * 300, **SMALL)
        for ids, mask, reason in zip(
            *(cells(batch, c) for c in ("token_ids", "env_mask", "finish_reason")), strict=True
        ):
            assert 30 + len(ids) <= 512
            if 30 + len(ids) == 512:  # a reply that did not fit is there as far as it did
                assert (mask[-1], reason) == (0, "length")
            else:
                assert mask[-1] == 1
                assert reason == ("stop" if ids[-1] in ENDS else "length")
        assert any(len(ids) == 482 for ids in cells(batch, "token_ids"))
        again = rollout(model, batch.unfinished(length_ends=False), max_tokens=1, seed=3)
        assert {482} & set(map(len, cells(again, "token_ids")))
        assert_own_logprobs(model, batch)


class TestForks:
    @FAMILY
    def test_forks_have_the_first_tokens_in_common_and_go_their_own_ways(self, family: str) -> None:
        model = FAMILIES[family]()
        first = rollout(model, prompts(2), n=2, **SMALL)
        batch = rollout(model, [first.fork(3, 5, 4), *prompts(1)], n=2, **SMALL)
        trunk, rows = cells(first, "token_ids")[3], cells(batch, "token_ids")
        assert [ids[:5] for ids in rows[:4]] == [trunk[:5]] * 4
        assert len({tuple(ids) for ids in rows[:4]}) == 4
        assert cells(batch, "forked_from") == [1, 1, 1, 1, -1, -1]
        assert cells(batch, "forked_at") == [5, 5, 5, 5, 0, 0]
        assert cells(batch, "row") == [1, 1, 1, 1, 3, 3]  # that of a new prompt is no branch's
        assert_own_logprobs(model, batch)

    def test_the_same_fork_twice_has_other_samples(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, prompts(1), n=2, **SMALL)
        batch = rollout(model, [first.fork(0, 2, 2), first.fork(0, 2, 2)], **SMALL)
        deeper = rollout(model, [batch.fork(0, 4, 2), batch.fork(2, 4, 2), first.fork(0, 4, 2)], **SMALL)
        assert len({tuple(ids) for ids in cells(batch, "token_ids")}) == 4
        assert len({tuple(ids[4:]) for ids in cells(deeper, "token_ids")}) == 6

    def test_prompts_that_are_found_in_the_cache_are_counted_for_forks_too(self) -> None:
        batch = rollout(
            FAMILIES["llama"](), prompts(1), n=2, branching=lambda one: [(3, 1)] * (one.forked_from < 0), **SMALL
        )
        assert cells(batch, "num_cached_tokens") == [0, 30, 30, 30]

    @pytest.mark.parametrize(("sample", "n"), [(2, 1), (-1, 1), (0, 0)])
    def test_there_have_to_be_samples(self, sample: int, n: int) -> None:
        batch = rollout(FAMILIES["llama"](), prompts(1), n=2, **SMALL)
        with pytest.raises(ValueError, match=f"{'n 0' if n == 0 else f'sample {sample}'} must be"):
            batch.fork(sample, 1, n)

    def test_a_fork_at_the_first_token_is_another_sample(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, prompts(1), n=2, **SMALL)
        again = rollout(model, [first.fork(0, 0, 2)], **SMALL)
        assert not set(map(tuple, cells(first, "token_ids"))) & set(map(tuple, cells(again, "token_ids")))

    @pytest.mark.parametrize("at_token", [-1, 12])
    def test_there_has_to_be_a_token(self, at_token: int) -> None:
        batch = rollout(FAMILIES["llama"](), prompts(1), n=1, **SMALL)
        with pytest.raises(ValueError, match=f"at_token {at_token} "):
            batch.fork(0, at_token, 2)

    def test_tokens_of_an_environment_are_not_forked(self) -> None:
        batch = rollout(FAMILIES["llama"](), prompts(2), n=4, stop_token_ids=ENDS, environment=answers, **SMALL)
        row = next(row for row, mask in enumerate(cells(batch, "env_mask")) if 0 in mask)
        with pytest.raises(ValueError, match="environment"):
            batch.fork(row, cells(batch, "env_mask")[row].index(0), 2)

    @FAMILY
    def test_a_hook_grows_a_tree_in_one_call(self, family: str) -> None:
        """By the least likely token, as a stand-in for the entropy."""
        model = FAMILIES[family]()

        def branching(trajectory: Trajectory) -> list[tuple[int, int]]:
            if trajectory.forked_from >= 0:
                return []
            return [(int(trajectory.logprobs.argmin()), 2)]

        batch = rollout(model, prompts(2), n=3, branching=branching, **SMALL)
        assert cells(batch, "sample_index") == [*range(9)] * 2
        assert cells(batch, "forked_from") == [-1, -1, -1, 0, 0, 1, 1, 2, 2] * 2
        ids, at = cells(batch, "token_ids"), cells(batch, "forked_at")
        for row, source in enumerate(cells(batch, "forked_from")):
            if source >= 0:
                assert ids[row][: at[row]] == ids[row // 9 * 9 + source][: at[row]]
        assert len({tuple(row) for row in ids}) == 18
        assert_own_logprobs(model, batch)
        if family == "llama":  # behind windows KV is there for the ends of sequences alone
            assert batch.summary["prefill_tokens"] == 45 + 6  # the last token before each fork, for its logits


class TestRecordedSampling:
    @FAMILY
    def test_replies_stand_between_what_was_drawn(self, family: str) -> None:
        model = FAMILIES[family]()
        options: dict[str, Any] = {"n": 4, "stop_token_ids": ENDS, "environment": answers, **SMALL}
        batch = rollout(model, prompts(2), top_p=0.9017, record_sampling=True, **options)
        assert any(0 in mask for mask in cells(batch, "env_mask"))
        assert_own_sampling(model, batch, {"top_p": 0.9017})
        fields = batch.to_slime(top_p=0.9017)
        assert [row["rollout_log_probs"] for row in fields] == cells(batch, "sampling_logprobs")

    def test_an_environment_sees_the_entropies_of_its_turn(self) -> None:
        seen: list[np.ndarray[Any, Any]] = []

        def environment(turn: Turn) -> list[int] | None:
            sampling = turn.trajectory.sampling
            assert sampling is not None
            assert len(sampling) == len(turn.trajectory)
            seen.append(sampling.entropies[-len(turn.token_ids) :])
            return answers(turn)

        rollout(
            FAMILIES["llama"](),
            prompts(2),
            n=4,
            stop_token_ids=ENDS,
            environment=environment,
            record_sampling=True,
            **SMALL,
        )
        assert seen
        assert all((entropies > 0).all() for entropies in seen)

    @FAMILY
    def test_a_hook_forks_samples_where_the_model_is_least_sure(self, family: str) -> None:
        model = FAMILIES[family]()

        def branching(trajectory: Trajectory) -> list[tuple[int, int]]:
            assert trajectory.sampling is not None
            is_first = trajectory.forked_from < 0
            return [(int(trajectory.sampling.entropies.argmax()), 2)] if is_first else []

        options: dict[str, Any] = {"temperature": 0.8, "top_k": 30, "record_sampling": True, **SMALL}
        batch = rollout(model, prompts(2), n=3, branching=branching, **options)
        assert cells(batch, "forked_from") == [-1, -1, -1, 0, 0, 1, 1, 2, 2] * 2
        at, forked_from = cells(batch, "forked_at"), cells(batch, "forked_from")
        names = ("token_ids", "sampling_logprobs", "entropies", "kept_token_ids")
        for name in names:
            rows = cells(batch, name)
            for row, source in enumerate(forked_from):
                if source >= 0:
                    assert rows[row][: at[row]] == rows[row // 9 * 9 + source][: at[row]]
        own = [
            own_entropies(model, prompt, ids, 0.8)
            for prompt, ids in zip(cells(batch, "prompt_token_ids"), cells(batch, "token_ids"), strict=True)
        ]
        for row, source in enumerate(forked_from):
            if source >= 0:
                assert at[row] == own[row // 9 * 9 + source].argmax()
        assert len(set(at)) > 2
        assert_own_sampling(model, batch, {"temperature": 0.8, "top_k": 30})

    def test_what_was_cut_off_and_forks_of_a_batch_go_on_with_their_record(self) -> None:
        model = FAMILIES["llama"]()
        options: dict[str, Any] = {"stop_token_ids": ENDS, "top_p": 0.9017, "record_sampling": True, **SMALL}
        first = rollout(model, prompts(2), n=3, **options)
        cut = first.unfinished(length_ends=False)
        assert cut
        fork = first.fork(0, 2, 2)
        batch = rollout(model, [*cut, fork, prompts(3)[2]], n=1, **options, step=1)
        assert max(map(len, cells(batch, "token_ids"))) > 12
        assert_own_sampling(model, batch, {"top_p": 0.9017})
        with Session(model) as session:
            again = session.rollout([*cut, fork, prompts(3)[2]], n=1, **options, step=1)
        assert cells(again, "kept_token_ids") == cells(batch, "kept_token_ids")

    def test_a_sample_that_was_not_recorded_from_the_start_is_refused(self) -> None:
        model = FAMILIES["llama"]()
        plain = rollout(model, prompts(2), n=2, **SMALL)
        for branch in (plain.unfinished(length_ends=False)[0], plain.fork(1, 3, 2)):
            with pytest.raises(UserError, match=r"prompt 1 goes on from tokens .*without record_sampling"):
                rollout(model, [prompts(1)[0], branch], n=1, record_sampling=True, **SMALL)
        anew = rollout(model, [plain.fork(1, 0, 2)], record_sampling=True, **SMALL)  # nothing to go on from
        assert_own_sampling(model, anew, {})

    def test_a_record_ends_where_it_is_not_asked_for(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, [[50] * 500, prompts(1)[0]], n=1, record_sampling=True, **SMALL)
        batch = rollout(model, [*first.unfinished(length_ends=False), first.fork(1, 4, 1)], **SMALL)
        assert len(batch) == 3  # one of them full
        assert not {"sampling_logprobs", "entropies", "kept_token_ids"} & set(batch.table.column_names)


@pytest.mark.parametrize("returned", [3, [(1, -1)], [(1,)], [(1, "2")], [(1, True)]])
def test_what_a_branching_returns_has_to_be_pairs(returned: Any) -> None:
    with pytest.raises(ValueError, match="branching returned"):
        rollout(FAMILIES["llama"](), prompts(1), n=1, branching=lambda one: returned, **SMALL)


@pytest.mark.parametrize("returned", [None, [], [(1, 0)]])
def test_a_branching_that_returns_nothing_forks_nothing(returned: Any) -> None:
    assert len(rollout(FAMILIES["llama"](), prompts(1), n=2, branching=lambda one: returned, **SMALL)) == 2


def test_a_branching_may_return_an_array() -> None:
    def branching(trajectory: Trajectory) -> Any:
        return np.array([[2, 1], [4, 2]])[: 2 * (trajectory.forked_from < 0)]

    assert len(rollout(FAMILIES["llama"](), prompts(1), n=2, branching=branching, **SMALL)) == 8


class TestUnfinished:
    @FAMILY
    def test_samples_that_were_cut_off_go_on_with_their_versions(self, family: str) -> None:
        model = FAMILIES[family]()
        first = rollout(model, prompts(2), n=3, stop_token_ids=ENDS, **SMALL, step=4)
        going = first.unfinished(length_ends=False)
        batch = rollout(model, [*going, prompts(3)[2]], n=1, stop_token_ids=ENDS, **SMALL, step=5)
        cut = [row for row, is_cut in enumerate(cells(first, "truncated")) if is_cut]
        assert cut
        for place, row in enumerate(cut):
            ids, versions = cells(batch, "token_ids")[place], cells(batch, "token_versions")[place]
            assert ids[:12] == cells(first, "token_ids")[row]
            assert cells(batch, "logprobs")[place][:12] == cells(first, "logprobs")[row]
            assert versions == [4] * 12 + [5] * (len(ids) - 12)
            assert len(ids) > 12
            assert cells(batch, "sample_index")[place] == cells(first, "sample_index")[row]
        assert set(cells(batch, "weight_version")) == {5}
        assert_own_logprobs(model, batch)

    def test_samples_of_a_prompt_that_go_on_are_a_group_again(self) -> None:
        model = FAMILIES["llama"]()
        options: dict[str, Any] = {"stop_token_ids": ENDS, "seed": 3, "max_tokens": 60}
        first = rollout(model, prompts(3), n=4, oversample=4, **options)
        going = first.unfinished()
        second = rollout(model, [*going, prompts(5)[4]], n=2, **options, step=1)
        rows, prompt = cells(second, "row"), cells(second, "prompt_index")
        assert len(set(zip(rows, prompt, strict=True))) == len(set(rows)) == len(set(prompt))
        whole = batchkv.RolloutBatch.concat([first.finished(), second])
        assert sorted(cells(whole, "prompt_index")) == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 2
        assert cells(whole, "sample_index") == [*range(8)] * 3 + [0, 1]
        one_more = rollout(model, going, **options, step=1, enough=lambda done: True)
        assert len(
            {
                row
                for row, end in zip(cells(one_more, "row"), cells(one_more, "finish_reason"), strict=True)
                if end != "abort"
            }
        ) == len(set(cells(one_more, "row")))
        assert "abort" in cells(one_more, "finish_reason")

    def test_forks_with_the_same_numbers_are_groups_of_their_own(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, prompts(1), n=2, **SMALL)
        batch = rollout(model, [first.fork(0, 3, 2), first.fork(1, 5, 2)], **SMALL)
        places = list(zip(cells(batch, "prompt_index"), cells(batch, "sample_index"), strict=True))
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]

    def test_a_sample_that_fills_the_context_stays_as_it_is(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, [[50] * 500], n=2, **SMALL)
        again = rollout(model, first.unfinished(length_ends=False), **SMALL)
        assert cells(again, "token_ids") == cells(first, "token_ids")
        assert cells(again, "finish_reason") == ["length"] * 2

    def test_a_conversation_without_room_for_a_reply_was_cut_off_and_stays_as_it_is(self) -> None:
        model = FAMILIES["llama"]()
        options: dict[str, Any] = {"stop_token_ids": ENDS, "environment": lambda turn: [50] * 490, **SMALL}
        batch = rollout(model, prompts(2), n=4, **options)
        is_full = [len(ids) == 482 for ids in cells(batch, "token_ids")]
        assert any(is_full)
        assert cells(batch, "truncated") == [True] * 8
        again = rollout(model, batch.unfinished(length_ends=False), **options)
        for row in np.flatnonzero(is_full).tolist():
            assert cells(again, "token_ids")[row] == cells(batch, "token_ids")[row]

    def test_prompts_of_several_calls_with_one_row_are_no_group(self) -> None:
        model = FAMILIES["llama"]()
        one, other = (rollout(model, [prompt], n=2, **SMALL) for prompt in prompts(2))
        branches = [one.unfinished(length_ends=False)[0], other.unfinished(length_ends=False)[1]]
        batch = rollout(model, branches, **SMALL)
        assert cells(batch, "row") == [0, 0]
        assert cells(batch, "prompt_index") == [0, 1]

    def test_the_order_of_samples_that_go_on_changes_nothing(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, prompts(1), n=40, max_tokens=1, seed=1)  # many begin alike
        going = first.unfinished(length_ends=False)
        forward, backward = (rollout(model, some, max_tokens=4) for some in (going, going[::-1]))
        assert_same(samples(forward), samples(backward))
        assert len(samples(forward)) == 40

    def test_forks_of_a_row_are_all_different_wherever_they_stand(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, prompts(1), n=1, max_tokens=6)
        batch = rollout(
            model,
            [first.fork(0, 2, 2), *first.unfinished(length_ends=False)],
            max_tokens=6,
            branching=lambda one: [(2, 2)] if one.forked_from < 0 else None,
        )
        assert len({tuple(ids) for ids in cells(batch, "token_ids")}) == len(batch)

    def test_a_branch_of_a_prompt_that_fills_another_models_context_is_refused(self) -> None:
        config = CONFIGS["llama"]()
        config.max_position_embeddings = 16
        first = rollout(FAMILIES["llama"](), prompts(1), n=1, **SMALL)
        for at_token in (0, 3):
            with pytest.raises(UserError, match="prompt 0 has 30 tokens, but the model's context of 16 must hold it"):
                rollout(tiny_model(config), [first.fork(0, at_token, 2)], **SMALL)


class TestTree:
    def test_what_samples_share_stands_there_once(self) -> None:
        model = FAMILIES["llama"]()
        first = rollout(model, prompts(3), n=4, **SMALL)
        batch = rollout(model, [*prompts(3), first.fork(5, 6, 3)], n=4, **SMALL)
        tree = batch.tree()
        rows = [p + ids for p, ids in zip(cells(batch, "prompt_token_ids"), cells(batch, "token_ids"), strict=True)]
        prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
        assert len(tree.token_ids) == len(prefixes)
        own = [[0.0] * 30 + row for row in cells(batch, "logprobs")]
        for row, whole in enumerate(rows):
            assert tree.sequence(row).tolist() == whole
            nodes = tree.path(int(tree.leaf[row]))
            at = np.concatenate([np.arange(tree.offsets[i], tree.offsets[i + 1]) for i in nodes])
            assert tree.is_models[at].tolist() == [False] * 30 + [True] * (len(whole) - 30)
            np.testing.assert_allclose(tree.logprobs[at], own[row], atol=1e-6)
            starts = np.cumsum([0, *(tree.offsets[i + 1] - tree.offsets[i] for i in nodes)])
            assert tree.start[nodes].tolist() == starts[:-1].tolist()
        assert (tree.parent < np.arange(tree.num_nodes)).all()


class TestScore:
    @FAMILY
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_under_another_model_prompts_are_computed_once(self, family: str, temperature: float) -> None:
        batch = rollout(
            FAMILIES[family](),
            prompts(3),
            n=4,
            temperature=temperature,
            stop_token_ids=ENDS,
            environment=answers,
            **SMALL,
        )
        other = FAMILIES[family]()
        for parameter in other.parameters():
            parameter.data *= 1.1
        found = score(other, batch)
        names = ("prompt_token_ids", "token_ids", "env_mask")
        for row, (prompt, ids, mask) in enumerate(zip(*(cells(batch, name) for name in names), strict=True)):
            expected = own_logprobs(other, prompt, ids, temperature) * np.array(mask)
            np.testing.assert_allclose(found.values[found.offsets[row] : found.offsets[row + 1]], expected, atol=1e-4)

    def test_the_policy_itself_scores_what_it_drew(self) -> None:
        model = FAMILIES["llama"]()
        batch = rollout(model, prompts(3), n=4, temperature=0.6, **SMALL)
        np.testing.assert_allclose(score(model, batch).values, batch.logprobs.values, atol=1e-5)
        assert batch.score(batchkv.Engine(model)).lists() == batch.score(model).lists()

    def test_an_empty_batch_has_no_scores(self) -> None:
        model = FAMILIES["llama"]()
        assert len(score(model, rollout(model, [], **SMALL))) == 0


def memory_of(calls: int, call: Callable[[], object]) -> int:
    """Bytes of resident memory more after `calls` than before."""
    import psutil

    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(calls):
        call()
    return int(process.memory_info().rss - before)


def test_memory_is_flat_over_hundreds_of_calls() -> None:
    model: PreTrainedModel = FAMILIES["llama"]()
    options: dict[str, Any] = {"n": 2, "max_tokens": 1, "kv_memory": 1 << 20}
    memory_of(40, lambda: rollout(model, prompts(1), **options))
    assert memory_of(160, lambda: rollout(model, prompts(1), **options)) < 4 << 20


def test_a_session_keeps_to_its_budget_over_many_calls() -> None:
    model = FAMILIES["llama"]()
    rng = np.random.default_rng(0)
    with Session(model, kv_memory=1 << 19) as session:  # not enough for all of them
        for step in range(40):
            asked = rng.integers(6, 128, (3, 60)).tolist()
            batch = session.rollout(asked, n=2, max_tokens=2, step=step)
        assert_own_logprobs(model, batch)


class TestEnough:
    def test_the_first_samples_to_end_are_enough_and_the_others_are_cut_off(self) -> None:
        model = FAMILIES["llama"]()
        options: dict[str, Any] = {"stop_token_ids": ENDS, "seed": 3, "max_tokens": 60}
        whole = rollout(model, prompts(3), n=8, **options)
        batch = rollout(model, prompts(3), n=4, oversample=4, **options)
        for row in range(3):
            mine = slice(8 * row, 8 * row + 8)
            reasons, ids = cells(batch, "finish_reason")[mine], cells(batch, "token_ids")[mine]
            lengths = [len(one) for one in cells(whole, "token_ids")[mine]]
            assert reasons.count("abort") <= 4
            assert reasons.count("abort") > 0
            longest_done = max(len(one) for one, reason in zip(ids, reasons, strict=True) if reason != "abort")
            assert longest_done <= sorted(lengths)[3] + 1
            for one, expected in zip(ids, cells(whole, "token_ids")[mine], strict=True):
                assert one == expected[: len(one)]
        assert batch.summary["generated_tokens"] < whole.summary["generated_tokens"]
        assert len(batch.finished()) == len(batch) - cells(batch, "finish_reason").count("abort")
        rest = rollout(model, batch.unfinished(), stop_token_ids=ENDS, seed=3, max_tokens=60, step=1)
        assert "abort" not in cells(rest, "finish_reason")
        assert_own_logprobs(model, rest)

    def test_a_prompt_that_has_enough_grows_no_forks(self) -> None:
        asked: list[str | None] = []

        def branching(trajectory: Trajectory) -> list[tuple[int, int]]:
            asked.append(trajectory.finish_reason)
            return [(1, 1)]

        batch = rollout(
            FAMILIES["llama"](), prompts(2), n=2, oversample=6, branching=branching, stop_token_ids=ENDS, **SMALL
        )
        assert not asked
        assert len(batch) == 16

    def test_a_hook_says_when_a_group_has_enough(self) -> None:
        model = FAMILIES["llama"]()

        def enough(done: Any) -> bool:
            assert len({one.prompt_index for one in done}) == 1
            return done[0].prompt_index == 1

        batch = rollout(model, prompts(2), n=6, enough=enough, stop_token_ids=ENDS, seed=3, max_tokens=60)
        assert "abort" not in cells(batch, "finish_reason")[:6]
        assert cells(batch, "finish_reason")[6:].count("abort") >= 4

    def test_conversations_are_cut_off_between_turns(self) -> None:
        batch = rollout(
            FAMILIES["llama"](), prompts(2), n=2, oversample=6, stop_token_ids=ENDS, environment=answers, **SMALL
        )
        for row in range(2):
            reasons = cells(batch, "finish_reason")[8 * row : 8 * row + 8]
            assert len(reasons) - reasons.count("abort") >= 2
        assert "abort" in cells(batch, "finish_reason")


class TestEarlier:
    @FAMILY
    def test_earlier_samples_make_it_fewer_steps_and_change_no_token(self, family: str) -> None:
        model = FAMILIES[family]()
        options: dict[str, Any] = {"n": 3, "temperature": 0.7, "max_tokens": 24, "seed": 3}
        first = rollout(model, prompts(3), **options)
        again = rollout(model, [prompts(3)[i] for i in (2, 0, 1)], rows=[2, 0, 1], earlier=first, **options)
        assert_same(samples(again), samples(first))
        assert again.summary["accepted_tokens"] > 0
        assert again.summary["steps"] < first.summary["steps"]
        assert "draft_tokens" not in first.summary

    def test_turns_and_records_of_sampling_go_with_drafts(self) -> None:
        model = FAMILIES["llama"]()
        options: dict[str, Any] = {
            "n": 3,
            "stop_token_ids": ENDS,
            "environment": answers,
            "record_sampling": True,
            "top_k": 20,
            **SMALL,
        }
        first = rollout(model, prompts(3), **options)
        again = rollout(model, prompts(3), earlier=first, **options)
        assert_same(samples(again), samples(first))
        assert again.summary["accepted_tokens"] > 0
        assert cells(again, "kept_token_ids") == cells(first, "kept_token_ids")
        entropies = [batch.table["entropies"].combine_chunks().flatten() for batch in (again, first)]
        np.testing.assert_allclose(*entropies, atol=1e-4)
