"""An agent of smolagents that computes with Python, trained without changes: only its address and API key are set."""

from functools import cache

from openai import DefaultHttpxClient
from smolagents import ActionStep, CodeAgent, LogLevel, OpenAIModel, TaskStep, Timing

EXAMPLES = ("12*34", "85*21")
TEMPLATES = {
    "system_prompt": "You answer questions with Python code.",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer with a number.", "post_messages": "The answer is:"},
}
"""Short prompts that replace those of smolagents, which have more than 1,500 tokens."""


@cache
def connections():
    """Connections of all rollouts: creating them costs more time than a short answer."""
    return DefaultHttpxClient()


def solve(base_url, api_key, model, messages, metadata):
    """Let the agent solve the problem within two steps; the reward is 1 for the correct answer and otherwise 0."""
    endpoint = OpenAIModel(
        model, api_base=base_url, api_key=api_key, client_kwargs={"max_retries": 0, "http_client": connections()}
    )
    agent = CodeAgent([], endpoint, prompt_templates=TEMPLATES, max_steps=2, verbosity_level=LogLevel.OFF)
    # Small models follow examples in the conversation, so the agent remembers two tasks that it has solved.
    for example in EXAMPLES:
        solved = ActionStep(step_number=1, timing=Timing(0.0, 0.0), model_output=f"<code>\nfinal_answer({example})\n</code>")
        agent.memory.steps += [TaskStep(task=f"What is {example}?"), solved]
    question = messages[-1]["content"].removesuffix("=")
    answer = agent.run(f"What is {question}?", reset=False)
    return float(str(answer).strip() == metadata["expected_answer"])
