"""A prompt sampler as a plugin would have it, named by its import path: built from the interface alone."""

from rl_train.data.prompt_sampler import PromptSampler


class LowestFirst(PromptSampler):
    """Draws the rows with the lowest last mean reward first, and of these the ones that it drew least often.

    Args:
        rows: The training prompts.
        initial: The mean reward of rows that it has not drawn.
    """

    def __init__(self, rows, *, initial=0.5):
        super().__init__(rows)
        self.means = [initial] * len(rows)
        self.draws = [0] * len(rows)
        self.seen = []

    def choose(self, count, *, step, excluded):
        free = [row for row in self.rows.order(0) if row not in excluded]
        chosen = sorted(free, key=lambda row: (self.means[row], self.draws[row]))[:count]
        for row in chosen:
            self.draws[row] += 1
        return chosen

    def observe(self, results):
        for result in results:
            self.seen.append([result.step, result.row])
            if result.rewards:
                self.means[result.row] = sum(result.rewards) / len(result.rewards)

    def metrics(self):
        return {"lowest": min(self.means)}

    def state_dict(self):
        return {"means": self.means, "draws": self.draws, "seen": self.seen}

    def load_state_dict(self, state):
        self.means, self.draws, self.seen = state["means"], state["draws"], state["seen"]
