"""Your own policy: a user's requests stay on one worker while that worker is not busy.

    PYTHONPATH=examples kvflash frontend --router-mode python:policy_of_your_own:Homes

The frontend, the standalone router and ``KvPushRouter`` accept it.
"""

from __future__ import annotations

from kvflash import Policy, PolicyCandidate, PolicyEnded, PolicyRequest

BUSY_REQUESTS = 4


class Homes(Policy):
    """Sends a user where it was last, as long as that worker is not busier than the others."""

    deadline_s = 0.05

    def __init__(self) -> None:
        self.homes: dict[str, tuple[int, int]] = {}
        self.tokens: dict[str, int] = {}

    def choose(
        self, request: PolicyRequest, candidates: list[PolicyCandidate]
    ) -> list[float | None]:
        """Score all of them, so that another one is known when the best can't take it."""
        home = self.homes.get(request.user or "")
        idlest = min(one.active_requests for one in candidates)

        def score(one: PolicyCandidate) -> float:
            is_home = (one.worker_id, one.dp_rank) == home
            is_busy = one.active_requests >= idlest + BUSY_REQUESTS
            return (1.0 if is_home and not is_busy else 0.0) - one.cost * 1e-6

        return [score(one) for one in candidates]

    def routed(self, request: PolicyRequest, candidate: PolicyCandidate) -> None:
        """Remember where the user is, whoever chose."""
        if request.user:
            self.homes[request.user] = (candidate.worker_id, candidate.dp_rank)

    def finished(self, ended: PolicyEnded) -> None:
        """Count what the user was served."""
        if ended.user:
            served = ended.input_tokens - ended.cached_tokens + ended.output_tokens
            self.tokens[ended.user] = self.tokens.get(ended.user, 0) + served

    def removed(self, worker_id: int, dp_rank: int) -> None:
        """Users of that worker choose anew."""
        gone = (worker_id, dp_rank)
        self.homes = {user: home for user, home in self.homes.items() if home != gone}


if __name__ == "__main__":
    print(__doc__)
