"""Decides each step: how many replicas, who generates what, when to cut a tail, what to keep warm. Pure functions.

    static.py     replicas as configured
    adaptive.py   learns (lengths.py, learned.py: latency.py), then
        dealings.py, assignment.py, prefixes.py
                                       which samples together, for each number of replicas
        rollout.py, tail.py, cuts.py   when each sample is finished, and what a cut of the tail makes of it
        generation.py, then            all of these ways at once:
            beside.py, fusion.py       reward, reference and critic
            ranks.py, training.py      train functions
            room.py, prewarm.py        what finds room in a shared pool; what is started ahead
        episodes.py                    how long environments answer, and who stays meanwhile
        outline.py, scaling.py         whole steps, their time and cost; which one the goal likes best

An example (tests/planner/test_example.py). Two prompts with two samples each; of either prompt one sample has had 30
tokens and one 90. A decode step takes 1 s, a replica has 2 slots, and there may be 2 replicas at 1 $ a second.

    one replica    0: 90, 1: 30, then 2: 30 in the slot of 1, 3: 90 in that of 2   ends at 150 s           150 $
    two, no cut    0: 90, 1: 30 | 2: 30, 3: 90                                     both end at 90 s         180 $
    two, a cut     at 30 s samples 1 and 2 are done; 0 and 3 go on together,
                   60 tokens each, on one of the replicas: it ends at 90 s         the other at 30 s        120 $

The cut costs no time and a third less: it is the least T x C (90 x 120 against 150 x 150), which the knee asks for.
"""
