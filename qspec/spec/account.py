"""What drafting has brought a kind of request, and when it is worth another look. Seconds are told in plain steps."""

from dataclasses import dataclass

MOST_LOST = 2.0
"""Plain steps that drafting may lose, beyond what it has saved, before it stops."""
MOST_SAVED = 8.0
"""Plain steps of earlier gains that count against losses: more would let a draft that went bad go on for long."""
FIRST_WAIT, LONGEST_WAIT = 16, 4096
"""Plain steps until the next look; doubled by every look that brings nothing."""
LOOK = 2
"""Losing steps after which a look ends."""
FRESH = 0.05
"""Weight of a step in the share of steps that had drafts."""
RECENT = 0.3
"""Weight of a request in the mean length of answers."""


@dataclass
class Account:
    """Whether drafts are on, what they have saved lately, and the plain steps until they are tried again."""

    on: bool = True
    saved: float = 0.0
    invested: float = 0.0  # by this request's drafter, to read what was committed without it: may be lost for a while
    left: int = 0
    look: int = 0  # losing steps that the present look may still take
    wait: int = FIRST_WAIT
    answer: float | None = None  # tokens, mean of recent requests
    spoken: float = 1.0  # share of recent steps that the drafter, when asked, had something to say

    def book(self, gain: float, invested: float, pays: bool, silent: bool) -> None:
        """A step took `gain` plain steps less than its tokens would have without a drafter.

        `invested` of them, lost for now, are for all steps of the request.
        pays: whether drafts are expected to gain; silent: the drafter had nothing to say, which decides nothing.
        """
        self.saved = min(MOST_SAVED, self.saved + gain)
        self.invested += invested
        self.spoken += FRESH * ((not silent) - self.spoken)
        if self.look and not silent:
            self.look -= gain + invested < 0
            if pays and self.saved + self.invested > 0:
                self.on, self.look, self.wait = True, 0, FIRST_WAIT
            elif not self.look:
                self.stop()
        elif not (pays or silent) or self.saved + self.invested < -MOST_LOST:
            self.stop()

    def stop(self) -> None:
        self.on, self.look, self.saved, self.invested = False, 0, 0.0, 0.0
        self.left, self.wait = self.wait, min(2 * self.wait, LONGEST_WAIT)

    def start_look(self) -> None:
        self.look, self.saved, self.invested = LOOK, 0.0, 0.0

    def end_request(self, tokens: int, pays: bool) -> None:
        """A request ended after so many tokens: what it invested has been paid back, or is lost."""
        self.answer = tokens if self.answer is None else self.answer + RECENT * (tokens - self.answer)
        self.look, self.invested = 0, 0.0
        if self.on and (not pays or self.saved < -MOST_LOST):
            self.stop()
