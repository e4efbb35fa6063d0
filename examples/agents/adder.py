"""An agent for sums, written against the OpenAI client. It does not know that it is trained."""

from functools import cache

from openai import OpenAI

ATTEMPTS = 2


@cache
def connection(base_url):
    """One client for all rollouts: creating one costs more time than a short answer."""
    return OpenAI(base_url=base_url, api_key="set for each rollout", max_retries=0)


def add(base_url, api_key, model, messages, metadata):
    """Ask for the sum until the answer is a number, at most twice; returns the reward."""
    client = connection(base_url).with_options(api_key=api_key)
    for _ in range(ATTEMPTS):
        # The second attempt starts over, without the first answer: a rewritten history, which is a new segment.
        response = client.chat.completions.create(model=model, messages=messages)
        answer = (response.choices[0].message.content or "").strip()
        if answer.isdecimal():
            break
    return float(answer == metadata["expected_answer"])
