"""What a user should know while pairs are trained: labels that leak, both sides that fall. Knows metrics alone."""

from collections.abc import Mapping

FIRST_STEPS = 5
FALL = 10.0  # nats that the chosen side's log-probability has fallen by, where it is worth a word


class PairWatch:
    """Looks at the metrics of each step, and says each thing once."""

    def __init__(self) -> None:
        self.first: Mapping[str, float] | None = None
        self.sure = 0  # steps from the first one on, in a row, with every pair on the right side
        self.steps = 0
        self.said: set[str] = set()
        self.pending: list[str] = []

    def warnings(self, values: Mapping[str, float]) -> list[str]:
        """What there is to say after a step with these metrics, under TRL's names."""
        self.steps += 1
        self.first = self.first or values
        if self.steps <= FIRST_STEPS and values["rewards/accuracies"] == 1.0:
            self.sure += 1
        if self.sure == self.steps == FIRST_STEPS:
            self.say(
                "leak",
                f"accuracy 1.0 in each of the first {FIRST_STEPS} steps: does the data tell the sides apart by their "
                "length or their end?",
            )
        chosen, rejected = (self.first[f"logps/{side}"] - values[f"logps/{side}"] for side in ("chosen", "rejected"))
        if chosen > FALL and chosen > rejected:
            self.say(
                "fall",
                f"the chosen answers have lost {chosen:.0f} nats, more than the rejected: raise --beta, or add a "
                "likelihood of the chosen (--loss sigmoid sft=0.2, --nll-weight)",
            )
        lines, self.pending = self.pending, []
        return lines

    def say(self, name: str, line: str) -> None:
        if name not in self.said:
            self.said.add(name)
            self.pending.append(line)
