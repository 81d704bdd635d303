"""The words of a diagnosis page: for each question its title, how to read its picture, and the definition.

`reading` is one paragraph: what the picture shows, and then what it does not show.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    title: str
    reading: str
    definition: tuple[str, ...]


WORDS: dict[str, Question] = {
    "loss": Question(
        title="How good is it?",
        reading=(
            "The mean loss of the tokens at each place of the window; lower is better. The first tokens have "
            "little context to go by, so the curve falls and then flattens. It does not say what the output "
            "layer has to do with any of it, and losses on another text, or with another tokenizer, are "
            "other numbers."
        ),
        definition=(
            "Loss is the mean of −log p(token | the tokens before it in its window), in nats. Perplexity is "
            "exp(loss). Bits per byte is the summed loss over log 2, divided by the bytes of the text: it "
            "does not depend on the tokenizer.",
            "The 95% intervals come from the spread over blocks of the text, so that neighbouring tokens do "
            "not count as independent. They cover the choice of text blocks, nothing else.",
        ),
    ),
    "spectrum": Question(
        title="How does the output matrix use its width?",
        reading=(
            "The singular values of the output matrix, largest first. A flat curve uses all directions "
            "alike; a steep one lives in few. Values under the noise line cannot be told from rounding. It "
            "does not show whether the model needs the directions that are small: a direction with a small "
            "singular value can matter, and a flat spectrum is no merit in itself."
        ),
        definition=(
            "Rows are those of real tokens, padding left out. With p = σ / Σσ, the effective rank is exp "
            "H(p), where H is the entropy, and the singular entropy is log D − H(p) = KL(p ‖ uniform). The "
            "random effective rank is that of a Gaussian matrix of the same shape, by the "
            "Marchenko-Pastur law.",
            "Stable rank is Σσ² / σ₁², the participation ratio (Σσ²)² / Σσ⁴, the condition σ₁ / σ_D. The "
            "numerical rank counts the singular values above the storage noise, the largest singular value "
            "that rounding to the storage format is expected to make.",
        ),
    ),
    "anisotropy": Question(
        title="Do its states point the same way?",
        reading=(
            "The mean cosine of two states of a layer. Near 1, all states point in one direction; near 0, in "
            "all directions. The dashed curve is the same after the mean state is subtracted: where it is "
            "far lower, the states share an offset rather than a direction of variation. It does not show "
            "harm: well-working models are found at both ends, and a common offset only acts as a bias on "
            "the logits."
        ),
        definition=(
            "With unit states ĥ, the mean cosine over ordered pairs i ≠ j is (‖Σĥ‖² − n) / (n² − n). Layer 0 "
            "is the embedding, the last layer is what enters the output matrix, after the final norm. The "
            "first position of each window and tokens of outsized norm (sinks) are left out.",
            "The top share is that of the variance in the one direction that has most of it; the effective "
            "rank is that of the centred states’ covariance; an outlier dimension is a coordinate with an "
            "outsized share of the variance; kurtosis is the fourth standardised moment, 3 for a Gaussian.",
        ),
    ),
    "logprob_rank": Question(
        title="What rank do its predictions have?",
        reading=(
            "The singular values of the table of log-probabilities, a row a context, after the output "
            "matrix’s own scale is divided out, which leaves the rank as it is. The least rank counts those "
            "above the noise floor; the ceiling is the most that the architecture "
            "allows. A model at its ceiling uses all the rank it can have, as a trained softmax usually "
            "does. It does not show that more rank is needed: for that, see the next two questions."
        ),
        definition=(
            "A softmax gives the same probabilities when a number is added to all logits of a context. The "
            "least rank is the lowest over all matrices that differ from the log-probabilities by such "
            "shifts, which is the rank of the row-centred matrix.",
            "For a linear head it is exact and needs no table: the states, with a constant for a bias, in an "
            "orthonormal basis of the rows of the centred output matrix. For other heads it is the rank of "
            "the logits at sampled contexts and tokens.",
            "The noise floor is the largest singular value that rounding alone is expected to make. The gap "
            "rank, a second opinion, is where consecutive singular values fall by the largest ratio.",
        ),
    ),
    "rank_needed": Question(
        title="What rank does it need?",
        reading=(
            "The held-out loss with an output matrix of lower rank. The dashed curve cuts the matrix down, "
            "the solid curve also refits it on the model’s frozen states. The rank needed, with its interval "
            "shaded, is where the solid curve comes within the tolerance of the full-rank refit. Where the "
            "curve still falls at its right end, more width may help as well. It does not show what a "
            "model trained with that rank from the start would reach, because the body stays as it is and "
            "was trained with this width."
        ),
        definition=(
            "Cut down: the best approximation of W of rank r in the metric of the states’ second moment, "
            "that is, the one that changes the logits least. Refitted: W = A B with inner width r, started "
            "from there and trained on frozen states, its learning rate chosen on tokens of its own.",
            "The rank needed is the rank at which the refitted curve comes within the tolerance of the r = D "
            "refit, interpolated in log rank; its interval comes from resampling text blocks. The curves’ "
            "intervals are those of the difference to their own control, the matrix as it came or the r = D "
            "refit, on the same tokens.",
        ),
    ),
    "better_head": Question(
        title="What would a better head buy?",
        reading=(
            "Heads fitted on the model’s frozen states until their learning curves are flat, and the loss "
            "that each saves against the model’s own softmax refitted to the same text, the line at 0. Right "
            "of the line is better; an interval that crosses the line cannot be told from no gain. The ring "
            "is a control: a softmax with as many parameters as the mixture, so what it gains comes from "
            "size, not from rank. It does not show what the same head would buy if the whole model were "
            "trained with it, which can be more or less."
        ),
        definition=(
            "The gain of a head is the loss of the refitted softmax minus its own, on the same held-out "
            "tokens, averaged over seeds; intervals are over text blocks and seeds. Learning rate and "
            "stopping are chosen on other tokens. Every head starts from the refitted softmax, mixtures "
            "with their components apart along the directions in which splitting a row helps most.",
            "The figure at the top of the page is stricter: the head is the one with the lowest loss on the "
            "tokens set aside for choosing, and its gain is counted over the best control, the output layer "
            "as it came among them. A gain of g nats per token lowers the perplexity by the share "
            "1 − exp(−g).",
            "What would have been seen: tokens are drawn from a mixture of known gain over the same states, "
            "and the same fits look for it. The share that they find, and the spread over text blocks, give "
            "the smallest gain that is told from zero four times in five. The interval of the gain reaches "
            "up by what the fits missed of the planted one.",
        ),
    ),
    "unreachable": Question(
        title="Which tokens can it never say?",
        reading=(
            "How many tokens can be the most probable for some state, how many cannot for any, and how many "
            "were left undecided. A token that is never first cannot be produced by greedy decoding, but it "
            "can still be sampled. It does not show that anyone would miss them: those found in published "
            "models are mostly rare, and the test allows every state, also those that the model never "
            "reaches."
        ),
        definition=(
            "A token can be first if some state h gives it the largest logit: without a bias, its row of the "
            "output matrix is a vertex of the hull of all rows. Each verdict is verified: a state for a "
            "token that can lead, a certificate for one that cannot. Depth is how far inside the hull a row "
            "lies, as a share of the way from the boundary to the mean row. A row that equals another to "
            "the last bit can only tie.",
            "Capacity is the most tokens whose probabilities can be set at will, for half of the sets tried.",
        ),
    ),
    "gradient": Question(
        title="How much of the gradient reaches the body?",
        reading=(
            "The gradient of the loss has a number for each logit; only its part in the column space of the "
            "output matrix, of at most D dimensions, reaches the body. The bar is the share of the norm that "
            "is kept, the diamond what a random subspace of the same rank would keep. It does not show that "
            "anything is lost that training would have needed, and that is in dispute: Godey and Artzi "
            "(arXiv 2603.10145) say that 95 to 99% of the gradient norm is suppressed and blame it for slow "
            "training, while Murugan (arXiv 2608.16671) finds in models of width 96 that the removed part "
            "trains W and that projection metrics did not predict progress."
        ),
        definition=(
            "For a token, g = softmax − onehot, a vector of V numbers, and P is the projection on the "
            "columns of W. Kept norm is the mean over tokens of |P g| / |g|, kept energy that of |P g|² / "
            "|g|². A random subspace of rank r keeps sqrt(r / V) of the norm and r / V of the energy.",
        ),
    ),
}
