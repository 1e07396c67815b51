#!/bin/bash
# All that needs a card, in TOTAL seconds: correctness first, several at once, then times, then long runs with what is left.
# In the repository's root, after prepare.sh, whose .gpu travels along; logs and results go to $OUT. `all.sh long` makes long runs only.
TOTAL=${TOTAL:-585}
back=${OUT:-outputs/card}; export WORK=/tmp/out SITE=/tmp/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
L=$WORK/log; mkdir -p $L "$back"
bash tests/card/check.sh setup
export PYTHONPATH=/tmp/site:$PWD/src
pids=
for ranks in 4 8 16; do for number in 0 1; do
    OMP_NUM_THREADS=1 timeout 110 python3 tests/card/long_runs.py compile $ranks $number >> $L/compile 2>&1 & pids="$pids $!"
done; done
if [ "$1" != long ]; then
    (LIMIT_S=110 OUT= bash tests/card/check.sh resumed > $L/resumed-rows 2>&1) & pids="$pids $!"
    (LIMIT_S=80 OUT= bash tests/card/check.sh nccl > $L/nccl-rows 2>&1) & pids="$pids $!"
    (TESTS_ON=cuda timeout 130 python3 -m pytest -p no:warnings -p no:cacheprovider -o addopts= -q tests/compress/test_contract*.py > $L/contract 2>&1) & pids="$pids $!"
fi
wait $pids
tail -n 5 $L/compile; cat $L/*-rows 2> /dev/null; tail -n 4 $L/contract 2> /dev/null; echo "== compiled, resumed, NCCL, contract: $SECONDS s"
LIMIT_S=60 OUT= bash tests/card/check.sh graphs
timeout 90 python3 tests/card/long_runs.py time 2>&1 | tail -n 4; echo "== $SECONDS s"
if [ "$1" != long ]; then
    LIMIT_S=60 OUT= bash tests/card/check.sh profile ranks
    LIMIT_S=40 bash tests/card/lm.sh 1000 cuda ddp dct; echo "== times: $SECONDS s"
fi
tar -C /tmp -czf "$back/out.tgz" --exclude='*.ckpt' out
if grep -qs failed $L/contract || ! grep -q "bitwise as without *yes" $L/graphs; then
    echo "no long runs: they would show nothing"
elif [ -s /tmp/milliseconds ]; then
    left=$((TOTAL - SECONDS))
    OUT=$WORK timeout $left python3 tests/card/long_runs.py train $((left - 45)) > $L/long 2>&1; tail -n 2 $L/long | cut -c 1-900
    tar -C /tmp -czf "$back/out.tgz" --exclude='*.ckpt' out
fi
echo "== end: $SECONDS s"
