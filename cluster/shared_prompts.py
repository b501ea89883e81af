"""How much of a prompt the target holds for requests that run, so that it takes no memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.requests import Request, State
from engine.prefix_cache import BLOCK_TOKENS

# In these its prompt has been read, and others may share it.
COMPLETE = (State.READY, State.DRAFTING, State.DRAFTED, State.VERIFYING)


def num_shared(request: Request, others: Iterable[Request]) -> int:
    """Tokens at the beginning of a request that it would share with another's prompt, in whole blocks.

    Those are held as long as either runs. What ended requests have left behind is not reckoned with: until
    it is used it counts as free, and may go.

    Args:
        request: not begun.
        others: requests that run, of which those with a complete prompt count.
    """
    submit = request.submit
    if submit.sampling.prompt_logprobs is not None and not request.output:
        return 0  # its prompt is read anew, or logits would be missing
    if request.shared_in_vain:
        return 0  # or it might begin and give way for ever
    most = 0
    for other in others:
        theirs = other.submit
        if (
            other is not request
            and other.state in COMPLETE
            and theirs.adapter == submit.adapter
            and theirs.cache_salt == submit.cache_salt
            and min(other.num_prompt, request.num_prompt) > most
        ):
            most = max(most, _num_common(submit.prompt, theirs.prompt, most))
    return min(most // BLOCK_TOKENS * BLOCK_TOKENS, request.num_tokens - 1)


def _num_common(one: Sequence[int], other: Sequence[int], least: int) -> int:
    """Length of the longest common prefix if it is longer than `least`, else 0."""
    if one[least] != other[least] or one[:least] != other[:least]:
        return 0
    low, high = least + 1, min(len(one), len(other))
    # Slices are compared at the speed of memory, so halving is faster than looking at each token.
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
