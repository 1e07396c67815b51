#!/bin/bash
# experiment=lm by two ranks on one card, over gloo: ms a step, test loss and bytes of each strategy that is named.
#   bash tests/card/lm.sh STEPS ACCELERATOR STRATEGY...        each strategy may be a list of overrides: 'dct strategy.density=0.1'
# Each rank is a node of its own; see docs/evidence/quality.md.
steps=$1 accelerator=$2; shift 2
out=${OUT:-/tmp/lm}/lm
export PYTHONPATH=${SITE:+$SITE:}$PWD/src MASTER_ADDR=127.0.0.1 LOCAL_RANK=0 GLOO_SOCKET_IFNAME=lo PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} RANKS=2
number=0
for strategy in "$@"; do
    number=$((number + 1)); folder=$out/$number; mkdir -p "$folder"
    export MASTER_PORT=$((12000 + RANDOM % 2000))
    words="experiment=lm strategy=$strategy trainer.max_steps=$steps trainer.val_check_interval=$((steps / 2 > 0 ? steps / 2 : 1)) trainer.accelerator=$accelerator"
    words="$words trainer.devices=1 trainer.num_nodes=$RANKS +strategy.process_group_backend=gloo logger=none ~callbacks.progress_bar ~callbacks.checkpoint hydra.run.dir=$folder $MORE"
    begun=$SECONDS pids=
    for ((rank = RANKS - 1; rank >= 0; rank--)); do
        one=$words; [ $rank -gt 0 ] && one="$words hydra.output_subdir=null hydra.job.name=rank_$rank"
        NODE_RANK=$rank timeout -k 5 ${LIMIT_S:-150} python3 experiments/train.py $one > "$folder/rank_$rank.log" 2>&1 &
        pids="$pids $!"
    done
    # Where one rank fails, the other would wait for it.
    for pid in $pids; do wait -n || { kill $pids 2> /dev/null; break; }; done
    wait
    if [ -f "$folder/result.json" ]; then
        python3 - "$folder/result.json" "$strategy" $((SECONDS - begun)) << 'PYTHON'
import json, sys
r = json.load(open(sys.argv[1]))
ms = lambda name: "-" if r.get(name) is None else f"{r[name]:.2f}"
ratio = r["compression_ratio"]
print(f"lm, {sys.argv[2]}: {ms('milliseconds_per_step')} ms a step (compressing {ms('milliseconds_compressing')}, waiting {ms('milliseconds_waiting')}),",
      f"{r['steps']} steps, {r['world_size']} ranks, {'-' if ratio is None else f'{ratio:.1f}x'},",
      ", ".join(f"{k} {v:.4f}" for k, v in r["metrics"].items()), f"; {sys.argv[3]} s in all", flush=True)
PYTHON
        grep -ahoE "DCT takes [^,]*, [^,]*," "$folder/rank_0.log" | head -n 1
    else
        echo "lm, $strategy: FAILED after $((SECONDS - begun)) s"; tail -n 8 "$folder"/rank_*.log
    fi
done
