"""An environment that violates the contract of `EnvironmentReturn` stops the run with task, class and what was found."""

import re

import pytest
import torch
from environment_steps import step_checked

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_core.testing.outputs.environment import metrics_checked
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.pool import InProcessPool
from rl_train.rollouts.environment_pool import EnvironmentPool

ROWS = 2
HALF = "\ud83d"
SAID = {"role": "environment", "content": "next"}
GOOD = EnvironmentReturn(
    observations=[SAID] * ROWS,
    metadata=[{}] * ROWS,
    next_stop_strings=[None, ["!"]],
    rewards=torch.ones(ROWS),
    terminateds=torch.zeros(ROWS),
    answers=["4", None],
)


class Returns(EnvironmentInterface):
    """Returns the value passed to its constructor."""

    def __init__(self, found):
        self.found = found

    def step(self, message_log_batch, metadata):
        return self.found

    def global_post_process_and_metrics(self, batch):
        return (batch, self.found) if isinstance(self.found, dict) else self.found


def changed(**fields):
    return GOOD._replace(**fields)


BROKEN = {
    "None": (None, "returned None from step()"),
    "a dict": (GOOD._asdict(), "returned a dict from step()"),
    "a text": ("right!", "returned a str from step()"),
    "two values": (([SAID] * 2, torch.ones(2)), "returned a tuple of 2 values"),
    "too many values": ((*GOOD, 1), "returned a tuple of 9 values"),
    "short answers": (changed(answers=["4"]), "called with 2 rows but returned 1 answers"),
    "short metadata": (changed(metadata=[{}]), "returned 1 metadata"),
    "no metadata": (changed(metadata=None), "returned None as metadata"),
    "long observations": (changed(observations=[SAID] * 3), "returned 3 observations"),
    "one text for all observations": (changed(observations="ab"), "returned a str as observations"),
    "an observation that is text": (changed(observations=["a", "b"]), "returned 'a' as observation of row 0"),
    "no role": (changed(observations=[SAID, {"content": "b"}]), "a mapping of ['content'] as observation of row 1"),
    "no content": (changed(observations=[{"role": "user"}, SAID]), "a mapping of ['role'] as observation of row 0"),
    "content that is a number": (
        changed(observations=[SAID, {**SAID, "content": 7}]),
        "7 as content of the observation of row 1",
    ),
    "an image by its path": (
        changed(observations=[SAID, {**SAID, "content": [{"type": "image_url", "image_url": {"url": "1.png"}}]}]),
        "the observation of row 1 has an image '1.png': expected its file as `data:image/png;base64,...`",
    ),
    "an empty list of messages": (changed(observations=[SAID, []]), "an empty list as observation of row 1"),
    "a text in a list of messages": (changed(observations=[[SAID, "b"], SAID]), "'b' as message 1 of the observation of row 0"),
    "an unknown key": (
        changed(observations=[[SAID, {**SAID, "token_ids": [1]}], SAID]),
        "the unknown keys token_ids in the message 1 of the observation of row 0",
    ),
    "an id without the role tool": (
        changed(observations=[SAID, {**SAID, "tool_call_id": "a"}]),
        "returned tool_call_id in the observation of row 1, whose role is 'environment'",
    ),
    "calls of the environment": (changed(observations=[{**SAID, "tool_calls": []}, SAID]), "tool_calls in the observation"),
    "an id that is a number": (
        changed(observations=[SAID, [{"role": "tool", "content": "4", "tool_call_id": 1}]]),
        "returned 1 as tool_call_id of the message 0 of the observation of row 1",
    ),
    "half of a character in an observation": (
        changed(observations=[SAID, {**SAID, "content": "ab" + HALF}]),
        r"content of the observation of row 1 with '\ud83d' at position 2",
    ),
    "half of a character in an answer": (changed(answers=[HALF, None]), r"answer of row 0 with '\ud83d' at position 0"),
    "half of a character in a stop string": (changed(next_stop_strings=[None, [HALF]]), "stop string of row 1"),
    "an answer that is a number": (changed(answers=[None, 4]), "returned 4 as answer of row 1"),
    "an integer too long to print": (changed(answers=[None, 10**5000]), "an int as answer of row 1"),
    "texts as rewards": (changed(rewards=["1", "0"]), "returned ['1', '0'] as rewards; row 0 has '1'"),
    "no rewards": (changed(rewards=None), "returned None as rewards"),
    "rewards with a further axis": (changed(rewards=torch.ones(2, 1)), "a tensor of shape [2, 1] as rewards"),
    "one reward for all": (changed(rewards=1.0), "a tensor of shape [] as rewards"),
    "short rewards": (changed(rewards=torch.ones(1)), "returned 1 rewards"),
    "a nan reward": (changed(rewards=torch.tensor([1.0, float("nan")])), "returned the reward nan for row 1"),
    "an infinite named reward": (changed(rewards={"style": [0.0, float("-inf")]}), "returned the reward style -inf for row 1"),
    "a named reward that is short": (changed(rewards={"style": [0.0]}), "returned 1 style"),
    "a reward name that is a number": (changed(rewards={1: [0.0, 0.0]}), "a reward named 1"),
    "terminateds of another shape": (changed(terminateds=torch.zeros(1, 2)), "shape [1, 2] as terminateds"),
    "terminateds that are texts": (changed(terminateds=["no", "yes"]), "returned ['no', 'yes'] as terminateds"),
    "terminateds that are neither 0 nor 1": (changed(terminateds=[0.0, 0.5]), "returned terminateds 0.5 for row 1"),
    "terminateds that are not a number": (changed(terminateds=[float("nan"), 1.0]), "returned terminateds nan for row 0"),
    "scored that is neither 0 nor 1": (changed(scored=[1, 2]), "returned scored 2 for row 1"),
    "named rewards without a name": (changed(rewards={}, terminateds=[0, 1]), "returned {} as rewards, so row 1, which ends"),
    "no name for one scored row": (changed(rewards={}, scored=[0, 1], terminateds=[1, 1]), "so row 1, which ends"),
    "one stop string in place of a list": (changed(next_stop_strings=[None, "!"]), "'!' as next_stop_strings of row 1"),
    "an empty stop string": (changed(next_stop_strings=[[""], None]), "an empty stop string for row 0"),
    "no stop strings": (changed(next_stop_strings=None), "returned None as next_stop_strings"),
}
METRICS = {
    "None": (None, "returned None from global_post_process_and_metrics()"),
    "metrics alone": (({"accuracy": 1.0},), "returned a tuple of a dict"),
    "None in place of metrics": ((BatchedDataDict(), None), "returned a tuple of a BatchedDataDict, None from"),
    "a text as metric": ({"accuracy": "high"}, "the metric 'accuracy': 'high'"),
    "a list as metric": ({"accuracy": [1.0, 0.0]}, "the metric 'accuracy': [1.0, 0.0]"),
}


