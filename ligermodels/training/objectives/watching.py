"""What a user should know during a run: of pairs, labels that leak and sides that both fall; of generations, rewards
that do not differ. Knows metrics alone."""

from collections.abc import Mapping

from ligermodels.errors import InputError

FIRST_STEPS = 5
MUCH_ZERO_SPREAD = 0.8  # of the groups: almost nothing is learned
USELESS_GENERATIONS = 10  # in a row, without a group whose rewards differ: the run ends
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


class GenerationWatch:
    """Looks at the metrics of each generation, and says each thing once. keeps_all: groups without spread are trained
    on as well."""

    def __init__(self, keeps_all: bool) -> None:
        self.keeps_all = keeps_all
        self.useless = 0  # generations in a row
        self.said: set[str] = set()

    def refuse_useless(self, metrics: Mapping[str, float]) -> None:
        """Raises InputError where no group of many generations in a row could teach anything."""
        self.useless = self.useless + 1 if metrics["frac_reward_zero_std"] == 1 else 0
        if self.useless == USELESS_GENERATIONS and not self.keeps_all:
            raise InputError(
                f"{USELESS_GENERATIONS} generations in a row had no prompt whose completions got different rewards "
                f"(mean reward {metrics['reward']:.3g}): nothing can be learned. Begin with a model that solves some "
                "of the prompts, raise --temperature or --generations, or use a reward with partial credit"
            )

    def warnings(self, values: Mapping[str, float]) -> list[str]:
        """What there is to say after a step with these metrics."""
        found = {}
        if values.get("frac_reward_zero_std", 0) > MUCH_ZERO_SPREAD:
            found["spread"] = (
                f"{values['frac_reward_zero_std']:.0%} of the prompts got equal rewards for all completions, and teach "
                "nothing: watch frac_reward_zero_std"
            )
        if values.get("completions/clipped_ratio", 0) == 1:
            found["length"] = (
                "every completion reached --max-completion-length: raise it, or name a text that ends one by --stop"
            )
        new = {name: line for name, line in found.items() if name not in self.said}
        self.said |= new.keys()
        return list(new.values())
