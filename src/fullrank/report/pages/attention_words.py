"""The words of the attention sections: how to read each picture, what it does not show, and definitions."""

from __future__ import annotations

HEADS_READING = (
    "One square a head. A head with few effective tokens looks at few positions; a head whose weight goes to "
    "the first "
    "position mostly does nothing there. It does not show what a head is for, and few effective tokens are "
    "no merit and "
    "no defect."
)
HEADS_DEFINITION = (
    "Entropy is −Σ a log a of a query’s weights over the positions it may see; the effective number of "
    "tokens is its "
    "exponential. Figures are means over queries that see the whole context length, of windows of text; "
    "intervals are "
    "over windows.",
    "With scores l between min and max, every weight lies within exp(±(max − min)/T)/n, and max − min is at "
    "most "
    "2Δ = 2|q| max|k|. docs/attention_theory.md has the proofs.",
)
SETS_READING = (
    "A token of the set is separable when its weighted value lies closer to the set’s sum than that of any "
    "token outside. "
    "It does not show that the model uses the set so: tokens that stand apart need not be sufficient for the "
    "output, "
    "and the share depends on N and on the context, which the random control makes visible."
)
SETS_DEFINITION = (
    "s is the sum of a_i v_i over the set, D_i = |s − a_i v_i|. Separable share and recall: the part of the "
    "set with D_i below every "
    "D_j outside. Precision: N over N plus the number outside with D_j at most the largest D_i inside. F is "
    "their harmonic "
    "mean; all are 1 for a set of one, whoever chose it.",
    "The top set is tested against a random set of the same size at the same queries, by Student’s t over "
    "windows, sizes in "
    "rising order until the first that is not rejected. Not told apart means not with this much text.",
)
SENSITIVITY_READING = (
    "How much the weights move at most when the scores move a little. Small temperatures allow more, but a "
    "head that has "
    "made up its mind does not move at all. The paper’s estimator moves all scores in one random direction, "
    "which nearly "
    "always misses the sensitive one; it does not show the norm."
)
SENSITIVITY_DEFINITION = (
    "The Jacobian of softmax(l/T) is (diag(a) − a aᵀ)/T. Its spectral norm is the largest eigenvalue, found "
    "by halving a "
    "bracket in which the secular equation has one root. It is at most 1/(2T), reached by two equal weights; "
    "1/(4T), the "
    "published bound, is the largest entry of the matrix and not its norm.",
)
WHAT_IF_READING = (
    "Nothing was retrained: the loss says how far this model leans on softmax, not how a model trained with "
    "another "
    "normaliser would do. It does not rank normalisers."
)
