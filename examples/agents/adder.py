"""An agent for sums, written against the OpenAI client. It does not know that it is trained."""

from openai import OpenAI

ATTEMPTS = 2


def add(base_url, api_key, model, messages, metadata):
    """Ask for the sum until the answer is a number, at most twice; returns the reward."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    for _ in range(ATTEMPTS):
        # The second attempt starts over, without the first answer: a rewritten history, which is a new segment.
        response = client.chat.completions.create(model=model, messages=messages)
        answer = (response.choices[0].message.content or "").strip()
        if answer.isdecimal():
            break
    return float(answer == metadata["expected_answer"])
