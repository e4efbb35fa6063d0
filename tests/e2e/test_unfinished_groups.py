"""Finished rollouts of unfinished groups survive a kill: with real engines, and in runs that are killed in every phase."""

import asyncio
import json
import textwrap
from collections import Counter, defaultdict

import pytest
import torch
from e2e_runs import MODEL, checkpoint_of
from held_runs import Held, assert_history, holdable
from scheduled_sources import scheduled_source

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_core.data.tokenizer import load_tokenizer
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.metrics.jsonl import read_jsonl
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import load_groups
from rl_train.rollouts.trajectory import to_batch

PROMPTS, GROUP, STEPS = 2, 3, 4


def name_of(row):
    return row.ordinal, row.sample


class Sums(EnvironmentInterface):
    """One to three turns, which differ between the samples of a prompt. Lists its sessions as ordinal and sample."""

    def __init__(self):
        self.sessions = []

    def reset(self, metadata):
        self.sessions.append(self.name(metadata))

    def step(self, message_log_batch, metadata):
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        last = [turn == 1 + sum(self.name(state)) % 3 for turn, state in zip(turns, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"1{turn}+2="} for turn in turns],
            metadata=metadata,
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([float(log[-1]["content"].count("1")) for log in message_log_batch]),
            terminateds=torch.tensor(last),
        )

    def name(self, metadata):
        _, _, ordinal, sample, _ = metadata["session_id"].split("-")
        return int(ordinal), -1 if sample == "greedy" else int(sample)


class Process:
    """A source with its engine and environment, as each process of a run has them."""

    def __init__(self, tokenizer, greedy_baseline):
        self.engine, self.environment = HuggingFaceGeneration(str(MODEL), max_new_tokens=6, torch_dtype="float32"), Sums()
        self.collector = Collector(
            generation=self.engine,
            environments={"sums": self.environment},
            tokenizer=tokenizer,
            seed=5,
            max_turns={"sums": 3},
            max_total_length=64,
        )
        datums = []
        for index in range(40):
            text = f"{index + 3}+{index}="
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
            log = [{"role": "user", "content": text, "token_ids": ids}]
            row = {"message_log": log, "length": len(ids), "extra_env_info": None, "task_name": "sums", "idx": index}
            datums.append({**row, "loss_multiplier": 1.0})
        self.source = scheduled_source(
            self.collector,
            BatchedDataLoader(datums, batch_size=PROMPTS, shuffle=False, collate=list),
            weight_version=lambda: -1,  # without a refit
            group_size=GROUP,
            demand=PROMPTS,
            max_staleness=2,
            ahead=2,
            greedy_baseline=greedy_baseline,
        )

    def run_until(self, finished):
        """Run the event loop until so many rollouts of groups that are in no batch yet have finished."""

        async def wait():
            while sum(row.finished for rows in self.source._rows.values() for row in rows) < finished:
                await asyncio.sleep(0)

        self.collector.loop.run(wait())

    def end(self):
        self.collector.loop.close()
        self.engine.shutdown()


def trained_rows(trained):
    """By ordinal and sample: tokens, turns, rewards and log-probabilities."""
    rows = {}
    for row in trained:
        batch = to_batch([row])
        tokens, logprobs = batch["input_ids"][0].tolist(), batch["generation_logprobs"][0]
        rows[name_of(row)] = ((tokens, row.turns, row.reward, row.turn_rewards, row.baseline_reward), logprobs)
    return rows


@pytest.mark.parametrize("greedy_baseline", [False, True])
def test_a_run_that_is_killed_within_groups_trains_the_samples_of_one_that_is_not(tmp_path, greedy_baseline):
    """The weights do not change, and in float32 the engine samples the same tokens whichever rows it computes together."""
    tokenizer = load_tokenizer(MODEL)
    process, whole = Process(tokenizer, greedy_baseline), []
    for step in range(1, STEPS + 1):
        whole += process.source.take(step, PROMPTS).trajectories
    process.end()

    process, parts, saved, partial = Process(tokenizer, greedy_baseline), [], {}, 0
    for step in range(1, STEPS + 1):
        parts += process.source.take(step, PROMPTS).trajectories
        process.run_until(5)
        state, folder = json.dumps(process.source.state_dict()), tmp_path / str(step)
        process.source.save_files(folder)
        process.end()
        sampled = process.environment.sessions
        assert not saved.keys() & set(sampled), "a saved rollout was sampled again"
        assert len(set(sampled)) == len(sampled)
        groups = load_groups(folder, process.source._limits)
        partial += sum(0 < len(group.rows) < GROUP for group in groups)
        saved = {name_of(row): row for group in groups for row in group.rows}
        process = Process(tokenizer, greedy_baseline)
        process.source.load_state_dict(json.loads(state))
        process.source.load_files(folder)
    process.end()
    assert partial >= STEPS - 1, "no group was unfinished at the checkpoints"

    expected, found = trained_rows(whole), trained_rows(parts)
    assert len(found) == len(parts) == STEPS * PROMPTS * GROUP
    both = expected.keys() & found.keys()
    assert len(both) >= STEPS * PROMPTS * GROUP - 2 * PROMPTS * GROUP, "batches have those that ended first"
    for name in both:
        assert found[name][0] == expected[name][0]
        # Sums in float32 depend on the rows that are computed together: a few ulp of logits of about 10.
        torch.testing.assert_close(found[name][1], expected[name][1], atol=1e-5, rtol=0)


