"""The search: baselines, proposals, play-off, confirmation, in that order and under one budget.

It runs on any `Runner` and stores through `TrialStudy`; it knows neither torch nor Optuna. Everything it decides, it decides from records, so that a
search that was killed and resumed goes the way it would have gone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autofit.beliefs.predict import MemoryModel
from autofit.problem.config import TrialConfig
from autofit.problem.space import Space
from autofit.problem.terms import Finding, Terms
from autofit.results.result import estimates
from autofit.search import baselines, ending, playoff
from autofit.search.budget import AFTER_SEARCH, PLAYOFF_SHARE, PROPOSAL_SHARE, Budget, OutOfBudget
from autofit.search.conduct import Conductor, never_confirmed
from autofit.search.eligibility import Eligibility, failed_for_good
from autofit.study.study import Proposal, TrialStudy
from autofit.trials.observer import Observer, Silent
from autofit.trials.runner import Runner
from autofit.trials.soundness import departed
from autofit.trials.trial import OUTSIDE, Failure, Outcome, Role, TrialRecord, given_up

REPEATS_BEFORE_DRAW = 3  #: proposals in a row that lead to nothing new before one is drawn from what is left
PLAYOFF_SECONDS = 60.0  #: a play-off may take this long, or as long as the trials before it, whichever is more

#: (winner, its records, seconds left) -> why its precision is unsound
Check = Callable[[TrialConfig, Sequence[TrialRecord], float | None], Failure | None]


class Search:
    """One search, from baselines to confirmation.

    Args:
        terms: what bounds it.
        space: what may be run.
        study: where it is stored.
        runner: what runs it.
        memory: predicts memory; None = nothing is predicted.
        observer: who watches.
        check: asked of the winner (its records, the seconds left) why its precision is unsound; None = nothing is checked.
        keeps: whether a configuration leaves the mathematics of training as it is, which decides ties; None = all do.
        clock: monotonic seconds (tests replace it).
    """

    def __init__(
        self,
        *,
        terms: Terms,
        space: Space,
        study: TrialStudy,
        runner: Runner,
        memory: MemoryModel | None = None,
        observer: Observer | None = None,
        check: Check | None = None,
        keeps: Callable[[TrialConfig], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terms, self._space, self._study = terms, space, study
        self._check, self._keeps = check, keeps
        self._budget = Budget(terms, clock)
        self._eligible = Eligibility(
            space,
            limit_bytes=terms.memory_limit_bytes,
            memory=memory,
            learned=getattr(study.sampler, "likely_fits", None),
        )
        self._trials = Conductor(
            terms=terms,
            study=study,
            runner=runner,
            observer=observer or Silent(),
            budget=self._budget,
            predicted_bytes=self._eligible.predicted_bytes,
        )
        self._stopped, self._certified, self._cut_short = "", False, ""
        self._random = random.Random(terms.seed)
        self._recipes = self._hand_recipes()

    def run(self) -> Finding:
        """Search until nothing better is expected or the budget is spent.

        Raises:
            NothingFits: no configuration completed, at least one did not fit, and none is left to try.
            SearchFailed: trials failed alike, or nothing completed for other reasons.
            UserError: nothing completed within the budget.
            KeyboardInterrupt: interrupted before anything completed.
        """
        interrupted = False
        try:
            self._look()
        except KeyboardInterrupt:
            interrupted = True
        if not estimates(self._candidates):
            self._give_up(interrupted)
        try:
            if not interrupted:
                self._playoff()
                self._confirm()
                self._check_winner()
        except OutOfBudget as reason:
            self._cut_short = "; nothing was left of it to confirm the winner" if self._stopped == str(reason) else f"; {reason} before the winner was confirmed"
        except KeyboardInterrupt:
            interrupted = True
        return self._finding(interrupted)

    def afterwards(self, config: TrialConfig, role: Role, why: str, **request: Any) -> TrialRecord:
        """Run one more trial when the search has ended, under what is left of its time.

        Args:
            config, role, why: as the record has them.
            request: further fields of `TrialRequest`.

        Raises:
            OutOfBudget: the time is spent.
            KeyboardInterrupt: the trial was ended from outside.
        """
        self._trials.check_budget(1.0)
        return self._trials.add(config, role, why, **request)

    @property
    def _records(self) -> Sequence[TrialRecord]:
        return self._trials.records

    @property
    def _candidates(self) -> Sequence[TrialRecord]:
        """Records of configurations that may win: a baseline outside the space is run, and never chosen."""
        unsound = departed(self._records)
        return [r for r in self._records if r.config in self._space and r.config.precision not in unsound]

    def _baselines(self) -> None:
        defaults = baselines.plain_defaults(
            self._terms.effective_batch, self._terms.default_optim, self._terms.argument_defaults, weights_dtype=self._terms.weights_dtype
        )
        self._run_baseline(defaults, Role.DEFAULTS)
        for _ in range(len(self._recipes)):
            recipe = self._next_recipe()
            if recipe is None:
                return
            self._run_baseline(recipe, Role.HAND_RECIPE)

    def _next_recipe(self) -> TrialConfig | None:
        return baselines.next_hand_recipe(
            self._recipes,
            self._records,
            too_big=lambda c: self.reason_to_skip(c) is not None,
            likely=lambda c: self._eligible.likely_fits(c, self._records),
        )

    def _hand_recipes(self) -> tuple[TrialConfig, ...]:
        terms = self._terms
        half = baselines.half_precision(terms.native_precisions)
        sizes = baselines.hand_recipe_sizes(terms.effective_batch)
        recipes = (baselines.hand_recipe(terms.effective_batch, size, half, terms.default_optim) for size in sizes)
        return tuple(c for c in recipes if terms.baselines_outside_space or c in self._space)

    def _run_baseline(self, config: TrialConfig, role: Role) -> None:
        inside = config in self._space
        while self._may_run(config) and (inside or self._terms.baselines_outside_space):
            self._trials.check_budget(PROPOSAL_SHARE)
            if inside:
                self._study.enqueue(config)
                self._trials.carry_out(self._study.ask(), role, f"baseline: {role.value.replace('_', ' ')}")
            elif self._budget.last_trial(self._records):
                return  # it is for what was asked for
            else:
                self._trials.add(config, role, OUTSIDE)

    def _look(self) -> None:
        """Baselines, and proposals until nothing better is expected or their share of the budget is spent."""
        self._certified = False
        try:
            self._baselines()
            self._stopped = self._proposals()
        except OutOfBudget as reason:
            self._stopped = str(reason)

    def _certificate(self) -> str | None:
        """The sampler's statement that nothing left is expected to beat the best; None while something is."""
        finished = getattr(self._study.sampler, "certificate", None)
        certificate = finished(self._records) if finished is not None else None
        return None if certificate is None else str(certificate.statement)

    def _proposals(self) -> str:
        """Ask and run until the sampler or the space has nothing more; return why it ended."""
        repeats = 0
        while True:
            if not self._open():
                return "every configuration was run, or cannot fit"
            statement = self._certificate()
            if statement is not None:
                self._certified = True
                return statement
            self._trials.check_budget(PROPOSAL_SHARE)
            proposal = self._study.ask()
            config = proposal.config
            if config is not None and self._may_run(config):
                self._trials.carry_out(proposal, Role.SEARCH, proposal.why)
                repeats = 0
                continue
            self._answer_without_running(proposal)
            repeats += 1
            if repeats >= REPEATS_BEFORE_DRAW:
                self._study.enqueue(self._random.choice(self._open()))

    def _open(self) -> list[TrialConfig]:
        return self._eligible.open(self._records)

    def _may_run(self, config: TrialConfig) -> bool:
        return self._eligible.may_run(config, self._records)

    def _answer_without_running(self, proposal: Proposal) -> None:
        config, failure = proposal.config, None
        if config is not None and self._study.known(config) is None:
            failure = self.reason_to_skip(config)
        if failure is None:
            self._study.drop(proposal)
        else:
            self._trials.skip(proposal, failure)

    def _playoff(self) -> None:
        """Let the leaders meet; each time that one is lost in it the search goes on, and those meet that lead then."""
        while self._lost_in_rounds():
            self._look()

    def _lost_in_rounds(self) -> bool:
        """Run the leaders in interleaved rounds until they are separated or tied, the play-off has cost as much as the search, or its share of the
        time is gone (what is left is for the confirmation); return whether it ended because one of them was lost."""
        allowed = max(PLAYOFF_SECONDS, sum(r.seconds for r in self._records if r.role not in AFTER_SEARCH))
        while estimates(self._candidates):
            verdict = self._verdict()
            spent = sum(r.seconds for r in self._records if r.role is Role.PLAYOFF)
            if not verdict.next_round or spent >= allowed:
                return False
            for config in verdict.next_round:
                if self._budget.out_of_time(PLAYOFF_SHARE):
                    return False
                record = self._trials.add(config, Role.PLAYOFF, "play-off round")
                if record.outcome is Outcome.INFEASIBLE or config in given_up(self._records):
                    return True
        return False

    def _verdict(self) -> playoff.Verdict:
        """Where the play-off stands; when all have failed in it or after it, what the search's own runs say."""
        records = self._candidates
        if playoff.find_leaders(records):
            return playoff.decide(records, tolerance=self._terms.tolerance, keeps=self._keeps)
        others = [r for r in records if r.role not in AFTER_SEARCH or r.outcome is not Outcome.FAILED]
        return replace(playoff.decide(others, tolerance=self._terms.tolerance, keeps=self._keeps), next_round=(), settled=False)

    def _confirm(self) -> None:
        """Run the winner at full accumulation and longest length. One that does not fit, or crashes again, makes place for the next."""
        while estimates(self._candidates):
            winner = self._verdict().winner
            own = [r for r in self._records if r.config == winner and r.role is Role.CONFIRMATION]
            if never_confirmed(self._records):
                self._cut_short = "; the winners so far crashed where they were confirmed, and no further one was tried"
            if self._cut_short or self._confirmed(winner) or failed_for_good(own):
                return
            self._trials.check_budget(1.0)
            record = self._trials.add(winner, Role.CONFIRMATION, "confirmation at full length", full_length=True)
            if record.outcome is Outcome.INFEASIBLE or winner in given_up(self._records):
                self._search_on()

    def _confirmed(self, config: TrialConfig) -> bool:
        own = (r for r in self._records if r.config == config)
        return any(r.role is Role.CONFIRMATION and r.outcome is Outcome.COMPLETED for r in own)

    def _check_winner(self) -> None:
        """Have the winner checked; one whose precision is unsound makes place for the next, which is confirmed in its turn."""
        while self._check is not None and estimates(self._candidates):
            winner = self._verdict().winner
            failure = self._check(winner, self._records, self._budget.seconds_left)
            if failure is None:
                return
            self._trials.reject(winner, failure, "soundness check")
            self._search_on()
            self._confirm()

    def _search_on(self) -> None:
        """Look again after a winner was lost: the search ended because nothing was expected to beat it."""
        self._look()
        self._playoff()

    def _finding(self, interrupted: bool) -> Finding:
        if not estimates(self._candidates):
            self._give_up(interrupted)
        verdict = self._verdict()
        return Finding(
            winner=verdict.winner,
            tied=verdict.tied,
            settled=verdict.settled,
            confirmed=self._confirmed(verdict.winner),
            stopped="interrupted" if interrupted else self._why_stopped(),
            interrupted=interrupted,
            seconds=self._budget.elapsed_seconds + self._study.earlier_seconds,
            hand_recipe=baselines.settled_hand_recipe(self._recipes, self._records),
            no_recipe=baselines.why_no_hand_recipe(self._recipes, self._records, skipped=self.reason_to_skip),
        )

    def _why_stopped(self) -> str:
        """Why the search ended; where that was a certificate, as it stands by all records, those after it too."""
        if not self._certified:
            return self._stopped + self._cut_short
        lost = f"the best was lost after the search had ended: {len(self._open())} configurations may still be faster"
        return (self._certificate() or lost) + self._cut_short

    def reason_to_skip(self, config: TrialConfig) -> Failure | None:
        """Why a configuration need not run, by all records so far; None when it may."""
        return self._eligible.reason_to_skip(config, self._records)

    @property
    def untested(self) -> dict[str, int]:
        """Reason -> how many configurations of the space have no run."""
        return self._eligible.untested_counts(self._records)

    def _give_up(self, interrupted: bool) -> None:
        """Nothing completed: say why."""
        if interrupted:
            raise KeyboardInterrupt
        predicted = map(self._eligible.predicted_bytes, self._space.configs)
        raise ending.nothing_completed(
            self._records,
            stopped=self._stopped,
            left=len(self._open()),
            effective_batch=self._terms.effective_batch,
            limit_bytes=self._terms.memory_limit_bytes,
            predicted_bytes=[size for size in predicted if size is not None],
        )
