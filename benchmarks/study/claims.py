"""What the papers claim, as comparisons that the study can make."""

from collections import Counter
from typing import NamedTuple

from benchmarks.study.compare import FIXED, NONE, Comparison, Entry, Losses


class Claim(NamedTuple):
    """An entry that should be better than another one, or as good, on some problems."""

    source: str
    words: str
    entry: Entry
    other: Entry
    problems: tuple[str, ...] = ()  # words of their names; () is all
    as_good: bool = False

    def concerns(self, problem: str) -> bool:
        return not self.problems or any(words in problem for words in self.problems)


RECURRENT, HEAVY, SPIKES = ("RNN", "LSTM"), ("heavy-tailed",), ("corrupted", "mislabelled")
ON_ADAM, ON_SGD = ("adam",), ("sgd",)
CLAIMS = (
    Claim(
        "Pascanu 2013, 1211.5063", "a clipped norm makes recurrent networks trainable",
        FIXED, NONE, RECURRENT,
    ),
    Claim(
        "Zhang 2020, 1905.11881", "clipping is faster than any fixed learning rate, in text models",
        FIXED, NONE, ("RNN", "LSTM", "GPT"),
    ),
    Claim(
        "Zhang 2020, 1912.03194", "under heavy-tailed noise a clipped gradient is better",
        FIXED, NONE, HEAVY,
    ),
    Claim(
        "ACClip, 1912.03194", "elementwise, by its own average, it is better still",
        Entry("ACClip", "tuned"), FIXED, HEAVY,
    ),
    Claim(
        "AGC, 2102.06171", "larger learning rates without normalisation",
        Entry("AGC", "tuned"), NONE, ("digits", "RNN"),
    ),
    Claim(
        "AutoClip, 2007.14469", "the 10th percentile, untuned, is better than no clipping",
        Entry("AutoClip", "default"), NONE,
    ),
    Claim(
        "Andrew 2019, 1905.03871", "an adaptive quantile is as good as the best fixed threshold",
        Entry("quantile", "default"), FIXED, (), True,
    ),
    Claim(
        "ZClip, 2504.02507", "better than a fixed threshold for transformers",
        Entry("ZClip", "default"), FIXED, ("GPT",),
    ),
    Claim(
        "AdaGC, 2502.11034", "a threshold for each tensor is better than a global one",
        Entry("AdaGC", "default"), FIXED, ON_ADAM,
    ),
    Claim(
        "U-Clip, 2302.02971", "carrying over what was clipped is better than clipping",
        Entry("U-Clip", "tuned"), FIXED, ON_SGD,
    ),
    Claim(
        "SPAM, 2501.06842", "clamping spikes of elements is better than Adam alone (its clip only)",
        Entry("SPAM", "default"), NONE, ("corrupted", "mislabelled", "heavy-tailed", "GPT"),
    ),
    Claim(
        "Stable-SPAM, 2502.17055", "better than SPAM",
        Entry("Stable-SPAM", "default"), Entry("SPAM", "default"), ON_ADAM,
    ),
    Claim(
        "StableAdamW, 2304.13013", "a shortened step is better than a clipped gradient",
        Entry("StableAdamW", "default"), FIXED, ON_ADAM,
    ),
    Claim(
        "micro-batch clipping, 2408.16204", "clipping micro-batches is better than no clipping",
        Entry("micro-batches", "tuned"), NONE,
    ),
    Claim(
        "OLMo-core, levanter", "leaving out outliers of the norm is better than a fixed threshold",
        Entry("skip on norm", "default"), FIXED, SPIKES,
    ),
)  # fmt: skip


def check(claim: Claim, losses: Losses) -> tuple[str, Counter]:
    """The verdict, and on how many problems the entry was better, equal, worse, unclear."""
    problems = [problem for problem in losses.problems if claim.concerns(problem)]
    compared = losses.compare((problem, claim.entry, claim.other) for problem in problems)
    return judge(claim.as_good, list(compared.values())), count(compared.values())


def count(comparisons) -> Counter:
    return Counter(comparison.verdict for comparison in comparisons)


def judge(as_good: bool, comparisons: list[Comparison]) -> str:
    """Repeated where most problems say so and none contradicts; not repeated where most do."""
    if len(comparisons) < 2:
        return "cannot tell"
    found, most = count(comparisons), len(comparisons) / 2
    right = found["better"] + (found["equal"] if as_good else 0)
    wrong = found["worse"] + (0 if as_good else found["equal"])
    if right > most and not found["worse"]:
        return "repeated"
    return "not repeated" if wrong > most else "cannot tell"