def pooled(found):
    return EnvironmentPool(InProcessPool(Returns, {"found": found}), task_name="chess")


def names_task_and_class(error, what):
    text = str(error.value)
    assert f"Environment class {Returns.__module__}.Returns of task 'chess'" in text
    assert what in text
    text.encode()
    assert error.value.exit_code == 1


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_return_of_step_names_the_task_the_class_and_what_was_found(case, is_pooled):
    found, what = BROKEN[case]
    environment = pooled(found) if is_pooled else Returns(found)
    with pytest.raises(RLCoreError) as error:
        step_checked(environment, "chess", [[]] * ROWS, [None] * ROWS)
    names_task_and_class(error, what)


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("case", METRICS)
def test_a_broken_return_of_metrics_names_the_task_the_class_and_what_was_found(case, is_pooled):
    found, what = METRICS[case]
    environment = pooled(found) if is_pooled else Returns(found)
    with pytest.raises(RLCoreError) as error:
        metrics_checked(environment, "chess", BatchedDataDict())
    names_task_and_class(error, what)


@pytest.mark.parametrize(
    "found",
    [
        GOOD,
        tuple(GOOD)[:5],
        changed(rewards=[1, 0], terminateds=[True, False], answers=None),
        changed(rewards={"right": torch.ones(2, dtype=torch.float64), "style": [0.5, 0.5]}),
        changed(observations=[None, {}], terminateds=torch.ones(2)),
    ],
    ids=["as documented", "a plain tuple", "lists", "named rewards", "no messages for rows that have ended"],
)
def test_returns_that_meet_the_contract_pass_with_rewards_as_float32_and_ends_as_bool(found):
    made = step_checked(pooled(found), "chess", [[]] * ROWS, [None] * ROWS)
    rewards = made.rewards.values() if isinstance(made.rewards, dict) else [made.rewards]
    assert {values.dtype for values in rewards} == {torch.float32}
    assert made.terminateds.dtype == torch.bool
    assert metrics_checked(Returns({"accuracy": torch.tensor(0.5), "n": 3}), "chess", BatchedDataDict()) == {
        "accuracy": 0.5,
        "n": 3.0,
    }


@pytest.mark.full("broken returns of pools in this process are named here; train/rollouts/test_failures.py has actors")
def test_an_environment_in_ray_actors_that_returns_none_names_its_task_and_class(local_ray):
    class Silent(EnvironmentInterface):
        def step(self, message_log_batch, metadata):
            return None

    with ActorPool(None, Silent, name="env.chess") as pool:
        environment = EnvironmentPool(pool, task_name="chess")
        with pytest.raises(RLCoreError, match=re.escape("Silent of task 'chess' returned None from step()")):
            environment.step([[]], [None])


def test_an_observation_may_be_several_messages_and_have_content_in_parts():
    results = [{"role": "tool", "content": "4", "tool_call_id": "a", "name": None}, {"role": "tool", "content": "5"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]}
    found = step_checked(Returns(changed(observations=[results, parts])), "chess", [[]] * ROWS, [None] * ROWS)
    assert found.observations == [
        [{"role": "tool", "content": "4", "tool_call_id": "a"}, {"role": "tool", "content": "5"}],
        {"role": "user", "content": "go on"},
    ]


def test_the_observation_of_a_row_that_ended_is_not_read():
    found = step_checked(Returns(changed(observations=[None, []], terminateds=torch.ones(ROWS))), "chess", [[]] * 2, [None] * 2)
    assert found.observations == [None, []]
