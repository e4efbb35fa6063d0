"""The sliding puzzle: every generated board can be solved, and only legal moves move tiles."""

from collections import deque
from itertools import permutations

import pytest
from environment_steps import step_checked

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_envs.config import SlidingPuzzleEnvironmentConfig
from rl_envs.sliding_puzzle import (
    SlidingPuzzleDataset,
    SlidingPuzzleEnvironment,
    can_be_solved,
    format_board,
    legal_moves,
    moved,
    solved,
)


def solution(board):
    """The shortest sequence of moves, by breadth-first search."""
    start = tuple(map(tuple, board))
    goal, seen, queue = tuple(map(tuple, solved(len(board)))), {start}, deque([(start, [])])
    while queue:
        state, path = queue.popleft()
        if state == goal:
            return path
        for move in legal_moves(state):
            after = tuple(map(tuple, moved(state, move)))
            if after not in seen:
                seen.add(after)
                queue.append((after, [*path, move]))
    raise AssertionError("the board cannot be solved")


def test_boards_are_never_solved_and_take_at_most_the_number_of_shuffles():
    data = SlidingPuzzleDataset({"num_samples": 40, "min_shuffles": 2, "max_shuffles": 7})
    lengths = [len(solution(record["extra_env_info"]["board"])) for record in data]
    assert min(lengths) >= 1
    assert max(lengths) <= 7
    assert len(set(lengths)) > 2
    long = SlidingPuzzleDataset({"num_samples": 20, "size": 2, "min_shuffles": 12, "max_shuffles": 12})
    assert all(record["extra_env_info"]["board"] != solved(2) for record in long)


def test_a_record_depends_only_on_the_seed_and_its_index():
    first, again = SlidingPuzzleDataset({"num_samples": 8}), SlidingPuzzleDataset({"num_samples": 8})
    assert [first[i] for i in range(8)] == [again[i] for i in range(8)]
    assert first[0] != SlidingPuzzleDataset({"num_samples": 8, "seed": 1})[0]
    assert first[-1] == first[7]
    assert format_board(first[0]["extra_env_info"]["board"]) in first[0]["messages"][0]["content"]


def test_no_board_is_in_both_splits():
    boards = {
        split: [
            repr(record["extra_env_info"]["board"])
            for record in SlidingPuzzleDataset({"num_samples": 300, "max_shuffles": 6, "split": split})
        ]
        for split in ("train", "validation")
    }
    assert not set(boards["train"]) & set(boards["validation"])
    assert 3 * len(set(boards["validation"])) < len(set(boards["train"]))
    with pytest.raises(ConfigError, match="validation split has no board with 1 shuffles"):
        SlidingPuzzleDataset({"size": 2, "max_shuffles": 1, "split": "validation"})[0]


@pytest.mark.parametrize("form", ["<move>{way}</move>", "I think.\n<move> {tile} </move>", "{tile}"])
def test_the_solution_of_a_board_wins_the_game(form):
    data = SlidingPuzzleDataset({"num_samples": 5})
    environment = SlidingPuzzleEnvironment()
    for record in data:
        log, state = list(record["messages"]), record["extra_env_info"]
        total = 0.0
        for way in solution(state["board"]):
            tile = legal_moves(state["board"])[way]
            log.append({"role": "assistant", "content": form.format(way=way.upper(), tile=tile)})
            made = step_checked(environment, "sliding_puzzle", [log], [state])
            state, total = made.metadata[0], total + float(made.rewards["solved"][0])
            log.append(made.observations[0])
            assert made.observations[0]["content"] == format_board(state["board"])
        assert (total, bool(made.terminateds[0]), state["illegal_moves"]) == (1.0, True, 0)


def test_other_messages_do_not_move_tiles_and_cost_the_penalty():
    board = [[1, 2, 3], [4, 5, 6], [7, 0, 8]]
    environment = SlidingPuzzleEnvironment({"max_moves": 2, "illegal_move_penalty": 0.25})
    for text in ("up", "<move>1</move>", "move tile 8 left please", "<move>left</move><move>0</move>", ""):
        state = {"board": board}
        made = step_checked(environment, "sliding_puzzle", [[{"role": "assistant", "content": text}]], [state])
        assert made.metadata[0] == {"board": board, "moves": 1, "illegal_moves": 1}, text
        assert made.rewards["illegal_moves"].tolist() == [-0.25]
        assert made.answers == [None]
        assert "Legal moves: 5 (down), 7 (right), 8 (left)." in made.observations[0]["content"]
        assert not made.terminateds[0]
    again = environment.step([[{"role": "assistant", "content": "right"}]], made.metadata)
    assert (bool(again.terminateds[0]), float(again.rewards["solved"][0])) == (True, 0.0)
    batch = BatchedDataDict({"extra_env_info": [*again.metadata, {"board": solved(3), "moves": 3, "illegal_moves": 0}]})
    assert environment.global_post_process_and_metrics(batch)[1] == {
        "accuracy": 0.5,
        "mean_moves": 2.5,
        "mean_illegal_moves": 0.5,
    }


def test_exactly_half_of_all_boards_can_be_solved_and_other_boards_are_refused():
    every = [[[a, b], [c, d]] for a, b, c, d in permutations(range(4))]
    reached = [solved(2)]
    for board in reached:  # grows while it is read
        reached += [after for way in legal_moves(board) if (after := moved(board, way)) not in reached]
    assert len(reached) == 12
    assert all(can_be_solved(board) == (board in reached) for board in every)
    data = SlidingPuzzleDataset({"num_samples": 20, "max_shuffles": 20})
    assert all(can_be_solved(record["extra_env_info"]["board"]) for record in data)
    # Without this error, any message would get the reward of a solved board.
    answer = [{"role": "assistant", "content": "I give up"}]
    with pytest.raises(DataError, match=r"Row 0: the board .* is already in order"):
        SlidingPuzzleEnvironment().step([answer], [{"board": solved(3)}])
    with pytest.raises(DataError, match="cannot be put in order by any moves"):
        SlidingPuzzleEnvironment().step([answer], [{"board": [[2, 1, 3], [4, 5, 6], [7, 8, 0]]}])


def test_the_environment_declares_its_turns_and_refuses_rows_without_a_board():
    assert SlidingPuzzleEnvironmentConfig(max_moves=9).turns_needed == 9
    for info in (None, {}, {"board": [[1, 2], [3, 3]]}, {"board": [[1, 0]]}, {"board": 3}):
        with pytest.raises(DataError, match="needs `board`"):
            SlidingPuzzleEnvironment().step([[{"role": "assistant", "content": "up"}]], [info])
    with pytest.raises(ConfigError, match="above max_shuffles"):
        SlidingPuzzleDataset({"min_shuffles": 5})
