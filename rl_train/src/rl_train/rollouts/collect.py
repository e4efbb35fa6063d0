"""Plays rollouts turn by turn with the generation backend and the environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.environment_checks import step_checked
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.messages import Observation
from rl_train.rollouts.decoding import decode_answers
from rl_train.rollouts.seeds import SampleStream, rollout_seed
from rl_train.rollouts.trajectory import Trajectory
from rl_train.rollouts.turns import TurnFormatter


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Plays rollouts to their end.

    Attributes:
        generation: the engine.
        environments: by task name; without any, a rollout is one answer without a reward.
        tokenizer: decodes what the environments read.
        seed: seed of the run.
        max_turns: maximum number of turns of a rollout, by task name.
        max_total_length: maximum number of tokens of a rollout; a rollout that reaches it is truncated.
        reward_weights: weights of named rewards that are not 1, by task name.
    """

    generation: GenerationInterface
    environments: Mapping[str, EnvironmentInterface]
    tokenizer: Any
    seed: int
    max_turns: Mapping[str, int]
    max_total_length: int
    reward_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def collect(self, trajectories: Sequence[Trajectory], *, stream: SampleStream, greedy: bool = False) -> None:
        """Play `trajectories` to their end, in place.

        Args:
            trajectories: rollouts with only their prompts.
            stream: training or validation; part of the seeds, together with prompt ordinal, sample and turn.
            greedy: use greedy decoding.
        """
        unknown = {row.task_name for row in trajectories} - set(self.environments)
        if unknown and self.environments:
            raise ConfigError(
                f"The data has the tasks {sorted(unknown)}, but `env` only has {sorted(self.environments)}. "
                "Add a section env.<task> for each, or set data.train.task_name."
            )
        formatter = TurnFormatter(self.tokenizer) if max(self.max_turns.values(), default=1) > 1 else None
        self.generation.prepare_for_generation()
        for row in trajectories:
            row.reward_weights = self.reward_weights.get(row.task_name, {})
        active = list(trajectories)
        turn = 0
        while active:
            self._sample(active, turn, stream, greedy)
            for task_name in dict.fromkeys(row.task_name for row in active):
                self._answer([row for row in active if row.task_name == task_name], task_name, formatter)
            active = [row for row in active if not row.done]
            turn += 1
        self.generation.finish_generation()

    def _sample(self, rows: list[Trajectory], turn: int, stream: SampleStream, greedy: bool) -> None:
        prompts = [row.token_ids() for row in rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        seeds = [rollout_seed(self.seed, stream, ordinal=row.ordinal, sample=row.sample, turn=turn) for row in rows]
        output = self.generation.generate(
            BatchedDataDict(
                {
                    "input_ids": torch.nn.utils.rnn.pad_sequence(
                        prompts, batch_first=True, padding_value=self.tokenizer.pad_token_id
                    ),
                    "input_lengths": lengths,
                    "stop_strings": [row.stop_strings for row in rows],
                    "sample_seeds": torch.tensor(seeds, dtype=torch.int64),
                }
            ),
            greedy=greedy,
        )
        sampled = [
            output["output_ids"][i, start:end]
            for i, (start, end) in enumerate(zip(lengths, output["unpadded_sequence_lengths"], strict=True))
        ]
        texts = decode_answers(self.tokenizer, sampled)
        for i, (row, ids, text) in enumerate(zip(rows, sampled, texts, strict=True)):
            start = int(lengths[i])
            row.add_answer(text, ids.clone(), output["logprobs"][i, start : start + len(ids)].clone())
            row.truncated = bool(output["truncated"][i])
            row.weight_version = int(output["weight_version"][i])

    def _answer(self, rows: list[Trajectory], task_name: str, formatter: TurnFormatter | None) -> None:
        if not self.environments:
            for row in rows:
                row.done = True
            return
        environment = self.environments[task_name]
        answer = step_checked(environment, task_name, [row.conversation() for row in rows], [row.metadata for row in rows])
        for i, row in enumerate(rows):
            row.add_rewards(_rewards_of(answer, i))
            row.scored = row.scored and (answer.scored is None or bool(answer.scored[i]))
            row.answer = answer.answers[i] if answer.answers is not None else None
            row.stop_strings = answer.next_stop_strings[i]
            row.done = bool(answer.terminateds[i]) or row.truncated or row.turns >= self.max_turns[task_name]
            if answer.metadata[i] is not None:
                row.metadata = answer.metadata[i]
            if not row.done and formatter is not None:
                self._continue(row, answer.observations[i], formatter)

    def _continue(self, row: Trajectory, observation: Observation, formatter: TurnFormatter) -> None:
        ids = formatter.observation_ids(observation, row.message_log[-1]["token_ids"], tools=row.tools)
        if row.num_tokens() + len(ids) >= self.max_total_length:
            row.done = row.truncated = True
            return
        row.add_observation(observation, ids)


def _rewards_of(answer: EnvironmentReturn, row: int) -> dict[str, float]:
    parts = answer.rewards if isinstance(answer.rewards, Mapping) else {"reward": answer.rewards}
    return {name: float(values[row]) for name, values in parts.items()}
