"""Reasoning Gym tasks by name: problems by seed, and the task's own scorer."""

import os
import pickle
import signal

import pytest
from environment_steps import step_checked

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_envs.grading_process import Ending
from rl_envs.reasoning_gym.environment import ReasoningGymDataset, ReasoningGymEnvironment, generation, read_answer
from rl_envs.reasoning_gym.tasks import REFUSED
from rl_envs.reasoning_gym.worker import could_be_code, non_finite_numbers

pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize(
    ("task", "params"),
    [("leg_counting", {"min_animals": 2, "max_animals": 2}), ("countdown", {}), ("spell_backward", {}), ("mini_sudoku", {})],
)
def test_right_answers_of_a_task_get_the_full_score_and_wrong_ones_less(environment, task, params):
    data = ReasoningGymDataset({"task": task, "params": params, "num_samples": 3, "seed": 7})
    rows = pickle.loads(pickle.dumps([data[i] for i in range(3)]))
    right = [[*row["messages"], _answer(f"<answer>{row['extra_env_info']['expected_answer']}</answer>")] for row in rows]
    wrong = [[*row["messages"], _answer("<answer>-77</answer>")] for row in rows]
    metadata = [row["extra_env_info"] for row in rows]
    assert step_checked(environment, "rg", right, metadata).rewards.tolist() == [1.0] * 3
    made = step_checked(environment, "rg", [*right[:2], wrong[2], [_answer("none")]], [*metadata, metadata[0]])
    assert max(made.rewards[2:].tolist()) < 1.0
    batch = BatchedDataDict({"rewards": made.rewards, "answers": made.answers, "extra_env_info": made.metadata})
    metrics = environment.global_post_process_and_metrics(batch)[1]
    assert (metrics["accuracy"], metrics["answered_frac"], metrics["scorer_failed_frac"]) == (0.5, 0.75, 0.0)
    assert metrics["score_mean"] == pytest.approx(float(made.rewards.mean()), abs=1e-6)


def _answer(text):
    return {"role": "assistant", "content": text}


def test_problems_depend_only_on_the_task_its_settings_the_seed_and_the_index():
    settings = {"task": "countdown", "num_samples": 4, "seed": 3}
    one, two = ReasoningGymDataset(settings), ReasoningGymDataset({**settings, "num_samples": 9})
    assert [one[i] for i in range(4)] == [two[i] for i in range(4)]
    assert one[-1] == one[3]
    assert one[0] != ReasoningGymDataset({**settings, "seed": 4})[0]
    assert [message["role"] for message in one[0]["messages"]] == ["system", "user"]
    assert len(ReasoningGymDataset({**settings, "system_prompt": None})[0]["messages"]) == 1


def test_problems_do_not_depend_on_the_hash_seed_of_the_process(monkeypatch):
    def problem(hash_seed):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        generation.end()  # the next process would have this hash seed
        return ReasoningGymDataset({"task": "ransom_note", "num_samples": 1})[0]

    assert problem("1") == problem("2")


def test_a_problem_that_cannot_be_generated_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(generation, "ask", lambda request, timeout_s: {"error": "ValueError: no word of 40 letters"})
    with pytest.raises(DataError, match="cannot generate problem None of the task 'leg_counting': ValueError: no word"):
        ReasoningGymDataset()
    monkeypatch.setattr(generation, "ask", lambda request, timeout_s: Ending.CPU_LIMIT)
    with pytest.raises(DataError, match=r"its process ended \(cpu_limit\)"):
        ReasoningGymDataset()


@pytest.mark.parametrize("task", ["leg_counting", "countdown", "chain_sum"])
def test_datasets_of_neighbouring_seeds_share_no_problems(task):
    params = {"min_digits": 9, "max_digits": 9} if task == "chain_sum" else {}
    problems = [
        {
            ReasoningGymDataset({"task": task, "params": params, "num_samples": 50, "seed": seed})[i]["messages"][-1]["content"]
            for i in range(50)
        }
        for seed in (0, 1)
    ]
    assert not problems[0] & problems[1]


def test_by_default_only_the_full_score_is_rewarded(environment):
    entry = {"question": "", "answer": "golfer", "metadata": {}}
    info = {"task": "spell_backward", "params": {}, "entry": entry}
    # The scorer adds 1/6 per letter in the right place, ignores letters after the last, and 6 * (1/6) is just below 1.
    logs = [[_answer(f"<answer>{text}</answer>")] for text in ("golfer", "golfere", "golfre")]
    score = environment.step(logs, [info] * 3)
    assert score.rewards.tolist() == pytest.approx([1.0, 1.0, 4 / 6])
    strict = ReasoningGymEnvironment()
    correct = strict.step(logs, [info] * 3)
    strict.shutdown()
    assert correct.rewards.tolist() == [1.0, 0.0, 0.0]
    assert [row["score"] for row in correct.metadata] == [row["score"] for row in score.metadata]


def test_the_last_tagged_answer_is_scored():
    assert read_answer("<answer>1</answer> no: <answer>\n2 </answer>", "answer") == "2"
    assert read_answer("2", "answer") is None
    assert read_answer("<answer> </answer>", "answer") is None
    assert read_answer(" 2 ", None) == "2"


@pytest.fixture(scope="module")
def environment():
    opened = ReasoningGymEnvironment({"timeout_s": 2.0, "reward": "score"})
    yield opened
    opened.shutdown()


