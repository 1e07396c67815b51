#!/bin/bash
# What a machine with one card and no network lacks, into .gpu, which git ignores: bash tests/card/prepare.sh [SLIM_NCCL]
# SLIM_NCCL is a script that cuts NCCL's library down to one architecture (SCRIPT WHEEL OUT.so.gz 90); without it, NCCL is left out.
set -e
grep -qs '^/.gpu/' .git/info/exclude || echo /.gpu/ >> .git/info/exclude
mkdir -p .gpu/wheels
python3 -m pip wheel -q --no-deps -w .gpu/wheels hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3
if [ -n "$1" ]; then
    python3 -m pip download -q --no-deps -d /tmp/nccl nvidia-nccl-cu13==2.30.7
    python3 "$1" /tmp/nccl/*.whl .gpu/libnccl.so.2.gz 90
fi
du -sh .gpu
