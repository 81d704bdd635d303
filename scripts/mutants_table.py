"""The faults of `mutants.py`: a place in the source, the fault, and what a user sees of it.

About half of them bring back a bug that this repository once fixed (`fix` names the commit); the others are a
wrong sign, an index off by one, a missing term, a wrong axis or a missing lock. Each changes results that a
user gets on a CPU. Move an entry when you move its code: the old text must occur exactly once in its file.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault."""

    name: str
    file: str
    """Below src/fullrank."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files near the fault, below tests."""
    effect: str
    """What a user sees."""
    fix: str = ""
    """The commit that fixed this bug, if the fault is a reverted fix."""


MUTANTS = (
    # ops
    Mutant(
        "zero_weight_infinite_loss", "ops/reduce.py",
        "nll = torch.where(weight == 0, 0.0, nll) * weight", "nll = nll * weight",
        ("ops/test_mixture.py", "ops/test_matrix.py"),
        "A token of weight 0 that no component can emit makes the whole loss NaN.", "10dbed9",
    ),
    Mutant(
        "impossible_token_in_definition", "ops/mixture/reference.py",
        "nll = -torch.logsumexp(joint.masked_fill(impossible[:, None], 0.0), dim=1)",
        "nll = -torch.logsumexp(joint, dim=1)",
        ("ops/test_reference.py", "ops/test_mixture.py"),
        "With impl='reference' a masked target makes every gradient of the batch NaN.", "cbda702",
    ),
    Mutant(
        "impossible_token_shares", "ops/reduce.py",
        "return token, torch.where(torch.isposinf(token)[:, None], 0.0, share)", "return token, share",
        ("ops/test_mixture.py", "ops/test_matrix.py"),
        "A token that no component can emit makes the gradients of a summed loss NaN.",
    ),
    Mutant(
        "masked_target_deficit", "ops/reduce.py",
        "return torch.where(torch.isneginf(self.target), 0.0, -self.others)", "return -self.others",
        ("ops/test_mixture.py", "ops/test_matrix.py"),
        "A target that the bias masks pulls its row of W although it has no score.",
    ),
    Mutant(
        "confident_row_digits", "ops/reduce.py",
        "return torch.log1p(self.others + torch.expm1(self.gap)) - self.gap",
        "return torch.log(self.total) - self.gap",
        ("ops/test_mixture.py", "ops/test_matrix.py"),
        "The loss of a confident token is rounded to 0.",
    ),
    Mutant(
        "prior_gradient_sign", "ops/workspace.py",
        "d_prior[index] = upstream.view(-1, K).neg()", "d_prior[index] = upstream.view(-1, K)",
        ("ops/test_mixture.py", "ops/test_matrix.py"),
        "The gates of a mixture learn to prefer the worst component.",
    ),
    Mutant(
        "token_weight_in_gradient", "ops/workspace.py",
        "share if self.weight is None else share * self.weight[tokens, None]", "share",
        ("ops/test_mixture.py", "ops/test_matrix.py"),
        "Token weights change the loss but not its gradient.",
    ),
    Mutant(
        "vocabulary_block_rescale", "ops/mixture/chunked.py",
        "others[tile] = others[tile] * carried + bent.sum(1)", "others[tile] = others[tile] + bent.sum(1)",
        ("ops/test_mixture.py", "ops/test_workspace.py"),
        "In a small workspace the loss is wrong, because blocks of the vocabulary have different maxima.",
    ),
    Mutant(
        "plif_slope_gradient", "ops/pointwise.py",
        "later = sums.sum() - torch.cumsum(sums, 0)", "later = torch.cumsum(sums, 0)",
        ("ops/test_mixture.py", "ops/test_pointwise.py", "heads/test_plif.py"),
        "A PLIF head learns wrong slopes: each slope gets the gradient of the bins below it.",
    ),
    Mutant(
        "memory_sees_itself", "ops/memory/reference.py",
        "seen = then < now", "seen = then <= now",
        ("ops/test_memory.py", "heads/test_cache.py"),
        "A cache head sees the token that it must predict, so its loss is far too low.",
    ),
    # heads
    Mutant(
        "centred_by_prior", "heads/contexts.py",
        "owned = owned - owned.mean(-2, keepdim=True)",
        "owned = owned - (log_prior.exp().to(owned.dtype)[..., None] * owned).sum(-2, keepdim=True)",
        ("heads/test_contexts.py", "heads/test_mos.py", "heads/test_training.py"),
        "The components of a new mixture stay equal (a saddle): it trains like softmax.", "0ecbd5f",
    ),
    Mutant(
        "confident_mixture_digits", "heads/confident.py",
        "likely = (far.detach() < 0.5) & ~hopeless", "likely = (far.detach() < -1.0) & ~hopeless",
        ("heads/test_facets.py", "heads/test_contract.py", "heads/test_pieces.py"),
        "A facets head has loss 0 and gradient 0 on confident tokens.", "e898229",
    ),
    Mutant(
        "trunk_without_prior", "heads/trunk.py",
        "return Loss(shaped(loss, labels), None, log_prior)", "return Loss(shaped(loss, labels))",
        ("heads/test_trunk.py", "heads/test_contract.py", "train/test_objective.py"),
        "Training a trunk with a balance penalty fails.", "ca67e39",
    ),
    Mutant(
        "pointer_sees_other_texts", "heads/pointer.py",
        "(then <= now) & (then >= now // self.time * self.time) & (there >= 0)",
        "(then <= now) & (there >= 0)",
        ("heads/test_pointer.py", "heads/test_contract.py"),
        "A pointer head points at tokens of other texts in the batch.",
    ),
    Mutant(
        "divergence_axis", "heads/record.py",
        "divergence += (own[:, :, None] - cross).sum(0)", "divergence += (own[:, None, :] - cross).sum(0)",
        ("heads/test_record.py",),
        "The report gives wrong divergences between components.",
    ),
    Mutant(
        "cosine_cache_start", "heads/cache.py",
        'itself = width if made.get("cosine") else max(width * start.size**2, 1e-6)',
        "itself = max(width * start.size**2, 1e-6)",
        ("heads/test_cache.py", "upgrade/test_upgrade.py", "upgrade/test_cache_training.py"),
        "A cosine cache starts at scores that depend on the length of the states.", "973b4f4",
    ),
    # fit
    Mutant(
        "race_smallest_loss", "fit/loop.py",
        "if best is None or (run.raced <= level and (run.rate > best.rate or best.raced > level)):",
        "if best is None or run.raced < best.raced:",
        ("fit/test_loop.py",),
        "A mixture is fitted at a rate too small to leave its start, and diagnose reports no gain.",
        "3c03425",
    ),
    Mutant(
        "last_weights_kept", "fit/loop.py",
        "self.best = (found, self.steps, mean)", "self.best = (found, self.steps, live)",
        ("fit/test_loop.py",),
        "The saved weights are not those that were compared: the loss after a fit differs from the record.",
    ),
    Mutant(
        "steep_directions_first", "fit/splitting.py",
        "order = sorted(range(len(judged)), key=lambda place: judged[place].low <= 0)",
        "order = list(range(len(judged)))",
        ("fit/test_splitting.py",),
        "A few rare tokens hide the direction along which a mixture gains.", "5ae5e16",
    ),
    Mutant(
        "begin_token_lost", "fit/collect.py",
        'getattr(tokenizer, "add_bos_token", None) is True',
        'getattr(tokenizer, "add_bos_token", None) == "yes"',
        ("fit/test_collect.py", "models/test_gguf_files.py"),
        "A model from a GGUF file is measured without its begin token: its loss is nats too high.", "3f97a86",
    ),
    Mutant(
        "block_error_biased", "fit/estimates.py",
        "error = (excess.square().sum() * count / (count - 1)).sqrt() / values.numel()",
        "error = excess.square().sum().sqrt() / values.numel()",
        ("fit/test_estimates.py",),
        "Intervals over few blocks of text are too narrow.",
    ),
    Mutant(
        "sampled_normaliser_sum", "fit/trainee.py",
        "moved = (others - batch.scores[:, None]).logsumexp(dim=-1) - math.log(batch.drawn.shape[1])",
        "moved = (others - batch.scores[:, None]).logsumexp(dim=-1)",
        ("fit/test_sampling.py", "fit/test_comparison.py"),
        "Fits on a large vocabulary train on a wrong loss: a sum in the place of a mean over drawn rows.",
    ),
    Mutant(
        "warm_up_from_zero", "fit/schedule.py",
        "return (step + 1) / rising", "return step / rising",
        ("fit/test_schedule.py",),
        "The first step of every run is lost: its learning rate is 0.",
    ),
    Mutant(
        "trigger_window", "fit/optimiser.py",
        "history[-1] > min(history[: -patience - 1])", "history[-1] > min(history[:-patience])",
        ("fit/test_optimiser.py", "train/test_loop.py"),
        "NT-ASGD begins to average one evaluation too early.",
    ),
    # train
    Mutant(
        "bad_step_applied", "train/learner.py",
        "elif bool(good):", "else:",
        ("train/test_learner.py", "train/test_loop.py"),
        "One batch with an infinite gradient turns all weights into NaN.", "bb3370c",
    ),
    Mutant(
        "bad_state_carried", "train/learner.py",
        "return nll, norm, *(torch.where(good, tensor, 0.0) for tensor in following)",
        "return nll, norm, *following",
        ("train/test_learner.py", "train/test_loop.py"),
        "After one bad batch an LSTM carries NaN, and every later step is left out.", "bb3370c",
    ),
    Mutant(
        "no_rise_after_branch", "train/loop.py",
        "if state.restarted >= 0:", "if state.restarted > state.step:",
        ("train/test_branch.py", "train/test_loop.py"),
        "A run that begins at another run's snapshot jumps to a high loss at its first steps.", "ae35636",
    ),
    Mutant(
        "later_best_kept", "train/loop.py",
        'checkpoint.drop(options.out / folder.CHECKPOINTS, "best", after=session.state.step)', "pass",
        ("train/test_loop.py", "train/test_kill.py", "train/test_branch.py"),
        "A run that continues from an earlier checkpoint publishes weights of steps that it takes again.",
        "2b63b91",
    ),
    Mutant(
        "snapshots_of_earlier_run", "train/loop.py",
        "last = session.state.step if own else -1", "last = session.state.step",
        ("train/test_branch.py", "train/test_loop.py"),
        "A new run keeps snapshots of another run that was begun in its directory.", "2b63b91",
    ),
    Mutant(
        "rate_ignores_seconds", "train/loop.py",
        "done = state.watch.share(state.step, self.seconds) * self.pace.stage_steps", "pass",
        ("train/test_pace.py", "train/test_loop.py"),
        "A run with a budget of seconds on a busy machine ends before its learning rate has fallen.",
        "685bf7e",
    ),
    Mutant(
        "buffers_not_stored", "train/weights.py",
        "return {**gather(model, values), **buffers}", "return gather(model, values)",
        ("train/test_weights.py", "train/test_model.py", "train/test_loop.py"),
        "A trained mixtape head loses its order of tokens when it is read again.",
    ),
    Mutant(
        "evaluation_of_first_tokens", "train/evaluate.py",
        "starts = [place * last // (pieces - 1) for place in range(pieces)]",
        "starts = [place * size for place in range(pieces)]",
        ("train/test_evaluate.py", "train/test_loop.py"),
        "Evaluations while training see only the beginning of the validation text.", "34a3269",
    ),
    Mutant(
        "streams_do_not_rotate", "train/batches.py",
        "first = self._cut(cursor.epoch) + self.size", "first = self._cut(0) + self.size",
        ("train/test_batches.py",),
        "With rotate=true an LSTM still has the same batches in every epoch.", "ddb1868",
    ),
    Mutant(
        "lock_of_removed_directory", "train/folder.py",
        "if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(file.fileno())):",
        "if file.closed:",
        ("train/test_folder.py", "train/test_kill.py"),
        "A run whose directory another process removed trains on and loses its checkpoints.", "c2ad5cf",
    ),
    Mutant(
        "lock_shared", "filelock.py",
        "else fcntl.LOCK_EX | fcntl.LOCK_NB",
        "else fcntl.LOCK_SH | fcntl.LOCK_NB",
        ("train/test_folder.py",),
        "Two processes train in one directory and overwrite each other.",
    ),
    Mutant(
        "resumed_without_state", "train/learner.py",
        "carried[name][self.rows].to(self.machine.device)", "torch.zeros_like(carried[name][self.rows])",
        ("train/test_loop.py", "train/test_learner.py", "train/test_kill.py"),
        "An LSTM forgets its texts when a run is resumed.",
    ),
    Mutant(
        "resumed_log_line", "train/loop.py",
        "state.counts = self.tally.to_json()", "state.counts = {}",
        ("train/test_loop.py", "train/test_tally.py", "train/test_kill.py"),
        "The first training loss in the log after a resume is a mean over too few steps.",
    ),
    Mutant(
        "checksum_ignored", "train/checkpoint.py",
        ' or sha256(file) != expected["sha256"]', "",
        ("train/test_checkpoint.py",),
        "A checkpoint that the disk damaged is trained on without a warning.",
    ),
    Mutant(
        "sync_before_rename", "train/checkpoint.py",
        "            sync(path)\n            written[path.name]", "            written[path.name]",
        ("train/test_checkpoint.py", "train/test_writer.py"),
        "A loss of power leaves a checkpoint with its final name and empty files.",
    ),
    Mutant(
        "best_of_older_removed", "train/checkpoint.py",
        'named = {best_of(path) for path in found(folder, "step")}',
        'named = {best_of(path) for path in found(folder, "step")[-1:]}',
        ("train/test_checkpoint.py",),
        "Where the newest checkpoint is damaged, the best weights of the one before it are gone.",
    ),
    Mutant(
        "accumulated_gradient", "train/learner.py",
        "self.machine.backward(out.value / parts)", "self.machine.backward(out.value)",
        ("train/test_learner.py", "train/test_loop.py"),
        "With accumulate=4 the gradient is four times too large.",
    ),
    # models
    Mutant(
        "rwkv_rows_mixed", "models/causal_lm.py",
        'if len(input_ids) > 1 and kind == "rwkv":', 'if len(input_ids) < 1 and kind == "rwkv":',
        ("models/test_cache_layer.py", "models/test_memory_decoding.py", "models/test_families.py"),
        "Texts generated in a batch by an upgraded RWKV depend on each other.", "d6e0198",
    ),
    Mutant(
        "beams_share_state", "models/causal_lm.py",
        "return remembered.select(cache, rows)", "return cache",
        ("models/test_generate.py", "models/test_memory_decoding.py"),
        "Beams over an LSTM continue from each other's states.", "9ecab7d",
    ),
    Mutant(
        "phi3_short_frequencies", "models/causal_lm.py",
        "cache.get_seq_length() <= short < input_ids.shape[1]", "cache.get_seq_length() < 0",
        ("models/test_cache_layer.py", "models/test_memory_decoding.py", "models/test_families.py"),
        "An upgraded Phi-3 generates another text than the original beyond its short context.", "d6e0198",
    ),
    Mutant(
        "end_padding_accepted", "models/causal_lm.py",
        "last = mask[:, -1] != 0", "last = mask[:, -1] == mask[:, -1]",
        ("models/test_memory_decoding.py", "models/test_generate.py"),
        "Prompts padded at the end are continued from padding, without an error.", "9ecab7d",
    ),
    Mutant(
        "padding_remembered", "models/causal_lm.py",
        "context = None if context is None else context.masked_fill(~seen, -1)", "pass",
        ("models/test_memory_decoding.py", "models/test_causal_lm.py", "models/test_generate.py"),
        "A cache or pointer head copies padding tokens.",
    ),
    Mutant(
        "old_upgrades_centred", "models/causal_lm.py",
        'options.setdefault("centred", False)', 'options.setdefault("centred", True)',
        ("models/test_configuration.py", "models/test_causal_lm.py", "upgrade/test_upgrade.py"),
        "A mixture that version 0.1 upgraded gives other probabilities when it is read.",
    ),
    Mutant(
        "lstm_reads_padding", "models/sampling.py",
        "groups[0 if padding else len(one.read),", "groups[0,",
        ("models/test_sampling.py", "models/test_awd_lstm.py"),
        "An LSTM cannot generate from prompts of different lengths.", "9ecab7d",
    ),
    Mutant(
        "labels_not_shifted", "models/causal_lm.py",
        "shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "shift_labels = labels",
        ("models/test_causal_lm.py", "models/test_trainer.py"),
        "Trainer teaches the model to repeat its input.",
    ),
    Mutant(
        "log_length_hidden_gradient", "models/normalisers.py",
        "scaled = factor * scores.masked_fill(hidden, 0.0)", "scaled = factor * scores",
        ("models/test_normalisers.py", "models/test_trained_normaliser.py"),
        "Training with attention scaled by log length gives NaN gradients at the first token.",
    ),
    Mutant(
        "temperature_nan", "models/normalisers.py",
        "not (temperature > 0 and math.isfinite(temperature))", "temperature <= 0",
        ("models/test_normalisers.py", "models/test_temperature.py"),
        "A model whose configuration has the attention temperature NaN gives NaN instead of an error.",
        "4e2f3c2",
    ),
    # theory
    Mutant(
        "rank_ceiling", "theory/rank.py",
        "ceiling = min(N - 1 if bias else N, V - 1)", "ceiling = min(N, V - 1)",
        ("theory/test_rank.py", "theory/test_statements.py"),
        "Beside a free bias a rank that is only the number of contexts is not recognised as such.",
    ),
    Mutant(
        "rank_of_rounding", "theory/rank.py",
        "made = ROUNDINGS[source] * UNIT_ROUNDOFF[source]",
        "made = ROUNDINGS[source] * UNIT_ROUNDOFF[torch.float64]",
        ("theory/test_rank.py",),
        "Log-probabilities in bfloat16 have full rank, because rounding counts as rank.",
    ),
    Mutant(
        "equal_rows_lowest_bias", "theory/argmax.py",
        "order = np.lexsort((-height, group))", "order = np.lexsort((height, group))",
        ("theory/test_argmax.py",),
        "Of tokens with equal vectors the one with the highest bias is called unreachable.",
    ),
    Mutant(
        "capacity_ignores_twins", "theory/capacity.py",
        "if twin[tokens].any():", "if len(tokens) < 0:",
        ("theory/test_capacity.py",),
        "A set with one of two equal tokens counts as free.",
    ),
    Mutant(
        "softmax_range_others", "theory/attention.py",
        "others = count.double() - 1", "others = count.double()",
        ("theory/test_attention.py",),
        "The bounds of attention weights do not hold.",
    ),
)  # fmt: skip
