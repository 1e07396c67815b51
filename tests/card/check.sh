#!/bin/bash
# What needs a card, part by part, with a limit on each:  bash tests/card/check.sh setup|resumed|profile|ranks|lm|graphs|suite|nccl ...
# Run it in the repository's root; whole logs come back in $OUT/out.tgz. Each part is tried even if one before it fails.
back=${OUT:-}  # few files come back, so all are packed into one after each part
export OUT=${WORK:-/tmp/out} SITE=/tmp/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GLOO_SOCKET_IFNAME=lo
export PYTHONPATH=$SITE:$PWD/src
mkdir -p "$OUT/log"
here=.gpu  # carried: see prepare.sh
rows() { grep -aE "^(device, torch|NCCL|gloo, |nccl, |two ranks|resumed|replicas as graphs|100 M|GPT-2|1,000 M|[a-z_]+ took|the suite)" "$1" || tail -n 15 "$1"; }

site() { [ -d $SITE/hydra ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $SITE $here/wheels/*.whl 2>&1 | grep -v WARNING; }

setup() {
    site
    timeout 90 python3 -c '
import hydra, omegaconf, lightning, rich, torch, triton, sympy, tokenizers, numba, torchmetrics
import lightning_dct
print("torch", torch.__version__, "lightning", lightning.__version__, "sympy", sympy.__version__, "numba", numba.__version__, torch.cuda.get_device_name(0))'
}

part_of() {  # PART NAME: of tests/gpu_check.py, as make gpu
    TESTS_ON=cuda timeout -k 5 ${LIMIT_S:-200} python3 tests/gpu_check.py --only $1 --output "$OUT/$2.json" > "$OUT/log/$2" 2>&1 || echo "$2: exit status $?"
    rows "$OUT/log/$2"
}

resumed() { part_of resumed_run resumed; }

profile() { part_of exchange_profile profile; }

ranks() { part_of two_ranks ranks; }  # over gloo

quit_mps() {
    [ -n "$CUDA_MPS_PIPE_DIRECTORY" ] || return
    echo quit | timeout 20 nvidia-cuda-mps-control || kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

start_mps() {  # a daemon of this script's own, so that both ranks' kernels run at once; the card's settings stay as they are
    command -v nvidia-cuda-mps-control > /dev/null || { echo "NCCL: there is no MPS"; return 1; }
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
    mkdir -p /tmp/mps /tmp/mps-log
    timeout 20 nvidia-cuda-mps-control -d && return
    quit_mps; return 1
}

probe() {  # WORDS: with these settings, do two ranks talk within 40 s?
    export PROBE_STORE=$(mktemp -u /tmp/probe.XXXXXX)
    local log=$OUT/log/probe-$1; shift
    env "$@" timeout -k 2 40 python3 tests/card/probe.py 1 > "$log-1" 2>&1 & local other=$!
    env "$@" timeout -k 2 40 python3 tests/card/probe.py 0 > "$log-0" 2>&1; local first=$?
    wait $other; local second=$?
    if [ $first = 0 ] && [ $second = 0 ]; then echo "NCCL probe ${log##*-}: $(grep -a "two ranks" "$log-0")"; return 0; fi
    echo "NCCL probe ${log##*-}: exit $first and $second: $(grep -ahE "NCCL WARN|Error" "$log-0" "$log-1" | tail -n 2 | cut -c 1-300)"; return 1
}

nccl() {  # the first of four ways that works
    gunzip -c $here/libnccl.so.2.gz > /tmp/libnccl.so.2
    local common="LD_PRELOAD=/tmp/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-4} NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=${NCCL_DEBUG:-WARN}"
    # By default torch waits minutes before it ends a process whose collective hangs.
    common="$common TORCH_NCCL_DUMP_ON_TIMEOUT=0 TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60"
    local found=
    for way in mps mps-shm plain plain-shm; do
        case $way in mps*) [ -n "$CUDA_MPS_PIPE_DIRECTORY" ] || start_mps || continue ;; *) quit_mps ;; esac
        case $way in *-shm) more=NCCL_P2P_DISABLE=1 ;; *) more= ;; esac
        if probe "$(echo $way | tr - _)" $common $more; then found=1; break; fi
    done
    if [ -n "$found" ]; then
        env $common $more TESTS_ON=${ON:-cuda} timeout -k 5 ${LIMIT_S:-240} python3 tests/gpu_check.py --only two_ranks_over_nccl --output "$OUT/nccl.json" > "$OUT/log/nccl" 2>&1 || echo "nccl: exit status $?"
        rows "$OUT/log/nccl"; grep -a "NCCL WARN" "$OUT/log/nccl" | sort -u | head -n 8 | cut -c 1-300
    else
        echo "NCCL: no way works; $OUT/log/probe-* say more"
    fi
    quit_mps
}

lm() { site; LIMIT_S=${LIMIT_S:-120} bash tests/card/lm.sh ${STEPS:-1000} ${ON:-cuda} ddp dct ddp dct; }

graphs() {  # replicas as CUDA graphs
    site
    part_of graphs_of_replicas graphs
}

suite() { part_of cuda_tests suite; }  # those of the tests that run on a card

for part in "$@"; do
    begun=$SECONDS; echo "== $part"
    $part
    echo "== $part took $((SECONDS - begun)) s"
    [ -n "$back" ] && tar -C "$(dirname "$OUT")" -czf "$back/out.tgz" --exclude='*.ckpt' "$(basename "$OUT")"
done
