"""From the head to the number: loss, log-probabilities, entropy, accuracy of whole or vocabulary-parallel logits."""

from lightning_automodel.loss.functional import (
    IGNORE_INDEX,
    count_hits,
    count_targets,
    cross_entropy,
    entropy,
    gather_logits,
    get_logprobs_from_vocab_parallel_logits,
    next_tokens,
    top1,
    top1_accuracy,
)

__all__ = [
    "IGNORE_INDEX",
    "count_hits",
    "count_targets",
    "cross_entropy",
    "entropy",
    "gather_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "next_tokens",
    "top1",
    "top1_accuracy",
]
