#!/usr/bin/env bash
# SFT -> reward model -> PPO, on the arithmetic model: three jobs and two evaluations, on functions alone.
#
#     examples/pipeline.sh [DIR] [STEPS]        default: runs in ./pipeline, 5 steps each
#
# Each job starts from what the one before has made: model.path and reward.model name its run.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
out=${1:-pipeline} steps=${2:-5}
arithmetic=$here/arithmetic reward=$here/arithmetic/reward.py:compute_score
mkdir -p "$out" && out=$(cd "$out" && pwd)
rlhf() { "${RLHF_ORCHESTRATE:-rlhf-orchestrate}" "$@"; }

# Data: the sums on the way to the right answer as `completion` and `chosen`, a wrong last one as `rejected`.
"${PYTHON:-python3}" - "$arithmetic/train.jsonl" "$out" <<'PYTHON'
import json, sys
from itertools import accumulate
rows = [json.loads(line) for line in open(sys.argv[1])]
with open(f"{sys.argv[2]}/given.jsonl", "w") as file:
    for row in rows:
        terms = map(int, row["prompt"][0]["content"].removesuffix("=?").split("+"))
        *sums, answer = accumulate(reversed(list(terms)))
        right, wrong = (" ".join(f"{number:02d}" for number in (*sums, last)) for last in (answer, answer + 1))
        row |= {"completion": right, "chosen": right, "rejected": wrong}
        file.write(json.dumps(row) + "\n")
PYTHON

shared=(data.train="$out/given.jsonl" data.prompts_per_step=32 rollout.max_response_length=20 rollout.slots=128
        telemetry.tensorboard=false steps="$steps")
cat > "$out/job.toml" <<TOML
name = "pipeline"
steps = 1
[model]
path = "$arithmetic/model"
[data]
train = "$out/given.jsonl"
TOML

rlhf run "$out/job.toml" --run-dir "$out/sft" "${shared[@]}" name=sft recipe=sft train.lr=1e-3
rlhf run "$out/job.toml" --run-dir "$out/rm" "${shared[@]}" name=rm recipe=reward_model model.path="$out/sft" critic.lr=1e-3
rlhf run "$out/job.toml" --run-dir "$out/ppo" "${shared[@]}" name=ppo recipe=ppo model.path="$out/sft" \
    reward.score=model reward.model="$out/rm" critic.lr=1e-3 train.lr=1e-4 rollout.n=4
for model in "$arithmetic/model" "$out/sft" "$out/ppo"; do
    rlhf eval "$model" --data "$arithmetic/validation.jsonl" --reward "$reward" rollout.max_response_length=20
done