def test_an_answer_that_makes_the_scorer_raise_gets_nothing_and_is_counted(environment, monkeypatch, own_messages):
    monkeypatch.setattr(environment, "_failed", set())
    record = ReasoningGymDataset({"num_samples": 1})[0]["extra_env_info"]
    broken = {**record, "entry": {"question": "", "metadata": {}}}  # without `answer`, so that the scorer raises
    made = environment.step([[_answer("<answer>3</answer>")]], [broken])
    assert (made.rewards.tolist(), made.scored.tolist()) == ([0.0], [True])
    batch = BatchedDataDict({"rewards": made.rewards, "answers": made.answers, "extra_env_info": made.metadata})
    assert environment.global_post_process_and_metrics(batch)[1]["scorer_failed_frac"] == 1.0
    environment.step([[_answer("<answer>4</answer>")]], [broken])
    [warning] = own_messages()
    assert "leg_counting" in warning
    assert "KeyError: 'answer'" in warning
    assert "'3'" in warning


@pytest.mark.slow
def test_an_answer_that_takes_too_long_or_is_code_is_scored_0_and_others_are_unaffected(environment, tmp_path):
    info = ReasoningGymDataset({"task": "countdown", "num_samples": 1})[0]["extra_env_info"]
    right, written = info["expected_answer"], tmp_path / "written"
    code = f"__import__('os').system('touch {written}')"
    answers = [right, "9**9**9**9", code, code.replace("__", "\uff3f\uff3f"), f"open('{written}', 'w')", "nan", "1e999", right]
    made = step_checked(environment, "rg", [[_answer(f"<answer>{text}</answer>")] for text in answers], [info] * len(answers))
    rewards = made.rewards.tolist()
    assert (rewards[0], rewards[-1]) == (1.0, 1.0)
    assert max(rewards[1:-1]) < 0.1
    assert made.scored.all()
    assert not written.exists()


@pytest.mark.parametrize(
    ("answer", "is_code"),
    [
        ("2*x**2 - sin(x)/3 + C", False),
        ("(3 + 4)*5 - 1.5e3", False),
        ("['A', 'B.']", False),
        ("sin('1')", True),
        ("ev\u00aal(1)", True),
        ("().a", True),
        ("x.subs", True),
        ("(open#\n)('f')", True),
        ("S(chr(95))", True),
        ("[print][0](1)", True),
    ],
)
def test_expressions_with_attributes_or_other_calls_could_be_code(answer, is_code):
    assert could_be_code(answer) is is_code


def test_a_scoring_process_that_is_killed_from_outside_is_replaced_and_the_answer_scored(environment):
    info = ReasoningGymDataset({"num_samples": 1})[0]["extra_env_info"]
    log = [_answer(f"<answer>{info['expected_answer']}</answer>")]
    assert environment.step([log], [info]).rewards.tolist() == [1.0]
    os.kill(environment._process.pid, signal.SIGKILL)
    assert environment.step([log], [info]).rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"task": "leg_countin"}, "Did you mean 'leg_counting'"),
        ({"params": {"legs": 3}}, "unexpected keyword argument 'legs'"),
        ({"params": {"min_animals": 5, "max_animals": 1}}, "max_animals must be"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        ReasoningGymDataset(config)


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_tasks_whose_scorer_pays_a_constant_answer_are_refused_with_the_reason(environment, task):
    with pytest.raises(ConfigError, match=f"task '{task}' cannot be used: its scorer gives|task 'composite' .* mixes other"):
        ReasoningGymDataset({"task": task})
    with pytest.raises(ConfigError, match=f"task '{task}' cannot be used"):
        environment.step([[_answer("<answer>1</answer>")]], [{"task": task, "params": {}, "entry": {}}])


@pytest.mark.parametrize(
    "answer",
    ["nan", "NaN", "-inf", "+Infinity", "nan+nanj", "[nan, 1]", "1e999", "1_0E+9_99", "\uff4e\uff41\uff4e", "oo", "zoo"],
)
def test_an_answer_with_a_number_that_is_not_finite_gets_nothing(environment, answer):
    entry = {"question": "", "answer": "1", "metadata": {"difficulty": {}}}
    info = {"task": "decimal_arithmetic", "params": {}, "entry": entry}
    step_return = environment.step([[_answer(f"<answer>{answer}</answer>")]], [info])
    assert (step_return.rewards.tolist(), [row["score"] for row in step_return.metadata]) == ([0.0], [0.0])


def test_words_that_look_like_numbers_are_scored_if_the_expected_answer_has_them(environment):
    entry = {"question": "", "answer": "INF", "metadata": {"word": "FNI"}}
    info = {"task": "spell_backward", "params": {}, "entry": entry, "expected_answer": "INF"}
    assert environment.step([[_answer("<answer>inf</answer>")]], [info]).rewards.tolist() == [1.0]
    assert non_finite_numbers("1e30 infinite banana 0x1e999 1.5") == set()


def test_rows_of_other_data_are_refused():
    with pytest.raises(DataError, match="use the dataset `reasoning_gym`"):
        ReasoningGymEnvironment().step([[_answer("<answer>1</answer>")]], [{"expected_answer": "1"}])


def test_a_missing_package_is_an_error_with_its_extra(monkeypatch, tmp_path):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('No module named reasoning_gym')")
    monkeypatch.syspath_prepend(tmp_path)
    generation.end()  # the next process has this import path
    with pytest.raises(ConfigError, match=r"pip install 'rl-envs\[reasoning-gym\]'"):
        ReasoningGymDataset()
    generation.end()
