"""What requests have in common, and what each kind of them is worth: the statistics behind `hicache.adaptive`.

A visit is a use that may come back. Its `Trait` is what was known of it:

    kind       first turn; fork of a conversation; second turn; third and fourth; later; abandoned, when another request has
               branched off before its end (a prompt that was edited, an answer that was asked for again)
    tail       pages that were new, in octaves
    gap        time since the turn before, in octaves of 4
    answer     tokens that were generated, in octaves of 4; 0 while they are not known
    or, of a prefix that requests branched off from: how many did (octaves), and the time between the last two

For every group (visits of one trait) and age, in half octaves, returns and time at risk are counted. The hazard of a return is
fitted as a product, each factor a function of age that is drawn towards a constant where little was seen:

    hazard = of the age x of kind at that age x of (kind, tail) x of gap x of answer

so that rare combinations are judged by what they share with frequent ones. What a page is worth is Gittins' index: the largest,
over horizons, of the chance of a return by then over the expected time until then or the return.

Ideas: reuse time by class of request (Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025); index: Gittins, "Bandit
processes and dynamic allocation indices", 1979; fit: one round of iterative proportional fitting (Deming and Stephan, 1940).
Every fit begins anew: were rounds to go on from fit to fit, factors of what was never seen together would drift without bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.ages import OCTAVES, STEPS, Ages, cell_of, octaves_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["ABANDONED", "Groups", "Learner", "Trait", "Visit", "octave4", "worth_of"]

KINDS = 6  # first turn; fork of a conversation; second turn; third and fourth; later; abandoned
ABANDONED = 5
TAILS = 12
GAPS = 8
ANSWERS = 8
USES = 6
SHARED_GROUPS = USES * GAPS
MOST_GROUPS = 1024
"""Groups that are told apart; visits of further traits count as those without gap and answer."""

COUNTING = 64
"""Requests between two counts of time at risk."""

EPOCH = 64
"""Requests between two fits, at least; an eighth of all so far, up to LONGEST_EPOCH."""

LONGEST_EPOCH = 512

WARM_UP = 256
"""Requests of plain LRU before what was learned is used."""

FADE = 0.99
"""What is left of a count after COUNTING requests."""

END_WEIGHT = 0.02
"""Weight of the newest return in the share of those that bring the last page back."""

PRIOR = 10.0
"""Returns that the expectation counts for wherever something is estimated."""

LEVEL_PRIOR = 5.0
"""The same for what holds at all ages."""

_WIDTH_S = np.diff(2.0 ** (np.arange(OCTAVES + 1) / STEPS))
_NEARBY = ((1, 0.6), (2, 0.25))  # cells away, and what a count there counts for here


class Trait(NamedTuple):
    """What tells visits apart; see the module."""

    kind: int
    tail: int = 0
    gap: int = 0
    answer: int = 0

    @staticmethod
    def of_request(kind: int, tail_pages: int, gap_s: float | None) -> Trait:
        """Of a request at its arrival. gap_s: since the turn before, None if there was none."""
        return Trait(kind, min(tail_pages.bit_length(), TAILS - 1), 0 if gap_s is None else octave4(gap_s, GAPS))

    def answered(self, tokens: int) -> Trait:
        """The same, now that `tokens` were generated."""
        return self._replace(answer=octave4(tokens, ANSWERS))


class Visit:
    """The last use that ended at a node. last: hash of the request's last page, which was asked for `last_count` times.

    turn: of its conversation; of a prefix that is shared, how many requests did.
    """

    __slots__ = ("group", "last", "last_count", "since_us", "trait", "turn")

    def __init__(self, turn: int, group: int, since_us: int, trait: Trait | None = None, last_count: int = 0) -> None:
        self.turn = turn
        self.group = group
        self.since_us = since_us
        self.trait = trait
        self.last = 0
        self.last_count = last_count


def octave4(value: float, digits: int) -> int:
    """1 below 4, 2 below 16, and so on, up to digits - 1."""
    return min(1 + max(0, int(value).bit_length() - 1) // 2, digits - 1)


class Groups:
    """Numbers traits. Groups of shared prefixes are negative, so that one look tells; tables have their rows at the end.

    worth: see `Learner.worth`; a new group is worth what its kind and tail are, until it is fitted.
    """

    def __init__(self) -> None:
        self.worth: npt.NDArray[np.float32] | None = None
        self.traits = [Trait(kind, tail) for kind in range(KINDS) for tail in range(TAILS)]
        self._numbers = {trait: number for number, trait in enumerate(self.traits)}

    def __len__(self) -> int:
        return len(self.traits)

    def number(self, trait: Trait) -> int:
        """The group of a trait."""
        number = self._numbers.get(trait)
        if number is None:
            if len(self.traits) == MOST_GROUPS:
                return trait.kind * TAILS + trait.tail
            number = self._numbers[trait] = len(self.traits)
            self.traits.append(trait)
            if self.worth is not None:
                whole = trait.kind * TAILS + trait.tail
                self.worth[2 * number : 2 * number + 2] = self.worth[2 * whole : 2 * whole + 2]
        return number

    @staticmethod
    def shared(uses: int, gap_s: float | None) -> int:
        """The group of a prefix that `uses` requests shared, the last two `gap_s` apart."""
        digit = min(max(0, (uses - 1).bit_length() - 1), USES - 1)
        return -1 - digit * GAPS - (0 if gap_s is None else octave4(gap_s, GAPS))


class Learner:
    """Counts returns and time at risk, and says what each group is worth at each age. Owned by the scheduler thread.

    Told of every visit: `begin` when something was used and may come back, `returned` when it did.
    end_share: of returns that bring the last page back.
    """

    def __init__(self) -> None:
        self.now_us = 0
        self.end_share = 1.0
        self.groups = Groups()
        shape = (MOST_GROUPS + SHARED_GROUPS, OCTAVES)
        self._returns = np.zeros(shape)
        self._risk_s = np.zeros(shape)
        self._visits: Ages[object] = Ages()
        self._counted_us = 0
        self._requests = 0
        self._fit_at = WARM_UP

    def tick(self, now_us: int) -> None:
        """A request arrives at `now_us`."""
        self.now_us = max(self.now_us, now_us)
        self._requests += 1
        if self._requests % COUNTING == 0:
            self._count_risk()

    def worth(self) -> npt.NDArray[np.float32] | None:
        """What pages are worth at the start of each cell of age, fitted if due; None until enough was seen.

        (2 x groups, OCTAVES + 1): row 2 x group, and 2 x group + 1 for last pages of requests. The array stays the learner's.
        """
        if self._requests >= self._fit_at:
            self._fit_at = self._requests + min(max(EPOCH, self._requests // 8), LONGEST_EPOCH)
            self._fit()
        return self.groups.worth

    def begin(self, visit: object, group: int) -> None:
        """Something was used just now by a request of this group."""
        self._visits.put(visit, self.now_us, group)

    def regroup(self, visit: object, group: int, since_us: int) -> None:
        """More is known of a visit, so that it belongs to another group."""
        if visit in self._visits:
            self._visits.put(visit, since_us, group)

    def returned(self, visit: object, group: int, since_us: int) -> None:
        """It was used again; `begin` or `forget` follows."""
        self._returns[group, cell_of(self.now_us - since_us)] += 1

    def note_end(self, came_back: bool) -> None:
        """A request came back; whether it did so with its last page."""
        self.end_share += END_WEIGHT * (came_back - self.end_share)

    def forget(self, visit: object) -> None:
        """It can't be told any more whether it comes back."""
        self._visits.discard(visit)

    def _count_risk(self) -> None:
        lapse_s = (self.now_us - self._counted_us) / 1e6
        self._counted_us = self.now_us
        since_us, group = self._visits.columns()
        rows = group % len(self._risk_s)
        cells = rows * OCTAVES + octaves_of(self.now_us - since_us).astype(np.int64)
        self._risk_s += lapse_s * np.bincount(cells, minlength=self._risk_s.size).reshape(self._risk_s.shape)
        self._returns *= FADE
        self._risk_s *= FADE

    def _fit(self) -> None:
        rows = np.concatenate((np.arange(len(self.groups)), np.arange(-SHARED_GROUPS, 0)))
        worth = worth_of(self._hazards(rows))
        if self.groups.worth is None:
            self.groups.worth = np.zeros((2 * (MOST_GROUPS + SHARED_GROUPS), OCTAVES + 1), np.float32)
        self.groups.worth[2 * rows, :-1] = worth
        self.groups.worth[2 * rows, -1] = worth[:, -1]
        self.groups.worth[2 * rows + 1] = self.end_share * self.groups.worth[2 * rows]

    def _hazards(self, rows: npt.NDArray[np.int64]) -> Floats:
        """Returns a second of each group and age, fitted; see the module."""
        returns, risk_s = self._returns[rows], self._risk_s[rows]
        near, seen = _smooth(returns), returns.sum(1)
        hazard = np.tile(_pooled(returns, risk_s), (len(rows), 1))
        for level in self._levels():
            expected = hazard * risk_s
            present, order, starts = _runs(level)
            overall = np.add.reduceat(seen[order], starts) + LEVEL_PRIOR
            overall /= np.add.reduceat(expected.sum(1)[order], starts) + LEVEL_PRIOR
            by_age = np.add.reduceat(near[order], starts) + PRIOR * overall[:, None]
            by_age /= np.add.reduceat(_smooth(expected)[order], starts) + PRIOR
            hazard *= by_age[np.searchsorted(present, level)]
        return hazard

    def _levels(self) -> list[npt.NDArray[np.int64]]:
        """For each factor, the level of each group, those of shared prefixes last."""
        traits = np.array(self.groups.traits)
        shared = np.arange(SHARED_GROUPS)[::-1]
        kind = np.concatenate((traits[:, 0], np.full(SHARED_GROUPS, KINDS)))
        kind_tail = np.concatenate((traits[:, 0] * TAILS + traits[:, 1], KINDS * TAILS + shared // GAPS))
        gap = np.concatenate((traits[:, 2], GAPS + shared % GAPS))
        answer = np.concatenate((traits[:, 3], np.zeros(SHARED_GROUPS, np.int64)))
        return [kind, kind_tail, gap, answer]


def _runs(levels: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The levels that occur, the groups in their order, and where in that each begins."""
    order = np.argsort(levels, kind="stable")
    present, starts = np.unique(levels[order], return_index=True)
    return present, order, starts


def _smooth(counts: Floats) -> Floats:
    """Counts by age, with what was counted at ages about an octave around."""
    out: Floats = counts.copy()
    for shift, weight in _NEARBY:
        out[:, shift:] += weight * counts[:, :-shift]
        out[:, :-shift] += weight * counts[:, shift:]
    return out


def _pooled(returns: Floats, risk_s: Floats) -> Floats:
    """Hazard a second by age, of all but shared prefixes. Where little was seen: less than at the age before."""
    seen, at_risk_s = returns[:-SHARED_GROUPS].sum(0), risk_s[:-SHARED_GROUPS].sum(0)
    hazard = (seen.sum() + 1.0) / (at_risk_s.sum() + 1.0)
    out = np.empty(OCTAVES)
    for k in range(OCTAVES):
        out[k] = hazard = (seen[k] + 5.0) / (at_risk_s[k] + 5.0 / hazard)
        hazard /= 2 ** (1 / STEPS)
    return out


def worth_of(hazard: Floats) -> Floats:
    """Gittins' index at the start of each cell of age. hazard: a second, float64 (groups, OCTAVES)."""
    hazard = np.ascontiguousarray(hazard.T)  # ages first: the work is by age, for all groups at once
    lasting = _WIDTH_S[:, None] * hazard
    alive = np.ones((OCTAVES + 1, hazard.shape[1]))
    np.exp(-np.cumsum(lasting, axis=0), out=alive[1:])  # chance of no return until the start of each cell
    time_s = np.zeros_like(alive)
    np.cumsum(alive[:-1] * -np.expm1(-lasting) / hazard, axis=0, out=time_s[1:])
    out = hazard.copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        for k in range(OCTAVES - 1):
            rate = ((alive[k] - alive[k + 1 :]) / (time_s[k + 1 :] - time_s[k])).max(axis=0)
            sure = alive[k] > 1e-9  # beyond, hardly anything gets so old and the differences are no longer exact
            np.copyto(out[k], rate, where=sure)
    return out.T
