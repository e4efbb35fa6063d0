"""Registers the environments and datasets by import path, without importing torch or math-verify."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl

REASONING_GYM = ("reasoning-gym>=0.1.25,<0.2",)
INSTALL_REASONING_GYM = "pip install 'rl-envs[reasoning-gym]'"


@hookimpl
def rlcore_environments() -> list[Component]:
    """Math, code, arithmetic, models as judges, verifiable instructions, games and generated reasoning tasks."""
    return [
        Component(
            "math",
            target="rl_envs.math.environment:MathEnvironment",
            config="rl_envs.config:MathEnvironmentConfig",
            summary="Math: the boxed answer must equal the expected one, compared symbolically in separate processes",
        ),
        Component(
            "code",
            target="rl_envs.code.environment:CodeEnvironment",
            config="rl_envs.config:CodeEnvironmentConfig",
            summary="Code: the last code block must pass assertions or stdin/stdout tests, run in a sandbox",
        ),
        Component(
            "arithmetic",
            target="rl_envs.arithmetic:ArithmeticEnvironment",
            config="rl_envs.config:ArithmeticEnvironmentConfig",
            summary="Generated arithmetic: the completion must be exactly the number",
        ),
        Component(
            "guess",
            target="rl_envs.guess:GuessNumberEnvironment",
            config="rl_envs.config:GuessNumberEnvironmentConfig",
            summary="A multi-turn game: guess a secret number with higher/lower hints",
        ),
        Component(
            "tools",
            target="rl_envs.tools.environment:ToolsEnvironment",
            config="rl_envs.config:ToolsEnvironmentConfig",
            summary="Tools: a calculator, Python in a sandbox and other functions; the final answer is compared as by `math`",
        ),
        Component(
            "reward_model",
            target="rl_envs.reward_model:RewardModelEnvironment",
            config="rl_envs.config:RewardModelEnvironmentConfig",
            summary="Scores of a reward model trained on preferences",
            needs=("transformers>=5.16.1,<5.26",),
            install="pip install 'rl-envs[reward-model]'",
        ),
        Component(
            "weather",
            target="rl_envs.weather:WeatherEnvironment",
            config="rl_core.config.schema:EnvironmentConfig",
            summary="Weather prediction: the predicted condition must be the expected one",
        ),
        Component(
            "multiple_choice",
            target="rl_envs.multiple_choice:MultipleChoiceEnvironment",
            config="rl_core.config.schema:EnvironmentConfig",
            summary="Multiple choice: the chosen letter must be the expected one",
        ),
        Component(
            "short_answer",
            target="rl_envs.multiple_choice:ShortAnswerEnvironment",
            config="rl_core.config.schema:EnvironmentConfig",
            summary="Short answers: the stated words must be the expected ones or an alias, normalized as in TriviaQA",
        ),
        Component(
            "instruction_following",
            target="rl_envs.instruction_following:InstructionFollowingEnvironment",
            config="rl_envs.config:InstructionFollowingConfig",
            summary="Verifiable instructions: a program checks constraints on the form of the answer, as in IFEval",
        ),
        Component(
            "sliding_puzzle",
            target="rl_envs.sliding_puzzle:SlidingPuzzleEnvironment",
            config="rl_envs.config:SlidingPuzzleEnvironmentConfig",
            summary="A multi-turn game: put the tiles of a board in order",
        ),
        Component(
            "judge",
            target="rl_envs.judge:JudgeEnvironment",
            config="rl_envs.config:JudgeEnvironmentConfig",
            summary="A language model behind an OpenAI-compatible server scores the answer",
            needs=("httpx>=0.28",),
            install="pip install 'rl-envs[judge]'",
        ),
        Component(
            "reasoning_gym",
            target="rl_envs.reasoning_gym.environment:ReasoningGymEnvironment",
            config="rl_envs.config:ReasoningGymEnvironmentConfig",
            summary="Reasoning Gym: the score that the task of the row gives to the answer",
            needs=REASONING_GYM,
            install=INSTALL_REASONING_GYM,
        ),
        Component(
            "gymnasium",
            target="rl_envs.text_games.gymnasium:GymnasiumEnvironment",
            config="rl_envs.text_games.config:GymnasiumConfig",
            summary="Gymnasium: an environment that is drawn as text, played by naming its actions",
            needs=("gymnasium>=1.4,<2",),
            install="pip install 'rl-envs[gymnasium]'",
        ),
        Component(
            "textarena",
            target="rl_envs.text_games.textarena:TextArenaEnvironment",
            config="rl_envs.text_games.config:TextArenaConfig",
            summary="TextArena: a text game for one player",
            needs=("textarena>=0.7.4,<0.8",),
            install="pip install 'rl-envs[textarena]'",
        ),
        Component(
            "skyrl_gym",
            target="rl_envs.text_games.skyrl_gym:SkyRLGymEnvironment",
            config="rl_envs.text_games.config:SkyRLGymConfig",
            summary="SkyRL Gym: a text environment of its registry",
            needs=("skyrl-gym>=0.4,<0.5",),
            install="pip install 'rl-envs[skyrl-gym]'",
        ),
        Component(
            "openenv",
            target="rl_envs.text_games.openenv:OpenEnvEnvironment",
            config="rl_envs.text_games.config:OpenEnvConfig",
            summary="OpenEnv: an environment that runs in its own server",
            needs=("websockets>=15",),
            install="pip install 'rl-envs[openenv]'",
        ),
        Component(
            "nemo_gym",
            target="rl_envs.nemo_gym:NemoGymEnvironment",
            config="rl_envs.config:NemoGymConfig",
            summary="NeMo Gym: the tools and the reward of a resources server, over HTTP",
            needs=("httpx>=0.28",),
            install="pip install 'rl-envs[nemo-gym]'",
        ),
    ]


@hookimpl
def rlcore_datasets() -> list[Component]:
    """Generated arithmetic, games and reasoning tasks."""
    return [
        Component(
            "arithmetic",
            target="rl_envs.arithmetic:ArithmeticDataset",
            config="rl_envs.config:ArithmeticDatasetConfig",
            summary="Generated arithmetic problems with answers",
        ),
        Component(
            "guess",
            target="rl_envs.guess:GuessNumberDataset",
            config="rl_envs.config:GuessNumberDatasetConfig",
            summary="Secret numbers for the environment `guess`",
        ),
        Component(
            "sliding_puzzle",
            target="rl_envs.sliding_puzzle:SlidingPuzzleDataset",
            config="rl_envs.config:SlidingPuzzleDatasetConfig",
            summary="Shuffled boards for the environment `sliding_puzzle`, all of which can be solved",
        ),
        Component(
            "reasoning_gym",
            target="rl_envs.reasoning_gym.environment:ReasoningGymDataset",
            config="rl_envs.config:ReasoningGymDatasetConfig",
            summary="Generated problems of any Reasoning Gym task",
            needs=REASONING_GYM,
            install=INSTALL_REASONING_GYM,
        ),
        Component(
            "text_game",
            target="rl_envs.text_games.session:TextGameDataset",
            config="rl_envs.text_games.config:TextGameDatasetConfig",
            summary="Seeds of games for the environments `gymnasium` and `textarena`",
        ),
    ]
