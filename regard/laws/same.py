"""Whether attention computes what another computes, and if not, which common slip explains the difference.

The slips are tried on the reference: one that reproduces the subject's outputs to rounding is named in the finding.
Where none does, the finding says what can be seen of the weights, and from which length on outputs are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from torch import Tensor, nn

from regard.laws.case import Adjust, Case, Compared, CouldNotBeAsked, Finding, agree, difference, worst
from regard.laws.diagnosis import describe_lengths, describe_rounding, describe_weights
from regard.laws.inside import Inside, look_inside
from regard.laws.signatures import find_window
from regard.laws.slips import PADDING_SLIPS, SOFTMAX_SLIPS, Asked, Slip, find_factor
from regard.laws.subjects import Subject
from regard.laws.variants import CHOICES, POSITION_SLIPS, SMALL_EPSILON, find_epsilon
from regard.mechanisms import Softmax

LARGE = 8.0  # queries and keys this many times as large give scores of about a hundred


class SameAs:
    """The law that a subject gives what `reference` gives, on the same q, k, v and under the same mask."""

    def __init__(self, reference: Subject) -> None:
        self.reference = reference
        self.source = f"SameAs({reference.source})"
        self._explained: dict[tuple[int, Case], tuple[str, list[str]]] = {}
        self.__doc__ = f"gives what {reference.label} gives on the same inputs"

    def __call__(self, subject: Subject, case: Case) -> Finding:
        if subject.token_axis != self.reference.token_axis:
            return self._compare_inside(subject, case)
        case = self.reference.fit(case.but(window=None, documents=False, adjust="none"))
        findings = [agree(case, lambda c: self._outputs(subject, c), "outputs")]
        if findings[0].broken:
            words, is_chosen = self._find_choice(subject, case)
            words = words or self._explain(subject, case)
            return findings[0]._replace(what=f"outputs{words}", noted=is_chosen)
        if case.padding != "none" and subject.takes_visible and self.reference.takes_visible:
            findings.append(self._compare_padded(subject, case))
        if case.dtype == "float64" and case.precision is None and not subject.projects:
            what = "outputs with scores of about a hundred: are scores clamped, or a maximum not subtracted?"
            findings.append(agree(case, lambda c: self._outputs(subject, c, size=LARGE), what))
            if isinstance(self.reference.mechanism(case), Softmax):
                what = "outputs where all scores are 0: is a score of 0 taken for a hidden one?"
                findings.append(agree(case, lambda c: self._outputs(subject, c, size=0.0), what))
        findings += self._compare_fewer_queries(subject, case)
        findings += self._compare_adjusted(subject, case)
        return worst(findings)

    def _outputs(self, subject: Subject, case: Case, visible: Tensor | None = None, size: float = 1.0) -> Compared:
        """Returns the outputs of subject and reference, on rows that rounding does not decide, and their scale."""
        inputs = subject.inputs(case)
        if size != 1.0:
            inputs = [*(size * x for x in inputs[:-1]), inputs[-1]]
        want = self.reference.run(case, inputs, visible)
        got = want
        if case.rounded is None:  # else only the truth is asked for, in a dtype that the subject may not take
            got = subject.run(case, inputs, visible)
        sure = self.reference.unambiguous_rows(case, inputs)
        if visible is not None and subject.hides_ends_only and not subject.projects:
            real = visible[:, None].expand(want.shape[:3])  # lengths may be those of queries, too
            sure = real if sure is None else sure & real
        if sure is None:
            return got, want, self.reference.cancellation_scale(case, inputs)
        if got.shape == want.shape:
            got = got[sure]
            want = want[sure]
        return got, want, None

    def _compare_padded(self, subject: Subject, case: Case) -> Finding:
        """Compares outputs with hidden keys; if they differ, the finding names the slip that explains it."""
        found = agree(case, lambda c: self._outputs(subject, c, _pad(subject, c)), "outputs with padding")
        if not found.broken or subject.promises_zeros:
            return found
        case = self._large_case(subject, case, padding="inside")
        visible = _pad(subject, case)
        words = self._find_slip(subject, case, {**PADDING_SLIPS, **SOFTMAX_SLIPS}, visible)
        return found._replace(what=f"outputs with padding{words}")

    def _compare_fewer_queries(self, subject: Subject, case: Case) -> list[Finding]:
        """Compares outputs of fewer queries than keys; under a causal mask the queries are the last tokens."""
        asked = self.reference.fit(case.but(padding="none"))
        both = (subject, self.reference)
        # What takes causal queries for the first of the keys follows another convention, of which 'queries' tells.
        if asked.causal or not all(s.takes_fewer_queries(False) for s in both) or asked.T > 100:
            return []
        if subject.knows_positions or find_window(
            getattr(subject, "pristine", None)
        ):  # nobody says where fewer queries than keys stand
            return []
        inputs = subject.inputs(asked, asked.T + 3)
        error = difference(subject.run(asked, inputs), self.reference.run(asked, inputs))
        if asked.tolerance is None:
            return []
        queries = "one query" if asked.T == 1 else f"{asked.T} queries"
        found = Finding(error, asked.tolerance, f"outputs of {queries} over {asked.T + 3} keys")
        if found.broken:
            found = found._replace(
                what=found.what + self._explain(subject, asked), noted=self._reads_few(subject, asked)
            )
        return [found]

    def _reads_few(self, subject: Subject, case: Case) -> bool:
        """Tells whether somebody else's attention reads as many keys as it has queries, and is right for those."""
        if subject.own:
            return False
        q, *more = subject.inputs(case, case.T + 3)
        few = [x.narrow(subject.token_axis, 0, case.T) for x in more]
        error = difference(subject.run(case, [q, *more]), self.reference.run(case, [q, *few]))
        return error <= case.tolerance_or(1.0)

    def _compare_adjusted(self, subject: Subject, case: Case) -> list[Finding]:
        """Compares outputs with a bias, with ALiBi's slopes and with a softcap, if both subjects take them."""
        findings = []
        for kind in get_args(Adjust):
            asked = self.reference.fit(subject.fit(case.but(adjust=kind)))
            if kind == "none" or asked.adjust != kind or asked.T > 131:
                continue
            what = f"outputs with {kind} given"
            findings.append(agree(asked, lambda c: self._outputs(subject, c), what))
        return findings

    def _large_case(self, subject: Subject, case: Case, padding: str = "none") -> Case:
        """Returns a case in which no slip fits by coincidence: no two sizes are equal, nor equal to the first ones."""
        large = case.but(B=2, T=11, H=8, G=4, K=9, V=13, padding=padding, adjust="none")
        return self.reference.fit(subject.fit(large))

    def _find_choice(self, subject: Subject, case: Case) -> tuple[str, bool]:
        """Returns words for an epsilon or for positions that explain the difference, and whether these are no fault."""
        inputs = subject.inputs(case)
        if len(inputs) != 3 or case.tolerance is None or subject.own:
            return "", False
        epsilon = self._find_epsilon(subject, case)
        if epsilon is not None:
            words = f" (those of {self.reference.label} with {epsilon:.1g} added to each row's sum: divisions by zero?)"
            return words, epsilon <= SMALL_EPSILON
        window = self._find_window(subject, case)
        if window is not None:
            return f" (those of {self.reference.label} in a window of {window} tokens, as its signature says)", True
        for slips in (CHOICES, POSITION_SLIPS):
            found = self.match_positions(subject, case, slips)
            if found:
                return found, slips is CHOICES
        return "", False

    def _find_window(self, subject: Subject, case: Case) -> int | None:
        """Returns the window that a signature declares, where it explains the outputs, or one that is a token off."""
        declared = find_window(getattr(subject, "pristine", None))
        if declared is None:
            return None
        large = self._large_case(subject, case)
        large = self.reference.fit(subject.fit(large.but(T=2 * declared + 7)))
        inputs = subject.inputs(large)
        try:
            got = subject.run(large, inputs)
        except CouldNotBeAsked:
            return None
        for window in (declared, declared - 1, declared + 1):
            if difference(got, self.reference.run(large.but(window=window), inputs)) <= large.tolerance_or(1.0):
                return window
        return None

    def _find_epsilon(self, subject: Subject, case: Case) -> float | None:
        """Returns what is added to each row's sum of weights, the same at two lengths; None if that is nothing."""
        large = self._large_case(subject, case)
        found = [self._measure_epsilon(subject, large.but(T=T, S=T)) for T in (11, 14)]
        one, other = found
        if one is None or other is None or abs(one - other) > 0.05 * one:
            return None
        return one

    def _measure_epsilon(self, subject: Subject, case: Case) -> float | None:
        inputs = subject.inputs(case)
        try:
            got = subject.run(case, inputs)
        except CouldNotBeAsked:
            return None
        asked = Asked(inputs[0], inputs[1], inputs[2], case.causal, None)
        want = self.reference.run(case, inputs)
        return find_epsilon(self.reference.mechanism(case), asked, got, want, case.tolerance_or(1.0))

    def match_positions(self, subject: Subject, case: Case, slips: Mapping[str, Slip]) -> str:
        """Returns words for positions that explain outputs of four heads and of eight, whose slopes differ."""
        found = ""
        for H in (8, 4):
            # Rotary positions want even widths.
            large = self._large_case(subject, case).but(H=H, K=10, V=14)
            try:
                again = self._find_slip(subject, self.reference.fit(subject.fit(large)), slips, None)
            except (CouldNotBeAsked, RuntimeError):
                return ""
            if not again or found not in ("", again):
                return ""
            found = again
        return found

    def _explain(self, subject: Subject, case: Case) -> str:
        """Returns words for why outputs differ, in brackets, or nothing."""
        large = self._large_case(subject, case)
        if large.tolerance is None:
            return ""
        try:
            return self._find_words(subject, case, large)
        except (CouldNotBeAsked, RuntimeError):  # outputs of another shape, say: the finding stands without a hint
            return ""

    def _find_words(self, subject: Subject, case: Case, large: Case) -> str:
        """Returns the slip that explains the difference, else what can be seen of rounding, lengths and weights."""
        if len(subject.inputs(large)) != 3 or not isinstance(self.reference.mechanism(large), Softmax):
            return ""
        shapes = self._compare_shapes(subject, large)
        if shapes:
            large = large.but(G=large.H)  # it may be one that takes no groups and does not say so
            if self._compare_shapes(subject, large):
                return shapes
        asked = (id(subject), large)
        if not bool(subject.run(large, subject.inputs(large)).isfinite().all()):
            return ": NaN or infinity from ordinary inputs: is it 0 · ∞, or a row in which all is hidden?"
        if asked not in self._explained:  # shrinking asks again and again
            found = self._confirm_slip(subject, large, self._find_slip(subject, large, SOFTMAX_SLIPS, None))
            if not found and not large.causal:
                found = self._find_causal(subject, large)
            told = [
                describe_rounding(subject, self.reference, large),
                describe_weights(subject, self.reference, large),
            ]
            self._explained[asked] = (found, told)
        found, told = self._explained[asked]
        if found:
            return found
        words = "; ".join(word for word in [describe_lengths(subject, self.reference, case), *told] if word)
        if words:
            return f": {words}"
        return shapes

    def _compare_shapes(self, subject: Subject, case: Case) -> str:
        """Returns words where outputs have another shape than the reference's, which no slip can explain."""
        inputs = subject.inputs(case)
        got = subject.run(case, inputs).shape
        want = self.reference.run(case, inputs).shape
        if got == want:
            return ""
        return f": {list(got)} from q {list(inputs[0].shape)}, k {list(inputs[1].shape)}, expected {list(want)}"

    def _find_slip(self, subject: Subject, case: Case, slips: Mapping[str, Slip], visible: Tensor | None) -> str:
        """Returns the slip that makes the reference give what the subject gives, in brackets, or nothing."""
        inputs = subject.inputs(case)
        if len(inputs) != 3 or case.tolerance is None or not isinstance(self.reference.mechanism(case), Softmax):
            return ""
        got = subject.run(case, inputs, visible)
        if difference(got, self.reference.run(case, inputs, visible)) <= case.tolerance:
            return ""  # right in this case: what is wrong elsewhere is no slip that would show here
        found = match_slip(slips, [(Asked(inputs[0], inputs[1], inputs[2], case.causal, visible), got)], case.tolerance)
        if not found:
            return ""
        return f" (those of {found.format(self.reference.label)})"

    def _confirm_slip(self, subject: Subject, case: Case, found: str) -> str:
        """Returns the description of a slip, but "" if at two tokens more outputs are wrong and it does not fit them.

        A second length is needed: a key too many may come from a padded block, which happens at some lengths only, or
        from a softmax that adds one to its denominator, which happens at every length.
        """
        longer = self.reference.fit(subject.fit(case.but(T=case.T + 2)))
        if not found or longer.T != case.T + 2:
            return found
        again = self._find_slip(subject, longer, SOFTMAX_SLIPS, None)
        inputs = subject.inputs(longer)
        right = difference(subject.run(longer, inputs), self.reference.run(longer, inputs)) <= longer.tolerance_or(1.0)
        if again == found or right:  # of a length at which all is right nothing is said against the slip
            return found
        return ""

    def _find_causal(self, subject: Subject, case: Case) -> str:
        """Returns words if the subject is causal although causal=False was asked for, or nothing."""
        inputs = subject.inputs(case)
        got = subject.run(case, inputs)
        if difference(got, self.reference.run(case.but(causal=True), inputs)) > (case.tolerance or 0.0):
            return ""
        return f" (those of causal {self.reference.label}: is causal=False ignored?)"

    def _compare_inside(self, subject: Subject, case: Case) -> Finding:
        """Compares a module's inner attention with the reference on the queries, keys and values that it projects.

        Where it is not, only a slip that explains the difference counts: positions, norms or gates may be inside.
        """
        T = max(7, min(case.T, 131))  # fewer tokens might agree by chance
        case = subject.fit(case.but(B=3, T=T, window=None, documents=False, padding="none"))
        if getattr(subject, "single_query", False):
            raise CouldNotBeAsked(
                f"{subject.label} takes a single query a call; compare the function of q, k and v inside it instead"
            )
        views = look_inside(subject, case)
        if not views or case.tolerance is None:
            raise CouldNotBeAsked(
                f"{subject.label} takes tokens, and its queries, keys and values cannot be read inside it, as they can "
                "from Linear layers named q_proj, W_k, to_v, qkv, c_attn, …, called on the tokens with no other layers "
                "around attention, or from nn.MultiheadAttention (in_proj_weight); "
                f"{self.reference.label} takes q, k and v. Compare the function inside it instead"
            )
        limit = 10 * case.tolerance  # outputs of attention are read back from within, by another order of sums
        errors = [(view, self._inside_error(view, case)) for view in views]
        right = min((error for view, error in errors if view.slip is None), default=math.inf)
        if right <= limit:
            return Finding(right, limit, "attention of the queries, keys and values it projects")
        words = next((view.slip for view, error in errors if error <= limit), None)
        for view in views:
            if view.slip is None and words is None:
                asked = Asked(view.q, view.k, view.v, case.causal, None, case.K)
                words = match_slip({**SOFTMAX_SLIPS, **POSITION_SLIPS}, [(asked, view.out)], limit, view.finish)
        for view in views:
            asked = Asked(view.q, view.k, view.v, case.causal, None, case.K)
            choice = view.slip is None and match_slip(CHOICES, [(asked, view.out)], limit, view.finish)
            if choice:
                what = f"attention inside it (that of {choice.format(self.reference.label)})"
                return Finding(right, limit, what, noted=True)
        if words is None:
            words = _find_factor_inside(subject, views, case, limit)
        if words is None:
            raise CouldNotBeAsked(
                f"{subject.label} does not give what {self.reference.label} gives on the queries, keys and values it "
                "projects, and no common slip explains why: positions, norms or gates may be inside"
            )
        return Finding(right, limit, f"attention inside it (that of {words.format(self.reference.label)})")

    def match_inside(self, subject: Subject, case: Case, kind: str) -> str:
        """Returns words for what is wrong inside a module with its "positions" or its "views", or nothing."""
        views = look_inside(subject, case)
        limit = 10 * case.tolerance_or(1.0)
        words = None
        if kind == "views":
            errors = [(view.slip, self._inside_error(view, case)) for view in views]
            if min((error for slip, error in errors if slip is None), default=0.0) > limit:
                words = next((slip for slip, error in errors if error <= limit), None)
        else:
            asked = [
                (Asked(view.q, view.k, view.v, case.causal, None, case.K), view.out)
                for view in views
                if view.slip is None and view.finish is None
            ]
            words = match_slip(POSITION_SLIPS, asked, limit)
        if words is None:
            return ""
        return f" (those of {words.format(self.reference.label)})"

    def _inside_error(self, view: Inside, case: Case) -> float:
        sized = case.but(H=view.q.shape[1], G=view.k.shape[1], K=view.q.shape[3], V=view.v.shape[3])
        want = self.reference.run(sized, [view.q, view.k, view.v])
        if view.finish is not None:
            want = view.finish(want)
        return difference(view.out, want)


