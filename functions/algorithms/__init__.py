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

Bad input (docs/algorithms.md has the table): non-finite values at trained tokens or in scores raise ValueError naming
the sequence; an empty or all-masked sequence trains nothing, is in no denominator, and still counts in its group's
baseline; a group of one has advantage 0 and is counted; log-ratios are clamped to +-20 and counted.
"""
