"""What drafting has brought a kind of request, and when it is worth another look. Seconds are told in plain steps."""

from dataclasses import dataclass

MOST_LOST = 2.0
"""Plain steps that drafting may lose, beyond what it has saved, before it stops."""
MOST_SAVED = 8.0
"""Plain steps of earlier gains that count against losses: more would let a draft that went bad go on for long."""
FIRST_WAIT, LONGEST_WAIT = 16, 512
"""Plain steps until the next look; doubled by every look that brings nothing."""
LOOK = 2
"""Steps of which nothing stands whose loss ends a look."""
FRESH = 0.05
"""Weight of a step in the share of steps that had drafts."""


@dataclass
class Account:
    """Whether drafts are on, what they have saved lately, and the plain steps until they are tried again."""

    on: bool = True
    saved: float = 0.0
    invested: float = 0.0  # by this request's drafter, to read what was committed without it: may be lost for a while
    left: int = 0
    look: float = 0.0  # what the present look may lose
    wait: int = FIRST_WAIT
    spoken: float = 1.0  # share of recent steps that the drafter, when asked, had something to say

    def book(self, gain: float, invested: float, pays: bool, silent: bool) -> None:
        """A step took `gain` plain steps less than its tokens would have without a drafter.

        `invested` of them, lost for now, are for all steps of the request.
        pays: whether drafts are expected to gain; silent: the drafter had nothing to say, which decides nothing.
        """
        self.saved = min(MOST_SAVED, self.saved + gain)
        self.invested += invested
        self.speak(not silent)
        if self.look:
            if pays and self.saved + self.invested > 0:
                self.on, self.look, self.wait = True, 0.0, FIRST_WAIT
            elif self.saved + self.invested <= -self.look:
                self.stop()
        elif not (pays or silent) or self.saved + self.invested < -MOST_LOST:
            self.stop()

    def speak(self, something: bool = True) -> None:
        """It was asked and had something to say; or it was not asked, and is believed to have a little more."""
        self.spoken += FRESH * (something - self.spoken)

    def stop(self) -> None:
        self.on, self.look, self.saved, self.invested = False, 0.0, 0.0, 0.0
        self.left, self.wait = self.wait, min(2 * self.wait, LONGEST_WAIT)

    def start_look(self, may_lose: float) -> None:
        self.look, self.saved, self.invested = may_lose, 0.0, 0.0

    def end_request(self, pays: bool) -> None:
        """What this request invested has been paid back, or is lost."""
        self.look, self.invested = 0.0, 0.0
        if self.on and (not pays or self.saved < -MOST_LOST):
            self.stop()