def _find_factor_inside(subject: Subject, views: list[Inside], case: Case, limit: float) -> str | None:
    """Returns words for a factor of all scores that explains a module's outputs, or None.

    A module that learns numbers beside those of its Linear layers may have learned that factor, and is not blamed.
    """
    layers = getattr(subject, "f", nn.Identity()).modules()
    learns = any(list(part.parameters(recurse=False)) for part in layers if not isinstance(part, nn.Linear))
    if learns:
        return None
    for view in views:
        if view.slip is None and view.finish is None:
            factor = find_factor(Asked(view.q, view.k, view.v, case.causal, None), view.out, limit)
            if factor is not None:
                return f"{{}} with scores {factor:.3g} times as large: they are to be divided by √K, K a head's width"
    return None


def match_slip(
    slips: Mapping[str, Slip],
    asked: Iterable[tuple[Asked, Tensor]],
    tolerance: float,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> str | None:
    """Returns the words of the first slip that gives what was got, of any pair of inputs and outputs; else None."""
    for inputs, got in asked:
        for words, slip in slips.items():
            try:
                slipped = slip(inputs)
                if finish is not None:
                    slipped = finish(slipped)
            except RuntimeError:  # sizes that this slip is impossible with, such as keys for values of another width
                continue
            if difference(got, slipped) <= tolerance and bool((got != 0).any()):
                return words
    return None


def _pad(subject: Subject, case: Case) -> Tensor | None:
    """Returns the case's padding mask [B,T], True at keys that may be seen; None without padding.

    The first key is always True, unless the subject promises zeros for a query that sees no key: there libraries
    differ.
    """
    visible = case.visible(case.T)
    if visible is not None and not subject.promises_zeros:
        visible[:, 0] = True
    return visible
