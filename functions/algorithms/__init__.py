"""The algorithms of the field as pure functions over flat ragged tensors. No configuration object, no I/O, no state.

Layout. A batch of S sequences is flat: a per-token tensor is [N] over the response tokens of all sequences, beside
    segment: int64 [N]      sequence number of each token; the tokens of one sequence are adjacent and in order
    mask:    float32 [N]    1 = trained, 0 = not (tool output, a dropped sample); values under a 0 are never read
Per-sequence tensors are [S] (`scores`, `baselines`), `group: int64 [S]` names the prompt of each sequence. A padded
batch, a pack, a micro-batch and a rank's share are all the same thing: an index into [N]. `segment` keeps its numbers
when a batch is split (the numbers need not start at 0 nor ascend), only a sequence must stay whole.

Two kinds of function:
  whole batch   advantages, rewards, lagrangian, batch_totals: called once with every sequence of the batch
  any part      losses, rollout_correction: take the `Totals` of the whole batch, and what they return for the parts of
                any split ADDS UP to what they return for the whole; `combine_metrics` does the same for metrics
                (names ending in max/min by max/min, all others by sum). Where the gradient all-reduce averages
                over ranks (DDP, FSDP), multiply the loss by the number of ranks.
All arguments are keywords. A loss returns `(loss, metrics)`: loss a scalar with its graph, metrics detached tensors.

ragged        from_lengths(*, lengths: [S]) -> segment
              segment_sum(*, values: [N], segment, num_sequences: int) -> [S]
              segment_max(*, values: [N], segment, num_sequences: int, empty: float) -> [S]
              per_token(*, values: [S], segment) -> [N]
              to_padded(*, values: [N], segment, num_sequences: int, fill: float = 0.0) -> [S, T]
              to_flat(*, padded: [S, T], segment) -> [N]
              keep_sequences(*, mask, segment, keep: bool [S]) -> mask
aggregation   Totals(tokens: int, sequences: int, empty: int = 0, norm: float | None = None); ranks' totals add with +
              batch_totals(*, mask, segment, num_sequences: int, norm: float | None = None) -> Totals
              aggregate(*, losses: [N], mask, segment, totals, aggregation: str) -> scalar
              AGGREGATIONS = token-mean | token-sum | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm
rewards       scale_scores(*, scores: [S], shift=0.0, scale=1.0, low=None, high=None) -> [S]   clip(scale * (s - shift))
              overlong_penalty(*, lengths: [S], max_length: int, buffer: int, factor=1.0) -> [S]    (add to the scores)
              token_rewards(*, scores, segment, mask, kl: [N] | None = None, kl_coef=0.0) -> [N]
              penalized_scores(*, scores, segment, mask, kl: [N], kl_coef: float) -> [S]
kl            kl_estimate(*, logprobs, reference_logprobs, kind: str) -> [N]
              KL_KINDS = k1 | k2 | k3 | abs | k1+ | k3+ | abs+      ("+": value of the name, gradient of k2)
              kl_loss(*, logprobs, reference_logprobs, segment, mask, totals, aggregation, kind, coef)
              -> (loss, metrics)
              reward_kl(*, logprobs, reference_logprobs, segment, mask, kind) -> (kl: [N], mean: float)
              adaptive_kl_coef(*, coef, kl: float, target, horizon, sequences: int) -> float      (fixed: keep coef)
advantages    each -> Estimate(advantages: [N], returns: [N], metrics)
              grpo(*, scores, group, segment, mask, epsilon=1e-6)
              dr_grpo(*, scores, group, segment, mask)                          without the division by the std
              rloo(*, scores, group, segment, mask)
              remax(*, rewards: [N], baselines: [S], segment, mask)
              reinforce_plus_plus(*, rewards: [N], segment, mask, gamma=1.0)
              reinforce_plus_plus_baseline(*, scores, group, segment, mask)
              gae(*, rewards: [N], values: [N], segment, mask, gamma=1.0, lam=1.0, whiten_advantages=True)
              distillation(*, old_logprobs, reference_logprobs, segment, mask)            on-policy, per token
              ADVANTAGES = {grpo, dr_grpo, rloo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, gae,
                            distillation}: name -> function
              whiten(*, values: [N], mask, shift_mean=True) -> [N]
groups        informative_groups(*, scores, group) -> bool [S]     False where all scores of the group are equal (DAPO)
policy_losses each (*, logprobs, old_logprobs, advantages, segment, mask, totals, aggregation, weights: [N] | None =
              None, ...) -> (loss, metrics); `weights` is Correction.weights
              vanilla(..., clip_low=0.2, clip_high=0.2, dual_clip: float | None = 3.0)
              gspo(..., clip_low=3e-4, clip_high=4e-4)
              cispo(..., clip_low=1.0, clip_high=4.0)
              importance_sampling(...)                             no clip; the loss of on-policy distillation
              POLICY_LOSSES = {vanilla, gspo, cispo, importance_sampling}: name -> function
              On-policy first pass: old_logprobs = logprobs.detach().
entropy       entropy_loss(*, entropy: [N], segment, mask, totals, aggregation, coef) -> (-coef * mean, metrics)
value_loss    value_loss(*, values, old_values, returns, segment, mask, totals, aggregation, clip: float | None = 0.5)
              -> (loss, metrics)
correction    rollout_correction(*, logprobs, rollout_logprobs, segment, mask, totals, level: "token" | "sequence" |
              None = "token", cap=2.0, floor: float | None = None, reject: Mapping[str, Bound] | None = None)
              -> Correction(weights: [N], mask: [N], metrics)
              effective_sample_size(metrics) -> float, of the combined metrics
              `logprobs` are the trainer's for the weights that sampled. `Correction.mask` has the rejected tokens out:
              train with it; keep the totals of the mask before it (rejected tokens count as zero loss) or take new
              ones of the mask after it (verl does).
lagrangian    update_multiplier(*, multiplier: float, mean_cost: float, limit: float, lr: float, maximum: float)
              -> float
              mix_advantages(*, rewards: [N], costs: [N], multiplier: float) -> [N]
logprobs      token_logprobs(*, hidden: [N, H], weight: [V, H], targets: int64 [N], bias: [V] | None = None,
              temperature=1.0, softcap: float | None = None, chunk_tokens=256) -> (logprobs: [N], entropy: [N])
              both differentiable, float32; hidden[i] is the state that predicts targets[i]
metrics       combine_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]
              batch_metrics(*, scores, mask, segment, advantages, returns, rewards=None, values=None)
              -> dict[str, float]                         critic/*/{mean,max,min}, critic/vf_explained_var; whole batch
registry      call_with(function, available: Mapping[str, object], options: Mapping[str, object] | None = None)
              -> result of the function, called with those of `available` it names and with all `options`; ValueError
              for a missing argument or an unknown option: `call_with(ADVANTAGES[name], tensors, {"gamma": 0.99})`

Bad input (docs/algorithms.md has the table): non-finite values at trained tokens or in scores raise ValueError naming
the sequence; an empty or all-masked sequence trains nothing, is in no denominator, and still counts in its group's
baseline; a group of one has advantage 0 and is counted; log-ratios are clamped to +-20 and counted.
"""
