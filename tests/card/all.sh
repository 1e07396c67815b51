#!/bin/bash
# All that needs a card, in TOTAL seconds: correctness first, several at once, then times, then long runs with what is left.
# In the repository's root, after prepare.sh, whose .gpu travels along; logs and results go to $OUT.
TOTAL=${TOTAL:-585}
back=${OUT:-outputs/card}; export WORK=/tmp/out SITE=/tmp/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
L=$WORK/log; mkdir -p $L "$back"
bash tests/card/check.sh setup
export PYTHONPATH=/tmp/site:$PWD/src
pids=
for ranks in 4 8 16; do for number in 0 1 2 3; do
    OMP_NUM_THREADS=1 timeout 110 python3 tests/card/long_runs.py compile $ranks $number >> $L/compile 2>&1 & pids="$pids $!"
done; done
(LIMIT_S=110 OUT= bash tests/card/check.sh resumed > $L/resumed-rows 2>&1) & pids="$pids $!"
(LIMIT_S=80 OUT= bash tests/card/check.sh nccl > $L/nccl-rows 2>&1) & pids="$pids $!"
(TESTS_ON=cuda timeout 130 python3 -m pytest -p no:warnings -p no:cacheprovider -o addopts= -q tests/compress/test_contract*.py > $L/contract 2>&1) & pids="$pids $!"
wait $pids
tail -n 5 $L/compile; cat $L/resumed-rows $L/nccl-rows; tail -n 4 $L/contract; echo "== compiled, resumed, NCCL, contract: $SECONDS s"
LIMIT_S=60 OUT= bash tests/card/check.sh graphs
timeout 90 python3 tests/card/long_runs.py time 2>&1 | tail -n 4; echo "== $SECONDS s"
if [ -d .gpu/old/src ]; then PYTHONPATH=/tmp/site:$PWD/.gpu/old/src timeout 45 python3 tests/card/time_kernels.py before 2>&1 | tail -n 6; fi
timeout 60 python3 tests/card/time_kernels.py now gpt2 2>&1 | tail -n 12
LIMIT_S=40 bash tests/card/lm.sh 1000 cuda ddp dct; echo "== times: $SECONDS s"
tar -C /tmp -czf "$back/out.tgz" --exclude='*.ckpt' out
if grep -q failed $L/contract || ! grep -q "bitwise as without *yes" $L/graphs; then
    echo "no long runs: they would show nothing"
elif [ -s /tmp/milliseconds ]; then
    left=$((TOTAL - SECONDS))
    OUT=$WORK timeout $left python3 tests/card/long_runs.py train $((left - 45)) > $L/long 2>&1; tail -n 24 $L/long | cut -c 1-900
    tar -C /tmp -czf "$back/out.tgz" --exclude='*.ckpt' out
fi
echo "== end: $SECONDS s"