SESSIONS = textwrap.dedent(
    """
    import json

    class Sessions(SlowTurns):
        '''Lists each session that begins and each call for one; every second sample of a prompt takes longer.'''

        def reset(self, metadata):
            self.note("reset", metadata)

        def step(self, message_log_batch, metadata):
            for state in metadata:
                self.note("step", state)
                if int(state["session_id"].split("-")[3]) % 2:
                    time.sleep(0.5)
            return super().step(message_log_batch, metadata)

        def note(self, call, metadata):
            with (FOLDER / "calls.txt").open("a") as calls:
                calls.write(f"{call}-{metadata['session_id']}\\n")

    def ask_twice(base_url, api_key, model, messages):
        from openai import OpenAI
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        for _ in range(2):
            client.chat.completions.create(model=model, messages=messages)
    """
)


def training_calls(folder):
    """By process, and by rollout: how often each method of the environment was called for training."""
    calls = defaultdict(Counter)
    for line in (folder / "calls.txt").read_text().split():
        call, process, stream, ordinal, sample, _ = line.split("-")
        if stream == "training":
            calls[process][int(ordinal), int(sample), call] += 1
    return calls


def tokens_of(row):
    return [token for message in row.sampled_messages for token in message["token_ids"].tolist()]


KILLS = {
    "after training": ({}, ["train"]),
    "in every phase": ({}, ["rollout", "train", "refit", "validation", "checkpoint", "refit"]),
    "with an agent": ({"agent": "slow_turns:ask_twice"}, ["train", "rollout"]),
}
FULL = pytest.mark.full("each kill starts the run again, which takes 20 s; one kill is a slow test")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "after training" else FULL) for case in KILLS])
def test_no_saved_rollout_is_sampled_or_scored_again_after_a_kill(train, slow_turns, tmp_path, case):
    section, phases = KILLS[case]
    steps = 4 + len(phases)
    config = slow_turns(steps, env_cls="slow_turns.Sessions", num_workers=1, max_concurrency=32, **section)
    config = holdable({**config, "cluster": {"workers_per_node": 1}}, tmp_path)
    with (tmp_path / "slow_turns.py").open("a") as module:
        module.write(SESSIONS)
    saved, unfinished, kept, processes = {}, 0, {}, set()

    def check_calls():
        """The process that has ended called the environment for no saved rollout, and began each rollout once."""
        calls = {process: made for process, made in training_calls(tmp_path).items() if process not in processes}
        processes.update(calls)
        for made in calls.values():
            assert not saved.keys() & {name[:2] for name in made}
            assert {count for (*_, call), count in made.items() if call == "reset"} == {1}

    for number, phase in enumerate(phases):
        run = train(config)
        held = Held(run, tmp_path)
        if number % 2 == 0:  # the others are killed in the first step after a resume
            before = newest_checkpoint(tmp_path)
            run.wait_for(lambda before=before: newest_checkpoint(tmp_path) > max(before, 1))
        held.wait_in(phase)
        run.kill()
        run.process.wait()
        held.release()
        run.assert_gone()
        check_calls()
        folder = checkpoint_of(newest_checkpoint(tmp_path), tmp_path) / "rollouts"
        limits = json.loads((folder / "groups.json").read_text())["limits"]
        groups = load_groups(folder, limits)
        unfinished += sum(len(group.rows) < limits["group_size"] for group in groups)
        saved = {name_of(row): tokens_of(row) for group in groups for row in group.rows}
        kept |= saved
    code, output = train(config).wait()
    assert code == 0, output
    check_calls()
    assert unfinished >= len(phases), "no group was unfinished at the checkpoints"
    assert_history(tmp_path, steps)
    records = [row for step in range(1, steps + 1) for row in read_jsonl(records_of(step, tmp_path))]
    trained = {(row["ordinal"], row["sample"]): row["tokens"] for row in records}
    assert len(trained) == len(records)
    assert len(kept.keys() & trained.keys()) >= len(phases)
    assert {name: trained[name] for name in kept if name in trained} == {n: kept[n] for n in kept if n in trained}


def newest_checkpoint(folder):
    return max((int(path.name[-6:]) for path in (folder / "runs/run/checkpoints").glob("step_??????")), default=0)


def records_of(step, folder):
    return folder / f"runs/run/rollouts/step_{step:06d}.jsonl"
