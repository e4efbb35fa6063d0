"""An agent for sums, written against the OpenAI client. It needs no changes to be trained."""

from functools import cache

from openai import OpenAI


@cache
def connection(base_url):
    """One client for all rollouts: creating one costs more time than a short answer."""
    return OpenAI(base_url=base_url, api_key="set for each rollout", max_retries=0)


def add(base_url, api_key, model, messages, metadata):
    """Add in both orders, and answer only if both sums agree; the reward is 1 for a correct answer and otherwise 0."""
    client = connection(base_url).with_options(api_key=api_key)

    def ask(question):
        # Each question is a separate conversation, so a rollout has two segments.
        response = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
        return (response.choices[0].message.content or "").strip()

    question = messages[-1]["content"]
    left, right = question.removesuffix("=").split("+")
    first, second = ask(question), ask(f"{right}+{left}=")
    answer = first if first == second else None
    return float(answer == metadata["expected_answer"])
